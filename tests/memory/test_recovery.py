"""Recovery of sound and damaged tables, compared with brute force: row by row, with dicts."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.errors import DamagedError, LostError
from raykv.memory import free_rows, recovery
from raykv.memory.layout import RowState
from raykv.memory.slots import slot_nbytes
from raykv.memory.table import Table

ROWS, EXTENTS, EXTENT_PAGES = 300, 6, 64
STEPS = (1, 2, 3, 7, 64, 0)
"""Pages per slot in each extent. 0 means that the extent is free."""
GROUPS = 3
TRIALS = 60


def small_table(rows: int = 64) -> Table:
    """A table with one extent of one-page slots. Row n has slot n."""
    table = Table.create(None, rows=rows, extents=1, extent_nbytes=rows * PAGE, now_s=0.0)
    table.populate_rows(rows)
    table.extent_slots[0] = PAGE
    table.namespaces["text"][0] = b"{}"
    table.columns.page[:] = np.arange(rows)
    table.columns.nbytes[:] = PAGE
    table.columns.parent[:] = -1
    return table


def random_table(rng: np.random.Generator) -> Table:
    """A table and its index, with rows in every state that a killed process may leave. The last rows lack memory."""
    table = Table.create(None, rows=ROWS, extents=EXTENTS, extent_nbytes=EXTENT_PAGES * PAGE, now_s=0.0)
    table._rows_populated[0] = populated = int(rng.integers(200, ROWS))
    table.extent_slots[:] = np.array(STEPS) * PAGE
    table.namespaces["text"][:GROUPS] = b"{}"
    columns = table.columns
    firsts = [
        extent * EXTENT_PAGES + slot * step
        for extent, step in enumerate(STEPS)
        if step
        for slot in range(EXTENT_PAGES // step)
    ]
    rows = rng.permutation(populated)[: int(rng.integers(1, len(firsts)))].astype(np.int32)
    pages = rng.permutation(firsts)[: len(rows)]
    columns.generation[:populated] = rng.choice([0, 1, 7], populated)  # 0: never used; odd: used and freed
    columns.generation[rows] = rng.choice([2, 4, 1 << 31, 3, 0xFFFFFFFF], len(rows))
    odd = columns.generation[rows] & 1 == 1
    columns.state[rows] = np.where(
        odd, rng.choice([RowState.LENT, RowState.READY, RowState.QUARANTINED], len(rows)),
        rng.choice([RowState.READY, RowState.READY, RowState.LENT, RowState.PENDING_DELETE], len(rows)),
    )  # fmt: skip
    columns.page[rows] = pages
    sizes = np.array([STEPS[page // EXTENT_PAGES] * PAGE for page in pages.tolist()])
    columns.nbytes[rows] = sizes - rng.integers(0, PAGE, len(rows))
    columns.group[rows] = rng.integers(0, GROUPS, len(rows))
    columns.pins[:populated] = rng.integers(0, 3, populated)
    columns.parent[:populated] = rng.integers(-1, populated, populated)
    columns.depth[:populated] = rng.integers(0, 3, populated)
    linked = np.maximum(columns.parent[:populated], 0)
    columns.parent_generation[:populated] = np.where(
        rng.random(populated) < 0.8, columns.generation[linked], rng.integers(0, 9, populated)
    )
    columns.children[:populated] = rng.integers(-3, 3, populated)
    indexed = rows[~odd & (columns.state[rows] != RowState.PENDING_DELETE)]
    keys = rng.integers(0, 1 << 63, (len(indexed) + 30, 2), dtype=np.uint64)
    table.insert(keys[: len(indexed)], indexed)
    others = np.flatnonzero(columns.generation[:populated] & 1)[:30].astype(np.int32)
    table.insert(keys[len(indexed) : len(indexed) + len(others)], others)
    table.remove(others)  # so that the index has entries marked as removed
    return table


def brute_states(table: Table) -> tuple[list[int], list[int]]:
    """List the rows that are ready after a start, and those that are quarantined."""
    cells, ready, quarantined = table.cells, [], []
    for row in range(table.rows_populated):
        generation, state = cells.generation[row], cells.state[row]
        if generation % 2:
            if state != RowState.FREE:
                quarantined.append(row)
        elif generation and state != RowState.PENDING_DELETE:
            ready.append(row)
    return ready, quarantined


def brute_problem(table: Table) -> str:
    """Return the problem that recovery must report: "" for none, "any" if it may report any one of several problems."""
    cells, sizes = table.cells, table.extent_slots.tolist()
    if any(size % PAGE or size > EXTENT_PAGES * PAGE for size in sizes):
        return "extents of impossible slot sizes"
    known = table.known_namespaces.tolist()
    used: Counter[int] = Counter()
    for row in range(table.rows_populated):
        generation, state, page = cells.generation[row], cells.state[row], cells.page[row]
        if state > max(RowState):
            return "any"
        if not generation or state == (RowState.FREE if generation % 2 else RowState.PENDING_DELETE):
            continue
        extent, within = divmod(page, EXTENT_PAGES)
        if extent >= EXTENTS or not sizes[extent]:
            return "any"
        step = sizes[extent] // PAGE
        if within % step or within + step > EXTENT_PAGES or not 0 <= step * PAGE - cells.nbytes[row] < PAGE:
            return "any"
        if cells.group[row] >= len(known) or not known[cells.group[row]]:
            return "any"
        used[page] += 1
    return "two chunks in one slot" if used and max(used.values()) > 1 else ""


def some(rng: np.random.Generator, table: Table) -> np.ndarray:
    return rng.integers(0, table.rows_populated, int(rng.integers(1, 4)))


def noise(rng: np.random.Generator, part: np.ndarray, where: np.ndarray) -> None:
    """Overwrite the entries of `part` at `where` with random bytes, or add -1, 0 or 1 to each."""
    anything = rng.integers(0, 256, len(where) * part.itemsize, np.uint8).view(part.dtype)
    part[where] = anything if rng.random() < 0.5 else part[where] + rng.integers(-1, 2, len(where)).astype(part.dtype)


def damage_all(rng: np.random.Generator, table: Table) -> None:
    for part in vars(table.columns).values():
        noise(rng, part, some(rng, table))


DAMAGES: dict[str, Callable[[np.random.Generator, Table], None]] = {
    "none": lambda rng, table: None,
    "generation": lambda rng, table: noise(rng, table.columns.generation, some(rng, table)),
    "state": lambda rng, table: noise(rng, table.columns.state, some(rng, table)),
    "page": lambda rng, table: noise(rng, table.columns.page, some(rng, table)),
    "nbytes": lambda rng, table: noise(rng, table.columns.nbytes, some(rng, table)),
    "no bytes": lambda rng, table: table.columns.nbytes.__setitem__(some(rng, table), 0),
    "parent": lambda rng, table: noise(rng, table.columns.parent, some(rng, table)),
    "group": lambda rng, table: noise(rng, table.columns.group, some(rng, table)),
    "extents": lambda rng, table: noise(rng, table.extent_slots, rng.integers(0, EXTENTS, 1)),
    "everything": damage_all,
}
PROBLEMS = {
    "none": {""},
    "page": {"", "two chunks in one slot", "chunks outside the arena", "chunks off their slots"},
    "nbytes": {"", "chunks that do not fit their slots"},
    "no bytes": {"", "chunks that do not fit their slots"},
    "parent": {""},
    "group": {"", "chunks of unknown namespaces"},
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_table_that_contradicts_itself_is_refused(np_rng, monkeypatch, how):
    monkeypatch.setattr(free_rows, "BLOCK_ROWS", 64)
    seen: Counter[str] = Counter()
    for _ in range(TRIALS):
        table = random_table(np_rng)
        DAMAGES[how](np_rng, table)
        expected, before = brute_problem(table), bytes(table.memory.view)
        try:
            recovery.recover(table)
            found = ""
        except LostError as error:
            found = str(error).partition("damaged: ")[2]
            assert table.memory.view == before
        assert found == expected or (found and expected == "any")
        seen[found] += 1
    assert seen.keys() <= PROBLEMS.get(how, seen.keys())
    assert how in ("none", "parent") or len(seen) > 1


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dirty", [False, True])
def test_what_was_committed_stays_and_everything_else_goes(np_rng, dirty):
    for _ in range(TRIALS):
        table = random_table(np_rng)
        columns = table.columns
        ready, quarantined = brute_states(table)
        table.header["dirty"] = dirty
        if dirty:  # the kill has left a half-changed index
            noise(np_rng, table.index, np_rng.integers(0, len(table.index), 5))
        keys = np.stack([columns.key_hi, columns.key_lo], axis=1)[ready]
        before = {name: part.copy() for name, part in vars(columns).items()}
        incarnation = int(table.header["incarnation"])
        found = recovery.recover(table)
        assert found.ready.dtype == found.quarantined.dtype == np.int32
        assert (found.ready.tolist(), found.quarantined.tolist()) == (ready, quarantined)
        assert found.expiring == any(before["expires"][[*ready, *quarantined]])
        used: Counter[int] = Counter()
        for row in (*ready, *quarantined):
            used[int(columns.group[row])] += slot_nbytes(int(columns.nbytes[row]))
        assert found.used_nbytes[:GROUPS].tolist() == [used[group] for group in range(GROUPS)]
        assert not table.header["dirty"]
        assert table.header["incarnation"] == incarnation + 1
        states = [RowState.FREE] * table.rows_populated
        for row in ready:
            states[row] = RowState.READY
        for row in quarantined:
            states[row] = RowState.QUARANTINED
        assert columns.state[: table.rows_populated].tolist() == states
        assert not columns.pins.any()
        assert table.ready_rows().tolist() == ready
        assert sorted(table.index_entries().tolist()) == ready
        assert table.find(keys).tolist() == ready
        assert table.removed == np.count_nonzero(table.index == 1)
        for name in ("page", "nbytes", "group", "checksum", "depth"):
            assert (getattr(columns, name) == before[name]).all()
        assert (columns.generation[ready] == before["generation"][ready]).all()
        children: Counter[int] = Counter()
        for row in ready:
            above, depth = int(before["parent"][row]), int(before["depth"][row])
            live = above >= 0 and above in ready and before["parent_generation"][row] == before["generation"][above]
            live = live and depth == before["depth"][above] + 1
            assert columns.parent[row] == (above if live else -1)
            children[above] += live
        assert columns.children[: table.rows_populated].tolist() == [children[row] for row in range(len(states))]


@pytest.mark.parametrize("how", ["removed", "row", "outside", "twice", "swapped"])
def test_an_index_that_does_not_name_each_ready_row_once_is_rebuilt(np_rng, how):
    table = small_table()
    keys = np_rng.integers(0, 1 << 63, (40, 2), dtype=np.uint64)
    rows = np.arange(40, dtype=np.int32)
    table.insert(keys, rows)
    table.columns.generation[rows] = 2
    table.columns.state[rows] = RowState.READY
    places = np.flatnonzero(table.index >= 2)
    if how == "removed":
        table.index[places[3]] = 1
    elif how == "row":
        table.index[places[3]] = 2 + 50
    elif how == "outside":
        table.index[places[3]] = -5
    elif how == "twice":
        table.index[places[3]] = table.index[places[4]]
    else:
        entries = table.index[places]
        table.index[[places[entries == 10][0], places[entries == 21][0]]] = [11, 20]  # the sum and XOR stay the same
    assert not table.header["dirty"]
    assert recovery.recover(table).ready.tolist() == rows.tolist()
    assert table.find(keys).tolist() == rows.tolist()


def test_readers_find_every_chunk_while_the_index_is_rebuilt(monkeypatch):
    """The index is rebuilt because the node was killed in the middle of a change."""
    table = small_table()
    rows, keys = np.array([5, 6, 7], np.int32), np.array([[1, 2], [5, 6], [3, 4]], np.uint64)
    table.insert(keys, rows)
    table.columns.generation[rows] = [2, 3, 2]
    table.columns.state[rows] = RowState.READY  # the node was killed before row 6's generation became even
    table.header["dirty"] = 1
    rebuild, found = table.rebuild_index, []

    def watched(entered):
        rebuild(entered)
        found.append(table.find(keys).tolist())

    monkeypatch.setattr(table, "rebuild_index", watched)
    recovered = recovery.recover(table)
    assert found == [[5, -1, 7]]
    assert (recovered.ready.tolist(), recovered.quarantined.tolist()) == ([5, 7], [6])


def test_a_link_whose_depths_do_not_agree_is_dropped():
    """Where a chunk's depth is not its parent's depth plus one, the link to the parent is wrong."""
    table = small_table()
    columns, rows = table.columns, np.arange(4, dtype=np.int32)
    table.insert(np.arange(1, 9, dtype=np.uint64).reshape(4, 2), rows)
    columns.generation[rows], columns.state[rows] = 2, RowState.READY
    columns.parent[rows], columns.parent_generation[rows] = rows - 1, 2
    columns.depth[rows] = [0, 1, 7, 8]
    recovery.recover(table)
    assert columns.parent[rows].tolist() == [-1, 0, -1, 2]
    assert columns.children[rows].tolist() == [1, 0, 1, 0]
    assert columns.depth[rows].tolist() == [0, 1, 7, 8]


def test_a_table_without_rows_in_memory_is_refused():
    """A node that is killed while it makes its table leaves one. The next node must start empty, not fail."""
    table = small_table()
    table._rows_populated[0] = 0
    with pytest.raises(LostError, match="no rows"):
        recovery.recover(table)
    with pytest.raises(DamagedError, match="no rows"):
        recovery.require_sound(table)


def test_slots_are_derived_from_the_rows(np_rng):
    for _ in range(TRIALS):
        table = random_table(np_rng)
        ready, quarantined = brute_states(table)
        rows, pages = np.array(ready + quarantined, np.int32), table.columns.page
        slots, column, free = recovery.recover(table).slots, table.extent_slots, 0
        for extent, step in enumerate(STEPS):
            mine = sorted(row for row in rows.tolist() if pages[row] // EXTENT_PAGES == extent)
            assert sorted(slots.rows_in(extent).tolist()) == mine
            assert column[extent] == step * PAGE, "an extent that has memory is no longer known to have it"
            free += (EXTENT_PAGES // step - len(mine)) * step * PAGE if mine else EXTENT_PAGES * PAGE
        assert slots.free_nbytes == free
