"""What is known of how likely chunks are read again, and when."""

from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

AGES: Final = 65
"""Buckets of ages, two for each doubling, in ticks: all that 32 bits can tell."""
AHEAD: Final = 8
AT_ONCE: Final = 1 << 16
"""What was seen is kept until it is asked for or so much, and counted then, all at once."""
LEVEL: Final = 2.0
BELIEF: Final = 4.0
"""So many reads must be seen in a class before these count more than what is known of its like: all of its reads for
how often it is read at all, those in one bucket for how often at that age."""

_EDGES: Final = np.concatenate([[0.0], 2.0 ** (np.arange(AGES) / 2)])
_WIDTHS: Final = np.diff(_EDGES)
_MIDDLES: Final = np.sqrt(np.maximum(_EDGES[:-1], 0.5) * _EDGES[1:])


class Hazards:
    """How often chunks of a class are read, by the time since they were last read.

    Classes are numbers whose digits are features, the most telling first. A class of which little was seen is taken to
    be like those that share all its digits but the last, these like those that share all but two, and so on.

    Attributes:
        seen: Reads so far.
        ages: Buckets up to the oldest that was seen, and AHEAD more.
    """

    def __init__(self, digits: tuple[int, ...]) -> None:
        self._digits, self.classes = digits, int(np.prod(digits))
        self._reads = np.zeros((self.classes, AGES))
        self._ticks = np.zeros((self.classes, AGES))  # in the first and last bucket of each stay
        self._whole = np.zeros((self.classes, AGES + 1))  # stays through a bucket, as differences to the one before
        self._new_reads, self._new_stays = _Seen(2), _Seen(3)
        self.seen = 0.0
        self.ages = AHEAD

    def read(self, classes: Integers, ages: Integers, weights: Floats) -> None:
        """Chunks of these classes and ages were read."""
        self._new_reads.add(weights, classes, ages)
        self.seen += float(weights.sum())
        if len(self._new_reads.weights) >= AT_ONCE:
            self._add()

    def read_one(self, number: int, age: int, weight: float) -> None:
        """The same of one chunk, of the class of that number."""
        self._new_reads.add_one(weight, number, age)
        self.seen += weight
        if len(self._new_reads.weights) >= AT_ONCE:
            self._add()

    def stay(self, classes: Integers, first: Integers, last: Integers, weights: Floats) -> None:
        """Chunks of these classes went unread from one age to another. Ages below 0, of clocks that differ, are 0."""
        self._new_stays.add(weights, classes, first, last)
        if len(self._new_stays.weights) >= AT_ONCE:
            self._add()

    def stay_one(self, number: int, first: int, last: int, weight: float) -> None:
        """The same of one chunk."""
        self._new_stays.add_one(weight, number, first, last)
        if len(self._new_stays.weights) >= AT_ONCE:
            self._add()

    def _add(self) -> None:
        """Count what is new; many at once take little longer than one."""
        weights, classes, ages = self._new_reads.take()
        if weights.size:
            np.add.at(self._reads, (classes, bucket(ages)), weights)
        weights, classes, first, last = self._new_stays.take()
        if weights.size:
            self._add_stays(classes, first, last, weights)

    def _add_stays(self, classes: Integers, first: Integers, last: Integers, weights: Floats) -> None:
        first, last = np.maximum(first, 0), np.maximum(last, 0)
        some = last > first
        if not some.all():
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
        """Let all that was seen count half from now on."""
        self._add()
        for seen in (self._reads, self._ticks, self._whole):
            seen /= 2
        self.seen /= 2

    def per_tick(self) -> Floats:
        """Chance of a read per tick, of each class and bucket up to `ages`: shape [classes, ages]."""
        self._add()
        shape, upto, middles = (*self._digits, self.ages), slice(0, self.ages), _MIDDLES[: self.ages]
        reads = self._reads[:, upto].reshape(shape)
        whole = np.cumsum(self._whole[:, upto], axis=1) * _WIDTHS[upto]
        ticks = (self._ticks[:, upto] + whole).reshape(shape)
        sums = [(reads, ticks)]  # over ever more of the last digits
        for _ in self._digits:
            sums.append(tuple(each.sum(axis=-2) for each in sums[-1]))
        all_reads, all_ticks = sums.pop()
        # Before anything is known: the longer ago, the less likely, at all scales alike.
        chance = (all_reads.sum() + 1.0) / ((all_ticks / middles).sum() + 1.0) / middles
        chance = (all_reads + BELIEF) / (all_ticks + BELIEF / chance)
        for reads_here, ticks_here in reversed(sums):
            chance = np.broadcast_to(chance[..., None, :], reads_here.shape)
            expected = (ticks_here * chance).sum(axis=-1, keepdims=True)
            chance = chance * (reads_here.sum(axis=-1, keepdims=True) + LEVEL) / (expected + LEVEL)
            chance = (reads_here + BELIEF) / (ticks_here + BELIEF / chance)
        found: Floats = chance.reshape(self.classes, self.ages)
        return found


class _Seen:
    """What was seen: a weight and some whole numbers each time."""

    def __init__(self, numbers: int) -> None:
        self.weights = array("d")
        self._numbers = tuple(array("q") for _ in range(numbers))

    def add(self, weights: Floats, *numbers: npt.NDArray[np.integer[Any]]) -> None:
        self.weights.frombytes(weights.tobytes())
        for seen, values in zip(self._numbers, numbers, strict=True):
            seen.frombytes(values.astype(np.int64).tobytes())

    def add_one(self, weight: float, *numbers: int) -> None:
        self.weights.append(weight)
        for seen, number in zip(self._numbers, numbers, strict=True):
            seen.append(number)

    def take(self) -> tuple[npt.NDArray[Any], ...]:
        """All of it, weights first; it is forgotten."""
        taken = np.frombuffer(self.weights, np.float64), *(np.frombuffer(seen, np.int64) for seen in self._numbers)
        self.weights, self._numbers = array("d"), tuple(array("q") for _ in self._numbers)
        return taken


def bucket(ages: npt.NDArray[np.integer[Any] | np.floating[Any]]) -> Integers:
    """Bucket of each age: the first is less than a tick."""
    found: Integers = np.floor(scale(ages)).astype(np.int64)
    return found


def scale(ages: npt.NDArray[np.integer[Any] | np.floating[Any]]) -> Floats:
    """Ages on the scale of the buckets."""
    exact = np.maximum(ages.astype(np.float64), 0.0)
    scaled: Floats = np.where(exact < 1, exact, np.minimum(AGES - 1e-9, 1 + 2 * np.log2(np.maximum(exact, 1))))
    return scaled


def scale_one(age: int) -> float:
    """The same for one age, to the last digit."""
    return float(age) if age < 1 else min(AGES - 1e-9, 1 + 2 * float(np.log2(age)))


def density(chance: Floats) -> Floats:
    """The best hits per tick that a chunk promises, by the bucket whose beginning it has reached: shape [n, ages + 1].

    To keep it up to some age costs the time until then or until it is read, whichever comes first, and gains a hit if
    it is read. Of all such ages, the best one counts.

    Source: the Gittins index; as in EHC's and LHD's hit density (Beckmann, Chen and Cidon, NSDI 2018).
    """
    ages = chance.shape[1]
    until = np.concatenate([np.zeros((len(chance), 1)), np.cumsum(chance * _WIDTHS[:ages], axis=1)], axis=1)
    spent = -np.expm1(-chance * _WIDTHS[:ages]) / chance  # expected ticks in a bucket from its beginning
    best = np.empty((len(chance), ages + 1))
    for first in range(ages):
        stays = np.exp(until[:, first : first + 1] - until[:, first:])
        cost = np.cumsum(stays[:, :-1] * spent[:, first:], axis=1)
        best[:, first] = ((1 - stays[:, 1:]) / cost).max(axis=1)
    best[:, ages] = best[:, ages - 1]
    return best
