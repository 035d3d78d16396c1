"""The second tier of a replay: admission, segments that are reclaimed, the budget of writes, and bounds on hits."""

import numpy as np
import pytest

from raykv.eviction import POLICIES, policy
from raykv.memory.layout import TICKS_PER_S
from raykv.planner.replay import belady, replay
from raykv.planner.ssd import Ssd
from raykv.planner.trace import Request, Trace
from raykv.tier.admission import DAY_S, Admission


def ssd_of(capacity: int, segment: int = 2, *, budget: float | None = None) -> Ssd:
    return Ssd(capacity, segment, Admission(budget, burst_s=1.0, now_s=0.0), 1)


def offer(ssd: Ssd, chunks: list[int], reads: int = 1, now: int = 0) -> None:
    many = len(chunks)
    ssd.offer(chunks, np.full(many, reads), np.zeros(many, np.int64), np.ones(many, np.int64), now)


def held(ssd: Ssd, chunks: int = 40) -> list[int]:
    return [chunk for chunk in range(chunks) if ssd.has(chunk)]


def test_the_oldest_segment_is_reclaimed_and_chunks_that_were_read_are_moved():
    ssd = ssd_of(8)
    offer(ssd, list(range(8)))
    assert ssd.read(1) == 2
    offer(ssd, [8])
    assert held(ssd) == [1, 2, 3, 4, 5, 6, 7, 8], "0 is lost with its segment"
    assert (ssd.written, ssd.moved, ssd.tokens) == (9, 1, 10)
    offer(ssd, [9, 10])
    assert held(ssd) == [1, 4, 5, 6, 7, 8, 9, 10], "2 and 3 were not read"
    assert ssd.read(1) == 3, "reads are remembered"


def test_a_chunk_that_is_here_is_not_written_again():
    ssd = ssd_of(8)
    offer(ssd, [1, 2])
    offer(ssd, [2, 3])
    assert (held(ssd), ssd.written) == ([1, 2, 3], 3)


def test_a_chunk_offered_twice_is_admitted():
    ssd = ssd_of(8)
    offer(ssd, [1, 2], reads=0)
    assert held(ssd) == []
    offer(ssd, [2, 3], reads=0)
    assert held(ssd) == [2]


def test_few_chunks_are_moved_per_chunk_written(rng):
    ssd = ssd_of(20, 5)
    for chunk in range(1000):
        offer(ssd, [chunk])
        for some in rng.sample(held(ssd, chunk + 1), len(held(ssd, chunk + 1)) // 2):
            ssd.read(some)
        assert len(held(ssd, chunk + 1)) <= 20
    assert 0.2 < ssd.moved / ssd.written <= 0.25 + 5 / 1000


def test_the_budget_holds_over_the_whole_trace():
    ssd = ssd_of(1000, budget=DAY_S)  # enough for one chunk per second
    for second in range(100):
        offer(ssd, list(range(10 * second, 10 * second + 10)), now=second * TICKS_PER_S)
    assert ssd.written == 100


def made(rng, count: int = 500) -> Trace:
    """Make chats, which are evicted between their turns, and prompts that occur once. All share a system prompt."""
    chats = [[(chat, place) for place in range(rng.randrange(2, 9))] for chat in range(60)]
    number: dict[tuple[int, ...], int] = {}
    requests = []
    for at in range(count):
        chat = chats[rng.randrange(60)] if rng.random() < 0.7 else [(-at, place) for place in range(6)]
        names = [(0, 0, place) for place in range(3)] + chat
        requests.append(Request(float(at), [number.setdefault(name, len(number)) for name in names], 4 * len(names), 1))
    return Trace("made", requests, len(number), 4)


@pytest.mark.parametrize(
    "name", ["leaf_lru", *(pytest.param(name, marks=pytest.mark.slow) for name in ("s3fifo", "density"))]
)
def test_what_holds_with_a_second_tier(name, rng):
    trace = made(rng)
    alone = replay(trace, policy(name), 60)
    for size in (10, 100, trace.chunks):
        ssd = ssd_of(size, 4)
        both = replay(trace, policy(name), 60, ssd=ssd)
        assert alone.prefix_hits < both.prefix_hits <= belady(trace, 60 + size).prefix_hits
        assert 0 < both.ssd_hits < both.prefix_hits
        assert ssd.written * 4 >= ssd.tokens - 4 * ssd.moved > 0
    assert ssd.moved == 0, "it never filled up"


@pytest.mark.slow
def test_a_scan_is_not_written(rng):
    number = iter(range(10_000))
    requests = [Request(float(at), [0, *(next(number) + 1 for _ in range(30))], 31, 0) for at in range(300)]
    trace = Trace("scan", requests, 9001, 1)
    for name in POLICIES:
        ssd = ssd_of(900, 9)
        replay(trace, policy(name), 90, ssd=ssd)
        assert ssd.tokens < 0.05 * trace.chunks, name
