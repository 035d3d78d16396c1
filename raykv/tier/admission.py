"""Which chunks are written to a tier that wears out: chunks that are read again, within a budget of bytes."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.types import Bits

DAY_S: Final = 86_400.0
BURST_S: Final = 3_600.0
"""The budget of this time may be written at once, after a time of few writes."""
MOST_DEPARTED: Final = 1 << 17
"""Departures that `add_departed` remembers."""

Numbers = npt.NDArray[np.integer[Any]]


class Admission:
    """Decides which chunks are written. A node and the planner use the same rule.

    A chunk is admitted if it was read since it was stored, or follows a chunk that was: a request that found that
    prefix is likely to come again. So is a chunk that departed (`add_departed`) and was stored again. Chunks that are
    never read again, such as a scan's, are not admitted. Hints overrule this.

    The budget grows as time passes, up to the grant of `burst_s`.
    """

    def __init__(self, budget_nbytes_per_day: float | None = None, *, burst_s: float = BURST_S, now_s: float) -> None:
        """Begin with a full budget; None is no limit. `now_s` is by any monotonic clock, the same for all calls."""
        self._per_s = None if budget_nbytes_per_day is None else budget_nbytes_per_day / DAY_S
        self._most = (self._per_s or 0.0) * burst_s
        self._left, self._filled_s = self._most, now_s
        self._departed: dict[Hashable, None] = {}

    def left_nbytes(self, *, now_s: float) -> float:
        """Bytes that may be written now; negative after `spend` of more than there was."""
        if self._per_s is None:
            return float("inf")
        self._left = min(self._most, self._left + max(0.0, now_s - self._filled_s) * self._per_s)
        self._filled_s = max(self._filled_s, now_s)
        return self._left

    def spend(self, nbytes: float, *, now_s: float) -> None:
        """Count bytes that were written without `admit`; negative for admitted bytes that were not written."""
        if self._per_s is not None:
            self._left = self.left_nbytes(now_s=now_s) - nbytes

    def admit(
        self,
        reads: Numbers,
        parent_reads: Numbers,
        nbytes: Numbers,
        *,
        now_s: float,
        priority: Numbers | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> Bits:
        """Decide which chunks to write, and take their bytes from the budget. One entry a chunk.

        With a short budget, chunks with a hint come first, then the others in order; a chunk that is too large for the
        rest of the budget does not keep smaller ones out.

        Args:
            reads: Since the chunk was stored; `parent_reads`: of the chunk before it, 0 if there is none.
            nbytes: Space that it takes in the tier.
            priority: Hints: positive to write it if the budget allows, negative not to; 0 is no hint.
            keys: To look for in the departures.
        """
        if keys is not None:
            reads = reads + np.array([key in self._departed for key in keys], np.int64)
        wanted = deserve(reads, parent_reads, priority)
        if self._per_s is None or not wanted.any():
            return wanted
        left = self.left_nbytes(now_s=now_s)
        hints = np.zeros(len(wanted), np.int64) if priority is None else priority
        for place in sorted(np.flatnonzero(wanted).tolist(), key=lambda place: -int(hints[place])):
            size = float(nbytes[place])
            wanted[place] = size <= left
            left -= size if wanted[place] else 0.0
        self._left = left
        return wanted

    def add_departed(self, keys: Iterable[Hashable]) -> None:
        """These chunks left memory, and the tier does not have them."""
        for key in keys:
            self._departed.pop(key, None)
            self._departed[key] = None
        while len(self._departed) > MOST_DEPARTED:
            del self._departed[next(iter(self._departed))]


def deserve(reads: Numbers, parent_reads: Numbers, priority: Numbers | None = None) -> Bits:
    wanted: Bits = (reads > 0) | (parent_reads > 0)
    return wanted if priority is None else np.where(priority == 0, wanted, priority > 0)
