"""What owners know, against a dict of sets."""

import numpy as np

from raykv.node.location_index import Locator
from raykv.protocol import chunk_keys


def keys(numbers) -> np.ndarray:
    return np.array([(n, n) for n in numbers], np.uint64).reshape(-1, 2)


def test_random_announcements(rng):
    locator, model = Locator(1000), {n: [] for n in range(30)}
    for _ in range(500):
        node, numbers = rng.choice("abcd"), rng.sample(range(30), rng.randrange(8))
        match rng.choice(["add", "add", "remove", "keep"]):
            case "add":
                locator.add(node, keys(numbers))
                for n in numbers:
                    model[n] += [node] if node not in model[n] else []
            case "remove":
                locator.remove(node, keys(numbers))
                for n in numbers:
                    model[n] = [holder for holder in model[n] if holder != node]
            case "keep":
                left = frozenset(rng.sample("abcd", 3))
                locator.keep(nodes=left, owned=lambda some: ~np.isin(some[:, 0], numbers))  # noqa: B023
                for n in model:
                    model[n] = [] if n in numbers else [holder for holder in model[n] if holder in left]
        assert [list(holders) for holders in locator.locate(keys(range(30)))] == list(model.values())
        assert len(locator) == sum(map(bool, model.values()))


def test_what_lies_below_memory_everywhere_is_cold(rng):
    locator, held = Locator(1000), {}
    for _ in range(400):
        node, numbers = rng.choice("abc"), rng.sample(range(20), rng.randrange(6))
        if rng.random() < 0.7:
            bits = [rng.random() < 0.5 for _ in numbers]
            locator.add(node, keys(numbers), np.array(bits, np.bool_) if any(bits) or rng.random() < 0.5 else None)
            for n, bit in zip(numbers, bits, strict=True):
                held.setdefault(n, {})[node] = bit
        else:
            locator.remove(node, keys(numbers))
            for n in numbers:
                held.get(n, {}).pop(node, None)
        expected = [bool(held.get(n)) and all(held[n].values()) for n in range(20)]
        found = locator.cold(keys(range(20)))
        assert (found.tolist() if found is not None else [False] * 20) == expected


def test_nothing_known_and_nothing_asked():
    locator = Locator(10)
    locator.keep(nodes=frozenset(), owned=lambda some: np.ones(len(some), np.bool_))
    locator.remove("a", keys([1]))
    assert locator.locate(keys([1])) == [()]
    assert locator.locate(chunk_keys.empty()) == []


def test_beyond_the_bound_the_first_are_forgotten():
    locator = Locator(100)
    for start in range(0, 1000, 10):
        locator.add("a", keys(range(start, start + 10)))
        assert len(locator) <= 100
    known = [n for n, holders in enumerate(locator.locate(keys(range(1000)))) if holders]
    assert known == list(range(known[0], 1000))
    assert len(known) > 80


def test_a_full_locator_stays_quick(np_rng):
    """Forgetting is not a walk over all that was forgotten before."""
    import time

    locator = Locator(100_000)
    many = np_rng.integers(0, 1 << 63, (100_000, 2)).astype(np.uint64)
    locator.add("a", many)
    began_s = time.process_time()
    for start in range(0, 20_000, 10):
        locator.add("a", many[start : start + 10] ^ np.uint64(1))
    assert time.process_time() - began_s < 2.0
