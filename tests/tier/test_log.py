"""The log of one volume: places of batches, order of reclaiming. No bytes, no clock."""

import random

import numpy as np

from raykv.tier.segments.format import BLOCK_NBYTES, DROPPED, ENTRY, GONE, Record, blocks_needed
from raykv.tier.segments.log import MOVED_SHARE, Log, second_chance

BLOCKS = 64


def a_log(limit: int = 4, made: int = 4) -> Log:
    log = Log(limit=limit, segment_blocks=BLOCKS, incarnation=1)
    for number in range(made):
        log.made(number)
    return log


def place(log: Log, *blocks: int, gone: int = 0, text: bytes = b"t"):
    entries = np.zeros(len(blocks), ENTRY)
    entries["nbytes"] = [count * BLOCK_NBYTES for count in blocks]
    return log.place(
        entries=entries, gone=np.zeros(gone, GONE), dropped=np.zeros(0, DROPPED), texts=(text,), content=None
    )


def fits(log: Log, blocks: int, entries: int = 1) -> bool:
    return log.fits(blocks=blocks, entries=entries, texts={b"t"})


def fill(log: Log, keep: int = 0):
    """Open a segment and fill it; returns it."""
    segment = log.begin(keep=keep)
    assert segment is not None
    while fits(log, 10):
        batch = place(log, 10)
        assert log.finished(batch) == [batch]
    return segment


def sealed(log: Log, count: int):
    """So many segments, full and sealed, and one open."""
    segments = [fill(log) for _ in range(count)]
    log.begin()
    for segment in segments:
        assert log.to_seal() is segment
        log.sealed(segment)
    return segments


def test_segments_are_made_up_to_a_limit():
    log = a_log(limit=3, made=0)
    assert log.begin() is None
    for number in range(3):
        assert log.absent() == number
        log.made(number)
    assert log.absent() is None
    assert sorted(log.free()) == [0, 1, 2]
    log.gone(1)
    assert log.absent() == 1


def test_batches_lie_one_after_another_and_leave_room_for_the_summary(rng: random.Random):
    log = a_log(made=1)
    segment = log.begin()
    end = 0
    while True:
        sizes = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))]
        if not fits(log, sum(sizes), len(sizes)):
            break
        batch = place(log, *sizes)
        assert batch.start == end
        assert batch.record.entries["block"][0] == end + blocks_needed(batch.record)
        assert np.diff(batch.record.entries["block"]).tolist() == sizes[:-1]
        end = batch.record.next_block
        log.finished(batch)
    assert end + blocks_needed(log.summary(segment)) <= BLOCKS
    assert not fits(log, BLOCKS)


def test_batches_are_told_of_in_order():
    log = a_log()
    log.begin()
    first, second, third = place(log, 1), place(log, 1), place(log, 1)
    assert log.finished(second) == []
    assert log.finished(first) == [first, second]
    segment = first.segment
    log.begin()
    assert log.to_seal() is None, "one is still being written"
    assert log.finished(third) == [third]
    assert log.to_seal() is segment
    assert log.to_seal() is None


def test_the_last_free_segment_can_be_kept():
    log = a_log(made=2)
    assert log.begin(keep=1) is not None
    assert log.begin(keep=1) is None
    assert log.begin() is not None
    assert log.begin() is None


def test_the_oldest_is_reclaimed_first_one_at_a_time():
    log = a_log()
    oldest, second = sealed(log, 2)
    for segment in (oldest, second):
        segment.live_nbytes = 1
    assert log.wants_space()
    assert log.victim() is oldest
    assert log.victim() is None
    assert not log.wants_space()
    log.wiped(oldest)
    assert oldest.number in log.free()
    assert log.victim() is second


def test_what_is_not_sealed_is_not_overtaken():
    log = a_log()
    oldest, second = fill(log), fill(log)
    log.begin()
    assert log.to_seal() is oldest
    assert log.to_seal() is second
    log.sealed(second)
    second.live_nbytes = 1
    assert log.victim() is None
    log.sealed(oldest)
    oldest.live_nbytes = 1
    assert log.victim() is oldest


def test_an_empty_segment_goes_before_its_turn_unless_it_tells_of_something():
    log = a_log()
    oldest, empty = sealed(log, 2)
    oldest.live_nbytes = 1
    assert log.victim() is empty
    log.wiped(empty)

    log = a_log()
    oldest, telling = sealed(log, 2)
    oldest.live_nbytes, telling.tells = 1, True
    assert log.victim() is oldest


def test_a_segment_knows_whether_it_tells_of_something():
    log = a_log()
    segment = log.begin()
    assert segment is not None
    place(log, 1)
    assert not segment.tells
    place(log, gone=1)
    assert segment.tells


def test_a_segment_that_is_being_read_is_not_begun_again():
    log = a_log(limit=2, made=2)
    (oldest,) = sealed(log, 1)
    oldest.holds = 1
    assert log.victim() is oldest
    log.wiped(oldest)
    assert log.free() == []
    assert log.begin() is None
    log.segments[oldest.number].holds -= 1
    assert log.begin() is not None


def test_a_start_goes_on_after_what_it_found():
    log = Log(limit=4, segment_blocks=BLOCKS, incarnation=1)
    nothing = np.zeros(0, GONE)
    record = Record(1, 1, 1, 1, 5, BLOCKS, (), np.zeros(0, ENTRY), nothing, np.zeros(0, DROPPED))
    newest = log.found(2, 9, sealed=True, record=record)
    older = log.found(0, 4, sealed=False, record=record._replace(gone=np.zeros(1, GONE)))
    assert log.in_order() == [older, newest]
    assert older.tells
    assert not newest.tells
    assert log.to_seal() is older
    assert log.absent() == 1
    log.made(1)
    segment = log.begin()
    assert segment is not None
    assert segment.sequence == 10
    assert log.in_order() == [older, newest, segment]


def test_the_most_read_are_moved_on_as_far_as_there_is_room():
    reads, nbytes = np.array([0, 1, 5, 2, 0]), np.array([10, 10, 10, 10, 10])
    assert second_chance(reads, nbytes, most_nbytes=100).tolist() == [2, 3, 1]
    assert second_chance(reads, nbytes, most_nbytes=25).tolist() == [2, 3]
    assert second_chance(reads, nbytes, most_nbytes=0).tolist() == []


def test_what_is_moved_on_is_a_share_of_what_was_handed_in():
    log = a_log()
    assert log.may_move_nbytes() == 0
    log.written_nbytes = 10 * BLOCKS * BLOCK_NBYTES
    assert log.may_move_nbytes() == BLOCKS * BLOCK_NBYTES // 2, "and at most half of a segment"
    log.moved_nbytes = log.written_nbytes // MOVED_SHARE - 5
    assert log.may_move_nbytes() == 5
