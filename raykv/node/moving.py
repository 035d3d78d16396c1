"""Sends chunks of this node to other nodes. Nothing is evicted there for them.

A run of chunks goes to the owner of its first key if that node has free room in memory, or else to another node: see
`raykv.node.rooms`. If no memory has room, the run goes through the memory of a node into a tier below it.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.errors import RayKVError, TransientError
from raykv.eviction.base import live_parents
from raykv.node.peers import Peers
from raykv.node.rooms import Room, Rooms
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array, expect, stats_in
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member
from raykv.storage.store import Pinned, Store
from raykv.transport.bulk_write import BulkWrite
from raykv.types import Batch, Bits, Hints, KeyArray, NodeId, Rows

log = logging.getLogger(__name__)

WINDOW_ROWS: Final = 256
"""At most this many chunks are looked up and moved at a time."""
RUN_NBYTES: Final = 8 << 20
"""One Write has at most this many bytes, or one chunk."""
ROOM_SHARE: Final = 0.9
"""A node has free room until this share of its arena is in use."""
ROOM_S: Final = 1.0
"""The free room of the other nodes is asked for again after this time."""
WRITE_S: Final = 10.0
"""Deadline of one Write."""
ASK_S: Final = 2.0
"""Deadline of other requests."""


@dataclass
class Progress:
    """What was sent so far, and what was not.

    Attributes:
        state: "" (not started), "moving" or "done".
        moved, moved_nbytes: Chunks that other nodes have stored for this node. A chunk counts twice if it was sent to a
            second node, because the first node died.
        elsewhere: Chunks that another node can read already: it holds them, or they are in a tier that nodes share.
        left, left_nbytes: Chunks that were not moved. The bytes of evicted chunks are unknown and do not count.
        below_memory: How many of all these chunks were only in tiers of this node.
        reason: Why chunks were left; empty if none were.
    """

    state: str = ""
    moved: int = 0
    moved_nbytes: int = 0
    elsewhere: int = 0
    left: int = 0
    left_nbytes: int = 0
    below_memory: int = 0
    reason: str = ""

    def leave(self, count: int, nbytes: int, reason: str) -> None:
        """Count chunks of `nbytes` bytes each as left."""
        if count:
            self.left += count
            self.left_nbytes += count * nbytes
            self.reason = reason


class Window(NamedTuple):
    """What a Write needs to know of chunks. One entry for each chunk.

    Attributes:
        numbers: A number that identifies the chunk within the window.
        parents: The number of the chunk's parent, -1 for none. A parent outside the window has any other number.
    """

    keys: KeyArray
    numbers: Rows
    nbytes: npt.NDArray[np.uint32]
    groups: npt.NDArray[np.uint16]
    parents: Rows
    parent_keys: KeyArray
    depths: npt.NDArray[np.uint32]
    hints: list[Hints]


def pin_window(store: Store, keys: KeyArray) -> tuple[Window, Pinned]:
    """Pin chunks in memory. The caller holds the lock.

    Returns a window of the chunks that are in memory, whose numbers are their rows.
    """
    table, columns, now_s = store.table, store.table.columns, time.monotonic()
    pinned = store.pin(keys, now_s=now_s, touch=False)
    here = pinned.rows >= 0
    rows = pinned.rows[here]
    parents = live_parents(columns, rows)
    expires = columns.expires[rows].tolist()
    priorities = store.row_hints.priorities(rows)
    hints = [
        Hints(max(0.001, table.seconds(tick) - now_s) if tick else 0.0, priority)
        for tick, priority in zip(expires, priorities, strict=True)
    ]
    parent_keys = table.keys_of(np.maximum(parents, 0))
    groups, depths = columns.group[rows].copy(), columns.depth[rows].copy()
    return Window(keys[here], rows, pinned.nbytes[here], groups, parents, parent_keys, depths, hints), pinned


class ChunkSender:
    """Sends runs of chunks to other nodes, and counts what becomes of them in `progress`. One thread uses it."""

    def __init__(
        self,
        node_id: NodeId,
        peers: Peers,
        group: Callable[[int], Namespace],
        rng: random.Random,
    ) -> None:
        """`group` returns the quota group with a number on this node."""
        self._node_id, self._peers, self._group = node_id, peers, group
        self.progress = Progress()
        self._rooms, self._room_s = Rooms(rng), 0.0
        self._paced_s = 0.0  # when the next run may begin

    def pace(self, nbytes: int, nbytes_per_s: float, stopping: threading.Event) -> None:
        """After `send`, wait as long as sending `nbytes` bytes may take at this rate."""
        self._paced_s += nbytes / nbytes_per_s
        stopping.wait(max(0.0, self._paced_s - time.monotonic()))

    def send(self, window: Window, places: list[int], values: Sequence[memoryview]) -> list[int]:
        """Send a run (see `runs_of`) with its bytes. What one node does not take goes to the next.

        Returns:
            The places that no node has taken. They count as left.
        """
        self._paced_s = max(self._paced_s, time.monotonic())
        first, nbytes, reason = places[0], int(window.nbytes[places[0]]), ""
        for below in (False, True):
            for member, owned in self._targets(window.keys[first : first + 1], nbytes, below=below):
                try:
                    done = self._send_to(member, window, places, values, below=below, owned=owned)
                    places, values = places[done:], values[done:]
                except RayKVError as error:
                    reason = f"{member.node_id}: {error}"
                    if not isinstance(error, TransientError):
                        log.warning("%s does not take chunks of this node: %s", member.node_id, error)
                if not places:
                    return []
                self._rooms.close(member.node_id, below=below)
        self.progress.leave(len(places), nbytes, reason or "no other node has room")
        return places

    def _send_to(
        self,
        member: Member,
        window: Window,
        places: list[int],
        values: Sequence[memoryview],
        *,
        below: bool,
        owned: bool,
    ) -> int:
        """Send a run to one node, in several steps if the node takes only a part at once. Return how many it took."""
        nbytes, taken = int(window.nbytes[places[0]]), 0
        while taken < len(places):
            write, stored = self._write(member, window, places[taken:], values[taken:], below=below)
            self._rooms.take(member.node_id, nbytes * stored, below=below, owned=owned)
            if lost := len(write.positions) - stored:
                self.progress.leave(lost, nbytes, f"damaged here, or not stored by {member.node_id}")
            done = _end_of(write, len(places) - taken)
            self.progress.elsewhere += done - len(write.positions)
            taken += done
            if not done:
                break
        return taken

    def hand_over(self, member: Member, window: Window, places: list[int], values: Sequence[memoryview]) -> list[int]:
        """Send a run to one node. Returns the places whose chunks the node has in memory now, as it has confirmed.

        Raises:
            RayKVError: The node does not answer, or refuses. Nothing is confirmed.
        """
        self._paced_s = max(self._paced_s, time.monotonic())
        held, taken = list[int](), 0
        while taken < len(places):
            write, stored = self._write(member, window, places[taken:], values[taken:])
            done = _end_of(write, len(places) - taken)
            unsure = set() if stored == len(write.positions) else set(write.positions)
            held += [places[taken + position] for position in range(done) if position not in unsure]
            taken += done
            if not done:
                break
        return held

    def _write(
        self, member: Member, window: Window, places: list[int], values: Sequence[memoryview], *, below: bool = False
    ) -> tuple[BulkWrite, int]:
        """Send a run to one node once. Return the Write with its outcome, and how many chunks the node has stored."""
        group = self._group(int(window.groups[places[0]]))
        write = BulkWrite(group, batch_of(window, places), [[value] for value in values], evict=False, below=below)
        deadline_s = time.monotonic() + WRITE_S
        stored = self._peers.write(member, write, deadline_s=deadline_s)
        self.progress.moved += stored
        self.progress.moved_nbytes += int(window.nbytes[places[0]]) * stored
        return write, stored

    def _targets(self, key: KeyArray, nbytes: int, *, below: bool) -> Iterator[tuple[Member, bool]]:
        """Yield nodes with room for `nbytes` more bytes, and whether the node owns `key`. The owner is the first."""
        view = self._peers.view()
        if time.monotonic() >= self._room_s:
            self._rooms.update(
                {member.node_id: self._ask_room(member) for member in view.members if self._takes(member)}
            )
            self._room_s = time.monotonic() + ROOM_S
        owner = view.ring.nodes[view.ring.owners(key)[0]] if view.ring.nodes else ""
        for name in self._rooms.order(owner, nbytes, below=below):
            member = view.member(name)
            if member is not None and self._takes(member):
                yield member, name == owner

    def _takes(self, member: Member) -> bool:
        return member.node_id != self._node_id and member.weight > 0

    def _ask_room(self, member: Member) -> Room:
        """Return the free room of a node in bytes; 0 if it does not answer."""
        try:
            stats = stats_in(self._ask(member, messages.GetStats()))
        except RayKVError as error:
            log.info("%s does not say how much room it has: %s", member.node_id, error)
            return Room()
        memory = int(ROOM_SHARE * stats["arena_nbytes"]) - stats["used_nbytes"]
        return Room(max(0, memory), sum(tier.get("spare_nbytes", 0) for tier in stats.get("tiers", {}).values()))

    def _ask(self, member: Member, request: messages.Message) -> messages.Answer:
        deadline_s, pool = time.monotonic() + ASK_S, self._peers.pool
        return pool.ask(member.address, lambda link: link.call(request, deadline_s=deadline_s), deadline_s=deadline_s)

    def held_elsewhere(self, keys: KeyArray) -> Bits:
        """Ask the owners of keys which chunks another node holds. Chunks of owners that do not answer count as no.

        Nodes that are being drained do not count: two of them could rely on each other, and both leave.
        """
        found, view = np.zeros(len(keys), np.bool_), self._peers.view()
        stay = {member.node_id for member in view.members if self._takes(member)}
        for name, places in view.ring.shares(keys).items():
            member = view.member(name)
            if member is None or not self._takes(member):
                continue
            try:
                answer = self._ask(member, messages.Locate(chunk_keys.to_bytes(keys[places])))
                located = expect(messages.Located, answer)
                numbers = array(located.places, "<i4", len(places)).tolist()
            except RayKVError:
                continue
            other = [not stay.isdisjoint(holders) for holders in located.choices]
            found[places] = [0 <= number < len(other) and other[number] for number in numbers]
        return found


def _end_of(write: BulkWrite, count: int) -> int:
    """Return how many of `count` chunks need not be sent again: a full node takes the first ones."""
    if not write.full:
        return count
    return write.positions[-1] + 1 if write.positions else 0


def batch_of(window: Window, places: Sequence[int]) -> Batch:
    """Return the batch for a run; see `runs_of`."""
    first = places[0]
    parent = window.parent_keys[first : first + 1] if window.parents[first] >= 0 else None
    chained = len(places) == 1 or int(window.parents[places[1]]) == int(window.numbers[first])
    return Batch(
        window.keys[places], int(window.nbytes[first]), parent, int(window.depths[first]), chained, window.hints[first]
    )


def runs_of(window: Window, wanted: Bits) -> Iterator[list[int]]:
    """Divide the wanted chunks of a window into runs that one Write can store, of equal size, group and hints.

    Yields:
        Indices in the window. Either each chunk of a run is the parent of the next, or all chunks of the run begin a
        chain. No run has more than RUN_NBYTES, unless it is a single chunk.
    """
    sizes, groups, hints = window.nbytes.tolist(), window.groups.tolist(), window.hints
    place_of = {number: place for place, number in enumerate(window.numbers.tolist())}
    run_of: dict[int, list[int]] = {}  # maps the last chunk of each run to the run
    runs: list[list[int]] = []
    for place in sorted(np.flatnonzero(wanted).tolist(), key=lambda place: int(window.depths[place])):
        above = place_of.get(int(window.parents[place]), -1)
        run = run_of.get(above)
        fits = run is not None and (sizes[place], groups[place]) == (sizes[above], groups[above])
        if run is not None and fits and hints[place] == hints[above] and (len(run) + 1) * sizes[place] <= RUN_NBYTES:
            del run_of[above]
            run.append(place)
        else:
            run = [place]
            runs.append(run)
        run_of[place] = run
    roots: dict[tuple[int, int, Hints], list[int]] = {}
    joined: list[list[int]] = []
    for run in sorted(runs, key=lambda run: run[0]):
        first = run[0]
        if len(run) > 1 or window.parents[first] >= 0 or window.depths[first]:
            joined.append(run)
            continue
        kind = sizes[first], groups[first], hints[first]
        others = roots.get(kind)
        if others is None or (len(others) + 1) * sizes[first] > RUN_NBYTES:
            others = roots[kind] = []
            joined.append(others)
        others.append(first)
    return iter(joined)
