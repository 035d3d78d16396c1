"""Slots of the arena. The arena consists of equal extents; an extent has slots of one size, like a slab in memcached.

When its last used slot becomes free, an extent is free again, for any slot size. One process holds these lists. At a
start it derives them from `extent_slots` in the chunk table and from the column `page` of the rows.

The free slots of an extent are on its stack, or at `fresh` and after: those were not used since the extent was claimed.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory.free_rows import blocks, lazy_zeros
from raykv.types import Rows

Pages = npt.NDArray[np.uint32]
Extents = npt.NDArray[np.int64]

RUN_SLOTS = 128
"""A sample consists of runs of this many neighbouring slots, since a chain's chunks often lie next to each other."""


def slot_nbytes(nbytes: int) -> int:
    return max(1, -(-nbytes // SLOT_ALIGNMENT_NBYTES)) * SLOT_ALIGNMENT_NBYTES


class Places(NamedTuple):
    """Where slots lie.

    Attributes:
        numbers: Number of each slot. An extent's first slot has the number of its first page; the others count on.
        starts: First page of the extent.
        steps: Pages per slot; 0 in a free extent. A single entry when all are equal.
    """

    numbers: npt.NDArray[np.intp]
    extents: npt.NDArray[np.intp]
    starts: Pages
    steps: Pages


def slot_places(pages: Pages, extent_slots: npt.NDArray[np.uint32], extent_nbytes: int) -> Places:
    extent_pages = np.uint32(extent_nbytes // SLOT_ALIGNMENT_NBYTES)
    extents = pages // extent_pages
    starts, extents_at = extents * extent_pages, extents.astype(np.intp)  # numpy indexes faster by its own type
    steps = extent_slots[extents_at] // np.uint32(SLOT_ALIGNMENT_NBYTES)
    if steps.size and (steps == steps[0]).all():
        steps = steps[:1]  # division by one number is ten times quicker
    numbers = starts + (pages - starts) // np.maximum(steps, np.uint32(1))
    return Places(numbers.astype(np.intp), extents_at, starts, steps)


class Slots:
    """Which slots are free, and which row has which slot.

    A free extent is populated (it has real memory), unpopulated, or failed: `populate` returned False. A failed extent
    is out of use until `mark_populated`.

    Attributes:
        free_nbytes: Bytes in free slots and free extents, failed extents excluded.
        populate: Called before the first use of an extent, to take real memory. Returns False if there is none.
    """

    def __init__(
        self,
        extent_slots: npt.NDArray[np.uint32],
        extent_nbytes: int,
        populate: Callable[[int], bool],
        pages: Pages,
        rows: Rows,
        order: Iterable[int] | None = None,
    ) -> None:
        """Derive the lists from the chunk table.

        `extent_slots`: array of the table; this object changes it. `pages`: the column `page`. `rows`: all rows that
        have a slot. `order`: all extents in the order in which to use them; None: first to last.
        """
        extents = len(extent_slots)
        self._extent_slots, self._extent_nbytes, self.populate = extent_slots, extent_nbytes, populate
        self._extent_pages = extent_nbytes // SLOT_ALIGNMENT_NBYTES
        self.free_nbytes = extents * extent_nbytes
        self._stack = lazy_zeros(extents * self._extent_pages, np.uint32)
        self._row_at = lazy_zeros(extents * self._extent_pages, np.int32)  # by slot number: row + 1; 0: no row
        self._stacked, self._fresh = np.zeros(extents, np.int64), np.zeros(extents, np.int64)
        self._open: dict[int, dict[int, None]] = {}  # by slot size: extents with free slots
        self._free: dict[int, int] = {}  # by slot size: number of free slots in these extents
        self._populated: deque[int] = deque()  # free extents; the most recently used extent is the last
        self._unpopulated: dict[int, None] = {}
        self._failed: dict[int, None] = {}
        self._recover(pages, rows)
        if order is not None:
            self._unpopulated = {extent: None for extent in order if extent in self._unpopulated}

    def _recover(self, pages: Pages, rows: Rows) -> None:
        used = np.zeros(len(self._extent_slots), np.int64)
        for block in blocks(len(rows)):
            some = rows[block]
            places = slot_places(pages[some], self._extent_slots, self._extent_nbytes)
            self._row_at[places.numbers] = some + np.int32(1)
            used += np.bincount(places.extents, minlength=len(used))
            np.maximum.at(self._fresh, places.extents, places.numbers - places.starts + 1)
        sizes = self._extent_slots.tolist()
        for extent, (size, busy, fresh) in enumerate(zip(sizes, used.tolist(), self._fresh.tolist(), strict=True)):
            if not busy:
                if size:
                    self._extent_slots[extent] = 0
                    self._populated.append(extent)
                else:
                    self._unpopulated[extent] = None
                continue
            if busy < fresh:
                start = extent * self._extent_pages
                holes = np.flatnonzero(self._row_at[start : start + fresh] == 0)
                self._stack[start : start + len(holes)] = holes
                self._stacked[extent] = len(holes)
            self._serve(extent, size)
            self.free_nbytes -= size * busy
            self._free[size] -= busy
            if busy == self._extent_nbytes // size:
                del self._open[size][extent]

    # -- taking and giving -------------------------------------------------------------------------------------------

    def free(self, size: int) -> int:
        """Number of slots of `size` that `take` can give now."""
        return self.free_populated(size) + (self._extent_nbytes // size) * len(self._unpopulated)

    def free_populated(self, size: int) -> int:
        """Number of slots of `size` that `take` can give now and that have real memory already."""
        return self._free.get(size, 0) + (self._extent_nbytes // size) * len(self._populated)

    def take(self, count: int, size: int) -> Pages:
        """Take `count` slots of `size`, or fewer if no more are free. Returns the first page of each slot."""
        parts, step = [], size // SLOT_ALIGNMENT_NBYTES
        while count > 0 and (extent := self._open_extent(size)) >= 0:
            start, slots = extent * self._extent_pages, self._extent_nbytes // size
            stacked, fresh = int(self._stacked[extent]), int(self._fresh[extent])
            reused = min(count, stacked)
            new = min(count - reused, slots - fresh)
            parts.append(start + self._stack[start + stacked - reused : start + stacked].astype(np.int64) * step)
            parts.append(start + np.arange(fresh, fresh + new) * step)
            self._stacked[extent], self._fresh[extent] = stacked - reused, fresh + new
            self._free[size] -= reused + new
            self.free_nbytes -= (reused + new) * size
            count -= reused + new
            if reused == stacked and fresh + new == slots:
                del self._open[size][extent]
        pages: Pages = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.uint32)
        return pages

    def give(self, pages: Pages) -> None:
        places = slot_places(pages, self._extent_slots, self._extent_nbytes)
        order = np.argsort(places.extents, kind="stable")
        numbers, extents = places.numbers[order], places.extents[order]
        self._row_at[numbers] = 0
        which, first, counts = np.unique(extents, return_index=True, return_counts=True)
        above = np.arange(len(pages)) - np.repeat(first, counts) + self._stacked[extents]
        starts = extents * self._extent_pages
        self._stack[starts + above] = numbers - starts
        self._stacked[which] += counts
        for extent, count in zip(which.tolist(), counts.tolist(), strict=True):
            self._count_given(extent, count)

    def _count_given(self, extent: int, count: int) -> None:
        size = int(self._extent_slots[extent])
        self._free[size] += count
        self.free_nbytes += count * size
        self._open[size][extent] = None
        if self._stacked[extent] == self._fresh[extent]:  # the extent has no slot in use any more
            self._stacked[extent] = self._fresh[extent] = 0
            self._free[size] -= self._extent_nbytes // size
            self.free_nbytes += self._extent_nbytes % size
            del self._open[size][extent]
            self._extent_slots[extent] = 0
            self._populated.append(extent)

    def _open_extent(self, size: int) -> int:
        """An extent with a free slot of `size`. Claims a free extent if necessary. -1: there is none."""
        extents = self._open.get(size)
        if extents:
            return next(reversed(extents))
        while self._populated or self._unpopulated:
            if self._populated:
                extent = self._populated.pop()
            else:
                extent = next(iter(self._unpopulated))
                del self._unpopulated[extent]
                if not self.populate(extent):
                    self._failed[extent] = None
                    self.free_nbytes -= self._extent_nbytes
                    continue
            self._extent_slots[extent] = size
            self._serve(extent, size)
            return extent
        return -1

    def _serve(self, extent: int, size: int) -> None:
        self._open.setdefault(size, {})[extent] = None
        self._free[size] = self._free.get(size, 0) + self._extent_nbytes // size
        self.free_nbytes -= self._extent_nbytes % size

    # -- real memory: see raykv.memory.populate ----------------------------------------------------------------------

    @property
    def extents_failed(self) -> int:
        return len(self._failed)

    @property
    def usable_nbytes(self) -> int:
        return (len(self._extent_slots) - len(self._failed)) * self._extent_nbytes

    @property
    def free_populated_nbytes(self) -> int:
        return len(self._populated) * self._extent_nbytes

    def first_unpopulated(self) -> int:
        return next(iter(self._unpopulated), -1)

    def first_failed(self) -> int:
        return next(iter(self._failed), -1)

    def mark_populated(self, extent: int) -> None:
        """Note that an extent has real memory. Does nothing if a writer has claimed the extent meanwhile."""
        if extent in self._unpopulated:
            del self._unpopulated[extent]
        elif extent in self._failed:
            del self._failed[extent]
            self.free_nbytes += self._extent_nbytes
        else:
            return
        self._populated.appendleft(extent)

    # -- rows of slots -----------------------------------------------------------------------------------------------

    def set_rows(self, pages: Pages, rows: Rows) -> None:
        self._row_at[slot_places(pages, self._extent_slots, self._extent_nbytes).numbers] = rows + 1

    def rows_in(self, extent: int) -> Rows:
        start = extent * self._extent_pages
        return _used(self._row_at[start : start + int(self._fresh[extent])])

    def sample(self, count: int, rng: "np.random.Generator", size: int | None = None) -> Rows:
        """Rows of about `count` used slots, in random runs of neighbours; all rows if there are fewer."""
        served = self._extent_slots != 0 if size is None else self._extent_slots == size
        extents = np.flatnonzero(served & (self._fresh > 0))
        ends = np.cumsum(-(-self._fresh[extents] // RUN_SLOTS))
        runs = int(ends[-1]) if ends.size else 0
        wanted = count // RUN_SLOTS
        chosen = np.arange(runs) if runs <= wanted else np.unique(rng.integers(0, runs, wanted))
        place = np.searchsorted(ends, chosen, side="right")
        within = chosen - np.where(place > 0, ends[place - 1], 0)
        slots = within[:, None] * RUN_SLOTS + np.arange(RUN_SLOTS)
        places = extents[place][:, None] * self._extent_pages + slots
        return _used(self._row_at[places[slots < self._fresh[extents[place]][:, None]]])

    def used(self, extents: Extents) -> Extents:
        return self._fresh[extents] - self._stacked[extents]

    def extents_serving_others(self, size: int) -> Extents:
        """Extents in use with another slot size than `size`."""
        return np.flatnonzero((self._extent_slots != 0) & (self._extent_slots != size))

    def extent_of(self, pages: Pages) -> Extents:
        return (pages // np.uint32(self._extent_pages)).astype(np.int64)


def _used(rows_at: Rows) -> Rows:
    rows: Rows = rows_at[rows_at > 0] - np.int32(1)
    return rows
