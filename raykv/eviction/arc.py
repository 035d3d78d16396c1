"""Adaptive replacement cache (ARC): two queues share the memory, and misses move the border between them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy, Queues, key_numbers
from raykv.eviction.ghosts import Ghosts, by_row
from raykv.memory.layout import Columns
from raykv.types import Rows


class ARC(Policy):
    """Two LRU queues. Queue 0 has the chunks that were not read since they were stored. Queue 1 has all other chunks.

    The policy remembers the keys that were last evicted from each queue. If such a key is stored again, its chunk was
    evicted too early. So the queue that lost the chunk gets a larger target length, and the chunk is put into queue 1.

    Source: ARC (Megiddo and Modha, FAST 2003). There are two differences from the paper. The policy sees reads only
    when it chooses victims. All victims of one choice use the same target length.
    """

    leaf_first = True
    queues = 2

    def __init__(self) -> None:
        self._returned = np.zeros(0, np.bool_)
        self._ghosts = (Ghosts(), Ghosts())
        self._held = 0
        self._once = 0
        self._target = 0.0  # length that queue 0 should have

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint32]:
        return columns.accessed[rows]

    def queue(self, columns: Columns, rows: Rows) -> Queues:
        return ((columns.frequency[rows] > 0) | self._returned[rows]).astype(np.int8)

    def shares(self, sizes: Sequence[int], count: int) -> list[int]:
        once, more = sizes
        total = once + more
        scale = total / self._held if self._held else 1.0  # below 1 if `sizes` are those of a sample
        self._once = round(once / scale) if total else 0
        from_once = min(count, max(0, once - int(self._target * scale)))
        from_more = min(count - from_once, more)
        return [count - from_more, from_more]

    def on_insert(self, columns: Columns, rows: Rows, now: int) -> None:
        self._returned = by_row(self._returned, columns)
        self._held += len(rows)
        once, more = self._ghosts
        for row, key in zip(rows.tolist(), key_numbers(columns, rows), strict=True):
            before = len(once), len(more)
            if back := once.remove(key):
                self._target = min(float(self._held), self._target + max(1.0, before[1] / before[0]))
            elif back := more.remove(key):
                self._target = max(0.0, self._target - max(1.0, before[0] / before[1]))
            self._returned[row] = back

    def on_remove(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:
        if evicted:
            queue, keys = self.queue(columns, rows), np.array(key_numbers(columns, rows), np.uint64)
            once, more = self._ghosts
            once.add(keys[queue == 0].tolist(), self._held - self._once)
            more.add(keys[queue == 1].tolist(), self._held - len(once))
        self._held -= len(rows)
