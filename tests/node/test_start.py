"""A node of any size answers at once, because it populates and reads little memory before its first answer."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

from raykv.config import ClusterConfig, NodeConfig, StorageConfig
from raykv.embedded import InProcessMembership
from raykv.errors import ConfigError, PeerUnavailable
from raykv.memory import arena
from raykv.memory.arena import sized_by_share
from raykv.node import node as node_module
from raykv.node import reclaimer
from raykv.node.node import Node
from raykv.node.reclaimer import QUIET_S
from raykv.protocol import messages
from raykv.protocol.messages import Heartbeat, HeartbeatAnswer
from raykv.transport.link import Link
from tests.support.nodes import SPACE, Peer, keys_of, wait_until

MIB, GIB = 1 << 20, 1 << 30
FIRST_ANSWER_NBYTES = 160 * MIB
"""Limit for the memory that a node with a table of 10 million rows takes before its first answer. By then, the arena
has no memory. Of the table's 850 MiB, mainly the index in use has memory (76 MiB)."""


@pytest.mark.parametrize(("rows", "most_nbytes"), [(16 * GIB >> 16, 32 * MIB), (10_000_000, FIRST_ANSWER_NBYTES)])
def test_little_memory_is_taken_before_the_first_answer(shm_dir, monkeypatch, rows, most_nbytes):
    monkeypatch.setattr(arena, "free_nbytes", lambda _: 1 << 50)  # pretend that the host has enough free memory
    storage = StorageConfig(arena_nbytes=16 * GIB, max_chunks=rows, shm_dir=shm_dir)
    config = NodeConfig(node_id="n", storage=storage)
    node = Node(config, secret=b"s" * 32, membership=InProcessMembership(member_timeout_s=5.0))
    taken = sum(os.stat(path).st_blocks for path in shm_dir.iterdir()) * 512
    assert taken <= most_nbytes
    node.start()
    try:
        deadline_s = time.monotonic() + 10.0
        link = Link.connect(node.member.local_address, b"", deadline_s=deadline_s)
        assert link.call(messages.Read(bytes(16)), deadline_s=deadline_s).nbytes == bytes(4)
        link.close()
    finally:
        node.stop(unlink=True)


def test_the_memory_of_a_start_does_not_depend_on_the_arena(shm_dir):
    taken = []
    for size in ("64 MiB", "4 GiB"):
        storage = StorageConfig.load({"arena_nbytes": size, "max_chunks": 1024, "shm_dir": shm_dir})
        node = Node(
            NodeConfig(node_id="n", storage=storage), secret=b"", membership=InProcessMembership(member_timeout_s=5.0)
        )
        taken.append(sum(os.stat(path).st_blocks for path in shm_dir.iterdir()))
        node.start()
        node.stop(unlink=True)
    assert taken[0] == taken[1]


def test_a_node_tells_what_pages_it_has(shm_dir):
    storage = StorageConfig(arena_nbytes=64 * MIB, shm_dir=shm_dir)
    node = Node(
        NodeConfig(node_id="n", storage=storage), secret=b"", membership=InProcessMembership(member_timeout_s=5.0)
    )
    node.start()
    try:
        assert 0 <= node.stats()["huge_nbytes"] <= 64 * MIB
    finally:
        node.stop(unlink=True)


def test_an_arena_may_be_a_share_of_its_directory(shm_dir, tmp_path):
    stat = os.statvfs(shm_dir)
    config = StorageConfig(arena_nbytes="1 MiB", extent_nbytes="1 MiB", shm_dir=shm_dir, policy="fifo")
    found = sized_by_share(config, 0.5)
    assert 0 <= stat.f_blocks * stat.f_frsize // 2 - found.arena_nbytes < MIB
    assert (found.policy, found.extents) == ("fifo", found.arena_nbytes // MIB)
    for changes, share in (({"shm_dir": None}, 0.5), ({"shm_dir": tmp_path / "missing"}, 0.5), ({}, 1e-12)):
        with pytest.raises(ConfigError, match="arena_share"):
            sized_by_share(config.model_copy(update=changes), share)
    with pytest.raises(ConfigError, match="arena_share"):
        ClusterConfig.load({"arena_share": 1.5})


@pytest.fixture
def young(shm_dir):
    """A node that has just started, with an arena of 256 MiB in extents of 8 MiB."""
    storage = StorageConfig(arena_nbytes=256 * MIB, extent_nbytes=8 * MIB, shm_dir=shm_dir)
    config = NodeConfig(node_id="n", storage=storage, heartbeat_s=0.05)
    node = Node(config, secret=b"", membership=InProcessMembership(member_timeout_s=5.0))
    yield node
    node.stop(unlink=True)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [True, False])
def test_an_idle_node_takes_the_memory_of_its_whole_arena_if_the_host_can_spare_it(young, monkeypatch, spare):
    monkeypatch.setattr(reclaimer, "has_to_spare", lambda directory: spare)
    young.start()
    wait_for_memory(young, 256 * MIB if spare else 32 * MIB)
    time.sleep(5 * QUIET_S)
    assert taken_nbytes(young) == (256 * MIB if spare else 32 * MIB)


@pytest.mark.slow
def test_while_chunks_are_written_no_more_memory_is_taken_than_the_next_ones_need(young, monkeypatch):
    monkeypatch.setattr(reclaimer, "has_to_spare", lambda directory: True)
    monkeypatch.setattr(reclaimer, "QUIET_S", 0.5)
    written = iter(range(1 << 30))
    monkeypatch.setattr(type(young.store), "written", property(lambda store: next(written)))
    young.start()
    wait_for_memory(young, 32 * MIB)
    time.sleep(1.0)
    assert taken_nbytes(young) == 32 * MIB
    monkeypatch.undo()
    monkeypatch.setattr(reclaimer, "has_to_spare", lambda directory: True)
    wait_for_memory(young, 256 * MIB)


def wait_for_memory(node: Node, nbytes: int) -> None:
    until_s = time.monotonic() + 20.0
    while taken_nbytes(node) < nbytes:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def taken_nbytes(node: Node) -> int:
    """Bytes of the arena that are backed by memory."""
    return os.stat(node.store.arena.path).st_blocks * 512


class Held(InProcessMembership):
    """A directory that calls `meanwhile` while it has a heartbeat in hand."""

    def __init__(self) -> None:
        super().__init__(member_timeout_s=60.0)
        self.meanwhile: Callable[[Heartbeat], object] = lambda heartbeat: None

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        self.meanwhile(heartbeat)
        return super().beat(heartbeat)


def read(address: str, name: str, timeout_s: float) -> bytes:
    """Return the length of a chunk at a node, as an encoded number."""
    deadline_s = time.monotonic() + timeout_s
    with closing(Link.connect(address, b"s", deadline_s=deadline_s)) as link:
        return link.call(messages.Read(keys_of([name])), deadline_s=deadline_s).nbytes


def test_a_node_that_was_away_serves_nothing_that_was_dropped_meanwhile(shm_dir):
    """Its memory still has the chunk. It must not serve it before its first heartbeat, which brings the drop."""
    directory = Held()
    config = NodeConfig(node_id="n", storage=StorageConfig(arena_nbytes=32 * MIB, shm_dir=shm_dir))
    node = Node(config, secret=b"s", membership=directory)
    node.start()
    peer = Peer(node).open()
    peer.commit(peer.filled(["old"], 4096))
    peer.close()
    assert read(node.member.address, "old", 5.0) != bytes(4)
    node.stop()
    directory.configure(messages.Configure(SPACE.group.model_dump_json().encode(), None))

    answers = []

    def try_to_read(heartbeat: Heartbeat) -> None:
        directory.meanwhile = lambda heartbeat: None
        with suppress(PeerUnavailable):
            answers.append(read(heartbeat.member.address, "old", 0.1))

    directory.meanwhile = try_to_read
    node = Node(config, secret=b"s", membership=directory)
    node.start()
    try:
        assert answers == []
        assert read(node.member.address, "old", 5.0) == bytes(4)
    finally:
        node.stop(unlink=True)


def test_a_node_serves_although_the_directory_hangs(shm_dir):
    directory, end = Held(), threading.Event()
    directory.meanwhile = lambda heartbeat: end.wait(20.0)
    config = NodeConfig(node_id="n", storage=StorageConfig(arena_nbytes=32 * MIB, shm_dir=shm_dir))
    node = Node(config, secret=b"s", membership=directory)
    try:
        node.start()
        assert not end.is_set()
        assert read(node.member.address, "none", 5.0) == bytes(4)
        assert not directory.logic.view.members
        end.set()
        wait_until(lambda: directory.logic.view.members)
    finally:
        end.set()
        node.stop(unlink=True)


def test_a_restarted_node_answers_before_it_starts_its_other_threads(shm_dir, monkeypatch):
    monkeypatch.setattr(node_module, "FIRST_REQUESTS_S", 600.0)
    storage = StorageConfig.load({"arena_nbytes": "4 MiB", "extent_nbytes": "64 KiB", "shm_dir": shm_dir})
    config = NodeConfig(node_id="n", storage=storage)

    def started() -> Node:
        made = Node(config, secret=b"", membership=InProcessMembership(member_timeout_s=5.0))
        made.start()
        return made

    def threads(name: str) -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == name]

    node = started()
    wait_until(lambda: threads("raykv-reclaimer"))  # nothing can be read from a new node, so it waits for nothing
    peer = Peer(node).open()
    peer.commit(peer.filled(["a chunk"], 4096))
    peer.close()
    node.stop()
    assert not threads("raykv-reclaimer")
    node = started()
    try:
        assert node.store.recovered == 1
        assert Peer(node).ask(messages.Read(keys_of(["a chunk"]))).nbytes != bytes(4)
        assert not threads("raykv-reclaimer")
    finally:
        node.stop(unlink=True)
    assert not threads("raykv-starter"), "it does not wait any longer"
