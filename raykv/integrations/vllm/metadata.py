"""What the scheduler's side orders and the worker's side carries out, one `StepOrders` a step.

Chunks travel as names (the engine's hash of the last block of each), not as keys: a key holds the namespace of one
rank, and every worker derives the keys of its own.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from raykv.protocol.namespace import Namespace
from raykv.types import Match

Rank = tuple[int, int]
"""(pipeline rank, tensor rank) of a worker, as vLLM names them in its handshake."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What varies by request within one namespace.

    Attributes:
        lora: Adapter, by name and content; empty for none.
        salt: The tenant's salt; empty for none. Never logged.
    """

    lora: str = ""
    salt: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Bring consecutive chunks of one request into its blocks.

    Attributes:
        request_id: Whose blocks these are. The engine keeps them untouched until the load is reported finished.
        scope: Under which keys.
        names: Of the chunks, first to last.
        blocks: For each chunk the ids of its blocks in order; None for a block that must not be written, because the
            engine has it already and other requests may be reading it.
        matches: What each rank's lookup, or hand-off ticket, found; aligned with `names`.
    """

    request_id: str
    scope: Scope
    names: list[bytes]
    blocks: list[list[int | None]]
    matches: dict[Rank, Match]


@dataclass(frozen=True, slots=True)
class Save:
    """Store consecutive chunks of one request, which are computed by the end of this step.

    Attributes:
        scope: Under which keys.
        names: Of the chunks, first to last.
        blocks: For each chunk the ids of its blocks in order.
        parent: Name of the chunk before the first one; None at the start of a prompt.
        depth: Place of the first chunk in its chain.
        cached: The engine found these in its own cache. Most are stored somewhere, not always on this node, so it is
            asked first; but some may have been evicted since, or computed while there was no node.
    """

    scope: Scope
    names: list[bytes]
    blocks: list[list[int]]
    parent: bytes | None
    depth: int
    cached: bool


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """The orders of one step.

    Attributes:
        loads: Taken out by the worker as it starts them.
        saves: Done when the step's forward pass is over.
        computes: Whether the step computes anything. One that does not is spun through while loads are in flight.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    computes: bool = True


@dataclass(frozen=True, slots=True)
class Introduction(KVConnectorHandshakeMetadata):
    """A worker tells the scheduler under which namespace it stores.

    Only a worker sees the tensors and the attention kernel, so only it can know; telling beats deriving it twice.
    """

    namespace: Namespace
