"""While the owners of keys change, the old owners still answer for the chunks that the new owners do not know yet."""

import threading

import numpy as np
import pytest

from raykv.embedded import EmbeddedCluster
from raykv.node import announcer
from raykv.node.announcer import Announcer
from raykv.node.node import Node
from raykv.protocol.placement import View
from raykv.types import KeyArray
from tests.support.clients import remote_client
from tests.support.drains import drain
from tests.support.nodes import SPACE, cluster, get, names, put, wait_until


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second view on, nodes announce nothing to new owners."""
    adopt, patching = Announcer.adopt, threading.Lock()  # patches of two nodes at once would undo each other wrongly

    def adopt_in_silence(self: Announcer, view: View) -> None:
        if len(view.members) > 3 or any(not member.weight for member in view.members):
            with patching, monkeypatch.context() as patch:
                patch.setattr(Announcer, "announce", lambda self, keys: None)
                adopt(self, view)
        else:
            adopt(self, view)

    monkeypatch.setattr(Announcer, "adopt", adopt_in_silence)


def moved(running: EmbeddedCluster, old: View, keys: KeyArray) -> int:
    before, after = (np.array(view.ring.nodes)[view.ring.owners(keys)] for view in (old, running.membership.logic.view))
    return int((before != after).sum())


def test_reads_and_lookups_hit_before_the_new_owner_has_learnt_the_holders(silent):
    with cluster(3) as running, running.client(SPACE, node=1) as writer:
        put(writer, names(60))
        running.settle()
        old, keys = running.membership.logic.view, writer.keys(names(60))
        before = [running.client(SPACE, node=0), remote_client(running, 2)]
        for client in before:
            assert all(client.exists(names(60)))
        running.add()
        running.settle()
        assert moved(running, old, keys) > 5
        for client in before:
            assert all(get(client, names(60)))
            assert all(client.exists(names(60)))
            assert client.match(names(60)).count == 60
            assert get(client, ["absent"]) == (False,)
            client.close()


def test_old_owners_forget_keys_after_a_while(monkeypatch):
    monkeypatch.setattr(announcer, "LEARN_S", 0.2)
    with cluster(3) as running, running.client(SPACE, node=1) as writer:
        put(writer, names(60))
        running.settle()
        running.add()
        running.settle()
        view, keys = running.nodes[0].view, writer.keys(names(60))

        def knows_its_own(node: Node) -> bool:
            mine = view.ring.owners(keys) == view.ring.nodes.index(node.config.node_id)
            return [bool(each.holders) for each in node.location_index.locate(keys)] == mine.tolist()

        wait_until(lambda: all(map(knows_its_own, running.nodes)))


def test_a_node_that_drains_still_answers_for_keys_that_it_owned(silent):
    with cluster(3) as running, running.client(SPACE, node=1) as writer:
        put(writer, names(60))
        running.settle()
        old, client = running.membership.logic.view, running.client(SPACE, node=0)
        assert all(client.exists(names(60)))
        drain(running, 2)
        wait_until(lambda: all(node.view.member("node-2").weight == 0 for node in running.nodes))
        assert moved(running, old, writer.keys(names(60))) > 5
        assert all(get(client, names(60)))


def test_an_owner_that_owns_keys_again_does_not_trust_what_it_knew_before():
    """A chunk that leaves its holder in between is not located there, although the first owner knew it there."""
    with cluster(3) as running, running.client(SPACE, node=1) as writer:
        put(writer, names(60))
        running.settle()
        running.add()
        running.settle()
        assert writer.delete(names(60)) == 60
        running.settle()
        running.nodes[3].stop(unlink=True)
        running.settle()
        with running.client(SPACE, node=0) as client:
            assert not client.exists(names(60)).any()
