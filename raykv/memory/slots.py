"""Slots of the arena: extents of equal size, each serving one slot size at a time.

Chunks of one namespace have one size, so an extent has no holes of odd sizes, and it goes back whole when its last
slot does. Pure bookkeeping: the only state outside is `extent_slots` in the chunk table, from which (with the pages
of the ready rows) everything here can be rebuilt.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES

Pages = npt.NDArray[np.uint32]


def slot_nbytes(nbytes: int) -> int:
    """Size of the slot for a chunk of `nbytes`."""
    return max(1, -(-nbytes // SLOT_ALIGNMENT_NBYTES)) * SLOT_ALIGNMENT_NBYTES


class Slots:
    """Which slots are free.

    Attributes:
        extents_unbacked: Extents that the file system had no memory for; they are out of use until a restart.
    """

    def __init__(
        self,
        extent_slots: npt.NDArray[np.uint32],
        extent_nbytes: int,
        back: Callable[[int], bool],
        used_pages: Pages,
    ) -> None:
        """Start from what the shared column and the rows say; both empty means that every extent is free.

        Args:
            extent_slots: Shared column, an entry an extent: the slot size it serves, 0 when free. Changed here.
            back: Takes real memory for an extent; False if there is none. Called before an extent's first use.
            used_pages: First pages of the slots that are in use.
        """
        self._extent_slots = extent_slots
        self._extent_nbytes = extent_nbytes
        self._extent_pages = extent_nbytes // SLOT_ALIGNMENT_NBYTES
        self._back = back
        self._backed = extent_slots > 0
        self._used = np.bincount(self.extent_of(used_pages), minlength=len(extent_slots)).astype(np.int64)
        self._free_extents = np.flatnonzero(extent_slots == 0)[::-1].tolist()
        self.extents_unbacked = 0
        taken = set(used_pages.tolist())
        self._free: dict[int, list[int]] = {}
        for extent in np.flatnonzero(extent_slots).tolist():
            size = int(extent_slots[extent])
            self._free.setdefault(size, []).extend(p for p in self._pages(extent, size) if p not in taken)

    def free(self, size: int) -> int:
        """Slots of `size` that `take` can give now."""
        in_use = len(self._free.get(size, ()))
        return in_use + (self._extent_nbytes // size) * (len(self._free_extents) + self._idle_extents(size))

    @property
    def free_nbytes(self) -> int:
        """Bytes in free slots and free extents."""
        in_slots = sum(size * len(pages) for size, pages in self._free.items())
        return in_slots + self._extent_nbytes * len(self._free_extents)

    def take(self, count: int, size: int) -> Pages:
        """Take up to `count` slots of `size`; fewer when there are no more."""
        free = self._free.setdefault(size, [])
        while len(free) < count and self._claim_extent(size, free):
            pass
        count = min(count, len(free))
        pages = np.array(free[len(free) - count :], np.uint32)
        del free[len(free) - count :]
        np.add.at(self._used, pages // self._extent_pages, 1)
        return pages

    def give(self, pages: Pages) -> None:
        """Give slots back."""
        extents = (pages // self._extent_pages).astype(np.int64)
        np.subtract.at(self._used, extents, 1)
        sizes = self._extent_slots[extents]
        for size in np.unique(sizes).tolist():
            self._free[size].extend(pages[sizes == size].tolist())

    def used(self, extents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots in use of each extent."""
        return self._used[extents]

    def extents_serving_others(self, size: int) -> npt.NDArray[np.int64]:
        """Extents that serve another slot size than `size` and are in use: what could be emptied for it."""
        return np.flatnonzero((self._extent_slots != 0) & (self._extent_slots != size) & (self._used > 0))

    def extent_of(self, pages: Pages) -> npt.NDArray[np.int64]:
        """Extent of each page."""
        return (pages // self._extent_pages).astype(np.int64)

    def _pages(self, extent: int, size: int) -> range:
        first = extent * self._extent_pages
        step = size // SLOT_ALIGNMENT_NBYTES
        return range(first, first + (self._extent_nbytes // size) * step, step)

    def _idle_extents(self, size: int) -> int:
        return int(np.count_nonzero((self._extent_slots != 0) & (self._extent_slots != size) & (self._used == 0)))

    def _claim_extent(self, size: int, free: list[int]) -> bool:
        while self._free_extents or self._reclaim_idle(size):
            extent = self._free_extents.pop()
            if not self._backed[extent] and not self._back(extent):
                self.extents_unbacked += 1
                continue
            self._backed[extent] = True
            self._extent_slots[extent] = size
            free.extend(reversed(self._pages(extent, size)))
            return True
        return False

    def _reclaim_idle(self, size: int) -> bool:
        """Take one extent back from another slot size that has no use for it now. False when there is none."""
        idle = np.flatnonzero((self._extent_slots != 0) & (self._extent_slots != size) & (self._used == 0))
        if not idle.size:
            return False
        extent = int(idle[0])
        old = int(self._extent_slots[extent])
        pages = set(self._pages(extent, old))
        self._free[old] = [page for page in self._free[old] if page not in pages]
        self._extent_slots[extent] = 0
        self._free_extents.append(extent)
        return True
