"""The router under faults: no file descriptors, no threads, silent addresses, a cluster that was made again."""

import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

import raykv
from raykv.client.parallel import Parallel
from raykv.errors import ConfigError, PeerUnavailable
from raykv.protocol.placement import View
from raykv.transport import data_path
from raykv.transport.bulk_read import PART_KEYS
from raykv.transport.data_path import PathEnvironment
from raykv.transport.link import Link
from tests.support.clients import remote_client
from tests.support.nodes import NBYTES, SPACE, cluster, content, names, wait_until


def put(client: raykv.Client, keys: list[str]) -> raykv.PutResult:
    return client.put(keys, [content(key) for key in keys])


def get(client: raykv.Client, keys: list[str]) -> raykv.GetResult:
    """Read chunks, and compare every byte of the hits."""
    into = [bytearray(NBYTES) for _ in keys]
    result = client.get(keys, into)
    assert all(not hit or into[place] == content(keys[place]) for place, hit in enumerate(result.hits))
    return result


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
    """An address that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield "{}:{}".format(*listener.getsockname())


def test_a_client_without_descriptors_misses():
    with cluster(2) as running:
        put(running.client(SPACE, node=0), names(3))
        running.settle()
        client = running.client(SPACE, node=1, breaker_s=0.0)
        assert client.router.local is not None
        client.router.pool.retain(())
        with no_descriptors():
            assert get(client, names(3)).hits == (False,) * 3
            with pytest.raises(PeerUnavailable):
                Link.connect("127.0.0.1:1", b"", deadline_s=time.monotonic() + 1.0)
        assert get(client, names(3)).hits == (True,) * 3


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "a..b:1", "\N{SNOWMAN}." * 50 + ":1", "a\0b:1", "", "none"])
def test_an_impossible_address_is_a_node_that_is_away(address):
    with pytest.raises(PeerUnavailable):
        Link.connect(address, b"", deadline_s=time.monotonic() + 1.0)


def test_a_member_with_an_impossible_address_does_not_end_calls_to_the_others():
    with cluster(1, separate_hosts=True) as running, remote_client(running) as client:
        view = client.view()
        wrong = msgspec.structs.replace(view.members[0], node_id="a", endpoints={"tcp": "none"}, host="elsewhere")
        client.router._view = View(view.epoch, (wrong, *view.members))
        assert client.view().members[0].node_id == "a"
    with pytest.raises(ConfigError, match="neither 'host:port'"):
        raykv.connect(SPACE, address="none", secret="00")


def test_when_one_task_raises_the_others_have_ended():
    begun, ended = threading.Event(), threading.Event()

    def slow():
        begun.set()
        time.sleep(0.2)
        ended.set()

    def wrong():
        assert begun.wait(5.0)
        raise IndexError("a bug")

    parallel = Parallel()
    with pytest.raises(IndexError):
        parallel.run({1: wrong, 2: slow, 3: slow})
    assert ended.is_set()
    parallel.close()


def test_without_more_threads_the_caller_does_the_work(monkeypatch):
    queued, done = [], []

    def refuse(executor, task, *arguments):
        queued.append(task)  # as in ThreadPoolExecutor, which queues the task before it starts a thread
        raise RuntimeError("can't start new thread")

    parallel = Parallel()
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    work = {number: lambda number=number: done.append(number) or number for number in range(3)}
    assert parallel.run(work) == {0: 0, 1: 1, 2: 2}
    parallel.in_background(lambda: None)
    for task in queued:
        task()  # as if a thread started late: no work is left for it
    assert done == [0, 1, 2]
    parallel.close()
    assert parallel.run(work) == {0: 0, 1: 1, 2: 2}


def test_an_address_that_swallows_everything_costs_little_where_others_answer(black_hole):
    with cluster(3) as running, remote_client(running, breaker_s=0.05) as client:
        router = client.router
        router._address = black_hole
        times = []
        for _ in range(20):
            router.pool.failures += 1 if not times else 0  # in the first round, a node has failed to answer
            began_s = time.monotonic()
            router.view(began_s + 1.0)
            times.append(time.monotonic() - began_s)
            time.sleep(0.02)
        assert max(times) < 0.5
        router._view = View()  # now `black_hole` is the only address
        with pytest.raises(PeerUnavailable):
            router.refresh(time.monotonic() + 0.2)


@pytest.mark.slow
def test_mappings_of_nodes_that_left_are_released():
    with cluster(2, separate_hosts=False) as running:
        put(running.client(SPACE, node=0), names(2))
        running.settle()
        client = running.client(SPACE, node=1)
        assert get(client, names(2)).chunks_by_source == {("node-0", "shm"): 2}
        running.kill(0)
        wait_until(lambda: client.view().member("node-0") is None)
        assert get(client, names(2)).prefix == 0
        assert put(client, names(2)).stored == 2
        assert get(client, names(2)).prefix == 2


def test_a_client_whose_node_left_learns_so_though_that_node_owned_all_keys():
    with cluster(3) as running:
        client = running.client(SPACE, node=2, breaker_s=0.2)
        view = client.view()
        keys = [f"key-{number}" for number in range(100)]
        owners = view.ring.owners(client.keys(keys))
        owned = [key for key, owner in zip(keys, owners, strict=True) if view.ring.nodes[owner] == "node-2"]
        assert len(owned) > 10
        assert get(client, owned).prefix == 0  # maps the node's memory
        running.nodes[2].stop(unlink=True)
        running.settle()
        put(running.client(SPACE, node=0), owned)
        running.settle()
        wait_until(lambda: get(client, owned).prefix == len(owned), 2.0)


def test_a_match_has_one_deadline_for_all_that_it_does(monkeypatch):
    with cluster(2) as running:
        put(running.client(SPACE, node=0), ["a"])
        running.settle()
        client = running.client(SPACE, node=1)
        deadlines, locate = [], client.router.locate
        deadline = client.router.deadline

        def recorded(timeout_s):
            deadlines.append(deadline(timeout_s))
            return deadlines[-1]

        monkeypatch.setattr(client.router, "deadline", recorded)
        monkeypatch.setattr(
            client.router,
            "locate",
            lambda keys, deadline_s, **more: deadlines.append(deadline_s) or locate(keys, deadline_s, **more),
        )
        assert client.match(["a"]).count == 1
        assert len(deadlines) == 2
        assert len(set(deadlines)) == 1


def test_buffers_of_no_length_and_gets_of_nothing():
    count = PART_KEYS + 20
    with cluster(2) as running:
        running.client(SPACE, node=0).put(names(count), [bytes(300)] * count)
        running.settle()
        client = running.client(SPACE, node=1)
        into = [bytearray(0 if number == 0 else 300) for number in range(count)]
        match = client.match(names(count))
        assert client.get(names(count), into, match=match).hits == (False, *[True] * (count - 1))
        assert client.get([], [], match=match).hits == ()


def test_a_client_joins_a_cluster_that_was_made_again():
    """The new cluster has another secret, and its epochs start again from 1."""
    with cluster(2) as running:
        put(running.client(SPACE, node=0), ["a"])
        running.settle()
        client = running.client(SPACE, node=1)
        router = client.router
        before, router.pool.secret, router._cluster = router.pool.secret, b"of the old one", b"old"
        router._view, router.pool.epoch, router.local.pipeline.epoch, router.writer.pipeline.epoch = (
            View(1000),
            1000,
            1000,
            1000,
        )
        router.pool.retain(())
        assert get(client, ["a"]).hits == (True,)
        assert router.pool.secret == before
        assert 0 < router.view(time.monotonic() + 1.0).epoch < 1000


def test_a_remote_put_that_is_repeated_counts_its_own_chunks_as_stored(monkeypatch):
    """The connection breaks after the node has stored the chunks: the second attempt finds them stored."""
    with cluster(1) as running, remote_client(running) as client:
        put(client, ["other"])
        push = Link.push
        calls = []

        def lose_the_first_answer(link, *arguments, **options):
            answer = push(link, *arguments, **options)
            calls.append(answer)
            if len(calls) == 1:
                link.close()
                raise PeerUnavailable("the connection broke")
            return answer

        monkeypatch.setattr(Link, "push", lose_the_first_answer)
        assert put(client, ["a", "other", "b"]) == raykv.PutResult(2, 1, 0)
        assert [answer.count for answer in calls] == [2, 0]
        assert put(client, ["a", "other", "b"]) == raykv.PutResult(0, 3, 0)


def test_every_request_names_its_quota_group():
    with cluster(2) as running:
        client = running.client(SPACE, node=1)
        put(running.client(SPACE, node=0), names(9))
        running.settle()
        assert get(client, names(9)).prefix == 9
        (found,) = [each for each in client.namespaces() if each["namespace"] == SPACE]
        assert found["requests"] > 0
        assert found["served_nbytes"] == 9 * NBYTES


def test_a_match_says_lengths_here_and_elsewhere():
    with cluster(2) as running:
        client = running.client(SPACE, node=1)
        running.client(SPACE, node=0).put(["a", "b"], [bytes(100), bytes(200)])
        client.put(["c"], [bytes(300)])
        running.settle()
        match = client.match(["a", "b", "c"])
        assert (match.nbytes, match.below_memory) == ((100, 200, 300), 0)
        assert match.holders == ("node-0", "node-0", "node-1")


def test_a_client_whose_node_does_not_reach_the_directory_learns_the_view_from_others(monkeypatch):
    with cluster(2) as running:
        client = running.client(SPACE, node=0)
        beat = running.membership.beat

        def cut_off(heartbeat):
            if heartbeat.member.node_id == "node-0":
                raise PeerUnavailable("cut off")
            return beat(heartbeat)

        monkeypatch.setattr(running.membership, "beat", cut_off)
        number = running.add()
        newest = running.membership.logic.view.epoch
        wait_until(lambda: running.nodes[1].view.epoch == newest)
        assert running.nodes[0].view.epoch < newest
        put(running.client(SPACE, node=number), names(20))
        wait_until(lambda: running.nodes[number].announced)
        wait_until(lambda: get(client, names(20)).prefix == 20)  # an answer of another node shows the newer epoch
        assert client.router.view(time.monotonic() + 5.0).epoch == newest
        assert running.nodes[0].view.epoch < newest


def test_data_paths_that_open_slowly_take_nothing_from_the_deadline(monkeypatch):
    """A client imports pyverbs and opens the host's RDMA devices when it connects."""
    timeout_s = 0.5

    def open_slowly(environment: PathEnvironment) -> None:
        time.sleep(2 * timeout_s)

    monkeypatch.setattr(data_path, "_openers", {**data_path._openers, "slow": open_slowly})
    with cluster(1) as running, running.client(SPACE, timeout_s=timeout_s) as client:
        assert put(client, names(1)).stored == 1
