"""A simulated cluster: the real directory, nodes with engines, faults, and what is measured."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final, Literal

import numpy as np

from raykv.membership.membership import HOT_NBYTES_PER_S, Membership
from raykv.protocol.placement import Member, View
from raykv.simulation.engine import Engine
from raykv.simulation.memory import Memory
from raykv.simulation.network import Network
from raykv.simulation.node import SimNode, World
from raykv.simulation.workload import Request, Workload
from raykv.types import NodeId

MEMBER_TIMEOUT_S: Final = 5.0
CAPACITY: Final = 1 << 16
START_S: Final = 0.1
"""The virtual time at which a cluster is ready: the owners know what is stored."""


class Cluster:
    """A simulated cluster that serves a workload.

    It starts with all nodes in the view and the workload's `stored` runs in memory, but with an empty directory, as
    after a restart of the directory.

    Attributes:
        network: Carries all messages, and has the clock.
        world: What the nodes share.
        nodes: The nodes by name: "n0", "n1", ... A node that was killed stays here.
        engines: The engines of the nodes that run.
        counters: What was done so far.
    """

    def __init__(
        self,
        workload: Workload,
        nodes: int,
        *,
        seed: int,
        capacity: int = CAPACITY,
        hot_nbytes_per_s: float = HOT_NBYTES_PER_S,
        routing: Literal["random", "session"] = "random",
    ) -> None:
        """Make a cluster.

        Args:
            capacity: Number of chunks that fit into the memory of a node.
            hot_nbytes_per_s: See `Membership`. Infinity: no replicas.
            routing: Which engine serves a request: any, or the same one for all requests of a session.
        """
        self.world = World(Network(seed), workload.chunks)
        self.network, self.nodes, self.counters = self.world.network, self.world.nodes, self.world.counters
        self.engines: dict[NodeId, Engine] = {}
        self._capacity, self._hot, self._routing = capacity, hot_nbytes_per_s, routing
        self._rng = Random(seed)  # of the workload; so faults do not change which engine gets a request
        self._incarnations = 0
        self.restart_directory()
        members = [self._member(f"n{number}") for number in range(nodes)]
        view = View(1, tuple(sorted(members, key=lambda member: member.node_id)))
        for member in members:
            self._start(member, view)
        names = [*self.nodes]
        for run in workload.stored:
            self.nodes[self._rng.choice(names)].store(run)
        self.run(START_S)

    # -- members ----------------------------------------------------------------------------------------------------

    def _member(self, name: NodeId, weight: float = 1.0) -> Member:
        self._incarnations += 1
        return Member(name, f"host of {name}", {"tcp": f"{name}:1"}, weight, self._incarnations)

    def _start(self, member: Member, view: View, memory: Memory | None = None) -> None:
        name = member.node_id
        self.network.down.discard(name)
        self.nodes[name] = SimNode(self.world, member, view, memory or Memory(self.world.chunks, self._capacity))
        self.engines[name] = Engine(self.nodes[name])

    def join(self, name: NodeId) -> None:
        """Start a new node, or one that was killed. Its memory is empty."""
        self._start(self._member(name), View())

    def restart(self, name: NodeId) -> None:
        """Restart the process of a node. Its memory outlives it. Its location index and its list of replicas do not."""
        memory = self.nodes[name].memory
        self.kill(name)
        memory.set_replica(np.array([*memory.row_of.values()], np.int32), replica=False)
        self._start(self._member(name), View(), memory)

    def kill(self, name: NodeId) -> None:
        """End a node at once. Its chunks are lost."""
        self.network.down.add(name)
        self.nodes[name].stopped = True
        del self.engines[name]

    def restart_directory(self) -> None:
        """Start the directory, or start it again without any state."""
        self.world.directory = Membership(member_timeout_s=MEMBER_TIMEOUT_S, hot_nbytes_per_s=self._hot)

    @property
    def directory(self) -> Membership:
        """The real logic of the directory."""
        return self.world.directory

    # -- requests ---------------------------------------------------------------------------------------------------

    def play(self, requests: Sequence[Request]) -> None:
        """Have each request arrive at its time, on the engine that `routing` chooses."""
        coming = iter(requests)

        def arrive(request: Request) -> None:
            names = [*self.engines]
            chosen = (
                request.session % len(names) if self._routing == "session" else int(self._rng.random() * len(names))
            )
            self.engines[names[chosen]].begin(request.chunks)
            expect_next()

        def expect_next() -> None:
            if (request := next(coming, None)) is not None:
                self.network.at(request.at_s, partial(arrive, request))

        expect_next()

    def run(self, until_s: float) -> None:
        """Let the virtual time pass."""
        self.network.run(until_s)

    def run_until(self, condition: Callable[[], bool], *, within_s: float, step_s: float = 0.1) -> float:
        """Let the virtual time pass until a condition is true. Return how long that took, in virtual seconds.

        Raises:
            TimeoutError: It is not true after `within_s`.
        """
        began_s = self.network.now_s
        while not condition():
            if self.network.now_s - began_s >= within_s:
                raise TimeoutError(f"not true after {within_s} virtual seconds")
            self.run(self.network.now_s + step_s)
        return self.network.now_s - began_s

    # -- what is measured -------------------------------------------------------------------------------------------

    def holders(self, chunk: int) -> set[NodeId]:
        """Return the running nodes that have a chunk in memory."""
        return {name for name in self.engines if chunk in self.nodes[name].memory.row_of}

    def replicas(self) -> int:
        """Return the number of chunks that are replicas, on all nodes."""
        return sum(len(self.nodes[name].prefixes.replica_rows()) for name in self.engines)

    def location_errors(self) -> tuple[int, int]:
        """Compare the owners' locations with what is in memory.

        Returns:
            How many locations name a node that has not got the chunk, and how many chunks in memory are missing in
            the locations.
        """
        wrong = missing = 0
        view = self.directory.view
        held: dict[int, set[NodeId]] = {}
        for name in self.engines:
            for chunk in self.nodes[name].memory.row_of:
                held.setdefault(chunk, set()).add(name)
        for owner, chunks in self.world.by_owner(view, range(len(self.world.chunks))).items():
            for chunk, location in zip(chunks, self.nodes[owner].locate(chunks), strict=True):
                named, really = set(location.holders), held.get(chunk, set())
                wrong += len(named - really)
                missing += len(really - named)
        return wrong, missing

    @property
    def agreed(self) -> bool:
        """Whether all running nodes have the directory's view of just them, and have announced all changes."""
        view = self.directory.view
        running = [self.nodes[name] for name in self.engines]
        return {member.node_id for member in view.members} == {*self.engines} and all(
            node.view.epoch == view.epoch and node.settled for node in running
        )
