"""Drains a node: moves its chunks to other nodes, so that the node can leave the cluster without a loss.

A node that drains has weight 0 in the view. So it owns no keys, and other nodes learn what it holds. It stores no more
chunks, but it still serves reads. Chunks that eviction would remove last are moved first, parents before their
children. A chunk goes to the owner of its key if that node has free room, or else to the node with the most free room.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.eviction.base import live_parents
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array, expect
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.storage.store import Pinned, Store
from raykv.tier.mover import TierMover
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.link import Link
from raykv.transport.pool import ConnectionPool
from raykv.types import Batch, Bits, Hints, KeyArray, NodeId, Rows

log = logging.getLogger(__name__)

WINDOW_ROWS: Final = 256
"""At most this many chunks are pinned and moved at a time."""
RUN_NBYTES: Final = 8 << 20
"""One Write has at most this many bytes, or one chunk."""
SETTLE_BEATS: Final = 2
"""After the view has changed, the drain waits for this many heartbeats. Until then, other nodes announce their chunks
to the new owners of the keys."""
ROOM_SHARE: Final = 0.9
"""A node has free room until this share of its arena is in use."""
ROOM_S: Final = 1.0
"""The free room of the other nodes is asked for again after this time."""
WRITE_S: Final = 10.0
"""Deadline of one Write."""
ASK_S: Final = 2.0
"""Deadline of other requests."""
VIEW_S: Final = 5.0
"""The drain waits at most this long for a view in which this node has weight 0."""


@dataclass
class Progress:
    """What a drain has done so far.

    Attributes:
        state: "" (not started), "moving" or "done".
        moved, moved_nbytes: Chunks that other nodes have stored for this node. A chunk counts twice if it was sent to a
            second node, because the first node died.
        elsewhere: Chunks that another node held already.
        left, left_nbytes: Chunks that were not moved.
        below_memory: Chunks that lie only in tiers of this node. They are not moved.
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


class Window(NamedTuple):
    """Pinned chunks, and what a Write needs to know of them. One entry for each chunk; `parent` is -1 for none."""

    keys: KeyArray
    pinned: Pinned
    groups: npt.NDArray[np.uint16]
    parents: Rows
    parent_keys: KeyArray
    depths: npt.NDArray[np.uint32]
    hints: list[Hints]


class Drain:
    """Moves the chunks of one store to other nodes, on a thread of its own.

    Attributes:
        progress: What was done so far.
        started: Set when the drain begins. From then on the node stores no chunks.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        lock: threading.Lock,
        mover: TierMover,
        pool: ConnectionPool,
        view: Callable[[], View],
    ) -> None:
        self._config, self._node_id = config, config.node_id
        self._store, self._lock, self._mover = store, lock, mover
        self._pool, self._view = pool, view
        self.progress, self.started = Progress(), threading.Event()
        self._room: dict[NodeId, int] = {}
        self._room_s = self._paced_s = 0.0

    def stats(self) -> dict[str, Any]:
        """Return the progress as values that JSON can encode; empty if there is no drain."""
        return asdict(self.progress) if self.started.is_set() else {}

    def run(self, nbytes_per_s: float, stopping: threading.Event) -> None:
        """Move all chunks, at most `nbytes_per_s` bytes a second. Ends early if `stopping` is set."""
        progress, seen = self.progress, set[bytes]()
        progress.state, until_s = "moving", time.monotonic() + VIEW_S
        while self._takes_keys() and time.monotonic() < until_s and not stopping.wait(0.02):
            pass
        stopping.wait(SETTLE_BEATS * self._config.heartbeat_s)
        while (rows := self._unseen(seen)).size:
            keys = self._store.table.keys_of(rows)
            for first in range(0, len(rows), WINDOW_ROWS):
                window = pin_window(self._store, self._lock, keys[first : first + WINDOW_ROWS])
                try:
                    self._move(window, nbytes_per_s, stopping)
                finally:
                    with self._lock:
                        self._store.unpin(window.pinned.rows)
                if stopping.is_set():
                    return
            seen.update(_raw(keys))
        progress.below_memory = len(self._mover.keys()) if self._mover else 0
        progress.state = "done"

    def _unseen(self, seen: set[bytes]) -> Rows:
        """Return the ready rows whose keys are not in `seen`, the most valuable first, parents before children."""
        store, now = self._store, self._store.table.ticks(time.monotonic())
        rows = store.table.ready_rows()
        rows = rows[np.array([raw not in seen for raw in _raw(store.table.keys_of(rows))], np.bool_)]
        with self._lock:
            ordered: Rows = store.evictor.policies.victims(rows, len(rows), now)[::-1]
        return ordered

    def _takes_keys(self) -> bool:
        member = self._view().member(self._node_id)
        return member is not None and member.weight > 0

    def _move(self, window: Window, nbytes_per_s: float, stopping: threading.Event) -> None:
        elsewhere = self._held_elsewhere(window.keys)
        self.progress.elsewhere += int(elsewhere.sum())
        for places in runs_of(window, ~elsewhere):
            if stopping.is_set():
                return
            self._paced_s = max(self._paced_s, time.monotonic())
            self._write(window, places)
            self._paced_s += int(window.pinned.nbytes[places].sum()) / nbytes_per_s
            stopping.wait(max(0.0, self._paced_s - time.monotonic()))

    def _write(self, window: Window, places: list[int]) -> None:
        """Write a run of chunks to another node. What does not fit goes to the next node. Count the rest as left."""
        view, first, nbytes = self._view(), places[0], int(window.pinned.nbytes[places[0]])
        for member in self._targets(view, window.keys[first : first + 1], nbytes):
            try:
                places = self._write_to(member, window, places)
            except RayKVError as error:
                self.progress.reason = f"{member.node_id}: {error}"
                if not isinstance(error, TransientError):
                    log.warning("%s does not take chunks of this node: %s", member.node_id, error)
            if not places:
                return
            self._room[member.node_id] = 0
        self._leave(len(places), nbytes, self.progress.reason or "no other node has room")

    def _write_to(self, member: Member, window: Window, places: list[int]) -> list[int]:
        """Write a run to one node, in several steps if the node takes only a part at once. Return what does not fit."""
        progress, nbytes, arena = self.progress, int(window.pinned.nbytes[places[0]]), self._store.arena.view
        group = Namespace.model_validate_json(self._store.table.texts()[int(window.groups[places[0]])])
        while places:
            starts = window.pinned.offsets[places].tolist()
            values = [[arena[start : start + nbytes]] for start in starts]
            write = BulkWrite(group, batch_of(window, places), values, evict=False)
            deadline_s = time.monotonic() + WRITE_S
            stored = self._pool.ask(member.address, _sender(write, deadline_s), deadline_s=deadline_s)
            progress.moved += stored
            progress.moved_nbytes += nbytes * stored
            self._room[member.node_id] -= nbytes * stored
            if damaged := len(write.positions) - stored:
                self._leave(damaged, nbytes, "damaged in memory")
            done = len(places) if not write.full else write.positions[-1] + 1 if write.positions else 0
            progress.elsewhere += done - len(write.positions)
            places = places[done:]
            if not done:
                break
        return places

    def _leave(self, count: int, nbytes: int, reason: str) -> None:
        self.progress.left += count
        self.progress.left_nbytes += count * nbytes
        self.progress.reason = reason

    def _targets(self, view: View, key: KeyArray, nbytes: int) -> list[Member]:
        """Return the nodes with room for `nbytes` more bytes: the owner of `key`, then those with the most room."""
        if time.monotonic() >= self._room_s:
            self._room = {member.node_id: self._ask_room(member) for member in view.members if self._takes(member)}
            self._room_s = time.monotonic() + ROOM_S
        owner = view.ring.nodes[view.ring.owners(key)[0]] if view.ring.nodes else ""
        names = sorted(self._room, key=lambda name: (name != owner, -self._room[name]))
        members = [view.member(name) for name in names if self._room[name] >= nbytes]
        return [member for member in members if member is not None]

    def _takes(self, member: Member) -> bool:
        return member.node_id != self._node_id and member.weight > 0

    def _ask_room(self, member: Member) -> int:
        """Return the free room of a node in bytes; 0 if it does not answer."""
        deadline_s = time.monotonic() + ASK_S
        try:
            answer = self._pool.ask(member.address, _caller(messages.GetStats(), deadline_s), deadline_s=deadline_s)
            stats = json.loads(expect(messages.Stats, answer).stats)
            return max(0, int(ROOM_SHARE * stats["arena_nbytes"]) - int(stats["used_nbytes"]))
        except (RayKVError, ValueError, KeyError) as error:
            log.info("%s does not say how much room it has: %s", member.node_id, error)
            return 0

    def _held_elsewhere(self, keys: KeyArray) -> Bits:
        """Ask the owners of keys which chunks another node holds. Chunks of owners that do not answer count as no."""
        found, view = np.zeros(len(keys), np.bool_), self._view()
        for name, places in view.ring.shares(keys).items():
            member = view.member(name)
            if member is None or not self._takes(member):
                continue
            deadline_s = time.monotonic() + ASK_S
            request = messages.Locate(chunk_keys.to_bytes(keys[places]))
            try:
                answer = self._pool.ask(member.address, _caller(request, deadline_s), deadline_s=deadline_s)
                located = expect(messages.Located, answer)
                numbers = array(located.places, "<i4", len(places)).tolist()
            except RayKVError:
                continue
            other = [bool(set(holders) - {self._node_id}) for holders in located.choices]
            found[places] = [0 <= number < len(other) and other[number] for number in numbers]
        return found


def pin_window(store: Store, lock: threading.Lock, keys: KeyArray) -> Window:
    """Pin chunks, and look up what a Write needs to know of them. Chunks that are not in memory are left out.

    The caller must unpin the rows.
    """
    table, columns = store.table, store.table.columns
    with lock:
        now_s = time.monotonic()
        pinned = store.pin(keys, now_s=now_s, touch=False)
        rows = pinned.rows[pinned.rows >= 0]
        parents = live_parents(columns, rows)
        expires = columns.expires[rows].tolist()
        priorities = store.row_hints.priorities(rows)
        hints = [
            Hints(max(0.001, table.seconds(tick) - now_s) if tick else 0.0, priority)
            for tick, priority in zip(expires, priorities, strict=True)
        ]
        here = pinned.rows >= 0
        return Window(
            table.keys_of(rows),
            Pinned(rows, pinned.offsets[here], pinned.nbytes[here], pinned.checksums[here]),
            columns.group[rows].copy(),
            parents,
            table.keys_of(np.maximum(parents, 0)),
            columns.depth[rows].copy(),
            hints,
        )


def batch_of(window: Window, places: Sequence[int]) -> Batch:
    """Return the batch for a run; see `runs_of`."""
    first = places[0]
    parent = window.parent_keys[first : first + 1] if window.parents[first] >= 0 else None
    chained = len(places) == 1 or int(window.parents[places[1]]) == int(window.pinned.rows[first])
    nbytes, depth = int(window.pinned.nbytes[first]), int(window.depths[first])
    return Batch(window.keys[places], nbytes, parent, depth, chained, window.hints[first])


def runs_of(window: Window, wanted: Bits) -> Iterator[list[int]]:
    """Divide the wanted chunks of a window into runs that one Write can store, of equal size, group and hints.

    Yields:
        Indices in the window. Either each chunk of a run is the parent of the next, or all chunks of the run begin a
        chain. No run has more than RUN_NBYTES, unless it is a single chunk.
    """
    sizes, groups, hints = window.pinned.nbytes.tolist(), window.groups.tolist(), window.hints
    place_of = {row: place for place, row in enumerate(window.pinned.rows.tolist())}
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


def _raw(keys: KeyArray) -> list[bytes]:
    raw = chunk_keys.to_bytes(keys)
    return [raw[at : at + chunk_keys.KEY_NBYTES] for at in range(0, len(raw), chunk_keys.KEY_NBYTES)]


def _sender(write: BulkWrite, deadline_s: float) -> Callable[[Link], int]:
    return lambda link: write.send(link, deadline_s=deadline_s)


def _caller(request: messages.Message, deadline_s: float) -> Callable[[Link], messages.Answer]:
    return lambda link: link.call(request, deadline_s=deadline_s)
