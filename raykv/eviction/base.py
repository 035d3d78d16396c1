"""The interface of an eviction policy, and the choice of victims.

A policy computes a score for each row from the table's columns. Rows with the lowest scores are evicted first. A policy
may also sort rows into several queues (ARC), give second chances (S3-FIFO), and remember evicted chunks. A node calls
`victims`, which chooses many rows at once. The planner uses `raykv.eviction.order`, which gives one victim at a time.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.memory.layout import COLUMNS, RECORD, Columns
from raykv.types import Bits, Rows

Scores = npt.NDArray[np.generic]
Ranks = Callable[[Rows, int], npt.NDArray[np.int64]]
"""A function of rows and the time in ticks. It returns one rank per row. Rows of lower rank are evicted first, whatever
their scores."""
Queues = npt.NDArray[np.integer[Any]]
MayGo = Callable[[int], bool]
"""A function of one row. It returns whether the row may be evicted."""
Order = Callable[[Rows], Scores]
"""A function of rows. It returns one score per row. The row with the lowest score is evicted first."""

SECOND_CHANCE_ROUNDS: Final = 16
"""One choice of victims has at most this many rounds of second chances. Afterwards no row gets another chance."""


class Policy(ABC):
    """An eviction policy. Subclasses must implement only `score`.

    Policies see reads only as changed columns of the table. A policy holds its own state in arrays by row, and in
    bounded sets of keys. After a restart the node calls `on_insert` once with all stored rows, oldest first, to restore
    this state. All other methods get only rows that `on_insert` has got before.

    Attributes:
        name: Name in reports.
        leaf_first: Whether to evict a chunk only after all chunks that follow it in a chain. This makes sense because a
            chunk without its parent can never be matched.
        drifts: Whether scores change with time, and not only with reads.
        queues: Number of queues to which `queue` assigns the rows.
        capacity: Number of chunks in a full cache; None if unknown.
    """

    name: str = ""
    leaf_first: bool = False
    drifts: bool = False
    queues: int = 1
    capacity: int | None = None

    @abstractmethod
    def score(self, columns: Columns, rows: Rows, now: int) -> Scores:
        """Return one score per row, of any ordered type. Scores are compared only within a queue. `now` is in ticks."""

    def queue(self, columns: Columns, rows: Rows) -> Queues:
        return np.zeros(len(rows), np.int8)

    def shares(self, sizes: Sequence[int], count: int) -> list[int]:
        """Return how many of the next `count` victims come from each queue. `sizes`: the lengths of the queues."""
        return [count]

    def second_chance(self, columns: Columns, rows: Rows, now: int) -> Bits:
        """Return which of these victims must not be evicted yet. An override also changes their score or queue."""
        return np.zeros(len(rows), np.bool_)

    def on_insert(self, columns: Columns, rows: Rows, now: int) -> None:  # noqa: B027 - optional
        """Called after these rows got new chunks and their columns were set. Parents come before children."""

    def on_request_done(  # noqa: B027 - optional
        self, columns: Columns, rows: Rows, output_tokens: int, now: int
    ) -> None:
        """Called when the request that read or stored these chunks has ended. Some engines never report this."""

    def on_remove(self, columns: Columns, rows: Rows, now: int, *, evicted: bool) -> None:  # noqa: B027 - optional
        """Called before the chunks of these rows are removed. The columns are still unchanged."""


def empty_columns(rows: int) -> Columns:
    """Return new columns that belong to no table. All values are 0, except `parent`, which is -1."""
    kinds = {name: RECORD[name] for name in RECORD.names or ()} | {name: np.dtype(k) for name, k in COLUMNS.items()}
    columns = Columns({name: np.zeros(rows, kind) for name, kind in kinds.items()})
    columns.parent[:] = -1
    return columns


def live_parents(columns: Columns, rows: Rows) -> Rows:
    """Return the row of each chunk's parent; -1 if the chunk has no parent, or if the parent is gone."""
    parents = columns.parent[rows]
    live = (parents >= 0) & (columns.generation[np.maximum(parents, 0)] == columns.parent_generation[rows])
    found: Rows = np.where(live, parents, np.int32(-1))
    return found


def key_numbers(columns: Columns, rows: Rows) -> list[int]:
    """Return the low half of each row's key. Policies remember evicted chunks by this number."""
    numbers: list[int] = columns.key_lo[rows].tolist()
    return numbers


def single_order(
    policy: Policy, columns: Columns, candidates: Rows, count: int, now: int, ranks: Ranks | None = None
) -> Order:
    """Combine all queues and ranks into one order.

    Within a rank, the rows that `shares` takes from each queue come first: those with the lowest scores of the queue.
    """
    ranked = ranks if ranks is not None and ranks(candidates, now).any() else None
    if policy.queues == 1 and ranked is None:
        return lambda rows: policy.score(columns, rows, now)
    queue, scores = policy.queue(columns, candidates), policy.score(columns, candidates, now)
    queues = [np.sort(scores[queue == number]) for number in range(policy.queues)]
    shares, total = policy.shares([len(members) for members in queues], count), len(candidates)

    def places(rows: Rows) -> Scores:
        scores, queue = policy.score(columns, rows, now), policy.queue(columns, rows)
        found = np.zeros(len(rows), np.int64)
        for number, (members, share) in enumerate(zip(queues, shares, strict=True)):
            mine = queue == number
            place = np.searchsorted(members, scores[mine])
            found[mine] = np.where(place < share, place, place + total)
        return found if ranked is None else found + ranked(rows, now) * (2 * total + 1)

    return places


def victims(
    policy: Policy,
    columns: Columns,
    candidates: Rows,
    count: int,
    now: int,
    ranks: Ranks | None = None,
    may_go: MayGo | None = None,
) -> Rows:
    """Choose up to `count` rows to evict.

    Args:
        policy: Gives the order of the rows.
        columns: The columns of the table.
        candidates: All rows that may be evicted, or a sample of these rows.
        count: Number of rows to choose.
        now: Time in ticks.
        ranks: Gives a rank to each row. Rows of lower rank are chosen first, whatever their scores.
        may_go: Required if the candidates are a sample. A leaf-first policy may also choose a parent outside the
            sample: after all children of the parent, and only if `may_go(parent)` is True.

    Returns:
        The rows in the order of eviction; fewer than `count` if no more rows may be evicted.
    """
    chosen = candidates[:0]
    if count <= 0 or not candidates.size:
        return chosen
    for rounds_left in range(SECOND_CHANCE_ROUNDS, -1, -1):
        order = single_order(policy, columns, candidates, count, now, ranks)
        if may_go is not None and policy.leaf_first:
            chosen = _from_sample(columns, candidates, count, order, may_go)
        else:
            chosen = _from_all(columns, candidates, count, order, leaf_first=policy.leaf_first)
        if not rounds_left or not policy.second_chance(columns, chosen, now).any():
            break
    return chosen


def upcoming(
    policy: Policy,
    columns: Columns,
    candidates: Rows,
    count: int,
    now: int,
    ranks: Ranks | None = None,
    *,
    exact: bool = True,
) -> Rows:
    """Return the first `count` candidates in the order of eviction. Ignores second chances.

    `exact`: whether to respect `leaf_first`, which takes six times as long. It needs all candidates, not a sample.
    """
    if count <= 0 or not candidates.size:
        return candidates[:0]
    order = single_order(policy, columns, candidates, count, now, ranks)
    return _from_all(columns, candidates, count, order, leaf_first=exact and policy.leaf_first)


def _from_all(columns: Columns, candidates: Rows, count: int, order: Order, *, leaf_first: bool) -> Rows:
    scores, window = order(candidates), count
    while True:
        chosen = lowest(columns, candidates, scores, window)
        if not leaf_first:
            return chosen
        chosen = _leaves_first(columns, chosen)
        if len(chosen) >= count or window >= len(candidates):
            return chosen[:count]
        window *= 2  # some rows were left out, because their children have higher scores


def _from_sample(columns: Columns, candidates: Rows, count: int, order: Order, may_go: MayGo) -> Rows:
    """Choose rows without children from the sample, in order.

    A parent, even one outside the sample, becomes a candidate when all its children are chosen and `may_go` permits it.
    """
    leaves = candidates[columns.children[candidates] == 0]
    leaves = lowest(columns, leaves, order(leaves), min(count, len(leaves)))

    def entries(rows: Rows) -> list[tuple[Any, int, int, int]]:
        scores, depths = order(rows).tolist(), (-columns.depth[rows].astype(np.int64)).tolist()
        return list(zip(scores, depths, rows.tolist(), live_parents(columns, rows).tolist(), strict=True))

    heap = entries(leaves)
    heapq.heapify(heap)
    children: dict[int, int] = {}  # row of a parent -> number of its children that are not chosen yet
    chosen: list[int] = []
    while heap and len(chosen) < count:
        _, _, row, parent = heapq.heappop(heap)
        chosen.append(row)
        if parent >= 0:
            children[parent] = children.get(parent, int(columns.children[parent])) - 1
            if not children[parent] and may_go(parent):
                heapq.heappush(heap, entries(np.array([parent], np.int32))[0])
    return np.array(chosen, np.int32)


def lowest(columns: Columns, candidates: Rows, scores: Scores, count: int) -> Rows:
    """Return the `count` candidates with the lowest scores, in order. Among equal scores the deepest row comes first.

    Equal scores are common, because all reads of a batch have the same tick.
    """
    if 0 < count < len(candidates):
        worst = np.partition(scores, count - 1)[count - 1]
        low = np.flatnonzero(scores <= worst)
        candidates, scores = candidates[low], scores[low]
    depth = columns.depth[candidates].astype(np.int64)
    order: Rows = candidates[np.lexsort((-depth, scores))][:count]
    return order


def _leaves_first(columns: Columns, chosen: Rows) -> Rows:
    """Return `chosen` without the rows that have a descendant outside `chosen`. Each row comes after its descendants.

    The place of a row is the highest index in `chosen` of the row and its descendants. The result is sorted by place.
    Each pass copies places to ancestors: 1 level up, then 2, then 4, and so on. So even a long chain needs few passes.
    """
    outside = len(chosen)
    by_row, parents = np.argsort(chosen), live_parents(columns, chosen)
    found = by_row[np.minimum(np.searchsorted(chosen, parents, sorter=by_row), outside - 1)]
    above = np.append(np.where(chosen[found] == parents, found, outside), outside)
    place = np.arange(outside + 1)
    place[:outside][columns.children[chosen] > np.bincount(above, minlength=outside + 1)[:outside]] = outside
    for _ in range(outside.bit_length()):
        if (above == outside).all():
            break
        np.maximum.at(place, above, place)
        above = above[above]
    place = place[:outside]
    closed: Rows = chosen[np.lexsort((-columns.depth[chosen].astype(np.int64), place))]
    return closed[: np.count_nonzero(place < outside)]
