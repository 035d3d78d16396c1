"""A cache without bytes: the columns of a node's chunk table, and the same policies over them."""

from collections.abc import Mapping

import numpy as np

from raykv.eviction.base import Policy
from raykv.eviction.order import Order
from raykv.memory.table import COLUMNS, RECORD, Cells, Columns
from raykv.planner.ssd import Ssd
from raykv.types import Rows


class Cache:
    """Chunks of a trace in rows, as a node would hold them.

    A chunk that goes before those that follow it leaves its row out of use until they are gone, as on a node.

    Attributes:
        row_of: Row of each chunk, by its number in the trace; -1 where it is not here.
        stored, evicted: Chunks so far.
    """

    def __init__(self, policy: Policy, capacity: int, chunks: int, ssd: Ssd | None = None) -> None:
        """Begin empty.

        Args:
            capacity: Chunks that find room.
            chunks: Different ones in the trace.
            ssd: What is evicted is offered to it.
        """
        rows = min(2 * capacity, chunks)
        kinds = {name: RECORD[name] for name in RECORD.names or ()} | {n: np.dtype(k) for n, k in COLUMNS.items()}
        self.columns = Columns({name: np.zeros(rows, kind) for name, kind in kinds.items()})
        self.columns.parent[:] = -1
        self.cells = Cells(self.columns)
        self.row_of = np.full(chunks, -1, np.int32)
        self.stored = self.evicted = 0
        policy.capacity, self._ssd = capacity, ssd
        self._order = Order(policy, self.columns)
        self._left = capacity  # chunks for which there is room
        self._free = list(range(rows - 1, -1, -1))
        self._held = memoryview(bytearray(rows))
        self._rows = self.row_of.data

    def read(self, rows: Rows, now: int) -> None:
        """These chunks were hit."""
        self.columns.accessed[rows] = now
        self.columns.frequency[rows] += 1
        self._order.read(rows, now)

    def read_one(self, row: int, now: int) -> None:
        """The same for one."""
        self.cells.accessed[row] = now
        self.cells.frequency[row] += 1
        self._order.read_one(row, now)

    def told(self, chunks: list[int], output_tokens: int, now: int) -> None:
        """A request for these chunks is done."""
        rows = self.row_of[chunks]
        self._order.told(rows[rows >= 0], output_tokens, now)

    def hold(self, rows: Rows, held: bool) -> None:
        """Keep rows from eviction, or no longer."""
        np.asarray(self._held)[rows] = held

    def make_room(self, count: int, now: int) -> int:
        """Evict until so many chunks find room. For how many there is."""
        gone: list[int] = []
        while self._left + len(gone) < count and (row := self._order.next(now, self._held)) >= 0:
            gone.append(row)
            self._leave(row, now)
        if gone:
            rows = np.array(gone, np.int32)
            self._order.went(rows, now)
            if self._ssd is not None:
                self._offer(self._ssd, rows, now)
            self._remove(gone)
        return min(self._left, count)

    def store(
        self, chunks: list[int], nbytes: list[int], expires: int, now: int, reads: Mapping[int, int] | None = None
    ) -> None:
        """Store those chunks of a chain that are not here, first to last, as far as there is room.

        Args:
            chunks: From the first of the chain on.
            nbytes: Of each chunk.
            expires: In ticks; 0 is never.
            reads: Of chunks that come from below: how often they were read so far.
        """
        cells, rows, after = self.cells, [], -1
        for chunk, size in zip(chunks, nbytes, strict=True):
            row = self._rows[chunk]
            if row < 0:
                if not self._left:
                    break
                self._left -= 1
                row = self._free.pop()
                cells.key_lo[row], cells.nbytes[row] = chunk, size
                cells.inserted[row] = cells.accessed[row] = now
                cells.frequency[row] = reads.get(chunk, 0) if reads else 0
                cells.children[row] = 0
                cells.expires[row] = expires
                cells.depth[row] = cells.depth[after] + 1 if after >= 0 else 0
                cells.parent[row] = after
                if after >= 0:
                    cells.children[after] += 1
                self._rows[chunk] = row
                rows.append(row)
            after = row
        self.stored += len(rows)
        self._order.came(np.array(rows, np.int32), now)

    def _offer(self, ssd: Ssd, rows: Rows, now: int) -> None:
        columns = self.columns
        parents = columns.parent[rows]
        parent_reads = np.where(parents >= 0, columns.frequency[parents], 0)
        ssd.offer(columns.key_lo[rows].tolist(), columns.frequency[rows], parent_reads, columns.nbytes[rows], now)

    def _leave(self, row: int, now: int) -> None:
        """Take a row from its chain."""
        cells = self.cells
        parent = cells.parent[row]
        if parent < 0:
            return
        cells.children[parent] -= 1
        if not cells.children[parent]:
            if cells.nbytes[parent]:
                self._order.childless(parent, now)
            else:
                self._free.append(parent)

    def _remove(self, rows: list[int]) -> None:
        cells = self.cells
        for row in rows:
            self._rows[cells.key_lo[row]] = -1
            cells.parent[row] = -1
            cells.nbytes[row] = 0
            if not cells.children[row]:
                self._free.append(row)
        self._left += len(rows)
        self.evicted += len(rows)
