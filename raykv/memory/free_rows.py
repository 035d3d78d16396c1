"""The free rows of a chunk table. The node's process makes the list at its start, and keeps it in private memory."""

import mmap
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.types import Bits, Rows

BLOCK_ROWS: Final = 1 << 16
"""When a node starts, rows are read in blocks of this size, so that the arrays of one block stay in the CPU cache."""


class FreeRows:
    """The free rows of a table. Free rows before `fresh` are on a stack, at four bytes each.

    Attributes:
        fresh: The rows from `fresh` to `limit` - 1 are free, and this process has never used them.
        limit: The rows from `limit` on must not be used, because they have no real memory yet.
    """

    def __init__(self, busy: Bits, *, rows: int, limit: int) -> None:
        """Make the list. `busy`: whether a row is in use, for the first rows. `rows`: size of the table."""
        free_at_end = int(busy[::-1].argmax()) if busy.any() else len(busy)
        self.fresh, self.limit = len(busy) - free_at_end, limit
        self._stack: npt.NDArray[np.int32] = lazy_zeros(rows, np.int32)
        holes = np.flatnonzero(~busy[: self.fresh])[::-1]
        self._stack[: len(holes)] = holes
        self._stacked = len(holes)

    def __len__(self) -> int:
        return self._stacked + self.limit - self.fresh

    def __iter__(self) -> Iterator[int]:
        yield from self._stack[: self._stacked].tolist()
        yield from range(self.fresh, self.limit)

    def take(self, count: int) -> Rows:
        """Take `count` rows, or all free rows if there are fewer."""
        reused, first = min(count, self._stacked), self.fresh
        self._stacked -= reused
        self.fresh = min(first + count - reused, self.limit)
        top = self._stack[self._stacked : self._stacked + reused][::-1]
        return np.concatenate([top, np.arange(first, self.fresh, dtype=np.int32)])

    def give(self, rows: Rows) -> None:
        self._stack[self._stacked : self._stacked + len(rows)] = rows
        self._stacked += len(rows)


def blocks(count: int) -> Iterator[slice]:
    """Split 0 .. count - 1 into slices of at most BLOCK_ROWS numbers."""
    return (slice(first, min(first + BLOCK_ROWS, count)) for first in range(0, count, BLOCK_ROWS))


def lazy_zeros(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Make an array of zeros. A page of the array takes real memory at the first write to that page."""
    memory = mmap.mmap(-1, max(1, count * np.dtype(kind).itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError:
        pass  # the kernel has no huge pages
    return np.frombuffer(memory, kind, count)
