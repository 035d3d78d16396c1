"""The cluster's secret is rotated while clients read and store over TCP: no operation fails."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

import raykv
from raykv.client import root_copies
from raykv.client.router import Router
from raykv.config import ClientConfig
from raykv.embedded import EmbeddedCluster
from raykv.errors import PeerUnavailable, TransientError
from raykv.node.node import Node
from raykv.protocol import messages
from raykv.protocol.keyring import Stage
from raykv.transport.handshake import WrongSecret
from raykv.transport.link import Link
from tests.support.clients import remote_client
from tests.support.nodes import NBYTES, SPACE, cluster, content, names, put, wait_until


def step(running: EmbeddedCluster) -> Stage:
    """Do one step of a rotation, when all nodes have finished the last one. Wait until all have finished this one."""
    wait_until(lambda: not running.membership.logic.behind())
    stage = running.membership.rotate()
    wait_until(lambda: not running.membership.logic.behind())
    return stage


def rotate(running: EmbeddedCluster) -> None:
    assert [step(running) for _ in range(3)] == [Stage.ADDED, Stage.USED, Stage.STEADY]


@contextmanager
def repeated(operation: Callable[[int], None]) -> Iterator[list[int]]:
    """Repeat an operation in a thread. Yields the numbers of those that have ended; errors are raised at the end."""
    done: list[int] = []
    errors: list[BaseException] = []
    stopping = threading.Event()

    def work() -> None:
        try:
            while not stopping.is_set():
                operation(len(done))
                done.append(len(done))
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        stopping.set()
        thread.join()
    assert not errors, errors


@pytest.fixture(autouse=True)
def without_copies(monkeypatch):
    """Readers make no copies on their host, so that all reads go over TCP."""
    monkeypatch.setattr(root_copies, "COPY_READS", 1 << 30)


def ask(router: Router, node: Node) -> None:
    """Send a request over TCP."""
    router.ask(node.member.address, messages.GetView(), time.monotonic() + 5.0)


def read(client: raykv.Client, keys: list[str]) -> None:
    into = [bytearray(NBYTES) for _ in keys]
    result = client.get(keys, into)
    assert all(result.hits)
    assert into == [content(key) for key in keys]
    assert set(result.nbytes_by_path) == {"tcp"}


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_no_operation_fails_while_the_secret_rotates_twice(request, with_tls):
    tls = request.getfixturevalue("tls")._config if with_tls else None
    with cluster(3, arena_nbytes="32 MiB", tls=tls) as running:
        keys = names(12)
        put(running.client(SPACE, node=0), keys)
        running.settle()
        readers = [running.client(SPACE, node=node, breaker_s=60.0) for node in (1, 2)]
        idle = running.client(SPACE, node=1, breaker_s=60.0)
        read(idle, keys)
        first = running.secret
        far = remote_client(running, secret=first, tls=tls, breaker_s=60.0, timeout_s=10.0)

        def write(number: int) -> None:
            fresh = names(2, f"of-{number}")
            assert put(far, fresh).stored == 2
            assert far.delete(fresh) == 2

        with (
            repeated(lambda number: read(readers[0], keys)) as reads,
            repeated(lambda number: read(readers[1], [keys[number % 12]])) as others,
        ):
            with repeated(write) as writes:
                for expected in (Stage.ADDED, Stage.USED):
                    assert step(running) is expected
                    before = len(writes)
                    wait_until(lambda before=before: len(writes) > before + 2)
            assert step(running) is Stage.STEADY
            rotate(running)
            before = len(reads), len(others)
            wait_until(lambda: len(reads) > before[0] + 2 and len(others) > before[1] + 2)
        with far, pytest.raises(TransientError):
            ask(far.router, running.nodes[0])
        read(idle, keys)  # it has slept through both rotations, and learns the secret from its node
        assert idle.router.pool.secret.hex() == running.secret != first
        for node in running.nodes:
            with pytest.raises(WrongSecret):
                Link.connect(
                    node.member.address, bytes.fromhex(first), deadline_s=time.monotonic() + 5.0, tls=node._tls
                )
        with remote_client(running, tls=tls) as later:
            read(later, keys)
        assert sum(node._pool.failures for node in running.nodes) == 0


def test_nodes_announce_and_look_up_after_a_rotation():
    with cluster(3) as running:
        rotate(running)
        writer, reader = (running.client(SPACE, node=node) for node in (0, 1))
        put(writer, names(30))
        running.settle()
        assert reader.match(names(30)).count == 30
        read(reader, names(30))


def test_a_client_whose_node_cannot_tell_is_refused(faults):
    """The client asks its node once for each refused connection, and waits no longer than the deadline."""
    with cluster(2) as running:
        put(running.client(SPACE, node=0), ["a"])
        running.settle()
        client = running.client(SPACE, node=1, breaker_s=0.05)
        read(client, ["a"])
        rotate(running)
        wait_until(lambda: not running.nodes[0]._servers[0]._connections)
        faults.silence(running.nodes[1])
        began_s = time.monotonic()
        assert client.get(["a"], [bytearray(NBYTES)], timeout_s=0.5).hits == (False,)
        assert time.monotonic() - began_s < 2.0
        faults.restore(running.nodes[1])
        wait_until(lambda: client.get(["a"], [bytearray(NBYTES)]).hits == (True,))


def test_a_client_with_a_node_on_its_host_may_have_joined_by_tcp():
    """Its config has a secret that is rotated: the node on its host tells the new one."""
    with cluster(2, separate_hosts=False) as running:
        fields = {"address": running.nodes[0].member.address, "secret": running.secret}
        with closing(raykv.Client(SPACE, Router(ClientConfig.load(fields)))) as client:
            assert client.router.local is not None
            rotate(running)
            ask(client.router, running.nodes[1])
            assert client.router.pool.secret.hex() == running.secret


def test_a_rotation_without_nodes_is_refused():
    with cluster(0) as running, pytest.raises(TransientError, match="there is no node"):
        running.membership.rotate()


def test_wrong_secret_is_an_unavailable_peer():
    assert issubclass(WrongSecret, PeerUnavailable)
