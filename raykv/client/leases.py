"""Leases of a caller: slots that the caller fills itself, and pinned chunks that the caller reads in place.

A lease belongs to one connection to the node, and ends with this connection.
"""

import time
from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from raykv.client.arguments import deadline_after
from raykv.client.local_connection import LocalConnection
from raykv.client.slot_pool import LentBatch
from raykv.client.writer import Writer
from raykv.errors import ProtocolError, TransientError
from raykv.memory.reader import ShmReader
from raykv.protocol import messages
from raykv.protocol.codec import array
from raykv.types import PutResult

RELEASE_S: Final = 5.0
"""Longest time that `Pins.release` waits for the node's answer."""


class Reservation:
    """Leased slots of the arena, into which the caller writes chunks. Readers see the chunks after `commit`.

    The lease ends when the connection breaks. A forked child has no lease. The node may reuse the slots QUARANTINE_S
    after the lease has ended. So a caller that writes for seconds must check `valid` before it writes each part.

    Attributes:
        index: For each view, the position of its key in the keys given to `Client.reserve`.
        views: For each reserved chunk, the memory to write to.
        reason: Why some chunks that must be stored have no view. Empty if all of them have a view.
    """

    def __init__(self, writer: Writer | None, lent: LentBatch) -> None:
        """Use `Client.reserve` instead. If `writer` is None, there are no views."""
        self._lent = lent
        self._writer = writer if lent.slots else None  # None if there are no views, and after `commit` or `abort`
        self.index: npt.NDArray[np.int32] = np.array(lent.positions, np.int32)
        self.views = lent.views
        self.reason = lent.reason

    def valid(self, *, timeout_s: float = 1.0) -> bool:
        """Return whether the caller may write to the views for the next QUARANTINE_S - TRUST_S seconds.

        False: the caller must not write any more, because the connection broke, the node does not answer, or the slots
        were committed or given back.

        Args:
            timeout_s: How long to wait for the node. The node is asked only if the last request that it answered was
                sent more than TRUST_S ago.
        """
        deadline_s = deadline_after(timeout_s)
        return self._writer is not None and self._writer.supply.lease_valid(self._lent, deadline_s)

    def commit(self, *, timeout_s: float = 5.0) -> PutResult:
        """Make the chunks visible. The caller must have filled all views, and must not write to them afterwards.

        Args:
            timeout_s: How long to wait for the node's answer. Without an answer, the chunks count as `posted`, and
                `Client.flush` returns their result.
        """
        deadline_s, result = deadline_after(timeout_s), self._lent.result
        writer, self._writer = self._writer, None
        return result if writer is None else result + writer.commit_lent(self._lent, deadline_s=deadline_s)

    def abort(self, *, timeout_s: float = 5.0) -> None:
        """Give the slots back to the node without storing anything.

        Args:
            timeout_s: How long to wait for the node's answer.
        """
        deadline_s = deadline_after(timeout_s)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.supply.give_back(self._lent, deadline_s)


class Pins:
    """Pinned chunks, read in place. The pins end with the `with` block, or when the connection to the node breaks.

    Attributes:
        views: For each key, the read-only bytes of its chunk. None: the chunk is not in this host's memory.
    """

    def __init__(self, local: LocalConnection, held: messages.Held, life: int, reader: ShmReader) -> None:
        """Use `Client.pin` instead. Raises ProtocolError if `held` names rows or bytes that the node does not have."""
        self._local, self._life, self._reader = local, life, reader
        count, arena_nbytes = len(held.rows) // 4, reader.arena.nbytes
        self._rows = array(held.rows, "<i4", count)
        starts, lengths = array(held.offsets, "<u8", count).tolist(), array(held.nbytes, "<u4", count).tolist()
        for row, start, length in zip(self._rows.tolist(), starts, lengths, strict=True):
            if row >= reader.table.rows or (row >= 0 and start + length > arena_nbytes):
                raise ProtocolError(f"row {row} with bytes {start} .. {start + length} where no chunk can be")
        self._generations = reader.table.columns.generation[np.maximum(self._rows, 0)]
        self.views: Sequence[memoryview | None] = [
            reader.arena.view[start : start + length].toreadonly() if row >= 0 else None
            for row, start, length in zip(self._rows.tolist(), starts, lengths, strict=True)
        ]

    def valid(self) -> bool:
        """Return whether all views still show the pinned chunks.

        A node that restarts loses the pins, and may reuse the slots. So call this method after the last use of the
        views, but before `release`. True proves that all bytes read from the views were right.
        """
        held = self._rows >= 0
        columns = self._reader.table.columns
        return bool((columns.generation[self._rows[held]] == self._generations[held]).all())

    def release(self) -> None:
        """End the pins. The caller must not use the views afterwards."""
        rows, self._rows = self._rows, self._rows[:0]
        if (rows >= 0).any():
            try:
                request = messages.Unpin(rows.tobytes())
                self._local.call(request, time.monotonic() + RELEASE_S, life=self._life)
            except TransientError:
                pass  # the pins ended with the connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
