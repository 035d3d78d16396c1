"""A node's copy of the list of namespaces: its file, the group numbers, and damaged or wrong messages."""

import os
import random
from pathlib import Path

import pytest

import raykv
from raykv.errors import LostError, ProtocolError, UsageError
from raykv.membership.namespace_registry import MAX_ENTRIES, NamespaceRegistry
from raykv.memory.layout import MAX_NAMESPACES
from raykv.node import sessions
from raykv.node.namespace_reconciler import registry_paths
from raykv.protocol import messages
from raykv.protocol.namespace import Namespace
from raykv.tier.registry import register_tier
from tests.support.nodes import Peer, make_node, running_node
from tests.support.toy_tier import ToyTier

MINE = raykv.Namespace(model="mine")


def json_of(namespace: Namespace) -> bytes:
    return namespace.model_dump_json(exclude_defaults=True).encode()


def registry(**fields) -> bytes:
    made = NamespaceRegistry()
    made.configure(MINE, fields, now_ns=1)
    return made.encode()


GOOD = registry(ttl_s=500.0, policy="fifo")


def damaged(rng: random.Random) -> bytes:
    """Random bytes, or a good list in which a few bytes are replaced, missing or repeated."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(200))
    raw = bytearray(GOOD)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(raw))
        match rng.randrange(3):
            case 0:
                raw[place] = rng.randrange(256)
            case 1:
                del raw[place]
            case 2:
                raw[place:place] = raw[max(0, place - 5) : place]
    return bytes(raw)


SPECIAL = [
    b"",
    b"{",
    b"\xff" * 50,
    b'{"version": 1, "entries": [], "x": "\xff"}',
    GOOD.replace(b"mine", b"mi\xffe"),
    GOOD.replace(b'"changed_ns":1', b'"changed_ns":' + b"9" * 40),
    b'{"version": 1e400, "entries": []}',
    b'{"version": ' + b"9" * 30 + b', "entries": []}',
    b'{"version": 1, "entries": [{"namespace": ' + b'{"extra":' * 50_000,
    b"\0" * 100,
]


def test_a_node_starts_with_any_content_of_the_file(shm_dir: Path, rng: random.Random):
    made = make_node(storage={"shm_dir": shm_dir})
    (path,) = registry_paths(made.config)
    made.store.close()
    for content in [*SPECIAL, *(damaged(rng) for _ in range(60))]:
        path.write_bytes(content)
        node = make_node(storage={"shm_dir": shm_dir})
        node.reconciler.registry.encode()
        node.reconciler.adopt(registry(ttl_s=7.0))
        node.store.close()
    path.write_bytes(GOOD)
    node = make_node(storage={"shm_dir": shm_dir})
    assert node.reconciler.registry.config(MINE.digest).ttl_s == 500.0
    node.store.close()


def test_the_file_is_no_link_no_pipe_and_no_directory(shm_dir: Path, tmp_path: Path, caplog):
    made = make_node(storage={"shm_dir": shm_dir})
    (path,) = registry_paths(made.config)
    fresh = path.with_name(path.name + ".new")
    made.store.close()
    theirs = tmp_path / "not-ours"
    theirs.write_bytes(GOOD)
    for prepare in (lambda: path.symlink_to(theirs), lambda: os.mkfifo(path), path.mkdir):
        prepare()
        node = make_node(storage={"shm_dir": shm_dir})
        assert not node.reconciler.registry.entries
        assert "no list of namespaces" in caplog.text
        caplog.clear()
        node.store.close()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    fresh.symlink_to(theirs)
    path.symlink_to(theirs)
    node = make_node(storage={"shm_dir": shm_dir})
    node.reconciler.adopt(registry(ttl_s=7.0))
    assert theirs.read_bytes() == GOOD, "written through a link"
    assert not path.is_symlink()
    assert NamespaceRegistry.decode(path.read_bytes()).config(MINE.digest).ttl_s == 7.0
    assert path.stat().st_mode & 0o777 == 0o600
    node.store.close()


def test_a_place_that_cannot_be_written_does_no_harm(shm_dir: Path, caplog):
    node = make_node(storage={"shm_dir": shm_dir})
    (path,) = registry_paths(node.config)
    path.with_name(path.name + ".new").mkdir()
    node.reconciler.adopt(registry(ttl_s=7.0))
    assert "cannot be written" in caplog.text
    assert node.reconciler.registry.config(MINE.digest).ttl_s == 7.0
    node.store.close()


@pytest.mark.parametrize(
    "request_",
    [
        messages.OpenNamespace(b'{"model": "\xff"}'),
        messages.OpenNamespace(b"\xff\xfe"),
        messages.Configure(b'{"model": "\xff"}', b"{}"),
        messages.Configure(b'{"model": "m"}', b'{"policy": "\xff"}'),
        messages.Configure(b"{", b"{}"),
        messages.Configure(b'{"model": "m"}', b"[]"),
        messages.Configure(b'{"color": 1}', None),
        messages.Configure(b'{"model": "m"}', b'{"policy": 5}'),
        messages.Adopt(b"garbage"),
        messages.Adopt(b'{"version": 1, "entries": [{}]}'),
        messages.Adopt(b"\xff"),
        messages.Hint(b"k" * 16, ttl_s=float("nan")),
        messages.Hint(b"k" * 16, priority=1000),
        messages.Hint(b"k" * 16, retain=(-1.0, 5)),
        messages.Hint(b"k" * 16, retain=(1.0, 1000)),
        messages.Hint(b"k" * 15),
        messages.Why(b"k" * 15),
        messages.Announce("n", added=b"k" * 16),
    ],
)
def test_a_wrong_message_is_refused_and_changes_nothing(request_, caplog):
    with running_node() as node:
        peer = Peer(node)
        peer.ask(messages.FetchTrace(True))
        with pytest.raises(UsageError):
            peer.ask(request_)
        assert node.reconciler.list() == {}
        assert not node.reconciler.registry.entries
        assert "bug" not in caplog.text


def test_counts_of_requests_and_bytes_by_quota_group():
    with running_node() as node:
        peer, digest = Peer(node), MINE.group.digest
        peer.ask(messages.OpenNamespace(json_of(MINE)))
        lent = peer.ask(messages.Lend(5000, 1, group=digest))
        peer.ask(messages.Commit((messages.Run(b"k" * 16, 5000, lent.rows, bytes(8)),), group=digest))
        peer.ask(messages.Read(b"k" * 16, group=digest))
        peer.ask(messages.Read(b"k" * 16, group=digest))
        peer.ask(messages.Read(b"k" * 16))
        peer.ask(messages.Read(b"k" * 16, group=b"unknown"))
        (listed,) = node.reconciler.list().values()
        assert (listed["requests"], listed["served_nbytes"]) == (4, 10_000)


def test_impossible_reports_are_refused():
    with running_node() as node:
        peer, digest = Peer(node), MINE.group.digest
        peer.ask(messages.OpenNamespace(json_of(MINE)))
        peer.ask(messages.Report({"x": 1}, group=b"nobody"))
        for counts in (({"y": -1},), ({"z": 1 << 60},), ({"x" * 33: 5},), ({}, (-3,)), ({}, (), (1 << 60,))):
            with pytest.raises(ProtocolError):
                peer.ask(messages.Report(*counts, group=digest))
        peer.ask(messages.Report({"x" * 32: 5}, (3,), group=digest))
        (listed,) = node.reconciler.list().values()
        assert listed["misses"] == {"x" * 32: 5}


def test_numbers_of_dropped_namespaces_are_used_again(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_OPENED", 2000)
    with running_node() as node:
        node.store.groups.has_tiers = True  # so that only dropped namespaces give up their numbers
        peer = Peer(node)
        for number in range(1024):
            peer.ask(messages.OpenNamespace(json_of(Namespace(model=f"m{number}"))))
        with pytest.raises(raykv.CapacityError, match="drop one"):
            peer.ask(messages.OpenNamespace(json_of(MINE)))
        with pytest.raises(LostError):
            peer.ask(messages.Lend(5000, 1, group=MINE.group.digest))
        peer.ask(messages.Configure(json_of(Namespace(model="m7")), None))
        peer.ask(messages.OpenNamespace(json_of(MINE)))
        assert peer.ask(messages.Lend(5000, 1, group=MINE.group.digest)).rows


def test_a_node_remembers_a_bounded_number_of_drops():
    node = make_node()
    for first in range(0, 3 * MAX_ENTRIES, MAX_ENTRIES):
        made = NamespaceRegistry()
        for number in range(first, first + MAX_ENTRIES):
            made.drop(Namespace(model=f"m{number}"), now_ns=number + 1)
        node.reconciler.adopt(made.encode())
    assert len(node.reconciler._dropped) <= MAX_ENTRIES
    node.store.close()


def test_a_namespace_that_a_node_cannot_name_does_not_stop_its_drop_elsewhere(caplog):
    register_tier("toy", ToyTier)
    node = make_node(storage={"tiers": {"toy": {}}})
    for number in range(MAX_NAMESPACES):
        node.store.groups.open(Namespace(model=f"m{number}"))
    made, last = NamespaceRegistry(), Namespace(model="one more")
    made.drop(last, now_ns=5)
    node.reconciler.adopt(made.encode())
    assert node.reconciler.dropped_chunks(last.digest) == 0
    assert "one more cannot be dropped: all 1024 namespaces" in caplog.text
    node.mover.close()
    node.store.close()
