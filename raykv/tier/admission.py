"""Decides which chunks are written to a tier that wears out: chunks likely to be read again, within a byte budget."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.types import Bits

DAY_S: Final = 86_400.0
BURST_S: Final = 3_600.0
"""Unused budget is saved, up to the budget of this many seconds. This also limits how much is written at once."""

Numbers = npt.NDArray[np.integer[Any]]


class Admission:
    """Decides which chunks are written. A node and the planner use the same rule.

    A chunk is admitted if it was read since it was stored, or if its parent (the chunk before it in its chain) was
    read: the same prefix is likely to be requested again. Callers add one read for a chunk that was evicted and then
    stored again. Chunks of a scan, which nobody reads again, are not admitted. Hints override these rules.

    The budget is a token bucket: it fills with time, and holds at most the budget of `burst_s` seconds.
    """

    def __init__(self, budget_nbytes_per_day: float | None = None, *, burst_s: float = BURST_S, now_s: float) -> None:
        """Begin with a full bucket. A budget of None means no limit. `now_s` always comes from one monotonic clock."""
        self._per_s = None if budget_nbytes_per_day is None else budget_nbytes_per_day / DAY_S
        self._most = (self._per_s or 0.0) * burst_s
        self._left, self._filled_s = self._most, now_s

    def left_nbytes(self, *, now_s: float) -> float:
        """Bytes that may be written now; negative if `spend` took more than was left; infinite without a limit."""
        if self._per_s is None:
            return float("inf")
        self._left = min(self._most, self._left + max(0.0, now_s - self._filled_s) * self._per_s)
        self._filled_s = max(self._filled_s, now_s)
        return self._left

    def spend(self, nbytes: float, *, now_s: float) -> None:
        """Subtract bytes from the budget without asking `admit`. A negative number gives bytes back to the budget."""
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
    ) -> Bits:
        """Decide which chunks to write, and take their bytes from the budget. Each array has one entry per chunk.

        If the budget is short, chunks with a higher `priority` come first, and chunks of equal priority in the given
        order. A chunk that is too large for the remaining budget is skipped; smaller chunks after it may still fit.

        Args:
            reads: Reads of the chunk since it was stored.
            parent_reads: Reads of the chunk before it in its chain; 0 if there is none.
            nbytes: Space that the chunk takes in the tier.
            priority: Positive: write if the budget allows, even without reads. Negative: do not write. 0: no hint.
        """
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


def deserve(reads: Numbers, parent_reads: Numbers, priority: Numbers | None = None) -> Bits:
    wanted: Bits = (reads > 0) | (parent_reads > 0)
    return wanted if priority is None else np.where(priority == 0, wanted, priority > 0)
