"""Pins, and all ways to remove a chunk: delete, drop, damage, expiry."""

from contextlib import nullcontext

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig
from raykv.errors import UsageError
from raykv.memory.layout import RowState
from raykv.protocol.reasons import Place, Reason
from raykv.storage.evictor import MAX_PINS
from tests.support.stores import KIB, Bench, check, content, names_to_keys, states


@pytest.fixture
def bench():
    made = Bench.open()
    yield made
    made.close()


# -- pins -------------------------------------------------------------------------------------------------------------


def test_pinned_chunks_are_not_evicted(bench):
    bench.put("abc", 64 * KIB, chained=False)
    pinned = bench.store.pin(names_to_keys("axc"), now_s=bench.now_s)
    assert (pinned.rows >= 0).tolist() == [True, False, True]
    assert pinned.nbytes[pinned.rows >= 0].tolist() == [64 * KIB] * 2
    assert bench.put([f"n{number}" for number in range(20)], 64 * KIB, chained=False) == 14
    assert bench.here("abc") == "ac"
    bench.store.unpin(pinned.rows)
    assert bench.put("m", 64 * KIB) == 1


@pytest.mark.parametrize("how", ["delete", "drop", "corrupt", "expire", "expire by a commit"])
def test_a_pinned_chunk_that_is_removed_is_gone_at_once_and_freed_at_the_last_unpin(bench, how):
    bench.put("abc", 64 * KIB, hints={"ttl_s": 5.0} if "expire" in how else {})
    twice = [bench.store.pin(names_to_keys("ab"), now_s=bench.now_s) for _ in range(2)]
    row, offset = int(twice[0].rows[0]), int(twice[0].offsets[0])
    match how:
        case "delete":
            assert bench.delete("a") == 1
        case "drop":
            rows, generations = bench.store.rows_of(bench.group)
            assert bench.store.drop(rows[:1], generations[:1], now_s=bench.now_s) == 1
        case "corrupt":
            assert bench.store.drop_corrupt(twice[0].rows[:1], now_s=bench.now_s) == 1
        case "expire":
            bench.now_s += 10.0
            assert bench.store.expire(nullcontext(), now_s=bench.now_s) == 3
        case "expire by a commit":
            bench.now_s += 10.0
            assert bench.put("a", 64 * KIB) == 1
            assert bench.row("a") != row
    assert (bench.row("a") == -1) == (how != "expire by a commit")
    assert row in states(bench.store)[RowState.PENDING_DELETE]
    check(bench.store)
    assert bytes(bench.store.arena.view[offset : offset + 64 * KIB]) == content("a", 64 * KIB), "its reader goes on"
    bench.put([f"n{number}" for number in range(20)], 64 * KIB, chained=False)
    assert bytes(bench.store.arena.view[offset : offset + 64 * KIB]) == content("a", 64 * KIB)
    bench.store.unpin(twice[0].rows)
    check(bench.store)
    assert row in states(bench.store)[RowState.PENDING_DELETE]
    bench.store.unpin(twice[1].rows)
    assert row in states(bench.store)[RowState.FREE]
    assert bench.put("xyz", 64 * KIB, chained=False) == 3


def test_deleting_again_and_storing_again_while_pinned(bench):
    bench.put("a")
    first = bench.pin("a")
    assert [bench.delete("a"), bench.delete("a")] == [1, 0]
    assert bench.put("a") == 1
    second = bench.pin("a")
    assert first.tolist() != second.tolist()
    assert bench.delete("a") == 1
    assert len(states(bench.store)[RowState.PENDING_DELETE]) == 2
    bench.store.unpin(np.append(second, first))
    assert states(bench.store)[RowState.PENDING_DELETE] == []
    assert bench.store.used_nbytes == 0


def test_pins_are_counted_and_bounded(bench):
    bench.put("a")
    many = np.repeat(names_to_keys("a"), MAX_PINS, axis=0)
    first = bench.store.pin(many, now_s=bench.now_s)
    assert (first.rows >= 0).all()
    assert bench.pin("a").tolist() == [-1]
    bench.store.unpin(first.rows[1:])
    too_many = bench.store.pin(np.repeat(names_to_keys("a"), MAX_PINS + 1, axis=0), now_s=bench.now_s)
    assert (too_many.rows == -1).all()
    bench.store.unpin(first.rows[:1])
    assert not bench.store.table.columns.pins.any()


def test_a_pin_ends_once(bench):
    bench.put("ab")
    rows = bench.pin("aab")
    bench.store.unpin(rows[:1])
    for wrong in (rows[[0, 0]], np.append(rows[1:], rows[1:])):
        with pytest.raises(UsageError, match="pins"):
            bench.store.unpin(wrong)
        assert bench.column("pins", "ab") == [1, 1]
    bench.store.unpin(np.append(rows[1:], np.int32(-1)))
    bench.store.unpin(rows[:0])


def test_a_pin_counts_as_a_read_unless_asked_not_to(bench):
    bench.put("ab")
    keys = names_to_keys("ab")
    bench.store.unpin(bench.store.pin(keys[:1], now_s=50.0).rows)
    bench.store.unpin(bench.store.pin(keys, now_s=60.0, touch=False).rows)
    assert bench.column("frequency", "ab") == [1, 0]
    assert bench.column("accessed", "a") == [bench.store.table.ticks(50.0)]


# -- removing ---------------------------------------------------------------------------------------------------------


def test_delete_leaves_the_rest_of_a_chain(bench):
    bench.put("abcd")
    assert bench.delete("bbz") == 1
    assert bench.here("abcd") == "acd"
    assert bench.put("abcd") == 1


def test_drop_leaves_what_has_changed_since(bench):
    bench.put("abc")
    lent = bench.lend(2)
    rows, generations = bench.store.rows_of(bench.group)
    assert sorted(rows.tolist()) == sorted(bench.row(name) for name in "abc")
    bench.delete("a")
    bench.put("x")
    assert bench.row("x") in rows
    assert bench.store.drop(rows, generations, now_s=bench.now_s) == 2
    assert bench.here("abcx") == "x"
    assert bench.store.drop(rows, generations, now_s=bench.now_s) == 0
    bench.store.give_back(lent.rows)


def test_damage_is_found_and_dropped(bench):
    bench.put("abc")
    bench.store.take_changes()
    bench.store.arena.view[bench.column("page", "b")[0] * PAGE] ^= 1
    assert bench.verify("abcz") == 1
    assert bench.here("ac") == "ac"
    assert bench.row("b") == -1
    assert bench.store.counters.corrupt == 1
    assert bench.store.take_changes()[1].tolist() == names_to_keys("b").tolist()
    check(bench.store)


def test_changes_are_reported_once(bench):
    bench.put("abc")
    bench.delete("b")
    assert bench.store.has_changes
    added, removed = bench.store.take_changes()
    assert sorted(added.tolist()) == sorted(names_to_keys("abc").tolist())
    assert removed.tolist() == names_to_keys("b").tolist()
    assert not bench.store.has_changes
    assert sorted(bench.store.ready_keys().tolist()) == sorted(names_to_keys("ac").tolist())


def test_written_changes_with_every_write(bench):
    seen = [bench.store.written]
    lent = bench.lend(2)
    seen.append(bench.store.written)
    bench.commit("ab", lent)
    seen.append(bench.store.written)
    bench.delete("a")
    seen.append(bench.store.written)
    assert len(set(seen)) == 4


# -- expiry -----------------------------------------------------------------------------------------------------------


def test_an_expired_chunk_is_a_miss_and_makes_way(bench):
    bench.put("a", hints={"ttl_s": 5.0})
    bench.put("b")
    assert bench.here("ab") == "ab"
    bench.now_s += 5.0
    assert bench.here("ab") == "b"
    assert bench.pin("a").tolist() == [-1]
    assert bench.put("ab") == 1
    assert bench.here("ab") == "ab"
    assert bench.store.counters.expired == 1


def test_what_expired_is_removed_in_steps(bench):
    bench.put("abc", hints={"ttl_s": 5.0})
    bench.put("de")
    assert bench.store.expire(nullcontext(), now_s=bench.now_s) == 0
    bench.now_s += 10.0
    here, nbytes, departures = bench.store.history(names_to_keys("ad"), now_s=bench.now_s)
    assert (here.tolist(), nbytes.tolist()) == ([False, True], [0, PAGE])
    assert (departures.reasons[0], departures.tiers[0]) == (Reason.EXPIRED, Place.DRAM)
    assert bench.store.expire(nullcontext(), now_s=bench.now_s) == 3
    assert bench.store.ready_keys().tolist() == names_to_keys("de").tolist()
    assert bench.store.history(names_to_keys("a"), now_s=bench.now_s)[2].reasons.tolist() == [Reason.EXPIRED]


def test_a_chunk_that_comes_back_from_below_memory_keeps_its_expiry(bench):
    """The chunk comes back with its remaining time to live, which overrides the default of its namespace."""
    bench.store.configure(bench.group, NamespaceConfig(ttl_s=100.0), now_s=bench.now_s)
    bench.put("a", hints={"ttl_s": 20.0})
    ends_s = bench.store.table.seconds(bench.column("expires", "a")[0])
    bench.delete("a")
    bench.now_s += 12.0
    lent = bench.lend(1)
    assert bench.commit("a", lent, hints={"ttl_s": ends_s - bench.now_s}) == [True]
    assert bench.store.table.seconds(bench.column("expires", "a")[0]) == pytest.approx(ends_s, abs=1 / 32)
    bench.now_s = ends_s - 0.1
    assert bench.here("a") == "a"
    bench.now_s = ends_s + 0.1
    assert bench.here("a") == ""
    assert bench.store.expire(nullcontext(), now_s=bench.now_s) == 1


def test_the_shortest_expiry_is_one_tick(bench):
    bench.put("a", hints={"ttl_s": 1e-9})
    assert bench.here("a") == "a"
    bench.now_s += 1.0
    assert bench.here("a") == ""
