"""Lend, fill, commit: what a writer can do, and what it cannot."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.errors import UsageError
from raykv.memory.layout import MAX_DEPTH, QUARANTINE_S, TICKS_PER_S, RowState
from raykv.protocol.namespace import Namespace
from raykv.storage.store import Written
from raykv.types import Hints
from tests.support.stores import KIB, Bench, batch_of, check, names_to_keys, states


@pytest.fixture
def bench():
    made = Bench.open()
    yield made
    made.close()


def test_lent_slots_are_invisible_until_committed(bench):
    lent = bench.lend(3)
    assert (len(set(lent.offsets.tolist())), bench.store.chunks) == (3, 0)
    bench.fill(lent, "abc")
    assert bench.here("abc") == ""
    assert bench.commit("abc", lent) == [True] * 3
    assert bench.here("abc") == "abc"
    assert bench.store.chunks == 3


def test_missing_names_each_key_once_that_is_not_ready(bench):
    bench.put("ab")
    bench.put("c", hints={"ttl_s": 5.0})
    assert bench.store.missing(names_to_keys("daebdc"), now_s=bench.now_s).tolist() == [0, 2]
    bench.now_s += 6.0
    assert bench.store.missing(names_to_keys("daebdc"), now_s=bench.now_s).tolist() == [0, 2, 5]
    assert bench.store.missing(names_to_keys(""), now_s=bench.now_s).tolist() == []


def test_a_lent_slot_is_used_room_and_nothing_else(bench):
    lent = bench.lend(3, 64 * KIB)
    assert (bench.store.used_nbytes, bench.store.lent_nbytes) == (3 * 64 * KIB, 3 * 64 * KIB)
    check(bench.store)
    assert bench.commit("abc", lent, nbytes=64 * KIB - 7) == [True] * 3
    assert bench.here("abc") == "abc"
    assert bench.store.lent_nbytes == 0
    again = bench.lend(1, 64 * KIB)
    bench.store.give_back(again.rows)
    assert bench.store.used_nbytes == 3 * 64 * KIB


def test_slots_that_are_given_back_serve_others(bench):
    lent = bench.lend(16, 64 * KIB)
    assert bench.put("a", 64 * KIB) == 0
    bench.store.give_back(lent.rows)
    assert bench.put("abc", 64 * KIB) == 3


def test_a_commit_leaves_out_what_is_here_already(bench):
    bench.put("ac")
    lent = bench.lend(4)
    assert bench.commit("abcdef", lent, [0, 1, 4, 5]) == [False, True, True, True]
    bench.store.give_back(lent.rows[:1])
    assert bench.here("abcdef") == "abcef"
    assert bench.column("parent", "bf") == [bench.row("a"), bench.row("e")]
    assert bench.column("depth", "bef") == [1, 4, 5]


def test_of_two_writers_of_one_key_the_second_returns_the_slot(bench):
    first, second = bench.lend(2), bench.lend(2)
    assert bench.commit("ab", first) == [True, True]
    assert bench.commit("bc", second) == [False, True]
    bench.store.give_back(second.rows[:1])
    assert bench.here("abc") == "abc"


@pytest.mark.parametrize("count", [2, 6])
def test_a_key_named_twice_is_stored_once(bench, count):
    lent = bench.lend(count)
    assert bench.commit(["a"] * count, lent) == [True] + [False] * (count - 1)
    bench.store.give_back(lent.rows[1:])


@pytest.mark.parametrize("count", [1, 3, 9])
def test_one_chunk_and_many_are_stored_alike(bench, count):
    bench.put("z")
    names = [f"n{place}" for place in range(count)]
    assert all(bench.commit([*names, "n0"], bench.lend(count), range(count), parent="z", depth=77))
    rows = [bench.row(name) for name in ["z", *names]]
    assert bench.column("parent", ["z", *names]) == [-1, *rows[:-1]]
    assert bench.column("depth", ["z", *names]) == list(range(count + 1))
    assert bench.column("children", ["z", *names]) == [1] * count + [0]
    assert bench.here(names) == "".join(names)
    assert sorted(bench.store.take_changes()[0].tolist()) == sorted(names_to_keys(["z", *names]).tolist())


def test_chains_are_linked_and_depth_comes_from_the_parent(bench):
    bench.put("abc")
    bench.put("de", parent="c", depth=99)
    bench.put("xy", parent="gone", depth=7)
    bench.put("pq", chained=False)
    name_of = {bench.row(name): name for name in "abcdexypq"} | {-1: "-"}
    assert "".join(name_of[row] for row in bench.column("parent", "abcdexypq")) == "-abcd-x--"
    assert bench.column("depth", "abcdexypq") == [0, 1, 2, 3, 4, 7, 8, 0, 0]


def test_a_chain_may_branch_and_be_filled_in(bench):
    bench.put("ab")
    bench.put("abxy")
    bench.put("abz")
    assert bench.column("children", "b") == [2]


def test_depth_follows_a_chunk_of_the_batch_that_is_here_and_not_the_writer(bench):
    """If a writer and the table disagree on a depth, later chunks continue from the depth in the table."""
    bench.put("c", depth=40)
    assert bench.put("abcdef", depth=5) == 5
    assert bench.column("depth", "abcdef") == [5, 6, 40, 41, 42, 43]


def test_a_reused_row_is_no_parent_of_the_old_children(bench):
    """A link holds the parent's row and generation, so a later chunk in the same row does not become the parent."""
    bench.put("abc")
    row = bench.row("a")
    assert bench.delete("a") == 1
    bench.put("x", chained=False)
    assert bench.row("x") == row
    assert (bench.column("parent", "b"), bench.column("children", "x")) == ([row], [0])
    assert bench.delete("b") == 1
    assert bench.column("children", "x") == [0]
    assert bench.put("ab") == 2
    assert bench.column("children", "xab") == [0, 1, 0]


def test_depth_is_not_taken_from_the_chunk_that_had_a_row_before(bench):
    names = [f"d{place}" for place in range(5)]
    bench.put(names, depth=700)
    bench.delete(names)
    bench.put(["parent"])
    bench.put(["b1", "b2"], parent="parent", depth=1)
    assert bench.column("depth", ["parent", "b1", "b2"]) == [0, 1, 2]


def test_hints_of_the_batch(bench):
    bench.put("a", hints={"ttl_s": 10.0, "priority": -3})
    bench.put("b", hints={"priority": 3})
    rows, now = bench.store.table.find(names_to_keys("ab")), bench.store.table.ticks(bench.now_s)
    assert bench.store.row_hints.ranks(rows, now).tolist() == [-3, 3]
    stored = bench.column("inserted", "a")[0]
    assert bench.column("expires", "ab") == [stored + 10 * TICKS_PER_S, 0]


def test_a_lent_row_does_not_expire_with_the_chunk_that_had_it_before(bench):
    bench.put("a", hints={"ttl_s": 5.0})
    row = bench.row("a")
    bench.delete("a")
    assert bench.put("b") == 1
    assert bench.row("b") == row
    assert bench.column("expires", "b") == bench.column("frequency", "b") == [0]


@pytest.mark.parametrize("nbytes", [-1, 0, 64 * KIB + 1, 1 << 40])
def test_sizes_that_fit_no_extent(bench, nbytes):
    with pytest.raises(UsageError, match="extent_nbytes"):
        bench.lend(1, nbytes)


def test_a_wrong_commit_is_refused_with_a_reason_and_stores_nothing(bench):
    lent, returned = bench.lend(6), bench.lend(1)
    bench.store.give_back(returned.rows)
    bench.put("r")
    other = bench.store.groups.open(Namespace(model="other"))
    for count in (1, 6):
        rows, batch = lent.rows[:count], batch_of("abcdef"[:count], chained=False)
        positions, checksums = np.arange(count, dtype=np.int32), np.zeros(count, np.uint64)
        not_lent = (-1, 64, 1 << 30, 63, int(returned.rows[0]), bench.row("r"))
        wrong = [
            *((replace(batch, nbytes=nbytes), rows, "size|fit") for nbytes in (0, PAGE + 1, 1 << 40)),
            *((replace(batch, depth=depth), rows, "depth") for depth in (-1, MAX_DEPTH, float("nan"))),
            (replace(batch, hints=Hints(ttl_s=float("nan"))), rows, "ttl_s"),
            (replace(batch, hints=Hints(ttl_s=-1.0)), rows, "ttl_s"),
            (replace(batch, hints=Hints(priority=101)), rows, "priority"),
            *((batch, np.append(rows[1:], np.int32(row)), "lent|outside") for row in not_lent),
            *([(batch, np.repeat(rows[:1], count), "twice")] if count > 1 else []),
        ]
        placed = [(bench.group, *each[:2], positions, checksums, each[2]) for each in wrong]
        placed += [(other, batch, rows, positions, checksums, "another namespace")]
        placed += [(bench.group, batch, rows, positions + shift, checksums, "positions") for shift in (-1, 1)]
        placed += [(bench.group, batch, rows, positions[1:], checksums, "positions")]
        placed += [(bench.group, batch, rows, positions, checksums[1:], "checksums")]
        for group, bad, some, at, sums, message in placed:
            with pytest.raises(UsageError, match=message):
                bench.store.commit(group, bad, Written(at, some, sums), now_s=9.0)
            check(bench.store)
        assert bench.here("abcdef") == ""
    assert states(bench.store)[RowState.LENT] == sorted(lent.rows.tolist())


def test_only_lent_slots_are_given_back_or_quarantined(bench):
    lent = bench.lend(2)
    bench.put("a")
    for rows in ([bench.row("a")], [-1], [64], [63], [*lent.rows.tolist(), int(lent.rows[0])]):
        for end in (bench.store.give_back, lambda rows: bench.store.quarantine(rows, now_s=bench.now_s)):
            with pytest.raises(UsageError, match=r"lent|outside"):
                end(np.array(rows, np.int32))
            check(bench.store)
    bench.store.give_back(lent.rows)
    with pytest.raises(UsageError, match="lent"):
        bench.store.give_back(lent.rows)


def test_slots_of_a_writer_that_was_cut_off_are_of_no_use_for_a_while(bench):
    lent = bench.lend(16, 64 * KIB)
    bench.store.quarantine(lent.rows[:15], now_s=bench.now_s)
    assert (bench.store.lent_nbytes, bench.store.used_nbytes) == (64 * KIB, 16 * 64 * KIB)
    assert bench.put("q", 64 * KIB) == 0  # the writer may still be writing to its slots
    check(bench.store)
    bench.now_s += QUARANTINE_S
    assert bench.put("abc", 64 * KIB) == 3
    bench.store.quarantine(lent.rows[:0], now_s=bench.now_s)
    assert states(bench.store)[RowState.QUARANTINED] == []


def test_a_slot_that_is_quarantined_twice_stays_until_the_second_time_is_over(bench):
    lent, cut_off_s = bench.lend(1), bench.now_s
    bench.store.quarantine(lent.rows, now_s=cut_off_s)
    bench.store.evict_ahead(now_s=cut_off_s + QUARANTINE_S)
    again = bench.lend(1)
    assert again.rows == lent.rows
    bench.store.quarantine(again.rows, now_s=cut_off_s + 1.5 * QUARANTINE_S)
    bench.store.evict_ahead(now_s=cut_off_s + 2.4 * QUARANTINE_S)
    assert states(bench.store)[RowState.QUARANTINED] == again.rows.tolist()
    bench.store.evict_ahead(now_s=cut_off_s + 2.5 * QUARANTINE_S)
    assert states(bench.store)[RowState.QUARANTINED] == []


def test_reads_of_the_chunk_before_are_not_counted(bench):
    bench.put("abc")
    bench.store.unpin(bench.pin("abcabc"))
    bench.delete("abc")
    bench.put("abc")
    assert bench.column("frequency", "abc") == [0, 0, 0]


write_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("commit"), st.text("abcdef", min_size=1, max_size=6), st.integers(0, 63), st.sampled_from("-acz")
        ),
        st.tuples(st.just("delete"), st.text("abcdef", min_size=1, max_size=2), st.just(0), st.just("-")),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(write_steps)
def test_lend_and_commit_do_what_a_dict_does(steps):
    """The model is a dict: name of each stored chunk -> depth. It has no slots and no rows."""
    bench = Bench.open()
    depths: dict[str, int] = {}
    for what, names, choice, parent in steps:
        if what == "delete":
            bench.delete(names)
            depths = {name: depth for name, depth in depths.items() if name not in names}
        else:
            written = [place for place in range(len(names)) if choice >> place & 1]
            lent = bench.lend(len(written))
            used = bench.commit(names, lent, written, parent=None if parent == "-" else parent, depth=5)
            old = dict(depths)
            here, above = {}, old.get(parent)
            for place, name in enumerate(names):
                if name in old:
                    here[place] = old[name]
                elif place in written and name not in depths:
                    before = above if place == 0 else here.get(place - 1)
                    here[place] = depths[name] = before + 1 if before is not None else 5 + place
            for place, was_used in zip(written, used, strict=True):
                first = names[place] not in [names[before] for before in written if before < place]
                assert was_used == (first and names[place] not in old), "stored twice, or not at all"
            bench.store.give_back(lent.rows[~np.array(used, np.bool_)])
        assert set(bench.here("abcdef")) == set(depths)
        assert dict(zip(depths, bench.column("depth", depths), strict=True)) == depths
        check(bench.store)
    bench.close()
