"""One victim after the other, without a look at all rows for each."""

import heapq
from typing import Any, Final

import numpy as np

from raykv.eviction.base import Policy, lowest
from raykv.memory.table import Columns
from raykv.types import Rows

LOOK_SHARE: Final = 256
LOOK_LEAST: Final = 16
"""Where scores drift, all rows are scored again after so many victims: one in so many rows, but no fewer than this."""


class Order:
    """The rows of a cache in the order in which a policy would evict them: a heap a queue.

    An entry holds the score that its row had. It is compared when its turn comes, since a read may have raised it. So
    the order is exact for policies whose scores only reads change, and only upwards. Where scores drift, it is as of
    the last look at all rows.
    """

    def __init__(self, policy: Policy, columns: Columns) -> None:
        """Begin with no rows."""
        self._policy, self._columns = policy, columns
        self._heaps: list[list[tuple[Any, int, int, int]]] = [[] for _ in range(policy.queues)]
        count = len(columns.accessed)
        self._here = np.zeros(count, np.bool_)
        self._stamp = [0] * count  # of a row's one valid entry
        self._stamps = 0
        self._scored = np.zeros(count, columns.accessed.dtype)  # last read of a row when it was scored
        self._queue = [0] * count
        self._sizes = [0] * policy.queues
        self._spares = type(policy).spare is not Policy.spare
        self._until_look = 0
        self._bound: Any = None  # what scores above it is in no heap until the next look

    def came(self, rows: Rows, now: int) -> None:
        """These rows hold new chunks, parents before children."""
        self._policy.came(self._columns, rows, now)
        self._here[rows] = True
        for row, queue in zip(rows.tolist(), self._queues(rows), strict=True):
            self._queue[row] = queue
            self._sizes[queue] += 1
        if len(rows) == 1:
            self._push_one(int(rows[0]), now)
        else:
            self._push(rows, now)

    def read(self, rows: Rows, now: int) -> None:
        """These rows were read; their columns say so."""
        if len(self._sizes) > 1:
            self._requeue(rows, now)

    def read_one(self, row: int, now: int) -> None:
        """The same for one."""
        if len(self._sizes) > 1:
            self._requeue(np.array([row], np.int32), now)

    def next(self, now: int, held: "memoryview[int]") -> int:
        """Take out the row that goes next, of those that are not held; -1 if there is none.

        The caller evicts it: it tells of the parent if that was the last that hung on it (`childless`), and of one or
        many such rows at a time, while their columns are as they were (`went`).
        """
        if self._policy.drifts and self._until_look <= 0:
            self._look(now, LOOK_LEAST + 2 * sum(self._sizes) // LOOK_SHARE)
        row = self._first(now, held)
        if row < 0 and self._bound is not None:
            self._look(now, len(self._here))
            row = self._first(now, held)
        if row >= 0:
            self._here[row] = False
            self._sizes[self._queue[row]] -= 1
            self._until_look -= 1
        return row

    def went(self, rows: Rows, now: int) -> None:
        """These rows, which `next` gave, were evicted."""
        self._policy.went(self._columns, rows, now, evicted=True)

    def told(self, rows: Rows, output_tokens: int, now: int) -> None:
        """The request that read or stored these rows made so many tokens."""
        self._policy.told(self._columns, rows, output_tokens, now)

    def childless(self, row: int, now: int) -> None:
        """Nothing follows this row's chunk any more."""
        if self._policy.leaf_first and self._here[row]:
            self._push_one(row, now)

    def _first(self, now: int, held: "memoryview[int]") -> int:
        aside: list[int] = []
        while (row := self._pop(now)) >= 0:
            if held[row]:
                aside.append(row)
                continue
            rows = np.array([row], np.int32)
            if not (self._spares and self._policy.spare(self._columns, rows, now)[0]):
                break
            self._requeue(rows, now)
            self._push(rows, now)
        if aside:
            self._push(np.array(aside, np.int32), now)
        return row

    def _pop(self, now: int) -> int:
        """Take out the first row in order."""
        turns = [0]
        if len(self._sizes) > 1:
            turns = np.argsort(self._policy.quota(self._sizes, 1))[::-1].tolist()
        for queue in turns:
            heap = self._heaps[queue]
            while heap:
                score, _, row, stamp = heapq.heappop(heap)
                if stamp != self._stamp[row] or not self._here[row]:
                    continue
                if self._policy.leaf_first and self._columns.children[row]:
                    continue
                if not self._has_risen(row, score, now):
                    return row
                self._push_one(row, now)
        return -1

    def _has_risen(self, row: int, score: Any, now: int) -> bool:
        if self._policy.drifts:
            return bool(self._columns.accessed[row] != self._scored[row])
        return bool(self._policy.score_one(self._columns, row, now) > score)

    def _push(self, rows: Rows, now: int) -> None:
        if self._policy.leaf_first:
            rows = rows[self._columns.children[rows] == 0]
        if not rows.size:
            return
        self._scored[rows] = self._columns.accessed[rows]
        scores, depths = self._policy.score(self._columns, rows, now).tolist(), self._columns.depth[rows].tolist()
        for row, score, depth in zip(rows.tolist(), scores, depths, strict=True):
            self._enter(row, score, depth)

    def _push_one(self, row: int, now: int) -> None:
        if self._policy.leaf_first and self._columns.children[row]:
            return
        self._scored[row] = self._columns.accessed[row]
        self._enter(row, self._policy.score_one(self._columns, row, now), int(self._columns.depth[row]))

    def _enter(self, row: int, score: Any, depth: int) -> None:
        self._stamps += 1
        self._stamp[row] = self._stamps
        if self._bound is None or score <= self._bound:
            heapq.heappush(self._heaps[self._queue[row]], (score, -depth, row, self._stamps))

    def _requeue(self, rows: Rows, now: int) -> None:
        moved = []
        for row, queue in zip(rows.tolist(), self._queues(rows), strict=True):
            if self._queue[row] != queue:
                self._sizes[self._queue[row]] -= 1
                self._sizes[queue] += 1
                self._queue[row] = queue
                moved.append(row)
        if moved:
            self._push(np.array(moved, np.int32), now)

    def _queues(self, rows: Rows) -> list[int]:
        if len(self._sizes) == 1:
            return [0] * len(rows)
        queues: list[int] = self._policy.queue(self._columns, rows).tolist()
        return queues

    def _look(self, now: int, count: int) -> None:
        """Score all rows that may go, and begin again with the first `count` of them."""
        rows = np.flatnonzero(self._here).astype(np.int32)
        self._until_look = max(LOOK_LEAST, len(rows) // LOOK_SHARE)
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
