"""S3-FIFO: two first-in-first-out queues of chunks, and one queue of evicted keys."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy, Queues, key_numbers
from raykv.eviction.ghosts import Ghosts, by_row
from raykv.memory.layout import Columns
from raykv.types import Bits, Rows

SMALL_SHARE: Final = 10
"""The small queue gets 1/SMALL_SHARE of all chunks. The queue of evicted keys is as long as the main queue."""
READS_TO_STAY: Final = 2
"""After this many reads in the small queue, a chunk moves to the main queue instead of being evicted."""
MOST_ROUNDS: Final = 3
"""However often it was read, a chunk in the main queue gets at most this many second chances until its next read."""


class S3FIFO(Policy):
    """Queue 0 (small) takes new chunks. Queue 1 (main) takes chunks that are likely to be read again.

    A chunk is likely to be read again if it was read READS_TO_STAY times in queue 0, or if it is stored again after an
    eviction from queue 0.

    Source: S3-FIFO (Yang et al., SOSP 2023), with the parameters given there.
    """

    queues = 2

    def __init__(self) -> None:
        self._main = np.zeros(0, np.bool_)
        self._place = np.zeros(0, np.int64)
        self._counted = np.zeros(0, np.uint32)  # by row: the number of reads that give no further second chance
        self._ghosts = Ghosts()
        self._held = 0
        self._full = False  # set by the first eviction; until then, chunks beyond queue 0's share go to queue 1
        self._last = 0

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.int64]:
        return self._place[rows]

    def queue(self, columns: Columns, rows: Rows) -> Queues:
        return self._main[rows].astype(np.int8)

    def shares(self, sizes: Sequence[int], count: int) -> list[int]:
        small, main = sizes
        from_main = min(count, max(0, main - _main_part(small + main)))
        from_small = min(count - from_main, small)
        return [from_small, count - from_small]

    def second_chance(self, columns: Columns, rows: Rows, now: int) -> Bits:
        reads = columns.frequency[rows] - self._counted[rows]
        main = self._main[rows]
        stays: Bits = reads >= np.where(main, 1, READS_TO_STAY)
        again, left = rows[stays], np.where(main, np.minimum(reads, MOST_ROUNDS) - np.uint32(1), 0)[stays]
        self._counted[again] = columns.frequency[again] - left.astype(np.uint32)
        self._main[again] = True
        self._append(again)
        return stays

    def on_insert(self, columns: Columns, rows: Rows, now: int) -> None:
        self._main, self._place = by_row(self._main, columns), by_row(self._place, columns)
        self._counted = by_row(self._counted, columns)
        to_main = np.array([self._ghosts.remove(key) for key in key_numbers(columns, rows)], np.bool_)
        if not self._full:
            limit = self.capacity // SMALL_SHARE if self.capacity else math.inf
            to_main |= self._held + np.arange(len(rows)) >= limit
        self._held += len(rows)
        self._counted[rows] = 0
        self._main[rows] = to_main
        self._append(rows)

    def on_remove(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:
        if evicted:
            self._full = True
            small = rows[~self._main[rows]]
            self._ghosts.add(key_numbers(columns, small), _main_part(self._held))
        self._held -= len(rows)

    def _append(self, rows: Rows) -> None:
        self._place[rows] = np.arange(self._last + 1, self._last + 1 + len(rows))
        self._last += len(rows)


def _main_part(chunks: int) -> int:
    return chunks - chunks // SMALL_SHARE
