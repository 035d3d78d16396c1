"""Going through a whole table at a start: the compiled loops against numpy's, on random and on damaged tables."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.errors import LostError
from raykv.memory import native, recovery
from raykv.memory.rows import LENT
from raykv.memory.slots import Slots
from raykv.memory.table import RECORD, Table

compiled = pytest.mark.skipif(not native.available, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")

ROWS, EXTENTS, EXTENT_PAGES = 300, 6, 64
STEPS = (1, 2, 3, 7, 64, 0)
"""Pages of a slot, by extent; the last one is free."""
ACCOUNTS = 3
TRIALS = 60

T = TypeVar("T")


def random_table(rng: np.random.Generator) -> Table:
    """Rows in every state that a killed process may leave, some of them without real memory; and an index of them."""
    table = Table.create(None, rows=ROWS, extents=EXTENTS, extent_nbytes=EXTENT_PAGES * PAGE, now_s=0.0)
    table._rows_backed[0] = backed = int(rng.integers(200, ROWS))
    table.extent_slots[:] = np.array(STEPS) * PAGE
    table.namespaces["text"][:ACCOUNTS] = b"{}"
    columns = table.columns
    firsts = [
        extent * EXTENT_PAGES + slot * step
        for extent, step in enumerate(STEPS)
        if step
        for slot in range(EXTENT_PAGES // step)
    ]
    pages = rng.permutation(firsts)[: int(rng.integers(1, len(firsts)))]
    rows = rng.permutation(backed)[: len(pages)].astype(np.int32)
    pages = pages[: len(rows)]
    columns.generation[:backed] = rng.choice([0, 1, 7], backed)  # never used, and free again
    columns.generation[rows] = rng.choice([2, 4, 1 << 31, 3, 0xFFFFFFFF], len(rows))
    columns.page[rows] = pages
    columns.nbytes[rows] = [int(rng.integers(1, STEPS[page // EXTENT_PAGES] * PAGE + 1)) for page in pages.tolist()]
    columns.namespace[rows] = rng.integers(0, ACCOUNTS, len(rows))
    columns.parent[:backed] = rng.integers(-1, backed, backed)
    columns.parent[rows[rng.random(len(rows)) < 0.1]] = LENT
    columns.children[:backed] = rng.integers(-3, 3, backed)
    columns.expires[rows] = rng.choice([0, 0, 0, 9], len(rows)) if rng.random() < 0.5 else 0
    told = rows[columns.parent[rows] != LENT]
    keys = rng.integers(0, 1 << 63, (len(told), 2), dtype=np.uint64)
    table.insert(keys, told)
    gone = told[(columns.generation[told] & 1 == 1) & (rng.random(len(told)) < 0.5)]
    table.remove(gone)
    return table


def some(rng: np.random.Generator, table: Table) -> np.ndarray:
    return rng.integers(0, table.rows_backed, int(rng.integers(1, 4)))


def noise(rng: np.random.Generator, part: np.ndarray, where: np.ndarray) -> None:
    """Overwrite some entries: with anything, or with what is just beyond what they may be."""
    anything = rng.integers(0, 256, len(where) * part.itemsize, np.uint8).view(part.dtype)
    part[where] = anything if rng.random() < 0.5 else part[where] + rng.integers(-1, 2, len(where)).astype(part.dtype)


def damage_all(rng: np.random.Generator, table: Table) -> None:
    for part in vars(table.columns).values():
        noise(rng, part, some(rng, table))


DAMAGES: dict[str, Callable[[np.random.Generator, Table], None]] = {
    "none": lambda rng, table: None,
    "generation": lambda rng, table: noise(rng, table.columns.generation, some(rng, table)),
    "page": lambda rng, table: noise(rng, table.columns.page, some(rng, table)),
    "nbytes": lambda rng, table: noise(rng, table.columns.nbytes, some(rng, table)),
    "no bytes": lambda rng, table: table.columns.nbytes.__setitem__(some(rng, table), 0),
    "parent": lambda rng, table: noise(rng, table.columns.parent, some(rng, table)),
    "namespace": lambda rng, table: noise(rng, table.columns.namespace, some(rng, table)),
    "extents": lambda rng, table: noise(rng, table.extent_slots, rng.integers(0, EXTENTS, 1)),
    "index": lambda rng, table: noise(rng, table.index, rng.integers(0, len(table.index), 3)),
    "everything": damage_all,
}


def both(monkeypatch: pytest.MonkeyPatch, name: str, ask: Callable[[], T]) -> tuple[T, T]:
    """What the compiled loop of that name makes of it, and what numpy does."""
    assert getattr(native, name) is not None
    fast = ask()
    with monkeypatch.context() as patched:
        patched.setattr(native, name, None)
        return fast, ask()


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGES)
def test_both_ways_find_the_same_wrong_with_a_table(np_rng, monkeypatch, how):
    told: Counter[str] = Counter()
    for _ in range(TRIALS):
        table = random_table(np_rng)
        DAMAGES[how](np_rng, table)
        known = table.namespaces["text"] != b""

        def judge(table: Table = table) -> str:
            try:
                recovery.require_sound(table)
            except LostError as error:
                return str(error).partition("damaged: ")[2]
            return ""

        def look(table: Table = table, known: np.ndarray = known) -> tuple[int, bytes]:
            taken = np.zeros(EXTENTS * EXTENT_PAGES, np.bool_)
            way = recovery._look if native.check is None else recovery._look_compiled
            found = way(table, known, taken, slice(3, table.rows_backed))
            return found, taken.tobytes() if found >= 0 else b""

        fast, plain = both(monkeypatch, "check", judge)
        assert fast == plain
        told[plain] += 1
        if "impossible slot sizes" not in plain:
            fast, plain = both(monkeypatch, "check", look)
            assert fast == plain
    expected = {
        "none": {""},
        "page": {"", "two chunks in one slot", *recovery.COMPLAINTS[:3]},
        "no bytes": {"", "chunks without bytes"},
        "parent": {"", "parents that are no rows"},
        "namespace": {"", "chunks of unknown namespaces"},
    }
    assert told.keys() <= expected.get(how, told.keys())
    assert how in ("none", "index") or len(told) > 1


@compiled
def test_both_ways_sort_out_the_same_rows(np_rng, monkeypatch):
    for _ in range(TRIALS):
        table = random_table(np_rng)
        fast, plain = both(monkeypatch, "sort_out", lambda table=table: recovery._sort_out(table))
        cells = table.cells
        ready = [row for row in range(table.rows_backed) if cells.generation[row] and cells.generation[row] % 2 == 0]
        unfinished = [row for row in range(table.rows_backed) if cells.generation[row] % 2 and cells.nbytes[row]]
        brute = ready, unfinished, [row for row in ready if cells.parent[row] == LENT]
        for one, other, expected in zip(fast, plain, brute, strict=True):
            assert one.dtype == other.dtype == np.int32
            assert one.tolist() == other.tolist() == expected


@compiled
@pytest.mark.parametrize("how", ["none", "index", "generation"])
def test_both_ways_see_whether_an_index_is_whole(np_rng, monkeypatch, how):
    told: Counter[bool] = Counter()
    for _ in range(TRIALS):
        table = random_table(np_rng)
        DAMAGES[how](np_rng, table)
        ready, _, published = recovery._sort_out(table)
        ready = np.setdiff1d(ready, published)
        fast, plain = both(
            monkeypatch, "survey", lambda table=table, ready=ready: recovery.removed_entries(table, ready)
        )
        named = Counter((table.index[table.index != 0] - 2).tolist())
        removed = named.pop(-1, 0)
        whole = all(0 <= row < ROWS for row in named) and all(named[row] == 1 for row in ready.tolist())
        assert fast == plain == (removed if whole else -1)
        told[whole] += 1
    assert told[True]
    assert told[False] or how == "none"


@compiled
def test_both_ways_count_the_same_children(np_rng, monkeypatch):
    for _ in range(TRIALS):
        table = random_table(np_rng)
        ready = recovery._sort_out(table)[0]
        columns, backed = table.columns, table.rows_backed
        columns.parent[ready[columns.parent[ready] == LENT]] = -1
        before = columns.parent.copy(), columns.children.copy()

        def count(table: Table = table, ready: np.ndarray = ready, before: tuple = before) -> tuple[list, list]:
            table.columns.parent[:], table.columns.children[:] = before
            recovery._chain(table, ready)
            return table.columns.parent.tolist(), table.columns.children.tolist()

        fast, plain = both(monkeypatch, "chain", count)
        assert fast == plain
        here, parents = set(ready.tolist()), before[0].tolist()
        expected = [parent if row not in here or parent in here else -1 for row, parent in enumerate(parents)]
        assert plain[0] == expected
        counts = Counter(expected[row] for row in here)
        assert plain[1] == [counts[row] for row in range(backed)] + before[1][backed:].tolist()


@compiled
def test_both_ways_derive_the_same_slots(np_rng, monkeypatch):
    for _ in range(TRIALS):
        table = random_table(np_rng)
        ready, unfinished, _ = recovery._sort_out(table)
        rows = np_rng.permutation(np.concatenate([ready, unfinished]))

        def derive(table: Table = table, rows: np.ndarray = rows) -> list:
            column = table.extent_slots.copy()
            made = Slots(column, EXTENT_PAGES * PAGE, lambda extent: True, table.columns.page, rows)
            arrays = made._row_at, made._stack, made._stacked, made._fresh, column
            return [*(array.tolist() for array in arrays), made._open, made._free, made.free_nbytes, made._backed]

        fast, plain = both(monkeypatch, "note_slots", derive)
        assert fast == plain


@compiled
def test_the_compiled_loop_adds_up_what_brute_force_does(np_rng):
    for _ in range(TRIALS):
        table = random_table(np_rng)
        rows, cells = recovery._sort_out(table)[0], table.cells
        used, expected = np.ones(1024, np.int64), Counter[int]()
        for row in rows.tolist():
            expected[cells.namespace[row]] += -(-cells.nbytes[row] // PAGE) * PAGE
        expiring = native.add_up(table.records, table.columns.namespace, rows, used)
        assert expiring is any(cells.expires[row] for row in rows.tolist())
        assert used.tolist() == [1 + expected[group] for group in range(1024)]


@compiled
@pytest.mark.parametrize("wrong", [-1, -(1 << 31), ROWS, (1 << 31) - 1])
def test_rows_that_are_none_are_refused(np_rng, wrong):
    table = random_table(np_rng)
    columns, rows = table.columns, np.array([0, wrong], np.int32)
    columns.page[:] = 0
    used = np.zeros(1024, np.int64)
    with pytest.raises(ValueError, match="no row"):
        native.chain(columns.parent, columns.children, rows)
    with pytest.raises(ValueError, match="no row"):
        native.add_up(table.records, columns.namespace, rows, used)
    with pytest.raises(ValueError, match="no row"):
        Slots(table.extent_slots, EXTENT_PAGES * PAGE, lambda extent: True, columns.page, rows)
    assert native.survey(table.index, table.rows, rows) == -1


@compiled
def test_buffers_of_other_lengths_are_refused(np_rng):
    table = random_table(np_rng)
    columns, short = table.columns, table.columns.parent[:-1]
    rows, known, taken = np.empty(ROWS, np.int32), np.ones(1024, np.bool_), np.zeros(EXTENTS * EXTENT_PAGES, np.bool_)
    slots, records, namespace = table.extent_slots, table.records, columns.namespace
    counts = np.zeros((2, EXTENTS), np.int64)
    with pytest.raises(ValueError, match="bytes where"):
        native.check(records, short, namespace, slots, known, taken, ROWS, EXTENT_PAGES * PAGE)
    with pytest.raises(ValueError, match="bytes where"):
        native.check(records, columns.parent, namespace, slots, known, taken[:-1], ROWS, EXTENT_PAGES * PAGE)
    with pytest.raises(ValueError, match="bytes where"):
        native.sort_out(records[RECORD.itemsize :], columns.parent, rows, rows, rows)
    with pytest.raises(ValueError, match="bytes where"):
        native.chain(columns.parent, short, rows)
    with pytest.raises(ValueError, match="bytes where"):
        native.add_up(records, namespace[1:], rows, np.zeros(1024, np.int64))
    with pytest.raises(ValueError, match="no slot"):  # page 0 would be in no extent
        native.note_slots(rows[:0], slots, columns.page, np.zeros(1, np.int32), *counts)
    with pytest.raises(ValueError, match="bytes where"):
        native.note_slots(rows, slots, columns.page, np.zeros(1, np.int32), counts[0][:1], counts[1])


def test_a_chunk_that_was_taken_in_is_found_while_the_index_is_made_anew(monkeypatch):
    """Its writer, to whom the row is lent, had not told the rest when the node was killed in the middle of a change."""
    table = Table.create(None, rows=64, extents=1, extent_nbytes=64 * PAGE, now_s=0.0)
    table.populate_rows(64)
    columns, keys = table.columns, np.array([[1, 2], [1, 2], [3, 4]], np.uint64)
    rows = np.array([5, 6, 7], np.int32)
    columns.generation[rows], columns.page[rows], columns.nbytes[rows] = 2, rows, PAGE
    columns.parent[rows] = LENT
    columns.key_hi[rows], columns.key_lo[rows] = keys[:, 0], keys[:, 1]  # 6: published twice, not taken in
    table.insert(keys[[0, 2]], rows[[0, 2]])
    table._header["dirty"] = 1
    rebuild, found = table.rebuild_index, []

    def watched(entered):
        rebuild(entered)
        found.append(table.find(keys).tolist())

    monkeypatch.setattr(table, "rebuild_index", watched)
    recovery.take_over(table)
    assert found == [[5, 5, 7]]
    assert table.find(keys).tolist() == [5, 5, 7]
    assert (columns.generation[rows] & 1).tolist() == [0, 1, 0]
