"""Real processes: scale from 4 nodes to 5 and back, a directory that is away, and a node with an old arena."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chaos.children import ask_all
from tests.chaos.cluster import DIRECTORY, Cluster
from tests.chaos.hosts import missing
from tests.support.nodes import wait_until
from tests.support.soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

HOSTS = ["h1", "h2", "h3", "h4"]
SHARED = [f"chunk-{number}" for number in range(100)]
"""Chunks of 25 MiB together. With what the load stores, they fit into one arena."""
SAMPLE = [f"sample-{number}" for number in range(20_000)]


@pytest.fixture
def cluster(seed: int) -> Iterator[Cluster]:
    """Five hosts, of which four have a node. The load fits into memory, so that nothing is evicted."""
    made = Cluster([*HOSTS, "h5"], seed=seed)
    try:
        made.start(HOSTS, prompts=20, fresh=0.0)
        made.converge(30.0)
        for number, host in enumerate(HOSTS):
            assert made.clients[host].ask("write", names=SHARED[number::4])
        made.start_load()
        yield made
        made.collect()
        assert made.problems == []
    finally:
        made.close()


def hit_ratio(cluster: Cluster, seconds: float) -> float:
    """Return the hit ratio of the load during the next seconds."""
    cluster.collect()
    time.sleep(seconds)  # the load runs meanwhile
    found = cluster.collect()
    return found["hit"] / (found["hit"] + found["missed"])


def misses(cluster: Cluster) -> dict[str, int]:
    """Return how many of SHARED each host does not read."""
    hits = ask_all({host: cluster.clients[host] for host in HOSTS}, "read", names=SHARED)
    return {host: hits[host].count(False) for host in HOSTS}


def owners(cluster: Cluster) -> list[str]:
    found: list[str] = cluster.clients["h1"].ask("owners", names=SAMPLE)
    return found


def test_scale_out_and_in_again_under_load(cluster: Cluster):
    wait_until(lambda: hit_ratio(cluster, 1.0) > 0.99, 60.0)
    before, ratio_before = owners(cluster), hit_ratio(cluster, 3.0)

    cluster.start_node("h5")
    cluster.wait_ready()
    joined_s = cluster.converge(5.0)
    during = owners(cluster)
    moved = [now for was, now in zip(before, during, strict=True) if was != now]
    ideal = len(SAMPLE) / 5
    assert set(moved) == {"h5"}
    assert 0.9 * ideal < len(moved) < 1.1 * ideal
    wait_until(lambda: not any(misses(cluster).values()), 5.0)

    assert cluster.clients["h5"].ask("write", names=[f"late-{number}" for number in range(40)])
    held = cluster.owners["h5"].ask("stats")["chunks"]
    result = cluster.drain("h5")
    drained_s = cluster.converge(5.0)
    assert result["left"] == result["below_memory"] == 0, result
    assert result["moved"] + result["elsewhere"] >= held >= 40, result
    assert owners(cluster) == before
    hits = ask_all({host: cluster.clients[host] for host in HOSTS}, "read", names=[f"late-{n}" for n in range(40)])
    lost = {host: each.count(False) for host, each in hits.items()}
    ratio_after = hit_ratio(cluster, 3.0)
    print(
        f"moved {len(moved) / len(SAMPLE):.3f} of the keys, ideal {ideal / len(SAMPLE):.3f}; converged in "
        f"{joined_s:.2f} s and {drained_s:.2f} s; hit ratio {ratio_before:.3f}, {ratio_after:.3f}; drain {result}"
    )
    assert not any(lost.values()), lost
    assert not any(misses(cluster).values())
    assert ratio_after > ratio_before - 0.01


def without_directory(cluster: Cluster, seconds: float) -> None:
    assert cluster.directory is not None
    wait_until(lambda: hit_ratio(cluster, 1.0) > 0.99, 60.0)
    cluster.directory.kill()
    ratio = hit_ratio(cluster, seconds)
    assert not any(misses(cluster).values())
    began_s = time.monotonic()
    cluster.start_directory()
    wait_until(lambda: not cluster.unsettled(), 3.0 - (time.monotonic() - began_s))
    print(f"{seconds} s without the directory: hit ratio {ratio:.3f}; back in {time.monotonic() - began_s:.2f} s")
    assert ratio > 0.99
    cluster.converge(5.0)


def test_the_directory_is_away_for_a_while(cluster: Cluster):
    without_directory(cluster, 4.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_directory_is_away_for_a_minute(cluster: Cluster):
    without_directory(cluster, soak("away_s", 60))


def test_a_node_returns_with_an_old_arena(cluster: Cluster):
    """While it was away, a namespace was dropped: what the node has of it is never served."""
    dropped, others = [f"old-{number}" for number in range(40)], cluster.clients
    for host in HOSTS:
        assert others[host].ask("write", names=dropped[HOSTS.index(host) :: 4], space="dropped")
    wait_until(lambda: all(others["h1"].ask("read", names=dropped, space="dropped")))
    cluster.stop_node("h4", unlink=False)
    wait_until(lambda: not cluster.unsettled())
    assert others["h1"].ask("drop", space="dropped") == 30

    cluster.start_node("h4")
    found: Counter[str] = Counter()

    def read_dropped() -> None:
        for host in (*HOSTS[:3], DIRECTORY):
            found[host] += sum(others[host].ask("read", names=dropped, space="dropped"))

    while not cluster.owners["h4"].has_answer():  # from before its start until it has joined
        read_dropped()
    cluster.wait_ready()
    while cluster.unsettled():
        read_dropped()
    read_dropped()
    found["h4"] += sum(others["h4"].ask("read", names=dropped, space="dropped"))
    assert found.total() == 0, found
    cluster.converge(5.0)
    assert not any(misses(cluster).values()), "the other chunks of the old arena are there"


@pytest.mark.soak
def test_two_clusters_on_the_same_hosts(cluster: Cluster, seed: int):
    """They have the same hosts and directory of files, and other names and secrets."""
    other = Cluster(HOSTS, seed=seed + 1, name="other", beneath=cluster)
    try:
        other.start(prompts=20, fresh=0.0)
        other.start_load()
        other.converge(30.0)
        cluster.converge(5.0)
        assert other.clients["h1"].ask("read", names=SHARED) == [False] * len(SHARED)
        assert other.clients["h2"].ask("write", names=SHARED[:10])
        other.collect()
        assert other.problems == []
        for host in HOSTS:
            other.stop_node(host, unlink=True)
    finally:
        other.close()
    cluster.converge(5.0)
    assert not any(misses(cluster).values())
