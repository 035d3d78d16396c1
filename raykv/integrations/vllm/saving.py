"""A save in flight, and how long it waits for the node."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import Final

from raykv.types import PutResult

EARLY_S: Final = 0.002
"""A call that waits for the node may end this long before its deadline."""


@dataclass(frozen=True, slots=True)
class Saving:
    """The saves of one step, in flight.

    Attributes:
        blocks: Blocks that the saves read.
        chunks: Number of chunks, for all ranks.
        needed: Set when a step needs the blocks, or those of a later save. Then the saves wait no longer for slots.
        future: The results.
    """

    blocks: set[int]
    chunks: int
    needed: Event
    future: Future[list[PutResult]]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a save may wait for the node.

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
