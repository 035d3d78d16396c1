"""The ring with millions of keys: each node has its share, and a change of the members moves only what it must."""

import numpy as np
import pytest

from raykv.protocol.placement import SLOTS, Member, View, owner_changed

KEYS = 2_000_000


def view_of(count: int, epoch: int = 1) -> View:
    return View(epoch, tuple(Member(f"n{number}", f"h{number}", {}, 1.0, number) for number in range(count)))


def random_keys(np_rng: np.random.Generator):
    return np_rng.integers(0, 1 << 64, (KEYS, 2), np.uint64)


@pytest.mark.parametrize("nodes", [3, 16, 64])
def test_each_node_owns_its_share(np_rng: np.random.Generator, nodes: int):
    owned = np.bincount(view_of(nodes).ring.owners(random_keys(np_rng)), minlength=nodes)
    assert owned.sum() == KEYS
    spread = 4 * np.sqrt(nodes / SLOTS)  # four standard deviations of the number of slots
    assert abs(owned / KEYS * nodes - 1).max() < spread


def test_scaling_from_4_to_5_to_4_moves_the_ideal_share(np_rng: np.random.Generator):
    """The ideal share of 4 -> 5 is what the fifth node owns then: 1 / 5. Back again, the same keys move back."""
    keys, four, five = random_keys(np_rng), view_of(4), view_of(5, epoch=2)
    before, during, after = (view.ring.owners(keys) for view in (four, five, view_of(4, epoch=3)))
    moved = before != during
    assert moved.mean() == pytest.approx(1 / 5, rel=0.1)
    assert (during[moved] == five.ring.nodes.index("n4")).all(), "only to the new node"
    assert (owner_changed(four, five, keys) == moved).all()
    assert (after == before).all()
    assert (owner_changed(five, view_of(4, epoch=3), keys) == moved).all(), "only from the node that left"


def test_1024_nodes(np_rng: np.random.Generator):
    """With 4 slots a node on average, shares differ much: an owner only answers where chunks are."""
    keys, before, after = random_keys(np_rng), view_of(1024), view_of(1023, epoch=2)
    moved = owner_changed(before, after, keys)
    assert (moved == (before.ring.owners(keys) == before.ring.nodes.index("n1023"))).all()
    assert np.bincount(before.ring.owner_of_slot, minlength=1024).max() <= 16
