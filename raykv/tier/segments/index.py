"""The index of a tier: a row per chunk, in anonymous memory. Not thread-safe.

The index uses the same chunk table as the arena (`raykv.memory.table`), so one call looks up thousands of keys. The
column `page` has the chunk's first block within its segment. Times are in seconds since 1970.
"""

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory.free_rows import FreeRows, lazy_zeros
from raykv.memory.layout import MAX_NAMESPACES, ROWS_AT_START, TICKS_PER_S
from raykv.memory.table import Table
from raykv.protocol.chunk_keys import empty, to_bytes, unique
from raykv.tier.base import Found
from raykv.tier.segments.format import BLOCK_NBYTES, Array
from raykv.types import Bits, KeyArray, Rows

SEGMENTS: Final = 1 << 20
"""A drive has fewer segments than this. The SSD tier's `Index.segment` is drive number * SEGMENTS + segment number."""
REBUILD_ROWS: Final = 1 << 14
REBUILD_SHARE: Final = 8
"""The hash index is rebuilt if one call removes more than REBUILD_ROWS rows, and these are more than 1/REBUILD_SHARE of
the remaining rows. Then rebuilding is faster than removing row by row."""
CHANGES: Final = 1 << 22
"""`Changes` keeps at most about this many keys. If there are more, the oldest keys are dropped."""


class Index:
    """An index with one row for each chunk.

    Attributes:
        segment: Where each row's chunk is. In the SSD tier: number of drive and segment, see SEGMENTS. In the file
            tier: `Pack.number`.
        nbytes: Bytes of each quota group's chunks, by number of the group.
    """

    def __init__(self, rows: int, *, now_s: float) -> None:
        """Begin empty, with space for `rows` chunks. Raises ConfigError if there is not enough memory for them."""
        self._table = Table.create(None, rows=rows, extents=1, extent_nbytes=SLOT_ALIGNMENT_NBYTES, now_s=now_s)
        self.columns = self._table.columns
        populated = self._table.rows_populated
        self._free = FreeRows(np.zeros(populated, np.bool_), rows=rows, limit=populated)
        self.rows, self._made_at_s = rows, now_s
        self.segment: npt.NDArray[np.int32] = lazy_zeros(rows, np.int32)
        self._parent: Array = lazy_zeros(2 * rows, np.uint64).reshape(-1, 2)
        self._chained: npt.NDArray[np.bool_] = lazy_zeros(rows, np.bool_)
        self._expires_s: npt.NDArray[np.float64] = lazy_zeros(rows, np.float64)
        self._reads_at_write: npt.NDArray[np.uint32] = lazy_zeros(rows, np.uint32)
        self.nbytes: npt.NDArray[np.int64] = np.zeros(MAX_NAMESPACES, np.int64)
        self._chunks = 0

    def __len__(self) -> int:
        return self._chunks

    def find(self, keys: KeyArray, *, now_s: float) -> Rows:
        """Return the row of each key; -1 if the key is not in the index or has expired."""
        return self._table.find_ready(keys, self._table.ticks(now_s))[0]

    def find_all(self, keys: KeyArray) -> Rows:
        """Return the row of each key, expired or not; -1 if the key is not in the index."""
        return self._table.find(keys)

    def found(self, row: int) -> Found:
        columns = self.columns
        return Found(
            nbytes=int(columns.nbytes[row]),
            checksum=int(columns.checksum[row]),
            group=int(columns.group[row]),
            depth=int(columns.depth[row]),
            parent=to_bytes(self._parent[row]) if self._chained[row] else b"",
            reads=int(columns.frequency[row]),
            expires_s=float(self._expires_s[row]),
        )

    def keys(self, rows: Rows) -> KeyArray:
        return np.stack([self.columns.key_hi[rows], self.columns.key_lo[rows]], axis=1)

    def ready(self) -> Rows:
        return self._table.ready_rows()

    def used(self) -> slice:
        """Return a slice from row 0 that contains all rows in use, and maybe some free rows."""
        return slice(0, self._free.fresh)

    def rows_where(self, bits: Bits) -> Rows:
        """Return the rows in use whose bit is set. `bits` has one bit for each row of `used()`."""
        return np.flatnonzero(bits & (self.columns.generation[: len(bits)] == 2)).astype(np.int32)

    def rows_of_group(self, group: int) -> Rows:
        return self.rows_where(self.columns.group[self.used()] == group)

    def expired(self, rows: Rows | slice, *, now_s: float) -> Bits:
        expires = self.columns.expires[rows]
        bits: Bits = (expires != 0) & (expires <= self._table.ticks(now_s))
        return bits

    def disk_nbytes(self, rows: Rows) -> npt.NDArray[np.int64]:
        return np.maximum(1, -(-self.columns.nbytes[rows].astype(np.int64) // BLOCK_NBYTES)) * BLOCK_NBYTES

    def reads_since_write(self, rows: Rows) -> npt.NDArray[np.int64]:
        return self.columns.frequency[rows].astype(np.int64) - self._reads_at_write[rows]

    def free_rows(self) -> int:
        return len(self._free) + self.rows - self._free.limit

    def allocate(self, count: int) -> Rows:
        """Take free rows. Returns fewer than `count` if the index is full."""
        table = self._table
        while len(self._free) < count and table.rows_populated < self.rows:
            if not table.populate_rows(max(2 * table.rows_populated, ROWS_AT_START)):
                break  # out of memory: the index stays at its size
            self._free.limit = table.rows_populated
        return self._free.take(count)

    def insert(self, rows: Rows, entries: Array, groups: npt.NDArray[Any], segment: int) -> None:
        """Enter chunks (`format.ENTRY`) into allocated rows. Their keys must be new.

        Args:
            groups: Number of each chunk's quota group.
            segment: `Index.segment` of all these chunks.
        """
        columns = self.columns
        ticks = np.maximum(1, (entries["expires_s"] - self._made_at_s) * TICKS_PER_S)
        columns.expires[rows] = np.where(entries["expires_s"] > 0, np.minimum(ticks, 0xFFFFFFFF), 0)
        columns.nbytes[rows], columns.checksum[rows] = entries["nbytes"], entries["checksum"]
        columns.depth[rows], columns.frequency[rows] = entries["depth"], entries["reads"]
        columns.group[rows] = groups
        self._parent[rows], self._chained[rows] = entries["parent"], entries["chained"] == 1
        self._expires_s[rows] = entries["expires_s"]
        self.segment[rows], columns.page[rows] = segment, entries["block"]
        self._reads_at_write[rows] = entries["reads"]
        columns.generation[rows] = 2
        self._table.insert(np.ascontiguousarray(entries["key"]), rows)
        self.nbytes += np.bincount(groups, entries["nbytes"], MAX_NAMESPACES).astype(np.int64)
        self._chunks += len(rows)

    def touch(self, rows: Rows, *, now_s: float) -> None:
        self._table.touch(rows, self._table.ticks(now_s))

    def remove(self, rows: Rows) -> None:
        if not len(rows):
            return
        columns, table = self.columns, self._table
        groups = columns.group[rows]
        self.nbytes -= np.bincount(groups, columns.nbytes[rows], MAX_NAMESPACES).astype(np.int64)
        self._chunks -= len(rows)
        columns.generation[rows] = 1
        if len(rows) > REBUILD_ROWS and len(rows) * REBUILD_SHARE > len(self):
            table.rebuild_index(table.ready_rows())
        else:
            table.remove(rows)
        self.segment[rows] = -1
        self._free.give(rows)

    def close(self) -> None:
        self._table.memory.close()


class Changes:
    """Keys that were added to or removed from a tier since the last `take`."""

    def __init__(self) -> None:
        self._keys: deque[KeyArray] = deque()
        self._count = 0

    def add(self, keys: KeyArray) -> None:
        self._keys.append(np.ascontiguousarray(keys).reshape(-1, 2))
        self._count += len(keys)
        while self._count > CHANGES and len(self._keys) > 1:
            self._count -= len(self._keys.popleft())

    def take(self) -> KeyArray:
        """Return all keys without duplicates, and forget them."""
        changes, self._keys, self._count = self._keys, deque(), 0
        if not changes:
            return empty()
        return unique(np.concatenate(changes))
