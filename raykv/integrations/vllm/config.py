"""The connector's settings."""

from typing import Annotated, Literal

from pydantic import Field

from raykv.config import Model
from raykv.protocol.hints import MAX_TTL_S


class ConnectorConfig(Model):
    """The fields of `kv_connector_extra_config`.

    Attributes:
        address: The raykv node to use: "unix:/path" on this host, "host:port" elsewhere. None: the value of the
            environment variable RAYKV_ADDRESS. If the variable is not set: the node that Ray started on this host.
        chunk_blocks: Number of the engine's blocks in one chunk.
        store_decode: Whether to store chunks that fill up during decoding. Chunks of prompts are always stored.
        lookup_timeout_s: A lookup that takes longer counts as a miss. Only the request waits, not the engine.
        load_policy: "sooner": load a stored prefix if the load is expected to end before the engine could compute the
            prefix. The estimates use measured rates of the engine and of the loads. "always": load every stored prefix.
        load_timeout_s: Chunks that arrive later than this are recomputed. Only the request waits, not the engine.
        store_timeout_s: Before vLLM reuses the blocks of a save, vLLM waits at most this long for the save to begin, or
            to get slots in the memory of this host's node. Chunks that get no slot are not stored.
        save_timeout_s: While no step needs its blocks, a save waits at most this long for slots. If the chunks go to
            other nodes, each message may take this long. The engine goes on meanwhile.
        load_threads: At most this many loads run at once. Other loads wait in a queue. `load_timeout_s` includes this
            wait.
        revision: Text that identifies the weights. None: the commit of a model from the hub, or a digest of a local
            model's files.
        store_tp_size: Number of tensor ranks under which KV is stored. Engines of different tensor_parallel_size share
            KV if each sets this field to the largest of their sizes. It must be a multiple of every size. None: this
            engine's tensor_parallel_size.
        hand_off_timeout_s: If a prefill engine works on the same request, the request waits at most this long for the
            first chunk, and for each further chunk. After that, this engine computes what is missing.
        request_trail: Whether to send a sentence about each request to the node, for `raykv why --request`.
        max_hint_s: A hint of a request lasts at most this long. Longer times are cut to this limit. 0: hints are not
            read.
    """

    address: str | None = None
    chunk_blocks: Annotated[int, Field(ge=1, le=1024)] = 1
    store_decode: bool = True
    lookup_timeout_s: Annotated[float, Field(gt=0)] = 0.2
    load_policy: Literal["sooner", "always"] = "sooner"
    load_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    store_timeout_s: Annotated[float, Field(gt=0)] = 0.003
    save_timeout_s: Annotated[float, Field(gt=0)] = 1.0
    load_threads: Annotated[int, Field(ge=1, le=64)] = 4
    store_tp_size: Annotated[int, Field(ge=1)] | None = None
    hand_off_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    request_trail: bool = True
    max_hint_s: Annotated[float, Field(ge=0, le=MAX_TTL_S)] = 86_400.0
    revision: Annotated[str, Field(min_length=1)] | None = None


class TierConfig(Model):
    """The fields of raykv's entry in `secondary_tiers`, except those that vLLM itself reads.

    Attributes:
        address: As in `ConnectorConfig`.
        lookup_timeout_s: A lookup that takes longer counts as a miss. Only the request waits, not the engine.
        load_timeout_s: Chunks that arrive later than this are recomputed. Only the request waits, not the engine.
        store_timeout_s: Chunks that are not stored within this time are skipped. Until a chunk is stored or skipped,
            vLLM cannot evict it from its host memory.
        load_threads: At most this many loads run at once. Other loads wait in a queue. `load_timeout_s` includes this
            wait.
        revision: As in `ConnectorConfig`.
    """

    address: str | None = None
    lookup_timeout_s: Annotated[float, Field(gt=0)] = 0.2
    load_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    store_timeout_s: Annotated[float, Field(gt=0)] = 1.0
    load_threads: Annotated[int, Field(ge=1, le=64)] = 4
    revision: Annotated[str, Field(min_length=1)] | None = None
