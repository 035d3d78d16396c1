"""What a policy is, and how victims are chosen by it.

A policy is one array expression: scores of rows from their columns, lowest leaves first.
"""

import heapq
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raykv.memory.table import Columns
from raykv.types import Rows

Scores = npt.NDArray[np.generic]


class Policy(Protocol):
    """One eviction policy.

    Attributes:
        leaf_first: A chunk goes only after all chunks that follow it in its chains: without its parent, a chunk can
            never be matched again and only takes up room.
    """

    leaf_first: bool

    def score(self, columns: Columns, rows: Rows, now: int) -> Scores:
        """One score a row, any ordered type; `now` in ticks."""
        ...


def victims(policy: Policy, columns: Columns, candidates: Rows, count: int, now: int) -> Rows:
    """Choose up to `count` of the candidates to evict.

    Args:
        candidates: Rows that may go: ready, unpinned, not protected.

    Returns:
        Rows in the order of eviction. Fewer than `count` only when no more may go.
    """
    if count <= 0 or not candidates.size:
        return candidates[:0]
    scores = policy.score(columns, candidates, now)
    window = count
    while True:
        order = _lowest(columns, candidates, scores, window)
        chosen = _closed(columns, order) if policy.leaf_first else order
        if len(chosen) >= count or window >= len(candidates):
            return _first(columns, chosen, count) if policy.leaf_first else chosen[:count]
        window *= 2  # reads raced, so that some low scores have children with higher ones: look further


def victims_upward(
    policy: Policy, columns: Columns, candidates: Rows, count: int, now: int, may_go: Callable[[int], bool]
) -> Rows:
    """Choose up to `count` rows to evict, leaves first, when the candidates are a mere sample.

    A sample seldom has a chunk and all that follow it. So it is taken for its leaves alone, and what they hang on comes
    next in turn as soon as it has nothing left below it, in the sample or not.

    Args:
        may_go: Whether a row that is no candidate may be evicted too.

    Returns:
        Rows in the order of eviction.
    """
    leaves = candidates[columns.children[candidates] == 0]
    leaves = _lowest(columns, leaves, policy.score(columns, leaves, now), min(count, len(leaves)))

    def turns(rows: Rows) -> list[tuple[Any, int, int]]:
        scores, depths = policy.score(columns, rows, now).tolist(), columns.depth[rows].tolist()
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


def _lowest(columns: Columns, candidates: Rows, scores: Scores, count: int) -> Rows:
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
