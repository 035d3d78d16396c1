"""The ring: shares follow the weights, all processes compute the same ring, and no key moves without need."""

import subprocess
import sys

import numpy as np
import pytest
import xxhash

from raykv.protocol.placement import SLOTS, Member, Ring, View


def nodes(count: int, weight: float = 1.0) -> list[tuple[str, float]]:
    return [(f"node-{number}", weight) for number in range(count)]


def owners(ring: Ring) -> np.ndarray:
    """Return the name of each slot's owner."""
    return np.array(ring.nodes)[ring.owner_of_slot]


def test_the_definition_slot_by_slot():
    """Compare each slot with weighted rendezvous hashing in plain Python."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    weights = [("a", 1.0), ("b", 2.5), ("c", 0.25)]
    ring = Ring(weights)
    for slot in range(0, SLOTS, 37):
        score = {}
        for name, weight in weights:
            uniform = ((mix(slot ^ xxhash.xxh3_64_intdigest(name.encode())) >> 11) + 0.5) / (1 << 53)
            score[name] = -weight / np.log(uniform)
        assert ring.nodes[ring.owner_of_slot[slot]] == max(score, key=score.__getitem__)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_a_leaver_moves_only_its_own_and_a_joiner_only_what_it_wins(count):
    before, after = owners(Ring(nodes(count))), owners(Ring(nodes(count + 1)))
    moved = before != after
    assert set(after[moved]) == {f"node-{count}"}
    assert moved.mean() == pytest.approx(1 / (count + 1), rel=0.2)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("keys", [0, 1, 64, 65, 1000])
def test_shares_are_what_the_array_says(count, keys, np_rng):
    ring, some = Ring(nodes(count)), np_rng.integers(0, 1 << 64, (keys, 2), np.uint64)
    expected = [ring.nodes[place] if place >= 0 else None for place in ring.owners(some).tolist()]
    shares = ring.shares(some)
    assert sorted(place for share in shares.values() for place in share) == (list(range(keys)) if count else [])
    assert all(expected[place] == name for name, share in shares.items() for place in share)


def test_a_change_of_weight_moves_keys_to_or_from_that_node_alone():
    before = owners(Ring(nodes(8)))
    heavier = owners(Ring([*nodes(7), ("node-7", 3.0)]))
    assert set(heavier[before != heavier]) == {"node-7"}


@pytest.mark.parametrize("count", [2, 16, 64])
def test_equal_weights_get_equal_shares(count):
    shares = np.bincount(Ring(nodes(count)).owner_of_slot, minlength=count)
    assert shares.max() / shares.mean() < 1.0 + 4.0 / np.sqrt(SLOTS / count)


def test_shares_follow_the_weights():
    weights = [("a", 1.0), ("b", 2.0), ("c", 4.0), ("d", 1.0)]
    ring = Ring(weights)
    shares = np.bincount(ring.owner_of_slot, minlength=4) / SLOTS
    assert shares.tolist() == pytest.approx([1 / 8, 2 / 8, 4 / 8, 1 / 8], rel=0.12)


@pytest.mark.slow
def test_the_order_of_members_does_not_matter_nor_does_the_process():
    weights = [(name, 1.0 + place % 3) for place, (name, _) in enumerate(nodes(9))]
    ring = Ring(weights)
    assert (Ring(weights[::-1]).owner_of_slot == ring.owner_of_slot).all()
    ring_of = f"from raykv.protocol.placement import Ring; ring = Ring({weights!r})"
    program = f"import zlib; {ring_of}; print(zlib.crc32(ring.owner_of_slot.tobytes()))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    import zlib

    assert int(said) == zlib.crc32(ring.owner_of_slot.tobytes())


def test_owners_of_keys(np_rng):
    keys = np_rng.integers(0, 1 << 64, (1000, 2), np.uint64)
    ring = Ring(nodes(5))
    expected = [int(ring.owner_of_slot[int(high) * SLOTS >> 64]) for high in keys[:, 0].tolist()]
    assert ring.owners(keys).tolist() == expected
    assert (Ring([]).owners(keys) == -1).all()


def test_a_view_knows_its_members():
    member = Member("a", "h", {"tcp": "x:1", "unix": "unix:/x"}, 1.0, 1)
    assert (member.address, member.local_address) == ("x:1", "unix:/x")
    assert Member("b", "h", {}, 1.0, 1).address == ""
    view = View(3, (member,))
    assert view.member("a") is member
    assert view.member("b") is None
    assert view.ring.nodes == ("a",)
    assert View().ring.nodes == ()
