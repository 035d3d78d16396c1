"""Replays compared with brute force, and with another simulator on a real trace."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from raykv.eviction import POLICIES, policy
from raykv.planner.replay import belady, replay
from raykv.planner.trace import Request, Trace, read_trace

TRACE = Path(__file__).parents[1] / "data" / "mooncake_synthetic_trace.jsonl.gz"
SHARES = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75]
# Hits of libcachesim 0.3.5 (PyPI) with its defaults. The trace has 121,877 accesses: one for each block of each
# request, in order. A block is an object of size 1, and the cache holds round(share * 43,924) objects. For Belady's
# policy, each access also carries the place of the next access to the same object.
RECORDED = {
    "fifo": [4400, 18435, 30065, 51058, 67067, 73659],
    "lru": [4184, 18861, 31668, 54044, 71763, 76686],
    "lfu": [1467, 12809, 21465, 47153, 73487, 76814],
    "arc": [5108, 19901, 32320, 56056, 73549, 76814],
    "s3fifo": [4570, 18904, 32168, 53810, 68569, 74708],
    "belady": [22572, 48205, 61703, 76296, 77953, 77953],
}
TOLERANCE = {"fifo": 0.001, "lru": 0.001, "lfu": 0.01, "arc": 0.01, "s3fifo": 0.01, "belady": 0.001}


@pytest.fixture(scope="module")
def real() -> Trace:
    return read_trace(TRACE)


def conversations(rng: random.Random, count: int) -> Trace:
    """Chats of several turns. Each begins with one of three system prompts."""
    numbers: dict[object, int] = {}
    open_chats: list[list[int]] = []
    requests = []
    for at in range(count):
        if open_chats and rng.random() < 0.6:
            chunks = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            system = rng.randrange(3)
            chunks = [numbers.setdefault(("system", system, place), len(numbers)) for place in range(3)]
        chunks = chunks + [numbers.setdefault((at, place), len(numbers)) for place in range(rng.randrange(0, 9))]
        open_chats.append(chunks)
        requests.append(Request(float(at), chunks, 4 * len(chunks) - rng.randrange(0, 4), 1))
    return Trace("conversations", requests, len(numbers), 4)


def apart(trace: Trace) -> Trace:
    """Make each read of a chunk a request of its own, because other simulators read a trace in this way."""
    requests = [
        Request(0.0, [chunk], tokens, 0)
        for request in trace.requests
        for chunk, tokens in zip(request.chunks, trace.tokens_of(request), strict=True)
    ]
    return replace(trace, requests=requests)


def brute_leaf_lru(trace: Trace, size: int) -> int:
    """Prefix hits of a cache that evicts the least recently read leaf; among equals, the deepest one."""
    read: dict[int, int] = {}
    above: dict[int, int] = {}
    depth: dict[int, int] = {}
    hits = 0
    for now, request in enumerate(trace.requests):
        for place, chunk in enumerate(request.chunks):
            depth[chunk] = place
            above[chunk] = request.chunks[place - 1] if place else -1
        here = [chunk in read for chunk in request.chunks]
        prefix = [*here, False].index(False)
        hits += prefix
        for chunk in request.chunks[:prefix]:
            read[chunk] = now
        for chunk in request.chunks[prefix:]:
            assert chunk not in read, "no chunk stays without its parent"
        missing = request.chunks[prefix:]
        while len(read) + len(missing) > size:
            parents = {above[chunk] for chunk in read}
            leaves = [chunk for chunk in read if chunk not in parents and chunk not in request.chunks]
            if not leaves:
                break
            del read[min(leaves, key=lambda chunk: (read[chunk], -depth[chunk]))]
        for chunk in missing[: size - len(read)]:
            read[chunk] = now
    return hits


@pytest.mark.slow
def test_prefix_hits_are_those_of_brute_force(rng):
    for _ in range(20):
        trace, size = conversations(rng, 200), rng.randrange(5, 300)
        assert replay(trace, policy("leaf_lru"), size).prefix_hits == brute_leaf_lru(trace, size)


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*sorted(set(POLICIES) - {"density"}), pytest.param("density", marks=pytest.mark.slow)]
)
def test_what_holds_for_every_policy(name, alone, rng):
    trace = conversations(rng, 400)
    trace = apart(trace) if alone else trace
    all_there = trace.accesses - trace.chunks
    bound = [belady(trace, size).prefix_hits for size in (20, 200)]
    for size, most in zip((20, 200), bound, strict=True):
        found = replay(trace, policy(name), size)
        assert found.prefix_hits <= most <= all_there
        assert found.stored - found.evicted <= size
        assert found.tokens_hit <= 4 * found.prefix_hits
    whole = replay(trace, policy(name), trace.chunks)
    assert (whole.prefix_hits, whole.stored, whole.evicted) == (all_there, trace.chunks, 0)


def test_belady_is_the_best_there_is(rng):
    """No other choice of victims has more hits: all choices are tried."""
    for _ in range(30):
        accesses = [rng.randrange(5) for _ in range(10)]
        number: dict[int, int] = {}
        requests = [Request(0.0, [number.setdefault(key, len(number))], 1, 0) for key in accesses]

        def best(at: int, held: frozenset[int], accesses: list[int] = accesses) -> int:
            if at == len(accesses):
                return 0
            if accesses[at] in held:
                return 1 + best(at + 1, held)
            left = [held] if len(held) < 2 else [held - {key} for key in held]
            return max(best(at + 1, held | {accesses[at]}) for held in left)

        assert belady(Trace("", requests, len(number), 1), 2).prefix_hits == best(0, frozenset())


def test_a_request_larger_than_the_cache_keeps_its_first_chunks():
    trace = Trace("", [Request(0.0, list(range(9)), 9, 0)] * 2, 9, 1)
    for name in POLICIES:
        found = replay(trace, policy(name), 4)
        assert (found.prefix_hits, found.tokens_hit, found.attended, found.stored) == (4, 4, 6, 4), name


def test_without_a_time_to_live_ttl_is_leaf_first_lru(rng):
    trace = conversations(rng, 300)
    assert replay(trace, policy("ttl"), 50).prefix_hits == replay(trace, policy("leaf_lru"), 50).prefix_hits


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_hits_are_those_that_libcachesim_has(name, real):
    compare(real, name, [0.5])


@pytest.mark.soak
@pytest.mark.parametrize("name", RECORDED)
def test_hits_are_those_that_libcachesim_has_at_every_size(name, real):
    compare(real, name, SHARES)


def compare(trace: Trace, name: str, shares: list[float]) -> None:
    for share in shares:
        size, recorded = round(share * trace.chunks), RECORDED[name][SHARES.index(share)]
        found = belady(trace, size) if name == "belady" else replay(apart(trace), policy(name), size)
        assert found.prefix_hits / trace.accesses == pytest.approx(recorded / trace.accesses, abs=TOLERANCE[name])


# Cache size (a share of the trace's chunks) -> density has at least this many percentage points more hits than LRU.
POINTS_ABOVE_LRU = {0.1: 3.0, 0.25: 5.0, 0.4: 5.0}


@pytest.mark.slow
def test_density_is_above_lru(real):
    beat_lru(real, 0.4)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "share", [0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
)
def test_density_is_above_lru_at_every_size_and_the_default_is_never_below(share, real):
    beat_lru(real, share)


def beat_lru(trace: Trace, share: float) -> None:
    size = round(share * trace.chunks)
    density, default, lru = (
        100 * replay(trace, policy(name), size).prefix_hits / trace.accesses for name in ("density", "leaf_lru", "lru")
    )
    assert density >= lru
    assert default >= lru
    assert density >= lru + POINTS_ABOVE_LRU.get(share, 0.0)
