"""Messages of members gone wrong: valid types, hostile values. The node refuses them, and its store stays sound."""

import random
import time
from contextlib import suppress

import pytest

from raykv.errors import RayKVError
from raykv.node.node import Node
from raykv.protocol import messages
from tests.support import hostile
from tests.support.crowd import PAGE, SESSIONS, Crowd, check_store
from tests.support.nodes import make_node
from tests.support.soak import soak

STORAGE = {"arena_nbytes": "1 MiB", "extent_nbytes": "64 KiB", "max_chunks": 256}


def send_hostile(node: Node, rng: random.Random, count: int) -> Crowd:
    crowd = Crowd(node)
    for _ in range(count):
        source = hostile.Source(rng.randbytes(rng.choice([20, 100, 400])))
        number = rng.randrange(SESSIONS)
        peer = crowd.peer(number)
        if rng.random() < 0.2:  # an honest commit, so that hostile messages meet chunks
            some = rng.sample(hostile.CHUNKS, 4)
            with suppress(RayKVError):
                peer.commit(peer.filled(some, PAGE))
        without = (messages.Drain,) if peer.session.local else ()  # a drain would end all stores
        crowd.send(peer, hostile.message(source, without=without), whole=rng.random() < 0.8, source=source)
        if rng.random() < 0.01:
            crowd.replace(number)
    crowd.close()
    return crowd


def run(rng: random.Random, count: int) -> None:
    node = make_node(storage=STORAGE)
    began_s = time.monotonic()
    try:
        crowd = send_hostile(node, rng, count)
        assert not crowd.bugs, crowd.bugs[:3]
        assert node.failure is None
        check_store(node)
        print(f"{count:,} messages in {time.monotonic() - began_s:.1f} s: {dict(crowd.answers)}")
        assert {"Lent", "Committed", "UsageError", "Accepted", "Reading", "Held"} <= crowd.answers.keys()
    finally:
        node.stop()


def test_hostile_messages(rng: random.Random):
    run(rng, 3000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_hostile_messages(rng: random.Random):
    run(rng, soak("messages", 100_000))
