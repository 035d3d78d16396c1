"""The location index of an owner, compared with plain dicts."""

import random
from collections import Counter

import numpy as np

from raykv.node import location_index as module
from raykv.node.location_index import MAX_KNOWN, MAX_SHARED, UNKNOWN, Location, LocationIndex, located
from raykv.protocol import chunk_keys
from raykv.protocol.codec import unpack_bits
from raykv.protocol.messages import MAX_HOLDERS


def keys(numbers) -> np.ndarray:
    return np.array([(n, n) for n in numbers], np.uint64).reshape(-1, 2)


def add(index: LocationIndex, node: str, numbers, nbytes: int = 4096) -> None:
    index.add(node, keys(numbers), np.full(len(numbers), nbytes, np.uint32))


def test_random_announcements(rng: random.Random, monkeypatch):
    """Random announcements and views. Each chunk's holders, length and below-memory bits must equal the model's."""
    monkeypatch.setattr(module, "MAX_SHARED", 50)
    index = LocationIndex(1000)
    model: dict[int, dict[str, bool]] = {n: {} for n in range(30)}
    lengths: dict[int, int] = {}
    for _ in range(800):
        node, numbers = rng.choice("abcd"), rng.sample(range(30), rng.randrange(8))
        match rng.choice(["add", "add", "remove", "view"]):
            case "add":
                bits = [rng.random() < 0.4 for _ in numbers]
                sizes = [rng.choice([1, 4096, 1 << 31]) for _ in numbers]
                below = np.array(bits, np.bool_) if any(bits) or rng.random() < 0.5 else None
                index.add(node, keys(numbers), np.array(sizes, np.uint32), below)
                for n, bit, size in zip(numbers, bits, sizes, strict=True):
                    model[n][node], lengths[n] = bit, size
            case "remove":
                index.remove(node, keys(numbers))
                for n in numbers:
                    model[n].pop(node, None)
            case "view":
                left = frozenset(rng.sample("abcd", 3))
                index.follow_view(nodes=left, owned=lambda some: ~np.isin(some[:, 0], numbers))  # noqa: B023
                index.forget_former()
                for n, held in model.items():
                    model[n] = {} if n in numbers else {holder: bit for holder, bit in held.items() if holder in left}
        found = index.locate(keys(range(30)))
        assert [list(each.holders) for each in found] == [list(held) for held in model.values()]
        assert [set(each.below) for each in found] == [{h for h, bit in held.items() if bit} for held in model.values()]
        assert [each.nbytes for each in found] == [lengths[n] if held else 0 for n, held in model.items()]
        assert len(index) == sum(map(bool, model.values()))
        answer = located(found, rng)
        assert unpack_bits(answer.below_memory, 30).tolist() == [
            bool(held) and all(held.values()) for held in model.values()
        ]


def test_the_answer_of_an_owner(rng: random.Random):
    three = Location(("b", "c", "d"), (), 7)
    answer = located([three, UNKNOWN, Location(("a",), ("a",), 9), three, Location(("a",), (), 0)], rng)
    assert answer.choices == (("b", "c", "d"), ("a",))
    assert np.frombuffer(answer.places, "<i4").tolist() == [0, -1, 1, 0, 1]
    assert np.frombuffer(answer.nbytes, "<u4").tolist() == [7, 0, 9, 7, 0]
    assert unpack_bits(answer.below_memory, 5).tolist() == [False, False, True, False, False]
    assert located([], rng).choices == ()
    assert located([UNKNOWN], rng).nbytes == located([UNKNOWN], rng).below_memory == b""


def test_many_holders_are_named_equally_often(rng: random.Random):
    holders = tuple("abcdefgh")
    named = Counter[str]()
    for _ in range(2000):
        answer = located([Location(holders, (), 7), Location(holders, (), 9)], rng)
        assert len(answer.choices) == 1, "one prefix, one choice"
        assert len(set(answer.choices[0])) == MAX_HOLDERS
        named.update(answer.choices[0])
    assert set(named) == set(holders)
    assert all(0.8 < count / (2000 * MAX_HOLDERS / 8) < 1.2 for count in named.values()), named


def test_equal_locations_share_one_object():
    index = LocationIndex(1000)
    add(index, "a", range(100))
    add(index, "b", range(50))
    assert len({id(each) for each in index.locate(keys(range(100)))}) == 2


def test_nothing_known_and_nothing_asked():
    index = LocationIndex(10)
    index.follow_view(nodes=frozenset(), owned=lambda some: np.ones(len(some), np.bool_))
    index.remove("a", keys([1]))
    assert index.locate(keys([1])) == [UNKNOWN]
    assert index.locate(chunk_keys.empty()) == []


def test_beyond_the_bound_the_oldest_go():
    index = LocationIndex(100)
    for start in range(0, 1000, 10):
        add(index, "a", range(start, start + 10))
        assert len(index) <= 100
    known = [n for n, each in enumerate(index.locate(keys(range(1000)))) if each.holders]
    assert known == list(range(known[0], 1000))
    assert len(known) > 80


def test_a_key_has_a_bounded_number_of_holders():
    """A member that announces one key under ever new names must not make its location grow."""
    index, key = LocationIndex(), keys([1])
    for number in range(1500):
        index.add(f"node-{number}", key, np.array([9], np.uint32), np.ones(1, np.bool_))
        assert sum(len(each.holders) for each in index._shared.values()) <= MAX_SHARED + MAX_KNOWN
    (location,) = index.locate(key)
    assert location.holders == tuple(f"node-{number}" for number in range(1500 - MAX_KNOWN, 1500))
    assert location.below == location.holders


def test_a_full_index_stays_quick(np_rng):
    """To drop the oldest entries, the index does not walk over all entries that it dropped before."""
    import time

    index, lengths = LocationIndex(100_000), np.full(100_000, 4096, np.uint32)
    many = np_rng.integers(0, 1 << 63, (100_000, 2)).astype(np.uint64)
    index.add("a", many, lengths)
    began_s = time.process_time()
    for start in range(0, 20_000, 10):
        index.add("a", many[start : start + 10] ^ np.uint64(1), lengths[:10])
    assert time.process_time() - began_s < 2.0


def test_keys_of_another_owner_are_found_until_they_are_forgotten_or_the_view_changes_again():
    index = LocationIndex()
    for node in ("a", "b"):
        index.add(node, keys(range(6)), np.full(6, 7, np.uint32))
    index.follow_view(nodes=frozenset("a"), owned=lambda some: some[:, 0] < 3)
    assert len(index) == 3
    assert [each.holders for each in index.locate(keys(range(6)))] == [("a",)] * 6
    index.add("c", keys([5]), np.full(1, 7, np.uint32))
    assert index.locate(keys([5]))[0].holders == ("c",)
    index.follow_view(nodes=frozenset("ac"), owned=lambda some: some[:, 0] > 1)
    found = [each.holders for each in index.locate(keys(range(6)))]
    assert found == [("a",), ("a",), ("a",), (), (), ("c",)], "what it owns again, it does not know from before"
    index.forget_former()
    assert [each.holders for each in index.locate(keys(range(6)))] == [(), (), ("a",), (), (), ("c",)]
