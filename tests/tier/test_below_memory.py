"""Nodes with an SSD below their memory, through their sockets and on a real disk."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raykv
from raykv.embedded import EmbeddedCluster

SPACE = raykv.Namespace(model="m")
NBYTES = 50_000
MIB = 1 << 20


def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(NBYTES)


def names(count: int, prefix: str = "chunk") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def cluster_on(path: Path, nodes: int = 1, **storage: Any) -> EmbeddedCluster:
    ssd = {"paths": [str(path)], "capacity_nbytes": 64 * MIB, "segment_nbytes": 4 * MIB, "io_timeout_s": 1.0}
    return raykv.embedded(nodes, arena_nbytes=4 * MIB, extent_nbytes=MIB, heartbeat_s=0.03, ssd=ssd, **storage)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with cluster_on(tmp_path, 2) as made:
        yield made


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.01)


def ssd_of(cluster: EmbeddedCluster, node: int = 0) -> dict[str, Any]:
    return cluster.nodes[node].stats()["tiers"]["ssd"]


def put(client: raykv.Client, some: list[str], **options: Any) -> int:
    return client.put(some, [content(name) for name in some], **options).stored


def get(client: raykv.Client, some: list[str]) -> int:
    """How many leading chunks come, all right."""
    into = [bytearray(NBYTES) for _ in some]
    got = client.get(some, into)
    assert all(into[n] == content(some[n]) for n, hit in enumerate(got.hits) if hit)
    return got.prefix


def sink(cluster: EmbeddedCluster, client: raykv.Client, some: list[str]) -> None:
    """Store and read chunks, and push them out of memory by others, until all are on the SSD and none in memory."""
    for start in range(0, len(some), 5):
        put(client, some[start : start + 5])
        assert get(client, some[start : start + 5]) == len(some[start : start + 5])
    push_out(cluster, client, some)


def push_out(cluster: EmbeddedCluster, client: raykv.Client, some: list[str]) -> None:
    """The same with what is there."""
    node, keys = cluster.nodes[0], client.keys(some)
    until_s = time.monotonic() + 30.0
    number = 0
    while True:
        client.flush()
        in_memory = node.store.table.find_ready(keys, 1)[0] >= 0
        below = node.tiers.has(keys)
        if below.all() and not in_memory.any():
            break
        assert time.monotonic() < until_s, (in_memory, below)
        for name in (some[place] for place in range(len(some)) if not (below[place] or in_memory[place])):
            # Evicted before it was written down, as may happen on a busy machine: it is computed again.
            put(client, [name], chained=False)
            assert get(client, [name]) == 1
        put(client, names(3, f"filler-{until_s}-{number}"), chained=False)
        number += 1
        time.sleep(0.01)
    cluster.settle()


@pytest.mark.slow
def test_what_left_memory_is_read_from_the_ssd_here_and_from_elsewhere(cluster):
    here, there = cluster.client(SPACE), cluster.client(SPACE, node=1)
    sink(cluster, here, names(30))
    wait_until(lambda: here.match(names(30)).soon == 30, "its owner knows that it is cold")
    assert there.match(names(30)).count == 30
    assert get(here, names(30)) == 30
    assert here.match(names(30)).count == 30
    push_out(cluster, here, names(30))
    assert get(there, names(30)) == 30
    push_out(cluster, here, names(30))
    into = bytearray(NBYTES)
    assert there.get_one(there.key("chunk-7"), memoryview(into))
    assert into == content("chunk-7")
    into = bytearray(NBYTES)
    assert here.get_one(here.key("chunk-8"), memoryview(into))
    assert into == content("chunk-8")
    pins = here.pin(["chunk-9"])
    assert bytes(pins.views[0]) == content("chunk-9")
    pins.release()
    assert cluster.nodes[0].stats()["promoted"] >= 63


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 66])
def test_what_others_bring_up_in_the_same_moment_is_read(cluster, count, monkeypatch):
    with cluster.client(SPACE, node=0) as client:
        push_out(cluster, client, names(count))
        tiers = cluster.nodes[0].tiers
        promote = tiers.promote

        def promote_after_others(keys, *, until_s):
            everything = client.keys(names(count))
            wait_until(lambda: not promote(everything, until_s=time.monotonic() + 5.0), "all to be in memory")
            return promote(keys, until_s=until_s)

        monkeypatch.setattr(tiers, "promote", promote_after_others)
        router = client._router
        local, router.local = router.local, None
        monkeypatch.setattr(router, "host", "elsewhere")
        try:
            into = [bytearray(len(content(name))) for name in names(count)]
            assert client.get(names(count), into).prefix == count
            assert [bytes(chunk) for chunk in into] == [content(name) for name in names(count)]
        finally:
            router.local = local


def test_a_match_may_have_it_brought_up(cluster):
    client = cluster.client(SPACE)
    sink(cluster, client, names(10))
    wait_until(lambda: client.match(names(10)).soon == 10, "its owner knows that it is cold")
    assert client.match(names(10), promote=True).soon == 10
    wait_until(lambda: client.match(names(10)).soon == 0, "it is in memory")
    assert get(client, names(10)) == 10


def test_a_new_process_finds_what_was_on_the_ssd(tmp_path):
    with cluster_on(tmp_path) as cluster:
        client = cluster.client(SPACE)
        sink(cluster, client, names(30))
        client.delete(names(5))
    with cluster_on(tmp_path) as cluster:  # its memory is another one
        client = cluster.client(SPACE)
        wait_until(lambda: ssd_of(cluster)["state"] == "on", "the segments were read")
        wait_until(lambda: client.exists(names(30)).sum() == 25, "their owner was told")
        assert not client.exists(names(5)).any()
        assert get(client, names(30)[5:]) == 25


@pytest.mark.slow
def test_a_scan_is_not_written(cluster):
    client = cluster.client(SPACE)
    count = 10 * 4 * MIB // NBYTES
    for start in range(0, count, 8):
        put(client, names(8, f"scan-{start}"), chained=start % 16 == 0)
    client.flush()
    time.sleep(0.3)
    stats = cluster.nodes[0].stats()
    assert stats["evicted"] > count // 2
    assert ssd_of(cluster)["disk_nbytes"] < 0.05 * count * NBYTES


@pytest.mark.slow
def test_deleted_and_dropped_chunks_are_removed_from_the_tiers_too(cluster):
    client, other = cluster.client(SPACE), cluster.client(raykv.Namespace(model="other"))
    sink(cluster, client, names(10))
    sink(cluster, other, names(10, "others"))
    assert client.delete(names(3)) == 3
    assert get(client, names(3)[:1]) == 0
    assert get(client, names(10)[3:]) == 7
    client.drop_namespace()
    wait_until(lambda: not client.exists(names(10)).any(), "owners were told")
    assert get(client, names(10)[3:]) == 0
    assert get(other, names(10, "others")) == 10


@pytest.mark.slow
def test_without_its_directory_the_tier_is_off_and_requests_go_on(tmp_path):
    with cluster_on(tmp_path / "drive") as cluster:
        client = cluster.client(SPACE, timeout_s=3.0)
        sink(cluster, client, names(20))
        shutil.rmtree(tmp_path / "drive")
        began_s = time.monotonic()
        for start in range(0, 200, 10):
            some = names(10, f"more-{start}")
            assert put(client, some) == 10
            assert get(client, some) == 10
            get(client, names(20)[start // 10 :][:1])
        assert time.monotonic() - began_s < 60.0
        wait_until(lambda: ssd_of(cluster)["state"] == "off", "the tier says that it is off")
        assert ssd_of(cluster)["paths"][0]["reason"]
        assert put(client, names(5, "last")) == 5
        assert get(client, names(5, "last")) == 5
