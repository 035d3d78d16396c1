"""Hot prefixes get replicas on other nodes of a real cluster, readers use them, and they go when nobody reads."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from raykv.client import root_copies
from raykv.embedded import EmbeddedCluster
from raykv.errors import UsageError
from raykv.membership import heat_map
from raykv.node import heat, prefixes
from raykv.protocol import chunk_keys, messages
from raykv.protocol.heat import HeatOrders
from tests.support.drains import drain
from tests.support.nodes import SPACE, Peer, cluster, content, keys_of, names, wait_until

NBYTES = 20_000


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The same rules with shorter times, so that the tests are quick, and without copies that readers make."""
    monkeypatch.setattr(root_copies, "COPY_READS", 1 << 30)
    monkeypatch.setattr(heat, "HALF_LIFE_S", 0.2)
    monkeypatch.setattr(heat_map, "PLAN_S", 0.02)
    monkeypatch.setattr(heat_map, "START_S", 0.0)
    monkeypatch.setattr(prefixes, "UNLISTED_S", 0.3)
    monkeypatch.setattr(prefixes, "KNOWN_S", 2.0)


@contextmanager
def heated(running: EmbeddedCluster, keys, readers, *, nbytes: int = NBYTES) -> Iterator[threading.Event]:
    """Read the chunks again and again on some nodes. The content of each chunk is checked."""
    stopping, problems = threading.Event(), []

    def read(node: int) -> None:
        client = running.client(SPACE, node=node)
        into = [bytearray(nbytes) for _ in keys]
        while not stopping.is_set():
            match = client.match(keys)
            hits = client.get(keys[: match.count], into[: match.count], match=match).hits
            problems.extend(place for place, hit in enumerate(hits) if hit and into[place] != chunk(place, nbytes))

    threads = [threading.Thread(target=read, args=(node,)) for node in readers]
    for thread in threads:
        thread.start()
    try:
        yield stopping
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert problems == []


def chunk(place: int, nbytes: int = NBYTES) -> bytes:
    return content(f"chunk-{place}", nbytes)


def store_chain(running: EmbeddedCluster, node: int, count: int):
    client = running.client(SPACE, node=node)
    keys = client.chain(list(range(count)))
    assert client.put(keys, [chunk(place) for place in range(count)]).stored == count
    running.settle()
    return keys


def holders(running: EmbeddedCluster, keys) -> set[int]:
    return {
        number
        for number, node in enumerate(running.nodes)
        if not node.stopped and (node.store.table.find(keys) >= 0).all()
    }


def hot_cluster(nodes: int, **options) -> EmbeddedCluster:
    running = cluster(nodes, **options)
    running.membership.logic.heat._hot = 1000.0
    return running


def test_a_hot_prefix_gets_replicas_which_serve_and_go_when_it_cools():
    with hot_cluster(4) as running:
        keys = store_chain(running, 0, 6)
        with heated(running, keys, [1, 2]):
            wait_until(lambda: holders(running, keys) == {0, 1, 2, 3})
        stats = [node.stats()["heat"] for node in running.nodes]
        assert [each["replicas"] for each in stats] == [0, 6, 6, 6]
        assert [each["replica_nbytes"] for each in stats] == [0, *[6 * NBYTES] * 3]
        wait_until(lambda: sum(node.stats()["heat"]["copied"] for node in running.nodes) >= 18)  # counted afterwards
        wait_until(lambda: holders(running, keys) == {0})
        assert [node.store.counters.retired for node in running.nodes] == [0, 6, 6, 6]
        assert all(node.stats()["heat"]["replicas"] == 0 for node in running.nodes)
        running.settle()
        client = running.client(SPACE, node=3)
        assert client.match(keys).count == 6
        assert {each.reason for each in running.client(SPACE, node=1).why(keys)} == {"here"}


def test_readers_on_other_hosts_spread_over_the_replicas():
    with hot_cluster(5) as running:
        keys = store_chain(running, 0, 4)
        with heated(running, keys, [1, 2]):
            wait_until(lambda: len(holders(running, keys)) == 5)
            reader = running.client(SPACE, node=4)
            found = [reader.router.locate(keys, reader.router.deadline(5.0)).holders for _ in range(200)]
            assert {name for holders in found for name in holders[0]} == {f"node-{number}" for number in range(5)}
            assert all(len(set(each)) == 3 for holders in found for each in holders)


def test_an_owner_leaves_a_part_of_the_reads_to_the_other_holders():
    with hot_cluster(4) as running:
        keys = store_chain(running, 0, 1)
        with heated(running, keys, [1, 2]):
            wait_until(lambda: len(holders(running, keys)) == 4)
            running.settle()
            view = running.nodes[0].view
            owner = next(n for n in running.nodes if n.config.node_id == view.ring.nodes[view.ring.owners(keys)[0]])
            raw, served = chunk_keys.to_bytes(keys), 0
            for _ in range(400):
                reply = owner.answer(messages.Read(raw, locate=True), Peer(owner).session)
                reading = reply.answer
                reply.finish(True)
                if reply.outgoing:
                    served += 1
                else:
                    assert owner.config.node_id not in reading.choices[0]
                    assert len(reading.choices[0]) == 3
            assert 50 < served < 160, "about a quarter"


def test_a_replica_is_adopted_when_the_node_of_the_ordinary_copy_dies():
    with hot_cluster(4) as running:
        keys = store_chain(running, 0, 3)
        with heated(running, keys, [1, 2]):
            wait_until(lambda: len(holders(running, keys)) == 4)
            running.kill(0)
            wait_until(lambda: len(running.nodes[1].view.members) == 3)
            wait_until(lambda: any(node.stats()["heat"]["replicas"] == 0 for node in running.nodes[1:]))
        wait_until(lambda: len(holders(running, keys)) == 1)
        running.settle()
        assert running.client(SPACE, node=2).match(keys).count == 3


def test_replicas_are_evicted_before_everything_else(monkeypatch):
    monkeypatch.setattr(prefixes, "UNLISTED_S", math.inf)  # they must not cool before the memory is full
    with hot_cluster(2, arena_nbytes="2 MiB") as running:
        keys = store_chain(running, 0, 6)
        client = running.client(SPACE, node=1)
        old = client.keys(names(10, "old"))
        client.put(old, [content(name, NBYTES) for name in names(10, "old")], chained=False)
        filler, counters = names(1000, "new"), running.nodes[1].store.counters
        with heated(running, keys, [1]):
            wait_until(lambda: holders(running, keys) == {0, 1})
        ordered = running.membership.logic.heat
        ordered._hot = math.inf  # nor are they copied again
        wait_until(lambda: not ordered.copies)
        running.settle()
        while counters.evicted == 0:
            name = filler.pop()
            client.put([name], [content(name, NBYTES)], chained=False)
        assert holders(running, keys) == {0}
        lost = int((running.nodes[1].store.table.find(old) < 0).sum())
        assert lost <= max(0, counters.evicted - len(keys)), "room is made for several chunks at a time"


def test_a_chunk_that_is_there_already_does_not_become_a_replica():
    with hot_cluster(3) as running:
        keys = store_chain(running, 0, 3)
        assert running.client(SPACE, node=1).put(keys[:2], [chunk(0), chunk(1)]).stored == 2
        running.settle()
        with heated(running, keys, [2]):
            wait_until(lambda: holders(running, keys) == {0, 1, 2})
        assert [node.stats()["heat"]["replicas"] for node in running.nodes] == [0, 1, 3]
        wait_until(lambda: holders(running, keys) == {0})
        assert (running.nodes[1].store.table.find(keys) >= 0).tolist() == [True, True, False]


def test_a_chunk_of_two_prefixes_counts_once_and_stays_while_one_of_them_is_hot():
    with hot_cluster(1) as running:
        keys = store_chain(running, 0, 4)
        node = running.nodes[0]
        rows = node.store.table.find(keys)
        node.replicas.add(b"whole", keys, rows, now_s=1e6)
        node.replicas.add(b"end", keys[2:], rows[2:], now_s=1e6)
        stats = node.stats()["heat"]
        assert (stats["replicas"], stats["replica_nbytes"]) == (4, 4 * NBYTES)
        node.replicas.follow(HeatOrders(keep=(b"whole",)), now_s=1e6 + 10)
        assert (node.store.table.find(keys) >= 0).all()
        node.replicas.follow(HeatOrders(), now_s=1e6 + 20)
        assert (node.store.table.find(keys) < 0).all()
        assert node.store.counters.retired == 4


def test_without_the_directory_replicas_stay():
    with hot_cluster(3) as running:
        keys = store_chain(running, 0, 3)
        with heated(running, keys, [1]):
            wait_until(lambda: len(holders(running, keys)) == 3)
        node = running.nodes[1].replicas
        for second in range(5):
            node.report(now_s=1e6 + second)  # no answer follows
        assert 1 in holders(running, keys)
        node.follow(HeatOrders(), now_s=1e6 + 10)
        assert 1 not in holders(running, keys)


def test_a_wrong_head_is_refused_and_the_number_of_prefixes_is_bounded(monkeypatch):
    monkeypatch.setattr(prefixes, "MAX_PREFIXES", 4)
    with hot_cluster(1) as running:
        node = running.nodes[0]
        peer = Peer(node)
        peer.ask(messages.OpenNamespace(SPACE.group.model_dump_json().encode()))
        write = messages.Write(keys_of(["a"]), 100, group=SPACE.group.digest, replica=b"short")
        with pytest.raises(UsageError, match="replica"):
            peer.ask(write)
        for number in range(6):
            node.replicas.add(bytes([number]) * 16, np.zeros((1, 2), np.uint64), np.empty(0, np.int32), now_s=0.0)
        assert len(node.replicas._prefixes) == 4
        for number in range(40):
            keys = np.full((1000, 2), number, np.uint64)
            keys[:, 1] += np.arange(1000, dtype=np.uint64) * np.uint64(64)
            node.replicas.add(bytes(16), keys, np.empty(0, np.int32), now_s=0.0)
        assert len(node.replicas._prefixes._prefixes[bytes(16)].keys) <= prefixes.MAX_PREFIX_CHUNKS


def test_a_drain_leaves_ordinary_copies_of_what_has_replicas(monkeypatch):
    """Other nodes hold replicas of the chunks. They would be deleted when the prefix cools."""
    monkeypatch.setattr(prefixes, "UNLISTED_S", 2.0)
    with hot_cluster(3) as running:
        keys = store_chain(running, 0, 4)
        with heated(running, keys, [1]):
            wait_until(lambda: holders(running, keys) == {0, 1, 2})
            running.settle()
            running.membership.logic.heat._hot = math.inf
        drain(running, 0)
        wait_until(lambda: running.nodes[0].drain.progress.state == "done")
        progress = running.nodes[0].drain.progress
        assert (progress.left, progress.moved + progress.elsewhere) == (0, 4)
        running.nodes[0].stop(unlink=True)
        wait_until(lambda: all(node.stats()["heat"]["replicas"] == 0 for node in running.nodes[1:]))
        running.settle()
        assert running.client(SPACE, node=2).match(keys).count == 4
