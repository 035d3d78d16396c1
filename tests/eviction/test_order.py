"""Policies that evict one chunk at a time, compared with references in plain Python and with eviction in batches."""

import random
from collections import OrderedDict, deque

import numpy as np
import pytest

from raykv.errors import ConfigError
from raykv.eviction import POLICIES, policy
from raykv.eviction.base import Policy, empty_columns, victims
from raykv.eviction.order import EvictionOrder
from raykv.memory.layout import Columns
from raykv.planner.cache import Cache
from raykv.planner.replay import replay
from raykv.planner.trace import Request, Trace


def lru(accesses: list[int], size: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in accesses:
        if key in held:
            hits += 1
            held.move_to_end(key)
            continue
        if len(held) == size:
            held.popitem(last=False)
        held[key] = None
    return hits


def fifo(accesses: list[int], size: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in accesses:
        if key in held:
            hits += 1
            continue
        if len(held) == size:
            held.popitem(last=False)
        held[key] = None
    return hits


def lfu(accesses: list[int], size: int) -> int:
    held: dict[int, tuple[int, int]] = {}
    hits = 0
    for at, key in enumerate(accesses):
        if key in held:
            hits += 1
            held[key] = held[key][0] + 1, at
            continue
        if len(held) == size:
            del held[min(held, key=held.__getitem__)]
        held[key] = 0, at
    return hits


def arc(accesses: list[int], size: int) -> int:
    """Count the hits of ARC: figure 4 of Megiddo and Modha, FAST 2003."""
    t1, t2, b1, b2 = (OrderedDict[int, None]() for _ in range(4))
    target, hits = 0.0, 0

    def replace(key: int) -> None:
        if t1 and (len(t1) > target or (key in b2 and len(t1) == target)):
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for key in accesses:
        if key in t1 or key in t2:
            hits += 1
            (t1 if key in t1 else t2).pop(key)
            t2[key] = None
        elif key in b1:
            target = min(size, target + max(1.0, len(b2) / len(b1)))
            replace(key)
            del b1[key]
            t2[key] = None
        elif key in b2:
            target = max(0, target - max(1.0, len(b1) / len(b2)))
            replace(key)
            del b2[key]
            t2[key] = None
        else:
            if len(t1) + len(b1) == size:
                if len(t1) < size:
                    b1.popitem(last=False)
                    replace(key)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= size:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * size:
                    b2.popitem(last=False)
                if len(t1) + len(t2) == size:
                    replace(key)
            t1[key] = None
    return hits


def s3fifo(accesses: list[int], size: int) -> int:
    """Count the hits of S3-FIFO: algorithm 1 of Yang et al., SOSP 2023.

    Until the cache is full for the first time, a new chunk goes to `main` if `small` is full.
    """
    small_size, ghost_size = size // 10, size - size // 10
    small, main = deque[int](), deque[int]()
    reads: dict[int, int] = {}
    ghosts: OrderedDict[int, None] = OrderedDict()
    hits, full = 0, False
    for key in accesses:
        if key in reads:
            hits += 1
            reads[key] += 1
            continue
        back = key in ghosts
        ghosts.pop(key, None)
        while len(reads) >= size:
            full = True
            if small and len(main) <= size - small_size:
                old = small.popleft()
                if reads[old] >= 2:
                    main.append(old)
                    reads[old] = 0
                else:
                    del reads[old]
                    ghosts[old] = None
                    if len(ghosts) > ghost_size:
                        ghosts.popitem(last=False)
            else:
                old = main.popleft()
                if reads[old]:
                    reads[old] = min(reads[old], 3) - 1
                    main.append(old)
                else:
                    del reads[old]
        (main if back or (not full and len(small) >= small_size) else small).append(key)
        reads[key] = 0
    return hits


REFERENCES = {"lru": lru, "fifo": fifo, "lfu": lfu, "arc": arc, "s3fifo": s3fifo}


def table(rows: int) -> Columns:
    columns = empty_columns(rows)
    columns.key_lo[:] = np.arange(rows)
    return columns


def single(accesses: list[int]) -> Trace:
    """Make a trace in which each access is a request of its own."""
    number: dict[int, int] = {}
    requests = [Request(0.0, [number.setdefault(key, len(number))], 1, 0) for key in accesses]
    return Trace("random", requests, len(number), 1)


def skewed(rng: random.Random, count: int) -> list[int]:
    """A random mix of popular keys, loops and scans."""
    accesses: list[int] = []
    while len(accesses) < count:
        start, length = rng.randrange(2000), rng.randrange(1, 300)
        kind = rng.choice(["popular", "popular", "loop", "scan"])
        if kind == "popular":
            accesses += [int(200 * rng.random() ** 3) for _ in range(length)]
        elif kind == "loop":
            accesses += [start + at % 40 for at in range(length)]
        else:
            accesses += range(start, start + length)
    return accesses[:count]


@pytest.mark.parametrize("name", ["lru", "fifo", pytest.param("lfu", marks=pytest.mark.slow)])
def test_hits_are_those_of_the_reference(name, rng):
    for _ in range(8):
        accesses, size = skewed(rng, 4000), rng.randrange(10, 500)
        assert hits(name, accesses, size) == REFERENCES[name](accesses, size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("arc", 0.01), ("s3fifo", 0.002)])
def test_hits_differ_little_from_the_reference(name, tolerance, rng):
    """When the reference makes room for a chunk, it knows whether the chunk was evicted before. A policy does not."""
    for _ in range(8):
        accesses, size = skewed(rng, 4000), rng.randrange(10, 500)
        share = REFERENCES[name](accesses, size) / len(accesses)
        assert hits(name, accesses, size) / len(accesses) == pytest.approx(share, abs=tolerance)


def hits(name: str, accesses: list[int], size: int) -> int:
    return replay(single(accesses), policy(name), size).prefix_hits


@pytest.mark.parametrize("name", ["leaf_lru", "lru", "lfu", "fifo"])
def test_one_by_one_and_in_batches_the_same_go(name, rng):
    """In random trees that grow and are read, EvictionOrder must evict the same rows as `victims`."""
    for _ in range(30):
        count = rng.randrange(2, 60)
        columns = table(count)
        order = EvictionOrder(policy(name), columns)
        for now in range(2 * count):
            row = now if now < count else rng.randrange(count)
            if row == now:
                columns.parent[row] = parent = rng.choice([-1, *range(row)])
                columns.inserted[row] = now + 1
                if parent >= 0:
                    columns.children[parent] += 1
                    columns.depth[row] = columns.depth[parent] + 1
                order.on_insert(np.array([row], np.int32), now)
            while row >= 0:
                columns.accessed[row] = (now + 1) * count - columns.depth[row]
                columns.frequency[row] += 1
                order.on_read(np.array([row], np.int32), now)
                row = int(columns.parent[row])
        everybody = np.arange(count, dtype=np.int32)
        wanted = [set(victims(policy(name), columns, everybody, some, 0).tolist()) for some in range(count + 1)]
        protected, gone = np.zeros(count, np.bool_), []
        while (row := order.next(0, protected)) >= 0:
            gone.append(row)
            parent = int(columns.parent[row])
            if parent >= 0:
                columns.children[parent] -= 1
                if not columns.children[parent]:
                    order.on_childless(parent, 0)
        assert [set(gone[:some]) for some in range(count + 1)] == wanted


def test_protected_rows_stay_and_keep_their_place():
    columns = table(4)
    order = EvictionOrder(policy("lru"), columns)
    columns.accessed[:] = [1, 2, 3, 4]
    order.on_insert(np.arange(4, dtype=np.int32), 4)
    protected = np.array([True, False, True, False])
    assert [order.next(5, protected) for _ in range(3)] == [1, 3, -1]
    protected[:] = False
    assert [order.next(5, protected) for _ in range(3)] == [0, 2, -1]


def inserted(made: Policy, columns: Columns) -> np.ndarray:
    rows = np.arange(len(columns.accessed), dtype=np.int32)
    made.on_insert(columns, rows, 1)
    return rows


def test_ttl_takes_what_expires_first_and_else_the_least_recently_read():
    columns = table(5)
    columns.expires[:] = [0, 9, 0, 5, 9]
    columns.accessed[:] = [3, 2, 1, 9, 1]
    assert victims(policy("ttl"), columns, np.arange(5, dtype=np.int32), 5, 0).tolist() == [3, 4, 1, 2, 0]


def test_lfu_counts_reads_and_breaks_ties_by_recency():
    columns = table(4)
    columns.frequency[:] = [2, 0, 0, 1 << 31]
    columns.accessed[:] = [1, 8, 7, 1]
    assert victims(policy("lfu"), columns, np.arange(4, dtype=np.int32), 4, 0).tolist() == [2, 1, 0, 3]


def test_arc_takes_from_the_queue_that_is_too_long():
    columns, made = table(8), policy("arc")
    columns.accessed[:] = [4, 3, 2, 1, 8, 7, 6, 5]
    columns.frequency[4:] = 1
    rows = inserted(made, columns)
    assert victims(made, columns, rows, 4, 1).tolist() == [3, 2, 1, 0], (
        "nothing returned: chunks read once are evicted first"
    )
    made.on_remove(columns, rows[2:4], 1, evicted=True)
    made.on_insert(columns, rows[2:4], 1)  # two chunks that were evicted from the first queue return
    assert made.queue(columns, rows).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert victims(made, columns, rows, 3, 1).tolist() == [3, 2, 7], "now the first queue may have two"


def test_s3fifo_gives_second_chances_in_batches_too():
    columns, made = table(20), policy("s3fifo")
    columns.inserted[:] = np.arange(1, 21)
    rows = inserted(made, columns)
    columns.frequency[[0, 1, 5]] = [2, 1, 7]
    gone = victims(made, columns, rows, 6, 1)
    assert gone.tolist() == [1, 2, 3, 4, 6, 7]
    made.on_remove(columns, gone, 1, evicted=True)
    made.on_insert(columns, gone[:1], 1)
    assert np.flatnonzero(made.queue(columns, rows)).tolist() == [0, 1, 5], "read twice, or returned"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_can_start_from_the_columns(name, rng):
    """After a restart, or when it replaces another policy, a policy starts from the chunks in memory."""
    cache = Cache(policy("leaf_lru"), 200, 2000)
    for now in range(1, 60):
        first = rng.randrange(1900)
        cache.make_room(30, now, np.empty(0, np.int32))
        cache.store(list(range(first, first + 30)), [1] * 30, now, {})
    columns = cache.columns
    rows = np.sort(cache.row_of[cache.row_of >= 0])
    made = policy(name)
    made.on_insert(columns, rows[np.argsort(columns.inserted[rows], kind="stable")], 60)
    gone = victims(made, columns, rows, 50, 60)
    assert len(set(gone.tolist())) == 50
    made.on_remove(columns, gone, 60, evicted=True)
    sample = rows[~np.isin(rows, gone)][::2]
    for row in victims(made, columns, sample, 10, 60, may_go=lambda row: True).tolist():
        assert row in sample or columns.children[row], "a row of the sample, or a parent of one"


def oldest_first(columns: Columns, rows: np.ndarray, now: int) -> np.ndarray:
    return columns.inserted[rows]


class Odd(Policy):
    def score(self, columns: Columns, rows: np.ndarray, now: int) -> np.ndarray:
        return columns.key_lo[rows] % 2


def broken(columns: Columns, rows: np.ndarray, now: int) -> np.ndarray:
    return columns.inserted


def test_a_policy_of_ones_own():
    accesses = [1, 2, 3, 1, 4, 1, 5, 1, 2] * 50
    own = replay(single(accesses), policy(oldest_first), 3)
    assert own.prefix_hits == REFERENCES["fifo"](accesses, 3)
    columns = table(4)
    assert victims(policy(Odd), columns, np.arange(4, dtype=np.int32), 4, 0).tolist() == [0, 2, 1, 3]
    assert policy("raykv.eviction.by_columns:LRU").score(columns, np.array([1], np.int32), 0).tolist() == [0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (broken, "broken returned uint32 of shape"),
        (lambda columns, rows, now: columns.nothing[rows], "no attribute 'nothing'"),
        (lambda columns: columns, "positional argument"),
        (int, "neither a subclass of Policy nor a function"),
        ("no.such.module:score", "cannot be imported"),
        ("raykv.eviction:nothing", "cannot be imported"),
        ("raykv.eviction:POLICIES", "neither a subclass"),
        (":x", "cannot be imported"),
    ],
)
def test_what_is_not_a_policy_is_refused_at_once(given, message):
    with pytest.raises(ConfigError, match=message):
        policy(given)
