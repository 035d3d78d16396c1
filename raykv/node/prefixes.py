"""The hot prefixes of a node: what it reports to the directory, and which replicas it keeps.

`Prefixes` has no clock, lock or thread. `raykv.node.replicas` runs it on a node, `raykv.simulation` in a simulation.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from raykv.memory.layout import Columns
from raykv.node.heat import HeatMeter, prefixes_of
from raykv.protocol import chunk_keys
from raykv.protocol.heat import MAX_REPORTED, HeatOrders, HeatReport, HotPrefix
from raykv.types import Bits, KeyArray, NodeId, Rows

UNLISTED_S: Final = 10.0
KNOWN_S: Final = 30.0
"""A prefix is reported for this time after the directory has listed it, even if nobody reads it here. The time is
longer than UNLISTED_S: so replicas go before the node with the ordinary copy stops to report it."""
MAX_PREFIXES: Final = 1024
"""A node remembers at most this many prefixes. Chunks of further ones are ordinary chunks."""
MAX_PREFIX_CHUNKS: Final = 1 << 14
"""A node remembers at most this many chunks of one prefix."""


class Chunks(Protocol):
    """The chunks of a node, as `Prefixes` sees them."""

    @property
    def columns(self) -> Columns: ...

    def rows_of(self, keys: KeyArray) -> Rows:
        """Return the rows of those chunks that are here."""
        ...

    def keys_of(self, rows: Rows) -> KeyArray: ...

    def replicas(self, rows: Rows) -> Bits:
        """Return which of these rows are replicas."""
        ...

    def set_replica(self, rows: Rows, *, replica: bool) -> None:
        """Mark chunks as replicas, or as ordinary chunks again."""
        ...

    def retire(self, rows: Rows, *, now_s: float) -> None:
        """Delete replicas."""
        ...


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


class Prefixes:
    """The prefixes of one node.

    Attributes:
        meter: Counts the reads from this node.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.meter = HeatMeter()
        self._hot: dict[bytes, KeyArray] = {}  # prefixes in the last report, without those in `_prefixes`
        self._prefixes: dict[bytes, Prefix] = {}

    def __len__(self) -> int:
        """Return the number of prefixes that were copied to or from this node."""
        return len(self._prefixes)

    def add(self, head: bytes, keys: KeyArray, stored: Rows, *, now_s: float) -> None:
        """Record a part of a prefix that another node has sent. `stored`: rows of the chunks that were missing here."""
        full = head not in self._prefixes and len(self._prefixes) >= MAX_PREFIXES
        before = self._prefixes.get(head, Prefix(np.empty((0, 2), np.uint64), now_s, False))
        if full or len(before.keys) + len(keys) > MAX_PREFIX_CHUNKS:
            return
        self._chunks.set_replica(stored, replica=True)
        keys = np.concatenate([before.keys, keys[~np.isin(keys[:, 1], before.keys[:, 1])]])
        self._prefixes[head] = Prefix(keys, now_s, before.replica or bool(stored.size))

    def measure(self, *, now_s: float) -> dict[bytes, tuple[list[int], bool]]:
        """Update the meter. Return the rows here of each known prefix, and whether they are replicas, for `report`."""
        self._prefixes = {
            head: prefix
            for head, prefix in self._prefixes.items()
            if prefix.replica or now_s - prefix.listed_s < KNOWN_S
        }
        known = {
            head: (self._chunks.rows_of(prefix.keys).tolist(), prefix.replica)
            for head, prefix in self._prefixes.items()
        }
        own = np.unique(np.array([row for rows, replica in known.values() if replica for row in rows], np.int32))
        self.meter.update(self._chunks.columns, own[self._chunks.replicas(own)], now_s=now_s)
        return known

    def report(self, known: dict[bytes, tuple[list[int], bool]]) -> HeatReport:
        """Return the heat of this node. `known`: the result of `measure`, which was called just before."""
        columns = self._chunks.columns
        load_of = dict(zip(*(column.tolist() for column in self.meter.loads(columns)), strict=True))
        nbytes = columns.nbytes
        found = [
            HotPrefix(head, sum(load_of.pop(row, 0.0) for row in rows), len(rows), replica, int(nbytes[rows].sum()))
            for head, (rows, replica) in known.items()
            if rows
        ]
        rows, loads = np.array([*load_of], np.int32), np.array([*load_of.values()])
        self._hot = {}
        for places in prefixes_of(columns, rows, loads)[:MAX_REPORTED]:
            keys = self._chunks.keys_of(rows[places])
            head = chunk_keys.to_bytes(keys[:1])
            self._hot[head] = keys
            found.append(
                HotPrefix(head, float(loads[places].sum()), len(places), False, int(nbytes[rows[places]].sum()))
            )
        found.sort(key=lambda prefix: -prefix.load)
        return HeatReport(self.meter.load, tuple(found[:MAX_REPORTED]))

    def follow(self, orders: HeatOrders, *, now_s: float) -> list[tuple[bytes, NodeId]]:
        """Keep or delete replicas as ordered. Return the ordered copies: (head of the prefix, node to send it to)."""
        keep = frozenset(orders.keep)
        for head in orders.adopt:
            if prefix := self._prefixes.get(head):
                self._chunks.set_replica(self._chunks.rows_of(prefix.keys), replica=False)
                prefix.replica, prefix.listed_s = False, now_s
        for head in keep & self._prefixes.keys():
            self._prefixes[head].listed_s = now_s
        unlisted = [
            head for head, prefix in self._prefixes.items() if prefix.replica and now_s - prefix.listed_s > UNLISTED_S
        ]
        if unlisted:
            before = self.replica_rows()
            for head in unlisted:
                del self._prefixes[head]
            self._chunks.retire(np.setdiff1d(before, self.replica_rows()), now_s=now_s)  # a chunk may be in several
        for head in {*keep, *(order.head for order in orders.copies)} & self._hot.keys():
            self._prefixes.setdefault(head, Prefix(self._hot[head], now_s, False))
        return [
            (order.head, target) for order in orders.copies if order.head in self._prefixes for target in order.targets
        ]

    def begin_copy(self, head: bytes, *, now_s: float) -> KeyArray | None:
        """Return the keys of a prefix that is about to be copied; None if the node has forgotten it."""
        prefix = self._prefixes.get(head)
        if prefix is None:
            return None
        prefix.listed_s = now_s
        return prefix.keys

    def ordinary_keys(self) -> KeyArray:
        """Return the keys of the prefixes that this node holds as ordinary chunks, and that have replicas elsewhere."""
        held = [prefix.keys for prefix in self._prefixes.values() if not prefix.replica]
        return np.concatenate([np.empty((0, 2), np.uint64), *held])

    def replica_rows(self) -> Rows:
        """Return the rows of all replicas, each once. A chunk may be in several prefixes."""
        held = [self._chunks.rows_of(prefix.keys) for prefix in self._prefixes.values() if prefix.replica]
        rows = np.unique(np.concatenate([np.empty(0, np.int32), *held]))
        return rows[self._chunks.replicas(rows)]
