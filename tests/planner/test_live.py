"""The planner compared with a real node: the same trace, through sockets, an arena and background threads."""

import heapq
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import raykv
from raykv.eviction import policy
from raykv.memory.layout import TICKS_PER_S
from raykv.planner.replay import DECODE_S, replay
from raykv.planner.ssd import Ssd
from raykv.planner.trace import Trace, read_trace
from raykv.tier.admission import Admission

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TRACE = Path(__file__).parents[1] / "data" / "mooncake_synthetic_trace.jsonl.gz"
FASTER = 16
"""Factor by which `paced` speeds up the trace, from four requests per second to one per tick (64 per second)."""
LATE_S = (0.0, 0.0, 0.0, 0.005, 0.01, 0.03)
SPACE = raykv.Namespace(model="m")
NBYTES = 4096
REQUESTS = pytest.mark.parametrize("requests", [200, pytest.param(None, marks=pytest.mark.soak)])


def paced(requests: int | None, *, silent: bool = True) -> Trace:
    """The first requests of the trace, one per tick of the table's clock. If `silent`, they have no output tokens."""
    trace = read_trace(TRACE)
    first = [
        replace(each, at_s=place / TICKS_PER_S, output_tokens=0 if silent else each.output_tokens)
        for place, each in enumerate(trace.requests[:requests])
    ]
    return replace(trace, requests=first, chunks=1 + max(max(each.chunks) for each in first))


class Clock(NamedTuple):
    """The clock of `drive`, in seconds of the trace. `decode_s`: the time that each generated token takes."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    decode_s: float = DECODE_S / FASTER


CLOCK = Clock()


def drive(trace: Trace, client: raykv.Client, nbytes: int, clock: Clock) -> int:
    """Read each request's chunks, store the missing ones, and report its output tokens at its end. Returns the hits."""
    keys = client.keys([f"{number}" for number in range(trace.chunks)])
    stamps = np.arange(trace.chunks, dtype="<u8").view(np.uint8).reshape(-1, 8)
    into = np.zeros((max(len(each.chunks) for each in trace.requests), nbytes), np.uint8)
    values = np.zeros_like(into)
    began_s, hits = clock.now(), 0
    running: list[tuple[float, int]] = []
    for place, request in enumerate(trace.requests):
        clock.sleep(max(0.0, began_s + request.at_s - clock.now()))
        while running and running[0][0] <= request.at_s:
            done = trace.requests[heapq.heappop(running)[1]]
            client.hint(keys[done.chunks], output_tokens=done.output_tokens)
        if request.output_tokens:
            heapq.heappush(running, (request.at_s + clock.decode_s * request.output_tokens, place))
        chunks = request.chunks
        mine = keys[chunks]
        count = client.match(mine).count
        if count:
            got = client.get(mine[:count], list(into[:count])).prefix
            assert (into[:got, :8] == stamps[chunks[:got]]).all()
            hits += got
        values[: len(chunks), :8] = stamps[chunks]
        client.put(mine, list(values[: len(chunks)]))
    client.flush()
    return hits


def jittered(trace: Trace, seed: int) -> Trace:
    """The same requests, but some are a little late, as with a real client. With seed 0, none is late."""
    random, requests, now_s = np.random.default_rng(seed), [], 0.0
    for request in trace.requests:
        now_s = max(now_s, request.at_s + (random.choice(LATE_S) if seed else 0.0))
        requests.append(replace(request, at_s=now_s))
    return replace(trace, requests=requests)


@REQUESTS
@pytest.mark.parametrize("name", ["leaf_lru", "density"])
def test_a_node_hits_as_often_as_the_planner_says(name, requests):
    trace = paced(requests)
    planned = replay(trace, policy(name), trace.chunks // 10).prefix_hits / trace.accesses
    assert abs(live_hits(trace, name) - planned) < 0.01


@REQUESTS
def test_a_node_with_reported_tokens_hits_as_often_as_the_planner_says(requests):
    """If a request is a tick or two late, density evicts other chunks. So hits vary by about a percentage point."""
    trace = paced(requests, silent=False)
    late = (jittered(trace, seed) for seed in range(5))
    replays = (replay(each, policy("density"), trace.chunks // 10, decode_s=CLOCK.decode_s) for each in late)
    planned = [outcome.prefix_hits / trace.accesses for outcome in replays]
    print(f"planned {planned}")
    assert min(planned) - 0.01 < live_hits(trace, "density") < max(planned) + 0.01


def live_hits(trace: Trace, name: str) -> float:
    """Hits of a node with room for a tenth of the chunks, as a share of all reads."""
    capacity = trace.chunks // 10
    storage = {"extent_nbytes": "256 KiB", "max_chunks": 2 * capacity, "low_water": 0.0, "high_water": 0.001}
    with raykv.embedded(1, arena_nbytes=capacity * NBYTES, policy=name, **storage) as cluster:
        live = drive(trace, cluster.client(SPACE), NBYTES, CLOCK) / trace.accesses
        print(f"{name}: live {live:.4f}, {cluster.nodes[0].stats()}")
    return live


@REQUESTS
def test_a_node_with_an_ssd_hits_as_often_as_the_planner_says(tmp_path, requests):
    nbytes, segment = 64 << 10, 100
    trace = paced(requests)
    capacity, below = trace.chunks // 20, trace.chunks // 4
    ssd = Ssd(below, segment, Admission(None, now_s=0.0), token_nbytes=nbytes // trace.chunk_tokens)
    outcome = replay(trace, policy("leaf_lru"), capacity, ssd=ssd)
    planned = outcome.prefix_hits / trace.accesses
    segment_nbytes = (segment * 17 + 60) * 4096  # a chunk takes 16 pages; other pages hold the records and the summary
    drives = {
        "paths": [str(tmp_path)],
        "segment_nbytes": segment_nbytes,
        "capacity_nbytes": below // segment * segment_nbytes,
    }
    storage = {"extent_nbytes": "1 MiB", "max_chunks": 2 * capacity, "low_water": 0.0, "high_water": 0.001}
    with raykv.embedded(1, arena_nbytes=capacity * nbytes, ssd=drives, **storage) as cluster:
        live = drive(trace, cluster.client(SPACE), nbytes, CLOCK) / trace.accesses
        stats = cluster.nodes[0].stats()
    tier = stats["tiers"]["ssd"]
    print(f"planned {planned:.4f}, {ssd.written} written, {ssd.moved} moved; live {live:.4f}, {stats}")
    print(f"write amplification {tier['disk_nbytes'] / tier['written_nbytes']:.3f}")
    assert abs(live - planned) < 0.01
    assert tier["disk_nbytes"] <= 1.3 * tier["written_nbytes"]
