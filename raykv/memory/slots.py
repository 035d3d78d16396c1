"""Slots of the arena. The arena consists of equal extents. An extent has slots of one size, like a slab in memcached.

When the last used slot of an extent becomes free, the extent is free too, and can get another slot size. The node's
process keeps the list of free slots in its private memory. When a node starts, the list is computed from `extent_slots`
and the column `page` of the chunk table.
"""

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import DamagedError
from raykv.memory.free_rows import lazy_zeros
from raykv.types import Rows

Pages = npt.NDArray[np.uint32]
Extents = npt.NDArray[np.int64]

RUN_SLOTS = 128
"""`Slots.sample` takes runs of this many neighbouring slots. Chunks of one chain are often in neighbouring slots, so a
sample contains several chunks of a chain."""


def slot_nbytes(nbytes: int) -> int:
    return max(1, -(-nbytes // SLOT_ALIGNMENT_NBYTES)) * SLOT_ALIGNMENT_NBYTES


class Places(NamedTuple):
    """The places of slots in the arena.

    Attributes:
        numbers: Number of each slot: the first page of its extent, plus the slot's position in the extent.
        extents: Extent of each slot.
        starts: First page of each slot's extent.
        steps: Size of each slot in pages; 0 if the extent was never used. If all are equal, the array has one entry.
    """

    numbers: npt.NDArray[np.intp]
    extents: npt.NDArray[np.intp]
    starts: Pages
    steps: Pages


def slot_places(pages: Pages, extent_slots: npt.NDArray[np.uint32], extent_nbytes: int) -> Places:
    extent_pages = np.uint32(extent_nbytes // SLOT_ALIGNMENT_NBYTES)
    extents = pages // extent_pages
    starts, extents_at = extents * extent_pages, extents.astype(np.intp)  # numpy indexes fastest with `intp`
    steps = extent_slots[extents_at] // np.uint32(SLOT_ALIGNMENT_NBYTES)
    if steps.size and (steps == steps[0]).all():
        steps = steps[:1]  # numpy divides faster by a single number
    numbers = starts + (pages - starts) // np.maximum(steps, np.uint32(1))
    return Places(numbers.astype(np.intp), extents_at, starts, steps)


class Slots:
    """Records which slots are free, and which row has each used slot.

    A free extent is in one of three states:

    * populated: it has real memory;
    * unpopulated: it has no real memory yet;
    * failed: `populate` returned False. The extent is out of use until `mark_populated` is called for it.

    A populated extent never loses its memory, also when the process ends. Its entry in `extent_slots` is not 0, so that
    the next process finds it populated.

    Attributes:
        free_nbytes: Bytes in free slots and free extents. Failed extents do not count.
        populate: A function that takes real memory for an extent. It is called before the first use of an unpopulated
            extent. It returns False if there is no memory.
    """

    def __init__(self, extent_slots: npt.NDArray[np.uint32], extent_nbytes: int) -> None:
        """Start with all slots unused. The caller then calls `enter` for all rows with slots, and `open_extents` last.

        Args:
            extent_slots: The slot size of each extent: the array in the chunk table. This object changes the array.
            extent_nbytes: Size of an extent in bytes.
        """
        extents = len(extent_slots)
        self._extent_slots, self._extent_nbytes = extent_slots, extent_nbytes
        self.populate: Callable[[int], bool] = lambda extent: False
        self._extent_pages = extent_nbytes // SLOT_ALIGNMENT_NBYTES
        self.free_nbytes = extents * extent_nbytes
        self._row_at = lazy_zeros(extents * self._extent_pages, np.int32)  # row + 1 of each slot; 0 if the slot is free
        self._used = np.zeros(extents, np.int64)  # number of used slots in each extent
        self._open: dict[int, dict[int, None]] = {}  # maps a slot size to extents with used and free slots
        self._free: dict[int, int] = {}  # maps a slot size to the number of free slots in `_open`
        self._populated: deque[int] = deque()  # free extents, the most recently used one last
        self._unpopulated: dict[int, None] = {}
        self._failed: dict[int, None] = {}

    # -- at start ---------------------------------------------------------------------------------------------------

    def enter(self, rows: Rows, places: Places) -> bool:
        """Record that these rows have these slots. Returns False if two rows have the same slot."""
        entries = rows + np.int32(1)
        taken = self._used.any() and self._row_at[places.numbers].any()
        self._row_at[places.numbers] = entries
        self._used += np.bincount(places.extents, minlength=len(self._used))
        return not taken and bool((self._row_at[places.numbers] == entries).all())

    def open_extents(self) -> None:
        """Find the free slots and the free extents. Call this after the calls of `enter` for all rows with slots."""
        for extent, (size, used) in enumerate(zip(self._extent_slots.tolist(), self._used.tolist(), strict=True)):
            if used:
                self._serve(extent, size)
                self._count_taken(extent, used)
            elif size:
                self._populated.append(extent)
            else:
                self._unpopulated[extent] = None

    # -- taking and giving -------------------------------------------------------------------------------------------

    def free(self, size: int) -> int:
        """Number of slots of `size` that `take` can give now, if unpopulated extents get real memory."""
        return self.free_populated(size) + (self._extent_nbytes // size) * len(self._unpopulated)

    def free_populated(self, size: int) -> int:
        """Number of slots of `size` that `take` can give now and that have real memory already."""
        return self._free.get(size, 0) + (self._extent_nbytes // size) * len(self._populated)

    def take(self, rows: Rows, size: int) -> Pages:
        """Give a slot of `size` to each row, or to the first rows if too few slots are free.

        Returns the first page of each slot that was given. Raises DamagedError if another process has overwritten the
        slot size of an extent.
        """
        parts, step, done = [np.empty(0, np.int64)], size // SLOT_ALIGNMENT_NBYTES, 0
        while done < len(rows) and (extent := self._open_extent(size)) >= 0:
            start = extent * self._extent_pages
            row_at = self._row_at[start : start + self._extent_nbytes // size]
            free = np.flatnonzero(row_at == 0)[: len(rows) - done]
            if not free.size:  # `_count_taken` did not notice that the extent is full
                del self._open[size][extent]
                raise DamagedError(f"the slot size of extent {extent} was overwritten; restart the node")
            parts.append(start + free * step)
            row_at[free] = rows[done : done + len(free)] + 1
            self._used[extent] += len(free)
            self._count_taken(extent, len(free))
            done += len(free)
        pages: Pages = np.concatenate(parts).astype(np.uint32)
        return pages

    def _count_taken(self, extent: int, count: int) -> None:
        size = int(self._extent_slots[extent])
        self._free[size] -= count
        self.free_nbytes -= count * size
        if self._used[extent] == self._extent_nbytes // size:
            del self._open[size][extent]

    def give(self, pages: Pages) -> None:
        places = slot_places(pages, self._extent_slots, self._extent_nbytes)
        self._row_at[places.numbers] = 0
        for extent, count in zip(
            *(part.tolist() for part in np.unique(places.extents, return_counts=True)), strict=True
        ):
            size = int(self._extent_slots[extent])
            self._used[extent] -= count
            self._free[size] += count
            self.free_nbytes += count * size
            self._open[size][extent] = None
            if not self._used[extent]:
                self._free[size] -= self._extent_nbytes // size
                self.free_nbytes += self._extent_nbytes % size
                del self._open[size][extent]
                self._populated.append(extent)

    def _open_extent(self, size: int) -> int:
        """Return an extent with a free slot of `size`, or -1. Claims a free extent if necessary."""
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

    def next_without_memory(self) -> int:
        """Return an unpopulated extent, else a failed extent, else -1."""
        return next(chain(self._unpopulated, self._failed), -1)

    def mark_populated(self, extent: int) -> bool:
        """Record that an extent has real memory. Returns False if a writer has claimed the extent meanwhile."""
        if extent in self._unpopulated:
            del self._unpopulated[extent]
        elif extent in self._failed:
            del self._failed[extent]
            self.free_nbytes += self._extent_nbytes
        else:
            return False
        self._extent_slots[extent] = SLOT_ALIGNMENT_NBYTES
        self._populated.appendleft(extent)
        return True

    # -- rows of slots -----------------------------------------------------------------------------------------------

    def rows_in(self, extent: int) -> Rows:
        start = extent * self._extent_pages
        return _used(self._row_at[start : start + self._extent_pages])

    def sample(self, count: int, rng: "np.random.Generator", size: int | None = None) -> Rows:
        """Pick up to `count` random slots, and return the rows of those that are used.

        If `size` is given, only slots of this size are picked.
        """
        extents = np.flatnonzero((self._used > 0) & (size is None or self._extent_slots == size))
        slots = self._extent_nbytes // self._extent_slots[extents].astype(np.int64)
        ends = np.cumsum(-(-slots // RUN_SLOTS))
        runs = int(ends[-1]) if ends.size else 0
        wanted = count // RUN_SLOTS
        chosen = np.arange(runs) if runs <= wanted else np.unique(rng.integers(0, runs, wanted))
        place = np.searchsorted(ends, chosen, side="right")
        within = chosen - np.where(place > 0, ends[place - 1], 0)
        numbers = within[:, None] * RUN_SLOTS + np.arange(RUN_SLOTS)
        at = extents[place][:, None] * self._extent_pages + numbers
        return _used(self._row_at[at[numbers < slots[place][:, None]]])

    def extents_serving_others(self, size: int) -> Extents:
        """Return the extents that are in use with a slot size other than `size`."""
        return np.flatnonzero((self._used > 0) & (self._extent_slots != size))

    def extent_of(self, pages: Pages) -> Extents:
        return (pages // np.uint32(self._extent_pages)).astype(np.int64)


def _used(rows_at: Rows) -> Rows:
    rows: Rows = rows_at[rows_at > 0] - np.int32(1)
    return rows
