"""The leases of one connection to a node: slots that the peer may write to, and pins on chunks that it reads."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from raykv.errors import CapacityError, UsageError
from raykv.memory.slots import slot_nbytes
from raykv.protocol.messages import Message
from raykv.storage.store import Pinned, Store
from raykv.transport.base import Reply
from raykv.types import Rows

if TYPE_CHECKING:
    from raykv.transport.rdma.exports import PeerPairs

LEASE_SHARE: Final = 2
"""The lent slots and pinned chunks of one connection take at most 1 / LEASE_SHARE of the arena, or one slot."""
LEASE_IDLE_S: Final = 600.0
"""A connection that has leases, and sends nothing for this long, is closed. This ends its leases."""
MAX_OPENED: Final = 256
"""A connection may open at most this many quota groups. A node has 1 024 in all."""

HandlerTable: TypeAlias = dict[type[Message], Callable[[Any, "NodeSession"], Reply]]
"""Maps the type of a request to the method that serves it."""


class NodeSession:
    """The leases of one connection: lent slots and pins. A caller that changes leases must hold the node's lock.

    Attributes:
        local: Whether the peer is a process of the same user on this host.
        lent: Maps the row of each slot lent to the connection to the slot's size in bytes.
        pins: Maps a row to the number of pins of this connection on the row.
        opened: Digests of the quota groups that the connection has opened.
        queue_pairs: The connection's queue pairs for RDMA; None if it has none.
    """

    def __init__(self, store: Store, lock: threading.Lock, stopping: threading.Event, *, local: bool) -> None:
        self._store, self._lock, self._stopping = store, lock, stopping
        self.local = local
        self.lent: dict[int, int] = {}
        self.pins: Counter[int] = Counter()
        self.opened: set[bytes] = set()
        self.queue_pairs: PeerPairs | None = None
        self._most_nbytes = store.arena.nbytes // LEASE_SHARE
        self._nbytes = 0  # of the lent slots and the pinned chunks

    @property
    def patience_s(self) -> float:
        """How long the server waits for the next request before it closes the connection."""
        return LEASE_IDLE_S if self.lent or self.pins else math.inf

    def most_slots(self, nbytes: int) -> int:
        """Return how many slots for chunks of `nbytes` bytes may be lent to this connection now."""
        room = (self._most_nbytes - self._nbytes) // slot_nbytes(nbytes)
        return max(0 if self._nbytes else 1, room)

    def add_lent(self, rows: Rows, nbytes: int) -> None:
        """Record slots that were lent for chunks of `nbytes` bytes."""
        size = slot_nbytes(nbytes)
        self.lent.update(dict.fromkeys(rows.tolist(), size))
        self._nbytes += len(rows) * size

    def end_lent(self, rows: Rows) -> None:
        """Record that slots were committed or given back."""
        self._nbytes -= sum(self.lent.pop(row) for row in rows.tolist())

    def add_pins(self, pinned: Pinned) -> None:
        """Record pins. Raises CapacityError if the connection would have too many leases. Then nothing is recorded."""
        nbytes = int(pinned.nbytes[pinned.rows >= 0].sum())
        if self._nbytes and self._nbytes + nbytes > self._most_nbytes:
            raise CapacityError(
                f"this connection would hold {self._nbytes + nbytes:,} bytes of slots and pinned chunks; at most "
                f"{self._most_nbytes:,} are allowed: unpin chunks first, or pin fewer at once"
            )
        self._nbytes += nbytes
        self.pins.update(pinned.rows[pinned.rows >= 0].tolist())

    def end_pins(self, rows: Rows) -> None:
        """Record that pins have ended. The caller must not have unpinned the rows in the store yet."""
        self._nbytes -= int(self._store.table.columns.nbytes[rows].sum())
        self.pins -= Counter(rows.tolist())

    def add_opened(self, digest: bytes) -> None:
        """Record that the connection opens a quota group. Raises UsageError if it opens too many."""
        if len(self.opened) >= MAX_OPENED and digest not in self.opened:
            raise UsageError(f"a connection may open at most {MAX_OPENED} namespaces: use further connections")
        self.opened.add(digest)

    def require_lent(self, rows: Rows) -> None:
        """Raise UsageError if one of `rows` is not lent to this connection, or if `rows` contains a row twice."""
        numbers = rows.tolist()
        if not self.lent.keys() >= set(numbers) or len(set(numbers)) != len(numbers):
            raise UsageError(
                "rows that are not lent to this connection, or named twice (slots go back when their connection ends)"
            )

    def require_pinned(self, rows: Counter[int]) -> None:
        """Raise UsageError if `rows` counts more pins on a row than this connection has."""
        if rows - self.pins:
            raise UsageError("rows that are not pinned by this connection")

    def require_queue_pairs(self) -> "PeerPairs":
        """Return the connection's queue pairs. Raises UsageError if it has none, or if they were destroyed."""
        if self.queue_pairs is None or self.queue_pairs.closed:
            raise UsageError("this connection has no queue pairs: send ConnectRdma first")
        return self.queue_pairs

    def close(self) -> None:
        """End all leases. For QUARANTINE_S seconds no lent slot is reused, because the peer may still write to it."""
        if self.queue_pairs is not None:
            self.queue_pairs.close()
        if self._stopping.is_set():
            return  # the memory is about to be closed; the node's next process quarantines the lent slots
        with self._lock:
            self._store.quarantine(np.array(sorted(self.lent), np.int32), now_s=time.monotonic())
            self._store.unpin(np.array(list(self.pins.elements()), np.int32))
            self.lent.clear()
            self.pins.clear()
            self._nbytes = 0
