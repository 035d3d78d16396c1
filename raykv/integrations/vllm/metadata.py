"""What the scheduler's side orders and the worker's side does: one `StepOrders` a step.

Orders name chunks by the engine's hash of the last block of each, not by key: a key holds the namespace of one rank,
and each worker derives its own.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from raykv.protocol.namespace import Namespace
from raykv.types import Match

Rank = tuple[int, int]
"""(pipeline rank, tensor rank) of a worker, as vLLM's handshake names them."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a namespace that varies by request: the adapter, by name and content, and the tenant's salt."""

    lora: str = ""
    salt: str = field(default="", repr=False)  # never logged


@dataclass(frozen=True, slots=True)
class Load:
    """Load consecutive chunks of one request into its blocks.

    Attributes:
        request_id: The request. The engine leaves its blocks alone until the load is reported as finished.
        names: Names of the chunks, first to last.
        blocks: Block ids of each chunk, in order. None: the engine has this block already, and other requests may read
            it, so it must not be written.
        matches: What the lookup, or the hand-off ticket, found for each rank; aligned with `names`.
    """

    request_id: str
    scope: Scope
    names: list[bytes]
    blocks: list[list[int | None]]
    matches: dict[Rank, Match]


@dataclass(frozen=True, slots=True)
class Save:
    """Store consecutive chunks of one request. They are computed by the end of this step.

    Attributes:
        names: Names of the chunks, first to last.
        blocks: Block ids of each chunk, in order.
        parent: Name of the chunk before the first one; None at the start of a prompt.
        depth: Place of the first chunk in its chain.
        cached: The engine found these in its own cache. Most are stored on some node, so the worker looks them up
            first; some may be evicted by now, or were computed while there was no node.
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
        loads: The worker empties this list when it starts them.
        saves: Carried out after the step's forward pass.
        computes: Whether the step computes anything. The engine spins through idle steps while loads are in flight.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    computes: bool = True


@dataclass(frozen=True, slots=True)
class WorkerNamespace(KVConnectorHandshakeMetadata):
    """Handshake: the namespace under which a worker stores. Only a worker sees the tensors and the attention kernel."""

    namespace: Namespace
