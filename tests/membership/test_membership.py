"""Membership: nodes join, leave, fall silent and return. The directory restarts empty, and learns the members again."""

import random

import pytest

from raykv.membership.membership import InProcessMembership, Membership
from raykv.protocol import codec
from raykv.protocol.messages import Heartbeat, HeartbeatAnswer
from raykv.protocol.placement import Member, View


def member(name: str, life: int = 1) -> Member:
    return Member(name, f"host-{name}", {"tcp": f"{name}:1", "unix": f"unix:/{name}"}, 1.0, life)


class Node:
    """A node that sends heartbeats and keeps the view that it receives."""

    def __init__(self, name: str, life: int = 1) -> None:
        self.member, self.view = member(name, life), View()

    def beat(self, directory: Membership, now_s: float) -> None:
        answer = directory.beat(Heartbeat(self.member, self.view.epoch), now_s=now_s)
        if answer.want_view:
            answer = directory.beat(Heartbeat(self.member, self.view.epoch, self.view), now_s=now_s)
            assert not answer.want_view
        if answer.view is not None:
            assert answer.view.epoch > self.view.epoch
            self.view = answer.view


def names(view: View) -> list[str]:
    return [known.node_id for known in view.members]


def test_joining_staying_and_leaving():
    directory, a, b = Membership(member_timeout_s=5.0), Node("a"), Node("b")
    a.beat(directory, 0.0)
    assert (names(a.view), a.view.epoch) == (["a"], 1)
    b.beat(directory, 0.0)
    assert names(b.view) == ["a", "b"]
    assert directory.beat(Heartbeat(b.member, 2), now_s=1.0) == HeartbeatAnswer()
    a.beat(directory, 1.0)
    assert a.view == b.view == directory.view
    directory.leave("a")
    directory.leave("a")
    directory.leave("nobody")
    assert (names(directory.view), directory.view.epoch) == (["b"], 3)


def test_silence_ends_membership_and_a_heartbeat_restores_it():
    directory, a, b = Membership(member_timeout_s=5.0), Node("a"), Node("b")
    a.beat(directory, 0.0)
    b.beat(directory, 0.0)
    a.beat(directory, 4.0)
    assert directory.expire(now_s=5.0) == []
    assert directory.expire(now_s=5.1) == ["b"]
    assert directory.expire(now_s=5.1) == []
    assert names(directory.view) == ["a"]
    b.beat(directory, 6.0)
    assert names(b.view) == ["a", "b"]


def test_silence_while_the_directory_did_not_run_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("raykv.membership.membership.time.monotonic", lambda: now[0])
    directory = InProcessMembership(member_timeout_s=5.0)
    a, b = (Heartbeat(member(name), 0) for name in "ab")
    for now[0] in (0.0, 1.0, 2.0):
        directory.beat(a)
        directory.beat(b)
    for now[0] in (100.0, 101.0, 102.0):
        directory.beat(a)
        assert names(directory.logic.view) == ["a", "b"], now
    for now[0] in (103.0, 104.0, 105.0):
        directory.beat(a)
    assert names(directory.logic.view) == ["a"], "b is silent while the directory runs"


def test_the_last_members_are_removed_although_the_directory_is_rarely_called(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("raykv.membership.membership.time.monotonic", lambda: now[0])
    directory = InProcessMembership(member_timeout_s=0.5)
    directory.beat(Heartbeat(member("a"), 0))
    for now[0] in (1.0, 2.0):
        directory.expire()
        assert names(directory.logic.view) == ["a"]
    now[0] = 3.0
    directory.expire()
    assert names(directory.logic.view) == []


def test_another_incarnation_or_address_makes_a_new_view():
    directory, a = Membership(member_timeout_s=5.0), Node("a")
    a.beat(directory, 0.0)
    again = Node("a", life=2)
    again.beat(directory, 1.0)
    assert again.view.epoch == 2
    assert again.view.members == (member("a", 2),)


def test_after_a_restart_it_learns_the_view_from_its_nodes():
    directory, nodes = Membership(member_timeout_s=5.0), [Node(name) for name in "abc"]
    for now_s in (0.0, 1.0):
        for node in nodes:
            node.beat(directory, now_s)
    before = directory.view
    directory = Membership(member_timeout_s=5.0)
    nodes[1].beat(directory, 2.0)
    assert directory.view.members == before.members
    assert directory.view.epoch > before.epoch + 1, "the last directory may have published another view"
    assert nodes[1].view == directory.view
    assert directory.expire(now_s=6.9) == []  # the two other nodes may still send a heartbeat until 7.0 s
    nodes[1].beat(directory, 6.0)
    assert sorted(directory.expire(now_s=7.1)) == ["a", "c"]


def test_a_node_that_restarts_with_the_directory_is_known_to_all_by_its_new_address():
    """It offers the directory its last view, with its new entry. The other nodes have that view with the old entry."""
    directory, nodes = Membership(member_timeout_s=5.0), {name: Node(name) for name in "abc"}
    for now_s in (0.0, 1.0):
        for node in nodes.values():
            node.beat(directory, now_s)
    directory, last = Membership(member_timeout_s=5.0), nodes["a"].view
    nodes["a"] = Node("a", life=2)
    me = nodes["a"].member
    nodes["a"].view = View(last.epoch, tuple(me if each.node_id == "a" else each for each in last.members))
    for _ in range(2):
        for node in nodes.values():
            node.beat(directory, 2.0)
    assert all(node.view.member("a") == me for node in nodes.values())


def test_after_a_restart_a_new_node_may_call_first():
    directory, nodes = Membership(member_timeout_s=5.0), [Node(name) for name in "abc"]
    for now_s in (0.0, 1.0):
        for node in nodes:
            node.beat(directory, now_s)
    directory, new = Membership(member_timeout_s=5.0), Node("new")
    for node in (new, *nodes, new, *nodes):
        node.beat(directory, 2.0)
    assert names(directory.view) == ["a", "b", "c", "new"]
    assert all(node.view == directory.view for node in (new, *nodes))


@pytest.mark.parametrize("epoch", [1 << 33, (1 << 63) - 1, (1 << 64) - 1])
def test_an_epoch_without_end_is_not_adopted(epoch: int):
    """A node gone wrong must not make later views ones that cannot be sent."""
    directory, a = Membership(member_timeout_s=5.0), Node("a")
    directory.beat(Heartbeat(member("x"), epoch, View(epoch, (member("x"),))), now_s=0.0)
    a.beat(directory, 0.0)
    assert names(a.view) == ["a"]
    codec.encode(HeartbeatAnswer(a.view), 0, 0)


def test_epochs_grow_and_all_agree_in_the_end(rng: random.Random):
    for _ in range(30):
        directory, nodes = Membership(member_timeout_s=2.5), {name: Node(name) for name in "abcdef"}
        alive, now_s, lives = set("abc"), 0.0, 1
        for _ in range(80):
            now_s += rng.random()
            epoch = directory.view.epoch
            match rng.choice(["beat"] * 6 + ["die", "live", "restart", "leave", "restart directory"]):
                case "beat":
                    for name in rng.sample(sorted(alive), rng.randint(0, len(alive))):
                        nodes[name].beat(directory, now_s)
                case "die" if len(alive) > 1:
                    alive.discard(rng.choice(sorted(alive)))
                case "live":
                    alive.add(rng.choice("abcdef"))
                case "restart":
                    name, lives = rng.choice(sorted(alive)), lives + 1
                    nodes[name] = Node(name, lives)
                case "leave":
                    directory.leave(rng.choice("abcdef"))
                case "restart directory":
                    directory, epoch = Membership(member_timeout_s=2.5), 0
            directory.expire(now_s=now_s)
            assert directory.view.epoch >= epoch
        for step in range(9):
            for name in sorted(alive):
                nodes[name].beat(directory, now_s + step)
            directory.expire(now_s=now_s + step)
        assert names(directory.view) == sorted(alive)
        assert all(nodes[name].view == directory.view for name in alive)
        assert all(directory.view.member(name) == nodes[name].member for name in alive)
