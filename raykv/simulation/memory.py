"""The memory of a simulated node: chunks without bytes, in the columns of a chunk table."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from raykv.memory.layout import COLUMNS, RECORD, TICKS_PER_S, Columns
from raykv.simulation.workload import Chunks
from raykv.types import Bits, KeyArray, Rows

USED_COLUMNS: Final = (
    "generation",
    "nbytes",
    "accessed",
    "frequency",
    "depth",
    "parent",
    "parent_generation",
    "key_lo",
)
EVICTED: Final = 64
"""Memory that is full evicts at least one of this many chunks at a time."""


class Memory:
    """The chunks of one node. It implements `raykv.node.prefixes.Chunks`.

    If it is full, it evicts replicas first, then the chunks that were read least recently, those at the end of a chain
    first.

    Attributes:
        columns: The columns of the chunk table that have a meaning here.
        row_of: Maps the number of each chunk that is here to its row.
        removed: Numbers of the chunks that were removed since the owner of this memory emptied the list.
    """

    def __init__(self, chunks: Chunks, capacity: int) -> None:
        kinds = {name: np.dtype(COLUMNS[name]) if name in COLUMNS else RECORD[name] for name in USED_COLUMNS}
        self._chunks = chunks
        self.columns = Columns({name: np.zeros(capacity, kind) for name, kind in kinds.items()})
        self.row_of: dict[int, int] = {}
        self.removed: list[int] = []
        self._replica = np.zeros(capacity, np.bool_)
        self._capacity = capacity
        self._unused, self._free = 0, list[int]()  # rows that were never used, rows that are free again

    def __len__(self) -> int:
        return len(self.row_of)

    def read(self, chunks: Sequence[int], *, now_s: float) -> Rows:
        """Read those chunks that are here. Return their rows."""
        row_of = self.row_of
        rows = np.array([row_of[chunk] for chunk in chunks if chunk in row_of], np.int32)
        self.columns.accessed[rows] = int(now_s * TICKS_PER_S)
        self.columns.frequency[rows] += 1
        return rows

    def store(self, chunks: Sequence[int], *, now_s: float) -> tuple[list[int], Rows]:
        """Store those chunks that are not here. Return their numbers and rows."""
        row_of, columns = self.row_of, self.columns
        new = [chunk for chunk in chunks if chunk not in row_of]
        self._make_room(len(new), now_s)
        rows = [self._free_row() for _ in new]
        row_of.update(zip(new, rows, strict=True))
        parents = [row_of.get(self._chunks.parent[chunk], -1) for chunk in new]
        columns.generation[rows] += 2
        columns.key_lo[rows] = new
        columns.nbytes[rows] = self._chunks.nbytes
        columns.accessed[rows] = int(now_s * TICKS_PER_S)
        columns.frequency[rows] = 0
        columns.depth[rows] = [self._chunks.depth[chunk] for chunk in new]
        columns.parent[rows] = parents
        columns.parent_generation[rows] = columns.generation[parents]
        self._replica[rows] = False
        return new, np.array(rows, np.int32)

    def _free_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._unused += 1
        return self._unused - 1

    def _make_room(self, count: int, now_s: float) -> None:
        excess = len(self.row_of) + count - self._capacity
        if excess <= 0:
            return
        assert count <= self._capacity, "a prompt fits into the memory of a node"
        rows, columns = np.array([*self.row_of.values()], np.int32), self.columns
        order = np.lexsort((-columns.depth[rows].astype(np.int64), columns.accessed[rows], ~self._replica[rows]))
        self.retire(rows[order[: max(excess, self._capacity // EVICTED)]], now_s=now_s)

    # -- as raykv.node.prefixes sees it -----------------------------------------------------------------------------

    def rows_of(self, keys: KeyArray) -> Rows:
        row_of = self.row_of
        return np.array([row_of[chunk] for chunk in keys[:, 1].tolist() if chunk in row_of], np.int32)

    def keys_of(self, rows: Rows) -> KeyArray:
        return self._chunks.keys[self.columns.key_lo[rows].astype(np.int64)]

    def replicas(self, rows: Rows) -> Bits:
        return self._replica[rows]

    def set_replica(self, rows: Rows, *, replica: bool) -> None:
        self._replica[rows] = replica

    def retire(self, rows: Rows, *, now_s: float) -> None:
        """Remove chunks."""
        gone = self.columns.key_lo[rows].tolist()
        for chunk in gone:
            self._free.append(self.row_of.pop(chunk))
        self.columns.generation[rows] += 2
        self.removed += gone
