"""What a policy is, and how victims are chosen by it.

A policy is an array expression: scores of rows from their columns, lowest leaves first. What else it may say has
defaults: queues, of which one has the next turn (ARC), second chances (S3-FIFO), and what it remembers of chunks that
came and went. `victims` and `victims_upward` choose from many candidates at once, as a node does;
`raykv.eviction.order` gives one victim after the other. Both ask the policy the same questions.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.memory.table import Columns
from raykv.types import Bits, Rows

Scores = npt.NDArray[np.generic]
Ranks = Callable[[Rows, int], npt.NDArray[np.int64]]
"""A rank a row, at that tick; 0 for most."""
Queues = npt.NDArray[np.integer[Any]]

CHANCES: Final = 16
"""Rounds of second chances in one choice. Who uses them all up goes by the order there is then."""


class Policy(ABC):
    """One eviction policy.

    Reads are seen lazily, in the columns. What a policy remembers beside them lies in arrays by row and in bounded
    sets by key; `came` for all rows there are, oldest first, makes it anew.

    Attributes:
        name: What to call it in reports.
        leaf_first: A chunk goes only after all chunks that follow it in its chains: without its parent, a chunk can
            never be matched again and only takes up room.
        drifts: Scores change as time passes, not only when a row is read.
        queues: How many queues there are.
        capacity: Chunks that the cache holds when it is full, if its owner knows and says so.
    """

    name: str = ""
    leaf_first: bool = False
    drifts: bool = False
    queues: int = 1
    capacity: int | None = None

    @abstractmethod
    def score(self, columns: Columns, rows: Rows, now: int) -> Scores:
        """One score a row, any ordered type; `now` in ticks. Scores are compared within a queue."""

    def score_one(self, columns: Columns, row: int, now: int) -> Any:
        """The same for one row, as a plain value."""
        return self.score(columns, np.array([row], np.int32), now).tolist()[0]

    def queue(self, columns: Columns, rows: Rows) -> Queues:
        """Number of the queue that each row stands in."""
        return np.zeros(len(rows), np.int8)

    def quota(self, sizes: Sequence[int], count: int) -> list[int]:
        """How many of the next `count` victims each queue gives, where the queues have these sizes."""
        return [count]

    def spare(self, columns: Columns, rows: Rows, now: int) -> Bits:
        """Which of the rows whose turn it is get another chance. Their scores or queues are others from now on."""
        return np.zeros(len(rows), np.bool_)

    def came(self, columns: Columns, rows: Rows, now: int) -> None:  # noqa: B027 - need not be overridden
        """These rows hold new chunks, as a rule parents before children; their columns are set."""

    def told(  # noqa: B027 - nor this
        self, columns: Columns, rows: Rows, output_tokens: int, now: int
    ) -> None:
        """The request that read or stored these rows is done, and made so many tokens. Nobody need say so."""

    def went(  # noqa: B027 - nor this
        self, columns: Columns, rows: Rows, now: int, *, evicted: bool
    ) -> None:
        """These rows' chunks are about to go: evicted, or deleted. Their columns are still as they were."""


def key_numbers(columns: Columns, rows: Rows) -> list[int]:
    """Half of each row's key: a number by which a policy may remember it."""
    numbers: list[int] = columns.key_lo[rows].tolist()
    return numbers


class QueueOrder:
    """Scores across queues and ranks: of the first `count` in order, each queue has its quota.

    Ranks come before scores: the lowest go first, whatever the policy says of them.
    """

    def __init__(
        self, policy: Policy, columns: Columns, candidates: Rows, count: int, now: int, ranks: Ranks | None = None
    ) -> None:
        self._policy, self._columns, self._now = policy, columns, now
        self._ranks = ranks if ranks is not None and ranks(candidates, now).any() else None
        if policy.queues == 1:
            if self._ranks is not None:
                self._all = np.sort(policy.score(columns, candidates, now))
            return
        queue, scores = policy.queue(columns, candidates), policy.score(columns, candidates, now)
        self._sorted = [np.sort(scores[queue == number]) for number in range(policy.queues)]
        self._quota = policy.quota([len(members) for members in self._sorted], count)

    def of(self, rows: Rows) -> Scores:
        """A score a row, lowest first."""
        if self._ranks is None:
            return self._within_rank(rows)
        places: Any = self._within_rank(rows)
        if self._policy.queues == 1:
            places, most = np.searchsorted(self._all, places), len(self._all)
        else:
            most = 2 * sum(len(members) for members in self._sorted)
        ranked: Scores = self._ranks(rows, self._now) * (most + 1) + places
        return ranked

    def _within_rank(self, rows: Rows) -> Scores:
        scores = self._policy.score(self._columns, rows, self._now)
        if self._policy.queues == 1:
            return scores
        queue, turns = self._policy.queue(self._columns, rows), np.zeros(len(rows), np.int64)
        behind = sum(len(members) for members in self._sorted)
        for number, members in enumerate(self._sorted):
            mine = queue == number
            places = np.searchsorted(members, scores[mine])
            turns[mine] = np.where(places < self._quota[number], places, places + behind)
        return turns


def victims(
    policy: Policy, columns: Columns, candidates: Rows, count: int, now: int, ranks: Ranks | None = None
) -> Rows:
    """Choose up to `count` of the candidates to evict.

    Args:
        candidates: Rows that may go: ready, unpinned, not protected.
        ranks: If there are any.

    Returns:
        Rows in the order of eviction. Fewer than `count` only when no more may go.
    """
    if count <= 0 or not candidates.size:
        return candidates[:0]
    for _ in range(CHANCES):
        chosen = _choose(policy, columns, candidates, count, now, ranks)
        if not policy.spare(columns, chosen, now).any():
            return chosen
    return _choose(policy, columns, candidates, count, now, ranks)


def upcoming(
    policy: Policy, columns: Columns, candidates: Rows, count: int, now: int, ranks: Ranks | None = None
) -> Rows:
    """Who would go first as things are, without second chances. Nothing changes by it."""
    if count <= 0 or not candidates.size:
        return candidates[:0]
    scores = QueueOrder(policy, columns, candidates, count, now, ranks).of(candidates)
    return lowest(columns, candidates, scores, count)


def _choose(policy: Policy, columns: Columns, candidates: Rows, count: int, now: int, ranks: Ranks | None) -> Rows:
    scores = QueueOrder(policy, columns, candidates, count, now, ranks).of(candidates)
    window = count
    while True:
        order = lowest(columns, candidates, scores, window)
        chosen = _closed(columns, order) if policy.leaf_first else order
        if len(chosen) >= count or window >= len(candidates):
            return _first(columns, chosen, count) if policy.leaf_first else chosen[:count]
        window *= 2  # reads raced, so that some low scores have children with higher ones: look further


def victims_upward(
    policy: Policy,
    columns: Columns,
    candidates: Rows,
    count: int,
    now: int,
    may_go: Callable[[int], bool],
    ranks: Ranks | None = None,
) -> Rows:
    """Choose up to `count` rows to evict, leaves first, when the candidates are a mere sample.

    A sample seldom has a chunk and all that follow it. So it is taken for its leaves alone, and what they hang on comes
    next in turn as soon as it has nothing left below it, in the sample or not.

    Args:
        may_go: Whether a row that is no candidate may be evicted too.

    Returns:
        Rows in the order of eviction.
    """
    for _ in range(CHANCES):
        chosen = _choose_upward(policy, columns, candidates, count, now, may_go, ranks)
        if not policy.spare(columns, chosen, now).any():
            return chosen
    return _choose_upward(policy, columns, candidates, count, now, may_go, ranks)


def _choose_upward(
    policy: Policy,
    columns: Columns,
    candidates: Rows,
    count: int,
    now: int,
    may_go: Callable[[int], bool],
    ranks: Ranks | None,
) -> Rows:
    order = QueueOrder(policy, columns, candidates, count, now, ranks)
    leaves = candidates[columns.children[candidates] == 0]
    leaves = lowest(columns, leaves, order.of(leaves), min(count, len(leaves)))

    def turns(rows: Rows) -> list[tuple[Any, int, int]]:
        scores, depths = order.of(rows).tolist(), columns.depth[rows].tolist()
        return [(score, -depth, row) for score, depth, row in zip(scores, depths, rows.tolist(), strict=True)]

    heap = turns(leaves)
    heapq.heapify(heap)
    below: dict[int, int] = {}  # of rows above those that were chosen: children that stay
    chosen: list[int] = []
    while heap and len(chosen) < count:
        row = heapq.heappop(heap)[2]
        chosen.append(row)
        parent = int(columns.parent[row])
        if parent >= 0:
            below[parent] = below.get(parent, int(columns.children[parent])) - 1
            if not below[parent] and may_go(parent):
                heapq.heappush(heap, turns(np.array([parent], np.int32))[0])
    return np.array(chosen, np.int32)


def lowest(columns: Columns, candidates: Rows, scores: Scores, count: int) -> Rows:
    """The `count` candidates with the lowest scores, in order.

    Equal scores are common (a batch of reads shares a tick): among them the deepest comes first.
    """
    if 0 < count < len(candidates):
        worst = np.partition(scores, count - 1)[count - 1]
        low = np.flatnonzero(scores <= worst)
        candidates, scores = candidates[low], scores[low]
    depth = columns.depth[candidates].astype(np.int64)
    order: Rows = candidates[np.lexsort((-depth, scores))][:count]
    return order


def _closed(columns: Columns, chosen: Rows) -> Rows:
    """`chosen` without those that would leave a child behind.

    Usually that is all of them, since reading a chunk reads its ancestors too. Where one must stay, so must all above
    it: they are found in steps of 1, 2, 4, ... generations, since chains may be very long.
    """
    nobody = len(chosen)
    above = np.append(_places(chosen, columns.parent[chosen], nobody), nobody)
    stays = np.append(columns.children[chosen] > np.bincount(above, minlength=nobody + 1)[:nobody], False)
    for _ in range(nobody.bit_length()):
        if not stays.any():
            return chosen
        stays[above[stays]] = True
        stays[nobody] = False
        above = above[above]
    closed: Rows = chosen[~stays[:nobody]]
    return closed


def _first(columns: Columns, chosen: Rows, count: int) -> Rows:
    """At most `count` of a set that is closed under children, staying closed."""
    if len(chosen) <= count:
        return chosen
    # A chunk cannot go before its children: its place is the last of theirs, and depth settles the rest.
    above = _places(chosen, columns.parent[chosen], -1)
    if not ((above >= 0) & (above < np.arange(len(chosen)))).any():
        return chosen[:count]
    depth = columns.depth[chosen].astype(np.int64)
    turn, parents = list(range(len(chosen))), above.tolist()
    for place in np.argsort(-depth, kind="stable").tolist():
        parent = parents[place]
        if parent >= 0 and turn[parent] < turn[place]:
            turn[parent] = turn[place]
    first: Rows = chosen[np.lexsort((-depth, np.array(turn)))][:count]
    return first


def _places(chosen: Rows, rows: Rows, missing: int) -> npt.NDArray[np.int64]:
    """Where in `chosen` each of `rows` stands; `missing` for those that do not."""
    if not chosen.size:
        return np.full(len(rows), missing, np.int64)
    order = np.argsort(chosen)
    place = order[np.minimum(np.searchsorted(chosen, rows, sorter=order), len(chosen) - 1)]
    return np.where(chosen[place] == rows, place, missing)
