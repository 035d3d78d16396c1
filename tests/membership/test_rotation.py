"""The directory lets a rotation go on only when all members use the newest secrets, and learns them from the nodes."""

import random

import pytest

from raykv.errors import TransientError, UsageError
from raykv.membership.membership import Membership
from raykv.protocol.keyring import Keyring, Stage
from raykv.protocol.messages import Heartbeat
from raykv.protocol.placement import Member, View

FIRST = Keyring.first(b"one")


class Node:
    """A node that sends heartbeats, and adopts what it receives."""

    def __init__(self, name: str) -> None:
        self.member = Member(name, f"host-{name}", {"tcp": f"{name}:1"}, 1.0, 1)
        self.view, self.keyring = View(), FIRST

    def beat(self, directory: Membership, now_s: float = 0.0) -> None:
        heartbeat = Heartbeat(self.member, self.view.epoch, keyring_version=self.keyring.version)
        answer = directory.beat(heartbeat, now_s=now_s)
        if answer.want_view or answer.want_keyring:
            heartbeat.view = self.view if answer.want_view else None
            heartbeat.keyring = self.keyring if answer.want_keyring else None
            answer = directory.beat(heartbeat, now_s=now_s)
            assert (answer.want_view, answer.want_keyring) == (False, False)
        self.view = answer.view or self.view
        if answer.keyring is not None:
            assert answer.keyring.version > self.keyring.version
            self.keyring = answer.keyring


def make(keyring: Keyring | None = FIRST) -> Membership:
    return Membership(member_timeout_s=5.0, keyring=keyring)


def rotated(directory: Membership, nodes: list[Node], secret: bytes) -> None:
    """Do all steps of a rotation."""
    stages = []
    for _ in range(3):
        stages.append(directory.rotate(secret).stage)
        for _ in range(2):  # the second heartbeat reports what the node has adopted with the first
            for node in nodes:
                node.beat(directory)
    assert stages == [Stage.ADDED, Stage.USED, Stage.STEADY]


def test_a_step_waits_for_all_members():
    directory, a, b = make(), Node("a"), Node("b")
    with pytest.raises(TransientError, match="there is no node"):
        directory.rotate(b"two")
    for node in (a, b):
        node.beat(directory)
    assert directory.rotate(b"two").stage is Stage.ADDED
    for node in (a, b, a):
        with pytest.raises(TransientError, match=r"not all nodes use the same secrets yet: .*b"):
            directory.rotate(b"three")
        node.beat(directory)
    assert directory.behind() == ["b"]
    b.beat(directory)
    assert directory.rotate(b"three").current == b"two"


def test_a_silent_member_does_not_hold_up_a_rotation_for_ever():
    directory, a, b = make(), Node("a"), Node("b")
    for node in (a, b):
        node.beat(directory)
    directory.rotate(b"two")
    a.beat(directory, 4.0)
    a.beat(directory, 6.0)
    assert directory.expire(now_s=6.0) == ["b"]
    assert directory.rotate(b"unused").stage is Stage.USED
    for now_s in (7.0, 8.0):
        a.beat(directory, now_s)
        b.beat(directory, now_s)
    assert a.keyring == b.keyring == directory.keyring


def test_a_new_node_learns_the_secrets():
    directory, a, late = make(), Node("a"), Node("late")
    a.beat(directory)
    rotated(directory, [a], b"two")
    late.beat(directory)
    assert late.keyring.accepted == (b"two",)


def test_a_directory_that_restarted_learns_the_secrets(rng: random.Random):
    for _ in range(20):
        directory, nodes = make(), [Node(name) for name in "abc"]
        for node in nodes:
            node.beat(directory)
        for _ in range(rng.randrange(1, 8)):
            directory.rotate(rng.randbytes(32))
            for node in [*rng.sample(nodes, 3), *nodes]:
                node.beat(directory)
        before, directory = directory.keyring, make()
        for node in rng.sample(nodes, 3):
            node.beat(directory)
        assert directory.keyring == before
        assert directory.behind() == []
        assert directory.rotate(rng.randbytes(32)).version == before.version + 1


def test_a_rotation_waits_until_a_restarted_directory_has_heard_all_members():
    directory, nodes = make(), [Node("a"), Node("b")]
    for node in nodes:
        node.beat(directory)
    rotated(directory, nodes, b"two")
    directory = make()
    nodes[0].beat(directory)
    with pytest.raises(TransientError, match="yet: b"):
        directory.rotate(b"three")


def test_secrets_of_another_cluster_are_not_adopted():
    directory, node = make(), Node("a")
    node.keyring = Keyring(9, b"other", b"theirs")
    heartbeat = Heartbeat(node.member, 0, keyring_version=9, keyring=node.keyring)
    directory.beat(heartbeat, now_s=0.0)
    assert directory.keyring == FIRST


def test_a_directory_without_secrets_sends_none():
    directory, node = make(None), Node("a")
    node.beat(directory)
    assert node.keyring == FIRST
    with pytest.raises(UsageError):
        directory.rotate(b"two")
