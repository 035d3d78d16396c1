"""The leases of one connection to a node: slots that the peer may write to, and pins on chunks that it reads."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from raykv.errors import UsageError
from raykv.protocol.messages import Message
from raykv.storage.store import Store
from raykv.transport.base import Reply
from raykv.types import Rows

HandlerTable: TypeAlias = dict[type[Message], Callable[[Any, "NodeSession"], Reply]]
"""Maps the type of a request to the method that serves it."""


class NodeSession:
    """The leases of one connection: lent slots and pins. A caller that changes leases must hold the node's lock.

    Attributes:
        local: Whether the peer is a process of the same user on this host.
        lent: Rows of the slots lent to the connection.
        pins: Maps a row to the number of pins of this connection on the row.
    """

    def __init__(self, store: Store, lock: threading.Lock, stopping: threading.Event, *, local: bool) -> None:
        self._store, self._lock, self._stopping = store, lock, stopping
        self.local = local
        self.lent: set[int] = set()
        self.pins: Counter[int] = Counter()

    def require_lent(self, rows: Rows) -> None:
        """Raise UsageError if one of `rows` is not lent to this connection, or if `rows` contains a row twice."""
        numbers = rows.tolist()
        if not self.lent.issuperset(numbers) or len(set(numbers)) != len(numbers):
            raise UsageError(
                "rows that are not lent to this connection, or named twice (slots go back when their connection ends)"
            )

    def require_pinned(self, rows: Counter[int]) -> None:
        """Raise UsageError if `rows` counts more pins on a row than this connection has."""
        if rows - self.pins:
            raise UsageError("rows that are not pinned by this connection")

    def close(self) -> None:
        """End all leases. For QUARANTINE_S seconds no lent slot is reused, because the peer may still write to it."""
        if self._stopping.is_set():
            return  # the memory is about to be closed; the node's next process quarantines the lent slots
        with self._lock:
            self._store.quarantine(np.array(sorted(self.lent), np.int32), now_s=time.monotonic())
            self._store.unpin(np.array(list(self.pins.elements()), np.int32))
            self.lent.clear()
            self.pins.clear()
