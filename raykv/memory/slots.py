"""Slots of the arena: extents of equal size, each serving one slot size at a time.

Chunks of one namespace have one size, so an extent has no holes of odd sizes, and it goes back whole with its last
slot. Pure bookkeeping: the only state outside is `extent_slots` in the chunk table, from which (with the pages of the
rows in use) everything here can be rebuilt.

An extent's free slots are those on its stack, and all from `fresh` on, which were not used since it was claimed: to
claim an extent costs the same however many slots it has. Six bytes a slot that was used: its place on the stack, and
the row that has it.
"""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory import native
from raykv.memory.rows import lazy_zeros
from raykv.types import Rows

Pages = npt.NDArray[np.uint32]
Extents = npt.NDArray[np.int64]

RUN_SLOTS = 128
"""A sample is made of runs of so many neighbours: chunks of one chain often lie side by side, and go together."""
FEW = 4
"""Up to so many slots go one by one: that is less than numpy's fixed costs."""


def slot_nbytes(nbytes: int) -> int:
    """Size of the slot for a chunk of `nbytes`."""
    return max(1, -(-nbytes // SLOT_ALIGNMENT_NBYTES)) * SLOT_ALIGNMENT_NBYTES


class Slots:
    """Which slots are free, and which row has which.

    Attributes:
        free_nbytes: Bytes in free slots and free extents.
    """

    def __init__(
        self,
        extent_slots: npt.NDArray[np.uint32],
        extent_nbytes: int,
        back: Callable[[int], bool],
        pages: Pages,
        rows: Rows,
        order: Iterable[int] | None = None,
    ) -> None:
        """Start from what the shared column and the rows say; both empty means that every extent is free.

        Args:
            extent_slots: Shared column, an entry an extent: the slot size it serves, 0 when free. Changed here.
            back: Takes real memory for an extent; False if there is none. Called before an extent's first use.
            pages: A column: by row, the first page of its slot.
            rows: Those that have a slot, each one of its own.
            order: All extents, in the order in which they are put to use. None: from the first to the last.
        """
        extents = len(extent_slots)
        self._extent_slots = extent_slots
        self._extent_nbytes = extent_nbytes
        self._extent_pages = extent_nbytes // SLOT_ALIGNMENT_NBYTES
        self._back = back
        self.free_nbytes = extents * extent_nbytes
        self._stack = lazy_zeros(
            extents * self._extent_pages, np.uint16 if self._extent_pages <= 1 << 16 else np.uint32
        )
        self._row_at = lazy_zeros(extents * self._extent_pages, np.int32)  # row + 1 by extent and slot; 0: none
        self._stacked, self._fresh = np.zeros(extents, np.int64), np.zeros(extents, np.int64)
        self._stack_cells, self._row_cells = self._stack.data, self._row_at.data
        self._stacked_cells, self._fresh_cells = self._stacked.data, self._fresh.data
        self._open: dict[int, dict[int, None]] = {}  # by slot size: extents with free slots
        self._free: dict[int, int] = {}  # by slot size: free slots in them
        self._backed: deque[int] = deque()  # free extents with real memory: last those that were used last
        self._bare: dict[int, None] = {}  # those without
        self._refused: dict[int, None] = {}  # those for which there was none when it was needed
        self._recover(pages, rows)
        if order is not None:
            self._bare = {extent: None for extent in order if extent in self._bare}

    def _recover(self, pages: Pages, rows: Rows) -> None:
        used = np.zeros(len(self._extent_slots), np.int64)
        if native.note_slots is not None:
            native.note_slots(self._row_at, self._extent_slots, pages, rows, used, self._fresh)
        else:
            self._note_slots(pages[rows], rows, used)
        sizes = self._extent_slots.tolist()
        for extent, (size, busy, fresh) in enumerate(zip(sizes, used.tolist(), self._fresh.tolist(), strict=True)):
            if not busy:
                if size:
                    self._extent_slots[extent] = 0
                    self._backed.append(extent)
                else:
                    self._bare[extent] = None
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

    def _note_slots(self, pages: Pages, rows: Rows, used: Extents) -> None:
        """Note whose slots these are, and of each extent how many are used, and the first from which on none is."""
        places, extents = self._places(pages), self.extent_of(pages)
        self._row_at[places] = rows + 1
        used += np.bincount(extents, minlength=len(used))
        np.maximum.at(self._fresh, extents, places - extents * self._extent_pages + 1)

    # -- taking and giving -------------------------------------------------------------------------------------------

    def free(self, size: int) -> int:
        """Slots of `size` that `take` can give now."""
        return self._free.get(size, 0) + (self._extent_nbytes // size) * (len(self._backed) + len(self._bare))

    def free_backed(self, size: int) -> int:
        """Those of them that have real memory already."""
        return self._free.get(size, 0) + (self._extent_nbytes // size) * len(self._backed)

    def take(self, count: int, size: int) -> Pages:
        """Take up to `count` slots of `size`; fewer when there are no more."""
        if count <= FEW:
            few = [self.take_one(size) for _ in range(count)]
            return np.array([page for page in few if page >= 0], np.uint32)
        parts, step = [], size // SLOT_ALIGNMENT_NBYTES
        while count > 0 and (extent := self._open_extent(size)) >= 0:
            start, most = extent * self._extent_pages, self._extent_nbytes // size
            stacked, fresh = self._stacked_cells[extent], self._fresh_cells[extent]
            reused = min(count, stacked)
            new = min(count - reused, most - fresh)
            parts.append(start + self._stack[start + stacked - reused : start + stacked].astype(np.int64) * step)
            parts.append(start + np.arange(fresh, fresh + new) * step)
            self._note_taken(extent, size, stacked - reused, fresh + new, reused + new)
            count -= reused + new
        pages: Pages = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.uint32)
        return pages

    def take_one(self, size: int) -> int:
        """Take a slot of `size`; -1 when there is none."""
        extent = self._open_extent(size)
        if extent < 0:
            return -1
        stacked, fresh = self._stacked_cells[extent], self._fresh_cells[extent]
        if stacked:
            stacked -= 1
            slot = self._stack_cells[extent * self._extent_pages + stacked]
        else:
            slot, fresh = fresh, fresh + 1
        self._note_taken(extent, size, stacked, fresh, 1)
        return extent * self._extent_pages + slot * (size // SLOT_ALIGNMENT_NBYTES)

    def give(self, pages: Pages) -> None:
        """Give slots back."""
        if len(pages) <= FEW:
            for page in pages.tolist():
                self.give_one(page)
            return
        extents = self.extent_of(pages)
        order = np.argsort(extents, kind="stable")
        extents, pages = extents[order], pages[order]
        places = self._places(pages)
        self._row_at[places] = 0
        which, first, counts = np.unique(extents, return_index=True, return_counts=True)
        above = np.arange(len(pages)) - np.repeat(first, counts) + self._stacked[extents]
        starts = extents * self._extent_pages
        self._stack[starts + above] = places - starts
        self._stacked[which] += counts
        for extent, count in zip(which.tolist(), counts.tolist(), strict=True):
            self._note_given(extent, count)

    def give_one(self, page: int) -> None:
        """Give one slot back."""
        extent = page // self._extent_pages
        start = extent * self._extent_pages
        slot = (page - start) // (int(self._extent_slots[extent]) // SLOT_ALIGNMENT_NBYTES)
        stacked = self._stacked_cells[extent]
        self._row_cells[start + slot] = 0
        self._stack_cells[start + stacked] = slot
        self._stacked_cells[extent] = stacked + 1
        self._note_given(extent, 1)

    def _note_taken(self, extent: int, size: int, stacked: int, fresh: int, count: int) -> None:
        self._stacked_cells[extent], self._fresh_cells[extent] = stacked, fresh
        self._free[size] -= count
        self.free_nbytes -= count * size
        if not stacked and fresh == self._extent_nbytes // size:
            del self._open[size][extent]

    def _note_given(self, extent: int, count: int) -> None:
        size = int(self._extent_slots[extent])
        self._free[size] += count
        self.free_nbytes += count * size
        self._open[size][extent] = None
        if self._stacked_cells[extent] == self._fresh_cells[extent]:  # that was its last slot in use
            self._stacked_cells[extent] = self._fresh_cells[extent] = 0
            self._free[size] -= self._extent_nbytes // size
            self.free_nbytes += self._extent_nbytes % size
            del self._open[size][extent]
            self._extent_slots[extent] = 0
            self._backed.append(extent)

    def _open_extent(self, size: int) -> int:
        """An extent that serves `size` and has a free slot, claimed if need be; -1 if there is none."""
        extents = self._open.get(size)
        if extents:
            return next(reversed(extents))
        while self._backed or self._bare:
            if self._backed:
                extent = self._backed.pop()
            else:
                extent = next(iter(self._bare))
                del self._bare[extent]
                if not self._back(extent):
                    self._refused[extent] = None
                    self.free_nbytes -= self._extent_nbytes
                    continue
            self._extent_slots[extent] = size
            self._serve(extent, size)
            return extent
        return -1

    @property
    def extents_unbacked(self) -> int:
        """Extents that the file system had no memory for: out of use until it has."""
        return len(self._refused)

    @property
    def usable_nbytes(self) -> int:
        """Bytes of all others."""
        return (len(self._extent_slots) - len(self._refused)) * self._extent_nbytes

    def _serve(self, extent: int, size: int) -> None:
        self._open.setdefault(size, {})[extent] = None
        self._free[size] = self._free.get(size, 0) + self._extent_nbytes // size
        self.free_nbytes -= self._extent_nbytes % size

    # -- memory ahead of need ----------------------------------------------------------------------------------------

    def bare_extent(self, ahead_nbytes: int) -> int:
        """An extent to take memory for, so that `ahead_nbytes` of free extents have it; -1 when that is so."""
        if len(self._backed) * self._extent_nbytes >= ahead_nbytes or not self._bare:
            return -1
        return next(iter(self._bare))

    def note_backed(self, extent: int) -> None:
        """This extent has real memory now. Somebody may have taken it meanwhile."""
        if extent in self._bare:
            del self._bare[extent]
            self._backed.appendleft(extent)
        elif extent in self._refused:
            del self._refused[extent]
            self.free_nbytes += self._extent_nbytes
            self._backed.appendleft(extent)

    def refused_extent(self) -> int:
        """One that is out of use, to try again; -1 if there is none."""
        return next(iter(self._refused), -1)

    # -- who has which -----------------------------------------------------------------------------------------------

    def note_rows(self, pages: Pages, rows: Rows) -> None:
        """These rows have these slots."""
        self._row_at[self._places(pages)] = rows + 1

    def note_row(self, page: int, size: int, row: int) -> None:
        """This row has this slot of that size."""
        start = page // self._extent_pages * self._extent_pages
        self._row_cells[start + (page - start) // (size // SLOT_ALIGNMENT_NBYTES)] = row + 1

    def rows_in(self, extent: int) -> Rows:
        """Rows that have the slots of one extent."""
        start = extent * self._extent_pages
        rows: Rows = self._row_at[start : start + int(self._fresh[extent])]
        used: Rows = rows[rows > 0] - np.int32(1)
        return used

    def sample(self, count: int, rng: "np.random.Generator", size: int | None = None) -> Rows:
        """Rows of about `count` slots in use, in runs of neighbours from anywhere; all rows when they are fewer.

        Args:
            size: Only slots of this size.
        """
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
        rows: Rows = self._row_at[places[slots < self._fresh[extents[place]][:, None]]]
        used: Rows = rows[rows > 0] - np.int32(1)
        return used

    def used(self, extents: Extents) -> Extents:
        """Slots in use of each extent."""
        return self._fresh[extents] - self._stacked[extents]

    def extents_serving_others(self, size: int) -> Extents:
        """Extents that serve another slot size than `size`: what could be emptied for it."""
        return np.flatnonzero((self._extent_slots != 0) & (self._extent_slots != size))

    def extent_of(self, pages: Pages) -> Extents:
        """Extent of each page."""
        return (pages // self._extent_pages).astype(np.int64)

    def _places(self, pages: Pages) -> npt.NDArray[np.int64]:
        """Where each slot stands in `_row_at`: its extent's start, and its number there."""
        extents = self.extent_of(pages)
        starts = extents * self._extent_pages
        steps = self._extent_slots[extents].astype(np.int64) // SLOT_ALIGNMENT_NBYTES
        return starts + (pages - starts) // steps
