"""Replicas even out the load of nodes, stay few, and go when their prefix cools down.

A node's load is the number of chunks read from its memory, by engines on any node. Engines get requests at random. Each
window is long enough that the chance of the requests alone adds about 0.1 to max/mean. With the trace this takes 60 s:
if each request of 20 s found its chunks on nodes chosen at random, max/mean would be 1.17, and 1.11 in 60 s.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from raykv.planner.trace import Trace, read_trace
from raykv.simulation import Cluster, Counters, Workload, hot_root, of_trace, replay

TRACE = Path(__file__).parents[1] / "data" / "mooncake_synthetic_trace.jsonl.gz"
NBYTES = 4 << 20
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(TRACE)


def window(
    work: Workload, *, nodes: int, seed: int, start_s: float, stop_s: float, **options
) -> tuple[Counters, Cluster, int]:
    """Play a workload. Return what was done from `start_s` to `stop_s`, and the most copies of any prefix until then.

    Copies beyond the first one count.
    """
    cluster = Cluster(work, nodes, seed=seed, **options)
    cluster.play(work.requests)
    cluster.run(start_s)
    before, most, now_s = cluster.counters.copy(), 0, start_s
    while now_s < stop_s:
        now_s += 1.0
        cluster.run(now_s)
        most = max(most, *map(len, map(cluster.holders, hottest(cluster)))) - 1
    return cluster.counters - before, cluster, most


def hottest(cluster: Cluster) -> list[int]:
    """Return the first chunks of the 20 prefixes with the most copies, and chunk 0."""
    copies = cluster.directory.heat.copies
    heads = sorted(copies, key=copies.__getitem__, reverse=True)[:20]
    return [0, *(int.from_bytes(head[8:], "little") for head in heads)]


@pytest.mark.slow
def test_a_root_in_every_request_on_16_nodes(seed: int):
    """Asked for: max/mean load at most 1.2 in a window of 40 s, with at most 8 extra copies of the root."""
    skews = []
    for run in SEEDS:
        work = hot_root(requests_per_s=64, seconds=60, sessions=800, documents=200, nbytes=NBYTES, seed=run)
        done, cluster, most = window(work, nodes=16, seed=run, start_s=20, stop_s=60)
        root = sum(request.at_s > 20 for request in work.requests) / done.hits
        assert root == pytest.approx(0.11, abs=0.005), "the share of the root"
        assert most <= 8
        assert len(cluster.holders(0)) >= 4
        assert done.copied < done.sent / 50
        skews.append(round(done.skew(16), 3))
    print("max/mean:", skews)
    assert max(skews) <= 1.2
    work = hot_root(requests_per_s=64, seconds=60, sessions=800, documents=200, nbytes=NBYTES, seed=seed)
    plain, _, _ = window(work, nodes=16, seed=seed, start_s=0, stop_s=20, hot_nbytes_per_s=math.inf)
    assert plain.skew(16) > 1.5
    assert plain.copied == 0


@pytest.mark.slow
def test_the_traces_skew_on_16_nodes(trace: Trace):
    """Asked for: max/mean load at most 1.2. No prefix is in more than 0.6 % of the requests; some nodes hold more."""
    skews = []
    for run in SEEDS:
        work = replay(trace, requests_per_s=200, seconds=75, nbytes=NBYTES, seed=run)
        done, _, most = window(work, nodes=16, seed=run, start_s=15, stop_s=75)
        assert most <= 8
        assert done.hit_ratio == 1.0
        skews.append(round(done.skew(16), 3))
    print("max/mean:", skews)
    assert max(skews) <= 1.2


@pytest.mark.slow
def test_at_the_traces_own_rate_copying_costs_next_to_nothing(seed: int, trace: Trace):
    """Four requests a second on 16 nodes: what one of them reads is not hot."""
    work = of_trace(trace, nbytes=64 << 20, seed=seed).between(0, 300)
    done, _, _ = window(work, nodes=16, seed=seed, start_s=0, stop_s=300)
    assert done.sent > 3000
    assert done.copied < done.sent / 50


@pytest.mark.soak
def test_a_root_in_every_request_on_1024_nodes(seed: int):
    """Asked for: max/mean load at most 2.0, with at most 550 copies of the root. Window: 18 s, 36 requests a node."""
    work = hot_root(requests_per_s=2048, seconds=23, sessions=6000, documents=2000, nbytes=NBYTES, seed=seed)
    slowly = [replace(r, at_s=2 * r.at_s if r.at_s < 5 else r.at_s + 5) for r in work.requests]  # saves time
    done, _, most = window(replace(work, requests=slowly), nodes=1024, seed=seed, start_s=10, stop_s=28, capacity=4096)
    print(f"skew {done.skew(1024):.2f}, {most} copies")
    assert done.skew(1024) <= 2.0
    assert 300 < most <= 550


def test_replicas_go_within_a_minute_of_cooling(seed: int):
    work = hot_root(requests_per_s=40, seconds=20, sessions=200, documents=20, nbytes=NBYTES, seed=seed)
    cluster = Cluster(work, 8, seed=seed)
    cluster.play(work.requests)
    cluster.run(20)
    assert len(cluster.holders(0)) > 4
    assert cluster.replicas() > 4
    assert cluster.run_until(lambda: not cluster.replicas(), within_s=60) > 5
    assert cluster.location_errors() == (0, 0)
    assert cluster.directory.heat.copies == {}
    assert all(cluster.holders(chunk) for request in work.requests for chunk in request.chunks), "nothing else has gone"


def test_replicas_follow_the_load_to_another_prefix(seed: int):
    both = hot_root(requests_per_s=40, seconds=60, sessions=200, documents=2, zipf=0.0, nbytes=NBYTES, seed=seed)
    requests = [each for each in both.requests if each.chunks[1] == (1 if each.at_s < 20 else 5)]
    cluster = Cluster(both, 8, seed=seed)
    cluster.play(requests)
    cluster.run(20)
    assert len(cluster.holders(1)) > 2 >= len(cluster.holders(5))
    cluster.run(60)
    assert len(cluster.holders(1)) == 1
    assert len(cluster.holders(5)) > 2


def test_with_affinity_engines_read_at_home(seed: int):
    work = hot_root(requests_per_s=40, seconds=30, sessions=200, documents=40, nbytes=NBYTES, seed=seed)
    counts = {}
    for routing in ("random", "session"):
        cluster = Cluster(work, 8, seed=seed, routing=routing)
        cluster.play(work.requests)
        cluster.run(31)
        counts[routing] = cluster.counters
    assert counts["session"].sent < 0.7 * counts["random"].sent
    assert counts["session"].hits == pytest.approx(counts["random"].hits, rel=0.02)
