"""What a policy is, and how victims are chosen by it.

A policy is one array expression: scores of rows from their columns, lowest leaves first.
"""

from typing import Protocol

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


def _lowest(columns: Columns, candidates: Rows, scores: Scores, count: int) -> Rows:
    """The `count` candidates with the lowest scores, in order.

    Equal scores are common (a batch of reads shares a tick): among them the deepest comes first.
    """
    if count < len(candidates):
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
    place = np.full(len(columns.parent), nobody, np.int64)
    place[chosen] = np.arange(nobody)
    parents = columns.parent[chosen]
    above = np.append(np.where(parents >= 0, place[parents], nobody), nobody)
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
    place = np.full(len(columns.parent), -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    parents = columns.parent[chosen]
    above = np.where(parents >= 0, place[parents], -1)
    if not ((above >= 0) & (above < place[chosen])).any():
        return chosen[:count]
    for row in chosen[np.argsort(-columns.depth[chosen].astype(np.int64), kind="stable")].tolist():
        parent = int(columns.parent[row])
        if parent >= 0 and 0 <= place[parent] < place[row]:
            place[parent] = place[row]
    depth = columns.depth[chosen].astype(np.int64)
    first: Rows = chosen[np.lexsort((-depth, place[chosen]))][:count]
    return first
