"""The hot prefixes of a node: reports them to the directory, copies them to other nodes, and deletes old replicas.

`raykv.membership.heat_map` decides which node holds a replica. A node with a copy sends it to the nodes that the
directory names. A node deletes a replica when the directory has not listed it for UNLISTED_S. While the directory does
not answer, replicas stay; memory pressure evicts them before all other chunks.

After a restart, a node does not know which of its chunks are replicas. They are ordinary chunks then.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.node.heat import HeatMeter, prefixes_of
from raykv.node.moving import Window, batch_of, pin_window, runs_of
from raykv.protocol import chunk_keys
from raykv.protocol.heat import MAX_REPORTED, HeatOrders, HeatReport, HotPrefix
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import View
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.pool import ConnectionPool
from raykv.types import KeyArray, NodeId, Rows

log = logging.getLogger(__name__)

UNLISTED_S: Final = 10.0
KNOWN_S: Final = 30.0
"""A prefix is reported for this time after the directory has listed it, even if nobody reads it here. The time is
longer than UNLISTED_S: so replicas go before the node with the ordinary copy stops to report it."""
MAX_PREFIXES: Final = 1024
"""A node remembers at most this many prefixes. Chunks of further ones are ordinary chunks."""
MAX_PREFIX_CHUNKS: Final = 1 << 14
"""A node remembers at most this many chunks of one prefix."""
MAX_WAITING: Final = 256
"""At most this many copies wait to be sent. The directory orders further ones again."""
WRITE_S: Final = 10.0
"""Deadline of one Write."""


@dataclass(slots=True)
class Prefix:
    """A prefix that was copied to or from this node.

    Attributes:
        keys: Keys of its chunks, shape [n, 2].
        listed_s: When the directory last listed this prefix for this node, or when it was last copied.
        replica: Whether chunks of it are replicas on this node.
    """

    keys: KeyArray
    listed_s: float
    replica: bool


class Replicas:
    """The replicas of one node, and its reports to the directory. Thread-safe.

    Attributes:
        meter: Counts the reads from this node.
        copied: Number of chunks that other nodes have stored as replicas for this node.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        lock: threading.Lock,
        pool: ConnectionPool,
        view: Callable[[], View],
    ) -> None:
        self._node_id, self._store, self._lock = config.node_id, store, lock
        self._pool, self._view = pool, view
        self.meter = HeatMeter()
        self.copied = 0
        self._hot: dict[bytes, KeyArray] = {}  # prefixes in the last report, without those in `_prefixes`
        self._prefixes: dict[bytes, Prefix] = {}
        self._waiting: dict[tuple[bytes, NodeId], None] = {}
        self._ordered = threading.Event()

    def add(self, head: bytes, keys: KeyArray, stored: Rows, *, now_s: float) -> None:
        """Record a part of a prefix that another node has sent. `stored`: rows of those chunks that were missing here.

        The caller holds the node's lock.
        """
        full = head not in self._prefixes and len(self._prefixes) >= MAX_PREFIXES
        before = self._prefixes.get(head, Prefix(np.empty((0, 2), np.uint64), now_s, False))
        if full or len(before.keys) + len(keys) > MAX_PREFIX_CHUNKS:
            return
        self._store.row_hints.set_replica(stored, replica=True)
        keys = np.concatenate([before.keys, keys[~np.isin(keys[:, 1], before.keys[:, 1])]])
        self._prefixes[head] = Prefix(keys, now_s, before.replica or bool(stored.size))

    # -- reports and orders -----------------------------------------------------------------------------------------

    def report(self, *, now_s: float) -> HeatReport:
        """Return the heat of this node since the last report."""
        columns = self._store.table.columns
        with self._lock:
            self._forget(now_s)
            known = {
                head: (self._rows_of(prefix.keys).tolist(), prefix.replica) for head, prefix in self._prefixes.items()
            }
            own = np.array([row for rows, replica in known.values() if replica for row in rows], np.int32)
            self.meter.update(columns, own[self._store.row_hints.replicas(own)], now_s=now_s)
        load_of = dict(zip(*(column.tolist() for column in self.meter.loads(columns)), strict=True))
        found = [
            HotPrefix(head, sum(load_of.pop(row, 0.0) for row in rows), len(rows), replica)
            for head, (rows, replica) in known.items()
            if rows
        ]
        rows, loads = np.array([*load_of], np.int32), np.array([*load_of.values()])
        self._hot = {}
        for places in prefixes_of(columns, rows, loads)[:MAX_REPORTED]:
            keys = self._store.table.keys_of(rows[places])
            head = chunk_keys.to_bytes(keys[:1])
            self._hot[head] = keys
            found.append(HotPrefix(head, float(loads[places].sum()), len(places)))
        found.sort(key=lambda prefix: -prefix.load)
        return HeatReport(self.meter.load, tuple(found[:MAX_REPORTED]))

    def _rows_of(self, keys: KeyArray) -> Rows:
        rows = self._store.table.find(keys)
        found: Rows = rows[rows >= 0]
        return found

    def _forget(self, now_s: float) -> None:
        """Forget prefixes that have no replica here, and that were not copied for KNOWN_S."""
        self._prefixes = {
            head: prefix
            for head, prefix in self._prefixes.items()
            if prefix.replica or now_s - prefix.listed_s < KNOWN_S
        }

    def follow(self, orders: HeatOrders, *, now_s: float) -> None:
        """Follow the directory's answer: keep or delete replicas, and queue the copies for `run`."""
        with self._lock:
            for head in orders.adopt:
                if prefix := self._prefixes.get(head):
                    self._store.row_hints.set_replica(self._rows_of(prefix.keys), replica=False)
                    prefix.replica, prefix.listed_s = False, now_s
            for head, prefix in list(self._prefixes.items()):
                if head in orders.keep:
                    prefix.listed_s = now_s
                elif prefix.replica and now_s - prefix.listed_s > UNLISTED_S:
                    self._retire(prefix, now_s)
                    del self._prefixes[head]
            for head in {*orders.keep, *(order.head for order in orders.copies)} & set(self._hot):
                self._prefixes.setdefault(head, Prefix(self._hot[head], now_s, False))
            for order in orders.copies:
                for target in order.targets if order.head in self._prefixes else ():
                    if len(self._waiting) < MAX_WAITING:
                        self._waiting[order.head, target] = None
        if self._waiting:
            self._ordered.set()

    def _retire(self, prefix: Prefix, now_s: float) -> None:
        rows = self._rows_of(prefix.keys)
        rows = np.unique(rows[self._store.row_hints.replicas(rows)])
        self._store.evictor.remove(rows, self._store.table.ticks(now_s), Reason.RETIRED)

    # -- copies -----------------------------------------------------------------------------------------------------

    def run(self, stopping: threading.Event) -> None:
        """Send copies until `stopping` is set. A thread of the node runs this method."""
        while not stopping.is_set():
            self._ordered.wait()
            self._ordered.clear()
            while self._waiting and not stopping.is_set():
                head, target = next(iter(self._waiting))
                try:
                    self._copy(head, target)
                except RayKVError as error:  # the directory orders the copy again
                    log.log(
                        logging.INFO if isinstance(error, TransientError) else logging.WARNING,
                        "%s does not take a replica: %s",
                        target,
                        error,
                    )
                self._waiting.pop((head, target), None)

    def wake(self) -> None:
        """Wake `run`, so that it sees that the node stops."""
        self._ordered.set()

    def _copy(self, head: bytes, target: NodeId) -> None:
        """Send one prefix to another node. Raises RayKVError if the node does not take it."""
        member, prefix = self._view().member(target), self._prefixes.get(head)
        if member is None or prefix is None or target == self._node_id:
            return
        prefix.listed_s = time.monotonic()
        window, pinned = pin_window(self._store, self._lock, prefix.keys)
        offsets = pinned.offsets[pinned.rows >= 0]
        try:
            for places in runs_of(window, np.ones(len(window.keys), np.bool_)):
                write = self._write_of(head, window, places, offsets[places].tolist())
                deadline_s = time.monotonic() + WRITE_S
                self.copied += self._pool.ask(
                    member.address,
                    lambda link: write.send(link, deadline_s=deadline_s),  # noqa: B023 - used at once
                    deadline_s=deadline_s,
                )
        finally:
            with self._lock:
                self._store.unpin(window.numbers)

    def _write_of(self, head: bytes, window: Window, places: list[int], offsets: list[int]) -> BulkWrite:
        table, arena, nbytes = self._store.table, self._store.arena.view, int(window.nbytes[places[0]])
        group = Namespace.model_validate_json(table.texts()[int(window.groups[places[0]])])
        values = [[arena[start : start + nbytes]] for start in offsets]
        return BulkWrite(group, batch_of(window, places), values, replica=head)

    def stats(self) -> dict[str, Any]:
        """Return counters, as values that JSON can encode."""
        with self._lock:
            held = [self._rows_of(prefix.keys) for prefix in self._prefixes.values() if prefix.replica]
            rows = np.concatenate([np.empty(0, np.int32), *held])
            rows = rows[self._store.row_hints.replicas(rows)]
            nbytes = int(self._store.table.columns.nbytes[rows].sum())
        return {
            "load_nbytes_per_s": round(self.meter.load),
            "replicas": len(rows),
            "replica_nbytes": nbytes,
            "copied": self.copied,
        }
