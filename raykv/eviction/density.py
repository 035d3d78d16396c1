"""Hit density: evict the chunk with the fewest expected hits per time in memory."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy, key_numbers, live_parents
from raykv.eviction.ghosts import by_row
from raykv.eviction.hazards import AGES, Floats, Hazards, Integers, density, scale
from raykv.memory.layout import Columns
from raykv.types import Rows

FEATURES: Final = {"short": 2, "often": 4, "turn": 3, "output": 6, "together": 5, "deep": 4}
"""The features that make up a chunk's class, and the number of values of each feature. The feature that predicts reads
best comes first."""
LEVEL_OF: Final[dict[str, Callable[[int], int]]] = {
    "short": int,
    "often": int.bit_length,
    "turn": int,
    "together": lambda chunks: chunks.bit_length() - 1 if chunks else 0,
    "deep": lambda depth: (depth + 1).bit_length() // 2,
}
"""Functions that turn a count into a value of a feature."""
LEVELS: Final = 64
"""Counts above LEVELS - 1 are treated as LEVELS - 1."""
GHOSTS_SHARE: Final = 8
GHOSTS_MOST: Final = 1 << 18
"""Ghosts are evicted chunks that the policy remembers. Their limit is GHOSTS_SHARE per chunk in the cache, and
GHOSTS_MOST in total. With more than OBSERVE_LEAST ghosts above the limit, the oldest are dropped down to the limit."""
GHOSTS_OBSERVE_SHARE: Final = 4
"""When 1/GHOSTS_OBSERVE_SHARE of the ghosts is new, the policy records for all ghosts how long they were not read."""
OBSERVE_SHARE: Final = 32
OBSERVE_LEAST: Final = 256
"""For each new chunk, OBSERVE_SHARE rows are checked for reads. At least OBSERVE_LEAST rows are checked at once."""
LEARN_SHARE: Final = 25
LEARN_LEAST: Final = 20
"""Scores are computed again when 1/LEARN_SHARE of all observations and at least LEARN_LEAST observations are new."""
MEMORY_SHARE: Final = 8
MEMORY_LEAST: Final = 1000.0
"""Old observations fade, because traffic changes. All weights are halved when the sum of the weights of reads is above
MEMORY_LEAST and above 1/MEMORY_SHARE of the number of cached chunks."""
INSERT_SHARE: Final = 10
"""INSERT_SHARE inserts count as one observation when the policy decides whether to compute scores again."""

_ROW: Final = np.dtype(
    [
        ("here", "?"),
        ("kind", "<i4"),  # the class, with 0 for the feature "often"; a class is a number (see `Hazards`)
        ("turn", "<i4"),  # number of the turn in its conversation; see `HitDensity._place`
        ("place", "<i4"),  # position of the chunk in its turn
        ("earlier", "<u4"),  # reads before the last eviction, plus 1 for the return; 0 for a new chunk
        ("weight", "<f8"),  # 1 / number of chunks stored together
        ("last_read", "<u4"),  # `accessed` at the last check
        ("reads", "<u4"),  # `frequency` at the last check
        ("observed", "<u4"),  # tick of the last check
    ]
)

_Ghost = tuple[int, int, int, int, float]
"""An evicted chunk: tick of its last read, tick of its last check, its class, number of reads, weight."""


class HitDensity(Policy):
    """Learns for each class how likely its chunks are read again, and when. Evicts chunks of low hit density first.

    The class of a chunk has these features (the names are those in FEATURES):

    * short: whether the chunk is shorter than the chunk before it, as at the end of a prompt;
    * often: the number of reads of the chunk;
    * turn: the turn of the conversation in which the chunk was stored;
    * output: the number of tokens that the chunk's last request generated, if the engine reports this number;
    * together: the number of chunks that were stored together with the chunk;
    * deep: the depth of the chunk.

    The policy also learns from evicted chunks: some are stored again, others are not. Chunks that are stored together
    are usually read together. So each of n such chunks has the weight 1 / n.
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
        self._known = np.zeros(self._hazards.classes, np.bool_)
        self._scores = np.zeros((self._hazards.classes, AGES + 1))  # by class and age bucket
        self._learned = 0.0
        self._rows = np.zeros(0, _ROW)
        self._held = self._used_rows = self._hand = self._due = self._largest = self._new_ghosts = 0
        self._ghosts: dict[int, _Ghost] = {}
        self._recompute()

    def score(self, columns: Columns, rows: Rows, now: int) -> Floats:
        kinds = self._kinds(rows, columns.frequency[rows])
        ages = scale(np.maximum(0, now - columns.accessed[rows].astype(np.int64)))
        whole = ages.astype(np.int64)
        below, above = self._scores[kinds, whole], self._scores[kinds, whole + 1]
        scores: Floats = below + (above - below) * (ages - whole)
        return scores

    def on_insert(self, columns: Columns, rows: Rows, now: int) -> None:
        if not rows.size:
            return
        mine = self._rows = by_row(self._rows, columns)
        self._held += len(rows)
        self._used_rows = max(self._used_rows, int(rows.max()) + 1)
        mine["here"][rows] = True
        mine["last_read"][rows] = mine["observed"][rows] = columns.accessed[rows]
        mine["reads"][rows] = columns.frequency[rows]
        mine["earlier"][rows] = 0
        self._classify(columns, rows)
        self._learn_returns(columns, rows, now)
        self._known[self._kinds(rows, mine["reads"][rows])] = True
        self._observe_some(columns, len(rows), now)
        self._learned += len(rows) / INSERT_SHARE
        if self._learned >= max(LEARN_LEAST, self._hazards.seen / LEARN_SHARE):
            self._recompute()

    def on_request_done(self, columns: Columns, rows: Rows, output_tokens: int, now: int) -> None:
        self._observe(columns, rows, now)
        values, unit = FEATURES["output"], self._unit["output"]
        level = min(values - 1, 1 + max(0, output_tokens.bit_length() - 2) // 2)
        kind = self._rows["kind"]
        kind[rows] += (level - kind[rows] // unit % values) * unit
        self._known[self._kinds(rows, self._rows["reads"][rows])] = True

    def on_remove(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:
        self._observe(columns, rows, now)
        mine = self._rows[rows]
        self._rows["here"][rows] = False
        if evicted:
            kinds, reads = self._kinds(rows, mine["reads"]), mine["reads"] + mine["earlier"]
            fields = (mine["last_read"], kinds, reads, mine["weight"])
            entries = zip(*(field.tolist() for field in fields), strict=True)
            for key, (last_read, kind, often, weight) in zip(key_numbers(columns, rows), entries, strict=True):
                self._ghosts.pop(key, None)
                self._ghosts[key] = (last_read, now, kind, often, weight)
            self._trim_ghosts(len(rows), now)
        self._held -= len(rows)

    # -- classes -----------------------------------------------------------------------------------------------------

    def _kinds(self, rows: Rows, reads: npt.NDArray[np.uint32]) -> Integers:
        return self._rows["kind"][rows] + self._digit("often", reads + self._rows["earlier"][rows])

    def _classify(self, columns: Columns, rows: Rows) -> None:
        parents = live_parents(columns, rows)
        together = self._place(columns, rows.tolist(), parents.tolist())
        nbytes = columns.nbytes[rows]
        self._largest = max(self._largest, int(nbytes.max()))
        usual = np.where(parents >= 0, columns.nbytes[parents], self._largest)
        self._rows["weight"][rows] = 1.0 / together
        self._rows["kind"][rows] = (
            self._digit("short", (nbytes < usual).astype(np.int8))
            + self._digit("turn", self._rows["turn"][rows])
            + self._digit("together", together)
            + self._digit("deep", columns.depth[rows])
        )

    def _digit(self, feature: str, values: npt.NDArray[np.integer[Any]]) -> Integers:
        digits: Integers = self._digits[feature][np.minimum(values, LEVELS - 1)]
        return digits

    def _place(self, columns: Columns, rows: list[int], parents: list[int]) -> Integers:
        """Set `turn` and `place` of new rows. Returns for each row how many chunks were stored together.

        This number includes the row's own chunk. A turn is one request of a conversation. A chunk begins a new turn if
        its parent was stored earlier and has been read, because the chunk then belongs to a later request.
        """
        turns, places, earlier = self._rows["turn"], self._rows["place"], self._rows["earlier"]
        new = dict.fromkeys(rows, 0)
        for row, parent in zip(rows, parents, strict=True):
            if parent < 0:
                turns[row] = places[row] = 0
            elif parent in new or not (columns.frequency[parent] or earlier[parent]):
                turns[row], places[row] = turns[parent], places[parent] + 1
            else:
                turns[row], places[row] = turns[parent] + 1, 0
        for row, parent in zip(reversed(rows), reversed(parents), strict=True):
            new[row] = max(new[row], int(places[row]) + 1)
            if parent in new and places[row]:
                new[parent] = max(new[parent], new[row])
        return np.array(list(new.values()), np.int64)

    # -- learning ----------------------------------------------------------------------------------------------------

    def _observe_some(self, columns: Columns, inserted: int, now: int) -> None:
        self._due += inserted * OBSERVE_SHARE
        if self._due < min(OBSERVE_LEAST, self._used_rows):
            return
        rows = (self._hand + np.arange(min(self._due, self._used_rows))) % self._used_rows
        self._hand, self._due = int(rows[-1]) + 1, 0
        self._observe(columns, rows[self._rows["here"][rows]].astype(np.int32), now)

    def _observe(self, columns: Columns, rows: Rows, now: int) -> None:
        accessed, frequency = columns.accessed[rows].astype(np.int64), columns.frequency[rows]
        mine = self._rows[rows]
        last_read, reads, weight = mine["last_read"].astype(np.int64), mine["reads"], mine["weight"]
        kinds, hit = self._kinds(rows, reads), frequency > reads
        self._hazards.add_unread(kinds, mine["observed"] - last_read, np.where(hit, accessed, now) - last_read, weight)
        self._rows["observed"][rows] = now
        if not hit.any():
            return
        rows, accessed, weight = rows[hit], accessed[hit], weight[hit]
        self._hazards.add_reads(kinds[hit], accessed - last_read[hit], weight)
        self._rows["last_read"][rows], self._rows["reads"][rows] = accessed, frequency[hit]
        kinds = self._kinds(rows, frequency[hit])
        self._known[kinds] = True
        self._hazards.add_unread(kinds, np.zeros_like(accessed), now - accessed, weight)
        self._learned += float(weight.sum())

    def _learn_returns(self, columns: Columns, rows: Rows, now: int) -> None:
        keys = zip(rows.tolist(), key_numbers(columns, rows), strict=True)
        back = [(row, self._ghosts.pop(key)) for row, key in keys if key in self._ghosts]
        if back:
            self._learn_absence((ghost for _, ghost in back), now)
            last_read, _, kinds, reads, weights = _fields_of(ghost for _, ghost in back)
            self._hazards.add_reads(kinds, now - last_read, weights)
            self._rows["earlier"][[row for row, _ in back]] = reads + 1

    def _trim_ghosts(self, new: int, now: int) -> None:
        limit = min(GHOSTS_MOST, GHOSTS_SHARE * (self.capacity or self._held))
        if len(self._ghosts) > limit + OBSERVE_LEAST:
            oldest = list(islice(self._ghosts, len(self._ghosts) - limit))
            self._learn_absence((self._ghosts.pop(key) for key in oldest), now)
        self._new_ghosts += new
        if self._new_ghosts * GHOSTS_OBSERVE_SHARE >= len(self._ghosts) + OBSERVE_LEAST:
            self._new_ghosts = 0
            self._learn_absence(self._ghosts.values(), now)
            for key, (last_read, _, kind, reads, weight) in self._ghosts.items():
                self._ghosts[key] = (last_read, now, kind, reads, weight)

    def _learn_absence(self, ghosts: Iterable[_Ghost], now: int) -> None:
        last_read, observed, kinds, _, weights = _fields_of(ghosts)
        self._hazards.add_unread(kinds, observed - last_read, now - last_read, weights)

    def _recompute(self) -> None:
        self._learned = 0.0
        if self._hazards.seen > max(MEMORY_LEAST, self._held / MEMORY_SHARE):
            self._hazards.fade()
        known = np.flatnonzero(self._known)
        found = np.log(density(self._hazards.per_tick()[known]))
        places = np.minimum(np.arange(AGES + 1), found.shape[1] - 1)
        self._scores[known] = found[:, places]


def _fields_of(ghosts: Iterable[_Ghost]) -> tuple[Integers, Integers, Integers, Integers, Floats]:
    table = np.array(list(ghosts), np.float64).reshape(-1, 5)
    last_read, observed, kinds, reads = table[:, :4].astype(np.int64).T
    return last_read, observed, kinds, reads, table[:, 4]
