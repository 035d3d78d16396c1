"""Chunks without room at their owner are spread over the other nodes, and an empty node does not get them all."""

import itertools
import random
from collections import Counter

from raykv.node.rooms import MOST_SHARE, Room, Rooms

RUN = 1 << 20
GIB = 1 << 30


def test_the_owner_is_first_and_nodes_without_room_are_left_out(rng: random.Random):
    rooms = Rooms(rng)
    rooms.update({"a": Room(5), "b": Room(100), "c": Room(0, 50), "d": Room(4)})
    for _ in range(20):
        assert rooms.order("a", 5, below=False) == ["a", "b"]
        assert rooms.order("d", 5, below=False) in (["a", "b"], ["b", "a"])
        assert rooms.order("", 5, below=True) == ["c"]
    rooms.take("b", 96, below=False, owned=False)
    assert rooms.order("a", 5, below=False) == ["a"]
    rooms.close("a", below=False)
    assert rooms.order("a", 1, below=False) == ["b", "d"] or rooms.order("a", 1, below=False) == ["d", "b"]
    assert Rooms(rng).order("a", 1, below=False) == []


def test_the_order_of_the_others_follows_their_room(rng: random.Random):
    """Without any bytes sent yet, each order is as likely as when nodes are drawn one by one, weighted by room."""
    free = {"a": 1, "b": 2, "c": 5}
    rooms = Rooms(rng)
    rooms.update({name: Room(room) for name, room in free.items()})
    draws = 20_000
    seen = Counter(tuple(rooms.order("", 1, below=False)) for _ in range(draws))
    for order in itertools.permutations(free):
        left, chance = sum(free.values()), 1.0
        for name in order:
            chance *= free[name] / left
            left -= free[name]
        assert abs(seen[order] / draws - chance) < 0.02, (order, seen[order] / draws, chance)


def test_an_empty_node_gets_at_most_half_while_others_have_room(rng: random.Random):
    rooms = Rooms(rng)
    rooms.update({"empty": Room(1000 * GIB), "b": Room(GIB), "c": Room(GIB)})
    sent: Counter[str] = Counter()
    for _ in range(1000):
        name = rooms.order("", RUN, below=False)[0]
        rooms.take(name, RUN, below=False, owned=False)
        sent[name] += 1
    assert sent["empty"] <= MOST_SHARE * 1000 + 1
    assert min(sent["b"], sent["c"]) > 200
    assert rooms.order("empty", RUN, below=False)[0] == "empty", "chunks that it owns are its own"


def test_if_no_other_node_has_room_the_empty_one_gets_all(rng: random.Random):
    rooms = Rooms(rng)
    rooms.update({"empty": Room(GIB), "full": Room(0)})
    for _ in range(100):
        assert rooms.order("full", RUN, below=False) == ["empty"]
        rooms.take("empty", RUN, below=False, owned=False)


def test_many_drains_fill_nodes_evenly(rng: random.Random):
    """Four nodes drain at once, each with its own knowledge. All targets end at about the same share of their room."""
    free = {"a": 100 * RUN, "b": 400 * RUN, "c": 500 * RUN}
    left = dict(free)
    drains = [Rooms(random.Random(rng.random())) for _ in range(4)]
    for number in range(400):
        if number % 10 == 0:  # the interval at which each asks again
            for rooms in drains:
                rooms.update({name: Room(room) for name, room in left.items()})
        rooms = drains[number % 4]
        name = rooms.order("", RUN, below=False)[0]
        rooms.take(name, RUN, below=False, owned=False)
        left[name] -= RUN
    used = [1 - left[name] / free[name] for name in free]
    assert all(0.25 < share < 0.55 for share in used), used
    assert min(left.values()) >= 0
