"""A save in flight, and how long it waits for the node."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock
from typing import Final

from raykv.types import PutResult

RECLAIMED: Final = "the engine reused their blocks before they were read"
EARLY_S: Final = 0.002
"""A call that waits for the node may end this long before its deadline."""


class Saving:
    """The saves of one step, in flight.

    Attributes:
        blocks: Blocks that the saves read.
        chunks: Number of chunks, for all ranks.
        needed: Set when a step needs the blocks, or those of a later save. Then the saves wait no longer for slots.
        free: Set when the saves have read their blocks, or have ended.
        future: The results.
    """

    def __init__(self, blocks: set[int], chunks: int, *, ranks: int) -> None:
        """Describe saves that have not begun. `ranks`: how many call `end_reading`."""
        self.blocks, self.chunks = blocks, chunks
        self.needed, self.free = Event(), Event()
        self.future: Future[list[PutResult]]
        self._ranks, self._reading, self._is_reclaimed = ranks, Lock(), False

    def watch(self, future: Future[list[PutResult]]) -> None:
        """Set the results, which will be there when the saves end."""
        self.future = future
        future.add_done_callback(lambda _: self.free.set())

    @contextmanager
    def reading(self) -> Iterator[bool]:
        """Yield whether the blocks may be read. Until the end of the `with` block, the engine does not change them."""
        with self._reading:
            yield not self._is_reclaimed

    def end_reading(self) -> None:
        """One more rank has copied all its chunks out of the blocks."""
        self._ranks -= 1
        if not self._ranks:
            self.free.set()

    def reclaim(self) -> None:
        """Give the blocks to the engine. Waits for the thread that reads them; afterwards none may."""
        if not self.future.cancel():
            with self._reading:
                self._is_reclaimed = True
        self.blocks.clear()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a save may wait for this host's node.

    A save tries again and again, and each try is short. So it can end when the engine needs the blocks.

    Attributes:
        clock: Returns the time in seconds.
        try_s: Longest time of one try.
        until_s: No try begins after this time.
        ended: Whether the save should end now.
    """

    clock: Callable[[], float]
    try_s: float
    until_s: float
    ended: Callable[[], bool]

    def deadline_s(self) -> float:
        """Return the deadline of a try that begins now."""
        return self.clock() + self.try_s

    def left_s(self, deadline_s: float) -> float:
        return max(0.0, deadline_s - self.clock())

    def ran_out(self, deadline_s: float) -> bool:
        """Whether a try with this deadline has used up its time. One that failed earlier would fail again."""
        return self.clock() >= deadline_s - EARLY_S

    def is_over(self) -> bool:
        return self.clock() >= self.until_s or self.ended()
