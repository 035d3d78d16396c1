"""What a tier has: a row per chunk in a table of its own, in anonymous memory. Not thread-safe.

The table is that of the arena (`raykv.memory.table`), so looking thousands of keys up takes one call. Its `page` is the
chunk's first block within its segment, its times are by the wall clock.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory.rows import FreeRows, lazy_zeros
from raykv.memory.table import MAX_NAMESPACES, ROWS_AT_START, TICKS_PER_S, Table
from raykv.protocol.chunk_keys import from_bytes, to_bytes
from raykv.tier.base import Found
from raykv.types import Bits, KeyArray, Rows

SEGMENTS: Final = 1 << 20
"""A drive has fewer segments than this; rows say drive * SEGMENTS + segment."""
REBUILD_ROWS: Final = 1 << 14
REBUILD_SHARE: Final = 8
"""When so many rows go at once, and more than one in so many, the index is made anew instead of taking each out."""


class Index:
    """Rows of chunks.

    Attributes:
        columns: Of the table.
        segment: The drive and segment that a row's chunk lies in; see SEGMENTS.
        nbytes, chunks: Per quota group, of what is here.
    """

    def __init__(self, rows: int, *, now_s: float) -> None:
        """Begin empty.

        Args:
            now_s: By the wall clock, as all times here.

        Raises:
            ConfigError: No memory for so many rows.
        """
        self._table = Table.create(None, rows=rows, extents=1, extent_nbytes=SLOT_ALIGNMENT_NBYTES, now_s=now_s)
        self.columns = self._table.columns
        backed = self._table.rows_backed
        self._free = FreeRows(np.zeros(backed, np.bool_), rows=rows, limit=backed)
        self.rows, self._made_at_s = rows, now_s
        self.segment: npt.NDArray[np.int32] = lazy_zeros(rows, np.int32)
        self._parent: npt.NDArray[np.uint64] = lazy_zeros(2 * rows, np.uint64).reshape(-1, 2)
        self._chained: npt.NDArray[np.bool_] = lazy_zeros(rows, np.bool_)
        self._expires_s: npt.NDArray[np.float64] = lazy_zeros(rows, np.float64)
        self._reads_then: npt.NDArray[np.uint32] = lazy_zeros(rows, np.uint32)
        self.nbytes: npt.NDArray[np.int64] = np.zeros(MAX_NAMESPACES, np.int64)
        self.chunks: npt.NDArray[np.int64] = np.zeros(MAX_NAMESPACES, np.int64)

    def __len__(self) -> int:
        return int(self.chunks.sum())

    def look(self, keys: KeyArray, *, now_s: float) -> Rows:
        """Row of each key that is here and has not expired, else -1."""
        return self._table.find_ready(keys, self._table.ticks(now_s))[0]

    def look_all(self, keys: KeyArray) -> Rows:
        """The same, also of what has expired."""
        return self._table.find(keys)

    def found(self, row: int) -> Found:
        """What is known of a row's chunk."""
        columns = self.columns
        return Found(
            nbytes=int(columns.nbytes[row]),
            checksum=int(columns.checksum[row]),
            group=int(columns.namespace[row]),
            depth=int(columns.depth[row]),
            parent=to_bytes(self._parent[row]) if self._chained[row] else b"",
            reads=int(columns.frequency[row]),
            expires_s=float(self._expires_s[row]),
        )

    def keys(self, rows: Rows) -> KeyArray:
        """Their keys."""
        return np.stack([self.columns.key_hi[rows], self.columns.key_lo[rows]], axis=1)

    def ready(self) -> Rows:
        """All rows that are in use."""
        return self._table.ready_rows()

    def free_rows(self) -> int:
        """Rows that can be taken."""
        return len(self._free) + self.rows - self._free.limit

    def take(self, count: int) -> Rows:
        """Take so many rows, or as many as there are."""
        while len(self._free) < count and self._table.rows_backed < self.rows:
            if not self._table.back_rows(max(2 * self._table.rows_backed, ROWS_AT_START)):
                break  # no memory: it does with what it has
            self._free.limit = self._table.rows_backed
        return self._free.take(count)

    def give(self, rows: Rows) -> None:
        """Give rows back that were taken, and not entered."""
        self._free.give(rows)

    def enter(self, rows: Rows, entries: npt.NDArray[Any], groups: npt.NDArray[Any], segment: int) -> None:
        """Enter chunks whose keys are not here.

        Args:
            rows: Taken before.
            entries: Array of `segment.ENTRY`.
            quota groups: Their numbers on this node.
        """
        columns = self.columns
        ticks = np.maximum(1, (entries["expires_s"] - self._made_at_s) * TICKS_PER_S)
        columns.expires[rows] = np.where(entries["expires_s"] > 0, np.minimum(ticks, 0xFFFFFFFF), 0)
        columns.nbytes[rows], columns.checksum[rows] = entries["nbytes"], entries["checksum"]
        columns.depth[rows], columns.frequency[rows] = entries["depth"], entries["reads"]
        columns.namespace[rows] = groups
        self._parent[rows], self._chained[rows] = entries["parent"], entries["chained"] == 1
        self._expires_s[rows], self._reads_then[rows] = entries["expires_s"], entries["reads"]
        self.move(rows, entries, segment)
        columns.generation[rows] = 2
        self._table.insert(np.ascontiguousarray(entries["key"]), rows)
        self.nbytes += np.bincount(groups, entries["nbytes"], MAX_NAMESPACES).astype(np.int64)
        self.chunks += np.bincount(groups, minlength=MAX_NAMESPACES)

    def move(self, rows: Rows, entries: npt.NDArray[Any], segment: int) -> None:
        """Their chunks lie somewhere else now. What was read so far has earned nothing there yet."""
        self.segment[rows], self.columns.page[rows] = segment, entries["block"]
        self._reads_then[rows] = self.columns.frequency[rows]

    def reads_since(self, rows: Rows) -> npt.NDArray[np.int64]:
        """How often each was read since it was written where it lies."""
        since: npt.NDArray[np.int64] = self.columns.frequency[rows].astype(np.int64) - self._reads_then[rows]
        return since

    def touch(self, rows: Rows, *, now_s: float) -> None:
        """Note a read."""
        self._table.touch(rows, self._table.ticks(now_s))

    def remove(self, rows: Rows) -> None:
        """Take rows out and give them back; all different, and in use."""
        if not len(rows):
            return
        columns, table = self.columns, self._table
        groups = columns.namespace[rows]
        self.nbytes -= np.bincount(groups, columns.nbytes[rows], MAX_NAMESPACES).astype(np.int64)
        self.chunks -= np.bincount(groups, minlength=MAX_NAMESPACES)
        columns.generation[rows] = 1
        if len(rows) > REBUILD_ROWS and len(rows) * REBUILD_SHARE > len(self):
            table.rebuild_index(table.ready_rows())
        else:
            table.remove(rows)
        self.segment[rows] = -1
        self._free.give(rows)

    def over(self, rows: Rows | slice, *, now_s: float) -> Bits:
        """Which rows' time is over."""
        expires = self.columns.expires[rows]
        bits: Bits = (expires != 0) & (expires <= self._table.ticks(now_s))
        return bits

    def rows_where(self, bits: Bits) -> Rows:
        """Rows in use for which `bits`, an array over the first rows, says so."""
        generation = self.columns.generation[: len(bits)]
        return np.flatnonzero(bits & (generation == 2)).astype(np.int32)

    def used(self) -> slice:
        """The rows that may be in use."""
        return slice(0, self._free.fresh)

    def close(self) -> None:
        """Let go of the memory."""
        self._table.memory.close()


def key_array(keys: Sequence[bytes]) -> KeyArray:
    """Keys of 16 bytes as an array."""
    return from_bytes(b"".join(keys))
