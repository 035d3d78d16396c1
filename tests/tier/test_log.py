"""The log of one SSD path, without files or a clock: places of batches, and the order of reclaimed segments."""

import random
from types import SimpleNamespace

import numpy as np

from raykv.tier.base import Chunk
from raykv.tier.segments.format import BLOCK_NBYTES, DELETED, DROPPED, ENTRY, Counts, Record
from raykv.tier.segments.log import Log
from raykv.tier.ssd.upkeep import MOVED_SHARE, Upkeep, second_chance

BLOCKS = 64


def a_log(limit: int = 4, made: int = 4) -> Log:
    log = Log(limit=limit, segment_blocks=BLOCKS, incarnation=1)
    for number in range(made):
        log.add_free(number)
    return log


def place(log: Log, *blocks: int, deleted: int = 0, text: bytes = b"t"):
    chunks = [Chunk(bytes(16), 0, count * BLOCK_NBYTES, 0, 0) for count in blocks]
    items = [SimpleNamespace(chunk=chunk, text=text) for chunk in chunks]
    return log.place(items, None, keys=[bytes(16)] * deleted)


def fits(log: Log, blocks: int, entries: int = 1) -> bool:
    return log.fits(Counts(entries, texts=frozenset([b"t"])), blocks=blocks)


def fill(log: Log, spare: int = 0):
    """Open a segment and fill it. Returns the segment."""
    segment = log.open_next(spare=spare)
    assert segment is not None
    while fits(log, 10):
        batch = place(log, 10)
        assert log.finish(batch) == [batch]
    return segment


def sealed(log: Log, count: int):
    """Fill and seal `count` segments, and open one more. Returns the sealed segments."""
    segments = [fill(log) for _ in range(count)]
    log.open_next()
    for segment in segments:
        assert log.next_to_seal() is segment
        log.mark_sealed(segment)
    return segments


def test_segments_are_made_up_to_a_limit():
    log = a_log(limit=3, made=0)
    assert log.open_next() is None
    for number in range(3):
        assert log.absent() == number
        log.add_free(number)
    assert log.absent() is None
    assert sorted(log.free()) == [0, 1, 2]
    log.remove_free(1)
    assert log.absent() == 1


def test_batches_lie_one_after_another_and_leave_room_for_the_summary(rng: random.Random):
    log = a_log(made=1)
    segment = log.open_next()
    end = 0
    while True:
        sizes = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))]
        if not fits(log, sum(sizes), len(sizes)):
            break
        batch = place(log, *sizes)
        assert batch.start == end
        assert batch.record.entries["block"][0] == end + batch.record.blocks()
        assert np.diff(batch.record.entries["block"]).tolist() == sizes[:-1]
        end = batch.record.next_block
        log.finish(batch)
    assert end + log.summary(segment).blocks() <= BLOCKS
    assert not fits(log, BLOCKS)


def test_batches_are_published_in_order():
    log = a_log()
    log.open_next()
    first, second, third = place(log, 1), place(log, 1), place(log, 1)
    assert log.finish(second) == []
    assert log.finish(first) == [first, second]
    segment = first.segment
    log.open_next()
    assert log.next_to_seal() is None, "one is still being written"
    assert log.finish(third) == [third]
    assert log.next_to_seal() is segment
    assert log.next_to_seal() is None


def test_the_last_free_segment_can_be_spared():
    log = a_log(made=2)
    assert log.open_next(spare=1) is not None
    assert log.open_next(spare=1) is None
    assert log.open_next() is not None
    assert log.open_next() is None


def test_the_oldest_is_reclaimed_first_one_at_a_time():
    log = a_log()
    oldest, second = sealed(log, 2)
    for segment in (oldest, second):
        segment.live_nbytes = 1
    assert log.wants_space()
    assert log.choose_victim() is oldest
    assert log.choose_victim() is None
    assert not log.wants_space()
    log.mark_wiped(oldest)
    assert oldest.number in log.free()
    assert log.choose_victim() is second


def test_what_is_not_sealed_is_not_overtaken():
    log = a_log()
    oldest, second = fill(log), fill(log)
    log.open_next()
    assert log.next_to_seal() is oldest
    assert log.next_to_seal() is second
    log.mark_sealed(second)
    second.live_nbytes = 1
    assert log.choose_victim() is None
    log.mark_sealed(oldest)
    oldest.live_nbytes = 1
    assert log.choose_victim() is oldest


def test_an_empty_segment_is_reclaimed_before_its_turn_unless_it_has_tombstones():
    log = a_log()
    oldest, empty = sealed(log, 2)
    oldest.live_nbytes = 1
    assert log.choose_victim() is empty
    log.mark_wiped(empty)

    log = a_log()
    oldest, telling = sealed(log, 2)
    oldest.live_nbytes, telling.has_tombstones = 1, True
    assert log.choose_victim() is oldest


def test_a_segment_knows_whether_it_has_tombstones():
    log = a_log()
    segment = log.open_next()
    assert segment is not None
    place(log, 1)
    assert not segment.has_tombstones
    place(log, deleted=1)
    assert segment.has_tombstones


def test_a_segment_that_is_being_read_is_not_begun_again():
    log = a_log(limit=2, made=2)
    (oldest,) = sealed(log, 1)
    oldest.readers = 1
    assert log.choose_victim() is oldest
    log.mark_wiped(oldest)
    assert log.free() == []
    assert log.open_next() is None
    log.segments[oldest.number].readers -= 1
    assert log.open_next() is not None


def test_a_start_continues_after_the_segments_that_it_found():
    log = Log(limit=4, segment_blocks=BLOCKS, incarnation=1)
    nothing = np.zeros(0, DELETED)
    record = Record(1, 1, 1, 1, 5, BLOCKS, (), np.zeros(0, ENTRY), nothing, np.zeros(0, DROPPED))
    newest = log.add_found(2, sealed=True, record=record._replace(sequence=9))
    older = log.add_found(0, sealed=False, record=record._replace(sequence=4, deleted=np.zeros(1, DELETED)))
    assert older.has_tombstones
    assert not newest.has_tombstones
    assert log.next_to_seal() is older
    assert log.absent() == 1
    log.add_free(1)
    segment = log.open_next()
    assert segment is not None
    assert segment.sequence == 10
    assert log.in_use() == [newest, older, segment]


def test_the_most_read_are_moved_on_as_far_as_there_is_room():
    reads, nbytes = np.array([0, 1, 5, 2, 0]), np.array([10, 10, 10, 10, 10])
    assert second_chance(reads, nbytes, most_nbytes=100).tolist() == [2, 3, 1]
    assert second_chance(reads, nbytes, most_nbytes=25).tolist() == [2, 3]
    assert second_chance(reads, nbytes, most_nbytes=0).tolist() == []


def test_what_is_moved_on_is_a_share_of_what_was_handed_in():
    config = SimpleNamespace(segment_nbytes=BLOCKS * BLOCK_NBYTES)
    shared = SimpleNamespace(counts={"written_nbytes": 0, "moved_nbytes": 0}, index=SimpleNamespace(rows=1))
    upkeep, written = Upkeep(shared, SimpleNamespace(config=config)), 10 * config.segment_nbytes
    assert upkeep._may_move_nbytes() == 0
    shared.counts["written_nbytes"] = written
    assert upkeep._may_move_nbytes() == config.segment_nbytes // 2, "and at most half of a segment"
    shared.counts["moved_nbytes"] = written // MOVED_SHARE - 5
    assert upkeep._may_move_nbytes() == 5
    shared.counts["moved_nbytes"] = written
    assert upkeep._may_move_nbytes() == 0
