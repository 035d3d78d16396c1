"""A client that takes all it can get: what one connection may hold and open is bounded, and other clients go on."""

import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.errors import CapacityError, ConfigError, UsageError
from raykv.membership.namespace_registry import NamespaceRegistry
from raykv.memory.layout import MAX_NAMESPACES
from raykv.node import sessions
from raykv.protocol import messages
from raykv.transport.link import Link
from raykv.transport.server import MAX_LOG_LINES
from tests.support.nodes import (
    SPACE,
    Peer,
    cluster,
    get,
    keys_of,
    names,
    put,
    running_node,
    wait_until,
)

PAGE = 4096
ARENA = {"arena_nbytes": "4 MiB", "extent_nbytes": "64 KiB", "max_chunks": 4096}
MOST = (4 << 20) // PAGE // sessions.LEASE_SHARE


@pytest.fixture
def node():
    with running_node(storage=ARENA) as made:
        yield made
        assert made.failure is None


def store(node, chunks: list[str]) -> None:
    """Store chunks, and close the connection."""
    with closing(Peer(node).open()) as peer:
        for first in range(0, len(chunks), 100):
            peer.commit(peer.filled(chunks[first : first + 100], PAGE))


def rows(raw: bytes) -> int:
    return len(raw) // 4


def test_one_connection_gets_at_most_its_share_of_the_slots(node):
    with closing(Peer(node).open()) as hog, closing(Peer(node).open()) as other:
        taken = sum(rows(hog.lend(1000, PAGE).rows) for _ in range(5))
        assert taken == MOST
        assert node.store.lent_nbytes == MOST * PAGE
        assert rows(other.lend(100, PAGE).rows) == 100
        assert rows(hog.lend(1, PAGE).rows) == 0
        some = np.array(list(hog.session.lent)[:10], np.int32)
        hog.ask(messages.GiveBack(some.tobytes()))
        assert rows(hog.lend(1000, PAGE).rows) == 10


def test_slots_in_advance_count_too(node):
    with closing(Peer(node).open()) as hog:
        for _ in range(20):
            hog.lend(0, PAGE, ahead=1000)
            hog.commit(hog.filled(names(1), PAGE, ahead=1000))
            assert len(hog.session.lent) <= MOST


def test_a_writer_that_commits_is_not_limited(node):
    with closing(Peer(node).open()) as writer:
        for number in range(30):
            assert rows(writer.filled(names(100, str(number)), PAGE).rows) == 100
            lent = np.array(list(writer.session.lent), np.int32)
            writer.ask(messages.GiveBack(lent.tobytes()))
        assert not writer.session.lent


def test_a_single_slot_may_be_larger_than_the_share():
    storage = {"arena_nbytes": "128 KiB", "extent_nbytes": "128 KiB"}
    with running_node(storage=storage) as node, closing(Peer(node).open()) as peer:
        assert rows(peer.lend(1, 128 << 10).rows) == 1
        assert rows(peer.lend(1, PAGE).rows) == 0


def test_one_connection_pins_at_most_its_share_and_the_rest_stays_evictable(node):
    chunks = names(900)
    store(node, chunks)
    with closing(Peer(node).open()) as hog, closing(Peer(node).open()) as other:
        for first in range(0, 500, 100):
            hog.ask(messages.Pin(keys_of(chunks[first : first + 100])))
        with pytest.raises(CapacityError, match="unpin"):
            hog.ask(messages.Pin(keys_of(chunks[500:600])))
        assert np.count_nonzero(node.store.table.columns.pins) == 500
        assert len(other.filled(names(400, "new"), PAGE).rows) // 4 == 400
        held = np.array(list(hog.session.pins), np.int32)
        hog.ask(messages.Unpin(held.tobytes()))
        hog.ask(messages.Pin(keys_of(chunks[100:110])))
    assert not node.store.table.columns.pins.any()
    assert node.store.lent_nbytes == 0


def test_a_connection_that_holds_leases_and_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(sessions, "LEASE_IDLE_S", 1.0)
    with running_node(io_timeout_s=0.1) as node, raykv.connect(SPACE, address=node.config.local_address) as client:
        store = node.store
        put(client, ["a"])
        assert store.lent_nbytes > 0, "the client's pool"
        wait_until(lambda: store.lent_nbytes == 0)
        pins = client.pin(["a"])
        assert pins.valid()
        wait_until(lambda: not store.table.columns.pins.any())
        assert put(client, ["b"]).stored == 1, "the client connects again"
        assert get(client, ["a", "b"]) == (True, True)


def test_a_connection_without_leases_may_be_silent(monkeypatch):
    monkeypatch.setattr(sessions, "LEASE_IDLE_S", 0.0)
    with running_node(io_timeout_s=0.05) as node:
        link = Link.connect(node.config.local_address, b"", deadline_s=time.monotonic() + 5.0)
        with closing(link):
            for _ in range(2):
                link.call(messages.GetView(), deadline_s=time.monotonic() + 5.0)
                time.sleep(0.3)


def test_one_connection_opens_a_bounded_number_of_groups(node):
    with closing(Peer(node)) as hog, closing(Peer(node)) as other:
        for number in range(sessions.MAX_OPENED):
            hog.open(raykv.Namespace(model=f"m{number}"))
        with pytest.raises(UsageError, match="further connections"):
            hog.open(raykv.Namespace(model="one more"))
        hog.open(raykv.Namespace(model="m0"))
        other.open(raykv.Namespace(model="one more"))


def test_numbers_of_groups_without_chunks_are_used_again(node):
    store(node, ["a"])
    listed = raykv.Namespace(model="configured")
    with closing(Peer(node)) as peer:
        peer.ask(messages.Configure(listed.model_dump_json().encode(), fields=b'{"priority": 3}'))
    for first in range(0, 3 * MAX_NAMESPACES, sessions.MAX_OPENED):
        with closing(Peer(node)) as hog:
            for number in range(first, first + sessions.MAX_OPENED):
                hog.open(raykv.Namespace(model=f"m{number}"))
    assert node.store.groups.find(SPACE.group.digest) is not None, "it has a chunk"
    assert node.store.groups.find(listed.group.digest) is not None, "it has a config"
    with closing(Peer(node).open()) as peer:
        assert rows(peer.ask(messages.Pin(keys_of(["a"]))).rows) == 1


def test_on_a_node_with_tiers_only_dropped_groups_lose_their_numbers(node, monkeypatch):
    node.store.groups.has_tiers = True
    monkeypatch.setattr(sessions, "MAX_OPENED", MAX_NAMESPACES + 1)
    with closing(Peer(node)) as hog:
        for number in range(MAX_NAMESPACES):
            hog.open(raykv.Namespace(model=f"m{number}"))
        with pytest.raises(CapacityError, match="drop one"):
            hog.open(raykv.Namespace(model="one more"))


# -- a policy is code -------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path, monkeypatch) -> str:
    """A module that writes a file when it is imported. Returns the name of the policy in it."""
    lines = [f"open({str(tmp_path / 'imported')!r}, 'w').close()", "def score(columns, rows, now):"]
    (tmp_path / "hostile_policy.py").write_text("\n".join([*lines, "    return columns.page[rows]", ""]))
    monkeypatch.syspath_prepend(tmp_path)
    yield "hostile_policy:score"
    sys.modules.pop("hostile_policy", None)


def test_a_client_cannot_make_the_nodes_import_a_module(outside, tmp_path):
    with cluster(2) as running, running.client(SPACE) as client:
        for name in (outside, "os:system"):
            with pytest.raises(ConfigError, match="'policies'"):
                client.configure(policy=name)
        put(client, ["a"])
    assert not (tmp_path / "imported").exists()


def test_nor_by_a_forged_list_of_namespaces(outside, tmp_path, caplog):
    with running_node(storage=ARENA) as node, closing(Peer(node).open()) as peer:
        registry = NamespaceRegistry()
        registry.configure(SPACE.group, {"policy": outside, "priority": 3}, now_ns=1 << 60)
        peer.ask(messages.Adopt(registry.encode()))
        assert node.reconciler.registry.config(SPACE.group.digest).priority == 3
        assert peer.ask(messages.Pin(keys_of(["a"]))).rows, "the node goes on"
    assert not (tmp_path / "imported").exists()
    assert "not allowed" in caplog.text


def test_forged_lists_do_not_fill_the_log(outside, caplog):
    with running_node(storage=ARENA) as node, closing(Peer(node).open()) as peer:
        caplog.clear()
        for number in range(100):
            registry = NamespaceRegistry()
            registry.configure(SPACE.with_fields(model=f"{number:01000}"), {"policy": outside}, now_ns=1 << 60)
            peer.ask(messages.Adopt(registry.encode()))
    assert 1 <= len(caplog.records) <= MAX_LOG_LINES
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_a_policy_that_the_operator_allows_is_used(outside, tmp_path):
    with cluster(2, policies=[outside]) as running, running.client(SPACE) as client:
        put(client, ["a"])
        assert client.configure(policy=outside) == 2
        number = running.nodes[0].store.groups.number(SPACE.group.digest)
        assert running.nodes[0].store.evictor.policies.name(number) == outside
    assert (tmp_path / "imported").exists()
