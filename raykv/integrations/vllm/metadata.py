"""Messages between the scheduler's side and the worker's side: `StepOrders` in each step, `WorkerReport` after it.

The name of a chunk is the engine's hash of all tokens up to the chunk's end. If there are several groups, a suffix for
the group follows. Orders contain names and no keys, because a key depends on the rank. Each worker derives its own keys
from the names.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from raykv.integrations.vllm.epochs import Statement
from raykv.protocol.namespace import Namespace
from raykv.types import Hints, NodeId, Path

Rank = tuple[int, int]
"""(Pipeline rank, tensor rank) under which KV is stored, as in its namespace."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a namespace that varies while an engine runs.

    Attributes:
        lora: The request's adapter: name and content.
        salt: The tenant's salt.
        epoch: If not empty, it replaces the revision of the namespace: see `epochs`.
    """

    lora: str = ""
    salt: str = field(default="", repr=False)  # never logged
    epoch: str = ""


@dataclass(frozen=True, slots=True)
class LoadedChunks:
    """The chunks of one KV cache group in a `Load`, in order.

    Attributes:
        group: Index of the group.
        names: Names of the chunks.
        blocks: Block ids of each chunk, in order. None: a block that the engine has already or does not need. The load
            must not write this block, because other requests may read it.
        holders: For each rank, the node from which to read each chunk.
    """

    group: int
    names: list[bytes]
    blocks: list[list[int | None]]
    holders: dict[Rank, list[NodeId]]


@dataclass(frozen=True, slots=True)
class Load:
    """An order to load chunks of one request into its blocks.

    Attributes:
        request_id: The request. The engine does not use the request's blocks until the load is reported as finished.
        parts: The chunks of each group. A model with a single group of full attention can use the chunks before the
            first missing one. Other models can use a load only if all chunks arrive.
        hand_off: The id of the hand-off, if a prefill engine still computes some of the chunks. Otherwise empty.
        is_probe: Whether the load only measures the path. Then it writes no block, and `request_id` is not the id of a
            request.
    """

    request_id: str
    scope: Scope
    parts: list[LoadedChunks]
    hand_off: str = ""
    is_probe: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """An order to store consecutive chunks of one request and group. The chunks are complete at the end of this step.

    Attributes:
        group: Index of the KV cache group.
        names: Names of the chunks, first to last.
        blocks: Block ids of each chunk, in order.
        parent: Name of the chunk before the first one; None at the start of a prompt, and for states.
        depth: Number of chunks before the first one.
        cached: Whether the engine found these chunks in its own cache. If so, raykv probably stores them already, so
            the worker looks them up first.
        hints: Expiry and priority; None if the namespace's config decides.
        number: Identifies the save in the workers' reports (`raykv.integrations.vllm.events`). 0: no report is needed.
    """

    scope: Scope
    group: int
    names: list[bytes]
    blocks: list[list[int]]
    parent: bytes | None
    depth: int
    cached: bool
    hints: Hints | None = None
    number: int = 0


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """The orders of one step.

    Attributes:
        loads: Loads to start.
        saves: Saves to begin after the step's forward pass.
        reused: Ids of blocks that were in earlier saves, and that vLLM has given to other requests. This step may
            overwrite these blocks.
        idle_s: How long a worker may wait for a load to end. 0: the step computes something. Otherwise it is an idle
            step, which the engine runs while loads are in flight.
        epoch: The current epoch: see `epochs`. None: unknown, because the orders of this step were lost.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    reused: set[int] = field(default_factory=set)
    idle_s: float = 0.0
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerNamespaces(KVConnectorHandshakeMetadata):
    """The handshake of a worker, for the scheduler's side, which cannot know the worker's layout and kernel.

    Attributes:
        namespaces: Namespace of each rank whose KV the worker has. Workers with the same bytes share a namespace.
        chunk_nbytes: Maps the index of each group to the bytes of one chunk, summed over the worker's ranks.
    """

    namespaces: dict[Rank, Namespace]
    chunk_nbytes: dict[int, int]


class LoadTimes(NamedTuple):
    """When a load began and ended, and what arrived.

    Attributes:
        nbytes: Number of bytes.
        sources: Number of chunks by holder and path, in the group with the most chunks.
    """

    began_s: float
    ended_s: float
    nbytes: int
    sources: tuple[tuple[NodeId, Path, int], ...] = ()

    def shifted(self, seconds: float) -> "LoadTimes":
        """Return the same load with `seconds` added to its times, which converts them to another clock."""
        return self._replace(began_s=self.began_s + seconds, ended_s=self.ended_s + seconds)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler after a step.

    Attributes:
        now_s: Time of the report by the worker's clock.
        loads: The loads and probes that have ended, by request id, with times of the worker's clock.
        stored: Maps the `Save.number` of each ended save to a list with one set for each rank. The set contains the
            depths (see `Save.depth`) of the chunks that are stored.
        stated: Calls of `state_revision` since the last report.
    """

    now_s: float
    loads: dict[str, LoadTimes]
    stored: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    stated: list[Statement] = field(default_factory=list)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "WorkerReport":
        """Combine the reports of two workers. If both report the same load, the longer time counts."""
        assert isinstance(other, WorkerReport)
        self.stated += other.stated
        lag_s = self.now_s - other.now_s
        for request_id, theirs in other.loads.items():
            mine = self.loads.get(request_id)
            if mine is None or mine.ended_s - mine.began_s < theirs.ended_s - theirs.began_s:
                self.loads[request_id] = theirs.shifted(lag_s)
        for number, chunks in other.stored.items():
            self.stored.setdefault(number, []).extend(chunks)
        return self
