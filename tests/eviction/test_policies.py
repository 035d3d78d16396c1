"""Policies compared with brute force in plain Python, on random trees."""

import random

import numpy as np
import pytest

from raykv.config import POLICY_NAMES, StorageConfig
from raykv.errors import ConfigError
from raykv.eviction import POLICIES, policy
from raykv.eviction.base import empty_columns, live_parents, victims


class Forest:
    """Rows of a table that form prefix trees."""

    def __init__(self, parents: list[int], accessed: list[int], inserted: list[int] | None = None) -> None:
        rows = len(parents)
        self.columns = empty_columns(rows)
        self.columns.parent[:] = parents
        self.columns.accessed[:] = accessed
        self.columns.inserted[:] = inserted or accessed
        for row, parent in enumerate(parents):
            if parent >= 0:
                self.columns.children[parent] += 1
            while parent >= 0:
                self.columns.depth[row] += 1
                parent = parents[parent]
        self.parents = parents

    def evictable_leaves(self, candidates: set[int], gone: set[int]) -> list[int]:
        stays = [row for row in range(len(self.parents)) if row not in gone]
        with_children = {self.parents[row] for row in stays}
        return [row for row in stays if row in candidates and row not in with_children]

    def most(self, candidates: set[int]) -> int:
        """Evict all evictable leaves again and again, until none is left. Returns the number of evicted rows."""
        gone: set[int] = set()
        while leaves := self.evictable_leaves(candidates, gone):
            gone |= set(leaves)
        return len(gone)

    def greedy(self, candidates: set[int], count: int) -> list[int]:
        """Evict `count` rows, always the least recently read leaf. Returns the sorted access times of these rows."""
        gone: set[int] = set()
        times = []
        while len(gone) < count and (leaves := self.evictable_leaves(candidates, gone)):
            gone.add(min(leaves, key=lambda row: (self.columns.accessed[row], -int(self.columns.depth[row]))))
            times = [int(self.columns.accessed[row]) for row in gone]
        return sorted(times)


def random_forest(rng: random.Random, *, orderly: bool) -> Forest:
    """Make random trees. If `orderly`, no chunk was read later than its parent: a read includes all ancestors."""
    rows = rng.randrange(1, 60)
    parents, accessed = [], []
    for row in range(rows):
        parent = rng.choice([-1, *range(max(0, row - rng.choice([2, 8, 60])), row)])
        parents.append(parent)
        newest = accessed[parent] if orderly and parent >= 0 else rng.choice([8, 1000])
        accessed.append(rng.randint(1, newest))
    order = rng.sample(range(rows), rows)
    place = {row: order.index(row) for row in range(rows)}
    return Forest(
        [place[parents[row]] if parents[row] >= 0 else -1 for row in order],
        [accessed[row] for row in order],
        [rng.randrange(1, 30) for _ in order],
    )


def choose(name: str, forest: Forest, candidates: set[int], count: int) -> list[int]:
    rows = np.array(sorted(candidates), np.int32)
    chosen = victims(policy(name), forest.columns, rows, count, 0).tolist()
    assert len(chosen) == len(set(chosen))
    assert set(chosen) <= candidates
    return chosen


def some(rng: random.Random, forest: Forest) -> set[int]:
    """Random candidates: all, nine tenths or half of the rows. The others are pinned."""
    share = rng.choice([1.0, 1.0, 0.9, 0.5])
    return {row for row in range(len(forest.parents)) if rng.random() < share}


@pytest.mark.parametrize(("name", "column"), [("lru", "accessed"), ("fifo", "inserted")])
def test_lru_and_fifo_take_the_lowest(name, column, rng):
    for _ in range(300):
        forest = random_forest(rng, orderly=False)
        candidates, count = some(rng, forest), rng.randrange(0, 70)
        values = getattr(forest.columns, column)
        chosen = choose(name, forest, candidates, count)
        assert [values[row] for row in chosen] == sorted(values[row] for row in candidates)[:count]


@pytest.mark.parametrize("orderly", [True, False])
def test_leaf_first_never_orphans_and_gives_what_it_can(orderly, rng):
    for _ in range(500):
        forest = random_forest(rng, orderly=orderly)
        candidates, count = some(rng, forest), rng.randrange(0, 70)
        chosen = choose("leaf_lru", forest, candidates, count)
        assert len(chosen) == min(count, forest.most(candidates))
        left = set(range(len(forest.parents))) - set(chosen)
        assert not {forest.parents[row] for row in left} & set(chosen), "a chunk without its parent"


def test_leaf_first_is_the_greedy_choice(rng):
    for _ in range(500):
        forest = random_forest(rng, orderly=True)
        candidates, count = some(rng, forest), rng.randrange(0, 70)
        chosen = choose("leaf_lru", forest, candidates, count)
        assert sorted(int(forest.columns.accessed[row]) for row in chosen) == forest.greedy(candidates, count)


@pytest.mark.timeout(10)
def test_one_pinned_leaf_holds_a_long_chain_and_costs_no_time():
    """All ancestors of the pinned leaf must stay. A policy finds them in a few array passes, however long the chain."""
    length = 100_000
    forest = Forest([-1] * (length + 10), [1] * length + [2] * 10)
    forest.columns.parent[1:length] = np.arange(length - 1)
    forest.columns.children[: length - 1] = 1
    forest.columns.depth[:length] = np.arange(length)
    assert choose("leaf_lru", forest, set(range(length - 1)), 5) == []
    assert set(choose("leaf_lru", forest, set(range(length + 10)) - {length - 1}, 50)) == set(
        range(length, length + 10)
    )


def test_a_chain_read_backwards_is_still_taken_from_its_end():
    length = 1000
    forest = Forest([-1, *range(length - 1)], list(range(1, length + 1)))  # the root was read first, and the leaf last
    assert choose("leaf_lru", forest, set(range(length)), 3) == [length - 1, length - 2, length - 3]


@pytest.mark.slow
def test_a_parent_whose_row_holds_another_chunk_is_no_parent(rng):
    """A chunk may be deleted before its children. Its row may then hold another chunk, with another generation."""
    for _ in range(300):
        forest = random_forest(rng, orderly=False)
        columns, reused = forest.columns, {row for row in range(len(forest.parents)) if rng.random() < 0.3}
        for row in reused:
            columns.generation[row] += 2
        links = forest.parents
        forest.parents = [-1 if parent in reused else parent for parent in links]
        columns.children[:] = [forest.parents.count(row) for row in range(len(links))]
        assert live_parents(columns, np.arange(len(links), dtype=np.int32)).tolist() == forest.parents
        candidates, count = some(rng, forest), rng.randrange(0, 70)
        assert len(choose("leaf_lru", forest, candidates, count)) == min(count, forest.most(candidates))
        rows = np.array(sorted(candidates), np.int32)
        gone: set[int] = set()
        for row in victims(policy("leaf_lru"), columns, rows, count, 0, may_go=candidates.__contains__).tolist():
            assert row in forest.evictable_leaves(candidates, gone)
            gone.add(row)
        policy("density").on_insert(columns, rows, 1)  # must accept children of reused rows


def test_every_policy_has_a_name_in_the_config():
    assert list(POLICY_NAMES) == list(POLICIES)
    for name in [*POLICIES, "package.module:Own"]:
        assert StorageConfig.load({"policy": name}).policy == name
    assert {policy(name).leaf_first for name in POLICIES} == {True, False}
    with pytest.raises(ConfigError, match=r"'sieve'.*arc, .*fifo, leaf_lru, lfu, lru, .*ttl"):
        policy("sieve")


def test_from_a_sample_leaves_are_evicted_and_then_their_parents(rng):
    for _ in range(500):
        forest = random_forest(rng, orderly=True)
        everybody, count = set(range(len(forest.parents))), rng.randrange(1, 70)
        held = {row for row in everybody if rng.random() < 0.1}
        sample = {row for row in everybody - held if rng.random() < rng.choice([0.3, 1.0])}
        rows = np.array(sorted(sample), np.int32)
        chosen = victims(
            policy("leaf_lru"), forest.columns, rows, count, 0, may_go=lambda row, held=held: row not in held
        ).tolist()
        assert len(chosen) == len(set(chosen)) <= count
        assert not set(chosen) & held
        gone: set[int] = set()
        for row in chosen:  # each row is a leaf when its turn comes
            assert row in forest.evictable_leaves(everybody - held, gone)
            gone.add(row)
        if sample == everybody - held:
            assert sorted(int(forest.columns.accessed[row]) for row in chosen) == forest.greedy(sample, count)
