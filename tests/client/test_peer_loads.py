"""The choice among holders: all replicas get readers, and slow or busy ones fewer."""

import random
from collections import Counter

from raykv.client.peer_loads import PeerLoads


def test_equal_nodes_get_equal_shares(rng: random.Random):
    loads = PeerLoads(rng)
    for name in "abcd":
        loads.begin(name, 1 << 20)
        loads.end(name, 1 << 20, 0.01)
    firsts = Counter(loads.order("abcd")[0] for _ in range(4000))
    assert all(800 < count < 1200 for count in firsts.values()), firsts
    assert all(sorted(loads.order("abcd")) == list("abcd") for _ in range(50))
    assert loads.order(["a"]) == ["a"]
    assert loads.order([]) == []


def test_a_slow_node_is_first_only_if_it_is_drawn_twice(rng: random.Random):
    loads = PeerLoads(rng)
    for name in "abcd":
        loads.end(name, 1 << 20, 0.5 if name == "c" else 0.01)
    firsts = Counter(loads.order("abcd")[0] for _ in range(4000))
    assert firsts["c"] == 0
    loads.retain(frozenset("abd"))
    loads.end("c", 1 << 20, 0.01)
    assert Counter(loads.order("abcd")[0] for _ in range(400))["c"] > 50


def test_bytes_in_flight_count(rng: random.Random):
    loads = PeerLoads(rng)
    for name in "ab":
        loads.end(name, 1 << 20, 0.01)
    loads.begin("a", 8 << 20)
    assert {loads.order("ab")[0] for _ in range(50)} == {"b"}
    loads.end("a", 8 << 20, 0.08)
    assert {loads.order("ab")[0] for _ in range(50)} == {"a", "b"}


def test_a_simulated_cluster_stays_balanced(rng: random.Random):
    """Readers that know only their own reads: the busiest of 8 equal nodes has little more than the mean."""
    served = Counter[str]()
    for _ in range(20):
        loads = PeerLoads(rng)
        for _ in range(200):
            first = loads.order("abcdefgh")[0]
            served[first] += 1
            loads.begin(first, 1 << 20)
            loads.end(first, 1 << 20, rng.uniform(0.009, 0.011))
    assert max(served.values()) < 1.3 * 4000 / 8, served
