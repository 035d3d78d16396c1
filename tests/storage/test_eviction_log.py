"""The eviction log compared with a plain list of departures."""

import random
import time

import numpy as np
import pytest

from raykv.protocol.reasons import Place, Reason
from raykv.storage.eviction_log import CHAIN_STEPS, EvictionLog


def keys_of(numbers) -> np.ndarray:
    """Keys that are not hashes. The log must work with any keys."""
    return np.array([[number * 7, number] for number in numbers], np.uint64).reshape(-1, 2)


def test_what_went_is_known_by_its_last_departure():
    eviction_log = EvictionLog(16)
    assert eviction_log.since_s is None
    eviction_log.add(keys_of([1, 2, 3, 1]), Reason.EVICTED, policies="lru", now_s=1.0)
    eviction_log.add(keys_of([2]), Reason.CORRUPT, tier=Place.SSD, now_s=2.0)
    found = eviction_log.find(keys_of([1, 2, 3, 4]))
    assert found.reasons.tolist() == [Reason.EVICTED, Reason.CORRUPT, Reason.EVICTED, Reason.NONE]
    assert found.tiers.tolist() == [Place.DRAM, Place.SSD, Place.DRAM, Place.NOWHERE]
    assert found.when_s.tolist() == [1.0, 2.0, 1.0, 0.0]
    assert found.policies == ["lru", "", "lru", ""]


def test_no_keys():
    eviction_log = EvictionLog(16)
    eviction_log.add(keys_of([]), Reason.DELETED, now_s=1.0)
    assert eviction_log.find(keys_of([])).policies == []


def test_more_at_once_than_it_can_remember():
    eviction_log = EvictionLog(16)
    reasons = [Reason.EVICTED] * 30 + [Reason.EXPIRED] * 10
    eviction_log.add(keys_of(range(40)), reasons, policies=["lru"] * 39 + ["fifo"], now_s=5.0)
    found = eviction_log.find(keys_of(range(40)))
    assert np.flatnonzero(found.reasons).tolist() == list(range(24, 40))
    assert found.reasons[-11:].tolist() == reasons[-11:]
    assert found.policies[-2:] == ["lru", "fifo"]
    assert eviction_log.since_s == 5.0


@pytest.mark.parametrize("round_", range(4))
def test_random_departures(round_, rng: random.Random):
    eviction_log, added = EvictionLog(64), []
    for now in range(300):
        batch = [rng.randrange(100) for _ in range(rng.randrange(10))]
        reason = rng.choice(list(Reason)[1:])
        eviction_log.add(keys_of(batch), reason, policies=rng.choice(["", "lru", "arc"]), now_s=float(now))
        added += [(number, reason, now) for number in batch]
        remembered = {number: (reason, now) for number, reason, now in added[-64:]}
        found = eviction_log.find(keys_of(range(100)))
        for number, reason, when_s in zip(range(100), found.reasons.tolist(), found.when_s.tolist(), strict=True):
            assert (reason, when_s) == remembered.get(number, (0, 0.0))
        assert (eviction_log.since_s is None) == (len(added) <= 64)


def test_keys_made_to_collide_cost_a_bounded_search():
    eviction_log = EvictionLog(1 << 10)
    bad = np.array([[number, number] for number in range(500)], np.uint64)  # the XOR of a key's halves is always 0
    eviction_log.add(bad, Reason.EVICTED, now_s=1.0)
    assert np.flatnonzero(eviction_log.find(bad).reasons).tolist() == list(range(500 - CHAIN_STEPS, 500))


def test_policies_of_users_own_may_come_and_go_without_end():
    eviction_log = EvictionLog(1 << 10)
    for number in range(300):
        eviction_log.add(keys_of([number]), Reason.EVICTED, policies=f"own:{number}", now_s=1.0)
    found = eviction_log.find(keys_of(range(300)))
    assert found.reasons.all()
    assert found.policies[:254] == [f"own:{number}" for number in range(254)]
    assert found.policies[254:] == [""] * 46


def test_what_an_eviction_costs(np_rng):
    eviction_log = EvictionLog()
    for batch in (1, 16, 512):
        keys = np_rng.integers(0, 1 << 63, (200, batch, 2), np.uint64)
        began_s = time.perf_counter()
        for some in keys:
            eviction_log.add(some, Reason.EVICTED, policies="leaf_lru", now_s=1.0)
        print(f"{batch} departures at once: {(time.perf_counter() - began_s) / 200 / batch * 1e6:.2f} us each")
