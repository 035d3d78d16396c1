"""Which chunks are written to a tier before they are evicted, and which chunks are promoted."""

import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig
from raykv.protocol.reasons import Place, Reason
from raykv.tier import demotion
from raykv.tier.base import Found
from raykv.tier.mover import TierMover
from raykv.tier.promotion import split_into_runs
from raykv.tier.registry import StoreGroupNames
from raykv.tier.segments.format import raw_keys
from tests.support.house import House
from tests.support.stores import names_to_keys
from tests.support.tiers import environment_of, wait_for
from tests.support.toy_tier import ToyTier


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    """A store whose mover demotes an eighth of the arena in advance."""
    monkeypatch.setattr(demotion, "AHEAD_NBYTES", 0)
    return House(low_water=0.0, high_water=0.01)


def test_half_of_a_small_arena_is_written_in_advance():
    house = House(low_water=0.0, high_water=0.01)
    names = house.fill()
    house.read(names)
    house.mover.demote()
    house.toy.go_on()
    assert house.below(names) == [True] * 8 + [False] * 7


def test_a_tier_that_hangs_takes_half_of_a_small_arena_and_no_more():
    house = House(low_water=0.0, high_water=0.01)
    names = house.fill()
    house.read(names)
    for number in range(5):
        house.mover.demote()
        more = [f"more-{number}-{place}" for place in range(4)]
        house.put(more, 60_000, chained=False)
        assert all(house.read(more)), "a put finds room"
    assert 0 < house.pins() <= 8


def test_chunks_that_were_read_are_written_before_their_turn_and_others_are_not(house):
    names = house.fill()
    house.read(names[:1])
    time.sleep(0.05)
    house.read(names[2:])
    house.mover.demote()
    assert house.pins() == 0 or house.toy.queue
    house.toy.go_on()
    # The two coldest chunks are 1 (never read) and 0 (read). Of these two, only chunk 0 is written.
    assert house.below(names) == [True] + [False] * 14
    assert house.mover.stats()["demoted"] == 1
    assert house.pins() == 0
    house.mover.demote()
    assert not house.toy.queue, "a chunk that is below is not written again"


def test_nothing_is_written_while_there_is_room(house):
    names = house.fill(count=8)
    house.read(names)
    house.mover.demote()
    assert not house.toy.queue


def test_while_it_is_written_a_chunk_is_not_evicted(house):
    names = house.fill()
    house.read(names)
    house.mover.demote()
    pinned = house.pins()
    assert pinned > 0
    assert house.mover.demotion.writing
    house.put([f"more-{number}" for number in range(15)], 60_000, chained=False)
    assert house.pins() == pinned
    assert sum(house.read(names)) == pinned
    house.toy.go_on()
    assert house.pins() == 0
    assert not house.mover.demotion.writing
    assert len(house.toy.chunks) == pinned


def test_chunks_that_a_tier_refuses_stay_as_they_were(house):
    names = house.fill()
    house.read(names)
    house.toy.takes = 1
    house.mover.demote()
    assert house.pins() == 1
    house.toy.go_on()
    assert house.pins() == 0
    assert house.mover.stats()["demoted"] == 1


def test_a_chunk_comes_back_to_its_place_in_its_chain(house):
    chain = [f"link-{number}" for number in range(6)]
    house.put(chain, PAGE)
    house.read(chain)
    house.sink(chain)
    assert house.promote(chain) == 6
    assert not any(house.read(chain)), "no reader sees them before they are there"
    assert len(house.toy.queue) == 1, "one run, one request"
    house.toy.go_on()
    assert all(house.read(chain))
    assert house.mover.stats()["promoted"] == 6
    columns = house.store.table.columns
    rows = house.store.table.find(names_to_keys(chain))
    assert columns.depth[rows].tolist() == list(range(6))
    assert columns.parent[rows[1:]].tolist() == rows[:-1].tolist()
    assert columns.frequency[rows].tolist() == [2] * 6, "one read before, one since"
    assert house.changes


def test_concurrent_promotions_share_one_read(house):
    house.put(["a"], PAGE)
    house.sink(["a"])
    assert house.promote(["a"]) == 1
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(house.promote(["a"], time.monotonic() + 10.0))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert len(house.toy.queue) == 1
    house.toy.go_on()
    for thread in threads:
        thread.join(10.0)
    assert house.read(["a"]) == [True]
    assert set(counts) <= {0, 1}
    assert len(counts) == 3
    assert house.mover.stats()["promoted"] == 1


def test_a_run_of_which_a_part_is_on_its_way_reads_the_rest(house):
    chain = [f"link-{number}" for number in range(5)]
    house.put(chain, PAGE)
    house.sink(chain)
    assert house.promote(chain[1:3]) == 2
    house.promote(chain)
    assert len(house.toy.queue) == 2
    assert house.mover.stats()["promoting_nbytes"] == 5 * PAGE
    house.toy.go_on()
    assert all(house.read(chain))
    assert house.mover.stats()["promoted"] == 5
    assert house.store.lent_nbytes == 0


def test_a_chunk_that_was_stored_meanwhile_is_not_stored_twice(house):
    house.put(["a"], PAGE)
    house.sink(["a"])
    used = house.store.used_nbytes
    house.promote(["a"])
    house.put(["a"], PAGE)
    house.toy.go_on()
    assert house.read(["a"]) == [True]
    assert house.store.used_nbytes == used + PAGE


def test_a_caller_waits_no_longer_than_it_said_and_the_read_goes_on(house):
    house.put(["a"], PAGE)
    house.sink(["a"])
    house.promote(["a"], time.monotonic() + 0.01)
    assert house.mover.stats()["promotions_late"] == 1
    assert house.read(["a"]) == [False]
    house.toy.go_on()
    assert house.read(["a"]) == [True]


def test_a_tier_that_refuses_or_has_lost_it_costs_a_miss_and_no_room(house):
    house.put(["a"], PAGE)
    house.sink(["a"])
    used = house.store.used_nbytes
    house.toy.accepts_reads = False
    house.promote(["a"], time.monotonic() + 1.0)
    assert house.read(["a"]) == [False]
    assert house.store.used_nbytes == used
    house.toy.accepts_reads = True
    house.promote(["a"])
    house.toy.chunks.clear()
    house.toy.go_on()
    assert house.read(["a"]) == [False]
    assert house.store.used_nbytes == used
    assert house.mover.stats()["promoting_nbytes"] == 0


def test_what_a_tier_refuses_is_asked_of_the_next_one(house):
    house.put(["a", "b"], PAGE)
    other = ToyTier({"manual": True}, environment_of(house.store.arena.view))
    house.mover = TierMover(house.store, house.lock, [house.toy, other], house.count_change)
    keys = names_to_keys(["a", "b"])
    house.mover.demotion.write(other, house.store.table.find(keys), keys)
    other.go_on()
    house.sink(["a", "b"])
    house.toy.accepts_reads = False
    assert house.promote(["a", "b"]) == 2
    other.go_on()
    assert house.read(["a", "b"]) == [True, True]
    assert house.mover.stats()["promoting_nbytes"] == 0


# -- configs of namespaces, ended sessions ----------------------------------------------------------------------------

CHUNKS = [f"chunk-{number}" for number in range(15)]


def chunks_after_demotion(house: House) -> list[str]:
    house.mover.demote()
    house.toy.go_on()
    return [name for name, below in zip(CHUNKS, house.below(CHUNKS), strict=True) if below]


@pytest.mark.parametrize(("tiers", "first"), [("both", []), ("ssd", CHUNKS[:2]), ("dram", [])])
def test_a_namespace_chooses_its_tiers(house, tiers, first):
    house.store.configure(house.bench.group, NamespaceConfig(tiers=tiers), now_s=time.monotonic())
    house.fill()
    assert chunks_after_demotion(house) == first
    if tiers == "dram":
        house.read(CHUNKS)
        assert chunks_after_demotion(house) == []


def test_chunks_of_an_ended_session_are_written_first(house):
    house.fill()
    house.read(CHUNKS)
    ended = names_to_keys(CHUNKS[7:9])
    house.store.hint(ended, ttl_s=None, priority=None, ended=True, touch=False, now_s=time.monotonic())
    assert chunks_after_demotion(house) == CHUNKS[7:9]
    house.put(["new-1", "new-2"], 60_000, chained=False)
    assert house.read(CHUNKS) == [name != "chunk-7" for name in CHUNKS], "and they are evicted first"


# -- expiry -----------------------------------------------------------------------------------------------------------


def expires_in_s(house: House, name: str) -> float:
    """Return the seconds until a chunk in memory expires. 0: the chunk never expires."""
    (row,) = house.store.table.find(names_to_keys([name])).tolist()
    ticks = house.store.table.cells.expires[row]
    return house.store.table.seconds(ticks) - time.monotonic() if ticks else 0.0


def test_a_chunk_keeps_its_absolute_expiry(house):
    house.put(["a", "b"], PAGE, chained=False, hints={"ttl_s": 100.0})
    before_s = expires_in_s(house, "a")
    assert 90.0 < before_s < 101.0
    house.sink(["a", "b"])
    (found,) = house.toy.find(names_to_keys(["a"]))
    assert found is not None
    assert abs(found.expires_s - time.time() - before_s) < 1.0
    house.promote(["a"])
    house.toy.go_on()
    assert abs(expires_in_s(house, "a") - before_s) < 1.0


def test_a_group_s_ttl_does_not_prolong_a_chunk_that_comes_up(house):
    house.put(["never"], PAGE)
    house.put(["soon"], PAGE, hints={"ttl_s": 100.0})
    house.sink(["never", "soon"])
    house.store.configure(house.bench.group, NamespaceConfig(ttl_s=9000.0), now_s=time.monotonic())
    house.promote(["never", "soon"])
    house.toy.go_on()
    assert expires_in_s(house, "never") == 0.0
    assert expires_in_s(house, "soon") < 101.0


@pytest.mark.parametrize(
    ("first_s", "second_s", "stays"),
    [
        (0.0, 50.0, False),
        (100.0, 50.0, False),
        (50.0, 0.0, False),
        (50.0, 50.0, True),
        (50.0, 100.0, True),
        (0.0, 0.0, True),
    ],
)
def test_a_copy_below_does_not_outlive_a_chunk_that_is_stored_again(house, first_s, second_s, stays):
    """The chunk is stored with a time to live of `first_s`, and again with `second_s`. 0: it never expires."""
    house.put(["a", "other"], PAGE, chained=False, hints={"ttl_s": first_s})
    house.sink(["a", "other"])
    house.put(["a"], PAGE, hints={"ttl_s": second_s})
    house.mover.drop_outdated(names_to_keys(["a", "unknown"]))
    assert house.below(["a", "other"]) == [stays, True]
    assert house.read(["a"]) == [True]


def test_a_ttl_that_is_set_while_a_chunk_is_written_holds_below_too(house):
    house.put(["a", "b"], PAGE, chained=False)
    keys = names_to_keys(["a", "b"])
    house.mover.demotion.write(house.toy, house.store.table.find(keys), keys)
    house.store.hint(keys[:1], ttl_s=50.0, priority=None, ended=False, touch=False, now_s=time.monotonic())
    house.mover.drop_outdated(keys[:1])
    house.toy.go_on()
    assert house.below(["a", "b"]) == [False, True]


# -- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_of_one_kind(rng: random.Random):
    for _ in range(200):
        keys = names_to_keys([f"{n}" for n in range(rng.randrange(0, 12))])
        raw = raw_keys(keys)
        found: list[Found | None] = []
        for place in range(len(raw)):
            follows = place and rng.random() < 0.6
            before = found[place - 1] if place else None
            depth = before.depth + 1 if follows and before else 0
            parent = raw[place - 1] if follows and before else b""
            entry = Found(rng.choice((PAGE, PAGE, 3 * PAGE)), 0, rng.choice((0, 0, 1)), depth, parent, 0, 0.0)
            found.append(entry if rng.random() < 0.8 else None)
        runs = split_into_runs(keys, found, 4 * PAGE)
        covered = [place for run in runs for place in range(run.start, run.stop)]
        assert covered == [place for place, entry in enumerate(found) if entry is not None]
        for run in runs:
            entries = found[run]
            assert len({(entry.nbytes, entry.group) for entry in entries}) == 1
            assert len(entries) == 1 or entries[0].nbytes * len(entries) <= 4 * PAGE
            if len(entries) > 1:
                chained = [entry.parent == key for entry, key in zip(entries[1:], raw[run][:-1], strict=True)]
                assert all(chained) or not any(entry.parent for entry in entries)
                if all(chained):
                    assert all(now.depth == before.depth + 1 for before, now in pairwise(entries))


def test_quota_groups_are_known_by_their_fields(house):
    names = StoreGroupNames(house.store, house.lock)
    text = names.text(house.bench.group)
    assert names.number(text) == house.bench.group
    assert names.number(b"not json") is None
    assert names.number(b"\xff\xfe") is None
    assert names.number(b"{" * 5000) is None
    assert names.number(text.replace(b'"m"', b'"another"')) not in (None, house.bench.group)


def test_random_traffic_keeps_memory_and_tier_in_agreement(rng: random.Random):
    house = House(low_water=0.05, high_water=0.1)
    names = [f"n{number}" for number in range(60)]
    for _step in range(600):
        some = rng.sample(names, rng.randrange(1, 5))
        act = rng.random()
        if act < 0.4:
            house.put(some[:1], rng.choice((PAGE, 20_000, 60_000)), chained=False)
        elif act < 0.6:
            house.read(some)
        elif act < 0.8:
            house.promote(some)
        elif act < 0.9:
            house.mover.demote()
        elif act < 0.95:
            house.delete(some)
        if rng.random() < 0.5:
            house.toy.go_on()
        house.store.evict_ahead(now_s=time.monotonic())
    house.toy.go_on()
    house.read(names)
    assert house.pins() == 0
    assert not house.mover.demotion.writing
    assert house.mover.stats()["promoting_nbytes"] == house.store.lent_nbytes == 0
    assert house.store.used_nbytes == int(house.store.allocator.slot_sizes(house.store.table.ready_rows()).sum())


# -- deletion during a move -------------------------------------------------------------------------------------------


def chunks_below(house: House) -> list[str]:
    """Move two chunks from memory to the tier. Returns their names."""
    names = house.fill()
    house.sink(names[:2])
    return names[:2]


def is_gone(house: House, names: list[str]) -> bool:
    while house.toy.go_on():
        pass
    return not (any(house.read(names)) or any(house.below(names)) or house.pins() or house.store.lent_nbytes)


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_a_chunk_deleted_on_its_way_up_does_not_come_back(house, how):
    names = chunks_below(house)
    assert house.promote(names) == len(names)
    assert house.toy.queue
    content = dict(house.toy.chunks)
    house.delete(names) if how == "delete" else house.drop(house.bench.group)
    assert not house.toy.chunks
    house.toy.chunks = content  # as if the tier had begun the read before the deletion, so that the read succeeds
    assert house.toy.go_on()
    house.toy.chunks = {}
    assert is_gone(house, names)
    assert house.mover.stats()["promoting_nbytes"] == 0


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_a_chunk_deleted_on_its_way_down_stays_nowhere(house, how):
    names = house.fill()
    house.read(names)
    house.mover.demote()
    pins = house.store.table.columns.pins[house.store.table.find(names_to_keys(names))].tolist()
    written = [name for name, pinned in zip(names, pins, strict=True) if pinned]
    assert written
    assert house.toy.queue
    house.delete(written) if how == "delete" else house.drop(house.bench.group)
    assert is_gone(house, written)
    house.put(written, 60_000, chained=False)
    assert all(house.read(written)), "a chunk that is stored later stays"
    house.mover.demote()
    house.toy.go_on()
    assert all(house.read(written))


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_a_chunk_that_is_being_deleted_is_not_written_again(house, how):
    names = house.fill()
    house.read(names)
    house.mover.demote()
    house.toy.go_on()
    assert house.toy.chunks

    def demote() -> None:
        house.mover.demote()
        house.toy.go_on()

    house.delete(names, demote) if how == "delete" else house.drop(house.bench.group, demote)
    assert is_gone(house, names)
    house.put(names, 60_000, chained=False)
    house.read(names)
    demote()
    assert house.toy.chunks, "chunks that are stored later are written again"


# -- reports, no tiers, close -----------------------------------------------------------------------------------------


def test_changes_and_reasons_of_a_tier_are_reported(house):
    house.put(["a", "b"], PAGE, chained=False)
    house.sink(["a", "b"])
    keys = names_to_keys(["a", "b"])
    assert {bytes(key) for changes in house.mover.take_changes() for key in changes} == {bytes(key) for key in keys}
    assert house.mover.find(keys)[1].all()
    assert len(house.mover.keys()) == 2
    assert house.mover.delete(keys[:1]) == 1
    departed = house.store.eviction_log.find(keys)
    assert (departed.reasons[0], departed.tiers[0]) == (Reason.DELETED, Place.OTHER)
    assert np.concatenate(house.mover.take_changes()).tolist() == keys[:1].tolist()
    assert set(house.mover.stats()["tiers"]) == {"toy"}


def test_without_tiers_nothing_is_due(house):
    mover = TierMover(house.store, house.lock, [], house.count_change)
    assert not mover
    assert not mover.demotion.due
    mover.demote()
    keys = names_to_keys(["a"])
    assert mover.promote(keys, until_s=time.monotonic() + 5.0) == 0
    assert not mover.find(keys)[1].any()
    assert not len(mover.keys())
    with mover.barring(keys, group=0):
        assert mover.delete(keys) == mover.drop(0) == 0


def test_close_gives_slots_back(house):
    house.put(["a"], PAGE)
    house.sink(["a"])
    house.promote(["a"])
    house.mover.close()
    wait_for(lambda: house.store.lent_nbytes == 0)
    assert house.read(["a"]) == [False]
