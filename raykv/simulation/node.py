"""A simulated node: memory without bytes, and the rules of a real node. The rules themselves are the real ones."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from raykv.membership.membership import Membership
from raykv.node.announcer import ANNOUNCE_S
from raykv.node.location_index import Location, LocationIndex, left_to_others
from raykv.node.prefixes import Prefixes
from raykv.node.replicas import MAX_WAITING
from raykv.protocol.messages import Heartbeat, HeartbeatAnswer
from raykv.protocol.placement import Member, View, is_next, owner_changed
from raykv.simulation.counters import Counters
from raykv.simulation.memory import Memory
from raykv.simulation.network import Network
from raykv.simulation.workload import Chunks
from raykv.types import NodeId

HEARTBEAT_S: Final = 1.0
NBYTES_PER_S: Final = 10e9
"""What the link out of a node sends."""
OWNERS_OF_VIEWS: Final = 4
"""The owners of all chunks are remembered for this many views."""


class World:
    """What all nodes of a simulated cluster share.

    Attributes:
        network: Carries all messages, and has the clock.
        chunks: All chunks that there are.
        counters: What was done so far.
        nodes: The nodes by name. A node that was killed stays here.
        directory: The real logic of the directory.
    """

    directory: Membership

    def __init__(self, network: Network, chunks: Chunks) -> None:
        self.network, self.chunks, self.counters = network, chunks, Counters()
        self.nodes: dict[NodeId, SimNode] = {}
        self._owners: dict[int, tuple[View, list[NodeId]]] = {}

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Serve a heartbeat, as `InProcessMembership` does."""
        self.directory.expire(now_s=self.network.now_s)
        return self.directory.beat(heartbeat, now_s=self.network.now_s)

    def by_owner(self, view: View, chunks: Iterable[int]) -> dict[NodeId, list[int]]:
        """Divide chunks by their owner in a view."""
        if not view.members:
            return {}
        known = self._owners.get(view.epoch)
        if known is None or known[0] is not view:
            names = np.array(view.ring.nodes, object)
            known = self._owners[view.epoch] = view, names[view.ring.owners(self.chunks.keys)].tolist()
            self._owners = dict([*self._owners.items()][-OWNERS_OF_VIEWS:])
        owners, found = known[1], dict[NodeId, list[int]]()
        for chunk in chunks:
            found.setdefault(owners[chunk], []).append(chunk)
        return found


class SimNode:
    """A node of a simulated cluster.

    Attributes:
        member: How the directory and other nodes see this node.
        view: The newest view that this node knows.
        memory: The chunks here.
        index: Locations of the keys that this node owns.
        prefixes: The hot prefixes here.
        stopped: Whether the node has ended.
    """

    def __init__(self, world: World, member: Member, view: View, memory: Memory) -> None:
        self.world, self.network, self.chunks = world, world.network, world.chunks
        self.member, self.view, self.name = member, view, member.node_id
        self.counters, self.memory = world.counters, memory
        self.index = LocationIndex()
        self.prefixes = Prefixes(self.memory)
        self.stopped = False
        self._queue: set[int] = set()  # chunks to announce
        self._flushing = 0
        self._copies: dict[tuple[bytes, NodeId], None] = {}
        self._copying = False
        self._free_s = 0.0  # when the link out of this node has sent everything that waits
        self.network.at(self.network.now_s + self.network.rng.random() * HEARTBEAT_S, self._beat)

    @property
    def settled(self) -> bool:
        """Whether all changes were announced."""
        return not self._queue and not self._flushing and not self.memory.removed

    # -- heartbeats -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self.stopped:
            return
        self.network.at(self.network.now_s + HEARTBEAT_S, self._beat)
        known = self.prefixes.measure(now_s=self.network.now_s)
        self._send_heartbeat(Heartbeat(self.member, self.view.epoch, heat=self.prefixes.report(known)))

    def _send_heartbeat(self, heartbeat: Heartbeat) -> None:
        def done(answer: HeartbeatAnswer | None) -> None:
            if answer is None or self.stopped:
                return
            if answer.want_view and heartbeat.view is None:
                heartbeat.view = self.view
                self._send_heartbeat(heartbeat)
                return
            if answer.view is not None and answer.view.epoch > self.view.epoch:
                self._adopt(answer.view)
            if answer.heat is not None:
                for copy in self.prefixes.follow(answer.heat, now_s=self.network.now_s):
                    if len(self._copies) < MAX_WAITING:
                        self._copies[copy] = None
                self._copy_next()
                self.announce(())  # what was deleted

        self.network.call(self.name, "directory", lambda: self.world.beat(heartbeat), done)

    def _adopt(self, view: View) -> None:
        """Use a newer view, as `Announcer.adopt` does."""
        old, self.view = self.view, view
        if self.name in view.ring.nodes:
            mine = view.ring.nodes.index(self.name)
            self.index.follow_view(nodes=frozenset(view.ring.nodes), owned=lambda keys: view.ring.owners(keys) == mine)
        chunks = np.array([*self.memory.row_of], np.int64)
        if is_next(old, view):
            chunks = chunks[owner_changed(old, view, self.chunks.keys[chunks])]
        self.counters.announced_again += len(chunks)
        self.announce(chunks.tolist())

    # -- announcements ----------------------------------------------------------------------------------------------

    def announce(self, chunks: Sequence[int], *, after_s: float = ANNOUNCE_S) -> None:
        """Tell the owners of these chunks, and of those that were removed, whether they are here."""
        idle = not self._queue
        self._queue.update(chunks, self.memory.removed)
        self.memory.removed.clear()
        if idle and self._queue:
            self.network.at(self.network.now_s + after_s, self._flush)

    def _flush(self) -> None:
        shares = {} if self.stopped else self.world.by_owner(self.view, sorted(self._queue))
        self._queue.clear()
        for owner, chunks in shares.items():
            self.counters.announced += len(chunks)
            here = [chunk for chunk in chunks if chunk in self.memory.row_of]
            absent = [chunk for chunk in chunks if chunk not in self.memory.row_of]
            if owner == self.name:
                self.hear(self.name, here, absent)
            else:
                self._tell(owner, here, absent)

    def _tell(self, owner: NodeId, here: list[int], absent: list[int]) -> None:
        def done(answer: bool | None) -> None:
            self._flushing -= 1
            if answer is None:
                self.announce([*here, *absent], after_s=HEARTBEAT_S)

        self._flushing += 1
        nodes = self.world.nodes
        self.network.call(self.name, owner, lambda: nodes[owner].hear(self.name, here, absent), done)

    def hear(self, holder: NodeId, here: list[int], absent: list[int]) -> bool:
        """Serve an Announce."""
        keys = self.chunks.keys
        self.index.remove(holder, keys[absent])
        self.index.add(holder, keys[here], np.full(len(here), self.chunks.nbytes, np.uint32))
        return True

    # -- requests ---------------------------------------------------------------------------------------------------

    def locate(self, chunks: list[int]) -> list[Location]:
        """Serve a Locate. The holders that an answer names are chosen by `Engine`, with the same rule."""
        return self.index.locate(self.chunks.keys[chunks])

    def read(self, chunks: list[int]) -> list[int]:
        """Serve a Read: return those chunks that are here."""
        rows = self.memory.read(chunks, now_s=self.network.now_s)
        self.prefixes.meter.count(self.memory.columns, rows)
        self.counters.reads[self.name] += len(rows)
        self.counters.sent += len(rows)
        return chunks if len(rows) == len(chunks) else [chunk for chunk in chunks if chunk in self.memory.row_of]

    def read_or_locate(self, chunk: int) -> tuple[bool, Location]:
        """Serve a Read with `locate`, of one chunk: return whether the chunk is sent, and else who holds it."""
        (location,) = self.locate([chunk])
        if chunk in self.memory.row_of:
            others = left_to_others(location, self.name, self.network.rng)
            if others is None:
                self.read([chunk])
                return True, location
            return False, others
        return False, location

    def suspect(self, chunks: list[int]) -> bool:
        """Serve a Suspect: announce these chunks again."""
        self.announce(chunks)
        return True

    def send_s(self, nbytes: int) -> float:
        """Queue bytes on the link out of this node. Return the seconds until they have arrived."""
        now_s = self.network.now_s
        self._free_s = max(now_s, self._free_s) + nbytes / NBYTES_PER_S
        return self._free_s - now_s + self.network.latency_s()

    def store(self, chunks: Sequence[int]) -> None:
        """Store what an engine on this node has computed."""
        new, _ = self.memory.store(chunks, now_s=self.network.now_s)
        self.announce(new)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _copy_next(self) -> None:
        """Send the next prefix that the directory has ordered. Like a real node, send one at a time."""
        if self._copying or not self._copies:
            return
        head, target = copy = next(iter(self._copies))
        keys = self.prefixes.begin_copy(head, now_s=self.network.now_s)
        member = self.view.member(target)
        if keys is None or member is None or target == self.name:
            del self._copies[copy]
            self._copy_next()
            return
        self._copying, nodes = True, self.world.nodes
        here = [chunk for chunk in keys[:, 1].tolist() if chunk in self.memory.row_of]

        def done(stored: int | None) -> None:
            self.counters.copied += stored or 0
            self._copying = False
            self._copies.pop(copy, None)
            self._copy_next()

        def send() -> None:
            self.network.call(self.name, target, lambda: nodes[target].add_replica(head, here), done)

        self.network.at(self.network.now_s + self.send_s(len(here) * self.chunks.nbytes), send)

    def add_replica(self, head: bytes, chunks: list[int]) -> int:
        """Serve a Write of a hot prefix. Return the number of chunks stored."""
        new, rows = self.memory.store(chunks, now_s=self.network.now_s)
        self.prefixes.add(head, self.chunks.keys[chunks], rows, now_s=self.network.now_s)
        self.announce(new)
        return len(new)
