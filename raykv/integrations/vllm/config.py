"""The connector's settings."""

from typing import Annotated

from pydantic import Field

from raykv.config import Model


class ConnectorConfig(Model):
    """The fields of `kv_connector_extra_config`.

    Attributes:
        address: The raykv node to use: "unix:/path" on this host, "host:port" elsewhere. None: RAYKV_ADDRESS, else
            the node that Ray started on this host.
        chunk_blocks: Blocks of the engine in one chunk.
        store_decode: Also store chunks that fill up while decoding, not only those of prompts.
        lookup_timeout_s: A lookup that takes longer is a miss. The engine's scheduler waits for it.
        load_timeout_s: What has not arrived by then is recomputed. The request waits for it, the engine does not.
        store_timeout_s: The longest that one step of the engine waits for its chunks to be stored; chunks without a
            slot by then are skipped. With no node on the engine's host, stores cross the network: set it to seconds.
        load_threads: Loads in flight at once. Further loads wait in a queue, and their timeout includes this wait.
        revision: Which weights these are. None: a digest of the files, or the commit of the hub. Needed only where
            neither is known.
    """

    address: str | None = None
    chunk_blocks: Annotated[int, Field(ge=1, le=1024)] = 1
    store_decode: bool = True
    lookup_timeout_s: Annotated[float, Field(gt=0)] = 0.2
    load_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    store_timeout_s: Annotated[float, Field(gt=0)] = 0.003
    load_threads: Annotated[int, Field(ge=1, le=64)] = 4
    revision: Annotated[str, Field(min_length=1)] | None = None
