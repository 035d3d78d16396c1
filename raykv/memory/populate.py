"""Populates the arena and the chunk table: takes real memory for their pages before the first use.

A page of a shared file takes real memory at the first access. If there is no memory, the access kills the process. So
each extent is populated before its first use. Usually `Populator.step` does this on a background thread. If a writer
needs an unpopulated extent, the extent is populated at once, usually with small pages. `Slots` records the state of
each extent.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from raykv.memory.arena import SharedMemory
from raykv.memory.free_rows import FreeRows
from raykv.memory.numa import preferred
from raykv.memory.slots import Slots
from raykv.memory.table import Table

log = logging.getLogger(__name__)

AHEAD_NBYTES: Final = 256 << 20
AHEAD_SHARE: Final = 8
"""Extents are populated in advance until the free populated extents have this many bytes in total: AHEAD_NBYTES or
1/AHEAD_SHARE of the arena, whichever is smaller."""
AHEAD_ROWS: Final = 1 << 18
"""This many free rows are populated in advance."""


class Populator:
    """Takes real memory for extents and rows.

    No memory is taken beyond the limit of the process's control group, because the kernel would kill the process (see
    `raykv.memory.cgroup`). After a refusal, nothing more is tried until `step` is called with `retry`.

    Attributes:
        refused: Why the last attempt to take memory failed. Empty if it succeeded.
        on_populated: Functions to call with (offset, nbytes) of each extent that got memory, before the extent's first
            use. They can register the memory with a NIC or a GPU. The node's lock is held during the calls. There are
            no calls for extents that had memory when this process took over the table.
    """

    def __init__(
        self, arena: SharedMemory, table: Table, slots: Slots, free_rows: FreeRows, *, nodes: Sequence[int] = (0,)
    ) -> None:
        """Set `slots.populate`. The extents take memory from the NUMA nodes in `nodes`, in turn."""
        self._arena, self._table, self._slots, self._free_rows = arena, table, slots, free_rows
        self._nodes = nodes
        self._in_flight_nbytes = 0
        self._logged = False
        self.refused = ""
        self._ahead_nbytes = min(AHEAD_NBYTES, arena.nbytes // AHEAD_SHARE)
        slots.populate = self._populate_now
        self.on_populated: list[Callable[[int, int], None]] = []

    @property
    def due(self) -> bool:
        """Whether `step` with `quiet=False` would take memory. This check is cheap."""
        return self._next_extent(quiet=False) >= 0 or self._next_rows() > 0

    def step(self, lock: AbstractContextManager[object], *, quiet: bool, retry: bool = False) -> bool:
        """Take memory for one more extent and for more rows, if too few are populated.

        Args:
            lock: The node's lock. The caller must not hold it. The slow part of the step runs without the lock.
            quiet: Whether nobody writes and the host has memory to spare. If so, steps populate the whole arena.
                During writes, this would take a core and memory bandwidth from the writers.
            retry: Whether to try again after a refusal. Each attempt costs reads of several files of the kernel.

        Returns:
            True if memory was taken: the caller should call again at once. False if enough is populated or there is no
            memory: the caller should call again later.
        """
        with lock:
            extent, rows = self._next_extent(quiet=quiet, retry=retry), self._next_rows(retry=retry)
            self._in_flight_nbytes = self._table.extent_nbytes if extent >= 0 else 0
        populated = extent >= 0 and self._populate(extent, hurry=False)
        more_rows = rows > 0 and self._table.populate_rows(rows)
        if rows and not more_rows:
            self._refuse(f"no memory for more rows of {self._table.memory.path}")
        elif (more_rows and extent < 0) or populated:
            self.refused = ""
        with lock:
            self._in_flight_nbytes = 0
            if populated and self._slots.mark_populated(extent):
                self._announce(extent)
            if more_rows:
                self._free_rows.limit = self._table.rows_populated
        return populated or more_rows

    def _next_extent(self, *, quiet: bool, retry: bool = False) -> int:
        """Return the extent to populate now, or -1 if enough extents are populated."""
        enough = not quiet and self._slots.free_populated_nbytes >= self._ahead_nbytes
        return -1 if enough or (self.refused and not retry) else self._slots.next_without_memory()

    def _next_rows(self, *, retry: bool = False) -> int:
        """Return the number of rows that should be populated in total, or 0 if enough rows are populated."""
        populated, rows = self._table.rows_populated, self._table.rows
        few = populated < rows and len(self._free_rows) < AHEAD_ROWS
        return min(rows, populated + AHEAD_ROWS) if few and (retry or not self.refused) else 0

    def _populate_now(self, extent: int) -> bool:
        populated = not self.refused and self._populate(extent, hurry=True, others_nbytes=self._in_flight_nbytes)
        if populated:
            self._announce(extent)
        return populated

    def _populate(self, extent: int, *, hurry: bool, others_nbytes: int = 0) -> bool:
        """Take memory for an extent. `others_nbytes`: what another thread takes at the same time."""
        if refusal := self._arena.refusal(self._table.extent_nbytes + others_nbytes):
            self._refuse(refusal)
            return False
        populated = self._populate_near(extent, hurry=hurry)
        if not populated:
            self._refuse(f"no room in the file system of {self._arena.path}, or no huge pages")
        return populated

    def _populate_near(self, extent: int, *, hurry: bool) -> bool:
        nbytes, arena = self._table.extent_nbytes, self._arena
        if len(self._nodes) < 2:
            return arena.populate(extent * nbytes, nbytes, hurry=hurry)
        with preferred(self._nodes[extent % len(self._nodes)]) as allowed:
            if not allowed:
                log.warning("the arena is not spread over the memory nodes %s: not allowed here", self._nodes)
                self._nodes = (0,)
            return arena.populate(extent * nbytes, nbytes, hurry=hurry)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        if not self._logged:
            log.warning("the arena grows no further for now: %s", reason)
            self._logged = True

    def _announce(self, extent: int) -> None:
        for hook in self.on_populated:
            hook(extent * self._table.extent_nbytes, self._table.extent_nbytes)
