"""What owners know, against a dict of sets."""

import numpy as np

from raykv.node.location_index import LocationIndex
from raykv.protocol import chunk_keys


def keys(numbers) -> np.ndarray:
    return np.array([(n, n) for n in numbers], np.uint64).reshape(-1, 2)


def test_random_announcements(rng):
    location_index, model = LocationIndex(1000), {n: [] for n in range(30)}
    for _ in range(500):
        node, numbers = rng.choice("abcd"), rng.sample(range(30), rng.randrange(8))
        match rng.choice(["add", "add", "remove", "keep"]):
            case "add":
                location_index.add(node, keys(numbers))
                for n in numbers:
                    model[n] += [node] if node not in model[n] else []
            case "remove":
                location_index.remove(node, keys(numbers))
                for n in numbers:
                    model[n] = [holder for holder in model[n] if holder != node]
            case "keep":
                left = frozenset(rng.sample("abcd", 3))
                location_index.keep(nodes=left, owned=lambda some: ~np.isin(some[:, 0], numbers))  # noqa: B023
                for n in model:
                    model[n] = [] if n in numbers else [holder for holder in model[n] if holder in left]
        assert [list(holders) for holders in location_index.locate(keys(range(30)))] == list(model.values())
        assert len(location_index) == sum(map(bool, model.values()))


def test_what_lies_below_memory_everywhere_is_cold(rng):
    location_index, held = LocationIndex(1000), {}
    for _ in range(400):
        node, numbers = rng.choice("abc"), rng.sample(range(20), rng.randrange(6))
        if rng.random() < 0.7:
            bits = [rng.random() < 0.5 for _ in numbers]
            location_index.add(
                node, keys(numbers), np.array(bits, np.bool_) if any(bits) or rng.random() < 0.5 else None
            )
            for n, bit in zip(numbers, bits, strict=True):
                held.setdefault(n, {})[node] = bit
        else:
            location_index.remove(node, keys(numbers))
            for n in numbers:
                held.get(n, {}).pop(node, None)
        expected = [bool(held.get(n)) and all(held[n].values()) for n in range(20)]
        found = location_index.cold(keys(range(20)))
        assert (found.tolist() if found is not None else [False] * 20) == expected


def test_nothing_known_and_nothing_asked():
    location_index = LocationIndex(10)
    location_index.keep(nodes=frozenset(), owned=lambda some: np.ones(len(some), np.bool_))
    location_index.remove("a", keys([1]))
    assert location_index.locate(keys([1])) == [()]
    assert location_index.locate(chunk_keys.empty()) == []


def test_beyond_the_bound_the_first_are_forgotten():
    location_index = LocationIndex(100)
    for start in range(0, 1000, 10):
        location_index.add("a", keys(range(start, start + 10)))
        assert len(location_index) <= 100
    known = [n for n, holders in enumerate(location_index.locate(keys(range(1000)))) if holders]
    assert known == list(range(known[0], 1000))
    assert len(known) > 80


def test_a_full_locator_stays_quick(np_rng):
    """Forgetting is not a walk over all that was forgotten before."""
    import time

    location_index = LocationIndex(100_000)
    many = np_rng.integers(0, 1 << 63, (100_000, 2)).astype(np.uint64)
    location_index.add("a", many)
    began_s = time.process_time()
    for start in range(0, 20_000, 10):
        location_index.add("a", many[start : start + 10] ^ np.uint64(1))
    assert time.process_time() - began_s < 2.0
