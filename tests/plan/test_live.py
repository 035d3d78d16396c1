"""The planner's word against a real node: the same trace, through sockets, an arena, and threads that work ahead."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.eviction import policy
from raykv.memory.table import TICKS_PER_S
from raykv.plan.replay import replay
from raykv.plan.trace import Trace, read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TRACE = Path(__file__).parents[1] / "data" / "mooncake_synthetic_trace.jsonl.gz"
SPACE = raykv.Namespace(model="m")
NBYTES = 4096


def paced(trace: Trace) -> Trace:
    """The same requests a tick apart: as fast as their order in time is still told by the columns."""
    requests = [replace(each, at_s=place / TICKS_PER_S, output_tokens=0) for place, each in enumerate(trace.requests)]
    return replace(trace, requests=requests)


def drive(trace: Trace, client: raykv.Client) -> int:
    """Ask for what each request asks for, and store what it lacked. Returns the chunks that were hit."""
    keys = client.keys([f"{number}" for number in range(trace.chunks)])
    values = np.zeros((trace.chunks, NBYTES), np.uint8)
    values[:, :8] = np.arange(trace.chunks, dtype="<u8").view(np.uint8).reshape(-1, 8)
    into = np.zeros((max(len(each.chunks) for each in trace.requests), NBYTES), np.uint8)
    began_s, hits = time.monotonic(), 0
    for request in trace.requests:
        time.sleep(max(0.0, began_s + request.at_s - time.monotonic()))
        chunks = request.chunks
        mine = keys[chunks]
        count = client.match(mine).count
        if count:
            got = client.get(mine[:count], list(into[:count])).prefix
            assert (into[:got, :8] == values[chunks[:got], :8]).all()
            hits += got
        client.put(mine, list(values[chunks]))
    client.flush()
    return hits


@pytest.mark.parametrize("name", ["leaf_lru", "density"])
def test_a_node_hits_as_often_as_the_planner_says(name):
    trace = paced(read_trace(TRACE))
    capacity = trace.chunks // 10
    planned = replay(trace, policy(name), capacity).prefix_hits / trace.accesses
    storage = {"extent_nbytes": "256 KiB", "max_chunks": 2 * capacity, "low_water": 0.0, "high_water": 0.001}
    with raykv.embedded(1, arena_nbytes=capacity * NBYTES, policy=name, **storage) as cluster:
        began_s = time.monotonic()
        live = drive(trace, cluster.client(SPACE)) / trace.accesses
        stats = cluster.nodes[0].stats()
        print(f"{name}: planned {planned:.4f}, live {live:.4f}, {time.monotonic() - began_s:.0f} s, {stats}")
    assert abs(live - planned) < 0.01
