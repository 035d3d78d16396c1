"""The density policy: its learned chances and scores compared with brute force, and its hits with those of LRU."""

import numpy as np
import pytest

from raykv.eviction import density as density_module
from raykv.eviction import policy
from raykv.eviction.density import HitDensity
from raykv.eviction.hazards import AGES, BELIEF, LEVEL, Hazards, bucket, density
from raykv.planner.cache import Cache
from raykv.planner.replay import replay
from raykv.planner.trace import Request, Trace

EDGES = [0.0, *(2.0 ** (step / 2) for step in range(AGES))]


def test_buckets_are_half_octaves(np_rng):
    ages = np.concatenate([np.arange(100), np_rng.integers(0, 1 << 32, 1000)])
    for age, found in zip(ages.tolist(), bucket(ages).tolist(), strict=True):
        assert EDGES[found] * (1 - 1e-9) <= age < EDGES[found + 1] * (1 + 1e-9)


def test_chances_are_reads_over_time_drawn_towards_those_of_the_like(np_rng):
    hazards = Hazards((2, 3))
    reads, ticks = np.zeros((6, AGES)), np.zeros((6, AGES))
    for _ in range(200):
        kind, first = int(np_rng.integers(0, 6)), int(np_rng.integers(0, 2000))
        last, weight = first + int(np_rng.integers(0, 3000)), float(np_rng.random())
        kinds, weights = np.array([kind]), np.array([weight])
        hazards.add_unread(kinds, np.array([first]), np.array([last]), weights)
        for place in range(AGES):
            ticks[kind, place] += weight * max(0.0, min(last, EDGES[place + 1]) - max(first, EDGES[place]))
        if np_rng.random() < 0.4:
            hazards.add_reads(kinds, np.array([last]), weights)
            reads[kind, int(bucket(np.array([last]))[0])] += weight
    assert hazards.seen == pytest.approx(reads.sum())
    found = hazards.per_tick()

    def drawn(reads, ticks, chance):
        level = (reads.sum() + LEVEL) / ((ticks * chance).sum() + LEVEL)
        return (reads + BELIEF) / (ticks + BELIEF / (chance * level))

    assert not reads[:, hazards.ages :].any()
    assert not ticks[:, hazards.ages :].any()
    middles = np.sqrt(np.maximum(EDGES[:-1], 0.5) * np.array(EDGES[1:]))
    chance = (reads.sum() + 1) / ((ticks.sum(axis=0) / middles).sum() + 1) / middles
    everything = (reads.sum(axis=0) + BELIEF) / (ticks.sum(axis=0) + BELIEF / chance)
    for kind in range(6):
        like = slice(kind // 3 * 3, kind // 3 * 3 + 3)
        half = drawn(reads[like].sum(axis=0), ticks[like].sum(axis=0), everything)
        wanted = drawn(reads[kind], ticks[kind], half)[: hazards.ages]
        assert found[kind] == pytest.approx(wanted)
    hazards.fade()
    assert hazards.seen == pytest.approx(reads.sum() / 2)
    assert (hazards.per_tick() != found).any()


def test_density_is_the_best_of_all_horizons(np_rng):
    chance = np_rng.random((3, AGES)) ** 4 / np.maximum(1, np.array(EDGES[:-1]))
    found = density(chance)
    for kind in range(3):
        for first in (0, 5, 30, AGES - 1):
            best, stays, cost = 0.0, 1.0, 0.0
            for place in range(first, AGES):
                width = EDGES[place + 1] - EDGES[place]
                cost += stays * -np.expm1(-chance[kind, place] * width) / chance[kind, place]
                stays *= np.exp(-chance[kind, place] * width)
                best = max(best, (1 - stays) / cost)
            assert found[kind, first] == pytest.approx(best)


def trace_of(requests: list[tuple[list[tuple[int, ...]], int]]) -> Trace:
    """Make a trace with one request a second. Each request is (names of its chunks, number of its output tokens)."""
    number: dict[tuple[int, ...], int] = {}
    made = [
        Request(float(at), [number.setdefault(name, len(number)) for name in names], 4 * len(names), output)
        for at, (names, output) in enumerate(requests)
    ]
    return Trace("made", made, len(number), 4)


def chats(rng, count: int, scans: float, *, outputs: bool = False) -> Trace:
    """Chats of up to seven turns behind one of three system prompts, and long prompts that occur only once.

    Args:
        rng: Chooses the requests.
        count: Number of requests.
        scans: Share of long prompts among the requests.
        outputs: Whether requests have output tokens: 10 in a chat, 300 for a long prompt.
    """
    open_chats: list[tuple[list[tuple[int, ...]], int]] = []
    requests = []
    for at in range(count):
        if rng.random() < scans:
            requests.append(([(1, at, place) for place in range(20)], 300 * outputs))
            continue
        if open_chats and rng.random() < 0.75:
            names, left = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            system = rng.randrange(3)
            names, left = [(0, system, place) for place in range(4)], rng.randrange(1, 8)
        names = names + [(2, at, place) for place in range(rng.randrange(1, 5))]
        requests.append((names, 10 * outputs))
        if left > 1:
            open_chats.append((names, left - 1))
    return trace_of(requests)


@pytest.mark.slow
@pytest.mark.parametrize("scans", [0.0, 0.5])
@pytest.mark.parametrize("share", [0.03, 0.1, 0.3])
def test_on_chats_and_scans_it_is_no_worse_than_lru(scans, share, rng):
    trace = chats(rng, 1000, scans)
    size = round(share * trace.chunks)
    ours, lru = (replay(trace, policy(name), size).prefix_hits for name in ("density", "leaf_lru"))
    assert ours >= lru - 0.005 * trace.accesses


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1])
@pytest.mark.parametrize("kind", ["popular", "popular for a while", "recent", "loop", "scan"])
def test_on_single_chunks_it_is_no_worse_than_lru(kind, share, rng):
    """Without chains there is little to learn. Hits must still be about as many as with LRU."""
    trace = trace_of([([name], 0) for name in singles(rng, kind, 4000)])
    size = round(share * trace.chunks)
    ours, lru = (replay(trace, policy(name), size).prefix_hits for name in ("density", "lru"))
    assert ours >= lru - 0.007 * trace.accesses


def singles(rng, kind: str, count: int) -> list[tuple[int, ...]]:
    if kind == "recent":  # a chunk read recently is likely to be read again, so LRU is the best policy
        order: list[int] = []
        names: list[tuple[int, ...]] = []
        for at in range(count):
            back = min(int(rng.paretovariate(0.5)), len(order))
            order.append(order.pop(-back) if order and rng.random() < 0.75 else at)
            names.append((order[-1],))
        return names
    popular = [1 / (place + 1) for place in range(2000)]
    picks = rng.choices(range(2000), popular, k=count)
    return [
        {
            "popular": (pick,),
            "popular for a while": (pick + at // 1000 * 97,),
            "loop": (at % 500,),
            "scan": (at,),
        }[kind]
        for at, pick in enumerate(picks)
    ]


@pytest.mark.slow
def test_it_learns_from_reported_output_tokens_which_prompts_return(rng):
    """Only prompts with short answers come again: once, after a while. Nothing else tells the prompts apart."""
    requests: list[tuple[list[tuple[int, ...]], int]] = []
    due: dict[int, list[tuple[int, ...]]] = {}
    for at in range(1500):
        if at in due:
            requests.append((due.pop(at), 5))
            continue
        names, short = [(at, place) for place in range(8)], rng.random() < 0.3
        requests.append((names, 5 if short else 300))
        if short:
            due[at + rng.randrange(30, 90)] = names
    trace = trace_of(requests)
    size = 150
    reported = replay(trace, policy("density"), size).prefix_hits
    silent = [Request(r.at_s, r.chunks, r.tokens, 0) for r in trace.requests]
    without = replay(Trace("made", silent, trace.chunks, 4), policy("density"), size).prefix_hits
    assert reported > 1.5 * max(without, replay(trace, policy("leaf_lru"), size).prefix_hits)


def test_what_it_remembers_is_bounded(rng, monkeypatch):
    monkeypatch.setattr(density_module, "GHOSTS_MOST", 100)
    made = HitDensity()
    cache = Cache(made, 50, 3000)
    for now in range(1, 300):
        first = rng.randrange(2990)
        cache.make_room(10, now, np.empty(0, np.int32))
        cache.store(list(range(first, first + 10)), [1] * 10, now, {})
    assert len(made._ghosts) <= 100 + density_module.OBSERVE_LEAST


@pytest.mark.slow
def test_memory_fades_when_there_is_much_of_it(rng, monkeypatch):
    monkeypatch.setattr(density_module, "MEMORY_LEAST", 50.0)
    made = HitDensity()
    replay(chats(rng, 600, 0.0), made, 200)
    assert 0 < made._hazards.seen < 100
