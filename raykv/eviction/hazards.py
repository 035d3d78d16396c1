"""How likely chunks are read again, by their class and by the time since their last read."""

from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

AGES: Final = 65
"""Buckets of ages in ticks, two per doubling: enough for 32 bits."""
AHEAD: Final = 8
AT_ONCE: Final = 1 << 16
"""Observations are collected, and counted together: when they are needed, or when there are this many."""
LEVEL: Final = 2.0
BELIEF: Final = 4.0
"""Prior weights, in reads: of a class as a whole, and of one bucket of a class. With fewer reads than this a class is
taken to be like the classes next to it."""

_EDGES: Final = np.concatenate([[0.0], 2.0 ** (np.arange(AGES) / 2)])
_WIDTHS: Final = np.diff(_EDGES)
_MIDDLES: Final = np.sqrt(np.maximum(_EDGES[:-1], 0.5) * _EDGES[1:])


class Hazards:
    """How often chunks of a class are read, by the time since their last read.

    A class is a number whose digits are features, the most telling first. A class with few observations is taken to be
    like all classes that share its digits except the last; these like all that share all but the last two; and so on.

    Attributes:
        seen: Reads so far.
        ages: Buckets up to the oldest observation, and AHEAD more.
    """

    def __init__(self, digits: tuple[int, ...]) -> None:
        self._digits, self.classes = digits, int(np.prod(digits))
        self._reads = np.zeros((self.classes, AGES))
        self._ticks = np.zeros((self.classes, AGES))  # in the first and last bucket of each interval
        self._whole = np.zeros(
            (self.classes, AGES + 1)
        )  # intervals that cover a bucket, as differences to the one before
        self._new_reads, self._new_intervals = _Pending(2), _Pending(3)
        self.seen = 0.0
        self.ages = AHEAD

    def add_reads(self, classes: Integers, ages: Integers, weights: Floats) -> None:
        self._new_reads.add(weights, classes, ages)
        self.seen += float(weights.sum())
        if len(self._new_reads.weights) >= AT_ONCE:
            self._count()

    def add_unread(self, classes: Integers, first: Integers, last: Integers, weights: Floats) -> None:
        """Chunks of these classes were not read between two ages. Negative ages (clocks differ) count as 0."""
        self._new_intervals.add(weights, classes, first, last)
        if len(self._new_intervals.weights) >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        weights, classes, ages = self._new_reads.drain()
        if weights.size:
            np.add.at(self._reads, (classes, bucket(ages)), weights)
        weights, classes, first, last = self._new_intervals.drain()
        if weights.size:
            self._count_intervals(classes, first, last, weights)

    def _count_intervals(self, classes: Integers, first: Integers, last: Integers, weights: Floats) -> None:
        first, last = np.maximum(first, 0), np.maximum(last, 0)
        some = last > first
        classes, first, last, weights = classes[some], first[some], last[some], weights[some]
        if not last.size:
            return
        begin, end = bucket(first), bucket(last)
        self.ages = max(self.ages, min(AGES, int(end.max()) + 1 + AHEAD))
        same = begin == end
        np.add.at(self._ticks, (classes, begin), weights * (np.where(same, last, _EDGES[begin + 1]) - first))
        np.add.at(self._ticks, (classes, end), weights * np.where(same, 0.0, last - _EDGES[end]))
        np.add.at(self._whole, (classes, begin + 1), np.where(same, 0.0, weights))
        np.add.at(self._whole, (classes, end), np.where(same, 0.0, -weights))

    def fade(self) -> None:
        self._count()
        for counts in (self._reads, self._ticks, self._whole):
            counts /= 2
        self.seen /= 2

    def per_tick(self) -> Floats:
        """The chance of a read per tick, for each class and bucket up to `ages`: shape [classes, ages]."""
        self._count()
        shape, upto, middles = (*self._digits, self.ages), slice(0, self.ages), _MIDDLES[: self.ages]
        reads = self._reads[:, upto].reshape(shape)
        whole = np.cumsum(self._whole[:, upto], axis=1) * _WIDTHS[upto]
        ticks = (self._ticks[:, upto] + whole).reshape(shape)
        sums = [(reads, ticks)]  # over ever more of the last digits
        for _ in self._digits:
            sums.append(tuple(each.sum(axis=-2) for each in sums[-1]))
        all_reads, all_ticks = sums.pop()
        # The prior: the longer ago the last read, the less likely the next, in the same way at all scales.
        chance = (all_reads.sum() + 1.0) / ((all_ticks / middles).sum() + 1.0) / middles
        chance = (all_reads + BELIEF) / (all_ticks + BELIEF / chance)
        for reads_here, ticks_here in reversed(sums):
            chance = np.broadcast_to(chance[..., None, :], reads_here.shape)
            expected = (ticks_here * chance).sum(axis=-1, keepdims=True)
            chance = chance * (reads_here.sum(axis=-1, keepdims=True) + LEVEL) / (expected + LEVEL)
            chance = (reads_here + BELIEF) / (ticks_here + BELIEF / chance)
        found: Floats = chance.reshape(self.classes, self.ages)
        return found


class _Pending:
    """Observations that are not counted yet: a weight and some integers each."""

    def __init__(self, numbers: int) -> None:
        self.weights = array("d")
        self._numbers = tuple(array("q") for _ in range(numbers))

    def add(self, weights: Floats, *numbers: npt.NDArray[np.integer[Any]]) -> None:
        self.weights.frombytes(weights.tobytes())
        for held, values in zip(self._numbers, numbers, strict=True):
            held.frombytes(values.astype(np.int64).tobytes())

    def drain(self) -> tuple[npt.NDArray[Any], ...]:
        drained = np.frombuffer(self.weights, np.float64), *(np.frombuffer(held, np.int64) for held in self._numbers)
        self.weights, self._numbers = array("d"), tuple(array("q") for _ in self._numbers)
        return drained


def bucket(ages: npt.NDArray[np.integer[Any] | np.floating[Any]]) -> Integers:
    """The bucket of each age. The first holds ages below one tick."""
    found: Integers = np.floor(scale(ages)).astype(np.int64)
    return found


def scale(ages: npt.NDArray[np.integer[Any] | np.floating[Any]]) -> Floats:
    exact = np.maximum(ages.astype(np.float64), 0.0)
    scaled: Floats = np.where(exact < 1, exact, np.minimum(AGES - 1e-9, 1 + 2 * np.log2(np.maximum(exact, 1))))
    return scaled


def density(chance: Floats) -> Floats:
    """The best ratio of expected hits to expected ticks of a chunk, by the bucket that it enters: shape [n, ages + 1].

    To keep a chunk up to some age costs the time until its next read or until that age, whichever is earlier. It gains
    one hit if the chunk is read. The result is the best ratio over all such ages.

    Source: the Gittins index; also the hit density of EHC and LHD (Beckmann, Chen and Cidon, NSDI 2018).
    """
    ages = chance.shape[1]
    until = np.concatenate([np.zeros((len(chance), 1)), np.cumsum(chance * _WIDTHS[:ages], axis=1)], axis=1)
    expected = -np.expm1(-chance * _WIDTHS[:ages]) / chance  # ticks in a bucket, from its beginning
    best = np.empty((len(chance), ages + 1))
    for first in range(ages):
        stays = np.exp(until[:, first : first + 1] - until[:, first:])
        cost = np.cumsum(stays[:, :-1] * expected[:, first:], axis=1)
        best[:, first] = ((1 - stays[:, 1:]) / cost).max(axis=1)
    best[:, ages] = best[:, ages - 1]
    return best
