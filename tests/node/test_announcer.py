"""Announcements between nodes: what owners know after changes and restarts, and when an owner does not answer."""

from collections.abc import Iterator

import numpy as np
import pytest

from raykv.embedded import InProcessMembership
from raykv.errors import PeerUnavailable
from raykv.node import announcer
from raykv.node.announcer import FIRST_S
from raykv.node.node import Node
from raykv.protocol import messages
from raykv.protocol.chunk_keys import from_bytes
from tests.support.faults import Faults
from tests.support.nodes import SPACE, Peer, cluster, keys_of, make_node, names, put, wait_until

NAMES = [f"chunk-{number}" for number in range(40)]
PAGE = 4096


class Nodes:
    """Nodes of one cluster, and their directory."""

    def __init__(self) -> None:
        self.membership = InProcessMembership(member_timeout_s=0.5)
        self.by_name: dict[str, Node] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self.by_name[name] = make_node(node_id=name, membership=self.membership)
            self.by_name[name].start()
        self.settle()

    def stop(self, name: str, *, leave: bool) -> None:
        self.by_name.pop(name).stop(leave=leave, unlink=True)

    def settle(self) -> None:
        """Wait until every node has the newest view and has announced all its chunks."""
        wait_until(
            lambda: (
                {node.view.epoch for node in self.by_name.values()} == {self.membership.logic.view.epoch}
                and all(node.announced for node in self.by_name.values())
                and len(self.membership.logic.view.members) == len(self.by_name)
            ),
        )

    def put(self, node: str, names: list[str], nbytes: int = PAGE) -> None:
        peer = Peer(self.by_name[node]).open()
        (done,) = peer.commit(peer.filled(names, nbytes, chained=False))
        assert not done.problem
        peer.close()

    def owner(self, name: str) -> str:
        view = next(iter(self.by_name.values())).view
        (owner,) = view.ring.shares(from_bytes(keys_of([name])))
        return owner

    def located(self, name: str) -> tuple[tuple[str, ...], int]:
        """Holders and length of a chunk, as its owner knows them."""
        found = Peer(self.by_name[self.owner(name)]).ask(messages.Locate(keys_of([name])))
        (place,) = np.frombuffer(found.places, "<i4").tolist()
        lengths = np.frombuffer(found.nbytes, "<u4").tolist()
        return (found.choices[place], lengths[0]) if place >= 0 else ((), 0)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    for node in made.by_name.values():
        node.stop(unlink=True, leave=False)


def test_owners_know_holders_and_lengths(nodes: Nodes):
    nodes.start("a", "b", "c")
    nodes.put("a", NAMES, 3 * PAGE - 5)
    nodes.put("b", NAMES[:5], 3 * PAGE - 5)
    nodes.settle()
    assert {nodes.located(name) for name in NAMES[5:]} == {(("a",), 3 * PAGE - 5)}
    assert {(frozenset(each[0]), each[1]) for each in map(nodes.located, NAMES[:5])} == {
        (frozenset("ab"), 3 * PAGE - 5)
    }
    Peer(nodes.by_name["a"]).ask(messages.Delete(keys_of(NAMES)))
    nodes.settle()
    assert [nodes.located(name)[0] for name in NAMES] == [("b",)] * 5 + [()] * 35


def test_a_joiner_learns_what_it_owns_and_a_leaver_is_forgotten(nodes: Nodes):
    nodes.start("a", "b")
    nodes.put("a", NAMES)
    nodes.put("b", NAMES[:10])
    nodes.settle()
    nodes.start("c")
    assert all("a" in nodes.located(name)[0] for name in NAMES)
    nodes.stop("b", leave=True)
    nodes.settle()
    assert {nodes.located(name) for name in NAMES} == {(("a",), PAGE)}


def test_a_restarted_owner_learns_again(nodes: Nodes):
    nodes.start("a", "b")
    nodes.put("a", NAMES)
    nodes.settle()
    nodes.stop("b", leave=False)
    nodes.start("b")
    assert {nodes.located(name) for name in NAMES} == {(("a",), PAGE)}


def test_an_owner_that_does_not_answer_hears_later(nodes: Nodes, faults: Faults):
    nodes.start("a", "b")
    faults.silence(nodes.by_name["b"])
    nodes.put("a", NAMES)
    node = nodes.by_name["a"]
    wait_until(lambda: node.stats()["errors"].get("announce", 0) > 1)
    assert node.stats()["unannounced"] > 0
    assert not node.announced
    faults.restore(nodes.by_name["b"])
    nodes.settle()
    assert {nodes.located(name) for name in NAMES} == {(("a",), PAGE)}


def test_an_owner_that_hangs_delays_no_announcement_to_others(nodes: Nodes, faults: Faults, monkeypatch):
    """Each request to "b" takes until its deadline. In the order of owners, "b" comes before "c"."""
    monkeypatch.setattr(announcer, "SLOW_S", 2.0)
    nodes.start("a", "b", "c")
    faults.hang(nodes.by_name["b"])
    for part in range(3):
        fresh = [f"{part}-{name}" for name in NAMES]
        nodes.put("a", fresh)
        theirs = [name for name in fresh if nodes.owner(name) == "c"]
        assert theirs
        wait_until(lambda theirs=theirs: all(nodes.located(name)[0] == ("a",) for name in theirs), FIRST_S + 1.0)
    assert nodes.by_name["a"].stats()["unannounced"] > 0
    faults.restore(nodes.by_name["b"])
    nodes.settle()
    assert {nodes.located(f"{part}-{name}") for part in range(3) for name in NAMES} == {(("a",), PAGE)}


def test_keys_of_a_slow_owner_go_to_the_new_owner_when_it_leaves(nodes: Nodes, faults: Faults, monkeypatch):
    monkeypatch.setattr(announcer, "SLOW_S", 0.2)
    nodes.start("a", "b", "c")
    faults.hang(nodes.by_name["b"])
    nodes.put("a", NAMES)
    wait_until(lambda: nodes.by_name["a"].stats()["errors"].get("announce", 0) > 0)
    nodes.stop("b", leave=True)
    nodes.settle()
    assert {nodes.located(name) for name in NAMES} == {(("a",), PAGE)}


def test_lost_messages_cost_time_and_nothing_else(nodes: Nodes, faults: Faults):
    nodes.start("a", "b", "c")
    faults.loss = 0.3
    for number, name in enumerate(NAMES):
        nodes.put("abc"[number % 3], [name])
    nodes.settle()
    assert [nodes.located(name)[0] for name in NAMES] == [("abc"[number % 3],) for number in range(len(NAMES))]


def test_keys_of_an_owner_that_does_not_answer_are_bounded_and_delay_nobody(nodes: Nodes, faults: Faults, monkeypatch):
    monkeypatch.setattr("raykv.node.announcer.MAX_RETRIED_KEYS", 16)
    nodes.start("a", "b", "c")
    faults.silence(nodes.by_name["b"])
    many = [f"many-{number}" for number in range(500)]
    for start in range(0, 500, 100):
        nodes.put("a", many[start : start + 100])
    a = nodes.by_name["a"]
    others = [name for name in many if nodes.owner(name) != "b"]
    assert 100 < len(others) < 400
    wait_until(lambda: all(nodes.located(name)[0] == ("a",) for name in others))
    wait_until(lambda: a.stats()["errors"].get("announce", 0) > 0 and a.stats()["unannounced"] <= 16)
    faults.restore(nodes.by_name["b"])
    nodes.settle()


def test_a_node_that_was_out_of_the_view_announces_everything_again(nodes: Nodes, monkeypatch):
    """The other nodes drop the node's locations. The node itself never gets the view in which it is missing."""
    nodes.start("a", "b", "c")
    nodes.put("c", NAMES)
    nodes.settle()
    beat = nodes.membership.beat

    def without_c(heartbeat):
        if heartbeat.member.node_id == "c":
            raise PeerUnavailable("cut off")
        return beat(heartbeat)

    monkeypatch.setattr(nodes.membership, "beat", without_c)
    wait_until(lambda: all(nodes.by_name[name].view.member("c") is None for name in "ab"))
    monkeypatch.undo()
    wait_until(lambda: all(nodes.by_name[name].view.member("c") is not None for name in "ab"))
    nodes.settle()
    assert {nodes.located(name) for name in NAMES} == {(("c",), PAGE)}


def test_links_to_nodes_that_have_left_are_closed():
    with cluster(3, heartbeat_s=0.05) as running:
        put(running.client(SPACE, node=0), names(60), chained=False)
        running.settle()
        pool, gone = running.nodes[0]._pool, running.nodes[2].member.address
        wait_until(lambda: (gone, "") in pool._idle)
        running.nodes[2].stop(unlink=True)
        running.settle()
        assert (gone, "") not in pool._idle
        assert (running.nodes[1].member.address, "") in pool._idle
