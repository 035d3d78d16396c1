"""The orders that the scheduler's side sends to the worker's side in each step: one `StepOrders`.

A chunk's name is the engine's hash of its last block. Orders do not contain keys, because a key depends on the rank:
each worker derives its own keys from the names.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from raykv.protocol.namespace import Namespace
from raykv.types import Match

Rank = tuple[int, int]
"""A worker's (pipeline rank, tensor rank), as in vLLM's handshake."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a namespace that varies by request: the adapter (name and content) and the tenant's salt."""

    lora: str = ""
    salt: str = field(default="", repr=False)  # never logged


@dataclass(frozen=True, slots=True)
class Load:
    """An order to load consecutive chunks of one request into its blocks.

    Attributes:
        request_id: The request. The engine does not use the request's blocks until the load is reported as finished.
        names: Names of the chunks, first to last.
        blocks: Block ids of each chunk, in order. None stands for a block that the engine already has. It must not be
            written, because other requests may read it.
        matches: For each rank the holders of the chunks, from a lookup or from the prefill engine's ticket. The first
            holder belongs to the first chunk in `names`. There may be more holders than names.
    """

    request_id: str
    scope: Scope
    names: list[bytes]
    blocks: list[list[int | None]]
    matches: dict[Rank, Match]


@dataclass(frozen=True, slots=True)
class Save:
    """An order to store consecutive chunks of one request. The engine has computed them at the end of this step.

    Attributes:
        request_id: The request. Its blocks keep these chunks until the request is in `StepOrders.released`.
        names: Names of the chunks, first to last.
        blocks: Block ids of each chunk, in order.
        parent: Name of the chunk before the first one; None at the start of a prompt.
        depth: Number of chunks before the first one.
        cached: Whether the engine found these chunks in its own cache. Most of them are stored already, so the worker
            looks them up first.
    """

    request_id: str
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
        loads: Loads to start.
        saves: Saves to begin after the step's forward pass.
        released: Requests that ended or were preempted. This step may overwrite their blocks.
        computes: Whether the step computes anything. The engine runs idle steps while loads are in flight.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    computes: bool = True


@dataclass(frozen=True, slots=True)
class WorkerNamespace(KVConnectorHandshakeMetadata):
    """The handshake of a worker: its namespace, for the scheduler. Only a worker knows its layout and kernel."""

    namespace: Namespace
