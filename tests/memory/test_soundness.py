"""A table in use that another process has damaged: the header is restored, contradictions are found."""

import pytest

from raykv.errors import DamagedError, LostError
from raykv.memory.layout import RowState
from raykv.memory.reader import ShmReader
from raykv.memory.recovery import require_sound
from raykv.memory.table import RESTORED, Table
from raykv.protocol import codec, messages
from tests.support.stores import Bench


@pytest.fixture
def bench(shm_dir):
    made = Bench.open(shm_dir / "n")
    made.put("abc")
    yield made
    made.store.close()


@pytest.mark.parametrize("field", RESTORED)
def test_the_header_is_restored(bench, field):
    table: Table = bench.store.table
    before = table.header.copy()
    assert table.restore_header() == []
    table.header[field] += 1
    assert table.restore_header() == [field]
    assert table.header.tobytes() == before.tobytes()


def test_changes_of_the_owner_stay(bench):
    table = bench.store.table
    table.rebuild_index(table.ready_rows())
    assert table.populate_rows(table.rows)
    table.header["recording"] = 1
    assert table.restore_header() == []
    assert table.header["recording"] == 1


def test_a_table_in_use_is_sound(bench):
    pinned = bench.pin("a")
    bench.lend(2)
    bench.delete("a")
    require_sound(bench.store.table)
    bench.store.unpin(pinned)
    require_sound(bench.store.table)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", 77),
        ("generation", 0),
        ("generation", 7),
        ("parent", 1 << 30),
        ("parent", -5),
        ("page", (1 << 32) - 1),
        ("nbytes", (1 << 32) - 1),
        ("group", 1000),
    ],
)
def test_contradictions_are_found(bench, column, value):
    table = bench.store.table
    row = bench.row("b")
    getattr(table.columns, column)[row] = value
    with pytest.raises(DamagedError):
        require_sound(table)


def test_two_chunks_in_one_slot_are_found(bench):
    columns = bench.store.table.columns
    one, two = bench.row("a"), bench.row("b")
    columns.page[one] = columns.page[two]
    with pytest.raises(DamagedError, match="one slot"):
        require_sound(bench.store.table)
    columns.state[one] = RowState.LENT
    with pytest.raises(DamagedError, match="one slot"):
        require_sound(bench.store.table)


@pytest.mark.parametrize("made_at_s", [-1.0, float("nan"), float("inf"), 1e300, 1e9])
def test_a_reader_refuses_an_impossible_time(bench, shm_dir, made_at_s):
    bench.store.table.header["made_at_s"] = made_at_s
    with pytest.raises(LostError, match="damaged"):
        ShmReader(str(shm_dir / "n.table"), str(shm_dir / "n.arena"), writable=False)


def test_the_error_is_a_lost_error_for_the_peer():
    assert codec.failure(DamagedError("x")) == messages.Failure("LostError", "x")
