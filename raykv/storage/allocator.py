"""The rows and slots of one node, and the state of each row.

A slot is the place of one chunk in the arena. A row of the chunk table describes the slot. Each arrow of the diagram in
docs/storage.md is a method here. Only `Allocator` and recovery write the column `state`.

A process may be killed between any two writes here. The order of the writes ensures that recovery
(`raykv.memory.recovery`) can repair each row.
"""

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES, StorageConfig
from raykv.errors import UsageError
from raykv.eviction.base import live_parents
from raykv.memory.free_rows import FreeRows
from raykv.memory.layout import MAX_NAMESPACES, QUARANTINE_S, RowState
from raykv.memory.recovery import Recovered
from raykv.memory.slots import Pages
from raykv.memory.table import Table
from raykv.storage.batches import Chain
from raykv.types import KeyArray, Rows

AHEAD_SHARE: Final = 2
"""Slots that are lent in advance, before a writer needs them, take at most 1 / AHEAD_SHARE of the free bytes above the
low-water mark. The same limit applies to the free bytes of the group's quota and to the free rows."""
AHEAD_BOUND: Final = 8
"""No slots are lent in advance when all lent slots together take 1 / AHEAD_BOUND of the arena."""
TRANSIT_SHARE: Final = 4
"""Slots for chunks that only pass through memory take at most 1 / TRANSIT_SHARE of the bytes that are free at the
low-water mark, or one slot."""
NO_ROWS: Final[Rows] = np.empty(0, np.int32)


class Allocator:
    """The rows and slots of a store, and their states.

    Attributes:
        slots, free_rows: The free slots and the free rows.
        used_nbytes: For each quota group, the bytes in the slots of its rows. Free rows have no slot.
        lent_nbytes: For each quota group, the bytes in the slots of its lent rows.
        transit_nbytes: Bytes in the slots of `lend_transit`. Eviction in the background counts them as free.
        chunks: Number of ready rows, which are the rows with a readable chunk.
    """

    def __init__(self, config: StorageConfig, table: Table, found: Recovered, *, now_s: float) -> None:
        """Take over the rows that recovery found ready or quarantined. All other rows are free."""
        self._table, self.slots = table, found.slots
        self._arena_nbytes, self._low_water = config.extents * config.extent_nbytes, config.low_water
        busy = table.columns.state[: table.rows_used()] != RowState.FREE
        self.free_rows = FreeRows(busy, rows=table.rows, limit=table.rows_populated)
        self.used_nbytes, self.lent_nbytes = found.used_nbytes, np.zeros(MAX_NAMESPACES, np.int64)
        self.transit_nbytes, self.chunks = 0, len(found.ready)
        self._quarantine = self._resume_quarantine(found.quarantined, now_s)

    def lend(self, count: int, size: int, group: int) -> tuple[Rows, Pages]:
        """Move up to `count` rows from FREE to LENT, with slots of `size` bytes. Return the rows and their pages."""
        taken = self.free_rows.take(count)
        pages = self.slots.take(taken, size)
        rows = taken[: len(pages)]
        self.free_rows.give(taken[len(pages) :])
        if not rows.size:
            return rows, pages
        columns = self._table.columns
        columns.generation[rows] |= 1  # odd (1 for a new row), so that readers reject the row
        columns.page[rows] = pages
        columns.group[rows] = group
        columns.nbytes[rows] = size
        columns.pins[rows] = columns.expires[rows] = columns.frequency[rows] = 0
        columns.state[rows] = RowState.LENT  # last, because recovery expects that a lent row has a slot
        self.used_nbytes[group] += len(rows) * size
        self.lent_nbytes[group] += len(rows) * size
        return rows, pages

    def lend_transit(self, count: int, size: int, group: int) -> tuple[Rows, Pages]:
        """Like `lend`, for chunks that only pass through memory. The caller ends the rows with `end_transit`."""
        most_nbytes = int(self._low_water * self.slots.usable_nbytes) // TRANSIT_SHARE
        most = (max(most_nbytes, size) - self.transit_nbytes) // size
        rows, pages = self.lend(max(0, min(count, most)), size, group)
        self.transit_nbytes += len(rows) * size
        return rows, pages

    def end_transit(self, rows: Rows) -> None:
        """Move rows of `lend_transit` from LENT to FREE."""
        self.transit_nbytes -= int(self.slot_sizes(rows).sum())
        self.give_back(rows)

    def commit(
        self, rows: Rows, keys: KeyArray, checksums: npt.NDArray[np.uint64], chain: Chain, nbytes: int, now: int
    ) -> None:
        """Move rows from LENT to READY, and enter their keys in the index. The keys must not be in the table yet."""
        columns, parents = self._table.columns, chain.parents
        linked = parents >= 0
        columns.checksum[rows] = checksums
        columns.inserted[rows] = columns.accessed[rows] = now
        columns.depth[rows] = chain.depths
        columns.children[rows] = 0
        columns.parent[rows] = parents
        # A parent in the same commit still has an odd generation. `_even` returns the even number that is set below.
        columns.parent_generation[rows] = np.where(linked, _even(columns.generation[np.maximum(parents, 0)]), 0)
        with self._table.changing():
            columns.nbytes[rows] = nbytes
            self._table.insert(keys, rows)  # before the counts change, because `insert` may raise LostError
            columns.state[rows] = RowState.READY
            np.add.at(columns.children, parents[linked], 1)
            columns.generation[rows] = _even(columns.generation[rows])  # last, because now readers see the chunks
        self._add(self.lent_nbytes, rows, -1)
        self.chunks += len(rows)

    def give_back(self, rows: Rows) -> None:
        """Move rows from LENT to FREE."""
        self._add(self.lent_nbytes, rows, -1)
        self._free(rows)

    def quarantine(self, rows: Rows, *, now_s: float) -> None:
        """Move rows from LENT to QUARANTINED. `release` frees them QUARANTINE_S later, even after a restart."""
        if not rows.size:
            return
        columns, until_s = self._table.columns, now_s + QUARANTINE_S
        self._add(self.lent_nbytes, rows, -1)
        columns.inserted[rows] = self._table.ticks(until_s)
        columns.state[rows] = RowState.QUARANTINED
        self._quarantine.append((until_s, rows))

    def release(self, *, now_s: float) -> None:
        """Move the rows whose quarantine has ended from QUARANTINED to FREE."""
        while self._quarantine and now_s >= self._quarantine[0][0]:
            self._free(self._quarantine.popleft()[1])

    def remove(self, rows: Rows) -> None:
        """Move pinned rows from READY to PENDING_DELETE, other rows to FREE. Lookups no longer find the chunks."""
        table, columns = self._table, self._table.columns
        pinned = columns.pins[rows] > 0
        unpinned = rows[~pinned]
        parents = live_parents(columns, rows)
        with table.changing():
            columns.generation[unpinned] |= 1  # first, so that readers reject the rows
            columns.state[rows[pinned]] = RowState.PENDING_DELETE
            table.remove(rows)
            np.subtract.at(columns.children, parents[parents >= 0], 1)
            columns.parent[rows] = -1
        self.chunks -= len(rows)
        self._free(unpinned)

    def free_unpinned(self, rows: Rows) -> None:
        """Move rows from PENDING_DELETE to FREE. Rows that have a pin or another state are ignored."""
        columns = self._table.columns
        rows = rows[(columns.state[rows] == RowState.PENDING_DELETE) & (columns.pins[rows] == 0)]
        if rows.size:
            rows = np.unique(rows)
            columns.generation[rows] |= 1
            self._free(rows)

    def _free(self, rows: Rows) -> None:
        if not rows.size:
            return
        columns = self._table.columns
        self._add(self.used_nbytes, rows, -1)
        columns.state[rows] = RowState.FREE
        columns.nbytes[rows] = 0
        self.slots.give(columns.page[rows])
        self.free_rows.give(rows)

    def require_lent(self, rows: Rows, group: int | None = None, size: int = 0) -> None:
        """Raise UsageError if a row is not lent, is in `rows` twice, or (with `group`) has another group or size."""
        columns, count = self._table.columns, self._table.rows_populated
        if not rows.size:
            return
        if not (rows.min() >= 0 and rows.max() < count):
            raise UsageError(f"row numbers outside the table (0 .. {count - 1})")
        if not (columns.state[rows] == RowState.LENT).all() or has_duplicates(rows):
            raise UsageError("rows that are not lent, or named twice: a slot is committed or given back once")
        if group is not None and not (columns.group[rows] == group).all():
            raise UsageError("slots that were lent to another namespace: lend slots for this one")
        if group is not None and not (columns.nbytes[rows] == size).all():
            raise UsageError(f"slots of another size than {size:,} bytes: lend slots for chunks of this size")

    def most_ahead(self, size: int, group: int) -> int:
        """Return how many slots may be lent in advance. Free slots without real memory do not count."""
        low_water = int(self._low_water * self.slots.usable_nbytes)
        nbytes = (self.slots.free_nbytes - low_water) // AHEAD_SHARE
        nbytes = min(nbytes, self._arena_nbytes // AHEAD_BOUND - int(self.lent_nbytes.sum()))
        if quota := int(self._table.namespaces["capacity"][group]):
            nbytes = min(nbytes, (quota - int(self.used_nbytes[group])) // AHEAD_SHARE)
        return max(0, min(nbytes // size, self.slots.free_populated(size), len(self.free_rows) // AHEAD_SHARE))

    @property
    def rows_in_use(self) -> int:
        return self.free_rows.limit - len(self.free_rows)

    def slot_sizes(self, rows: Rows) -> npt.NDArray[np.int64]:
        nbytes = self._table.columns.nbytes[rows].astype(np.int64)
        return nbytes + (SLOT_ALIGNMENT_NBYTES - 1) & -SLOT_ALIGNMENT_NBYTES

    def _add(self, counts: npt.NDArray[np.int64], rows: Rows, sign: int) -> None:
        """Add the slot sizes of these rows, times `sign`, to the counts of their quota groups."""
        groups, sizes = self._table.columns.group[rows], self.slot_sizes(rows)
        if (groups == groups[:1]).all():  # nearly always, all rows have one group
            counts[groups[:1]] += sign * sizes.sum()
        else:
            counts += sign * np.bincount(groups, sizes, MAX_NAMESPACES).astype(np.int64)

    def _resume_quarantine(self, rows: Rows, now_s: float) -> deque[tuple[float, Rows]]:
        """Return pairs: a time, and the rows whose quarantine ends at this time. Earliest first.

        If an earlier process quarantined a row, the column `inserted` has the end of the quarantine. An end in the
        future stays valid. For all other rows, the quarantine starts now.
        """
        table, inserted = self._table, self._table.columns.inserted
        now, latest = table.ticks(now_s), table.ticks(now_s + QUARANTINE_S)
        ends = inserted[rows]
        inserted[rows] = ends = np.where((ends > now) & (ends <= latest), ends, np.uint32(latest))
        return deque((table.seconds(end), rows[ends == end]) for end in sorted(set(ends.tolist())))


def has_duplicates(numbers: npt.NDArray[np.integer[Any]]) -> bool:
    return len(set(numbers.tolist())) < len(numbers)


def _even(generations: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return odd generations plus 1, and even generations as they are. 2 replaces 0, because 0 means "unused"."""
    even = generations + (generations & 1)
    return np.where(even == 0, np.uint32(2), even)
