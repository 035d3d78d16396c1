"""Requests for chunks that are only in a tier below memory."""

from collections.abc import Iterator

import numpy as np
import pytest

from raykv.node.node import Node
from raykv.protocol import codec, messages
from raykv.protocol.reasons import Place, Reason
from raykv.tier.registry import register_tier
from tests.support.nodes import Peer, content, keys_of, make_node, wait_until
from tests.support.toy_tier import ToyTier

NBYTES = 60_000
NAMES = [f"chunk-{number}" for number in range(100)]


@pytest.fixture
def node() -> Iterator[Node]:
    """A node with a toy tier. Some of its chunks are only in the tier."""
    register_tier("toy", ToyTier)
    storage = {"tiers": {"toy": {}}, "arena_nbytes": "4 MiB"}
    made = make_node(storage=storage)
    made.start()
    peer = Peer(made).open()
    for name in NAMES:  # read each chunk before it is evicted, because the tier takes only chunks that were read
        peer.commit(peer.filled([name], NBYTES, chained=False))
        peer.ask(messages.Read(keys_of([name])))
        wait_until(lambda: not made.mover.demotion.due and not made.mover.demotion.writing)
    yield made
    peer.close()
    made.stop(unlink=True)


def places(node: Node) -> list[int]:
    histories = Peer(node).ask(messages.Why(keys_of(NAMES)))
    found = np.frombuffer(histories.places, "u1").tolist()
    lengths = np.frombuffer(histories.nbytes, "<u4").tolist()
    assert [length for place, length in zip(found, lengths, strict=True) if place] == [NBYTES] * sum(map(bool, found))
    return found


def below_of(node: Node) -> list[str]:
    return [name for name, place in zip(NAMES, places(node), strict=True) if place == Place.OTHER]


def test_chunks_below_memory_are_located_read_pinned_and_deleted(node):
    peer = Peer(node)
    wait_until(lambda: node.announced)
    below = below_of(node)
    assert len(below) > 20
    located = peer.ask(messages.Locate(keys_of(NAMES)))
    bits = codec.unpack_bits(located.below_memory, len(NAMES))
    assert {name for name, bit in zip(NAMES, bits.tolist(), strict=True) if bit} == set(below)
    assert {length for length in np.frombuffer(located.nbytes, "<u4").tolist() if length} == {NBYTES}

    reply = peer.reply(messages.Read(keys_of(below[:3])))
    assert b"".join(reply.outgoing) == b"".join(content(name, NBYTES) for name in below[:3])
    reply.finish(True)
    held = peer.ask(messages.Pin(keys_of(below[3:5])))
    assert np.frombuffer(held.nbytes, "<u4").tolist() == [NBYTES] * 2
    assert peer.ask(messages.Promote(keys_of(below[5:7]), timeout_s=5.0)).count == 2
    assert set(below_of(node)).isdisjoint(below[:7])
    peer.close()

    gone = below_of(node)[:4]
    assert Peer(node).ask(messages.Delete(keys_of(gone))).count == 4
    histories = Peer(node).ask(messages.Why(keys_of(gone)))
    assert (histories.places, histories.reasons) == (bytes(4), bytes([Reason.DELETED]) * 4)


def test_the_owner_answers_for_a_shared_tier_that_others_wrote(node):
    """Only the node that wrote a chunk to a shared tier announces the chunk, and that node may be gone."""
    peer, below = Peer(node), below_of(node)
    index = node.location_index
    index.remove("n", np.frombuffer(keys_of(NAMES), "<u8").reshape(-1, 2))
    located = peer.ask(messages.Locate(keys_of([below[0], "nowhere"])))
    assert (located.choices, np.frombuffer(located.places, "<i4").tolist()) == ((("n",),), [0, -1])
    assert np.frombuffer(located.nbytes, "<u4").tolist() == [NBYTES, 0]
    assert codec.unpack_bits(located.below_memory, 2).tolist() == [True, False]
