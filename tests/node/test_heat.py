"""The meter of a node: rates against brute force, and the division of hot chunks into prefixes."""

import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.node import heat as module
from raykv.node.heat import HALF_LIFE_S, HeatMeter, group_prefixes


def columns(rows: int):
    numbers = np.zeros(rows, np.uint32)
    return SimpleNamespace(generation=numbers + 2, nbytes=numbers + 1000, frequency=numbers)


NONE = np.empty(0, np.int32)


def rates_of(meter: HeatMeter, table) -> dict[int, float]:
    rows, loads = meter.loads(table)
    return {row: load / table.nbytes[row] for row, load in zip(rows.tolist(), loads.tolist(), strict=True)}


def test_a_steady_rate_is_found_and_halves_without_reads():
    meter, table = HeatMeter(), columns(10)
    meter.update(table, NONE, now_s=0.0)
    for second in range(1, 41):
        for _ in range(5):
            meter.count(table, np.array([3, -1, 7, 3], np.int32))
        meter.update(table, NONE, now_s=float(second))
    assert rates_of(meter, table) == {3: pytest.approx(10, rel=0.01), 7: pytest.approx(5, rel=0.01)}
    assert meter.load == pytest.approx(15_000, rel=0.01)
    meter.update(table, NONE, now_s=40 + HALF_LIFE_S)
    assert rates_of(meter, table)[3] == pytest.approx(5, rel=0.01)
    meter.update(table, NONE, now_s=1000.0)
    assert rates_of(meter, table) == {}
    assert meter.load == pytest.approx(0.0, abs=0.1)


def test_random_reads_equal_a_brute_force_sum(rng: random.Random):
    meter, table = HeatMeter(), columns(50)
    table.nbytes[:] = [rng.randrange(5000, 9000) for _ in range(50)]
    events, now_s = [], 0.0
    meter.update(table, NONE, now_s=now_s)
    for _ in range(60):
        step_s = rng.uniform(0.2, 3.0)
        for _ in range(rng.randrange(6)):
            rows = rng.choices(range(50), k=rng.randrange(1, 20))
            meter.count(table, np.array(rows, np.int32))
            events += [(row, now_s + step_s, step_s) for row in rows]
        now_s += step_s
        if rng.random() < 0.2:  # another chunk in this row: its rate begins anew
            changed = rng.randrange(50)
            table.generation[changed] += 2
            events = [each for each in events if each[0] != changed]
        meter.update(table, NONE, now_s=now_s)
        expected: dict[int, float] = {}
        for row, at_s, length_s in events:
            gain = (1 - 0.5 ** (length_s / HALF_LIFE_S)) / length_s
            expected[row] = expected.get(row, 0.0) + gain * 0.5 ** ((now_s - at_s) / HALF_LIFE_S)
        found = rates_of(meter, table)
        wanted = {row: rate for row, rate in expected.items() if rate * table.nbytes[row] >= 50}
        assert found == pytest.approx({**found, **wanted})
        assert set(found) <= set(expected)


def test_reads_of_replicas_on_this_host_count_once_and_those_of_other_chunks_do_not():
    meter, table = HeatMeter(), columns(10)
    replicas = np.array([4], np.int32)
    meter.update(table, replicas, now_s=0.0)
    for second in range(1, 41):
        table.frequency[[4, 5]] += 20  # reads through shared memory, and the reads that were sent
        for _ in range(8):
            meter.count(table, np.array([4, 6], np.int32))
        meter.update(table, replicas, now_s=float(second))
    assert rates_of(meter, table) == {4: pytest.approx(20, rel=0.01), 6: pytest.approx(8, rel=0.01)}


def test_the_meter_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_MEASURED", 10)
    monkeypatch.setattr(module, "MAX_WAITING", 600)
    meter, table = HeatMeter(), columns(100)
    meter.update(table, NONE, now_s=0.0)
    for row in range(100):
        for _ in range(row):
            meter.count(table, np.array([row], np.int32))
    meter.update(table, NONE, now_s=1.0)
    assert sum(rates_of(meter, table).values()) > 0
    assert len(rates_of(meter, table)) == 10
    assert len(meter._counted) == 0


def test_chains_are_divided_where_the_load_falls():
    #  0 -> 1 -> 2 -> 3 (much less) -> 4
    #       1 -> 5 (less than 2)
    rows, parents = [10, 11, 12, 13, 14, 15], [-1, 10, 11, 12, 13, 11]
    loads, depths = [100.0, 90.0, 60.0, 20.0, 19.0, 50.0], [0, 1, 2, 3, 4, 2]
    assert group_prefixes(rows, parents, loads, depths) == [[0, 1, 2], [5], [3, 4]]
    assert group_prefixes([], [], [], []) == []
    assert group_prefixes([7], [3], [1.0], [9]) == [[0]], "the parent is not hot, or not here"


def test_random_forests(rng: random.Random):
    """Every chunk is in one prefix, and in a prefix each chunk is the child of the chunk before it."""
    for _ in range(50):
        count = rng.randrange(1, 60)
        parents = [rng.randrange(-1, place) if place else -1 for place in range(count)]
        depths = [0] * count
        for place in range(count):
            depths[place] = depths[parents[place]] + 1 if parents[place] >= 0 else 0
        loads = [rng.uniform(1, 100) for _ in range(count)]
        found = group_prefixes(range(count), parents, loads, depths)
        assert sorted(place for prefix in found for place in prefix) == list(range(count))
        for prefix in found:
            for above, place in pairwise(prefix):
                assert parents[place] == above
                assert 2 * loads[place] >= loads[above]
        sums = [sum(loads[place] for place in prefix) for prefix in found]
        assert sums == sorted(sums, reverse=True)
