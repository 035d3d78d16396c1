"""Drains a node: moves its chunks to other nodes, so that the node can leave the cluster without a loss.

A node that drains has weight 0 in the view. So it owns no keys, and other nodes learn what it holds. It stores no more
chunks, but it still serves reads. First it moves the chunks in memory: those that eviction would remove last are first,
parents before their children. Then it moves the chunks that only its own tiers have (`raykv.node.drain_below`).
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.node.drain_below import BelowDrain
from raykv.node.moving import WINDOW_ROWS, ChunkSender, pin_window, runs_of
from raykv.node.peers import Peers
from raykv.protocol import chunk_keys
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from raykv.tier.segments.format import raw_keys
from raykv.types import Bits, KeyArray, Rows

SETTLE_BEATS: Final = 2
"""After the view has changed, the drain waits for this many heartbeats. Until then, other nodes announce their chunks
to the new owners of the keys."""
VIEW_S: Final = 5.0
"""The drain waits at most this long for a view in which this node has weight 0."""


class Drain:
    """Moves the chunks of one node to other nodes, on a thread of its own.

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
        peers: Peers,
        copied: Callable[[KeyArray], Bits],
    ) -> None:
        """`copied` returns for each key whether this node has made replicas of the chunk on other nodes."""
        self._copied = copied
        self._config, self._node_id = config, config.node_id
        self._store, self._lock, self._mover, self._view = store, lock, mover, peers.view
        self._sender = ChunkSender(config.node_id, peers, self._group, random.Random())
        self.progress, self.started = self._sender.progress, threading.Event()

    def stats(self) -> dict[str, Any]:
        """Return the progress as values that JSON can encode; empty if there is no drain."""
        return asdict(self.progress) if self.started.is_set() else {}

    def run(self, nbytes_per_s: float, stopping: threading.Event) -> None:
        """Move all chunks, at most `nbytes_per_s` bytes a second. Ends early if `stopping` is set."""
        self.progress.state, until_s = "moving", time.monotonic() + VIEW_S
        while self._takes_keys() and time.monotonic() < until_s and not stopping.wait(0.02):
            pass
        stopping.wait(SETTLE_BEATS * self._config.heartbeat_s)
        seen, gone, left = set[bytes](), [chunk_keys.empty()], list[Rows]()
        try:
            while not stopping.is_set() and len(keys := self._unseen(seen)):
                for first in range(0, len(keys), WINDOW_ROWS):
                    some = keys[first : first + WINDOW_ROWS]
                    seen.update(raw_keys(some))
                    gone.append(self._move(some, left, nbytes_per_s, stopping))
            missing = np.concatenate(gone)
            seen.difference_update(raw_keys(missing))
            self._count_evicted(missing)
            BelowDrain(self._mover, self._sender).run(seen, nbytes_per_s, stopping)
        finally:
            with self._lock:
                for rows in left:
                    self._store.unpin(rows)
        if not stopping.is_set():
            self.progress.state = "done"

    def _takes_keys(self) -> bool:
        member = self._view().member(self._node_id)
        return member is not None and member.weight > 0

    def _group(self, number: int) -> Namespace:
        return Namespace.model_validate_json(self._store.table.texts()[number])

    def _unseen(self, seen: set[bytes]) -> KeyArray:
        """Return the ready keys that are not in `seen`, the most valuable first, parents before children."""
        store, now = self._store, self._store.table.ticks(time.monotonic())
        rows = store.table.ready_rows()
        rows = rows[np.array([raw not in seen for raw in raw_keys(store.table.keys_of(rows))], np.bool_)]
        with self._lock:
            return store.table.keys_of(store.evictor.policies.victims(rows, len(rows), now)[::-1])

    def _move(self, keys: KeyArray, left: list[Rows], nbytes_per_s: float, stopping: threading.Event) -> KeyArray:
        """Move chunks in memory. Those that no node takes stay pinned: their rows are added to `left`.

        Returns the keys of chunks that are not in memory any more.
        """
        sender, arena = self._sender, self._store.arena.view
        with self._lock:
            window, pinned = pin_window(self._store, keys)
        here, unsent = pinned.rows >= 0, np.zeros(len(window.keys), np.bool_)
        offsets = pinned.offsets[here]
        try:
            # A Write of a chunk that a node holds as a replica makes the replica an ordinary chunk.
            elsewhere = sender.held_elsewhere(window.keys) & ~self._copied(window.keys)
            self.progress.elsewhere += int(elsewhere.sum())
            for places in runs_of(window, ~elsewhere):
                if stopping.is_set():
                    break
                nbytes = int(window.nbytes[places[0]])
                values = [arena[start : start + nbytes] for start in offsets[places].tolist()]
                unsent[sender.send(window, places, values)] = True
                sender.pace(nbytes * len(places), nbytes_per_s, stopping)
        finally:
            left.append(window.numbers[unsent])
            with self._lock:
                self._store.unpin(window.numbers[~unsent])
        return keys[~here]

    def _count_evicted(self, keys: KeyArray) -> None:
        """Count as left the chunks that were evicted before their turn, because readers promoted others."""
        keys = keys[self._mover.find(keys)[1] == 0]
        with self._lock:
            evicted = self._store.eviction_log.find(keys).reasons == Reason.EVICTED
        self.progress.leave(int(evicted.sum()), 0, "evicted before they were moved")
