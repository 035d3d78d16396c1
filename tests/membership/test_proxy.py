"""A node that reaches its directory through another process."""

import threading
import time
from collections.abc import Iterator

import pytest

from raykv.config import NodeConfig, StorageConfig
from raykv.embedded import InProcessMembership
from raykv.errors import ConfigError, PeerUnavailable, RayKVError, UsageError
from raykv.membership.namespace_registry import NamespaceRegistry
from raykv.membership.proxy import MembershipProxy, MembershipProxyServer
from raykv.node.node import Node
from raykv.protocol import messages
from raykv.protocol.messages import Configure, Heartbeat, HeartbeatAnswer
from raykv.protocol.namespace import Namespace
from raykv.protocol.placement import RESTART_EPOCHS, Member, View
from raykv.transport.link import Link
from raykv.transport.server import SocketServer
from tests.support.protocol import change

SECRET = b"known to the node"
MEMBER = Member("a", "h", {"tcp": "x:1", "unix": "unix:/x"}, 1.5, 7)
SPACE = Namespace(model="m", chunk_tokens=16)


class Fickle(InProcessMembership):
    """A directory that can be made unreachable."""

    def __init__(self) -> None:
        super().__init__(member_timeout_s=60.0)
        self.away = ""
        self.left: list[str] = []

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        self._require()
        return super().beat(heartbeat)

    def configure(self, change: Configure) -> bytes:
        self._require()
        return super().configure(change)

    def leave(self, node_id: str) -> None:
        self._require()
        self.left.append(node_id)
        super().leave(node_id)

    def _require(self) -> None:
        if self.away:
            raise PeerUnavailable(self.away)


@pytest.fixture
def directory() -> Fickle:
    return Fickle()


@pytest.fixture
def address(directory: Fickle) -> Iterator[str]:
    service = MembershipProxyServer(directory, "a")
    server = SocketServer(service, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=16)
    server.serve()
    yield server.address
    server.close()


def test_heartbeats_and_their_answers_pass_unchanged(directory, address):
    asked = MembershipProxy(address, SECRET)
    first = asked.beat(Heartbeat(MEMBER, 0))
    assert first == HeartbeatAnswer(View(1, (MEMBER,)))
    assert asked.beat(Heartbeat(MEMBER, 1)) == HeartbeatAnswer()
    assert asked.beat(Heartbeat(MEMBER, 9)) == HeartbeatAnswer(want_view=True)
    adopted = View(9 + RESTART_EPOCHS, (MEMBER,))
    assert asked.beat(Heartbeat(MEMBER, 9, View(9, (MEMBER,)))) == HeartbeatAnswer(adopted)
    registry = NamespaceRegistry()
    registry.configure(SPACE, {"priority": 3}, now_ns=1)
    answer = asked.beat(Heartbeat(MEMBER, adopted.epoch, None, registry.version, registry.encode()))
    assert directory.logic.registry.entries.keys() == registry.entries.keys()
    assert answer == HeartbeatAnswer()
    asked.leave("a")
    assert directory.left == ["a"]


def test_configs_are_changed_through_it_and_errors_keep_their_class(directory, address):
    asked = MembershipProxy(address, SECRET)
    listed = NamespaceRegistry.decode(asked.configure(change(SPACE, {"policy": "lfu"})))
    assert [entry.config.policy for entry in listed.entries.values()] == ["lfu"]
    with pytest.raises(ConfigError, match="sieve"):
        asked.configure(change(SPACE, {"policy": "sieve"}))
    (dropped,) = NamespaceRegistry.decode(asked.configure(change(SPACE, None))).entries.values()
    assert dropped.dropped_ns
    assert directory.logic.registry.entries.keys() == listed.entries.keys()


def test_a_directory_that_is_away_is_away_for_the_node_too(directory, address):
    asked = MembershipProxy(address, SECRET)
    directory.away = "restarting"
    for call in (
        lambda: asked.beat(Heartbeat(MEMBER, 0)),
        lambda: asked.configure(change(SPACE, {})),
        lambda: asked.leave("a"),
    ):
        with pytest.raises(PeerUnavailable, match="restarting"):
            call()
    directory.away = ""
    assert asked.beat(Heartbeat(MEMBER, 0)).view is not None
    with pytest.raises(PeerUnavailable):
        MembershipProxy("unix:@raykv-test-nobody", SECRET).beat(Heartbeat(MEMBER, 0))


def test_it_answers_for_nothing_else_and_survives_nonsense(directory, address):
    link = Link.connect(address, SECRET, deadline_s=time.monotonic() + 5.0)
    for message, problem in (
        (messages.Attach(), UsageError),
        (messages.GetStats(), UsageError),
        (messages.Heartbeat(Member("b", "h", {"tcp": "x:1"}, 1.5, 7), 0), UsageError),
        (messages.Leave("b"), UsageError),
        (messages.Configure(b"not json", b"{}"), UsageError),
        (messages.Configure(b'{"model": 5}', b"{}"), ConfigError),
        (messages.Configure(b'{"model": "m"}', b"[1]"), UsageError),
    ):
        with pytest.raises(problem):
            link.call(message, deadline_s=time.monotonic() + 5.0)
    link.close()
    assert MembershipProxy(address, SECRET).beat(Heartbeat(MEMBER, 0)).view is not None


def test_a_wrong_secret_is_refused(directory, address):
    with pytest.raises(PeerUnavailable, match="secret"):
        MembershipProxy(address, b"something else").beat(Heartbeat(MEMBER, 0))
    assert not directory.logic.view.members


def test_many_calls_at_once(directory, address):
    problems: list[RayKVError] = []
    epochs: list[int] = []

    def live(number: int) -> None:
        try:
            for life in range(20):
                member = Member("a", "h", {"tcp": f"x:{number}"}, 1.0, life)
                answer = MembershipProxy(address, SECRET).beat(Heartbeat(member, 0))
                epochs.append(answer.view.epoch)
        except RayKVError as error:
            problems.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(epochs) == 160
    assert max(epochs) == directory.logic.view.epoch


def test_a_node_joins_and_leaves_through_it(directory, address, shm_dir):
    storage = StorageConfig.load({"arena_nbytes": 1 << 20, "extent_nbytes": 1 << 16, "shm_dir": str(shm_dir)})
    config = NodeConfig(node_id="a", storage=storage, heartbeat_s=0.05)
    directory.away = "not yet"
    node = Node(config, secret=b"s", membership=MembershipProxy(address, SECRET))
    node.start()
    try:
        assert not node.view.members
        directory.away = ""
        until_s = time.monotonic() + 10.0
        while not node.view.members:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    finally:
        node.stop(unlink=True)
    assert directory.left == ["a"]
