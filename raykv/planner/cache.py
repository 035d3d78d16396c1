"""A simulated cache: a node's chunk table and eviction policy, without the bytes of chunks."""

from collections.abc import Mapping

import numpy as np

from raykv.eviction.base import Policy, empty_columns, live_parents
from raykv.eviction.order import EvictionOrder
from raykv.memory.layout import Cells, RowState
from raykv.planner.ssd import Ssd
from raykv.types import Rows


class Cache:
    """The chunk table of a simulated node. Each chunk of a trace has a number.

    Attributes:
        columns, cells: The chunk table. The column `key_lo` holds the number of the chunk in each row.
        row_of: Maps the number of a chunk to its row; -1 means that the chunk is not in the cache.
        stored, evicted: How many chunks were stored and evicted so far.
    """

    def __init__(self, policy: Policy, capacity: int, chunks: int, ssd: Ssd | None = None) -> None:
        rows = min(capacity, chunks)
        self.columns = empty_columns(rows)
        self.cells = Cells(self.columns)
        self.row_of = np.full(chunks, -1, np.int32)
        self.stored = self.evicted = 0
        self._policy, policy.capacity, self._ssd = policy, capacity, ssd
        self._order = EvictionOrder(policy, self.columns)
        self._free = list(range(rows - 1, -1, -1))
        self._protected = np.zeros(rows, np.bool_)

    def read(self, rows: Rows, now: int) -> None:
        self.columns.accessed[rows] = now
        self.columns.frequency[rows] += 1
        self._order.on_read(rows, now)

    def request_done(self, chunks: list[int], output_tokens: int, now: int) -> None:
        rows = self.row_of[chunks]
        self._policy.on_request_done(self.columns, rows[rows >= 0], output_tokens, now)

    def make_room(self, count: int, now: int, protect: Rows) -> None:
        """Evict rows until `count` more chunks fit, or no row is left to evict. Rows in `protect` are not evicted."""
        self._protected[protect] = True
        gone: list[int] = []
        while len(self._free) + len(gone) < count and (row := self._order.next(now, self._protected)) >= 0:
            gone.append(row)
            self._unlink(row, now)
        self._protected[protect] = False
        if not gone:
            return
        columns, rows = self.columns, np.array(gone, np.int32)
        self._policy.on_remove(columns, rows, now, evicted=True)
        chunks = columns.key_lo[rows]
        if self._ssd is not None:
            parents = live_parents(columns, rows)
            above = np.where(parents >= 0, columns.frequency[parents], 0)
            self._ssd.offer(chunks.tolist(), columns.frequency[rows], above, columns.nbytes[rows], now)
        self.row_of[chunks] = -1
        columns.generation[rows] += 1
        columns.state[rows] = RowState.FREE
        self._free += gone
        self.evicted += len(gone)

    def store(self, chunks: list[int], nbytes: list[int], now: int, reads: Mapping[int, int]) -> None:
        """Store the missing chunks of a chain, first to last, until the cache is full.

        `nbytes` has the size of each chunk: here this is the number of tokens. `reads` maps each chunk that was read
        from the SSD to its number of reads.
        """
        cells, row_of, rows, parent = self.cells, self.row_of.data, [], -1
        for chunk, size in zip(chunks, nbytes, strict=True):
            row = row_of[chunk]
            if row < 0:
                if not self._free:
                    break
                row = self._free.pop()
                cells.key_lo[row], cells.nbytes[row], cells.state[row] = chunk, size, RowState.READY
                cells.generation[row] += 1 + cells.generation[row] % 2  # a new generation for the new chunk
                cells.inserted[row] = cells.accessed[row] = now
                cells.frequency[row] = reads.get(chunk, 0)
                cells.children[row] = 0
                cells.parent[row] = parent
                if parent >= 0:
                    cells.parent_generation[row] = cells.generation[parent]
                    cells.children[parent] += 1
                cells.depth[row] = cells.depth[parent] + 1 if parent >= 0 else 0
                row_of[chunk] = row
                rows.append(row)
            parent = row
        self.stored += len(rows)
        self._order.on_insert(np.array(rows, np.int32), now)

    def _unlink(self, row: int, now: int) -> None:
        cells = self.cells
        parent = cells.parent[row]
        if parent >= 0 and cells.generation[parent] == cells.parent_generation[row]:
            cells.children[parent] -= 1
            if not cells.children[parent]:
                self._order.on_childless(parent, now)
