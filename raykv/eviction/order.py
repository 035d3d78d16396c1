"""Chooses one victim at a time. The choice of a victim does not need the scores of all rows."""

import heapq
from typing import Any, Final

import numpy as np

from raykv.eviction.base import Policy, lowest
from raykv.memory.layout import Columns
from raykv.types import Bits, Rows

RESCORE_SHARE: Final = 256
RESCORE_LEAST: Final = 16
"""If scores change with time, all rows are scored again after every n victims. Here n is the number of rows divided by
RESCORE_SHARE, but at least RESCORE_LEAST."""


class EvictionOrder:
    """The rows of a cache in the order in which a policy evicts them. Each queue of the policy has one heap.

    A heap entry holds the score that its row had when the entry was pushed. If the row of a popped entry was read
    meanwhile, the row is pushed again with a new score. So the order is exact if only reads change scores, and if
    a read never lowers a score. If scores change with time, the order is that of the last scoring of all rows.
    """

    def __init__(self, policy: Policy, columns: Columns) -> None:
        self._policy, self._columns = policy, columns
        self._heaps: list[list[tuple[Any, int, int, int]]] = [[] for _ in range(policy.queues)]
        count = len(columns.accessed)
        self._here = np.zeros(count, np.bool_)
        self._stamp = [0] * count  # by row: the newest stamp; heap entries with an older stamp are ignored
        self._stamps = 0
        self._scored = np.zeros(count, columns.accessed.dtype)  # by row: `accessed` at the last scoring
        self._queue = [0] * count
        self._sizes = [0] * policy.queues
        self._has_second_chances = type(policy).second_chance is not Policy.second_chance
        self._until_rescore = 0
        self._bound: Any = None  # rows with a score above this are in no heap until the next scoring of all rows

    def on_insert(self, rows: Rows, now: int) -> None:
        self._policy.on_insert(self._columns, rows, now)
        self._here[rows] = True
        for row, queue in zip(rows.tolist(), self._policy.queue(self._columns, rows).tolist(), strict=True):
            self._queue[row] = queue
            self._sizes[queue] += 1
        self._push(rows, now)

    def on_read(self, rows: Rows, now: int) -> None:
        """Move each of these rows to the queue that the policy now assigns to the row."""
        if len(self._sizes) == 1:
            return
        moved = []
        for row, queue in zip(rows.tolist(), self._policy.queue(self._columns, rows).tolist(), strict=True):
            if self._queue[row] != queue:
                self._sizes[self._queue[row]] -= 1
                self._sizes[queue] += 1
                self._queue[row] = queue
                moved.append(row)
        self._push(np.array(moved, np.int32), now)

    def next(self, now: int, protected: Bits) -> int:
        """Remove and return the row to evict next; -1 if there is none. Rows that are True in `protected` are skipped.

        The caller must evict the row. Before the row's columns change, the caller must call the policy's `on_remove`.
        The caller must also decrement the `children` of the parent, and call `on_childless` if `children` is then 0.
        """
        if self._policy.drifts and self._until_rescore <= 0:
            self._rescore(now, RESCORE_LEAST + 2 * sum(self._sizes) // RESCORE_SHARE)
        row = self._first(now, protected)
        if row < 0 and self._bound is not None:
            self._rescore(now, len(self._here))
            row = self._first(now, protected)
        if row >= 0:
            self._here[row] = False
            self._sizes[self._queue[row]] -= 1
            self._until_rescore -= 1
        return row

    def on_childless(self, row: int, now: int) -> None:
        if self._policy.leaf_first and self._here[row]:
            self._push(np.array([row], np.int32), now)

    def _first(self, now: int, protected: Bits) -> int:
        skipped: list[int] = []
        while (row := self._pop(now)) >= 0:
            if protected[row]:
                skipped.append(row)
                continue
            rows = np.array([row], np.int32)
            if not (self._has_second_chances and self._policy.second_chance(self._columns, rows, now)[0]):
                break
            self.on_read(rows, now)
            self._push(rows, now)
        if skipped:
            self._push(np.array(skipped, np.int32), now)
        return row

    def _pop(self, now: int) -> int:
        shares = self._policy.shares(self._sizes, 1)
        for _, heap in sorted(zip(shares, self._heaps, strict=True), key=lambda each: -each[0]):
            while heap:
                _, _, row, stamp = heapq.heappop(heap)
                if stamp != self._stamp[row] or (self._policy.leaf_first and self._columns.children[row]):
                    continue
                if self._columns.accessed[row] == self._scored[row]:
                    return row
                self._push(np.array([row], np.int32), now)
        return -1

    def _push(self, rows: Rows, now: int) -> None:
        if self._policy.leaf_first:
            rows = rows[self._columns.children[rows] == 0]
        if not rows.size:
            return
        self._scored[rows] = self._columns.accessed[rows]
        scores, depths = self._policy.score(self._columns, rows, now).tolist(), self._columns.depth[rows].tolist()
        for row, score, depth in zip(rows.tolist(), scores, depths, strict=True):
            self._stamps += 1
            self._stamp[row] = self._stamps
            if self._bound is None or score <= self._bound:
                heapq.heappush(self._heaps[self._queue[row]], (score, -depth, row, self._stamps))

    def _rescore(self, now: int, count: int) -> None:
        """Score all evictable rows, and fill the heaps again.

        If the policy has only one queue, its heap gets only the `count` rows with the lowest scores.
        """
        rows = np.flatnonzero(self._here).astype(np.int32)
        self._until_rescore = max(RESCORE_LEAST, len(rows) // RESCORE_SHARE)
        if self._policy.leaf_first:
            rows = rows[self._columns.children[rows] == 0]
        self._bound = None
        self._heaps = [[] for _ in self._heaps]
        if len(rows) > count and len(self._heaps) == 1:
            scores = self._policy.score(self._columns, rows, now)
            rows = lowest(self._columns, rows, scores, count)
            self._push(rows, now)
            self._bound = self._heaps[0] and max(entry[0] for entry in self._heaps[0])
        else:
            self._push(rows, now)
