"""What deserves to be written to a tier that wears out: what was read again or will be, within a budget of bytes."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.types import Bits

DAY_S: Final = 86_400.0
BURST_S: Final = 3_600.0
"""What the budget grants in this time may be written at once, if little was written before."""

GONE_MOST: Final = 1 << 17
"""Keys of chunks that went, of which so many are remembered, the last ones."""

Numbers = npt.NDArray[np.integer[Any]]


class Admission:
    """Decides which chunks are written. The live tier and the planner ask the same one.

    A chunk deserves it that was read since it was stored, or hangs on one that was: a request found that prefix and
    went on from there, so the next one is likely to. So does one that went (`note_gone`) and was stored again. What
    nobody came back to, a scan, stays out. A hint outweighs all that.

    Of those that deserve it, as many are written as the budget has bytes for: it fills up as time passes, and holds
    what it is granted in `burst_s`.
    """

    def __init__(self, budget_nbytes_per_day: float | None = None, *, burst_s: float = BURST_S, now_s: float) -> None:
        """Begin with a full budget.

        Args:
            budget_nbytes_per_day: None is no limit.
            burst_s: See the class.
            now_s: By any clock that never goes back; all calls use the same one.
        """
        self._per_s = None if budget_nbytes_per_day is None else budget_nbytes_per_day / DAY_S
        self._most = (self._per_s or 0.0) * burst_s
        self._left, self._filled_s = self._most, now_s
        self._gone: dict[Hashable, None] = {}

    def left_nbytes(self, *, now_s: float) -> float:
        """Bytes that may be written now; below 0 after `spend` took more than there was."""
        if self._per_s is None:
            return float("inf")
        self._left = min(self._most, self._left + max(0.0, now_s - self._filled_s) * self._per_s)
        self._filled_s = max(self._filled_s, now_s)
        return self._left

    def spend(self, nbytes: float, *, now_s: float) -> None:
        """Note bytes that were written without being asked for, such as chunks moved when a segment is reclaimed."""
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
        """Which chunks to write, and take their bytes from the budget.

        Args:
            reads: Of each chunk since it was stored.
            parent_reads: Of the chunk that each hangs on; 0 if there is none.
            nbytes: What each takes up where it is written.
            priority: Hints: above 0 for what is to be written in any case that the budget allows, below 0 for what is
                not to be written; 0 is no hint. None: no hints.
            keys: Of the chunks, as told to `note_gone`. None: whether they were here before is not looked at.

        Returns:
            A bit for each. Where the budget runs short, those with a hint go first, then the others in order; a chunk
            for which too little is left does not keep smaller ones behind it out.
        """
        if keys is not None:
            reads = reads + np.array([key in self._gone for key in keys], np.int64)
        wanted = deserve(reads, parent_reads, priority)
        if self._per_s is None or not wanted.any():
            return wanted
        left = self.left_nbytes(now_s=now_s)
        if float(nbytes[wanted].sum()) <= left:
            self._left = left - float(nbytes[wanted].sum())
            return wanted
        hinted = np.zeros(len(wanted), np.int64) if priority is None else priority
        for place in sorted(np.flatnonzero(wanted).tolist(), key=lambda place: -int(hinted[place])):
            size = float(nbytes[place])
            wanted[place] = size <= left
            left -= size if wanted[place] else 0.0
        self._left = left
        return wanted

    def note_gone(self, keys: Iterable[Hashable]) -> None:
        """These chunks left memory, and the tier has not got them. Whoever stores one again asked for it twice."""
        for key in keys:
            self._gone.pop(key, None)
            self._gone[key] = None
        while len(self._gone) > GONE_MOST:
            del self._gone[next(iter(self._gone))]


def deserve(reads: Numbers, parent_reads: Numbers, priority: Numbers | None = None) -> Bits:
    """The rule alone, without the budget; arguments as for `Admission.admit`."""
    wanted: Bits = (reads > 0) | (parent_reads > 0)
    return wanted if priority is None else np.where(priority == 0, wanted, priority > 0)
