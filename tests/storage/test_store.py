"""One node's storage: reserve, commit, pin, evict, recover."""

import hashlib
import logging
import os
import random
import struct
import time
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig, StorageConfig
from raykv.errors import CapacityError, ConfigError, LostError, UsageError
from raykv.eviction import POLICIES
from raykv.eviction.lru import LRU
from raykv.memory import native
from raykv.memory.copying import checksum_of
from raykv.memory.rows import LENT, QUARANTINE_S
from raykv.memory.slots import slot_nbytes
from raykv.memory.table import _HEADER, MAX_NAMESPACES, SIDE_WINDOW, _window_of
from raykv.protocol import chunk_keys
from raykv.protocol.namespace import Namespace
from raykv.storage.room import MAX_PINS
from raykv.storage.store import Loan, Reserved, Store, remove_files, store_files

SPACE = Namespace(model="m")
KIB = 1 << 10


def config_for(path: Path | None = None, **fields) -> StorageConfig:
    """16 extents of 64 KiB."""
    made = {"arena_nbytes": 1 << 20, "extent_nbytes": 64 * KIB, "max_chunks": 64, "shm_dir": path, **fields}
    return StorageConfig.load(made)


def names_to_keys(names) -> np.ndarray:
    return chunk_keys.named(SPACE.digest, names)


def pair(name: str) -> tuple[int, int]:
    hi, lo = names_to_keys([name])[0].tolist()
    return hi, lo


@lru_cache(maxsize=1000)
def content(name: str, nbytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(nbytes)


class Bench:
    """A store with a clock of its own, used by names."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_s = 1.0
        self.group = store.groups.open(SPACE)

    def reserve(self, names: str | list[str], nbytes: int = PAGE, *, group: int | None = None, **chain) -> Reserved:
        chain = {"chained": True, "parent": None, "depth": 0, **chain}
        if chain["parent"] is not None:
            chain["parent"] = names_to_keys([chain["parent"]])
        self.now_s += 1.0
        number = self.group if group is None else group
        return self.store.reserve(names_to_keys(names), nbytes, number, now_s=self.now_s, **chain)

    def write(self, names: str | list[str], room: Reserved, nbytes: int = PAGE) -> None:
        view = self.store.arena.view
        pieces = [view[start : start + nbytes] for start in room.offsets.tolist()]
        for place, piece in zip(room.positions.tolist(), pieces, strict=True):
            piece[:] = content(names[place], nbytes)
        self.store.commit(room.rows, np.array([checksum_of([p]) for p in pieces], np.uint64), now_s=self.now_s)

    def put(self, names: str | list[str], nbytes: int = PAGE, **options) -> int:
        room = self.reserve(names, nbytes, **options)
        self.write(names, room, nbytes)
        return len(room.rows)

    def lend(self, count: int, nbytes: int = PAGE, *, ahead: int = 0, **chain) -> Loan:
        """`keys` and `parent`, by name, are to be spared."""
        spared = {field: names_to_keys(names) for field, names in chain.items() if names is not None}
        self.now_s += 1.0
        return self.store.lend(count, nbytes, self.group, ahead=ahead, now_s=self.now_s, **spared)

    def fill(self, loan: Loan, names, nbytes: int = PAGE) -> list[int]:
        """Write the chunks of these names into the slots, in order. Returns their checksums."""
        checksums = []
        for start, name in zip(loan.offsets.tolist(), names, strict=False):
            piece = self.store.arena.view[start : start + nbytes]
            piece[:] = content(name, nbytes)
            checksums.append(checksum_of([piece]))
        return checksums

    def commit_run(self, names, loan: Loan, written=None, nbytes: int = PAGE, *, parent=None, depth=0, chained=True):
        """Store a run of chunks of which those at the places `written` are in the slots, in order."""
        written = list(range(len(names))) if written is None else written
        checksums = self.fill(loan, [names[place] for place in written], nbytes)
        return self.store.store(
            names_to_keys(names),
            np.array(written, np.int32),
            loan.rows[: len(written)],
            np.array(checksums, np.uint64),
            nbytes,
            self.group,
            chained=chained,
            parent=None if parent is None else names_to_keys([parent]),
            depth=depth,
            now_s=self.now_s,
        ).tolist()

    def publish(self, names, loan: Loan, nbytes: int = PAGE) -> list[int]:
        """Write chunks into the first slots and make them visible as their writer does. 1: visible; see Reader."""
        checksums = np.array(self.fill(loan, names, nbytes), np.uint64)
        rows = loan.rows[: len(names)].tolist()
        generations = self.store.table.columns.generation[rows].tolist()
        reader = self.store.table.reader(self.store.arena.view)
        return list(reader.publish(rows, generations, names_to_keys(names).tobytes(), checksums, nbytes))

    def lend_and_store(self, names, nbytes: int = PAGE, *, parent=None, **chain) -> int:
        missing = [place for place, name in enumerate(names) if not self.here([name])]
        loan = self.lend(len(missing), nbytes, keys=names, parent=None if parent is None else [parent])
        return sum(self.commit_run(names, loan, missing[: len(loan.rows)], nbytes, parent=parent, **chain))

    def store_one(self, name: str, nbytes: int = PAGE, *, loan: Loan | None = None, parent=None, depth=0) -> bool:
        loan = loan or self.lend(1, nbytes, keys=[name], parent=None if parent is None else [parent])
        checksum = self.fill(loan, [name], nbytes)[0]
        return self.store.store_one(
            pair(name), int(loan.rows[0]), checksum, nbytes, self.group,
            parent=None if parent is None else pair(parent), depth=depth, now_s=self.now_s,
        )  # fmt: skip

    def here(self, names: str | list[str]) -> str:
        """Those names that can be read, checked byte by byte."""
        rows, _ = self.store.table.look(names_to_keys(names), self.store.table.ticks(self.now_s))
        columns, found = self.store.table.columns, []
        for name, row in zip(names, rows.tolist(), strict=True):
            if row >= 0:
                start, nbytes = int(columns.page[row]) * PAGE, int(columns.nbytes[row])
                assert bytes(self.store.arena.view[start : start + nbytes]) == content(name, nbytes), name
                found.append(name)
        return "".join(found)

    def row(self, name: str) -> int:
        return int(self.store.table.find(names_to_keys([name]))[0])

    def verify(self, keys: np.ndarray) -> int:
        """Look for damage as the node does when somebody suspects it."""
        pinned = self.store.pin(keys, now_s=self.now_s)
        wrong = self.store.spoilt(pinned)
        self.store.unpin(pinned.rows)
        return self.store.drop_spoilt(wrong)


@pytest.fixture
def bench():
    made = Bench(Store.open(config_for(), None, now_s=0.0))
    yield made
    check_invariants(made.store)
    made.store.close()


def check_invariants(store: Store) -> None:
    """What must hold between any two calls, told from the columns alone."""
    columns, table = store.table.columns, store.table
    assert not table.dirty
    taken = np.flatnonzero(columns.nbytes > 0)
    room = store.room
    parents, generations, first_pages = columns.parent.tolist(), columns.generation.tolist(), columns.page.tolist()
    sizes = {row: slot_nbytes(int(columns.nbytes[row])) for row in taken.tolist()}
    quarantined = set(room.resting.tolist())
    lent = {row for row in sizes if parents[row] == LENT} - quarantined
    counted = [row for row in sizes if row not in quarantined]
    in_side = set(table.side_rows())
    live = [row for row in counted if row not in lent or (generations[row] & 1 == 0 and row not in in_side)]
    extent_sizes = table.extent_slots.tolist()
    owner: dict[int, int] = {}
    for row, size in sizes.items():
        first = first_pages[row]
        assert extent_sizes[first * PAGE // table.extent_nbytes] == size
        for page in range(first, first + size // PAGE):
            assert owner.setdefault(page, row) == row, "two chunks in one place"
    assert max(owner, default=0) < store.arena.nbytes // PAGE
    known_children = columns.children.tolist()
    free = [row for row in range(table.rows) if row not in sizes and not known_children[row]]
    assert sorted(room.free_rows) == free
    assert sorted(table.index_entries().tolist()) == live
    used = np.zeros(MAX_NAMESPACES, np.int64)
    for row in counted:
        used[columns.namespace[row]] += sizes[row]
    assert room.used_nbytes.tolist() == used.tolist()
    assert store.used_nbytes == used.sum()
    assert store.lent_nbytes == sum(sizes[row] for row in lent)
    assert store.chunks == len(set(table.ready_rows().tolist()) - in_side)
    home = columns.page[taken] * PAGE // table.extent_nbytes
    per_extent = np.bincount(home, minlength=table.extents)
    assert room.slots.used(np.arange(table.extents)).tolist() == per_extent.tolist()
    for extent in range(table.extents):
        assert sorted(room.slots.rows_in(extent).tolist()) == taken[home == extent].tolist()
    serving = table.extent_slots > 0
    in_use = sum(sizes.values())
    tails = sum(table.extent_nbytes % int(size) for size in table.extent_slots[serving])
    unbacked = store.extents_unbacked * table.extent_nbytes
    assert room.slots.free_nbytes == table.extents * table.extent_nbytes - in_use - tails - unbacked
    children, alive = [0] * table.rows, set(live)
    for row in live:
        parent = parents[row]
        gone = parent in quarantined or parent not in sizes
        assert parent == -1 or parent in alive or gone or row in lent, "a parent that is somebody else by now"
        if parent >= 0:
            children[parent] += 1
    assert known_children == children
    keys = set(zip(columns.key_hi[live].tolist(), columns.key_lo[live].tolist(), strict=True))
    assert len(keys) == len(live), "a key twice"


# -- writing ----------------------------------------------------------------------------------------------------------


def test_reserved_is_invisible_until_committed(bench):
    room = bench.reserve("abc")
    assert room.positions.tolist() == [0, 1, 2]
    assert bench.here("abc") == ""
    assert bench.store.chunks == 0
    bench.write("abc", room)
    assert bench.here("abc") == "abc"
    assert bench.store.chunks == 3


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
    before = bench.store.used_nbytes
    bench.store.abort(room.rows)
    assert (before, bench.store.used_nbytes) == (3 * 64 * KIB, 0)
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
    columns = bench.store.table.columns
    rows = {name: bench.row(name) for name in "abcdexypq"}
    name_of = {row: name for name, row in rows.items()} | {-1: "-"}
    assert "".join(name_of[int(columns.parent[row])] for row in rows.values()) == "-abcd-x--"
    assert [int(columns.depth[row]) for row in rows.values()] == [0, 1, 2, 3, 4, 7, 8, 0, 0]


def test_a_chain_may_branch_and_be_filled_in(bench):
    bench.put("ab")
    bench.put("abxy")
    bench.put("abz", chained=True)
    assert int(bench.store.table.columns.children[bench.row("b")]) == 2


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_coldest_go_first_and_the_head_of_what_is_written_stays(bench):
    for name in "abcdefghijklmnop":
        assert bench.put(name, 64 * KIB) == 1
    assert bench.put("aXY", 64 * KIB) == 2
    assert bench.here("abcdefghijklmnopXY") == "adefghijklmnopXY"
    assert bench.store.counters.evicted == 2


def test_when_nothing_may_go_the_first_ones_get_the_room(bench):
    bench.put("abcdefghijklm", 64 * KIB)
    bench.store.pin(names_to_keys("abcdefghijklm"), now_s=bench.now_s)
    room = bench.reserve("vwxyz", 64 * KIB)
    assert (room.positions.tolist(), room.full) == ([0, 1, 2], 2)
    assert bench.store.counters.refused_full == 2
    assert bench.reserve("Q", PAGE).full == 1


def test_rows_run_out_before_room_does(bench):
    names = [f"n{i}" for i in range(70)]
    assert bench.put(names) == 64
    assert bench.put(["more"]) == 1
    assert bench.store.chunks == 64


def test_a_size_takes_extents_from_another(bench):
    assert bench.put([f"s{i}" for i in range(16)], 64 * KIB) == 16
    assert bench.put([f"t{i}" for i in range(8)], 32 * KIB) == 8  # four extents, of the coldest
    assert bench.put([f"u{i}" for i in range(3)], 40 * KIB) == 3
    assert bench.put([f"s{i}" for i in range(100, 116)], 64 * KIB) == 16
    assert bench.store.chunks == 16


def test_a_size_that_is_in_use_by_pins_keeps_its_extents(bench):
    bench.put([f"t{i}" for i in range(32)], 32 * KIB)
    every_other = [f"t{i}" for i in range(0, 32, 2)]
    bench.store.pin(names_to_keys(every_other), now_s=bench.now_s)
    room = bench.reserve(["big"], 64 * KIB)
    held = {int(row) for row in bench.store.table.columns.page * PAGE // (64 * KIB)}
    assert room.full == (len(held) == 16)


def test_a_capacity_binds_its_account_alone(bench):
    small = bench.store.groups.open(Namespace(model="small"), 3 * 64 * KIB)
    assert bench.put("ABCDE", 64 * KIB) == 5
    assert bench.put("abcde", 64 * KIB, group=small) == 3
    assert bench.put("vw", 64 * KIB, group=small) == 2
    assert bench.here("ABCDEabcdevw") == "ABCDEavw"
    assert bench.store.groups.open(Namespace(model="small"), 0) == small
    assert bench.put("1234", 64 * KIB, group=small) == 4


def test_an_account_full_of_small_chunks_takes_a_large_one(bench):
    small = bench.store.groups.open(Namespace(model="small"), 64 * KIB)
    names = [f"s{place}" for place in range(16)]
    assert bench.put(names, PAGE, group=small) == 16
    assert bench.put(["large"], 32 * KIB, group=small, chained=False) == 1
    assert bench.here([*names, "large"]) == "".join(names[:8]) + "large"
    assert bench.put(["more", "than", "fits"], 64 * KIB, group=small, chained=False) == 1
    check_invariants(bench.store)


def test_depth_is_taken_from_no_parent_that_has_not_been_told(bench):
    """Its row still says how deep the chunk was that had it before."""
    bench.put([f"d{place}" for place in range(5)], PAGE, depth=700)
    bench.store.delete(names_to_keys([f"d{place}" for place in range(5)]), now_s=bench.now_s)
    loan = bench.lend(1)
    assert bench.store.table.columns.depth[loan.rows[0]] >= 700
    if not native.available:
        return
    assert bench.publish(["parent"], loan) == [1]
    assert bench.store_one("child", parent="parent", depth=1)
    assert bench.lend_and_store(["b1", "b2"], parent="parent", depth=1) == 2
    depths = bench.store.table.columns.depth
    assert [int(depths[bench.row(name)]) for name in ("child", "b1", "b2")] == [1, 1, 2]


def test_tenants_and_adapters_of_one_model_share_an_account(bench):
    assert bench.store.groups.open(SPACE.with_fields(salt="s", lora="l")) == bench.group
    assert bench.store.groups.open(SPACE.with_fields(dtype="d")) != bench.group
    assert bench.store.groups.number(SPACE.group.digest) == bench.group
    with pytest.raises(LostError):
        bench.store.groups.number(Namespace(model="nobody").digest)


@pytest.mark.slow
def test_the_list_of_accounts_is_bounded(bench):
    with pytest.raises(UsageError, match="namespace of"):
        bench.store.groups.open(Namespace(model="m" * 3000))
    for number in range(MAX_NAMESPACES - 1):
        bench.store.groups.open(Namespace(model=f"m{number}"))
    with pytest.raises(CapacityError):
        bench.store.groups.open(Namespace(model="one too many"))


def test_eviction_runs_ahead_of_need(bench):
    bench.put([f"n{i}" for i in range(16)], 64 * KIB)
    bench.store.tend(now_s=bench.now_s)
    assert bench.store.chunks == 15  # 5 % of 16 extents is one
    bench.store.tend(now_s=bench.now_s)
    assert bench.store.chunks == 15


# -- slots lent ahead of their keys ----------------------------------------------------------------------------------


def test_a_lent_slot_is_used_room_and_nothing_else(bench):
    loan = bench.lend(3, 64 * KIB, ahead=2)
    assert (len(loan.rows), len(set(loan.offsets.tolist()))) == (3, 3)  # an eighth of the rest is less than a slot
    assert (bench.store.used_nbytes, bench.store.lent_nbytes) == (3 * 64 * KIB, 3 * 64 * KIB)
    assert bench.store.chunks == 0
    check_invariants(bench.store)
    assert bench.commit_run("abc", loan, nbytes=64 * KIB - 7) == [True] * 3
    assert bench.here("abc") == "abc"
    assert bench.store.lent_nbytes == 0
    again = bench.lend(1, 64 * KIB)
    bench.store.abort(again.rows)
    assert (bench.store.used_nbytes, bench.store.counters.aborted) == (3 * 64 * KIB, 0)


def test_store_leaves_out_what_came_meanwhile_and_links_the_chain(bench):
    bench.put("ac")
    writing = bench.reserve("e")
    loan = bench.lend(4)
    assert bench.commit_run("abcdef", loan, [0, 1, 4, 5]) == [False, True, False, True]
    bench.store.abort(loan.rows[[0, 2]])
    bench.put("b")
    bench.write("e", writing)
    assert bench.here("abcdef") == "abcef"
    columns = bench.store.table.columns
    assert int(columns.parent[bench.row("b")]) == bench.row("a")
    assert int(columns.parent[bench.row("f")]) == bench.row("e")
    assert [int(columns.depth[bench.row(name)]) for name in "bf"] == [1, 5]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_few_and_many_are_stored_alike(bench, count):
    """Few chunks take a path without arrays, and one has a message of its own."""
    bench.put("z")
    names = [f"n{place}" for place in range(count)]
    if count == 1:
        assert bench.store_one("n0", parent="z")
    else:
        assert all(bench.commit_run([*names, "n0"], bench.lend(count), list(range(count)), parent="z", depth=77))
    columns = bench.store.table.columns
    rows = [bench.row(name) for name in ["z", *names]]
    assert [int(columns.parent[row]) for row in rows] == [-1, *rows[:-1]]
    assert [int(columns.depth[row]) for row in rows] == list(range(count + 1))
    assert [int(columns.children[row]) for row in rows] == [1] * count + [0]
    assert "".join(bench.here(names)) == "".join(names)
    assert sorted(bench.store.take_changes()[0].tolist()) == sorted(names_to_keys(["z", *names]).tolist())


@pytest.mark.parametrize("count", [2, 6])
def test_a_key_named_twice_is_stored_once(bench, count):
    loan = bench.lend(count)
    assert bench.commit_run(["a"] * count, loan) == [True] + [False] * (count - 1)
    bench.store.abort(loan.rows[1:])


def test_what_is_wrong_with_a_store_is_said_and_nothing_happens(bench):
    loan, reserved = bench.lend(6), bench.reserve("r")
    other = bench.store.groups.open(Namespace(model="other"))
    for count in (1, 6):
        names, rows = "abcdef"[:count], loan.rows[:count]
        good = {"keys": names_to_keys(names), "positions": np.arange(count, dtype=np.int32), "rows": rows,
                "checksums": np.zeros(count, np.uint64), "nbytes": PAGE, "group": bench.group, "chained": False,
                "parent": None, "depth": 0, "now_s": 9.0}  # fmt: skip
        bad_rows = [np.append(rows[1:], np.int32(row)) for row in (-1, 64, 1 << 30, 63, int(reserved.rows[0]))]
        for wrong in (
            {"nbytes": 0}, {"nbytes": PAGE + 1}, {"group": other}, {"depth": -1},
            {"positions": good["positions"] + 1}, {"positions": good["positions"] - 1},
            {"positions": good["positions"][1:]}, {"checksums": good["checksums"][1:]},
            *({"rows": bad} for bad in bad_rows),
            *([{"rows": np.repeat(rows[:1], count)}] if count > 1 else []),
        ):  # fmt: skip
            with pytest.raises(UsageError):
                bench.store.store(**(good | wrong))
            check_invariants(bench.store)
        assert bench.here(names) == ""
    with pytest.raises(UsageError):
        bench.store.store_one(pair("a"), int(reserved.rows[0]), 0, PAGE, bench.group, parent=None, depth=0, now_s=9.0)
    bench.store.abort(np.append(loan.rows, reserved.rows))


def test_lending_ahead_evicts_nothing_and_leaves_room(bench):
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 0  # nothing has real memory yet
    for extent in range(16):
        assert bench.store.back_extent(extent)
        bench.store.note_backed(extent)
    assert bench.store.bare_extent() == bench.store.bare_extent(quiet=True) == -1
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 8  # an eighth of the rows
    bench.put([f"n{place}" for place in range(14)], 64 * KIB)
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 5  # half of the room above the low-water mark
    bench.put([f"m{place}" for place in range(2)], 60 * KIB)
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 0
    assert bench.store.counters.evicted == 1
    assert len(bench.lend(1, 64 * KIB).rows) == 1
    assert bench.store.counters.evicted == 2
    bench.store.abandon(np.flatnonzero(bench.store.table.columns.parent == LENT).astype(np.int32), now_s=bench.now_s)


def test_lent_slots_count_against_the_capacity(bench):
    small = bench.store.groups.open(Namespace(model="small"), 3 * 64 * KIB)
    bench.group, before = small, bench.group
    loan = bench.lend(2, 64 * KIB)
    assert len(bench.lend(5, 64 * KIB).rows) == 1
    assert bench.store.counters.refused_full == 4
    assert bench.put("a", 64 * KIB, group=small) == 0
    assert bench.commit_run("xy", loan, nbytes=64 * KIB) == [True, True]
    assert bench.put("a", 64 * KIB, group=small) == 1  # one of them goes
    assert len(bench.here("axy")) == 2
    bench.group = before
    assert bench.put("b", 64 * KIB) == 1


def test_what_is_being_written_is_spared(bench):
    bench.put("abcdefghijklmnop", 64 * KIB)
    loan = bench.lend(3, 64 * KIB, keys="aXbY", parent=["p"])
    assert len(bench.here("abp")) == 3
    bench.store.abort(loan.rows)


def test_loans_of_a_writer_that_was_cut_off_rest(bench):
    loan = bench.lend(16, 64 * KIB)
    bench.store.abandon(loan.rows, now_s=bench.now_s)
    check_invariants(bench.store)
    assert (bench.store.used_nbytes, bench.store.lent_nbytes, bench.store.counters.aborted) == (0, 0, 0)
    assert bench.put("q", 64 * KIB) == 0
    bench.now_s += QUARANTINE_S
    assert bench.put("abc", 64 * KIB) == 3


# -- leases -----------------------------------------------------------------------------------------------------------


def test_slots_of_a_writer_that_was_cut_off_rest_for_a_while(bench):
    room = bench.reserve("abcdefghijklmnop", 64 * KIB)
    bench.store.abandon(room.rows[:15], now_s=bench.now_s)
    assert bench.store.used_nbytes == 64 * KIB
    assert bench.put("q", 64 * KIB) == 0  # it may still be writing to them
    bench.now_s += QUARANTINE_S
    assert bench.put("abc", 64 * KIB) == 3
    check_invariants(bench.store)
    bench.store.abandon(room.rows[:0], now_s=bench.now_s)


def test_pinned_chunks_are_not_taken(bench):
    bench.put("abc", 64 * KIB)
    held = bench.store.pin(names_to_keys("axc"), now_s=bench.now_s)
    assert (held.rows >= 0).tolist() == [True, False, True]
    assert [int(n) for n in held.nbytes[held.rows >= 0]] == [64 * KIB] * 2
    assert bench.store.delete(names_to_keys("abc")) == 1
    assert bench.put([f"n{i}" for i in range(20)], 64 * KIB) == 14
    assert bench.here("abc") == "ac"
    bench.store.unpin(held.rows)
    assert bench.store.delete(names_to_keys("abc")) == 2


def test_pins_are_counted_and_bounded(bench):
    bench.put("a")
    many = np.repeat(names_to_keys("a"), MAX_PINS, axis=0)
    first = bench.store.pin(many, now_s=bench.now_s)
    assert (first.rows >= 0).all()
    assert bench.store.pin(names_to_keys("a"), now_s=bench.now_s).rows.tolist() == [-1]
    bench.store.unpin(first.rows[1:])
    assert bench.store.delete(names_to_keys("a")) == 0
    too_many = bench.store.pin(np.repeat(names_to_keys("a"), MAX_PINS + 1, axis=0), now_s=bench.now_s)
    assert (too_many.rows == -1).all()
    bench.store.unpin(first.rows[:1])
    assert bench.store.delete(names_to_keys("a")) == 1


def test_holds_as_lists_are_what_they_are_as_arrays(bench):
    bench.put("abcde")
    names = names_to_keys("axbbye")
    by_array, by_list = (pin(names, now_s=bench.now_s) for pin in (bench.store.pin, bench.store.pin_each))
    held = by_array.rows >= 0
    assert by_list[0] == by_array.rows.tolist()
    assert by_list[1] == (by_array.offsets * held).tolist()
    assert by_list[2] == by_array.nbytes.tolist()
    assert by_list[3] == (by_array.checksums * held).tolist()
    bench.store.unpin(by_array.rows)
    assert bench.store.delete(names_to_keys("abcde")) == 2
    bench.store.unpin_each(by_list[0])
    assert bench.store.delete(names_to_keys("abcde")) == 3
    bench.put("a")
    many = np.repeat(names_to_keys("a"), MAX_PINS + 1, axis=0)
    rows, _, lengths, _ = bench.store.pin_each(many, now_s=bench.now_s)
    assert rows[-2:] == [rows[0], -1]
    assert lengths[-2:] == [lengths[0], 0]
    bench.store.unpin_each(rows)
    assert not bench.store.table.columns.pins.any()


@pytest.mark.skipif(not native.available, reason="without the compiled loops chunks are not held all at once")
def test_all_are_held_at_once_or_none(bench, rng):
    bench.put(LETTERS[:20])
    store, table = bench.store, bench.store.table
    for _ in range(200):
        names = "".join(rng.choices(LETTERS[: rng.choice([20, 22])], k=rng.randrange(1, 12)))
        keys = names_to_keys(names)
        before = table.columns.pins.copy(), table.columns.frequency.copy()
        held = store.pin_all(keys.tobytes(), now_s=bench.now_s)
        if any(name in LETTERS[20:] for name in names):
            assert held is None
            assert (table.columns.pins == before[0]).all()
            assert (table.columns.frequency == before[1]).all()
            continue
        rows, parts, lengths, checksums = held
        by_list = store.pin_each(keys, now_s=bench.now_s)
        assert rows == by_list[0]
        assert struct.unpack(f"={len(names)}I", lengths) == tuple(by_list[2])
        assert struct.unpack(f"={len(names)}Q", checksums) == tuple(by_list[3])
        view = store.arena.view
        assert b"".join(parts) == b"".join(
            view[start : start + size] for start, size in zip(*by_list[1:3], strict=True)
        )
        assert table.columns.pins.sum() == 2 * len(names)
        assert table.columns.frequency.sum() == before[1].sum() + 2 * len(names)
        for some in (rows, by_list[0]):
            store.unpin_each(some)
    assert store.pin_all(b"", now_s=bench.now_s) == ([], [], b"", b"")
    table.columns.expires[bench.row("C")] = table.ticks(bench.now_s)
    assert store.pin_all(names_to_keys("BCD").tobytes(), now_s=bench.now_s) is None
    table.columns.pins[bench.row("A")] = MAX_PINS - 2
    assert store.pin_all(names_to_keys("AABA").tobytes(), now_s=bench.now_s) is None
    assert store.pin_all(names_to_keys("ABA").tobytes(), now_s=bench.now_s)
    assert store.pin_all(names_to_keys("BA").tobytes(), now_s=bench.now_s) is None
    assert (table.columns.pins[bench.row("A")], table.columns.pins[bench.row("B")]) == (MAX_PINS, 1)


@pytest.mark.skipif(not native.available, reason="without the compiled loops chunks are not held all at once")
def test_neighbours_are_sent_as_one(bench):
    size = 4096
    bench.put("abcdef", nbytes=size)
    keys = names_to_keys("abcdef")
    starts = bench.store.pin(keys, now_s=bench.now_s).offsets.tolist()
    _, parts, _, _ = bench.store.pin_all(keys.tobytes(), now_s=bench.now_s)
    breaks = sum(start + size != behind for start, behind in pairwise(starts))
    assert [len(part) % size for part in parts] == [0] * len(parts)
    assert (len(parts), sum(map(len, parts))) == (1 + breaks, 6 * size)
    assert breaks < 5


def test_delete_orphans_and_nothing_breaks(bench):
    bench.put("abcd")
    assert bench.store.delete(names_to_keys("bbz")) == 1
    assert bench.here("abcd") == "acd"
    assert bench.put("abcd") == 1


def test_what_has_expired_is_a_miss_and_makes_way(bench):
    bench.put("ab")
    bench.store.table.columns.expires[bench.row("a")] = bench.store.table.ticks(bench.now_s + 5)
    bench.now_s += 4
    assert bench.here("ab") == "ab"
    bench.now_s += 2
    assert bench.here("ab") == "b"
    assert bench.put("ab") == 1
    assert bench.here("ab") == "ab"


def test_damage_is_found_and_dropped(bench):
    bench.put("abc")
    bench.store.take_changes()
    bench.store.arena.view[int(bench.store.table.columns.page[bench.row("b")]) * PAGE] ^= 1
    assert bench.verify(names_to_keys("abcz")) == 1
    assert bench.here("ac") == "ac"
    assert bench.row("b") == -1
    assert bench.store.counters.corrupt == 1
    assert bench.store.take_changes()[1].tolist() == names_to_keys("b").tolist()


def test_changes_are_told_once(bench):
    bench.put("abc")
    bench.store.delete(names_to_keys("b"))
    assert bench.store.has_changes
    added, removed = bench.store.take_changes()
    assert sorted(added.tolist()) == sorted(names_to_keys("abc").tolist())
    assert removed.tolist() == names_to_keys("b").tolist()
    assert not bench.store.has_changes
    assert sorted(bench.store.ready_keys().tolist()) == sorted(names_to_keys("ac").tolist())


# -- recovery ---------------------------------------------------------------------------------------------------------


def crashed(store: Store, shm_dir: Path, name: str) -> Path:
    """The files as a process leaves them that is killed at this moment."""
    prefix = shm_dir / name
    for source, target in zip((store.table.memory, store.arena), store_files(prefix), strict=True):
        target.write_bytes(bytes(source.view))
    return prefix


@pytest.fixture
def on_files(shm_dir):
    made = Bench(Store.open(config_for(shm_dir), shm_dir / "n", now_s=0.0))
    yield made
    made.store.close()


def reopen(prefix: Path, now_s: float, **fields) -> Bench:
    again = Bench(Store.open(config_for(prefix.parent, **fields), prefix, now_s=now_s))
    again.now_s = now_s
    check_invariants(again.store)
    return again


def test_rows_that_run_short_are_freed_ahead_of_need():
    """Small chunks use up the rows long before the bytes."""
    bench = Bench(Store.open(config_for(arena_nbytes=16 << 20, extent_nbytes=1 << 20, max_chunks=64), None, now_s=0.0))
    names = [f"{number}" for number in range(70)]
    for name in names[:64]:
        assert bench.put([name]) == 1
    assert bench.store.short
    while bench.store.tend(now_s=bench.now_s):
        pass
    assert not bench.store.short
    assert bench.store.chunks < 64
    evicted = bench.store.counters.evicted
    assert bench.put(names[64:66]) == 2
    assert bench.store.counters.evicted == evicted  # there was room
    assert bench.here(names[62:66]) == "".join(names[62:66])  # the last ones in are the last ones out
    check_invariants(bench.store)


@pytest.mark.parametrize("dirty", [False, True])
def test_a_killed_process_loses_only_what_was_not_committed(on_files, shm_dir, dirty):
    on_files.put("abc")
    on_files.put("xyz", 3 * PAGE, parent="c")
    on_files.reserve("pqr")
    on_files.store.pin(names_to_keys("ab"), now_s=on_files.now_s)
    on_files.store.delete(names_to_keys("z"))
    if dirty:
        on_files.store.table._header["dirty"] = 1
    again = reopen(crashed(on_files.store, shm_dir, "again"), on_files.now_s)
    on_files.store.table._header["dirty"] = 0
    assert again.here("abcxyzpqr") == "abcxy"
    assert again.store.recovered == again.store.chunks == 5
    assert again.store.table.incarnation == on_files.store.table.incarnation + 1
    assert again.group == on_files.group
    assert again.store.delete(names_to_keys("ab")) == 2  # the pins are gone
    assert int(again.store.table.columns.children[again.row("x")]) == 1
    assert again.store.ready_keys().shape == (3, 2)
    again.store.close()


def test_slots_that_somebody_was_writing_at_the_crash_rest_for_a_while(on_files, shm_dir):
    on_files.reserve("abcdefghijklmno", 64 * KIB)
    prefix = crashed(on_files.store, shm_dir, "again")
    for _ in range(2):  # also over a second crash in that time
        again = reopen(prefix, on_files.now_s)
        assert again.put("123", 64 * KIB) == 1
        again.store.delete(names_to_keys("123"))
        again.store.close()
    again = reopen(prefix, on_files.now_s)
    again.now_s += QUARANTINE_S
    assert again.put("123", 64 * KIB) == 3
    again.store.close()


def test_lent_slots_rest_after_a_crash(on_files, shm_dir):
    on_files.put("ab")
    on_files.store.delete(names_to_keys("b"))
    loan = on_files.lend(15, 64 * KIB)  # one of these rows had a key before
    again = reopen(crashed(on_files.store, shm_dir, "again"), on_files.now_s)
    assert again.here("ab") == "a"
    assert again.store.lent_nbytes == 0
    assert again.put("12", 64 * KIB) == 1
    assert int(again.store.table.columns.page[again.row("1")]) * PAGE not in set(loan.offsets.tolist())
    again.now_s += QUARANTINE_S
    assert again.put("345", 64 * KIB) == 3
    check_invariants(again.store)
    again.store.close()


class WatchedCells:
    """A memoryview that calls `before` each store."""

    def __init__(self, cells: memoryview, before) -> None:
        self._cells, self._before = cells, before

    def __getitem__(self, index):
        return self._cells[index]

    def __setitem__(self, index, value):
        self._before()
        self._cells[index] = value


@pytest.mark.parametrize("how", ["reserve", "lend and store", pytest.param("one by one", marks=pytest.mark.slow)])
def test_a_crash_at_any_store_of_a_change(shm_dir, how, monkeypatch):
    """Kill the writer after each single store of a write and of an eviction; recovery finds a sound table."""
    monkeypatch.setattr("raykv.memory.native.enter", None)
    prefix = shm_dir / "n"
    bench = Bench(Store.open(config_for(shm_dir), prefix, now_s=0.0))
    bench.put("abcdefghijklmn", 64 * KIB)
    moments: list[Path] = []

    def take_moment() -> None:
        moments.append(crashed(bench.store, shm_dir, f"moment-{len(moments)}"))

    class Watched(np.ndarray):
        def __setitem__(self, index, value):
            take_moment()
            super().__setitem__(index, value)

    table = bench.store.table
    for name in ("generation", "page", "nbytes", "namespace", "key_hi", "key_lo", "parent", "children", "checksum"):
        setattr(table.columns, name, getattr(table.columns, name).view(Watched))
        setattr(table.cells, name, WatchedCells(getattr(table.cells, name), take_moment))
    table._indexes = [index.view(Watched) for index in table._indexes]
    table._index_cells = [WatchedCells(cells, take_moment) for cells in table._index_cells]
    bench.store.room.slots._extent_slots = table.extent_slots.view(Watched)
    match how:
        case "reserve":
            bench.put("vwxyz", 32 * KIB, parent="n")
        case "lend and store":
            bench.lend_and_store("vwxyz", 32 * KIB, parent="n")
        case "one by one":
            for name, parent in zip("vwxyz", "nvwxy", strict=True):
                bench.store_one(name, 32 * KIB, parent=parent)
    check_invariants(bench.store)
    assert len(moments) > 20
    for moment in moments:
        again = reopen(moment, bench.now_s)
        assert len(again.here("abcdefghijklmn")) >= 14 - 3  # what had to go for three extents, at most
        again.now_s += QUARANTINE_S
        assert again.put("12345", 32 * KIB) == 5
        check_invariants(again.store)
        assert set(again.here("12345")) == set("12345")
        again.store.close()
        remove_files(moment)
    bench.store.close()


def test_another_configuration_begins_anew(on_files, shm_dir):
    on_files.put("abc")
    for name, fields in {"rows": {"max_chunks": 32}, "extents": {"extent_nbytes": 32 * KIB}}.items():
        again = reopen(crashed(on_files.store, shm_dir, name), on_files.now_s, **fields)
        assert again.store.recovered == 0
        assert again.put("abc") == 3
        again.store.close()


def test_one_writer_at_a_time(on_files, shm_dir, monkeypatch):
    monkeypatch.setattr("raykv.storage.store.OWN_TIMEOUT_S", 0.0)
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
            raw[_HEADER.itemsize :] = rng.randbytes(len(raw) - _HEADER.itemsize)
        case "a hole":
            start = rng.randrange(0, len(raw))
            stop = min(len(raw), start + rng.choice([1, 8, 100, 5000]))
            raw[start:stop] = rng.randbytes(stop - start)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "short", "zeros", "random", "random behind the header", "missing"),
        pytest.param("a hole", marks=pytest.mark.slow),  # in many places
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_damaged_files_begin_anew_or_lose_chunks_and_never_crash(shm_dir, on_files, which, how, rng):
    on_files.put("abcdefgh")
    on_files.put("xyz", 5 * PAGE)
    for attempt in range(30 if how == "a hole" else 3):
        prefix = crashed(on_files.store, shm_dir, f"damaged-{attempt}")
        if how == "missing":
            os.unlink(store_files(prefix)[which])
        else:
            damage(store_files(prefix)[which], how, rng)
        again = Bench(Store.open(config_for(shm_dir), prefix, now_s=on_files.now_s))
        again.now_s = on_files.now_s + QUARANTINE_S
        for number in range(6):
            names = [f"new-{number}-{place}" for place in range(40)]
            again.put(names, rng.choice([PAGE, 3 * PAGE]))
            held = again.store.pin(names_to_keys(names), now_s=again.now_s)
            again.store.unpin(held.rows)
            again.verify(names_to_keys([*names, *"abcdefghxyz"]))
            again.store.delete(names_to_keys(names[:20]))
            again.store.tend(now_s=again.now_s)
        assert again.here(names[20:])
        again.store.close()
        remove_files(prefix)


def test_damaged_columns_one_by_one(shm_dir, on_files, np_rng):
    """Each column, and each other part of the table, filled with noise."""
    on_files.put("abcdefgh")
    table = on_files.store.table
    parts = {**vars(table.columns), "extents": table.extent_slots, "index 0": table._indexes[0]}
    for name, part in parts.items():
        before = part.copy()
        part[:] = np_rng.integers(0, 256, part.nbytes, np.uint8).view(part.dtype)
        prefix = crashed(on_files.store, shm_dir, "damaged")
        part[:] = before
        again = Bench(Store.open(config_for(shm_dir), prefix, now_s=on_files.now_s))
        again.put([f"{name}-{place}" for place in range(40)])
        again.store.close()
        remove_files(prefix)
    table.namespaces["text"][0] = b"{"
    prefix = crashed(on_files.store, shm_dir, "damaged")
    assert Store.open(config_for(shm_dir), prefix, now_s=on_files.now_s).recovered == 0


def test_nothing_is_left_open_when_a_file_is_refused(shm_dir, on_files, caplog):
    caplog.set_level(logging.INFO)  # pytest keeps the records, as many a log handler does
    on_files.put("abc")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        prefix = crashed(on_files.store, shm_dir, f"n{number}")
        damage(store_files(prefix)[0], "zeros", random.Random(number))
        Store.open(config_for(shm_dir), prefix, now_s=0.0).close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- what writers published -------------------------------------------------------------------------------------------

compiled = pytest.mark.skipif(not native.available, reason="without the compiled loops nobody publishes")


@compiled
def test_what_is_published_is_a_chunk_once_its_writer_tells(bench):
    bench.put("ab")
    loan = bench.lend(3)
    assert bench.publish("cde", loan) == [1, 1, 1]
    assert bench.here("abcde") == "abcde"
    assert bench.row("c") == -1
    assert bench.commit_run("bcde", loan, [1, 2, 3], parent="a", depth=1) == [True] * 3
    columns = bench.store.table.columns
    assert [columns.depth[bench.row(name)] for name in "abcde"] == [0, 1, 2, 3, 4]
    assert columns.parent[bench.row("e")] == bench.row("d")
    assert bench.store.counters.committed == 5
    assert bench.store.lent_nbytes == 0
    added, _ = bench.store.take_changes()
    assert len(added) == 5


@compiled
def test_what_is_published_is_seen_at_every_step_of_its_store(bench, monkeypatch):
    bench.put("a")
    loan, names, seen = bench.lend(9), "bcdefghij", []
    assert bench.publish(names, loan) == [1] * 9
    table = bench.store.table

    def watched(step, *arguments, **options):
        result = step(*arguments, **options)
        seen.append(bench.here(names))
        return result

    for step in ("note_taken", "insert", "leave_side"):
        monkeypatch.setattr(table, step, partial(watched, getattr(table, step)))
    assert all(bench.commit_run("abcdefghij", loan, list(range(1, 10)))), (
        "a run of which one was here: not settled at once"
    )
    assert len(seen) >= 3
    assert set(seen) == {names}


@compiled
@pytest.mark.parametrize("first", ["pin", "delete", "reserve", "tend"])
def test_the_node_takes_in_what_is_published_before_it_looks(bench, first):
    loan = bench.lend(2)
    assert bench.publish("ab", loan) == [1, 1]
    if first == "pin":
        pinned = bench.store.pin(names_to_keys("ab"), now_s=bench.now_s)
        assert (pinned.rows >= 0).all()
        assert bench.store.delete(names_to_keys("ab")) == 0
        bench.store.unpin(pinned.rows)
    elif first == "reserve":
        assert not len(bench.reserve("ab").rows)
    elif first == "tend":
        bench.store.tend(now_s=bench.now_s)
        assert bench.row("b") == loan.rows[1]
    if first == "delete":
        assert bench.store.delete(names_to_keys("ab")) == 2
        assert bench.here("ab") == ""
        assert bench.commit_run("ab", loan) == [False, False], "the slots go back, and the chunks stay deleted"
        assert bench.here("ab") == ""
        assert bench.commit_run("cd", loan) == [True, True]
    else:
        assert bench.commit_run("ab", loan) == [True, True]
        assert bench.store.table.columns.parent[bench.row("b")] == bench.row("a")
        assert bench.store.delete(names_to_keys("ab")) == 2
    check_invariants(bench.store)


@compiled
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("first", [True, False], ids=["taken in", "told"])
def test_reads_before_the_writer_tells_are_not_forgotten(bench, count, first):
    names = [chr(ord("a") + number) for number in range(count)]
    loan = bench.lend(count)
    bench.publish(names, loan)
    bench.store.table.columns.frequency[loan.rows] += 2
    if first:
        bench.store.take_in(now_s=bench.now_s)
    assert all(bench.commit_run(names, loan))
    assert bench.store.table.columns.frequency[loan.rows].tolist() == [2] * count
    bench.store.delete(names_to_keys(names))
    bench.put(names)
    assert not bench.store.table.columns.frequency[bench.store.table.find(names_to_keys(names))].any()


@compiled
def test_of_two_that_publish_and_store_the_same_key_one_is_kept(bench):
    mine, theirs = bench.lend(1), bench.lend(1)
    assert bench.publish("a", mine) == [1]
    assert bench.commit_run("a", theirs) == [False], "the node looks for what was published first"
    assert bench.commit_run("a", mine) == [True]
    assert bench.publish("a", theirs) == [2]
    reserved = bench.reserve("b")
    assert bench.publish("b", theirs) == [2], "it is being written"
    bench.store.abort(np.append(theirs.rows, reserved.rows))


@compiled
def test_what_was_published_stays_when_its_writer_goes(bench):
    told, cut_off = bench.lend(2), bench.lend(2)
    bench.publish("a", told)
    bench.publish("b", cut_off)
    bench.store.abort(told.rows)
    bench.store.abandon(cut_off.rows, now_s=bench.now_s)
    assert bench.here("ab") == "ab"
    check_invariants(bench.store)
    assert bench.publish("c", Loan(cut_off.rows[1:], cut_off.offsets[1:])) == [1], (
        "it does not know that it was cut off"
    )
    bench.store.tend(now_s=bench.now_s)
    assert bench.row("c") == cut_off.rows[1]
    bench.now_s += QUARANTINE_S
    bench.store.tend(now_s=bench.now_s)
    assert bench.here("abc") == "abc"
    assert bench.store.lent_nbytes == 0
    assert bench.store.delete(names_to_keys("abc")) == 3


@compiled
def test_after_its_rest_a_slot_cannot_be_published_any_more(bench):
    loan = bench.lend(1)
    columns = bench.store.table.columns
    before = columns.generation[loan.rows].tolist()
    bench.store.abandon(loan.rows, now_s=bench.now_s)
    bench.now_s += QUARANTINE_S
    bench.store.tend(now_s=bench.now_s)
    reader = bench.store.table.reader(bench.store.arena.view)
    late = reader.publish(loan.rows.tolist(), before, names_to_keys("a").tobytes(), bytes(8), PAGE)
    assert list(late) == [0]


def windows_of(names) -> set[int]:
    return {_window_of(*pair(name)) // SIDE_WINDOW for name in names}


@compiled
def test_a_new_process_clears_entries_that_the_last_one_was_about_to(shm_dir, on_files):
    """Killed between entering a row into the index and clearing its entry in the side index."""
    on_files.put("a")
    row = on_files.row("a")
    stale = SIDE_WINDOW * next(number for number in range(3) if number not in windows_of("ab"))
    on_files.store.table._side[stale] = row + 2
    again = Bench(Store.open(config_for(shm_dir), crashed(on_files.store, shm_dir, "second"), now_s=on_files.now_s))
    assert again.here("a") == "a"
    assert again.store.delete(names_to_keys("a")) == 1
    loan = again.lend(1)
    assert loan.rows.tolist() == [row], "the row has another key now"
    assert again.publish("b", loan) == [1]
    for _ in range(2):
        again.store.take_in(now_s=again.now_s, whole=True)
        assert again.here("b") == "b"
        assert again.row("b") == row
    assert again.store.table.side_rows() == []
    check_invariants(again.store)


@compiled
@pytest.mark.parametrize("commits", [True, False])
def test_what_is_published_while_its_key_is_being_reserved_stays(bench, monkeypatch, commits):
    """Its writer was told that it is stored; whoever reserved it may give up, or be killed."""
    loan, take = bench.lend(9), bench.store.room.take

    def take_late(*arguments):
        assert bench.publish("a", loan) == [1]
        return take(*arguments)

    monkeypatch.setattr(bench.store.room, "take", take_late)
    room = bench.reserve("abcde")
    monkeypatch.undo()
    assert room.positions.tolist() == [1, 2, 3, 4]
    assert room.full == 0
    assert bench.commit_run("abcdefghi", loan) == [True] + [False] * 4 + [True] * 4
    table = bench.store.table
    assert (table.columns.generation[loan.rows[1:5]] & 1).all(), "lent, as before"
    assert not table.has_published
    if commits:
        bench.write("abcde", room)
    else:
        bench.store.abort(room.rows)
    rest = "bcde" if commits else ""
    assert bench.publish("k", Loan(loan.rows[1:2], loan.offsets[1:2])) == [1]
    assert bench.here("abcdefghik") == f"a{rest}fghik"
    bench.store.take_in(now_s=bench.now_s)
    assert bench.here("abcdefghik") == f"a{rest}fghik"
    check_invariants(bench.store)


@compiled
def test_a_slot_that_rests_twice_rests_until_the_second_time_is_over(bench):
    """The one who was cut off last may still write to it."""
    loan, cut_off_s = bench.lend(1), bench.now_s
    bench.store.abandon(loan.rows, now_s=cut_off_s)
    assert bench.publish("a", loan) == [1]  # late, but the slot still rests
    bench.store.tend(now_s=cut_off_s + 0.1 * QUARANTINE_S)
    assert bench.store.delete(names_to_keys("a"), now_s=cut_off_s + 0.2 * QUARANTINE_S) == 1
    bench.now_s = cut_off_s + 0.2 * QUARANTINE_S
    again = bench.lend(1)
    assert again.offsets == loan.offsets
    bench.store.abandon(again.rows, now_s=cut_off_s + 0.9 * QUARANTINE_S)
    bench.store.tend(now_s=cut_off_s + 1.1 * QUARANTINE_S)
    assert bench.store.room.resting.tolist() == again.rows.tolist()
    bench.store.tend(now_s=cut_off_s + 1.9 * QUARANTINE_S)
    assert bench.store.room.resting.tolist() == []
    check_invariants(bench.store)


def test_a_lent_row_does_not_expire_with_what_lay_there_before(bench):
    bench.put("a")
    row = bench.row("a")
    bench.store.table.cells.expires[row] = 1
    bench.store.delete(names_to_keys("a"), now_s=bench.now_s)
    room = bench.reserve("b")
    assert room.rows.tolist() == [row]
    assert bench.store.table.cells.expires[row] == 0


@compiled
def test_a_new_process_takes_over_what_was_published(shm_dir, on_files):
    on_files.put("ab")
    loan = on_files.lend(5)
    assert on_files.publish("cde", loan) == [1, 1, 1]
    on_files.store.pin(names_to_keys("e"), now_s=on_files.now_s)  # takes it in, and its writer has not told yet
    again = Bench(Store.open(config_for(shm_dir), crashed(on_files.store, shm_dir, "second"), now_s=on_files.now_s))
    assert again.store.recovered == 5
    assert again.here("abcde") == "abcde"
    assert {again.row(name) for name in "cde"} == set(loan.rows[:3].tolist())
    late = Loan(loan.rows[3:], loan.offsets[3:])
    assert again.publish("fa", late) == [1, 2], "a writer that has not noticed yet"
    again.store.tend(now_s=again.now_s)
    check_invariants(again.store)
    assert again.here("abcdef") == "abcdef"
    again.now_s += QUARANTINE_S
    again.store.tend(now_s=again.now_s)
    check_invariants(again.store)
    assert again.store.delete(names_to_keys("abcdef")) == 6
    again.store.close()


def test_processes_that_die_one_after_the_other_do_not_make_slots_rest_for_ever(shm_dir, on_files):
    """What rested when a process died goes on resting, and no longer than it would have."""
    bench, closed = on_files, []
    lent = bench.lend(4, 64 * KIB)
    for life in range(3):
        prefix = crashed(bench.store, shm_dir, f"life-{life}")
        now_s = bench.now_s + QUARANTINE_S / 4
        bench = Bench(Store.open(config_for(shm_dir), prefix, now_s=now_s))
        bench.now_s = now_s
        closed.append(bench.store)
        bench.lend(1, 64 * KIB)
        assert set(lent.rows.tolist()) <= set(bench.store.room.resting.tolist())
        assert len(bench.store.room.resting) == 4 + life
    bench.now_s += QUARANTINE_S / 4
    bench.store.tend(now_s=bench.now_s)
    assert len(bench.store.room.resting) == 2, "those of the first process are back, later ones are not"
    check_invariants(bench.store)
    bench.now_s += QUARANTINE_S
    bench.store.tend(now_s=bench.now_s)
    assert not len(bench.store.room.resting)
    for store in closed:
        store.close()


# -- everything at once -----------------------------------------------------------------------------------------------


def store_some(bench: Bench, rng: random.Random, first: str, loan: Loan, nbytes: int, parent: str | None) -> None:
    """Write some chunks of a run to lent slots, as many as there are; what is not used goes back."""
    names = [f"{first}{place}" for place in rng.sample(range(9), rng.randrange(1, 10))]
    written = sorted(rng.sample(range(len(names)), min(len(names), len(loan.rows))))
    used = bench.commit_run(names, loan, written, nbytes, parent=parent, chained=rng.random() < 0.8)
    assert all(bench.row(names[place]) >= 0 for place in written)
    used += [False] * (len(loan.rows) - len(used))
    bench.store.abort(loan.rows[~np.array(used, np.bool_)])


def store_published(bench: Bench, names: list[str], loan: Loan, nbytes: int, parent: str | None, chained: bool) -> None:
    """Tell the store of chunks that were published, or could not be; what is not used goes back."""
    rows = loan.rows[: len(names)]
    columns = bench.store.table.columns
    used = bench.store.store(
        names_to_keys(names),
        np.arange(len(names), dtype=np.int32),
        rows,
        np.array([checksum_of([content(name, nbytes)]) for name in names], np.uint64),
        nbytes,
        bench.group,
        chained=chained,
        parent=None if parent is None else names_to_keys([parent]),
        depth=0,
        now_s=bench.now_s,
    )
    assert all(columns.generation[rows[~used]] & 1), "given back, and visible"
    bench.store.abort(np.append(rows[~used], loan.rows[len(names) :]))


class EvictionLog(LRU):
    """LRU that notes what it is told of, and checks that it is told right."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def came(self, columns, rows, now):
        assert not self.rows & set(rows.tolist()), "told twice"
        assert (columns.generation[rows] & 1 == 0).all()
        assert (columns.parent[rows] != LENT).all(), "without its place in a chain"
        self.rows |= set(rows.tolist())

    def went(self, columns, rows, now, *, evicted):
        assert self.rows >= set(rows.tolist()), "never told of"
        assert columns.nbytes[rows].all()
        self.rows -= set(rows.tolist())


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
FULL = {"arena_nbytes": 128 * KIB}  # holds as many chunks


def newest_first(columns, rows, now):
    return -columns.inserted[rows].astype(int)


def test_another_policy_goes_on_with_what_is_there():
    bench = Bench(Store.open(config_for(policy="fifo", **FULL), None, now_s=0.0))
    for name in LETTERS:
        bench.put(name)
    bench.store.unpin(bench.store.pin(names_to_keys("ABCD"), now_s=bench.now_s).rows)
    bench.store.use_policy(None, "lru", now_s=bench.now_s)
    bench.put("uv", chained=False)
    assert bench.here(LETTERS) == LETTERS.replace("EF", ""), "the first were read since"
    bench.store.use_policy(None, newest_first, now_s=bench.now_s)
    bench.put("w")
    assert bench.here("uvw") in ("uw", "vw")
    bench.store.use_policy(None, None, now_s=bench.now_s)
    bench.put("x")
    assert bench.here(LETTERS) == LETTERS[1:].replace("EF", ""), "by the config's again"
    with pytest.raises(ConfigError, match="sieve"):
        bench.store.use_policy(None, "sieve", now_s=bench.now_s)
    bench.store.close()


def test_each_account_by_its_own_policy():
    bench = Bench(Store.open(config_for(policy="lru", **FULL), None, now_s=0.0))
    other = bench.store.groups.open(Namespace(model="b"))
    mine, theirs = LETTERS[:16], LETTERS[16:]
    for name in mine:
        bench.put(name)
    for name in theirs:
        bench.put(name, group=other)
    bench.store.use_policy(other, newest_first, now_s=bench.now_s)
    bench.put("uvwx", chained=False)
    assert (bench.here(mine), bench.here(theirs)) == (mine[2:], theirs[:-2]), (
        "each gives its share, and by its own rule"
    )
    bench.store.use_policy(other, None, now_s=bench.now_s)
    bench.put("yz", chained=False)
    assert (bench.here(mine), bench.here(theirs)) == (mine[4:], theirs[:-2]), "by one rule again"
    bench.store.close()


def test_an_account_that_cannot_give_its_share_is_helped_out():
    bench = Bench(Store.open(config_for(policy="lru", **FULL), None, now_s=0.0))
    other = bench.store.groups.open(Namespace(model="b"))
    for name in LETTERS[:16]:
        bench.put(name)
    bench.put(LETTERS[16:], group=other)
    bench.store.use_policy(other, "leaf_lru", now_s=bench.now_s)
    held = bench.store.pin(names_to_keys(LETTERS[-1]), now_s=bench.now_s)  # so nothing above it may go
    assert bench.put("uvwxyz", chained=False) == 6
    assert bench.here(LETTERS) == LETTERS[6:]
    bench.store.unpin(held.rows)
    bench.store.close()


def test_a_policy_of_a_users_own_that_fails_does_no_harm(caplog):
    bench = Bench(Store.open(config_for(**FULL), None, now_s=0.0))
    fine = [True]

    def score(columns, rows, now):
        return rows if fine[0] else 1 / 0

    bench.store.use_policy(None, score, now_s=bench.now_s)
    for name in LETTERS:
        bench.put(name)
    fine[0] = False
    bench.put("u")
    bench.put("v")
    assert bench.here(LETTERS + "uv") == LETTERS[2:] + "uv", "by leaf_lru"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "leaf_lru takes its place" in caplog.text
    bench.store.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("round_", [*(pytest.param(number, marks=pytest.mark.slow) for number in range(3)), 3])
def test_random_operations(policy, round_, rng):  # noqa: C901 - a case for each operation
    """Whatever is done in whatever order, the columns agree with each other and every byte is right."""
    bench = Bench(Store.open(config_for(policy=policy, arena_nbytes=512 * KIB), None, now_s=0.0))
    store = bench.store
    groups = [bench.group, store.groups.open(Namespace(model="b"), 300 * KIB)]
    alphabet = [f"{a}{b}" for a in "abcdefghijkl" for b in range(9)]
    sizes = {letter: rng.choice([PAGE, 2 * PAGE, 5 * PAGE, 16 * PAGE]) for letter in "abcdefghijkl"}
    open_rooms: list[tuple[list[str], Reserved, int]] = []
    loans: list[tuple[str, Loan]] = []
    told: list[tuple[str, list[str], Loan]] = []
    pins: list[np.ndarray] = []
    doomed: list[tuple[np.ndarray, np.ndarray]] = []
    eviction_log: EvictionLog | None = None
    for _ in range(400):
        first = rng.choice("abcdefghijkl")
        names = [f"{first}{place}" for place in range(rng.randrange(1, 9))]
        nbytes = sizes[first]
        match rng.choice(
            ["put"] * 8
            + ["lend"] * 3
            + ["store"] * 3
            + ["publish", "tell"] * 3 * native.available
            + ["cut off", "give back", "reserve", "commit", "abort", "abandon", "pin", "unpin", "delete", "time"]
            + ["policy"] * (round_ % 2)
            + ["doom", "drop", "hint", "configure", "sweep"] * (round_ > 1)
        ):
            case "put":
                chained = rng.random() < 0.8
                parent = rng.choice(alphabet) if chained and rng.random() < 0.3 else None
                bench.put(names, nbytes, group=groups[ord(first) % 2], chained=chained, parent=parent)
            case "reserve":
                open_rooms.append((names, bench.reserve(names, nbytes), nbytes))
            case "lend":
                bench.group = groups[ord(first) % 2]
                spared = {"keys": names, "parent": [rng.choice(alphabet)]} if rng.random() < 0.5 else {}
                count, ahead = rng.randrange(4), rng.choice([0, 0, 5])
                loans.append((first, bench.lend(count, nbytes, ahead=ahead, **spared)))
            case "store" if loans:
                first, loan = loans.pop(rng.randrange(len(loans)))
                bench.group = groups[ord(first) % 2]
                store_some(bench, rng, first, loan, sizes[first], rng.choice([None, *alphabet]))
            case "publish" if loans:
                first, loan = loans.pop(rng.randrange(len(loans)))
                names = [f"{first}{place}" for place in rng.sample(range(9), min(9, len(loan.rows)))]
                known = [bool(bench.here([name])) or bench.row(name) >= 0 for name in names]
                verdicts = bench.publish(names, loan, sizes[first])
                assert [verdict != 1 for verdict in verdicts] == known
                assert all(bench.here([name]) for name, was_known in zip(names, known, strict=True) if not was_known)
                told.append((first, names, loan))
            case "tell" if told:
                first, names, loan = told.pop(rng.randrange(len(told)))
                bench.group = groups[ord(first) % 2]
                store_published(bench, names, loan, sizes[first], rng.choice([None, *alphabet]), rng.random() < 0.8)
            case "cut off" if told:
                store.abandon(told.pop()[2].rows, now_s=bench.now_s)
            case "give back" if loans:
                store.abandon(loans.pop()[1].rows, now_s=bench.now_s)
            case "commit" if open_rooms:
                bench.write(*open_rooms.pop(rng.randrange(len(open_rooms))))
            case "abort" if open_rooms:
                store.abort(open_rooms.pop()[1].rows)
            case "abandon" if open_rooms:
                store.abandon(open_rooms.pop()[1].rows, now_s=bench.now_s)
            case "pin":
                pins.append(store.pin(names_to_keys(names), now_s=bench.now_s).rows)
            case "unpin" if pins:
                store.unpin(pins.pop(rng.randrange(len(pins))))
            case "delete":
                store.delete(names_to_keys(names))
            case "time":
                bench.now_s += rng.choice([1.0, QUARANTINE_S])
                store.tend(now_s=bench.now_s)
            case "doom":
                doomed.append(store.doomed(rng.choice(groups), now_s=bench.now_s))
            case "drop" if doomed:
                rows, generations = doomed.pop()
                store.drop_doomed(rows[:20], generations[:20])
            case "hint":
                store.hint(
                    names_to_keys(names),
                    ttl_s=rng.choice([None, 0.0, 20.0]),
                    priority=rng.choice([None, -5, 0, 5]),
                    ended=rng.random() < 0.3,
                    touch=rng.random() < 0.3,
                    now_s=bench.now_s,
                )
            case "sweep":
                store.sweep(nullcontext(), now_s=bench.now_s)
            case "configure":
                eviction_log = None
                config = NamespaceConfig(
                    policy=rng.choice([None, *POLICIES]),
                    ttl_s=rng.choice([None, 30.0]),
                    dram_quota_nbytes=rng.choice([None, 200 * KIB]),
                    tiers=rng.choice(["both", "ssd"]),
                )
                store.configure(rng.choice(groups), config, now_s=bench.now_s)
            case "policy":
                eviction_log = None
                store.use_policy(rng.choice([None, *groups]), rng.choice([None, *POLICIES]), now_s=bench.now_s)
                if rng.random() < 0.5:
                    for group in groups:
                        store.use_policy(group, None, now_s=bench.now_s)
                    store.use_policy(None, EvictionLog, now_s=bench.now_s)
                    eviction_log = store.room.policies.default
        check_invariants(store)
        if eviction_log is not None:
            ready = store.table.ready_rows()
            assert eviction_log.rows == set(ready[store.table.columns.parent[ready] != LENT].tolist())
        bench.here(alphabet)
        held = np.zeros(store.table.rows, np.int64)
        for rows in pins:
            np.add.at(held, rows[rows >= 0], 1)
        assert store.table.columns.pins.tolist() == held.tolist()
    print(f"{store.counters}")
    assert store.counters.evicted > 0
    went = store.room.departures.sum(axis=0)
    counters = store.counters
    assert went[1:6].tolist() == [
        counters.evicted, counters.expired, counters.deleted, counters.dropped, counters.corrupt,
    ]  # fmt: skip
    store.close()


write_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"), st.text("abcdef", min_size=1, max_size=6), st.integers(0, 63), st.sampled_from("-acz")
        ),
        st.tuples(st.just("reserve"), st.text("abcdef", min_size=1, max_size=4), st.just(0), st.just("-")),
        st.tuples(st.just("delete"), st.text("abcdef", min_size=1, max_size=2), st.just(0), st.just("-")),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(write_steps)
def test_lend_and_store_do_what_a_dict_does(steps):
    """A model without slots or rows: which keys are there, which are being written, and what hangs on what."""
    bench = Bench(Store.open(config_for(), None, now_s=0.0))
    ready: dict[str, tuple[str, int]] = {}  # name -> its parent at the time, its depth
    writing: dict[str, tuple[str, int]] = {}
    for what, names, choice, parent in steps:
        known = ready | writing
        base = known[parent][1] + 1 if parent in known else 5
        if what == "delete":
            bench.store.delete(names_to_keys(names))
            ready = {name: about for name, about in ready.items() if name not in names}
        elif what == "reserve":
            room = bench.reserve(names)
            for place in room.positions.tolist():
                before = names[place - 1] if place else "-"
                writing[names[place]] = (before, place)
        else:
            written = [place for place in range(len(names)) if choice >> place & 1]
            loan = bench.lend(len(written))
            used = bench.commit_run(names, loan, written, parent=None if parent == "-" else parent, depth=5)
            for place, was_used in zip(written, used, strict=True):
                assert was_used == (names[place] not in known), "stored twice, or not at all"
                before = names[place - 1] if place else parent
                if was_used:
                    known[names[place]] = ready[names[place]] = (before, base + place)
            unused = [row for row, was_used in zip(loan.rows.tolist(), used, strict=True) if not was_used]
            bench.store.abort(np.array(unused, np.int32))
        assert set(bench.here("abcdef")) == set(ready)
        assert {name for name in "abcdef" if bench.row(name) >= 0} == set(ready | writing)
        depths = {name: int(bench.store.table.columns.depth[bench.row(name)]) for name in ready}
        assert depths == {name: depth for name, (_, depth) in ready.items()}
        check_invariants(bench.store)
    bench.store.close()


# -- ten million rows -------------------------------------------------------------------------------------------------


def private_nbytes() -> int:
    """Memory of this process that it shares with nobody."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(10_000_000, id="10M")])
def test_a_large_table_costs_what_its_rows_cost(rows, monkeypatch, np_rng):
    """No list of all rows or slots, at the start or later; no step that takes long because the table is large."""
    monkeypatch.setattr("raykv.storage.store.require_room", lambda *args, **options: None)
    monkeypatch.setattr(
        "raykv.storage.store._back", lambda arena, extent_nbytes, extent, **options: True
    )  # nobody writes to it here
    config = config_for(arena_nbytes=rows * PAGE, extent_nbytes=32 << 20, max_chunks=rows)
    batch, now_s, before, start_s = 8192, 1.0, private_nbytes(), time.monotonic()
    store = Store.open(config, None, now_s=0.0)
    group = store.groups.open(SPACE)
    assert time.monotonic() - start_s < 2.0
    assert private_nbytes() - before < 64 << 20
    took_s = []

    def write(count: int) -> int:
        keys = np.frombuffer(np_rng.bytes(16 * count), "<u8").reshape(-1, 2)
        start_s = time.monotonic()
        loan = store.lend(count, PAGE, group, now_s=now_s)
        stored = 0
        for first in range(0, len(loan.rows), 512):
            run = slice(first, first + 512)
            positions = np.arange(len(loan.rows[run]), dtype=np.int32)
            options = {"chained": True, "parent": None, "depth": 0, "now_s": now_s}
            checksums = positions.astype(np.uint64)
            used = store.store(keys[run], positions, loan.rows[run], checksums, PAGE, group, **options)
            stored += int(used.sum())
        took_s.append(time.monotonic() - start_s)
        return stored

    while store.chunks < rows * 0.97:
        while upto := store.bare_rows():
            assert store.table.back_rows(upto)
            store.note_rows_backed()
        now_s += 0.01
        assert write(batch) == batch
        store.take_changes()
    print(f"{store.chunks:,} chunks, {(private_nbytes() - before) / rows:.1f} private bytes a row")
    assert private_nbytes() - before < 10 * rows
    took_s.clear()
    for _ in range(200):  # beyond what is free: others go for it, in samples
        now_s += 0.01
        assert write(2048) == 2048
    assert store.counters.evicted > 0
    print(f"2048 chunks at most {max(took_s) * 1e3:.0f} ms, usually {sorted(took_s)[100] * 1e3:.0f} ms")
    assert sorted(took_s)[100] < 0.2
    steps = 0
    while store.short:
        store.tend(now_s=now_s)
        steps += 1
    assert steps > 10
    assert store.chunks == len(store.table.ready_rows()) > rows * 0.9
    inserted = store.table.columns.inserted
    ready = store.table.ready_rows()
    assert int(inserted[ready].max()) == store.table.ticks(now_s), "the newest stay"
    start_s = time.monotonic()
    again = Store(config, store.table, store.arena, now_s=now_s)
    print(f"taken over in {time.monotonic() - start_s:.1f} s")
    assert (again.chunks, again.used_nbytes) == (store.chunks, store.used_nbytes)
    assert again.room.slots.free_nbytes == store.room.slots.free_nbytes
    assert len(again.room.free_rows) == len(store.room.free_rows) + store.room._left_behind
    store.close()
