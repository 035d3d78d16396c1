"""Hit density: the chunk that promises the fewest hits for the room and time that it takes up goes first."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy, key_numbers
from raykv.eviction.ghosts import by_row
from raykv.eviction.hazards import AGES, Floats, Hazards, Integers, density, scale, scale_one
from raykv.memory.table import Cells, Columns
from raykv.types import Rows

FEATURES: Final = {"short": 2, "often": 4, "turn": 3, "output": 6, "together": 5, "deep": 4}
"""What tells a kind, and how many values each has; the most telling first."""
LEVEL_OF: Final[dict[str, Callable[[int], int]]] = {
    "short": int,
    "often": int.bit_length,
    "turn": int,
    "together": lambda chunks: chunks.bit_length() - 1 if chunks else 0,
    "deep": lambda depth: (depth + 1).bit_length() // 2,
}
"""How what is counted becomes one of the values; LEVELS - 1 and more are alike."""
LEVELS: Final = 64
GHOSTS_SHARE: Final = 8
GHOSTS_MOST: Final = 1 << 18
"""Evicted chunks that are remembered: so many for each that is here, and in all; LOOK_LEAST more are forgotten late."""
GHOSTS_LOOK_SHARE: Final = 4
"""What ghosts teach by not coming back is noted when this part of them (one in so many) is new."""
LOOK_SHARE: Final = 32
LOOK_LEAST: Final = 256
"""Rows that are looked at for reads, for each chunk that comes; and so many at once."""
LEARN_SHARE: Final = 25
LEARN_LEAST: Final = 20
"""What was learnt is put to use when there is so much of it: one part in so many of all, but no less than this."""
MEMORY_SHARE: Final = 8
MEMORY_LEAST: Final = 1000.0
"""When one read was seen for so many chunks that are here, but no fewer than this, what was seen begins to count less:
traffic changes."""
CAME_SHARE: Final = 10
"""A chunk that comes teaches less than one that is read: one part in so many."""


_Ghost = tuple[int, int, int, int, float]
"""Of an evicted chunk: its last read, the time of the last look at it, its kind, its reads, and what it counts."""


@dataclass(frozen=True, slots=True)
class _Mine:
    """What the policy remembers by row, for one entry at a time: see `HitDensity.__init__`."""

    here: "memoryview[int]"
    kind: "memoryview[int]"
    turns: "memoryview[int]"
    places: "memoryview[int]"
    before: "memoryview[int]"
    weight: "memoryview[float]"
    read: "memoryview[int]"
    reads: "memoryview[int]"
    looked: "memoryview[int]"


class HitDensity(Policy):
    """Learns how likely each kind of chunk is read again, and when, and keeps those whose hits cost least.

    A kind is told by: whether the chunk is shorter than the one before it (the end of a prompt, which comes again only
    if all of the prompt does); how many tokens its last request made, if somebody says so; how often it was read; in
    which turn of its chain it came; with how many others; and how deep it stands. None of this is known beforehand to
    be good or bad. Evicted chunks teach too, for a while: those that come back, and those that don't.

    A chunk counts as the part that it is of those that came with it, since they are read together.
    """

    leaf_first = True
    drifts = True

    def __init__(self) -> None:
        sizes = tuple(FEATURES.values())
        self._hazards = Hazards(sizes)
        self._unit = {name: int(np.prod(sizes[place + 1 :])) for place, name in enumerate(FEATURES)}
        self._digits = {
            name: np.array([min(level(value), FEATURES[name] - 1) * self._unit[name] for value in range(LEVELS)])
            for name, level in LEVEL_OF.items()
        }
        self._digit_of: dict[str, list[int]] = {name: digits.tolist() for name, digits in self._digits.items()}
        self._known = np.zeros(self._hazards.classes, np.bool_)
        self._index = np.zeros((self._hazards.classes, AGES + 1))
        self._learnt = 0.0
        # By row: whether it holds a chunk, its kind but for its reads, its turn and place in that, reads before it came
        # back, what it counts; and its last read, its reads, and the time, when it was last looked at.
        self._here = np.zeros(0, np.bool_)
        self._kind = np.zeros(0, np.int32)
        self._turns = np.zeros(0, np.int32)
        self._places = np.zeros(0, np.int32)
        self._before = np.zeros(0, np.uint32)
        self._weight = np.zeros(0, np.float64)
        self._read = np.zeros(0, np.uint32)
        self._reads = np.zeros(0, np.uint32)
        self._looked = np.zeros(0, np.uint32)
        self._held = self._rows = self._hand = self._due = self._largest = self._new_ghosts = 0
        self._ghosts: dict[int, _Ghost] = {}
        self._columns: Columns | None = None
        self._use()

    def score(self, columns: Columns, rows: Rows, now: int) -> Floats:
        self._cover(columns)
        kinds = self._kinds(rows, columns.frequency[rows])
        ages = scale(np.maximum(0, now - columns.accessed[rows].astype(np.int64)))
        whole = ages.astype(np.int64)
        below, above = self._index[kinds, whole], self._index[kinds, whole + 1]
        scores: Floats = below + (above - below) * (ages - whole)
        return scores

    def score_one(self, columns: Columns, row: int, now: int) -> float:
        cells, mine = self._cover(columns)
        kind = mine.kind[row] + self._digit_of["often"][min(cells.frequency[row] + mine.before[row], LEVELS - 1)]
        age = scale_one(max(0, now - cells.accessed[row]))
        whole = int(age)
        below, above = self._index[kind, whole : whole + 2].tolist()
        score: float = below + (above - below) * (age - whole)
        return score

    def came(self, columns: Columns, rows: Rows, now: int) -> None:
        if not rows.size:
            return
        self._cover(columns)
        if len(rows) == 1:
            self._came_one(columns, int(rows[0]), now)
        else:
            self._came_many(columns, rows, now)
        self._look_around(columns, len(rows), now)
        self._learnt += len(rows) / CAME_SHARE
        if self._learnt >= max(LEARN_LEAST, self._hazards.seen / LEARN_SHARE):
            self._use()

    def _came_many(self, columns: Columns, rows: Rows, now: int) -> None:
        self._held += len(rows)
        self._rows = max(self._rows, int(rows.max()) + 1)
        self._here[rows] = True
        self._read[rows] = self._looked[rows] = columns.accessed[rows]
        self._reads[rows] = columns.frequency[rows]
        self._before[rows] = 0
        self._describe(columns, rows)
        self._welcome(columns, rows, now)
        self._known[self._kinds(rows, self._reads[rows])] = True

    def _came_one(self, columns: Columns, row: int, now: int) -> None:
        """The same for one, in a fraction of the time: numbers, no arrays."""
        cells, mine = self._cover(columns)
        parent, nbytes, reads = cells.parent[row], cells.nbytes[row], cells.frequency[row]
        self._held += 1
        self._rows = max(self._rows, row + 1)
        mine.here[row] = True
        mine.read[row] = mine.looked[row] = cells.accessed[row]
        mine.reads[row], mine.before[row] = reads, 0
        if parent < 0:
            turn = place = 0
        elif cells.frequency[parent] or mine.before[parent]:
            turn, place = mine.turns[parent] + 1, 0
        else:
            turn, place = mine.turns[parent], mine.places[parent] + 1
        mine.turns[row], mine.places[row] = turn, place
        self._largest = max(self._largest, nbytes)
        usual = cells.nbytes[parent] if parent >= 0 else self._largest
        mine.weight[row] = 1.0 / (place + 1)
        digits = self._digit_of
        mine.kind[row] = kind = (
            digits["short"][nbytes < usual]
            + digits["turn"][min(turn, LEVELS - 1)]
            + digits["together"][min(place + 1, LEVELS - 1)]
            + digits["deep"][min(cells.depth[row], LEVELS - 1)]
        )
        if cells.key_lo[row] in self._ghosts:
            self._welcome(columns, np.array([row], np.int32), now)
        self._known[kind + self._digit_of["often"][min(reads + mine.before[row], LEVELS - 1)]] = True

    def told(self, columns: Columns, rows: Rows, output_tokens: int, now: int) -> None:
        self._cover(columns)
        self._look(columns, rows, now)
        values, unit = FEATURES["output"], self._unit["output"]
        level = min(values - 1, 1 + max(0, output_tokens.bit_length() - 2) // 2)
        self._kind[rows] += (level - self._kind[rows] // unit % values) * unit
        self._known[self._kinds(rows, self._reads[rows])] = True

    def went(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:
        self._cover(columns)
        if len(rows) == 1:
            self._went_one(columns, int(rows[0]), now, evicted=evicted)
        else:
            self._went_many(columns, rows, now, evicted=evicted)
        self._held -= len(rows)

    def _went_many(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:
        self._look(columns, rows, now)
        self._here[rows] = False
        if evicted:
            kinds, reads = self._kinds(rows, self._reads[rows]), self._reads[rows] + self._before[rows]
            ghosts = zip(
                self._read[rows].tolist(), kinds.tolist(), reads.tolist(), self._weight[rows].tolist(), strict=True
            )
            for key, (read, kind, often, weight) in zip(key_numbers(columns, rows), ghosts, strict=True):
                self._ghosts.pop(key, None)
                self._ghosts[key] = (read, now, kind, often, weight)
            self._forget(len(rows), now)

    def _went_one(self, columns: Columns, row: int, now: int, *, evicted: bool) -> None:
        cells, mine = self._cover(columns)
        self._look_one(cells, mine, row, now)
        mine.here[row] = False
        if evicted:
            key, reads = cells.key_lo[row], mine.reads[row] + mine.before[row]
            kind = mine.kind[row] + self._digit_of["often"][min(reads, LEVELS - 1)]
            self._ghosts.pop(key, None)
            self._ghosts[key] = (mine.read[row], now, kind, reads, mine.weight[row])
            self._forget(1, now)

    # -- kinds -------------------------------------------------------------------------------------------------------

    def _kinds(self, rows: Rows, reads: npt.NDArray[np.uint32]) -> Integers:
        """Kinds of rows that were read so often."""
        return self._kind[rows] + self._digit("often", reads + self._before[rows])

    def _describe(self, columns: Columns, rows: Rows) -> None:
        """Find the kinds of new rows from their place in their chains."""
        parents = columns.parent[rows]
        together = self._place(columns, rows.tolist(), parents.tolist())
        nbytes = columns.nbytes[rows]
        self._largest = max(self._largest, int(nbytes.max()))
        usual = np.where(parents >= 0, columns.nbytes[parents], self._largest)
        self._weight[rows] = 1.0 / together
        self._kind[rows] = (
            self._digit("short", (nbytes < usual).astype(np.int8))
            + self._digit("turn", self._turns[rows])
            + self._digit("together", together)
            + self._digit("deep", columns.depth[rows])
        )

    def _digit(self, feature: str, values: npt.NDArray[np.integer[Any]]) -> Integers:
        digits: Integers = self._digits[feature][np.minimum(values, LEVELS - 1)]
        return digits

    def _place(self, columns: Columns, rows: list[int], parents: list[int]) -> Integers:
        """Find the turns of new rows, and their places within these. Returns how many came with each.

        A turn begins where something hangs on a chunk that was read since it came: a request found it, and went on.
        """
        turns, places, new = self._turns, self._places, dict.fromkeys(rows, 0)
        for row, parent in zip(rows, parents, strict=True):
            if parent < 0:
                turns[row] = places[row] = 0
            elif parent in new or not (columns.frequency[parent] or self._before[parent]):
                turns[row], places[row] = turns[parent], places[parent] + 1
            else:
                turns[row], places[row] = turns[parent] + 1, 0
        for row, parent in zip(reversed(rows), reversed(parents), strict=True):
            new[row] = max(new[row], int(places[row]) + 1)
            if parent in new and places[row]:
                new[parent] = max(new[parent], new[row])
        return np.array(list(new.values()), np.int64)

    # -- learning ----------------------------------------------------------------------------------------------------

    def _look_around(self, columns: Columns, came: int, now: int) -> None:
        """Look at some rows, all of them in turn."""
        self._due += came * LOOK_SHARE
        if self._due < min(LOOK_LEAST, self._rows):
            return
        rows = (self._hand + np.arange(min(self._due, self._rows))) % self._rows
        self._hand, self._due = int(rows[-1]) + 1, 0
        self._look(columns, rows[self._here[rows]].astype(np.int32), now)

    def _look(self, columns: Columns, rows: Rows, now: int) -> None:
        """Learn from what happened to these rows since they were last looked at."""
        accessed, frequency = columns.accessed[rows].astype(np.int64), columns.frequency[rows]
        read, reads, weight = self._read[rows].astype(np.int64), self._reads[rows], self._weight[rows]
        kinds, hit = self._kinds(rows, reads), frequency > reads
        self._hazards.stay(kinds, self._looked[rows] - read, np.where(hit, accessed, now) - read, weight)
        self._looked[rows] = now
        if not hit.any():
            return
        rows, accessed, weight = rows[hit], accessed[hit], weight[hit]
        self._hazards.read(kinds[hit], accessed - read[hit], weight)
        self._read[rows], self._reads[rows] = accessed, frequency[hit]
        kinds = self._kinds(rows, self._reads[rows])
        self._known[kinds] = True
        self._hazards.stay(kinds, np.zeros_like(accessed), now - accessed, weight)
        self._learnt += float(weight.sum())

    def _look_one(self, cells: Cells, mine: "_Mine", row: int, now: int) -> None:
        """The same of one row, without arrays."""
        accessed, frequency, before = cells.accessed[row], cells.frequency[row], mine.before[row]
        read, reads, weight = mine.read[row], mine.reads[row], mine.weight[row]
        often, kind = self._digit_of["often"], mine.kind[row]
        hit = frequency > reads
        was = kind + often[min(reads + before, LEVELS - 1)]
        self._hazards.stay_one(was, mine.looked[row] - read, (accessed if hit else now) - read, weight)
        mine.looked[row] = now
        if not hit:
            return
        self._hazards.read_one(was, accessed - read, weight)
        mine.read[row], mine.reads[row] = accessed, frequency
        kind += often[min(frequency + before, LEVELS - 1)]
        self._known[kind] = True
        self._hazards.stay_one(kind, 0, now - accessed, weight)
        self._learnt += weight

    def _welcome(self, columns: Columns, rows: Rows, now: int) -> None:
        """Learn from chunks that come back, and remember how often these were read."""
        keys = zip(rows.tolist(), key_numbers(columns, rows), strict=True)
        back = [(row, self._ghosts.pop(key)) for row, key in keys if key in self._ghosts]
        if back:
            self._note_unread((ghost for _, ghost in back), now)
            read, _, kinds, reads, weights = _columns_of(ghost for _, ghost in back)
            self._hazards.read(kinds, now - read, weights)
            self._before[[row for row, _ in back]] = reads + 1

    def _forget(self, new: int, now: int) -> None:
        """Keep the number of ghosts within bounds, and learn from those that stay away."""
        limit = min(GHOSTS_MOST, GHOSTS_SHARE * (self.capacity or self._held))
        if len(self._ghosts) > limit + LOOK_LEAST:
            oldest = list(islice(self._ghosts, len(self._ghosts) - limit))
            self._note_unread((self._ghosts.pop(key) for key in oldest), now)
        self._new_ghosts += new
        if self._new_ghosts * GHOSTS_LOOK_SHARE >= len(self._ghosts) + LOOK_LEAST:
            self._new_ghosts = 0
            self._note_unread(self._ghosts.values(), now)
            for key, (read, _, kind, reads, weight) in self._ghosts.items():
                self._ghosts[key] = (read, now, kind, reads, weight)

    def _note_unread(self, ghosts: Iterable[_Ghost], now: int) -> None:
        read, looked, kinds, _, weights = _columns_of(ghosts)
        self._hazards.stay(kinds, looked - read, now - read, weights)

    def _use(self) -> None:
        """Put what was learnt to use."""
        self._learnt = 0.0
        if self._hazards.seen > max(MEMORY_LEAST, self._held / MEMORY_SHARE):
            self._hazards.fade()
        known = np.flatnonzero(self._known)
        found = np.log(density(self._hazards.per_tick()[known]))
        places = np.minimum(np.arange(AGES + 1), found.shape[1] - 1)
        self._index[known] = found[:, places]

    def _cover(self, columns: Columns) -> "tuple[Cells, _Mine]":
        """Have an entry for every row. Returns the columns' entries, and those of what is remembered beside them."""
        if columns is not self._columns:
            self._columns, self._cells, count = columns, Cells(columns), len(columns.frequency)
            self._here, self._kind = by_row(self._here, count), by_row(self._kind, count)
            self._turns, self._places = by_row(self._turns, count), by_row(self._places, count)
            self._before, self._weight = by_row(self._before, count), by_row(self._weight, count)
            self._read, self._reads = by_row(self._read, count), by_row(self._reads, count)
            self._looked = by_row(self._looked, count)
            self._mine = _Mine(
                self._here.data,
                self._kind.data,
                self._turns.data,
                self._places.data,
                self._before.data,
                cast("memoryview[float]", self._weight.data),
                self._read.data,
                self._reads.data,
                self._looked.data,
            )
        return self._cells, self._mine


def _columns_of(ghosts: Iterable[_Ghost]) -> tuple[Integers, Integers, Integers, Integers, Floats]:
    table = np.array(list(ghosts), np.float64).reshape(-1, 5)
    read, looked, kinds, reads = table[:, :4].astype(np.int64).T
    return read, looked, kinds, reads, table[:, 4]
