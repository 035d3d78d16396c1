"""Nodes with an SSD tier on a real disk. Clients reach them through sockets."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raykv
from raykv.embedded import EmbeddedCluster
from raykv.types import Holder
from tests.support.tier_clusters import (
    MIB,
    NBYTES,
    SPACE,
    content,
    get,
    names,
    push_out,
    put,
    sink,
    ssd_of,
    wait_until,
)


def cluster_on(path: Path, nodes: int = 1, **storage: Any) -> EmbeddedCluster:
    ssd = {"paths": [str(path)], "capacity_nbytes": 64 * MIB, "segment_nbytes": 4 * MIB, "io_timeout_s": 1.0}
    return raykv.embedded(nodes, arena_nbytes=4 * MIB, extent_nbytes=MIB, heartbeat_s=0.03, ssd=ssd, **storage)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with cluster_on(tmp_path, 2) as made:
        yield made


@pytest.mark.slow
def test_what_left_memory_is_read_from_the_ssd_here_and_from_elsewhere(cluster):
    here, there = cluster.client(SPACE), cluster.client(SPACE, node=1)
    sink(cluster, here, names(30))
    wait_until(lambda: here.match(names(30)).below_memory == 30, "its owner knows that they are below memory")
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
def test_prompts_of_half_the_arena_stored_in_large_steps_are_whole_on_the_ssd_when_asked_for_again(tmp_path):
    """Each step of the engine stores a quarter of the arena at once. All prompts together take three arenas."""
    with cluster_on(tmp_path) as cluster:
        client, step = cluster.client(SPACE), MIB // NBYTES
        prompts = [names(2 * step, f"prompt-{number}") for number in range(6)]
        found = []
        for _ in range(4):
            for prompt in prompts:
                found.append(get(client, prompt))
                for start in range(found[-1], len(prompt), step):
                    put(client, prompt[: start + step])
                    wait_until(lambda: quiet(cluster), "demotion and eviction have nothing to do")
        print(found)
        assert found[:12] == [0] * 12, "a prompt that was asked for once is not written"
        assert sum(found[18:]) >= 0.9 * 6 * 2 * step


@pytest.mark.slow
def test_slots_for_the_next_step_are_lent_while_the_tier_writes_what_they_replace(tmp_path, monkeypatch):
    """An engine gets slots at the begin of a step, just after the one before was stored. Memory holds one prompt."""
    write = os.pwritev

    def slow_write(*given):
        time.sleep(0.02)
        return write(*given)

    monkeypatch.setattr(os, "pwritev", slow_write)
    with cluster_on(tmp_path) as cluster:
        client, step = cluster.client(SPACE), MIB // NBYTES
        prompts = [names(3 * step, f"prompt-{number}") for number in range(4)]
        for prompt in 3 * prompts:
            for start in range(get(client, prompt), len(prompt), step):
                some, parent = prompt[start : start + step], client.keys(prompt[start - 1 : start])
                slots = client.reserve(some, NBYTES, parent=parent if start else None, depth=start)
                assert not slots.reason, (start, len(slots.views))
                time.sleep(0.05)  # the engine computes
                for view, position in zip(slots.views, slots.index, strict=True):
                    view[:] = content(some[position])
                slots.commit()


def quiet(cluster: EmbeddedCluster) -> bool:
    node = cluster.nodes[0]
    return not (node.mover.demotion.due or node.mover.demotion.writing or node.store.evictor.needs_eviction)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 66])
def test_a_reader_elsewhere_finds_chunks_that_others_promote_in_the_same_moment(cluster, count, monkeypatch):
    here, there = cluster.client(SPACE), cluster.client(SPACE, node=1)
    push_out(cluster, here, names(count))
    mover = cluster.nodes[0].mover
    promote = mover.promote

    def promote_after_others(keys, *, until_s):
        everything = here.keys(names(count))
        wait_until(lambda: not promote(everything, until_s=time.monotonic() + 5.0), "all to be in memory")
        return promote(keys, until_s=until_s)

    monkeypatch.setattr(mover, "promote", promote_after_others)
    assert get(there, names(count)) == count


def test_a_match_may_have_it_brought_up(cluster):
    client = cluster.client(SPACE)
    sink(cluster, client, names(10))
    wait_until(lambda: client.match(names(10)).below_memory == 10, "its owner knows that they are below memory")
    assert client.locate([*names(10), "missing"]) == [*[Holder("node-0", below_memory=True)] * 10, None]
    assert client.match(names(10), promote=True).low == tuple(range(10))
    wait_until(lambda: client.match(names(10)).below_memory == 0, "it is in memory")
    assert client.locate(names(10)) == [Holder("node-0")] * 10
    assert get(client, names(10)) == 10


def test_a_new_process_finds_what_was_on_the_ssd(tmp_path):
    with cluster_on(tmp_path) as cluster:
        client = cluster.client(SPACE)
        sink(cluster, client, names(30))
        client.delete(names(5))
    with cluster_on(tmp_path) as cluster:  # the nodes start with new memory, so only the SSD has the chunks
        client = cluster.client(SPACE)
        wait_until(lambda: ssd_of(cluster)["state"] == "on", "the segments were read")
        wait_until(lambda: client.exists(names(30)).sum() == 25, "their owner was told")
        assert not client.exists(names(5)).any()
        assert get(client, names(30)[5:]) == 25


@pytest.mark.slow
def test_a_chunk_that_is_stored_again_with_a_ttl_expires_below_too(cluster):
    client, node = cluster.client(SPACE), cluster.nodes[0]
    sink(cluster, client, names(5))
    put(client, names(5), ttl_s=0.5)
    wait_until(lambda: not node.mover.find(client.keys(names(5)))[1].any(), "the copies without an expiry are dropped")
    wait_until(lambda: not client.exists(names(5)).any(), "expired")
    assert get(client, names(5)) == 0


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


def in_use(cluster: EmbeddedCluster) -> str:
    """Return what keeps the first node's memory from being evicted."""
    node = cluster.nodes[0]
    columns = node.store.table.columns
    return f"rows by state {np.bincount(columns.state)}, pinned {np.count_nonzero(columns.pins)}, {node.mover.stats()}"


@pytest.mark.slow
def test_without_its_directory_the_tier_is_off_and_requests_go_on(tmp_path):
    with cluster_on(tmp_path / "drive") as cluster:
        client = cluster.client(SPACE, timeout_s=3.0)
        sink(cluster, client, names(20))
        shutil.rmtree(tmp_path / "drive")
        began_s = time.monotonic()
        for start in range(0, 200, 10):
            some = names(10, f"more-{start}")
            result = client.put(some, [content(name) for name in some])
            assert result.stored == 10, f"{result}, {in_use(cluster)}"
            assert get(client, some) == 10
            get(client, names(20)[start // 10 :][:1])
        assert time.monotonic() - began_s < 60.0
        wait_until(lambda: ssd_of(cluster)["state"] == "off", "the tier says that it is off")
        assert ssd_of(cluster)["paths"][0]["reason"]
        assert put(client, names(5, "last")) == 5
        assert get(client, names(5, "last")) == 5
