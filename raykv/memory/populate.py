"""Taking real memory for the arena and the table before it is needed.

A file in shared memory has no memory until its first touch, and a touch when there is none kills the process. So an
extent is populated before its first use: ahead of need by `Populator.step` on a background thread, or at once, in small
pages, when a writer needs it. `Slots` knows which extents are populated, unpopulated or failed.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from raykv.memory.arena import SharedMemory
from raykv.memory.free_rows import FreeRows
from raykv.memory.slots import Slots
from raykv.memory.table import Table

AHEAD_NBYTES: Final = 256 << 20
AHEAD_SHARE: Final = 8
"""This many bytes of free extents stay populated, or this part of the arena if that is less."""
AHEAD_ROWS: Final = 1 << 18
"""This many free rows stay populated."""


class Populator:
    """Takes real memory for extents and rows.

    Attributes:
        on_populated: Called once with (offset, nbytes) of each extent that got memory, before its first use: the place
            to register it with a NIC or a GPU. Called by the thread of `step`, or by a writer under the node's lock.
            Extents that serve since an earlier process have memory already: see `Table.extent_slots`.
    """

    def __init__(self, arena: SharedMemory, table: Table, slots: Slots, free_rows: FreeRows) -> None:
        """From now on `slots` takes memory by `populate_now`."""
        self._arena, self._table, self._slots, self._free_rows = arena, table, slots, free_rows
        self._ahead_nbytes = min(AHEAD_NBYTES, arena.nbytes // AHEAD_SHARE)
        slots.populate = self.populate_now
        self.on_populated: list[Callable[[int, int], None]] = []
        self._announced: set[int] = set()
        self._announcing = threading.Lock()  # `step` and a writer may populate the same extent

    def populate_now(self, extent: int) -> bool:
        return self._populate(extent, hurry=True)

    @property
    def due(self) -> bool:
        """Whether `step` would take memory although others write. Cheap."""
        return self._next_extent(quiet=False) >= 0 or self._next_rows() > 0

    def step(self, lock: AbstractContextManager[object], *, quiet: bool) -> bool:
        """Take memory for one more extent and for more rows, if due. The long part runs without the lock.

        `lock`: the node's, not held. `quiet`: nobody writes, and the host has memory to spare: populate the whole
        arena, and try failed extents again. During writes this would cost them a core and bandwidth. Returns: whether
        to call it again. False also when the file system is full: call it again later.
        """
        with lock:
            extent, rows = self._next_extent(quiet=quiet), self._next_rows()
        populated = extent >= 0 and self._populate(extent, hurry=False)
        more_rows = rows > 0 and self._table.populate_rows(rows)
        with lock:
            if populated:
                self._slots.mark_populated(extent)
            if more_rows:
                self._free_rows.limit = self._table.rows_populated
        return populated or more_rows

    def _next_extent(self, *, quiet: bool) -> int:
        """The extent to populate now; -1 when enough are."""
        slots = self._slots
        if not quiet:
            return -1 if slots.free_populated_nbytes >= self._ahead_nbytes else slots.first_unpopulated()
        extent = slots.first_unpopulated()
        return extent if extent >= 0 else slots.first_failed()

    def _next_rows(self) -> int:
        """Number of rows to populate up to; 0 when enough are."""
        populated, rows = self._table.rows_populated, self._table.rows
        few = populated < rows and len(self._free_rows) < AHEAD_ROWS
        return min(rows, populated + AHEAD_ROWS) if few else 0

    def _populate(self, extent: int, *, hurry: bool) -> bool:
        nbytes = self._table.extent_nbytes
        if not self._arena.populate(extent * nbytes, nbytes, hurry=hurry):
            return False
        with self._announcing:
            if extent not in self._announced:
                self._announced.add(extent)
                for hook in self.on_populated:
                    hook(extent * nbytes, nbytes)
        return True
