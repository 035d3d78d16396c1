"""While the directory is away, a restarted node knows the other nodes. When all restart, epochs do not go backwards."""

import os
import random
import time
from pathlib import Path

import msgspec
import pytest

import raykv
from raykv.config import NodeConfig
from raykv.embedded import InProcessMembership
from raykv.errors import PeerUnavailable
from raykv.node.node import Node
from raykv.node.saved_view import SavedView
from raykv.protocol.messages import Configure, Heartbeat, HeartbeatAnswer
from raykv.protocol.placement import View
from raykv.supervisor.handle import NodeHandle
from raykv.types import NodeId
from tests.storage.test_planted_files import NOBODY, as_root
from tests.support.nodes import SECRET, SPACE, get, names, put, wait_until
from tests.support.protocol import VIEW

HOSTS = 3


class Directory:
    """A directory that can be away, and that has lost everything when it is back."""

    def __init__(self) -> None:
        self.membership: InProcessMembership | None = None
        self.restart()

    def restart(self) -> None:
        self.membership = InProcessMembership(member_timeout_s=60.0)

    def end(self) -> None:
        self.membership = None

    @property
    def view(self) -> View:
        return self._now().logic.view

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        return self._now().beat(heartbeat)

    def configure(self, change: Configure) -> bytes:
        return self._now().configure(change)

    def leave(self, node_id: NodeId) -> None:
        self._now().leave(node_id)

    def _now(self) -> InProcessMembership:
        if self.membership is None:
            raise PeerUnavailable("the directory is away")
        return self.membership


def config(shm_dir: Path, number: int, heartbeat_s: float = 0.05) -> NodeConfig:
    storage = {"arena_nbytes": 8 << 20, "extent_nbytes": 1 << 20, "shm_dir": str(shm_dir)}
    fields = {"node_id": f"n{number}", "cluster": "p", "host": f"host-{number}", "storage": storage}
    return NodeConfig.load({**fields, "heartbeat_s": heartbeat_s})


def connect(config: NodeConfig) -> raykv.Client:
    return raykv.connect(SPACE, address=config.local_address, breaker_s=0.05)


class Hosts:
    """Supervised nodes on separate hosts."""

    def __init__(self, shm_dir: Path) -> None:
        self.directory, self.clients = Directory(), list[raykv.Client]()
        secret = bytes.fromhex(SECRET)
        self.configs = [config(shm_dir, number) for number in range(HOSTS)]
        self.nodes = [NodeHandle(each, secret=secret, membership=self.directory) for each in self.configs]
        self.settle()

    def settle(self) -> None:
        wait_until(lambda: all(self.stats(n)["epoch"] == self.directory.view.epoch for n in range(HOSTS)))
        wait_until(lambda: not any(self.stats(number)["unannounced"] for number in range(HOSTS)))

    def connect(self) -> list[raykv.Client]:
        """Connect a client on each host. Earlier clients are closed."""
        for client in self.clients:
            client.close()
        self.clients = [connect(each) for each in self.configs]
        return self.clients

    def stats(self, number: int) -> dict:
        return self.nodes[number].stats()

    def kill(self, number: int) -> None:
        starts, pid = self.nodes[number].starts, self.nodes[number].pid
        os.kill(pid, 9)
        wait_until(lambda: self.nodes[number].starts > starts)


@pytest.fixture
def hosts(shm_dir):
    made = Hosts(shm_dir)
    yield made
    for client in made.clients:
        client.close()
    made.directory.end()
    for node in made.nodes:
        node.stop(unlink=True)
    assert not list(shm_dir.iterdir()), "files stay behind"


def found(client: raykv.Client, keys: list[str]) -> bool:
    return all(get(client, keys))


def test_without_the_directory_restarted_nodes_find_others_and_are_found(hosts):
    """Two of three nodes are killed, one after the other. Each has lost the locations of the keys that it owns."""
    keys = [names(30, f"host-{number}") for number in range(HOSTS)]
    clients = hosts.connect()
    for client, mine in zip(clients, keys, strict=True):
        assert put(client, mine, chained=False).stored == 30
    hosts.settle()
    hosts.directory.end()
    epoch = hosts.stats(0)["epoch"]
    for number in range(2):
        hosts.kill(number)
    clients = hosts.connect()
    for client in clients:
        for theirs in keys:
            wait_until(lambda client=client, theirs=theirs: found(client, theirs))
    new = [names(30, f"new-{number}") for number in range(HOSTS)]
    for client, mine in zip(clients, new, strict=True):
        assert put(client, mine, chained=False).stored == 30
    for client in clients:
        for theirs in new:
            wait_until(lambda client=client, theirs=theirs: found(client, theirs))
    assert {hosts.stats(number)["epoch"] for number in range(HOSTS)} == {epoch}
    hosts.directory.restart()
    wait_until(lambda: hosts.directory.view.epoch >= epoch)
    hosts.settle()
    incarnations = {known.node_id: known.incarnation for known in hosts.directory.view.members}
    assert incarnations == {f"n{number}": hosts.stats(number)["incarnation"] for number in range(HOSTS)}


def test_after_a_restart_of_all_nodes_and_the_directory_a_client_that_stayed_follows(shm_dir):
    """All nodes get new addresses. The client's view has a greater epoch than a directory that starts from nothing."""
    directory = Directory()

    def started() -> list[Node]:
        nodes = [Node(config(shm_dir, number), secret=b"s" * 32, membership=directory) for number in range(HOSTS)]
        for node in nodes:
            node.start()
        wait_until(lambda: all(node.view.epoch == directory.view.epoch and node.announced for node in nodes))
        return nodes

    nodes = started()
    for _ in range(5):  # epochs grow with time
        nodes[1].stop(leave=True)
        nodes[1] = Node(config(shm_dir, 1), secret=b"s" * 32, membership=directory)
        nodes[1].start()
    wait_until(lambda: all(node.view.epoch == directory.view.epoch for node in nodes))
    with connect(nodes[0].config) as client:
        epoch = client.view().epoch
        assert epoch > 2 * HOSTS
        for node in nodes:
            node.stop(leave=False)
        directory.restart()
        nodes = started()
        assert directory.view.epoch > epoch
        with connect(nodes[2].config) as writer:
            assert put(writer, names(30), chained=False).stored == 30
            wait_until(lambda: all(node.announced for node in nodes))
            wait_until(lambda: found(client, names(30)))
        assert client.view() == directory.view
    for node in nodes:
        node.stop(unlink=True)


@pytest.mark.parametrize("known", [True, False], ids=["with views", "without views"])
def test_a_directory_that_starts_from_nothing_has_the_full_view_within_three_seconds(shm_dir, known):
    """Ten nodes send heartbeats of one second. One heartbeat brings the whole view, unless no node has one."""
    directory = Directory()
    if not known:
        directory.end()
    nodes = [Node(config(shm_dir, n, heartbeat_s=1.0), secret=b"", membership=directory) for n in range(10)]
    for node in nodes:
        node.start()
    if known:
        wait_until(lambda: all(node.view.epoch == directory.view.epoch for node in nodes))
    directory.restart()
    began_s = time.monotonic()
    wait_until(lambda: len(directory.view.members) == len(nodes), 3.0)
    print(f"the view was whole after {time.monotonic() - began_s:.2f} s")
    for node in nodes:
        node.stop(unlink=True)


GOOD = msgspec.json.encode(VIEW)
BAD = [
    b"",
    b"{}x",
    b"[1, 2]",
    b"\0" * 100,
    b'{"epoch": -1}',
    b'{"epoch": 4294967296}',
    b'{"epoch": 1e400}',
    b'{"epoch": 1, "members": ' + b"[" * 100_000,
    GOOD.replace(b'"incarnation":7', b'"incarnation":-7'),
    GOOD.replace(b'"incarnation":7', b'"incarnation":' + b"9" * 30),
    GOOD.replace(b'"weight":1.5', b'"weight":-1.5'),
    GOOD.replace(b'"b"', b'"a"'),
]


def test_a_file_with_other_content_is_ignored(shm_dir, caplog, rng: random.Random):
    saved, path = SavedView(shm_dir / "n"), shm_dir / "n.view"
    assert saved.load() == View()
    saved.save(VIEW)
    assert saved.load() == VIEW
    assert path.stat().st_mode & 0o777 == 0o600
    for content in BAD:
        caplog.clear()
        path.write_bytes(content)
        assert saved.load() == View()
        assert "no view in" in caplog.text
    for _ in range(300):
        content = bytearray(GOOD)
        content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        assert len(saved.load().ring.nodes) in (0, 2)
    path.write_bytes(GOOD[: len(GOOD) // 2])
    assert saved.load() == View()


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda path: path.chmod(0o666), id="others may write"),
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), id="of another user", marks=as_root),
        pytest.param(lambda path: path.rename(path.with_name("real")) and path.symlink_to("real"), id="a link"),
        pytest.param(lambda path: path.unlink() or os.mkfifo(path), id="a pipe"),
    ],
)
def test_a_planted_file_is_never_read_and_is_replaced(shm_dir, caplog, plant):
    saved, path = SavedView(shm_dir / "n"), shm_dir / "n.view"
    saved.save(VIEW)
    plant(path)
    assert saved.load() == View()
    assert "no view in" in caplog.text
    saved.save(VIEW)
    assert saved.load() == VIEW
    saved.save(View())
    assert not path.is_symlink()


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    saved = SavedView(tmp_path / "missing" / "n")
    saved.save(VIEW)
    assert "cannot be written" in caplog.text
    SavedView(None).save(VIEW)
    assert SavedView(None).load() == View()
