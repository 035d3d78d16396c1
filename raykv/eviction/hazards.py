"""Estimates the chance that chunks are read again, by their class and by the time since their last read."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

AGES: Final = 65
"""Number of age buckets. An age is a time since the last read, in ticks. There are two buckets for each doubling of the
age, so 65 buckets are enough for ages of 32 bits."""
AHEAD: Final = 8
"""Number of buckets that are in use above the bucket of the highest observed age."""
AT_ONCE: Final = 1 << 14
"""Observations are buffered. They are counted when the counts are needed, or when there are this many observations."""
LEVEL: Final = 2.0
BELIEF: Final = 4.0
"""The prior is that a class behaves like similar classes. For the rate of a whole class, the prior counts as
much as LEVEL reads. For the rate of one bucket of a class, the prior counts as much as BELIEF reads."""

_EDGES: Final = np.concatenate([[0.0], 2.0 ** (np.arange(AGES) / 2)])
_WIDTHS: Final = np.diff(_EDGES)
_MIDDLES: Final = np.sqrt(np.maximum(_EDGES[:-1], 0.5) * _EDGES[1:])


class Hazards:
    """Counts how often chunks of a class are read, by the time since their last read (their age).

    A class is a number. Each digit of the number is a feature. The feature that predicts reads best is the first digit.
    If a class has few observations, the policy assumes that it behaves like all classes with the same digits except
    the last. If these classes have few observations too, the last two digits are ignored, and so on.

    Attributes:
        seen: Sum of the weights of all reads. `fade` halves this sum.
        ages: Number of age buckets in use: all up to the highest observed age, and AHEAD more.
    """

    def __init__(self, digits: tuple[int, ...]) -> None:
        self._digits, self.classes = digits, int(np.prod(digits))
        self._reads = np.zeros((self.classes, AGES))
        # An interval is a range of ages in which a chunk was not read; see `add_unread`.
        self._ticks = np.zeros((self.classes, AGES))  # observed ticks in the first and last bucket of each interval
        # For each bucket: number of intervals that cover the whole bucket, minus the same number for the bucket before.
        self._whole = np.zeros((self.classes, AGES + 1))
        self._new_reads: list[tuple[Integers, Integers, Floats]] = []
        self._new_intervals: list[tuple[Integers, Integers, Integers, Floats]] = []
        self._new = 0
        self.seen = 0.0
        self.ages = AHEAD

    def add_reads(self, classes: Integers, ages: Integers, weights: Floats) -> None:
        self.seen += float(weights.sum())
        self._new_reads.append((classes, ages, weights))
        self._count_if_many(len(weights))

    def add_unread(self, classes: Integers, first: Integers, last: Integers, weights: Floats) -> None:
        """Record that chunks of these classes were not read from age `first` to age `last`. Ages below 0 count as 0."""
        self._new_intervals.append((classes, first, last, weights))
        self._count_if_many(len(weights))

    def _count_if_many(self, added: int) -> None:
        self._new += added
        if self._new >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        if self._new_reads:
            classes, ages, weights = map(np.concatenate, zip(*self._new_reads, strict=True))
            np.add.at(self._reads, (classes, bucket(ages)), weights)
        if self._new_intervals:
            self._count_intervals(*map(np.concatenate, zip(*self._new_intervals, strict=True)))
        self._new_reads, self._new_intervals, self._new = [], [], 0

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
        """Return the chance of a read per tick, by class and age bucket. Shape [classes, ages]."""
        self._count()
        shape, upto, middles = (*self._digits, self.ages), slice(0, self.ages), _MIDDLES[: self.ages]
        reads = self._reads[:, upto].reshape(shape)
        whole = np.cumsum(self._whole[:, upto], axis=1) * _WIDTHS[upto]
        ticks = (self._ticks[:, upto] + whole).reshape(shape)
        sums = [(reads, ticks)]  # sums over no digit, over the last digit, over the last two digits, ...
        for _ in self._digits:
            sums.append(tuple(each.sum(axis=-2) for each in sums[-1]))
        all_reads, all_ticks = sums.pop()
        # For all classes together, the prior is that the chance of a read is proportional to 1 / age.
        chance = (all_reads.sum() + 1.0) / ((all_ticks / middles).sum() + 1.0) / middles
        chance = (all_reads + BELIEF) / (all_ticks + BELIEF / chance)
        for reads_here, ticks_here in reversed(sums):
            chance = np.broadcast_to(chance[..., None, :], reads_here.shape)
            expected = (ticks_here * chance).sum(axis=-1, keepdims=True)
            chance = chance * (reads_here.sum(axis=-1, keepdims=True) + LEVEL) / (expected + LEVEL)
            chance = (reads_here + BELIEF) / (ticks_here + BELIEF / chance)
        found: Floats = chance.reshape(self.classes, self.ages)
        return found


def bucket(ages: npt.NDArray[np.integer[Any] | np.floating[Any]]) -> Integers:
    """Return the bucket of each age. Bucket 0 holds ages below one tick."""
    found: Integers = np.floor(scale(ages)).astype(np.int64)
    return found


def scale(ages: npt.NDArray[np.integer[Any] | np.floating[Any]]) -> Floats:
    exact = np.maximum(ages.astype(np.float64), 0.0)
    scaled: Floats = np.where(exact < 1, exact, np.minimum(AGES - 1e-9, 1 + 2 * np.log2(np.maximum(exact, 1))))
    return scaled


def density(chance: Floats) -> Floats:
    """Return for each age bucket the best ratio of expected hits to expected ticks in memory. Shape [n, ages + 1].

    Suppose that a chunk stays in memory until its next read, or until it reaches an age A without a read. The cost is
    the time in memory. The gain is one hit if the chunk is read in this time. The result is the ratio of gain to cost
    for the best A.

    Source: the Gittins index; also the hit density of EHC and LHD (Beckmann, Chen and Cidon, NSDI 2018).
    """
    ages = chance.shape[1]
    until = np.concatenate([np.zeros((len(chance), 1)), np.cumsum(chance * _WIDTHS[:ages], axis=1)], axis=1)
    expected = -np.expm1(-chance * _WIDTHS[:ages]) / chance  # expected ticks until a read or the bucket's end
    best = np.empty((len(chance), ages + 1))
    for first in range(ages):
        stays = np.exp(until[:, first : first + 1] - until[:, first:])
        cost = np.cumsum(stays[:, :-1] * expected[:, first:], axis=1)
        best[:, first] = ((1 - stays[:, 1:]) / cost).max(axis=1)
    best[:, ages] = best[:, ages - 1]
    return best
