"""A node's shard, driven by a trace, hits what the planner says."""

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import StorageConfig
from raykv.eviction import POLICIES, policy
from raykv.namespace import Namespace
from raykv.plan.replay import replay
from raykv.plan.trace import Request, Trace
from raykv.shard import Shard
from raykv.types import KeyArray


def chats(rng, count: int) -> Trace:
    """Chats of up to eight turns behind one of three system prompts, and prompts that come once."""
    number: dict[object, int] = {}
    going: list[list[int]] = []
    requests = []
    for at in range(count):
        if going and rng.random() < 0.7:
            chunks = going.pop(rng.randrange(len(going)))
        else:
            system = rng.randrange(3)
            chunks = [number.setdefault((system, place), len(number)) for place in range(4)]
        chunks = chunks + [number.setdefault((at, place), len(number)) for place in range(10, 10 + rng.randrange(1, 7))]
        if rng.random() < 0.75:
            going.append(chunks)
        requests.append(Request(2.0 * at, chunks, 4 * len(chunks), 0))
    return Trace("chats", requests, len(number), 4)


def live_hits(trace: Trace, name: str, capacity: int) -> int:
    """Prefix hits of a shard that holds so many chunks."""
    config = StorageConfig.load(
        {"arena_nbytes": capacity * PAGE, "extent_nbytes": 16 * PAGE, "max_chunks": 2 * capacity, "shm_dir": None}
        | {"policy": name}
    )
    shard, hits = Shard.open(config, None, now_s=0.0), 0
    account = shard.accounts.open(Namespace(model="m"))
    for request in trace.requests:
        now_s = 1.0 + request.at_s
        keys: KeyArray = np.array([[1 << 40, chunk + 1] for chunk in request.chunks], np.uint64)
        rows, _ = shard.table.look(keys, shard.table.ticks(now_s))
        prefix = [*(rows < 0), True].index(True)
        hits += prefix
        shard.unpin(shard.pin(keys[:prefix], now_s=now_s).rows)
        room = shard.reserve(keys, PAGE, account, chained=True, parent=None, depth=0, now_s=now_s)
        shard.commit(room.rows, np.zeros(len(room.rows), np.uint64), now_s=now_s)
    shard.close()
    return hits


@pytest.mark.parametrize("name", POLICIES)
def test_a_shard_hits_what_the_planner_says(name, rng):
    trace, capacity = chats(rng, 700), 160
    planned = replay(trace, policy(name), capacity).prefix_hits
    assert planned > 0.2 * trace.accesses
    assert live_hits(trace, name, capacity) == pytest.approx(planned, abs=0.01 * trace.accesses)
