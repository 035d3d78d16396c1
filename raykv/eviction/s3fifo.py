"""S3-FIFO: three first-in-first-out queues, two of chunks and one of keys."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy, Queues, key_numbers
from raykv.eviction.ghosts import Ghosts, by_row
from raykv.memory.table import Columns
from raykv.types import Bits, Rows

SMALL_SHARE: Final = 10
"""The small queue's part of all chunks: one in so many. As many keys are remembered as the main queue has chunks."""
READS_TO_STAY: Final = 2
"""Reads in the small queue that take a chunk to the main queue."""
MOST_ROUNDS: Final = 3
"""Reads that count in the main queue: a chunk may pass its end so often without being read again."""


class S3FIFO(Policy):
    """A small queue (0) that most chunks leave unread, and a main queue (1) for the others and those that came back.

    Source: S3-FIFO (Yang et al., SOSP 2023), with the parameters given there.
    """

    queues = 2

    def __init__(self) -> None:
        self._main = np.zeros(0, np.bool_)
        self._place = np.zeros(0, np.int64)
        self._counted = np.zeros(0, np.uint32)  # reads that have had their effect
        self._gone = Ghosts()
        self._held = 0
        self._full = False  # from the first eviction on, all that is new goes to the small queue
        self._last = 0

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.int64]:
        self._cover(columns)
        return self._place[rows]

    def queue(self, columns: Columns, rows: Rows) -> Queues:
        self._cover(columns)
        return self._main[rows].astype(np.int8)

    def quota(self, sizes: Sequence[int], count: int) -> list[int]:
        small, main = sizes
        from_main = min(count, max(0, main - _main_of(small + main)))
        from_small = min(count - from_main, small)
        return [from_small, count - from_small]

    def spare(self, columns: Columns, rows: Rows, now: int) -> Bits:
        self._cover(columns)
        reads = columns.frequency[rows] - self._counted[rows]
        main = self._main[rows]
        spared: Bits = reads >= np.where(main, 1, READS_TO_STAY)
        again, left = rows[spared], np.where(main, np.minimum(reads, MOST_ROUNDS) - np.uint32(1), 0)[spared]
        self._counted[again] = columns.frequency[again] - left.astype(np.uint32)
        self._main[again] = True
        self._enter(again)
        return spared

    def came(self, columns: Columns, rows: Rows, now: int) -> None:
        self._cover(columns)
        back = np.array([self._gone.take(key) for key in key_numbers(columns, rows)], np.bool_)
        if not self._full:
            limit = self.capacity // SMALL_SHARE if self.capacity else math.inf
            back |= self._held + np.arange(len(rows)) >= limit
        self._held += len(rows)
        self._counted[rows] = 0
        self._main[rows] = back
        self._enter(rows)

    def went(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:
        if evicted:
            self._full = True
            small = rows[~self._main[rows]]
            self._gone.add(key_numbers(columns, small), _main_of(self._held))
        self._held -= len(rows)

    def _enter(self, rows: Rows) -> None:
        """To the ends of their queues."""
        self._place[rows] = np.arange(self._last + 1, self._last + 1 + len(rows))
        self._last += len(rows)

    def _cover(self, columns: Columns) -> None:
        count = len(columns.frequency)
        self._main, self._place = by_row(self._main, count), by_row(self._place, count)
        self._counted = by_row(self._counted, count)


def _main_of(chunks: int) -> int:
    return chunks - chunks // SMALL_SHARE
