"""The steps of a rotation: keyrings that are one step apart accept each other's secret, and two secrets never mix."""

from itertools import pairwise

import msgspec

from raykv.protocol.keyring import Keyring, Stage, key_id


def test_two_rotations_step_by_step():
    rings = [Keyring.first(b"one")]
    for secret in (b"two", b"unused", b"unused", b"three", b"unused", b"unused"):
        rings.append(rings[-1].next_step(secret))
    assert [(ring.version, ring.stage, ring.current, ring.accepted) for ring in rings] == [
        (1, Stage.STEADY, b"one", (b"one",)),
        (2, Stage.ADDED, b"one", (b"two", b"one")),
        (3, Stage.USED, b"two", (b"two", b"one")),
        (4, Stage.STEADY, b"two", (b"two",)),
        (5, Stage.ADDED, b"two", (b"three", b"two")),
        (6, Stage.USED, b"three", (b"three", b"two")),
        (7, Stage.STEADY, b"three", (b"three",)),
    ]
    assert {ring.cluster for ring in rings} == {key_id(b"one")}
    for before, after in pairwise(rings):
        assert before.current in after.accepted
        assert after.current in before.accepted


def test_the_empty_secret_of_unix_sockets_is_a_secret():
    assert Keyring.first(b"").accepted == (b"",)


def test_no_text_shows_a_secret():
    ring = Keyring.first(b"my-secret").next_step(b"another-one")
    for text in (repr(ring), str(ring), f"{ring}", repr([ring])):
        assert "secret" not in text
        assert "another" not in text
    assert b"my-secret" in msgspec.msgpack.encode(ring)


def test_key_ids_differ():
    ids = {key_id(bytes([number]) * 32) for number in range(200)}
    assert len(ids) == 200
    assert {len(each) for each in ids} == {8}
