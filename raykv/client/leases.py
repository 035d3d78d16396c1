"""Leases that a caller holds for a while: slots that it fills itself, and pinned chunks that it views in place.

A lease belongs to the connection on which the node gave it, and ends with that connection.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from raykv.client.arguments import deadline_after
from raykv.client.local_connection import LocalConnection
from raykv.client.slot_pool import LentBatch, sum_of
from raykv.client.writer import Writer
from raykv.errors import TransientError
from raykv.memory.reader import ShmReader
from raykv.protocol import messages
from raykv.types import PutResult

RELEASE_S: Final = 5.0
"""How long `Pins.release` waits for the node."""


class Reservation:
    """Slots of the arena to write chunks into. Readers see the chunks after `commit`.

    The lease ends when the connection breaks, and in a forked child. The slots are then in quarantine for QUARANTINE_S,
    and free after that: ask `valid` before each piece when writing takes longer than a moment.

    Attributes:
        index: Which of the keys each view is for, in order.
        views: The bytes to write.
        reason: Why there are fewer views than chunks that are not stored; empty when there are enough.
    """

    def __init__(self, writer: Writer | None, lent: LentBatch) -> None:
        """Use `Client.reserve`. Without a writer there is nothing to write."""
        self._writer, self._lent = writer, lent
        self.index: npt.NDArray[np.int32] = np.array(lent.positions, np.int32)
        self.views = lent.views
        self.reason = lent.reason
        self._open = bool(lent.slots) and writer is not None

    def valid(self, *, timeout_s: float = 1.0) -> bool:
        """Whether the views may be written to for the next QUARANTINE_S - TRUST_S seconds. Seldom takes a call.

        False: the connection is gone, or the node does not answer. Nothing may be written any more.

        Args:
            timeout_s: How long to wait for the node if it must be asked.
        """
        writer, deadline_s = self._writer, deadline_after(timeout_s)
        return self._open and writer is not None and writer.supply.lease_valid(self._lent, deadline_s)

    def commit(self, *, timeout_s: float = 5.0) -> PutResult:
        """Make the chunks visible. All views must be written by now, and must not be written to afterwards.

        Args:
            timeout_s: How long to wait for the node. Without an answer the chunks are `posted`: see `Client.flush`.
        """
        deadline_s, lent, was_open = deadline_after(timeout_s), self._lent, self._open
        self._open = False
        result = PutResult(0, lent.existed, lent.skipped, lent.reason)
        if was_open and self._writer is not None:
            return sum_of(result, self._writer.commit_lent(lent, deadline_s=deadline_s))
        return result

    def abort(self, *, timeout_s: float = 5.0) -> None:
        """Give the slots back unwritten.

        Args:
            timeout_s: How long to wait for the node. Without an answer they are given back later.
        """
        deadline_s = deadline_after(timeout_s)
        if self._open and self._writer is not None:
            self._open = False
            self._writer.supply.give_back(self._lent, deadline_s)


class Pins:
    """Chunks viewed in place, for as long as this context lasts and its connection lives.

    Attributes:
        views: One entry a key: the chunk's bytes, read-only; None where it is not in this host's memory.
    """

    def __init__(self, local: LocalConnection, held: messages.Held, life: int, reader: ShmReader) -> None:
        """Use `Client.pin`."""
        self._local, self._life, self._reader = local, life, reader
        self._rows = np.frombuffer(held.rows, "<i4")
        self._generations = reader.table.columns.generation[self._rows]
        starts = np.frombuffer(held.offsets, "<u8").tolist()
        lengths = np.frombuffer(held.nbytes, "<u4").tolist()
        self.views: Sequence[memoryview | None] = [
            reader.arena.view[start : start + length].toreadonly() if row >= 0 else None
            for row, start, length in zip(self._rows.tolist(), starts, lengths, strict=True)
        ]

    def valid(self) -> bool:
        """Whether the views still show what was pinned. False after a restart of the node, once a slot is used again.

        Ask after use, if a restart in between would matter.
        """
        held = self._rows >= 0
        columns = self._reader.table.columns
        return bool((columns.generation[self._rows[held]] == self._generations[held]).all())

    def release(self) -> None:
        """End the pins. The views must not be used any more."""
        rows, self._rows = self._rows, self._rows[:0]
        if (rows >= 0).any():
            try:
                request = messages.Unpin(rows.tobytes())
                self._local.call(request, deadline_s=time.monotonic() + RELEASE_S, life=self._life)
            except TransientError:
                pass  # the pins ended with the connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
