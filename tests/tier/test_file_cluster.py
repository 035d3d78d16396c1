"""Clusters that share a directory: each reads chunks of the other clusters without a connection to them."""

from pathlib import Path
from typing import Any

import pytest

import raykv
from raykv.embedded import EmbeddedCluster
from tests.support.tier_clusters import MIB, SPACE, get, names, put, sink, wait_until


def cluster_on(path: Path, name: str, nodes: int = 1, **storage: Any) -> EmbeddedCluster:
    shared = {
        "path": path / "shared",
        "capacity_nbytes": 64 * MIB,
        "pack_nbytes": 2 * MIB,
        "scan_s": 0.1,
        "seal_s": 0.5,
    }
    fields = {"arena_nbytes": 4 * MIB, "extent_nbytes": MIB, "heartbeat_s": 0.03, **storage}
    return raykv.embedded(nodes, name=name, file=shared, **fields)


def file_of(cluster: EmbeddedCluster, node: int = 0) -> dict[str, Any]:
    return cluster.nodes[node].stats()["tiers"]["file"]


def started(cluster: EmbeddedCluster) -> None:
    wait_until(lambda: all(file_of(cluster, n)["state"] == "on" for n in range(len(cluster.nodes))), "on")


@pytest.mark.slow
def test_a_cluster_gets_what_another_one_left(tmp_path):
    some = names(30)
    with cluster_on(tmp_path, "a", 2) as first:
        started(first)
        client = first.client(SPACE)
        sink(first, client, some)
        assert get(client, some) == 30
    with cluster_on(tmp_path, "b", 3) as second:
        started(second)
        wait_until(lambda: file_of(second)["chunks"] >= 30, "they are found")
        assert second.nodes[0].store.groups.find(SPACE.group.digest) is None, (
            "groups of other clusters take no number here"
        )
        client = second.client(SPACE, node=1)
        wait_until(lambda: client.match(some).below_memory == 30, "owners answer for it")
        assert client.exists(some).all()
        assert get(client, some) == 30
        assert get(second.client(SPACE, node=2), some) == 30
        assert len(second.nodes[0].mover.keys()) == 0, "only the writer announces it"
        stranger = second.client(raykv.Namespace(model="another"))
        assert stranger.match(some).count == 0
        assert sum(file_of(second, node)["read_nbytes"] for node in range(3)) >= 30 * 50_000


@pytest.mark.slow
def test_two_clusters_share_it_while_both_live(tmp_path):
    with cluster_on(tmp_path, "a") as one, cluster_on(tmp_path, "b") as two:
        started(one)
        started(two)
        here, there = one.client(SPACE), two.client(SPACE)
        sink(one, here, names(20))
        wait_until(lambda: there.match(names(20)).count == 20, "it is published, and seen")
        assert get(there, names(20)) == 20
        assert there.delete(names(5)) >= 5
        wait_until(lambda: not here.exists(names(5)).any(), "deleted for others too")
        assert here.exists(names(20)[5:]).all()


@pytest.mark.slow
def test_below_an_ssd_too(tmp_path):
    drives = {"paths": [str(tmp_path / "ssd")], "capacity_nbytes": 64 * MIB, "segment_nbytes": 4 * MIB}
    with cluster_on(tmp_path, "a", ssd=drives) as first:
        started(first)
        client = first.client(SPACE)
        sink(first, client, names(20))
        wait_until(lambda: file_of(first)["chunks"] >= 20, "both got them")
        assert set(first.nodes[0].stats()["tiers"]) == {"ssd", "file"}
        assert get(client, names(20)) == 20
        assert file_of(first)["read_nbytes"] == 0, "the faster one is asked"
    with cluster_on(tmp_path, "b") as second:
        started(second)
        client = second.client(SPACE)
        wait_until(lambda: client.match(names(20)).count == 20, "seen")
        assert get(client, names(20)) == 20


@pytest.mark.slow
def test_a_dropped_namespace_is_removed_from_the_directory(tmp_path):
    with cluster_on(tmp_path, "a") as first:
        started(first)
        sink(first, first.client(SPACE), names(20))
    with cluster_on(tmp_path, "b") as second:
        started(second)
        client = second.client(SPACE)
        wait_until(lambda: client.match(names(20)).count == 20, "seen")
        client.drop_namespace()
        wait_until(lambda: client.match(names(20)).count == 0, "dropped")
        assert put(client, names(1)) == 1
    with cluster_on(tmp_path, "c") as third:
        started(third)
        client = third.client(SPACE)
        wait_until(lambda: file_of(third)["packs"] >= 1, "learned")
        assert client.match(names(20)).count == 0
