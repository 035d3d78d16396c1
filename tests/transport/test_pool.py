"""Links are reused, nodes that hang are left alone for a while, and forked processes share no links."""

import os
import signal
import socket
import threading
import time

import pytest

from raykv.errors import CapacityError, PeerUnavailable, UsageError
from raykv.protocol import messages
from raykv.transport.link import Link
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import SocketServer
from tests.support.nodes import wait_until
from tests.support.transports import SECRET, Warehouse, soon


@pytest.fixture
def service():
    return Warehouse()


@pytest.fixture(params=["tcp", "unix"])
def served(request, service):
    address = "127.0.0.1:0" if request.param == "tcp" else f"unix:@raykv-test-{time.monotonic_ns()}"
    made = SocketServer(service, address, SECRET, io_timeout_s=5.0, max_connections=64)
    made.serve()
    yield made
    service.hold.set()
    made.close()


@pytest.fixture
def pool():
    made = ConnectionPool(SECRET, breaker_s=60.0, max_idle=2)
    yield made
    made.close()


def stats(pool: ConnectionPool, address: str, seconds: float = 5.0) -> messages.Answer:
    deadline_s = soon(seconds)
    return pool.ask(address, lambda link: link.call(messages.GetStats(), deadline_s=deadline_s), deadline_s=deadline_s)


def test_links_are_reused(pool, served, service):
    for _ in range(3):
        assert stats(pool, served.address) == messages.Stats(b"GetStats")
    assert len(service.sessions) == 1
    pool.close_idle(served.address)
    assert service.sessions[0].closed.wait(5.0)
    stats(pool, served.address)
    pool.retain(())
    assert service.sessions[1].closed.wait(5.0)
    assert pool.epoch == 7


def test_a_refused_request_costs_no_link_and_a_broken_one_does(pool, served, service):
    for request, error in ((messages.Commit(()), CapacityError), (messages.Delete(b""), UsageError)):
        with pytest.raises(error):
            pool.ask(served.address, lambda link, r=request: link.call(r, deadline_s=soon()), deadline_s=soon())
    assert len(service.sessions) == 1

    def close_and_refuse(link):
        link.close()
        raise UsageError("no")

    for action in (close_and_refuse, lambda link: 1 / 0):
        with pytest.raises((UsageError, ZeroDivisionError)):
            pool.ask(served.address, action, deadline_s=soon())
    assert stats(pool, served.address) == messages.Stats(b"GetStats")
    # A server may begin the session of an earlier link after that of a later one.
    wait_until(lambda: sum(not session.closed.is_set() for session in service.sessions) == 1)
    assert pool.available(served.address)


def test_a_node_that_hangs_is_left_alone_for_a_while(pool, served):
    """The listener acts like a stopped node: its kernel accepts connections, but nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerUnavailable):
            stats(pool, address, 0.1)
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable, match="a moment ago"):
            stats(pool, address)
        assert time.monotonic() - began_s < 0.1
        assert pool.failures == 2
        assert pool.available(served.address)
        pool.retain(())
        assert pool.available(address)


def test_an_idle_link_that_hangs_trips_the_breaker_too(pool, served, service):
    stats(pool, served.address)
    service.hold.clear()
    with pytest.raises(PeerUnavailable):
        stats(pool, served.address, 0.2)
    assert not pool.available(served.address)


def test_a_call_with_little_time_left_does_not_trip_the_breaker(pool, served, service):
    stats(pool, served.address)
    service.hold.clear()
    for _ in range(2):  # first over the idle link, then over a new one
        with pytest.raises(PeerUnavailable):
            stats(pool, served.address, 0.01)
        assert pool.available(served.address)
        assert pool.failures == 0


def test_a_restarted_node_is_asked_at_once_over_a_new_link(pool, service):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for _ in range(3):
        server = SocketServer(service, address, SECRET, io_timeout_s=5.0, max_connections=8)
        server.serve()
        assert stats(pool, address) == messages.Stats(b"GetStats")
        server.close()


# -- forks ------------------------------------------------------------------------------------------------------------


def in_child(work) -> int:
    """Run `work` in a forked child. Returns the child's pid. The exit status is 0 if `work` returned."""
    child = os.fork()
    if child:
        return child
    signal.alarm(60)  # ends the child even if the test does not
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"in the child: {error!r}\n".encode())
    finally:
        os._exit(status)


def ask_for_keys(pool: ConnectionPool, address: str, name: bytes, count: int) -> None:
    """Send requests, and check that each answer is for its own key."""
    for number in range(count):
        key = b"%s-%d" % (name, number)
        answer = pool.ask(
            address, lambda link, k=key: link.call(messages.Locate(k), deadline_s=soon()), deadline_s=soon()
        )
        assert answer == messages.Stats(key)


def test_parent_and_child_ask_at_once_and_get_their_own_answers(pool, served):
    ask_for_keys(pool, served.address, b"before", 3)
    child = in_child(lambda: ask_for_keys(pool, served.address, b"child", 1000))
    ask_for_keys(pool, served.address, b"parent", 1000)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.failures == 0


def test_a_child_that_closes_its_pool_and_server_disturbs_nobody(pool, served, service):
    stats(pool, served.address)
    held = Link.connect(served.address, SECRET, deadline_s=soon())
    held.post(messages.Locate(b"held"), deadline_s=soon())

    def close_all() -> None:
        assert held.closed
        held.close()
        pool.close()
        served.close()

    assert os.waitpid(in_child(close_all), 0)[1] == 0
    assert stats(pool, served.address) == messages.Stats(b"GetStats")
    assert held.collect(deadline_s=soon()) == messages.Stats(b"held")
    assert len(service.sessions) == 2
    assert not any(session.closed.is_set() for session in service.sessions)
    held.close()
    assert service.sessions[1].closed.wait(5.0)


def test_leases_end_with_the_parents_link_while_the_child_lives(pool, served, service):
    """The child must close its copies of the descriptors. Otherwise the server would not see the connections end."""
    stats(pool, served.address)
    held = Link.connect(served.address, SECRET, deadline_s=soon())
    ready, go = os.pipe(), os.pipe()

    def wait() -> None:
        os.write(ready[1], b"x")
        os.read(go[0], 1)

    child = in_child(wait)
    os.read(ready[0], 1)
    held.close()
    pool.close()
    assert all(session.closed.wait(5.0) for session in service.sessions)
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (*ready, *go):
        os.close(descriptor)


def test_a_lock_held_at_the_fork_does_not_block_the_child(pool, served):
    stats(pool, served.address)
    with pool._lock:
        child = in_child(lambda: ask_for_keys(pool, served.address, b"child", 3))
    assert os.waitpid(child, 0)[1] == 0


def test_many_threads_share_a_pool(pool, served):
    failures = []

    def work(name: bytes) -> None:
        try:
            ask_for_keys(pool, served.address, name, 100)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(b"t%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
