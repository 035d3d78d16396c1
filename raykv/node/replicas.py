"""The hot prefixes of a node: reports them to the directory, copies them to other nodes, and deletes old replicas.

`raykv.membership.heat_map` decides which node holds a replica. A node with a copy sends it to the nodes that the
directory names. `raykv.node.prefixes` decides which replicas stay on a node. While the directory does not answer,
replicas stay; memory pressure evicts them before all other chunks.

After a restart, a node does not know which of its chunks are replicas. They are ordinary chunks then.
"""

import logging
import threading
import time
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.errors import RayKVError, TransientError
from raykv.memory.layout import Columns
from raykv.node.heat import HeatMeter
from raykv.node.moving import Window, batch_of, pin_window, runs_of
from raykv.node.peers import Peers
from raykv.node.prefixes import Prefixes
from raykv.protocol.heat import HeatOrders, HeatReport
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.transport.bulk_write import BulkWrite
from raykv.types import Bits, KeyArray, NodeId, Rows

log = logging.getLogger(__name__)

MAX_WAITING: Final = 256
"""At most this many copies wait to be sent. The directory orders further ones again."""
WRITE_S: Final = 10.0
"""Deadline of one Write."""


class _StoreChunks:
    """A node's chunks, as `raykv.node.prefixes` sees them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def columns(self) -> Columns:
        return self._store.table.columns

    def rows_of(self, keys: KeyArray) -> Rows:
        rows = self._store.table.find(keys)
        found: Rows = rows[rows >= 0]
        return found

    def keys_of(self, rows: Rows) -> KeyArray:
        return self._store.table.keys_of(rows)

    def replicas(self, rows: Rows) -> Bits:
        return self._store.row_hints.replicas(rows)

    def set_replica(self, rows: Rows, *, replica: bool) -> None:
        self._store.row_hints.set_replica(rows, replica=replica)

    def retire(self, rows: Rows, *, now_s: float) -> None:
        self._store.evictor.remove(rows, self._store.table.ticks(now_s), Reason.RETIRED)


class Replicas:
    """The replicas of one node, and its reports to the directory. Thread-safe.

    Attributes:
        copied: Number of chunks that other nodes have stored as replicas for this node.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        lock: threading.Lock,
        peers: Peers,
    ) -> None:
        self._node_id, self._store, self._lock = config.node_id, store, lock
        self._peers = peers
        self._prefixes = Prefixes(_StoreChunks(store))
        self.copied = 0
        self._waiting: dict[tuple[bytes, NodeId], None] = {}
        self._ordered = threading.Event()

    @property
    def meter(self) -> HeatMeter:
        """Counts the reads from this node."""
        return self._prefixes.meter

    def add(self, head: bytes, keys: KeyArray, stored: Rows, *, now_s: float) -> None:
        """Record a part of a prefix that another node has sent: see `Prefixes.add`. The caller holds the lock."""
        self._prefixes.add(head, keys, stored, now_s=now_s)

    def make_ordinary(self, keys: KeyArray) -> None:
        """Make replicas ordinary chunks, because the node with the ordinary copy sends them before it leaves.

        The caller holds the lock.
        """
        rows = self._store.table.find(keys)
        rows = rows[rows >= 0]
        if self._store.row_hints.replicas(rows).any():
            self._store.row_hints.set_replica(rows, replica=False)

    # -- reports and orders -----------------------------------------------------------------------------------------

    def report(self, *, now_s: float) -> HeatReport:
        """Return the heat of this node since the last report."""
        with self._lock:
            known = self._prefixes.measure(now_s=now_s)
        return self._prefixes.report(known)

    def follow(self, orders: HeatOrders, *, now_s: float) -> None:
        """Follow the directory's answer: keep or delete replicas, and queue the copies for `run`."""
        with self._lock:
            for copy in self._prefixes.follow(orders, now_s=now_s):
                if len(self._waiting) < MAX_WAITING:
                    self._waiting[copy] = None
        if self._waiting:
            self._ordered.set()

    def copied_keys(self, keys: KeyArray) -> Bits:
        """Return for each key whether other nodes may hold replicas that this node has made."""
        with self._lock:
            known = self._prefixes.ordinary_keys()
        found: Bits = np.isin(keys[:, 1], known[:, 1])
        return found

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
        member = self._peers.view().member(target)
        if member is None or target == self._node_id:
            return
        keys = self._prefixes.begin_copy(head, now_s=time.monotonic())
        if keys is None:
            return
        with self._lock:
            window, pinned = pin_window(self._store, keys)
        offsets = pinned.offsets[pinned.rows >= 0]
        try:
            for places in runs_of(window, np.ones(len(window.keys), np.bool_)):
                write = self._write_of(head, window, places, offsets[places].tolist())
                self.copied += self._peers.write(member, write, deadline_s=time.monotonic() + WRITE_S)
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
            rows = self._prefixes.replica_rows()
            nbytes = int(self._store.table.columns.nbytes[rows].sum())
        return {
            "load_nbytes_per_s": round(self.meter.load),
            "replicas": len(rows),
            "replica_nbytes": nbytes,
            "copied": self.copied,
        }
