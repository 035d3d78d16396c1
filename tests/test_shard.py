"""One node's storage: reserve, commit, pin, evict, recover."""

import hashlib
import logging
import os
import random
from pathlib import Path

import numpy as np
import pytest

from raykv import keys as keys_
from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import StorageConfig
from raykv.errors import CapacityError, LostError, UsageError
from raykv.memory.copying import checksum_of
from raykv.memory.slots import slot_nbytes
from raykv.memory.table import _HEADER, MAX_NAMESPACES
from raykv.namespace import Namespace
from raykv.shard import MAX_PINS, QUARANTINE_S, Reserved, Shard, remove_files, shard_files

SPACE = Namespace(model="m")
KIB = 1 << 10


def config_for(path: Path | None = None, **fields) -> StorageConfig:
    """16 extents of 64 KiB."""
    made = {"arena_nbytes": 1 << 20, "extent_nbytes": 64 * KIB, "max_chunks": 64, "shm_dir": path, **fields}
    return StorageConfig.load(made)


def names_to_keys(names) -> np.ndarray:
    return keys_.named(SPACE.digest, names)


def content(name: str, nbytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(nbytes)


class Bench:
    """A shard with a clock of its own, used by names."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.now_s = 1.0
        self.account = shard.open_account(SPACE)

    def reserve(self, names: str | list[str], nbytes: int = PAGE, *, account: int | None = None, **chain) -> Reserved:
        chain = {"chained": True, "parent": None, "depth": 0, **chain}
        if chain["parent"] is not None:
            chain["parent"] = names_to_keys([chain["parent"]])
        self.now_s += 1.0
        number = self.account if account is None else account
        return self.shard.reserve(names_to_keys(names), nbytes, number, now_s=self.now_s, **chain)

    def write(self, names: str | list[str], room: Reserved, nbytes: int = PAGE) -> None:
        view = self.shard.arena.view
        pieces = [view[start : start + nbytes] for start in room.offsets.tolist()]
        for place, piece in zip(room.positions.tolist(), pieces, strict=True):
            piece[:] = content(names[place], nbytes)
        self.shard.commit(room.rows, np.array([checksum_of([p]) for p in pieces], np.uint64), now_s=self.now_s)

    def put(self, names: str | list[str], nbytes: int = PAGE, **options) -> int:
        room = self.reserve(names, nbytes, **options)
        self.write(names, room, nbytes)
        return len(room.rows)

    def here(self, names: str | list[str]) -> str:
        """Those names that can be read, checked byte by byte."""
        rows, _ = self.shard.table.find_ready(names_to_keys(names), self.shard.table.ticks(self.now_s))
        columns, found = self.shard.table.columns, []
        for name, row in zip(names, rows.tolist(), strict=True):
            if row >= 0:
                start, nbytes = int(columns.page[row]) * PAGE, int(columns.nbytes[row])
                assert bytes(self.shard.arena.view[start : start + nbytes]) == content(name, nbytes), name
                found.append(name)
        return "".join(found)

    def row(self, name: str) -> int:
        return int(self.shard.table.find(names_to_keys([name]))[0])


@pytest.fixture
def bench():
    made = Bench(Shard.open(config_for(), None, now_s=0.0))
    yield made
    check_invariants(made.shard)
    made.shard.close()


def check_invariants(shard: Shard) -> None:
    """What must hold between any two calls, told from the columns alone."""
    columns, table = shard.table.columns, shard.table
    assert not table.dirty
    taken = np.flatnonzero(columns.nbytes > 0)
    quarantined = {row for _, rows in shard._quarantine for row in rows.tolist()}
    live = [row for row in taken.tolist() if row not in quarantined]
    owner: dict[int, int] = {}
    for row in taken.tolist():
        size = slot_nbytes(int(columns.nbytes[row]))
        first = int(columns.page[row])
        assert table.extent_slots[first * PAGE // table.extent_nbytes] == size
        for page in range(first, first + size // PAGE):
            assert owner.setdefault(page, row) == row, "two chunks in one place"
    assert max(owner, default=0) < shard.arena.nbytes // PAGE
    assert sorted(shard._free_rows) == [row for row in range(table.rows) if row not in set(taken.tolist())]
    assert sorted(table.index_entries().tolist()) == live
    used = np.zeros(MAX_NAMESPACES, np.int64)
    for row in live:
        used[columns.namespace[row]] += slot_nbytes(int(columns.nbytes[row]))
    assert shard._used_nbytes.tolist() == used.tolist()
    assert shard.used_nbytes == used.sum()
    per_extent = np.bincount(columns.page[taken] * PAGE // table.extent_nbytes, minlength=table.extents)
    assert shard._slots.used(np.arange(table.extents)).tolist() == per_extent.tolist()
    children = np.zeros(table.rows, np.int64)
    for row in live:
        parent = int(columns.parent[row])
        assert parent == -1 or parent in live
        if parent >= 0:
            children[parent] += 1
    assert columns.children.tolist() == children.tolist()
    keys = {(int(columns.key_hi[row]), int(columns.key_lo[row])) for row in live}
    assert len(keys) == len(live), "a key twice"


# -- writing ----------------------------------------------------------------------------------------------------------


def test_reserved_is_invisible_until_committed(bench):
    room = bench.reserve("abc")
    assert room.positions.tolist() == [0, 1, 2]
    assert bench.here("abc") == ""
    assert bench.shard.chunks == 0
    bench.write("abc", room)
    assert bench.here("abc") == "abc"
    assert bench.shard.chunks == 3


def test_what_is_held_or_being_written_is_left_out(bench):
    bench.put("ab")
    writing = bench.reserve("abcd")
    assert writing.positions.tolist() == [2, 3]
    assert bench.reserve("abcdef").positions.tolist() == [4, 5]
    bench.write("abcd", writing)
    assert bench.here("abcdef") == "abcd"


def test_a_repeated_key_gets_room_once(bench):
    assert bench.reserve("abab").positions.tolist() == [0, 1]


def test_abort_gives_room_back(bench):
    room = bench.reserve("abc", 64 * KIB)
    before = bench.shard.used_nbytes
    bench.shard.abort(room.rows)
    assert (before, bench.shard.used_nbytes) == (3 * 64 * KIB, 0)
    assert bench.put("abc", 64 * KIB) == 3


@pytest.mark.parametrize("nbytes", [-1, 0, 64 * KIB + 1, 1 << 40])
def test_sizes_that_fit_no_extent(bench, nbytes):
    with pytest.raises(UsageError, match="extent_nbytes"):
        bench.reserve("a", nbytes)


def test_chains_are_linked_and_depth_comes_from_the_parent(bench):
    bench.put("abc")
    bench.put("de", parent="c", depth=99)
    bench.put("xy", parent="gone", depth=7)
    bench.put("pq", chained=False)
    columns = bench.shard.table.columns
    rows = {name: bench.row(name) for name in "abcdexypq"}
    name_of = {row: name for name, row in rows.items()} | {-1: "-"}
    assert "".join(name_of[int(columns.parent[row])] for row in rows.values()) == "-abcd-x--"
    assert [int(columns.depth[row]) for row in rows.values()] == [0, 1, 2, 3, 4, 7, 8, 0, 0]


def test_a_chain_may_branch_and_be_filled_in(bench):
    bench.put("ab")
    bench.put("abxy")
    bench.put("abz", chained=True)
    assert int(bench.shard.table.columns.children[bench.row("b")]) == 2


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_coldest_go_first_and_the_head_of_what_is_written_stays(bench):
    for name in "abcdefghijklmnop":
        assert bench.put(name, 64 * KIB) == 1
    assert bench.put("aXY", 64 * KIB) == 2
    assert bench.here("abcdefghijklmnopXY") == "adefghijklmnopXY"
    assert bench.shard.counters.evicted == 2


def test_when_nothing_may_go_the_first_ones_get_the_room(bench):
    bench.put("abcdefghijklm", 64 * KIB)
    bench.shard.pin(names_to_keys("abcdefghijklm"), now_s=bench.now_s)
    room = bench.reserve("vwxyz", 64 * KIB)
    assert (room.positions.tolist(), room.full) == ([0, 1, 2], 2)
    assert bench.shard.counters.refused_full == 2
    assert bench.reserve("Q", PAGE).full == 1


def test_rows_run_out_before_room_does(bench):
    names = [f"n{i}" for i in range(70)]
    assert bench.put(names) == 64
    assert bench.put(["more"]) == 1
    assert bench.shard.chunks == 64


def test_a_size_takes_extents_from_another(bench):
    assert bench.put([f"s{i}" for i in range(16)], 64 * KIB) == 16
    assert bench.put([f"t{i}" for i in range(8)], 32 * KIB) == 8  # four extents, of the coldest
    assert bench.put([f"u{i}" for i in range(3)], 40 * KIB) == 3
    assert bench.put([f"s{i}" for i in range(100, 116)], 64 * KIB) == 16
    assert bench.shard.chunks == 16


def test_a_size_that_is_in_use_by_pins_keeps_its_extents(bench):
    bench.put([f"t{i}" for i in range(32)], 32 * KIB)
    every_other = [f"t{i}" for i in range(0, 32, 2)]
    bench.shard.pin(names_to_keys(every_other), now_s=bench.now_s)
    room = bench.reserve(["big"], 64 * KIB)
    held = {int(row) for row in bench.shard.table.columns.page * PAGE // (64 * KIB)}
    assert room.full == (len(held) == 16)


def test_a_capacity_binds_its_account_alone(bench):
    small = bench.shard.open_account(Namespace(model="small"), 3 * 64 * KIB)
    assert bench.put("ABCDE", 64 * KIB) == 5
    assert bench.put("abcde", 64 * KIB, account=small) == 3
    assert bench.put("vw", 64 * KIB, account=small) == 2
    assert bench.here("ABCDEabcdevw") == "ABCDEavw"
    assert bench.shard.open_account(Namespace(model="small"), 0) == small
    assert bench.put("1234", 64 * KIB, account=small) == 4


def test_tenants_and_adapters_of_one_model_share_an_account(bench):
    assert bench.shard.open_account(SPACE.with_fields(salt="s", lora="l")) == bench.account
    assert bench.shard.open_account(SPACE.with_fields(dtype="d")) != bench.account
    assert bench.shard.account(SPACE.account.digest) == bench.account
    with pytest.raises(LostError):
        bench.shard.account(Namespace(model="nobody").digest)


def test_the_list_of_accounts_is_bounded(bench):
    with pytest.raises(UsageError, match="namespace of"):
        bench.shard.open_account(Namespace(model="m" * 3000))
    for number in range(MAX_NAMESPACES - 1):
        bench.shard.open_account(Namespace(model=f"m{number}"))
    with pytest.raises(CapacityError):
        bench.shard.open_account(Namespace(model="one too many"))


def test_eviction_runs_ahead_of_need(bench):
    bench.put([f"n{i}" for i in range(16)], 64 * KIB)
    bench.shard.tend(now_s=bench.now_s)
    assert bench.shard.chunks == 15  # 5 % of 16 extents is one
    bench.shard.tend(now_s=bench.now_s)
    assert bench.shard.chunks == 15


# -- leases -----------------------------------------------------------------------------------------------------------


def test_slots_of_a_writer_that_was_cut_off_rest_for_a_while(bench):
    room = bench.reserve("abcdefghijklmnop", 64 * KIB)
    bench.shard.abandon(room.rows[:15], now_s=bench.now_s)
    assert bench.shard.used_nbytes == 64 * KIB
    assert bench.put("q", 64 * KIB) == 0  # it may still be writing to them
    bench.now_s += QUARANTINE_S
    assert bench.put("abc", 64 * KIB) == 3
    check_invariants(bench.shard)
    bench.shard.abandon(room.rows[:0], now_s=bench.now_s)


def test_pinned_chunks_are_not_taken(bench):
    bench.put("abc", 64 * KIB)
    held = bench.shard.pin(names_to_keys("axc"), now_s=bench.now_s)
    assert (held.rows >= 0).tolist() == [True, False, True]
    assert [int(n) for n in held.nbytes[held.rows >= 0]] == [64 * KIB] * 2
    assert bench.shard.delete(names_to_keys("abc")) == 1
    assert bench.put([f"n{i}" for i in range(20)], 64 * KIB) == 14
    assert bench.here("abc") == "ac"
    bench.shard.unpin(held.rows)
    assert bench.shard.delete(names_to_keys("abc")) == 2


def test_pins_are_counted_and_bounded(bench):
    bench.put("a")
    many = np.repeat(names_to_keys("a"), MAX_PINS, axis=0)
    first = bench.shard.pin(many, now_s=bench.now_s)
    assert (first.rows >= 0).all()
    assert bench.shard.pin(names_to_keys("a"), now_s=bench.now_s).rows.tolist() == [-1]
    bench.shard.unpin(first.rows[1:])
    assert bench.shard.delete(names_to_keys("a")) == 0
    too_many = bench.shard.pin(np.repeat(names_to_keys("a"), MAX_PINS + 1, axis=0), now_s=bench.now_s)
    assert (too_many.rows == -1).all()
    bench.shard.unpin(first.rows[:1])
    assert bench.shard.delete(names_to_keys("a")) == 1


def test_delete_orphans_and_nothing_breaks(bench):
    bench.put("abcd")
    assert bench.shard.delete(names_to_keys("bbz")) == 1
    assert bench.here("abcd") == "acd"
    assert bench.put("abcd") == 1


def test_what_has_expired_is_a_miss_and_makes_way(bench):
    bench.put("ab")
    bench.shard.table.columns.expires[bench.row("a")] = bench.shard.table.ticks(bench.now_s + 5)
    bench.now_s += 4
    assert bench.here("ab") == "ab"
    bench.now_s += 2
    assert bench.here("ab") == "b"
    assert bench.put("ab") == 1
    assert bench.here("ab") == "ab"


def test_damage_is_found_and_dropped(bench):
    bench.put("abc")
    bench.shard.take_changes()
    bench.shard.arena.view[int(bench.shard.table.columns.page[bench.row("b")]) * PAGE] ^= 1
    assert bench.shard.verify(names_to_keys("abcz"), now_s=bench.now_s) == 1
    assert bench.here("ac") == "ac"
    assert bench.row("b") == -1
    assert bench.shard.counters.corrupt == 1
    assert bench.shard.take_changes()[1].tolist() == names_to_keys("b").tolist()


def test_changes_are_told_once(bench):
    bench.put("abc")
    bench.shard.delete(names_to_keys("b"))
    assert bench.shard.has_changes
    added, removed = bench.shard.take_changes()
    assert sorted(added.tolist()) == sorted(names_to_keys("abc").tolist())
    assert removed.tolist() == names_to_keys("b").tolist()
    assert not bench.shard.has_changes
    assert sorted(bench.shard.ready_keys().tolist()) == sorted(names_to_keys("ac").tolist())


# -- recovery ---------------------------------------------------------------------------------------------------------


def crashed(shard: Shard, shm_dir: Path, name: str) -> Path:
    """The files as a process leaves them that is killed at this moment."""
    prefix = shm_dir / name
    for source, target in zip((shard.table.memory, shard.arena), shard_files(prefix), strict=True):
        target.write_bytes(bytes(source.view))
    return prefix


@pytest.fixture
def on_files(shm_dir):
    made = Bench(Shard.open(config_for(shm_dir), shm_dir / "n", now_s=0.0))
    yield made
    made.shard.close()


def reopen(prefix: Path, now_s: float, **fields) -> Bench:
    again = Bench(Shard.open(config_for(prefix.parent, **fields), prefix, now_s=now_s))
    again.now_s = now_s
    check_invariants(again.shard)
    return again


@pytest.mark.parametrize("dirty", [False, True])
def test_a_killed_process_loses_only_what_was_not_committed(on_files, shm_dir, dirty):
    on_files.put("abc")
    on_files.put("xyz", 3 * PAGE, parent="c")
    on_files.reserve("pqr")
    on_files.shard.pin(names_to_keys("ab"), now_s=on_files.now_s)
    on_files.shard.delete(names_to_keys("z"))
    if dirty:
        on_files.shard.table._header["dirty"] = 1
    again = reopen(crashed(on_files.shard, shm_dir, "again"), on_files.now_s)
    on_files.shard.table._header["dirty"] = 0
    assert again.here("abcxyzpqr") == "abcxy"
    assert again.shard.recovered == again.shard.chunks == 5
    assert again.shard.table.incarnation == on_files.shard.table.incarnation + 1
    assert again.account == on_files.account
    assert again.shard.delete(names_to_keys("ab")) == 2  # the pins are gone
    assert int(again.shard.table.columns.children[again.row("x")]) == 1
    assert again.shard.ready_keys().shape == (3, 2)
    again.shard.close()


def test_slots_that_somebody_was_writing_at_the_crash_rest_for_a_while(on_files, shm_dir):
    on_files.reserve("abcdefghijklmno", 64 * KIB)
    prefix = crashed(on_files.shard, shm_dir, "again")
    for _ in range(2):  # also over a second crash in that time
        again = reopen(prefix, on_files.now_s)
        assert again.put("123", 64 * KIB) == 1
        again.shard.delete(names_to_keys("123"))
        again.shard.close()
    again = reopen(prefix, on_files.now_s)
    again.now_s += QUARANTINE_S
    assert again.put("123", 64 * KIB) == 3
    again.shard.close()


def test_a_crash_at_any_store_of_a_change(shm_dir, rng):
    """Kill the writer after each single store of a reservation and of an eviction; recovery finds a sound table."""
    prefix = shm_dir / "n"
    bench = Bench(Shard.open(config_for(shm_dir), prefix, now_s=0.0))
    bench.put("abcdefghijklmn", 64 * KIB)
    moments: list[Path] = []

    class Watched(np.ndarray):
        def __setitem__(self, index, value):
            moments.append(crashed(bench.shard, shm_dir, f"moment-{len(moments)}"))
            super().__setitem__(index, value)

    columns = bench.shard.table.columns
    for name in ("generation", "page", "nbytes", "namespace", "key_hi", "key_lo", "parent", "children", "checksum"):
        setattr(columns, name, getattr(columns, name).view(Watched))
    bench.shard.table._indexes = [index.view(Watched) for index in bench.shard.table._indexes]
    bench.shard._slots._extent_slots = bench.shard.table.extent_slots.view(Watched)
    bench.put("vwxyz", 32 * KIB, parent="n")
    assert len(moments) > 20
    for moment in moments:
        again = reopen(moment, bench.now_s)
        assert len(again.here("abcdefghijklmn")) >= 14 - 3  # what had to go for three extents, at most
        again.now_s += QUARANTINE_S
        assert again.put("12345", 32 * KIB) == 5
        check_invariants(again.shard)
        assert set(again.here("12345")) == set("12345")
        again.shard.close()
        remove_files(moment)
    bench.shard.close()


def test_another_configuration_begins_anew(on_files, shm_dir):
    on_files.put("abc")
    for name, fields in {"rows": {"max_chunks": 32}, "extents": {"extent_nbytes": 32 * KIB}}.items():
        again = reopen(crashed(on_files.shard, shm_dir, name), on_files.now_s, **fields)
        assert again.shard.recovered == 0
        assert again.put("abc") == 3
        again.shard.close()


def test_one_writer_at_a_time(on_files, shm_dir, monkeypatch):
    monkeypatch.setattr("raykv.shard.OWN_TIMEOUT_S", 0.0)
    with pytest.raises(UsageError, match="another process serves"):
        Shard.open(config_for(shm_dir), shm_dir / "n", now_s=0.0)
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
            raw[_HEADER.itemsize :] = rng.randbytes(len(raw) - _HEADER.itemsize)
        case "a hole":
            start = rng.randrange(0, len(raw))
            stop = min(len(raw), start + rng.choice([1, 8, 100, 5000]))
            raw[start:stop] = rng.randbytes(stop - start)
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["empty", "short", "zeros", "random", "random behind the header", "a hole", "missing"])
@pytest.mark.parametrize("which", [0, 1])
def test_damaged_files_begin_anew_or_lose_chunks_and_never_crash(shm_dir, on_files, which, how, rng):
    on_files.put("abcdefgh")
    on_files.put("xyz", 5 * PAGE)
    for attempt in range(30 if how == "a hole" else 3):
        prefix = crashed(on_files.shard, shm_dir, f"damaged-{attempt}")
        if how == "missing":
            os.unlink(shard_files(prefix)[which])
        else:
            damage(shard_files(prefix)[which], how, rng)
        again = Bench(Shard.open(config_for(shm_dir), prefix, now_s=on_files.now_s))
        again.now_s = on_files.now_s + QUARANTINE_S
        for number in range(6):
            names = [f"new-{number}-{place}" for place in range(40)]
            again.put(names, rng.choice([PAGE, 3 * PAGE]))
            held = again.shard.pin(names_to_keys(names), now_s=again.now_s)
            again.shard.unpin(held.rows)
            again.shard.verify(names_to_keys([*names, *"abcdefghxyz"]), now_s=again.now_s)
            again.shard.delete(names_to_keys(names[:20]))
            again.shard.tend(now_s=again.now_s)
        assert again.here(names[20:])
        again.shard.close()
        remove_files(prefix)


def test_damaged_columns_one_by_one(shm_dir, on_files, np_rng):
    """Each column, and each other part of the table, filled with noise."""
    on_files.put("abcdefgh")
    table = on_files.shard.table
    parts = {**vars(table.columns), "extents": table.extent_slots, "index 0": table._indexes[0]}
    for name, part in parts.items():
        before = part.copy()
        part[:] = np_rng.integers(0, 256, part.nbytes, np.uint8).view(part.dtype)
        prefix = crashed(on_files.shard, shm_dir, "damaged")
        part[:] = before
        again = Bench(Shard.open(config_for(shm_dir), prefix, now_s=on_files.now_s))
        again.put([f"{name}-{place}" for place in range(40)])
        again.shard.close()
        remove_files(prefix)
    table.namespaces["text"][0] = b"{"
    prefix = crashed(on_files.shard, shm_dir, "damaged")
    assert Shard.open(config_for(shm_dir), prefix, now_s=on_files.now_s).recovered == 0


def test_nothing_is_left_open_when_a_file_is_refused(shm_dir, on_files, caplog):
    caplog.set_level(logging.INFO)  # pytest keeps the records, as many a log handler does
    on_files.put("abc")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        prefix = crashed(on_files.shard, shm_dir, f"n{number}")
        damage(shard_files(prefix)[0], "zeros", random.Random(number))
        Shard.open(config_for(shm_dir), prefix, now_s=0.0).close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["leaf_lru", "lru", "fifo"])
@pytest.mark.parametrize("round_", range(2))
def test_random_operations(policy, round_, rng):
    """Whatever is done in whatever order, the columns agree with each other and every byte is right."""
    bench = Bench(Shard.open(config_for(policy=policy, arena_nbytes=512 * KIB), None, now_s=0.0))
    shard = bench.shard
    accounts = [bench.account, shard.open_account(Namespace(model="b"), 300 * KIB)]
    alphabet = [f"{a}{b}" for a in "abcdefghijkl" for b in range(9)]
    sizes = {letter: rng.choice([PAGE, 2 * PAGE, 5 * PAGE, 16 * PAGE]) for letter in "abcdefghijkl"}
    open_rooms: list[tuple[list[str], Reserved, int]] = []
    pins: list[np.ndarray] = []
    for _ in range(400):
        first = rng.choice("abcdefghijkl")
        names = [f"{first}{place}" for place in range(rng.randrange(1, 9))]
        nbytes = sizes[first]
        match rng.choice(["put"] * 8 + ["reserve", "commit", "abort", "abandon", "pin", "unpin", "delete", "time"]):
            case "put":
                chained = rng.random() < 0.8
                parent = rng.choice(alphabet) if chained and rng.random() < 0.3 else None
                bench.put(names, nbytes, account=accounts[ord(first) % 2], chained=chained, parent=parent)
            case "reserve":
                open_rooms.append((names, bench.reserve(names, nbytes), nbytes))
            case "commit" if open_rooms:
                bench.write(*open_rooms.pop(rng.randrange(len(open_rooms))))
            case "abort" if open_rooms:
                shard.abort(open_rooms.pop()[1].rows)
            case "abandon" if open_rooms:
                shard.abandon(open_rooms.pop()[1].rows, now_s=bench.now_s)
            case "pin":
                pins.append(shard.pin(names_to_keys(names), now_s=bench.now_s).rows)
            case "unpin" if pins:
                shard.unpin(pins.pop(rng.randrange(len(pins))))
            case "delete":
                shard.delete(names_to_keys(names))
            case "time":
                bench.now_s += rng.choice([1.0, QUARANTINE_S])
                shard.tend(now_s=bench.now_s)
        check_invariants(shard)
        bench.here(alphabet)
        held = np.zeros(shard.table.rows, np.int64)
        for rows in pins:
            np.add.at(held, rows[rows >= 0], 1)
        assert shard.table.columns.pins.tolist() == held.tolist()
    print(f"{shard.counters}")
    assert shard.counters.evicted > 0
    shard.close()
