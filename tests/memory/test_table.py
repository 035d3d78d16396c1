"""The table's index compared with a dict."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.config import StorageConfig
from raykv.errors import LostError
from raykv.memory.arena import SharedMemory
from raykv.memory.layout import HEADER, ROW_NBYTES, TICKS_PER_S, table_nbytes
from raykv.memory.table import Table

pytestmark = pytest.mark.usefixtures("loops")

ROWS = 16  # the smallest index: 32 entries


def table(rows: int = ROWS) -> Table:
    return Table.create(None, rows=rows, extents=2, extent_nbytes=1 << 20, now_s=100.0)


def keys_of(numbers) -> np.ndarray:
    """Return keys that collide. Their probing starts at the last three entries of the index, and wraps around."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # inverse of the multiplier of the table's hash
    step = (1 << 64) // (2 * ROWS)
    mixed = [((1 << 64) - 1 - n % 3 * step) * inverse % (1 << 64) for n in numbers]
    return np.array([(n, n ^ value) for n, value in zip(numbers, mixed, strict=True)], np.uint64).reshape(-1, 2)


def test_these_keys_crowd_the_index():
    made = table()
    made.insert(keys_of(range(6)), np.arange(6, dtype=np.int32))
    assert np.flatnonzero(made.index).tolist() == [0, 1, 2, 29, 30, 31]


def unchanged(made: Table, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
    return (rows >= 0) & (made.columns.generation[rows] == generations)


class Model:
    def __init__(self) -> None:
        self.table = table()
        self.rows: dict[int, int] = {}

    def insert(self, numbers: list[int]) -> None:
        free = sorted(set(range(ROWS)) - set(self.rows.values()))
        new = [n for n in dict.fromkeys(numbers) if n not in self.rows][: len(free)]
        rows = np.array(free[: len(new)], np.int32)
        self.table.columns.generation[rows] |= 1
        self.table.insert(keys_of(new), rows)
        self.table.columns.generation[rows] += 1
        self.rows.update(zip(new, rows.tolist(), strict=True))

    def remove(self, numbers: list[int]) -> None:
        rows = np.array([self.rows.pop(n) for n in dict.fromkeys(numbers) if n in self.rows], np.int32)
        self.table.columns.generation[rows] += 1
        self.table.remove(rows)

    def rebuild(self, _: list[int]) -> None:
        self.table.rebuild_index(np.array(sorted(self.rows.values()), np.int32))

    def check(self) -> None:
        everything = list(range(40))
        expected = [self.rows.get(n, -1) for n in everything]
        assert self.table.find(keys_of(everything)).tolist() == expected
        found, generations = self.table.find_ready(keys_of(everything), 1)
        assert found.tolist() == expected
        assert unchanged(self.table, found, generations).tolist() == [row >= 0 for row in expected]
        assert sorted(self.table.index_entries().tolist()) == sorted(self.rows.values())
        assert self.table.ready_rows().tolist() == sorted(self.rows.values())


numbers = st.lists(st.integers(0, 39), max_size=20)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["insert", "remove", "rebuild"]), numbers), max_size=25))
def test_the_index_is_a_dict(steps):
    model = Model()
    for what, which in steps:
        getattr(model, what)(which)
        model.check()


def test_thousands_of_random_keys(np_rng):
    made = table(rows=5000)
    keys = np_rng.integers(0, 1 << 63, (5000, 2)).astype(np.uint64)
    made.insert(keys, np.arange(5000, dtype=np.int32))
    order = np_rng.permutation(5000)
    assert (made.find(keys[order]) == order).all()
    assert (made.find(np_rng.integers(0, 1 << 63, (5000, 2)).astype(np.uint64)) == -1).all()
    made.remove(np.arange(0, 5000, 2, dtype=np.int32))
    assert made.find(keys).tolist() == [row if row % 2 else -1 for row in range(5000)]


@pytest.mark.parametrize("ready", [True, False])
def test_any_number_of_keys_of_a_full_table_in_one_call(np_rng, ready):
    rows = 64
    made = table(rows)
    keys = np_rng.integers(1, 1 << 64, (2 * rows, 2), np.uint64)
    made.insert(keys[:rows], np.arange(rows, dtype=np.int32))
    generations = made.columns.generation
    generations[:] = np_rng.choice([0, 1, 2, 7, 1 << 20], rows)
    made.columns.expires[:] = np_rng.choice([0, 4, 5, 6], rows)
    removed = np.arange(0, rows, 5, dtype=np.int32)
    made.remove(removed)
    known = {row: generation for row, generation in enumerate(generations.tolist()) if row not in removed}
    usable = {
        row
        for row, generation in known.items()
        if not ready or (generation and generation % 2 == 0 and made.cells.expires[row] not in (4, 5))
    }
    for count in [*range(70), 1000]:
        which = np_rng.integers(0, 2 * rows, count)
        found, seen = made.find_ready(keys[which], 5) if ready else made._lookup(keys[which], None)
        assert found.tolist() == [row if row in usable else -1 for row in which.tolist()]
        hits = found >= 0
        assert seen[hits].tolist() == [known[row] for row in which[hits].tolist()]


def test_a_repeated_key_is_found_each_time():
    made = table()
    made.insert(keys_of([5]), np.array([3], np.int32))
    assert made.find(keys_of([5, 6, 5])).tolist() == [3, -1, 3]


def test_odd_generations_and_expired_rows_are_not_ready():
    made = table()
    made.insert(keys_of([1, 2, 3, 4]), np.arange(4, dtype=np.int32))
    made.columns.generation[:4] = [1, 2, 2, 0]
    made.columns.expires[:4] = [0, 0, 50, 0]
    assert made.find_ready(keys_of([1, 2, 3, 4]), 49)[0].tolist() == [-1, 1, 2, -1]
    assert made.find_ready(keys_of([1, 2, 3, 4]), 50)[0].tolist() == [-1, 1, -1, -1]


def test_a_row_that_got_another_owner_is_seen_as_changed():
    made = table()
    made.insert(keys_of([1]), np.array([0], np.int32))
    made.columns.generation[0] = 2
    rows, generations = made.find_ready(keys_of([1]), 1)
    made.columns.generation[0] += 1  # the chunk is evicted
    assert not unchanged(made, rows, generations)[0]
    made.columns.generation[0] += 1  # another chunk is written
    assert not unchanged(made, rows, generations)[0]


def test_readers_find_all_keys_while_the_index_is_rebuilt():
    model = Model()
    model.insert(list(range(10)))
    reader = Table(SharedMemory.attach(model.table.memory.path, writable=True))
    for _ in range(3):
        model.rebuild([])
        assert (reader.find(keys_of(range(10))) >= 0).all()


def test_ready_rows_are_found_while_more_rows_are_used():
    interval_s = sys.getswitchinterval()
    made = table(1 << 16)

    def use() -> None:
        for row in range(made.rows_populated):
            made.columns.generation[row] = 2

    thread = threading.Thread(target=use)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            rows = made.ready_rows()
            assert rows.tolist() == list(range(len(rows)))
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()
    assert len(made.ready_rows()) == made.rows_populated


def fill_index(made: Table, rows: int) -> None:
    """Overwrite both copies of the index with entries of all rows but row 0, so that no entry is empty."""
    for copy in made.copies:
        copy[:] = 3 + np.arange(len(copy)) % (rows - 1)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("rows", [ROWS, 5000])
def test_an_index_without_an_empty_entry_is_lost_and_not_searched_for_ever(np_rng, rows):
    made = table(rows)
    keys = np_rng.integers(1, 1 << 63, (3, 2)).astype(np.uint64)
    made.insert(np_rng.integers(1, 1 << 63, (rows, 2)).astype(np.uint64), np.arange(rows, dtype=np.int32))
    made.columns.generation[:] = 2
    fill_index(made, rows)
    one, three = np.array([0], np.int32), np.arange(3, dtype=np.int32)
    for change in (
        lambda: made.find(keys),
        lambda: made.find_ready(keys, 1),
        lambda: made.insert(keys, three),
        lambda: made.insert(keys[:1], one),
        lambda: made.remove(one),
        lambda: made.rebuild_index(np.append(made.index_entries(), one)),
    ):
        with pytest.raises(LostError, match="restart the node"):
            change()
        fill_index(made, rows)


@pytest.mark.parametrize("wrong", [-1, ROWS, (1 << 31) - 1])
def test_rows_outside_the_table_are_not_entered(wrong):
    made = table()
    with pytest.raises(LostError):
        made.rebuild_index(np.array([0, wrong], np.int32))


def test_ticks_begin_at_one_and_do_not_run_backwards():
    made = table()
    assert made.ticks(100.0) == made.ticks(-5.0) == 1
    assert made.ticks(110.0) == 10 * TICKS_PER_S


def test_a_change_that_does_not_finish_leaves_its_mark():
    made = table()
    with made.changing():
        assert made.header["dirty"]
    assert not made.header["dirty"]
    with pytest.raises(KeyError), made.changing():
        raise KeyError
    assert made.header["dirty"]


def test_a_row_costs_what_the_config_says():
    """The cost of a row includes both copies of the index."""
    assert f"{ROW_NBYTES} bytes" in str(StorageConfig.__doc__)
    assert table_nbytes(1 << 20, 1) / (1 << 20) < ROW_NBYTES + 3  # the list of namespaces adds 2 bytes a row


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", 0),
        ("layout_version", 1),
        ("rows", 17),
        ("rows", 1 << 60),
        ("index_size", 3),
        ("active_index", 2),
        ("rows_populated", 17),
        ("extents", 1 << 50),
        ("made_at_s", np.nan),
        ("made_at_s", np.inf),
    ],
)
def test_a_damaged_header_is_refused(field, value):
    made = table()
    np.frombuffer(made.memory.view, HEADER, 1)[0][field] = value
    with pytest.raises(LostError):
        Table(SharedMemory.attach(made.memory.path, writable=True))
