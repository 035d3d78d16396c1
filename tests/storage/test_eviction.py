"""Which chunks are evicted to make room: policies, quotas, slot sizes, slots lent ahead, eviction ahead of need."""

import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig
from raykv.errors import ConfigError
from raykv.memory.layout import QUARANTINE_S
from raykv.protocol.namespace import Namespace
from tests.support.stores import FULL, KIB, LETTERS, Bench, check, names_to_keys


@pytest.fixture
def bench():
    made = Bench.open()
    yield made
    made.close()


# -- making room ------------------------------------------------------------------------------------------------------


def test_the_coldest_go_first_and_the_head_of_what_is_written_stays(bench):
    for name in "abcdefghijklmnop":
        assert bench.put(name, 64 * KIB) == 1
    assert bench.put("aXY", 64 * KIB) == 2
    assert bench.here("abcdefghijklmnopXY") == "adefghijklmnopXY"
    assert bench.store.counters.evicted == 2


def test_protected_chunks_are_not_evicted(bench):
    bench.put("abcdefghijklmnop", 64 * KIB, chained=False)
    lent = bench.lend(3, 64 * KIB, protect="aXbYp")
    assert (len(lent.rows), bench.here("abp")) == (3, "abp")
    bench.store.give_back(lent.rows)


def test_when_nothing_may_go_the_first_ones_get_the_room(bench):
    bench.put("abcdefghijklm", 64 * KIB)
    bench.pin("abcdefghijklm")
    lent = bench.lend(5, 64 * KIB)
    assert (len(lent.rows), bench.store.counters.refused_full) == (3, 2)
    assert len(bench.lend(1).rows) == 0


def test_rows_run_out_before_room_does(bench):
    names = [f"n{number}" for number in range(70)]
    assert bench.put(names) == 64
    assert bench.put(["more"]) == 1
    assert bench.store.chunks == 64


def test_a_size_takes_extents_from_another(bench):
    assert bench.put([f"s{number}" for number in range(16)], 64 * KIB) == 16
    assert bench.put([f"t{number}" for number in range(8)], 32 * KIB) == 8  # takes the extents of the 4 oldest chunks
    assert bench.put([f"u{number}" for number in range(3)], 40 * KIB) == 3
    assert bench.put([f"s{number}" for number in range(100, 116)], 64 * KIB) == 16
    assert bench.store.chunks == 16


def test_a_size_that_is_in_use_by_pins_keeps_its_extents(bench):
    bench.put([f"t{number}" for number in range(32)], 32 * KIB)
    bench.pin([f"t{number}" for number in range(0, 32, 2)])
    pinned = {int(page) * PAGE // (64 * KIB) for page in bench.store.table.columns.page}
    assert bench.put(["big"], 64 * KIB) == (len(pinned) < 16)


# -- quotas -----------------------------------------------------------------------------------------------------------


def test_a_quota_binds_its_group_alone(bench):
    small = bench.open_group("small", 3 * 64 * KIB)
    assert bench.put("ABCDE", 64 * KIB) == 5
    assert bench.put("abcde", 64 * KIB, group=small) == 3
    assert bench.put("vw", 64 * KIB, group=small) == 2
    assert bench.here("ABCDEabcdevw") == "ABCDEavw"
    assert bench.open_group("small", 0) == small
    assert bench.put("1234", 64 * KIB, group=small) == 4


def test_a_group_full_of_small_chunks_takes_a_large_one(bench):
    small = bench.open_group("small", 64 * KIB)
    names = [f"s{place}" for place in range(16)]
    assert bench.put(names, PAGE, group=small) == 16
    assert bench.put(["large"], 32 * KIB, group=small, chained=False) == 1
    assert bench.here([*names, "large"]) == "".join(names[:8]) + "large"
    assert bench.put(["more", "than", "fits"], 64 * KIB, group=small, chained=False) == 1
    check(bench.store)


def test_lent_slots_count_against_the_quota(bench):
    small = bench.open_group("small", 3 * 64 * KIB)
    lent = bench.lend(2, 64 * KIB, group=small)
    assert len(bench.lend(5, 64 * KIB, group=small).rows) == 1
    assert bench.store.counters.refused_full == 4
    assert bench.put("a", 64 * KIB, group=small) == 0
    assert bench.commit("xy", lent, nbytes=64 * KIB, group=small) == [True, True]
    assert bench.put("a", 64 * KIB, group=small) == 1  # x or y is evicted
    assert len(bench.here("axy")) == 2
    assert bench.put("b", 64 * KIB) == 1


def test_a_lowered_quota_is_kept_ahead_of_need(bench):
    names = [f"n{number}" for number in range(16)]
    bench.put(names)
    bench.store.configure(bench.group, NamespaceConfig(dram_quota_nbytes=4 * PAGE), now_s=bench.now_s)
    assert bench.store.evictor.needs_eviction
    while bench.store.evict_ahead(now_s=bench.now_s):
        pass
    assert (bench.here(names), bench.store.used_nbytes) == ("".join(names[:4]), 4 * PAGE)
    bench.pin(names[:4])
    bench.store.configure(bench.group, NamespaceConfig(dram_quota_nbytes=PAGE), now_s=bench.now_s)
    assert not bench.store.evict_ahead(now_s=bench.now_s), "pinned: nothing more to do for now"
    assert not bench.store.evictor.needs_eviction


# -- ahead of need ----------------------------------------------------------------------------------------------------


def test_eviction_runs_ahead_of_need(bench):
    bench.put([f"n{number}" for number in range(16)], 64 * KIB)
    assert bench.store.evictor.needs_eviction
    bench.store.evict_ahead(now_s=bench.now_s)
    assert bench.store.chunks == 15  # one free extent is more than 5 % of 16 extents
    bench.store.evict_ahead(now_s=bench.now_s)
    assert bench.store.chunks == 15


def test_rows_that_run_short_are_freed_ahead_of_need():
    """Small chunks use up the rows long before the bytes. So eviction ahead of need must free rows, not only bytes."""
    bench = Bench.open(arena_nbytes=16 << 20, extent_nbytes=1 << 20)
    names = [f"{number}" for number in range(70)]
    for name in names[:64]:
        assert bench.put([name]) == 1
    assert bench.store.evictor.needs_eviction
    while bench.store.evict_ahead(now_s=bench.now_s):
        pass
    assert not bench.store.evictor.needs_eviction
    assert bench.store.chunks < 64
    evicted = bench.store.counters.evicted
    assert bench.put(names[64:66]) == 2
    assert bench.store.counters.evicted == evicted  # there were free rows, so nothing was evicted
    assert bench.here(names[62:66]) == "".join(names[62:66]), "the newest stay"
    bench.close()


def test_upcoming_names_the_next_victims_and_changes_nothing(bench):
    names = [f"n{number}" for number in range(16)]
    for name in names:
        bench.put([name], 64 * KIB)
    bench.store.unpin(bench.pin(names[:2]))
    upcoming = bench.store.evictor.upcoming(0.25, bench.store.table.ticks(bench.now_s))
    assert upcoming[:3].tolist() == [bench.row(name) for name in names[2:5]]
    assert bench.store.chunks == 16
    bench.put("xyz", 64 * KIB, chained=False)
    assert bench.here(names) == "".join([*names[:2], *names[5:]])


def test_upcoming_takes_the_end_of_a_prompt_that_was_stored_in_steps_first(bench):
    """The later chunks of a chain were stored last, and are evicted first nevertheless."""
    names = [f"n{number}" for number in range(15)]
    for start in range(0, 15, 5):
        bench.put(names[start : start + 5], 64 * KIB, parent=names[start - 1] if start else None)
    upcoming = bench.store.evictor.upcoming(0.5, bench.store.table.ticks(bench.now_s))
    assert upcoming.tolist() == [bench.row(name) for name in names[::-1]][: len(upcoming)]
    assert len(upcoming) > 5


def test_slots_lent_ahead_evict_nothing_and_leave_room(bench):
    slots = bench.store.allocator.slots
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 0  # no extent is populated yet
    for extent in range(16):
        assert slots.populate(extent)
        slots.mark_populated(extent)
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 32, "half of the rows; an eighth of the arena"
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 0, "an eighth of the arena is lent"
    bench.store.give_back(bench.store.table.columns.state.nonzero()[0].astype("i4"))
    bench.put([f"n{place}" for place in range(15)], 64 * KIB)
    assert len(bench.lend(0, PAGE, ahead=1000).rows) == 5, "half of what is free above the low-water mark"
    while bench.lend(0, PAGE, ahead=1000).rows.size:
        pass
    assert slots.free_nbytes > 0.02 * bench.store.arena.nbytes
    assert bench.store.counters.evicted == 0
    assert len(bench.lend(2, 64 * KIB, ahead=5).rows) == 2, "those needed now; nothing is free for others"
    assert bench.store.counters.evicted


def test_slots_lent_ahead_leave_half_of_a_quota(bench):
    for extent in range(16):
        assert bench.store.allocator.slots.populate(extent)
        bench.store.allocator.slots.mark_populated(extent)
    small = bench.open_group("small", 8 * PAGE)
    assert len(bench.lend(2, PAGE, ahead=100, group=small).rows) == 2 + 3


def test_quarantined_slots_come_back_ahead_of_need(bench):
    lent = bench.lend(16, 64 * KIB)
    bench.store.quarantine(lent.rows, now_s=bench.now_s)
    bench.store.evict_ahead(now_s=bench.now_s + QUARANTINE_S)
    assert bench.store.used_nbytes == 0


# -- policies ---------------------------------------------------------------------------------------------------------


def newest_first(columns, rows, now):
    return -columns.inserted[rows].astype(int)


def test_another_policy_goes_on_with_what_is_there():
    bench = Bench.open(policy="fifo", **FULL)
    for name in LETTERS:
        bench.put(name)
    bench.store.unpin(bench.pin("ABCD"))
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
    bench.close()


def test_each_group_by_its_own_policy():
    bench = Bench.open(policy="lru", **FULL)
    other = bench.store.groups.open(Namespace(model="b"))
    mine, others = LETTERS[:16], LETTERS[16:]
    for name in mine:
        bench.put(name)
    for name in others:
        bench.put(name, group=other)
    bench.store.use_policy(other, newest_first, now_s=bench.now_s)
    bench.put("uvwx", chained=False)
    assert (bench.here(mine), bench.here(others)) == (mine[2:], others[:-2]), "each gives its share, by its own rule"
    bench.store.use_policy(other, None, now_s=bench.now_s)
    bench.put("yz", chained=False)
    assert (bench.here(mine), bench.here(others)) == (mine[4:], others[:-2]), "by one rule again"
    bench.close()


def test_a_group_that_cannot_give_its_share_is_helped_out():
    bench = Bench.open(policy="lru", **FULL)
    other = bench.store.groups.open(Namespace(model="b"))
    for name in LETTERS[:16]:
        bench.put(name)
    bench.put(LETTERS[16:], group=other)
    bench.store.use_policy(other, "leaf_lru", now_s=bench.now_s)
    pinned = bench.pin(LETTERS[-1])  # the last chunk of the chain. Its pin keeps the whole chain
    assert bench.put("uvwxyz", chained=False) == 6
    assert bench.here(LETTERS) == LETTERS[6:]
    bench.store.unpin(pinned)
    bench.close()


def test_a_users_policy_that_fails_does_no_harm(caplog):
    bench = Bench.open(**FULL)
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
    bench.close()


def test_the_log_says_by_which_policy_a_chunk_was_evicted():
    bench = Bench.open(policy="lru", **FULL)
    bench.put(LETTERS, chained=False)
    bench.put("u")
    here, nbytes, departures = bench.store.history(names_to_keys("ABu?"), now_s=bench.now_s)
    assert (here.tolist(), nbytes.tolist()) == ([False, True, True, False], [0, PAGE, PAGE, 0])
    assert departures.policies == ["lru", "", "", ""]
    bench.close()
