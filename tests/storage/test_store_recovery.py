"""What the next process finds: after a kill at any moment, after damage, or with another configuration."""

import logging
import os
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.errors import UsageError
from raykv.memory.layout import HEADER, QUARANTINE_S, RowState
from raykv.storage.files import remove_files, store_files
from raykv.storage.store import Store
from tests.support.stores import KIB, Bench, check, config_for, crashed, names_to_keys, reopen, states


@pytest.fixture
def on_files(shm_dir):
    made = Bench.open(shm_dir / "n")
    yield made
    made.store.close()


@pytest.mark.parametrize("dirty", [False, True])
def test_a_killed_process_loses_only_what_was_not_committed(on_files, shm_dir, dirty):
    on_files.put("abc")
    on_files.put("xyz", 3 * PAGE, parent="c")
    on_files.fill(on_files.lend(3), "pqr")
    on_files.pin("ab")
    on_files.delete("z")
    with on_files.store.table.changing() if dirty else nullcontext():
        prefix = crashed(on_files.store, shm_dir, "again")
    again = reopen(prefix, on_files.now_s)
    assert again.here("abcxyzpqr") == "abcxy"
    assert again.store.recovered == again.store.chunks == 5
    assert again.store.table.header["incarnation"] == on_files.store.table.header["incarnation"] + 1
    assert again.group == on_files.group
    assert not again.store.table.columns.pins.any(), "a pin ends with its connection"
    assert again.column("children", "cx") == [1, 1]
    assert again.delete("ab") == 2
    assert again.store.ready_keys().shape == (3, 2)
    again.close()


def test_what_was_deleted_while_pinned_is_gone_after_a_crash(on_files, shm_dir):
    on_files.put("abc", 64 * KIB)
    on_files.pin("ab")
    on_files.delete("a")
    again = reopen(crashed(on_files.store, shm_dir, "again"), on_files.now_s)
    assert again.here("abc") == "bc"
    assert again.store.used_nbytes == 2 * 64 * KIB
    assert again.put([f"n{number}" for number in range(14)], 64 * KIB) == 14
    again.close()


def test_lent_slots_are_quarantined_after_a_crash(on_files, shm_dir):
    on_files.put("ab")
    on_files.delete("b")
    lent = on_files.lend(15, 64 * KIB)  # one of these rows had a key before
    prefix = crashed(on_files.store, shm_dir, "again")
    for life in range(2):  # the quarantine outlasts two crashes
        again = reopen(prefix, on_files.now_s)
        assert again.here("ab") == ("" if life else "a")  # in the first round, the put of "1" evicts "a"
        assert again.store.lent_nbytes == 0
        assert again.put("12", 64 * KIB, chained=False) == 1
        assert again.column("page", "1")[0] * PAGE not in set(lent.offsets.tolist())
        again.delete("12")
        again.store.close()
    again = reopen(prefix, on_files.now_s)
    again.now_s += QUARANTINE_S
    assert again.put("345", 64 * KIB) == 3
    again.close()


def test_processes_that_die_one_after_the_other_do_not_keep_slots_in_quarantine_for_ever(shm_dir, on_files):
    """A quarantine continues in the next process. It ends when it would have ended without the crash."""
    bench, opened = on_files, []
    lent = bench.lend(4, 64 * KIB)
    for life in range(3):
        prefix = crashed(bench.store, shm_dir, f"life-{life}")
        bench = reopen(prefix, bench.now_s + QUARANTINE_S / 4)
        opened.append(bench.store)
        bench.lend(1, 64 * KIB)
        assert set(lent.rows.tolist()) <= set(states(bench.store)[RowState.QUARANTINED])
        assert len(states(bench.store)[RowState.QUARANTINED]) == 4 + life
    bench.store.evict_ahead(now_s=bench.now_s + QUARANTINE_S / 4)
    assert len(states(bench.store)[RowState.QUARANTINED]) == 2, "those of the first process are back, no others"
    check(bench.store)
    bench.store.evict_ahead(now_s=bench.now_s + QUARANTINE_S * 5 / 4)
    assert not states(bench.store)[RowState.QUARANTINED]
    for store in opened:
        store.close()


class WatchedCells:
    """A memoryview that calls `before` ahead of each write."""

    def __init__(self, cells: memoryview, before) -> None:
        self._cells, self._before = cells, before

    def __getitem__(self, index):
        return self._cells[index]

    def __setitem__(self, index, value):
        self._before()
        self._cells[index] = value


def change(bench: Bench, how: str) -> None:
    match how:
        case "lend and commit":
            bench.put("vwxyz", 32 * KIB, parent="n")
        case "delete":
            bench.delete("bdn")
        case "delete pinned":
            pinned = bench.pin("bdn")
            bench.delete("bdn")
            bench.store.unpin(pinned)
        case "quarantine":
            lent = bench.lend(3, 32 * KIB)
            bench.store.quarantine(lent.rows, now_s=bench.now_s)
            bench.store.evict_ahead(now_s=bench.now_s + QUARANTINE_S)


@pytest.mark.parametrize("how", ["lend and commit", "delete", "delete pinned", "quarantine"])
def test_a_crash_at_any_write_of_a_change(shm_dir, how, monkeypatch):
    """Kill the process before each single write of a change. The next process must find a sound table.

    To see each write, the test wraps the arrays of the table and the array of slot sizes.
    """
    monkeypatch.setattr("raykv.memory.native.loops", None)
    bench = Bench.open(shm_dir / "n")
    bench.put("abcdefghijklmn", 64 * KIB)
    moments: list[Path] = []

    def take_moment() -> None:
        moments.append(crashed(bench.store, shm_dir, f"moment-{len(moments)}"))

    class Watched(np.ndarray):
        def __setitem__(self, index, value):
            take_moment()
            super().__setitem__(index, value)

    table = bench.store.table
    for name in vars(table.columns):
        setattr(table.columns, name, getattr(table.columns, name).view(Watched))
        setattr(table.cells, name, WatchedCells(getattr(table.cells, name), take_moment))
    table.copies = [index.view(Watched) for index in table.copies]
    table._copy_cells = [WatchedCells(cells, take_moment) for cells in table._copy_cells]
    bench.store.allocator.slots._extent_slots = table.extent_slots.view(Watched)
    change(bench, how)
    check(bench.store)
    assert len(moments) > 6
    for moment in moments:
        again = reopen(moment, bench.now_s)
        assert again.store.recovered == len(again.here("abcdefghijklmnvwxyz")), "bytes and keys of all that is ready"
        assert len(again.here("abcdefghijklmn")) >= 14 - 3  # a change evicts or deletes at most three chunks
        again.now_s += 2 * QUARANTINE_S
        assert again.put("12345", 32 * KIB) == 5
        assert set(again.here("12345")) == set("12345")
        again.close()
        remove_files(moment)
    bench.close()


def test_another_configuration_starts_empty(on_files, shm_dir):
    on_files.put("abc")
    for name, fields in {"rows": {"max_chunks": 32}, "extents": {"extent_nbytes": 32 * KIB}}.items():
        again = reopen(crashed(on_files.store, shm_dir, name), on_files.now_s, **fields)
        assert again.store.recovered == 0
        assert again.put("abc") == 3
        again.close()


def test_a_table_whose_times_are_about_to_wrap_starts_empty(on_files, shm_dir):
    on_files.put("abc")
    again = reopen(crashed(on_files.store, shm_dir, "old"), on_files.now_s + 2 * 365 * 86_400)
    assert again.store.recovered == 0
    again.close()


def test_one_writer_at_a_time(on_files, shm_dir, monkeypatch):
    monkeypatch.setattr("raykv.storage.files.OWN_TIMEOUT_S", 0.0)
    with pytest.raises(UsageError, match="another process serves"):
        Store.open(config_for(shm_dir), shm_dir / "n", now_s=0.0)
    on_files.put("abc")
    assert on_files.here("abc") == "abc"


def damage(path: Path, how: str, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    match how:
        case "empty":
            raw.clear()
        case "short":
            del raw[rng.randrange(1, len(raw)) :]
        case "zeros":
            raw[:] = bytes(len(raw))
        case "random":
            raw[:] = rng.randbytes(len(raw))
        case "random behind the header":
            raw[HEADER.itemsize :] = rng.randbytes(len(raw) - HEADER.itemsize)
        case "a hole":
            start = rng.randrange(0, len(raw))
            stop = min(len(raw), start + rng.choice([1, 8, 100, 5000]))
            raw[start:stop] = rng.randbytes(stop - start)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "short", "zeros", "random", "random behind the header", "missing"),
        pytest.param("a hole", marks=pytest.mark.slow),  # slow, because it tries 30 places
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_damaged_files_start_empty_or_lose_chunks_and_never_crash(shm_dir, on_files, which, how, rng):
    on_files.put("abcdefgh")
    on_files.put("xyz", 5 * PAGE)
    for attempt in range(30 if how == "a hole" else 3):
        prefix = crashed(on_files.store, shm_dir, f"damaged-{attempt}")
        if how == "missing":
            os.unlink(store_files(prefix)[which])
        else:
            damage(store_files(prefix)[which], how, rng)
        again = Bench.open(prefix, now_s=on_files.now_s)
        again.now_s += QUARANTINE_S
        for number in range(6):
            names = [f"new-{number}-{place}" for place in range(40)]
            again.put(names, rng.choice([PAGE, 3 * PAGE]))
            again.store.unpin(again.pin(names))
            again.verify([*names, *"abcdefghxyz"])
            again.delete(names[:20])
            again.store.evict_ahead(now_s=again.now_s)
        assert again.here(names[20:])
        again.store.close()
        remove_files(prefix)


def test_damaged_columns_one_by_one(shm_dir, on_files, np_rng):
    """Overwrite one part at a time with noise: each column, the slot sizes of the extents, and the index."""
    on_files.put("abcdefgh")
    table = on_files.store.table
    parts = {**vars(table.columns), "extents": table.extent_slots, "index": table.index}
    for name, part in parts.items():
        before = part.copy()
        part[:] = np_rng.integers(0, 256, part.nbytes, np.uint8).view(part.dtype)
        prefix = crashed(on_files.store, shm_dir, "damaged")
        part[:] = before
        again = Bench.open(prefix, now_s=on_files.now_s)
        again.put([f"{name}-{place}" for place in range(40)])
        again.store.close()
        remove_files(prefix)


@pytest.mark.parametrize("text", [b"{", b'{"model": ""}', b"\xff\xfe", b'{"model": "\xff"}'])
def test_a_list_of_namespaces_that_is_damaged_starts_empty(shm_dir, on_files, text):
    on_files.put("abcdefgh")
    on_files.store.table.namespaces["text"][0] = text
    again = Store.open(config_for(shm_dir), crashed(on_files.store, shm_dir, "damaged"), now_s=on_files.now_s)
    assert again.recovered == 0
    again.close()


def test_nothing_is_left_open_when_a_file_is_refused(shm_dir, on_files, caplog):
    caplog.set_level(logging.INFO)  # pytest keeps the log records, and they must not hold a file open
    on_files.put("abc")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        prefix = crashed(on_files.store, shm_dir, f"n{number}")
        damage(store_files(prefix)[0], "zeros", random.Random(number))
        Store.open(config_for(shm_dir), prefix, now_s=0.0).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_the_expiry_of_hints_outlives_the_process(on_files, shm_dir):
    on_files.put("abcd", hints={"ttl_s": 5.0, "priority": 9})
    again = reopen(crashed(on_files.store, shm_dir, "again"), on_files.now_s)
    assert again.store.row_hints.active
    rows = again.store.table.find(names_to_keys("abcd"))
    assert not again.store.row_hints.ranks(rows, again.store.table.ticks(again.now_s)).any()
    again.now_s += 10.0
    assert again.here("abcd") == ""
    again.close()
