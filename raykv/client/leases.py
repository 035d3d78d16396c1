"""Leases that a caller holds for a while: chunks being written in place, and chunks viewed in place.

They hang on the connection on which the node gave them, and are given back on it.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from raykv.errors import TransientError
from raykv.memory.copying import checksum_of
from raykv.memory.reader import ShmReader
from raykv.protocol import messages
from raykv.types import PutResult


class Lender(Protocol):
    """Who gave them: `LocalConnection`."""

    def call(self, request: messages.Message, *, deadline_s: float, life: int | None = None) -> messages.Answer:
        """See `LocalConnection.call`."""
        ...

    def holds(self, life: int, deadline_s: float) -> bool:
        """See `LocalConnection.holds`."""
        ...

    def abandon(self, rows: bytes, life: int, deadline_s: float) -> None:
        """See `LocalConnection.abandon`."""
        ...


class Reservation:
    """Slots of the arena to write chunks into, invisible to others until `commit`. Dies with the connection.

    After that the slots rest for QUARANTINE_S, and then serve others: who writes for longer asks `valid` in between.

    Attributes:
        index: Places, in the keys asked for, of the chunks to write, in order.
        views: For each of them the bytes to write.
        reason: Why there is no room for the others that are missing; empty when none is.
    """

    def __init__(
        self,
        node: Lender | None,
        life: int,
        reader: ShmReader | None,
        asked: int,
        nbytes: int,
        granted: messages.Granted,
    ) -> None:
        self._node, self._life, self._asked, self._full = node, life, asked, granted.full
        self._rows = granted.rows
        self.index = np.frombuffer(granted.positions, "<i4")
        starts = np.frombuffer(granted.offsets, "<u8").tolist()
        self.views: list[memoryview] = []
        if reader is not None:
            self.views = [reader.arena.view[start : start + nbytes] for start in starts]
        self.reason = "full" if granted.full else ""
        self._open = bool(starts)

    @classmethod
    def refused(cls, asked: int, reason: str) -> Self:
        """A reservation of nothing, because the node is away."""
        made = cls(None, 0, None, asked, 0, messages.Granted(b"", b"", b"", asked))
        made.reason = reason
        return made

    def valid(self, *, timeout_s: float = 1.0) -> bool:
        """Whether the views may be written to for the next seconds (at least QUARANTINE_S - TRUST_S).

        False: the node was restarted, the connection is gone, or the node does not answer; nothing may be written any
        more. That nearly always takes no call.

        Args:
            timeout_s: Seconds to wait for the node, if it has to be asked.
        """
        if not self._open or self._node is None:
            return False
        return self._node.holds(self._life, time.monotonic() + timeout_s)

    def commit(self, *, timeout_s: float = 5.0) -> PutResult:
        """Make the chunks visible. All views must be written by now, and are not to be touched afterwards.

        Args:
            timeout_s: Seconds to wait for the node.
        """
        stored, reason = len(self.views), self.reason
        existed = self._asked - stored - self._full
        if self._open:
            checksums = np.array([checksum_of([view]) for view in self.views], np.uint64)
            try:
                self._call(messages.Commit(self._rows, checksums.tobytes()), timeout_s)
            except TransientError as error:
                stored, reason = 0, str(error)
                self.abort(timeout_s=0.0)  # if it never went out, the slots are still ours to give back
        self._open = False
        return PutResult(stored, existed, self._asked - existed - stored, reason)

    def abort(self, *, timeout_s: float = 5.0) -> None:
        """Give the slots back unwritten: now, or with the next call if the node does not answer in time."""
        if self._open and self._node is not None:
            self._open = False
            self._node.abandon(self._rows, self._life, time.monotonic() + timeout_s)

    def _call(self, request: messages.Message, timeout_s: float) -> None:
        assert self._node is not None
        self._node.call(request, deadline_s=time.monotonic() + timeout_s, life=self._life)


class Pins:
    """Chunks viewed in place, held as long as this context lasts and its connection lives.

    Attributes:
        views: One entry a key: the chunk's bytes, read-only; None where it is not here.
    """

    def __init__(self, node: Lender, life: int, reader: ShmReader, held: messages.Held) -> None:
        self._node, self._life, self._reader = node, life, reader
        self._rows = np.frombuffer(held.rows, "<i4")
        self._generations = reader.table.columns.generation[self._rows]
        starts = np.frombuffer(held.offsets, "<u8").tolist()
        lengths = np.frombuffer(held.nbytes, "<u4").tolist()
        self.views: Sequence[memoryview | None] = [
            reader.arena.view[start : start + length].toreadonly() if row >= 0 else None
            for row, start, length in zip(self._rows.tolist(), starts, lengths, strict=True)
        ]

    def valid(self) -> bool:
        """Whether the views still show what was pinned: false once the node was restarted and reused the room.

        A pin lives as long as its connection. Who cannot bear a restart in the middle asks this after use.
        """
        held = self._rows >= 0
        columns = self._reader.table.columns
        return bool((columns.generation[self._rows[held]] == self._generations[held]).all())

    def release(self) -> None:
        """Let go. The views must not be used any more."""
        rows, self._rows = self._rows, self._rows[:0]
        if (rows >= 0).any():
            try:
                self._node.call(messages.Unpin(rows.tobytes()), deadline_s=time.monotonic() + 5.0, life=self._life)
            except TransientError:
                pass  # the pins went with the connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
