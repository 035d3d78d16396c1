"""The connector's settings, as `kv_connector_extra_config` holds them."""

from typing import Annotated

from pydantic import Field

from raykv.config import Model


class ConnectorConfig(Model):
    """What an engine may choose.

    Attributes:
        address: The raykv node to talk to: "unix:/path" on this host, "host:port" elsewhere. None: RAYKV_ADDRESS, else
            the node that Ray started here.
        chunk_blocks: Blocks of the engine in one chunk.
        store_decode: Also store chunks that fill up while decoding, not only those of prompts.
        lookup_timeout_s: A lookup that takes longer is a miss. The engine's scheduler waits for it.
        load_timeout_s: What has not arrived by then is recomputed. The request waits for it, the engine does not.
        store_timeout_s: A node that does not take a save in this time loses it. The engine's step waits for it.
        load_threads: Loads in flight at once; more wait in line, within their timeout.
        revision: Which weights these are. None: a digest of the files, or the commit of the hub. Needed only where
            neither can be known.
    """

    address: str | None = None
    chunk_blocks: Annotated[int, Field(ge=1, le=1024)] = 1
    store_decode: bool = True
    lookup_timeout_s: Annotated[float, Field(gt=0)] = 0.2
    load_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    store_timeout_s: Annotated[float, Field(gt=0)] = 1.0
    load_threads: Annotated[int, Field(ge=1, le=64)] = 4
    revision: Annotated[str, Field(min_length=1)] | None = None
