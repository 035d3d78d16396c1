"""The connector's settings."""

from typing import Annotated, Literal

from pydantic import Field

from raykv.config import Model
from raykv.protocol.hints import MAX_TTL_S


class ConnectorConfig(Model):
    """The fields of `kv_connector_extra_config`.

    Attributes:
        address: The raykv node to use: "unix:/path" on this host, "host:port" elsewhere. None means RAYKV_ADDRESS, or
            else the node that Ray started on this host.
        chunk_blocks: Number of the engine's blocks in one chunk.
        store_decode: Also store chunks that fill up while decoding, not only those of prompts.
        lookup_timeout_s: A lookup that takes longer counts as a miss. Only the request waits, not the engine.
        load_policy: "sooner": load a stored prefix if this is expected to end sooner than its computation, by the
            measured rates of the engine and of the path to the holder. "always": load every prefix that is stored.
        load_timeout_s: Chunks that arrive later than this are recomputed. Only the request waits, not the engine.
        store_timeout_s: Saves of a step wait at most this long for slots. Chunks that get no slot are skipped. A step
            also waits at most this long until the saves of ended or preempted requests begin. If the node is on another
            host, set this to seconds, because saves then cross the network.
        load_threads: At most this many loads run at once. Others wait in a queue, and their timeout includes this wait.
        revision: Text that identifies the weights. None means a digest of local files, or the commit of a hub model.
        store_tp_size: Engines of different tensor parallel sizes share KV if all have the same `store_tp_size`: the
            largest tensor_parallel_size of these engines, a multiple of each. None: this engine's size.
        max_hint_s: Hints of requests last at most this long; longer times are reduced. 0: hints are not read.
    """

    address: str | None = None
    chunk_blocks: Annotated[int, Field(ge=1, le=1024)] = 1
    store_decode: bool = True
    lookup_timeout_s: Annotated[float, Field(gt=0)] = 0.2
    load_policy: Literal["sooner", "always"] = "sooner"
    load_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    store_timeout_s: Annotated[float, Field(gt=0)] = 0.003
    load_threads: Annotated[int, Field(ge=1, le=64)] = 4
    store_tp_size: Annotated[int, Field(ge=1)] | None = None
    max_hint_s: Annotated[float, Field(ge=0, le=MAX_TTL_S)] = 86_400.0
    revision: Annotated[str, Field(min_length=1)] | None = None


class TierConfig(Model):
    """The fields of raykv's entry in `secondary_tiers`, besides those that vLLM reads itself.

    Attributes:
        address: As in `ConnectorConfig`.
        lookup_timeout_s: A lookup that takes longer counts as a miss. Only the request waits, not the engine.
        load_timeout_s: Chunks that arrive later than this are recomputed. Only the request waits, not the engine.
        store_timeout_s: Chunks that are not stored within this time are skipped. Until then, vLLM's host memory holds
            them and cannot evict them.
        load_threads: At most this many loads run at once. Others wait in a queue, and their timeout includes this wait.
        revision: As in `ConnectorConfig`.
    """

    address: str | None = None
    lookup_timeout_s: Annotated[float, Field(gt=0)] = 0.2
    load_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    store_timeout_s: Annotated[float, Field(gt=0)] = 1.0
    load_threads: Annotated[int, Field(ge=1, le=64)] = 4
    revision: Annotated[str, Field(min_length=1)] | None = None
