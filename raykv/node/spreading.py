"""Moves the chunks of spread namespaces to their owners.

The chunks of a namespace with placement "spread" lie in the memory of owners: a chunk belongs to the owner of the first
key of its chain on the node that holds it. So the runs of a chain that lie together move together. When the ring
changes, a node gives the chunks that others own now to these nodes, parents before their children, and then drops its
own copies. A node drops only what the owner has confirmed, and the owner takes only what fits without eviction.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.eviction.base import live_parents
from raykv.memory.layout import RowState
from raykv.node.moving import WINDOW_ROWS, ChunkSender, Window, pin_window, runs_of
from raykv.node.peers import Peers
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import Member, View
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.types import KeyArray, Rows

log = logging.getLogger(__name__)

NBYTES_PER_S: Final = 100 << 20
"""A node moves at most this many bytes a second."""
SETTLE_BEATS: Final = 2
"""After the view has changed, a node waits for this many heartbeats before it moves chunks. Until then, other nodes
announce their chunks to the new owners of the keys."""
DROP_S: Final = 0.25
"""A node drops its copies this long after the owner has confirmed them. Meanwhile the owner announces its copies, and
reads that have chosen this node as the holder still find the chunks."""
RETRY_S: Final = 5.0
"""Time until the next attempt for chunks that an owner did not take."""


class Spreader:
    """Moves misplaced chunks of spread namespaces to their owners, on a thread of its own."""

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        lock: threading.Lock,
        peers: Peers,
        changed: Callable[[], None],
        draining: threading.Event,
    ) -> None:
        """`changed` is called when chunks were dropped. `draining`: once set, the drain moves all chunks."""
        self._node_id, self._beat_s = config.node_id, config.heartbeat_s
        self._store, self._lock, self._view = store, lock, peers.view
        self._changed, self._draining = changed, draining
        self._sender = ChunkSender(config.node_id, peers, self._group, random.Random())

    def stats(self) -> dict[str, int]:
        """Return how many chunks and bytes were moved to their owners."""
        progress = asdict(self._sender.progress)
        return {name: progress[name] for name in ("moved", "moved_nbytes")}

    def run(self, stopping: threading.Event) -> None:
        """Move chunks until `stopping` is set. The spreader's thread runs this method."""
        done: Any = None
        epoch, retry_s = self._view().epoch, 0.0
        while not stopping.wait(self._beat_s):
            if self._draining.is_set() or not self._store.table.spread.any():
                continue
            if (now := self._view().epoch) != epoch:
                epoch = now
                stopping.wait(SETTLE_BEATS * self._beat_s)
            state = epoch, self._store.counters.committed, self._store.table.spread.tobytes()
            if state != done or time.monotonic() >= retry_s:
                done = state
                retry_s = float("inf") if self._step(stopping) else time.monotonic() + RETRY_S

    def _group(self, number: int) -> Namespace:
        return Namespace.model_validate_json(self._store.table.texts()[number])

    def _step(self, stopping: threading.Event) -> bool:
        """Move the chunks that other nodes own. Returns whether all were moved."""
        view, complete = self._view(), True
        for name, keys in misplaced(self._store, view, self._node_id).items():
            member = view.member(name)
            for first in range(0, len(keys) if member is not None else 0, WINDOW_ROWS):
                if stopping.is_set() or self._draining.is_set() or self._view().epoch != view.epoch:
                    return False
                assert member is not None
                try:
                    complete &= self._move(member, keys[first : first + WINDOW_ROWS], stopping)
                except RayKVError as error:
                    if not isinstance(error, TransientError):
                        log.warning("%s does not take chunks that it owns: %s", name, error)
                    complete = False
                    break
        return complete

    def _move(self, member: Member, keys: KeyArray, stopping: threading.Event) -> bool:
        """Move chunks to one node, and drop the copies here. Returns whether the node has taken all."""
        with self._lock:
            window, pinned = pin_window(self._store, keys)
        offsets, held = pinned.offsets[pinned.rows >= 0], list[int]()
        try:
            self._send(member, window, offsets.tolist(), held, stopping)
        finally:
            if held:
                stopping.wait(DROP_S)
            rows = window.numbers[held] if not stopping.is_set() else window.numbers[:0]
            self._drop(rows, window.numbers)
        return len(held) == len(window.keys)

    def _send(
        self, member: Member, window: Window, offsets: list[int], held: list[int], stopping: threading.Event
    ) -> None:
        """Send a window. Add the places that the node has confirmed to `held`."""
        arena = self._store.arena.view
        for places in runs_of(window, np.ones(len(window.keys), np.bool_)):
            if stopping.is_set() or self._draining.is_set():
                return
            nbytes = int(window.nbytes[places[0]])
            values = [arena[offsets[place] : offsets[place] + nbytes] for place in places]
            held += self._sender.hand_over(member, window, places, values)
            self._sender.pace(nbytes * len(places), NBYTES_PER_S, stopping)

    def _drop(self, rows: Rows, pinned: Rows) -> None:
        """Remove chunks that another node has now, and end all pins."""
        store = self._store
        with self._lock:
            rows = rows[store.table.columns.state[rows] == RowState.READY]  # others were deleted meanwhile
            store.evictor.remove(rows, store.table.ticks(time.monotonic()), Reason.MOVED)
            store.unpin(pinned)
        if len(rows):
            self._changed()


def misplaced(store: Store, view: View, me: str) -> dict[str, KeyArray]:
    """Return the keys of chunks of spread namespaces that other nodes own, by owner, parents before their children.

    The result may be out of date, because the lock is not held.
    """
    table, columns, ring = store.table, store.table.columns, view.ring
    rows = table.ready_rows()
    rows = rows[(table.spread[columns.group[rows]] != 0) & ~store.row_hints.replicas(rows)]
    if not len(rows) or not ring.nodes:
        return {}
    root = np.arange(table.rows_populated, dtype=np.int32)
    parents = live_parents(columns, rows)
    root[rows] = np.where(parents >= 0, parents, rows)
    for _ in range(int(columns.depth[rows].max()).bit_length() + 1):  # each step doubles the distance to the root
        root = root[root]
    owners = ring.owners(table.keys_of(root[rows]))
    order = np.lexsort((columns.depth[rows], root[rows], owners))
    rows, owners = rows[order], owners[order]
    return {
        ring.nodes[owner]: table.keys_of(rows[owners == owner])
        for owner in np.unique(owners).tolist()
        if ring.nodes[owner] != me
    }
