"""Admission: decides which chunks are worth writing to a tier. A byte budget protects SSDs from wear."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.types import Bits

DAY_S: Final = 86_400.0
BURST_S: Final = 3_600.0
"""Default of `burst_s`: unused budget accumulates for at most this many seconds. This limits bursts of writes."""

Numbers = npt.NDArray[np.integer[Any]]


class Admission:
    """Decides which chunks are written. A node and the planner use the same rule.

    A chunk is admitted if it was read since it was stored. It is also admitted if its parent, the preceding chunk of
    the prompt, was read: then the same prefix is likely to be requested again. Chunks of a scan are not admitted,
    because nobody reads them again. A `priority` overrides these rules.

    The budget is a token bucket: it fills at a constant rate, and holds at most what `burst_s` seconds add.
    """

    def __init__(self, budget_nbytes_per_day: float | None = None, *, burst_s: float = BURST_S, now_s: float) -> None:
        """Begin with a full bucket. Without a budget there is no limit.

        `now_s` is the monotonic time in seconds, here and in all methods.
        """
        self._per_s = None if budget_nbytes_per_day is None else budget_nbytes_per_day / DAY_S
        self._most = (self._per_s or 0.0) * burst_s
        self._left, self._filled_s = self._most, now_s

    def left_nbytes(self, *, now_s: float) -> float:
        """Return how many bytes may be written now: infinite without a limit, negative after `spend` took too many."""
        if self._per_s is None:
            return float("inf")
        self._left = min(self._most, self._left + max(0.0, now_s - self._filled_s) * self._per_s)
        self._filled_s = max(self._filled_s, now_s)
        return self._left

    def spend(self, nbytes: float, *, now_s: float) -> None:
        """Take bytes from the budget, without asking `admit`. A negative number gives bytes back."""
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
        """Return which chunks to write, and take their bytes from the budget. Each array has one entry per chunk.

        If the budget is short, chunks of higher `priority` are chosen first. Chunks of equal priority are chosen in the
        given order. A chunk that is too large for the rest of the budget is skipped. Smaller chunks after it may still
        fit.

        Args:
            reads: Number of reads of the chunk since it was stored. A chunk that was evicted before and then stored
                again has one more, because it was requested again.
            parent_reads: Number of reads of the chunk's parent; 0 without a parent.
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
