"""Namespaces at run time: configured, listed and dropped on all nodes, across restarts and while clients write."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.config import NamespaceConfig
from raykv.errors import ConfigError, PeerUnavailable, TransientError
from raykv.node.namespace_reconciler import registry_paths
from raykv.node.node import Node
from raykv.protocol import chunk_keys
from raykv.tier import demotion
from tests.support.nodes import cluster, wait_until

MINE, OTHER = raykv.Namespace(model="mine"), raykv.Namespace(model="other")
NBYTES = 10_000
SLOT = 12_288


def names(count: int, prefix: str = "n") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def put(client: raykv.Client, names: list[str], **options) -> raykv.PutResult:
    return client.put(names, [name.encode().ljust(NBYTES) for name in names], chained=False, **options)


def here(client: raykv.Client, names: list[str]) -> int:
    """Read chunks, and check the bytes of each hit. Returns the number of hits."""
    into = [bytearray(NBYTES) for _ in names]
    result = client.get(names, into)
    for name, got, hit in zip(names, into, result.hits, strict=True):
        assert not hit or bytes(got) == name.encode().ljust(NBYTES)
    return sum(result.hits)


def listed(client: raykv.Client, namespace: raykv.Namespace) -> dict:
    (found,) = [each for each in client.namespaces() if each["namespace"] == namespace]
    return found


def next_life(node: Node, running, *, start: bool = True) -> Node:
    """Make a node with the config of a node that was stopped."""
    made = Node(node.config, secret=bytes.fromhex(running.secret), membership=running.membership)
    if start:
        made.start()
    return made


# -- configs ----------------------------------------------------------------------------------------------------------


def test_configured_on_all_nodes_and_on_those_that_come_later():
    with cluster(2) as running:
        client = running.client(MINE, node=1)
        assert client.configure(policy="fifo", dram_quota_nbytes=5 * SLOT) == 2
        assert client.configure(ttl_s=100) == 2
        wanted = NamespaceConfig(policy="fifo", dram_quota_nbytes=5 * SLOT, ttl_s=100)
        assert listed(client, MINE)["config"] == wanted
        running.add()
        running.settle()
        wait_until(lambda: len(listed(client, MINE)["nodes"]) == 3)
        found = listed(client, MINE)
        assert {node["policy"] for node in found["nodes"].values()} == {"fifo"}
        for node in range(3):
            assert put(running.client(MINE, node=node), names(20, f"of-{node}-")).stored >= 5
            assert running.nodes[node].store.allocator.used_nbytes[0] <= 5 * SLOT
        assert client.configure(policy=None, dram_quota_nbytes=None) == 3
        assert put(client, names(20, "more")).stored == 20
        assert listed(client, MINE)["nodes"]["node-1"]["policy"] == "leaf_lru"


def test_a_wrong_config_is_refused_before_anything_happens():
    with cluster(2) as running:
        client = running.client(MINE)
        client.configure(ttl_s=100)
        for fields in ({"ttl": 3}, {"policy": "sieve"}, {"policy": "no.such:module"}, {"ttl_s": -1}):
            with pytest.raises(ConfigError, match=next(iter(fields))):
                client.configure(**fields)
        assert listed(client, MINE)["config"] == NamespaceConfig(ttl_s=100)


def test_a_change_right_after_the_directory_was_restarted_keeps_the_fields_before(monkeypatch):
    with cluster(2) as running:
        client = running.client(MINE)
        assert client.configure(policy="lfu", ttl_s=5000) == 2

        def away(*arguments):
            raise TransientError("the directory is away")

        monkeypatch.setattr(running.membership, "beat", away)  # the directory gets no heartbeat before the change
        running.membership.logic.__init__(member_timeout_s=1.0)
        assert client.configure(priority=3) == 2
        (found,) = client.namespaces()
        assert found["config"] == NamespaceConfig(policy="lfu", ttl_s=5000, priority=3)


def test_without_a_directory_nothing_is_changed(monkeypatch):
    with cluster(2) as running:
        client = running.client(MINE)

        def away(*arguments):
            raise TransientError("the directory is away")

        monkeypatch.setattr(running.membership, "configure", away)
        with pytest.raises(PeerUnavailable, match="directory is away"):
            client.configure(ttl_s=100)
        with pytest.raises(PeerUnavailable, match="directory is away"):
            client.drop_namespace()


def test_a_lowered_quota_holds_at_once_and_other_namespaces_give_nothing():
    with cluster(1, arena_nbytes="8 MiB") as running:
        client, other = running.client(MINE), running.client(OTHER)
        put(client, names(200))
        put(other, names(200))
        client.configure(dram_quota_nbytes=50 * SLOT)
        wait_until(lambda: listed(client, MINE)["used_nbytes"] <= 50 * SLOT)
        assert here(other, names(200)) == 200
        found = listed(client, MINE)
        assert found["departures"] == {"evicted": 200 - found["chunks"]}


def test_each_by_its_own_policy():
    with cluster(1) as running:
        client, other = running.client(MINE), running.client(OTHER)
        client.configure(policy="fifo", dram_quota_nbytes=20 * SLOT)
        other.configure(policy="lru", dram_quota_nbytes=20 * SLOT)
        for each in (client, other):
            for name in names(16):
                put(each, [name])
            each.flush()
            time.sleep(0.05)
            assert here(each, names(2)) == 2
            put(each, names(8, "new"))
        assert here(client, names(2)) == 0
        assert here(other, names(2)) == 2
        assert {why.policy for why in client.why(names(2))} == {"fifo"}


# -- expiry -----------------------------------------------------------------------------------------------------------


def test_what_a_namespace_stores_expires():
    with cluster(2) as running:
        client, other = running.client(MINE), running.client(OTHER)
        put(client, names(3, "before"))
        client.configure(ttl_s=0.3)
        put(client, names(5))
        put(client, ["alone"])
        put(other, names(5))
        put(other, ["short"], ttl_s=0.2)
        client.flush()
        running.settle()
        store = running.nodes[0].store
        wait_until(lambda: store.chunks == 8)
        assert here(client, names(5)) == 0
        assert (here(client, names(3, "before")), here(other, names(5))) == (3, 5)
        assert listed(client, MINE)["departures"] == {"expired": 6}
        assert {why.reason for why in client.why([*names(5), "alone"])} == {"expired"}
        wait_until(lambda: {why.reason for why in client.why(names(5))} == {"expired"})
        assert put(client, names(5)).stored == 5, "it may be stored again"


# -- dropping ---------------------------------------------------------------------------------------------------------


def test_dropped_on_all_nodes_and_from_no_other_namespace():
    with cluster(3) as running:
        clients = [running.client(MINE, node=node) for node in range(3)]
        others = [running.client(OTHER, node=node) for node in range(3)]
        for node in range(3):
            put(clients[node], names(30, f"of-{node}-"))
            put(clients[node].using(MINE.with_fields(salt="tenant")), names(3, f"of-{node}-"))
            put(others[node], names(30, f"of-{node}-"))
        clients[0].configure(ttl_s=500)
        assert clients[1].drop_namespace() == 99
        running.settle()
        for node in range(3):
            assert here(clients[0], names(30, f"of-{node}-")) == 0
            assert here(others[0], names(30, f"of-{node}-")) == 30
        assert {why.reason for why in clients[2].why(names(30, "of-0-"))} == {"dropped"}
        found = listed(clients[0], MINE)
        assert (found["chunks"], found["config"]) == (0, NamespaceConfig())
        assert found["departures"] == {"dropped": 99}
        assert put(clients[0], names(30, "of-0-")).stored == 30, "it is opened again"
        assert here(clients[0], names(30, "of-0-")) == 30
        assert clients[1].drop_namespace() == 30, "and again"


@pytest.mark.slow
def test_a_hundred_thousand_chunks_are_dropped():
    count = 100_000
    with cluster(1, arena_nbytes="1 GiB", extent_nbytes="1 MiB", max_chunks=150_000) as running:
        client, other = running.client(MINE), running.client(OTHER)
        rng = np.random.default_rng(7)
        mine, theirs = (rng.integers(0, 1 << 63, (count, 2), np.uint64), rng.integers(0, 1 << 63, (1000, 2), np.uint64))
        for first in range(0, count, 4096):
            some = mine[first : first + 4096]
            assert client.put(some, [bytes(64)] * len(some), depth=first).stored == len(some)
        assert other.put(theirs, [bytes(64)] * len(theirs)).stored == len(theirs)
        client.flush()
        running.settle()
        node = running.nodes[0]
        used = node.store.used_nbytes
        began_s = time.monotonic()
        assert client.drop_namespace() == count
        print(f"a namespace of {count:,} chunks dropped in {time.monotonic() - began_s:.3f} s")
        assert node.store.used_nbytes <= used - count * 4096
        assert node.store.chunks == len(theirs)
        running.settle()
        assert other.exists(theirs).all()
        assert not client.exists(mine).any()
        assert int(node.store.allocator.slots.free_nbytes) >= count * 4096


def test_pinned_chunks_of_a_dropped_namespace_keep_their_bytes_until_they_are_unpinned():
    with cluster(1) as running:
        client = running.client(MINE)
        put(client, names(6))
        client.flush()
        with client.pin(names(2)) as pins:
            assert client.drop_namespace() == 6
            assert client.exists(names(6)).sum() == 0
            assert [bytes(view[:2]) for view in pins.views] == [b"n0", b"n1"]
            assert pins.valid()
        assert here(client, names(6)) == 0
        assert listed(client, MINE)["departures"] == {"dropped": 6}
        store = running.nodes[0].store
        assert store.used_nbytes == store.lent_nbytes, "the slots are free again"


@pytest.mark.slow
def test_writers_go_on_while_their_namespace_is_dropped():
    with cluster(1) as running:
        clients = [running.client(MINE) for _ in range(2)]
        client, stop, read_failures = running.client(MINE), threading.Event(), []

        def write(mine: raykv.Client, prefix: str) -> None:
            number = 0
            while not stop.is_set():
                done = put(mine, names(4, f"{prefix}{number}-"), wait=number % 3 > 0)
                if done.skipped:
                    read_failures.append(done)
                number += 1
            if (rest := mine.flush()).skipped:
                read_failures.append(rest)

        threads = [
            threading.Thread(target=write, args=(each, f"w{number}-"), name="raykv-test")
            for number, each in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        dropped = 0
        for _ in range(40):
            dropped += client.drop_namespace()
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        print(f"{dropped} chunks dropped under two writers")
        assert dropped
        assert not read_failures
        client.drop_namespace()
        assert running.nodes[0].store.chunks == 0
        reservation = client.reserve(names(2), NBYTES)
        client.drop_namespace()
        for view in reservation.views:
            view[:] = b"r" * NBYTES
        assert reservation.commit().stored == 2, "begun before, ended after"
        client.drop_namespace()
        for each in clients:
            each.close()
        assert running.nodes[0].store.chunks == 0


def test_a_node_that_was_away_drops_when_it_is_back(shm_dir: Path):
    with cluster(2, shm_dir=str(shm_dir)) as running:
        client, asleep = running.client(MINE), running.client(MINE, node=1)
        asleep.configure(ttl_s=500, policy="fifo", dram_quota_nbytes="1 MiB")
        put(client, names(10))
        put(asleep, names(10, "far"))
        put(running.client(OTHER, node=1), names(10, "far"))
        asleep.flush()
        running.settle()
        node = running.nodes[1]
        path = registry_paths(node.config)[0]
        assert path.exists()
        node.stop(leave=True)
        restarted = next_life(node, running, start=False)
        assert restarted.store.recovered == 20
        assert restarted.reconciler.registry.config(MINE.digest).policy == "fifo", "before it heard from the directory"
        assert restarted.store.evictor.policies.name(restarted.store.groups.find(MINE.digest)) == "fifo"
        restarted.store.close()
        assert client.drop_namespace() == 10
        again = next_life(node, running)
        assert again.store.chunks == 10, "those of the other namespace"
        assert again.reconciler.registry.config(MINE.digest) == NamespaceConfig()
        again.stop(unlink=True)
        assert not path.exists()


# -- quotas under writers of several processes ------------------------------------------------------------------------

WRITER = """
import sys, numpy as np, raykv
address, number = sys.argv[1], int(sys.argv[2])
client = raykv.connect(raykv.Namespace(model="mine"), address=address)
sys.stdin.readline()
rng = np.random.default_rng(number)
for turn in range(150):
    keys = rng.integers(0, 1 << 63, (int(rng.integers(1, 9)), 2), np.uint64)
    client.put(keys, [bytes(int(rng.choice([5000, 20000])))] * len(keys), chained=False, wait=bool(turn % 2))
client.flush()
"""


@pytest.mark.slow
def test_a_quota_holds_under_writers_of_several_processes(shm_dir: Path, seed: int):
    quota, extent = 2 << 20, 256 << 10
    storage = {"arena_nbytes": "16 MiB", "extent_nbytes": extent, "shm_dir": str(shm_dir)}
    with raykv.embedded(1, **storage) as running:
        client, other = running.client(MINE), running.client(OTHER)
        keys = chunk_keys.named(b"k" * 16, names(300))
        assert other.put(keys, [bytes(10_000)] * 300, chained=False).stored == 300
        client.configure(dram_quota_nbytes=quota)
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, running.address(), str(seed + number)],
                stdin=subprocess.PIPE,
                text=True,
            )
            for number in range(3)
        ]
        allocator = running.nodes[0].store.allocator
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        most = 0
        while any(writer.poll() is None for writer in writers):
            most = max(most, int(allocator.used_nbytes[running.nodes[0].store.groups.find(MINE.digest)]))
            time.sleep(0.001)
        for writer in writers:
            writer.stdin.close()
            assert writer.returncode == 0
        print(f"at most {most:,} of {quota:,} bytes")
        assert quota - extent <= most <= quota + extent
        assert other.exists(keys).all()


@pytest.mark.slow
def test_an_ssd_is_part_of_it(shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demotion, "AHEAD_NBYTES", 0)  # the quota of the SSD is less than half of the arena
    ssd = {"paths": [tmp_path], "capacity_nbytes": "32 MiB", "segment_nbytes": "1 MiB"}
    with cluster(1, shm_dir=shm_dir, ssd=ssd) as running:
        client, other, node = running.client(MINE), running.client(OTHER), running.nodes[0]
        client.configure(tiers="ssd", ssd_quota_nbytes="2 MiB")
        other.configure(tiers="dram")
        put(other, names(20))
        for number in range(20):
            put(client, names(50, f"{number}-"))
            client.flush()
            time.sleep(0.01)

        def below(namespace: raykv.Namespace) -> int:
            return listed(client, namespace)["below_nbytes"]["ssd"]

        wait_until(lambda: below(MINE) > 1 << 20)
        print(f"{below(MINE):,} bytes on the SSD")
        assert below(MINE) <= 2 << 20
        assert below(OTHER) == 0
        every = [f"{number}-{place}" for number in range(20) for place in range(50)]
        was_below = [
            name for name, why in zip(every, client.why(every), strict=True) if why.tier == "ssd" and why.nbytes
        ]
        assert client.delete(was_below[:2]) == 2
        assert {(why.reason, why.tier) for why in client.why(was_below[:2])} == {("deleted", "ssd")}
        del was_below[:2]
        assert client.drop_namespace() >= len(was_below) > 50
        assert below(MINE) == 0
        assert {(why.reason, why.tier) for why in client.why(was_below)} == {("dropped", "ssd")}
        put(client, ["x"])
        client.flush()
        client.configure(tiers="ssd")
        put(client, names(300, "again"))
        client.flush()
        wait_until(lambda: below(MINE) > 0)
        node.stop(leave=True)
        for path in shm_dir.iterdir():  # as if the host had restarted
            path.unlink()
        restarted = next_life(node, running)
        wait_until(lambda: restarted.mover.stats()["tiers"]["ssd"]["state"] == "on")
        number = restarted.store.groups.find(MINE.digest)
        assert restarted.mover.tiers[0].used_nbytes(number) > 0, "what was stored since the drop is still there"
        restarted.stop(unlink=True)
