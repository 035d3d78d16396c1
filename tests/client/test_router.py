"""A client's way to the nodes when something is wrong: no descriptors, no threads, hosts that swallow everything."""

import resource
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.errors import PeerUnavailable, RayKVError
from raykv.protocol import messages
from raykv.protocol.placement import View
from raykv.transport.bulk_read import PART_KEYS, BulkRead, ReadProgress
from raykv.transport.pool import Peers
from raykv.transport.tcp import SocketLink
from tests.test_cluster_embedded import SPACE, cluster, get, names, put


@contextmanager
def no_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def black_hole():
    """An address where connections are made, and nobody ever says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield "{}:{}".format(*listener.getsockname())


def test_who_has_no_descriptors_left_misses():
    with cluster(2) as running:
        put(running.client(SPACE, node=0), names(3))
        running.settle()
        client = running.client(SPACE, node=1, breaker_s=0.0)
        assert client._router.local is not None
        client._router.peers.retain(())
        with no_descriptors():
            assert get(client, names(3)).hits == (False,) * 3
            with pytest.raises(PeerUnavailable):
                SocketLink.connect("127.0.0.1:1", b"", deadline_s=time.monotonic() + 1.0)
        assert get(client, names(3)).hits == (True,) * 3


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "a..b:1", "\N{SNOWMAN}." * 50 + ":1"])
def test_an_address_that_is_none_is_a_peer_that_is_away(address):
    with pytest.raises(PeerUnavailable):
        SocketLink.connect(address, b"", deadline_s=time.monotonic() + 1.0)


def test_when_parallel_work_raises_nobody_is_at_it_any_more():
    ended = threading.Event()

    def slow():
        time.sleep(0.2)
        ended.set()

    def wrong():
        raise IndexError("a bug")

    with cluster(1) as running:
        router = running.client(SPACE)._router
        with pytest.raises(IndexError):
            router.in_parallel({1: wrong, 2: slow, 3: slow}, time.monotonic() + 5.0)
        assert ended.is_set()


def test_without_more_threads_work_is_done_by_who_wants_it():
    queued, done = [], []

    def refuse(task):
        queued.append(task)  # as ThreadPoolExecutor does
        raise RuntimeError("can't start new thread")

    with cluster(1) as running:
        router = running.client(SPACE)._router
        router._pool = SimpleNamespace(submit=refuse, shutdown=lambda: None)
        work = {number: lambda number=number: done.append(number) or number for number in range(3)}
        assert router.in_parallel(work, time.monotonic() + 5.0) == {0: 0, 1: 1, 2: 2}
        router._report_stale("node-0", np.zeros((1, 2), np.uint64), time.monotonic() + 1.0)
        for task in queued[:3]:
            assert isinstance(task(), RayKVError)
        assert done == [0, 1, 2]
        router.close()
        with pytest.raises(RuntimeError):
            router.in_parallel(work, time.monotonic() + 5.0)


def test_an_address_that_swallows_everything_costs_little_where_others_answer(black_hole):
    with cluster(3) as running:
        router = running.client(SPACE, breaker_s=0.05)._router
        local, router.local = router.local, None  # as from a host without a node
        router._address = black_hole
        took = []
        for _ in range(20):
            router.peers.failures += 1 if not took else 0  # somebody did not answer, once
            start_s = time.monotonic()
            router.view(start_s + 1.0)
            took.append(time.monotonic() - start_s)
            time.sleep(0.02)
        assert max(took) < 0.5
        router._view = View()  # now there is nobody else
        with pytest.raises(PeerUnavailable):
            router._ask_any(messages.GetView(), time.monotonic() + 0.2)
        router.local = local


def test_chunks_that_were_brought_up_in_time_count_when_the_rest_does_not_come():
    with cluster(1) as running:
        router = running.client(SPACE)._router
        keys = running.client(SPACE).keys(names(6))
        progress = ReadProgress(keys, [[memoryview(bytearray(8 << 20))] for _ in names(6)], [8 << 20] * 6)
        load = BulkRead(progress, list(range(6)), verify=True)
        asked = []

        def ask(member, raw, timeout_s, deadline_s):
            asked.append(raw)
            if len(asked) > 5:  # the two of the third part, when they are waited for
                raise PeerUnavailable("the deadline has passed")

        router._ask_to_promote = ask
        router.read_local = lambda reader, keys, into: (np.ones(len(keys), np.bool_), 0)
        with pytest.raises(PeerUnavailable):
            router._promote(None, None, progress, load, list(range(6)), time.monotonic() + 1.0)
        assert load.arrived == [0, 1, 2, 3]


def test_who_has_left_is_forgotten():
    closed = []
    link = SimpleNamespace(close=lambda: closed.append(1), epoch=0)
    peers = Peers(lambda address, secret, *, deadline_s: link, b"", breaker_s=1.0, max_idle=4)
    for address in ("a:1", "b:1"):
        peers.ask(address, lambda link: None, deadline_s=time.monotonic() + 1.0)
    peers._give_up("b:1")
    peers.retain({"a:1"})
    assert (len(closed), set(peers._idle), peers._shut_until_s) == (1, {"a:1"}, {})
    with cluster(2, separate_hosts=False) as running:
        put(running.client(SPACE, node=0), names(2))
        running.settle()
        client = running.client(SPACE, node=1)
        assert all(get(client, names(2)).hits)
        router = client._router
        ((life, reader),) = router._neighbours.items()
        router._neighbours = {life: reader, ("gone", 1): None}
        router._view = View()
        router.refresh(time.monotonic() + 1.0)
        assert router._neighbours == {life: reader}


def test_a_match_has_one_deadline_for_all_that_it_does(monkeypatch):
    with cluster(2) as running:
        put(running.client(SPACE, node=0), ["a"])
        running.settle()
        client = running.client(SPACE, node=1)
        deadlines = []
        here, locate = client._here, client._router.locate
        monkeypatch.setattr(
            client, "_here", lambda keys, deadline_s: deadlines.append(deadline_s) or here(keys, deadline_s)
        )
        monkeypatch.setattr(
            client._router, "locate", lambda keys, deadline_s: deadlines.append(deadline_s) or locate(keys, deadline_s)
        )
        assert client.match(["a"]).count == 1
        assert len(deadlines) == 2
        assert len(set(deadlines)) == 1


def test_buffers_of_no_length_and_gets_of_nothing_are_no_trouble():
    count = PART_KEYS + 20
    with cluster(2) as running:
        put(running.client(SPACE, node=0), names(count), 300)
        running.settle()
        client = running.client(SPACE, node=1)
        into = [bytearray(0 if number == 0 else 300) for number in range(count)]
        match = client.match(names(count))
        assert client.get(names(count), into, match=match).hits == (False, *[True] * (count - 1))
        assert client.get([], [], match=match).hits == ()


def test_a_client_goes_over_to_a_cluster_that_was_started_anew():
    with cluster(2) as running:
        put(running.client(SPACE, node=0), ["a"])
        running.settle()
        client = running.client(SPACE, node=1)
        router = client._router
        before, router.peers.secret = router.peers.secret, b"of the old one"
        router._view, router.peers.epoch, router.local.epoch = View(1000), 1000, 1000
        router.peers.retain(())
        assert get(client, ["a"]).hits == (True,)
        assert router.peers.secret == before
        assert 0 < router._view.epoch < 1000
