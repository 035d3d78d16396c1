"""A node that is drained moves what only its tiers have, too. Real SSD tiers, in a directory."""

import errno
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raykv
from raykv.embedded import EmbeddedCluster
from raykv.memory.slots import slot_nbytes
from raykv.node import moving
from raykv.node.drain_below import parents_first
from raykv.tier.segments.format import key_array, raw_keys
from raykv.tier.segments.volume import Volume
from tests.support.drains import drain, drained, leave, lower, stored_on
from tests.support.nodes import NBYTES, SPACE, content, get, names, put, wait_until

MIB = 1 << 20


def cluster_on(path: Path, nodes: int, **storage: Any) -> EmbeddedCluster:
    ssd = {"paths": [str(path)], "capacity_nbytes": 32 * MIB, "segment_nbytes": MIB, "io_timeout_s": 2.0}
    fields = {"arena_nbytes": 4 * MIB, "extent_nbytes": 64 << 10, "heartbeat_s": 0.03, "ssd": ssd, **storage}
    return raykv.embedded(nodes, **fields)


def sunk(running: EmbeddedCluster, node: int, some: list[str], **options: Any) -> None:
    """Store chunks on a node, and move them to its tier."""
    with running.client(SPACE, node=node) as client:
        for first in range(0, len(some), 20):
            part = some[first : first + 20]
            assert put(client, part, chained=False, **options).stored == len(part)
            lower(running.nodes[node], client.keys(part))


def fill(running: EmbeddedCluster, node: int) -> list[str]:
    """Fill the memory of a node until no slot is free without eviction. Returns the names of the chunks."""
    store, some = running.nodes[node].store, list[str]()
    while spare := store.evictor.spare_slots(slot_nbytes(NBYTES)):  # a client that closes gives unused slots back
        part = names(spare, f"filler-{node}-{len(some)}")
        with running.client(SPACE, node=node) as client:
            some += part[: put(client, part, chained=False).stored]
    running.settle()
    return some


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "RUN_NBYTES", 4 * NBYTES)


def test_every_chunk_of_the_ssd_is_read_from_the_other_nodes_after_the_node_has_left(tmp_path):
    with cluster_on(tmp_path, 3) as running:
        below, memory = names(50), names(20, "memory")
        sunk(running, 2, below)
        with running.client(SPACE, node=2) as client:
            put(client, memory)
        running.settle()
        progress = drained(running, 2)
        assert (progress.moved, progress.below_memory, progress.left, progress.reason) == (70, 50, 0, "")
        assert progress.moved_nbytes == 70 * NBYTES
        assert running.nodes[2].store.lent_nbytes == 0
        leave(running, 2)
        assert get(running.client(SPACE), [*below, *memory]) == (True,) * 70


def test_chains_and_expiry_of_chunks_below_memory_are_the_same_afterwards(tmp_path):
    with cluster_on(tmp_path, 2) as running:
        client = running.client(SPACE, node=1)
        trunk = client.chain(list(range(12)))
        branch = client.chain([*range(6), *range(100, 106)])
        for keys, tag in ((trunk, "t"), (branch, "b")):
            tags = ["t" if place < 6 else tag for place in range(12)]
            client.put(keys, [content(f"{tags[place]}-{place}", 9000) for place in range(12)], ttl_s=500.0)
        everything = np.concatenate([trunk, branch[6:]])
        lower(running.nodes[1], everything)
        running.settle()
        progress = drained(running, 1)
        assert (progress.moved, progress.left) == (18, 0)
        leave(running, 1)
        store = running.nodes[0].store
        columns = store.table.columns
        for keys in (trunk, branch):
            rows = store.table.find(keys)
            assert columns.depth[rows].tolist() == list(range(12))
            assert columns.parent[rows].tolist() == [-1, *rows[:-1].tolist()]
            left_s = [store.table.seconds(tick) - time.monotonic() for tick in columns.expires[rows].tolist()]
            assert all(400.0 < each < 500.0 for each in left_s)


def test_what_no_memory_takes_goes_through_it_to_an_ssd(tmp_path):
    with cluster_on(tmp_path, 2) as running:
        below, memory = names(40), names(20, "memory")
        sunk(running, 1, below)
        with running.client(SPACE, node=1) as client:
            put(client, memory)
        fillers = fill(running, 0)
        store, tier = running.nodes[0].store, running.nodes[0].mover.tiers[0]
        progress = drained(running, 1)
        assert (progress.moved, progress.left, progress.reason) == (60, 0, "")
        client = running.client(SPACE)
        assert all(stored_on(running, 0, client.keys(fillers))), "memory keeps what it had"
        assert not any(stored_on(running, 0, client.keys([*below, *memory])))
        assert tier.has(client.keys([*below, *memory])).all()
        assert (store.counters.evicted, store.lent_nbytes, store.allocator.transit_nbytes) == (0, 0, 0)
        leave(running, 1)
        for name in (*below, *memory):
            assert get(client, [name]) == (True,)


def test_an_ssd_that_would_have_to_reclaim_takes_nothing(tmp_path):
    ssd = {"paths": [str(tmp_path)], "capacity_nbytes": 6 * MIB, "segment_nbytes": MIB}
    with cluster_on(tmp_path, 2, ssd=ssd) as running:
        theirs = names(50, "theirs")
        sunk(running, 0, theirs)
        sunk(running, 1, names(60))
        fill(running, 0)
        tier = running.nodes[0].mover.tiers[0]
        progress = drained(running, 1)
        client = running.client(SPACE)
        assert tier.has(client.keys(theirs)).all()
        assert (progress.moved + progress.left, progress.reason) == (60, "no other node has room")
        assert 0 < progress.moved < 60
        assert tier.has(client.keys(names(60))).sum() == progress.moved
        assert progress.left_nbytes == progress.left * NBYTES


def test_chunks_that_stay_in_memory_and_are_not_taken_are_not_evicted_for_those_below(tmp_path):
    with cluster_on(tmp_path, 2) as running:
        sunk(running, 1, names(30))
        running.client(SPACE).configure(tiers="dram")  # so that the other node may not take them below memory
        fill(running, 0)
        mine = fill(running, 1)
        progress = drained(running, 1)
        assert progress.left == 30 + len(mine)
        assert progress.moved == 0
        assert all(stored_on(running, 1, running.client(SPACE).keys(mine)))
        store = running.nodes[1].store
        assert not store.table.columns.pins[store.table.ready_rows()].any()


def test_the_rate_is_kept_below_memory(tmp_path):
    with cluster_on(tmp_path, 2) as running:
        sunk(running, 1, names(40))
        began_s = time.monotonic()
        drained(running, 1, rate=40 * NBYTES / 0.8)
        assert time.monotonic() - began_s >= 0.75


def test_a_target_that_dies_while_it_gets_chunks_of_the_ssd(tmp_path, short_runs):
    with cluster_on(tmp_path, 3) as running:
        sunk(running, 2, names(40))
        running.settle()
        drain(running, 2, rate=40 * NBYTES / 0.5)
        progress = running.nodes[2].drain.progress
        wait_until(lambda: progress.moved > 5)
        running.kill(1)
        wait_until(lambda: progress.state == "done", timeout_s=60.0)
        assert progress.left == 0
        client = running.client(SPACE)
        here = stored_on(running, 0, client.keys(names(40)))
        assert progress.moved + progress.elsewhere >= 40
        assert sum(here) >= 20, "at least what was not sent to the other node before"


def test_a_drive_that_fails_in_the_middle(tmp_path, short_runs, monkeypatch):
    with cluster_on(tmp_path, 2) as running:
        sunk(running, 1, names(60))
        running.settle()
        read, failing = Volume.read, threading.Event()

        def read_or_fail(volume: Volume, *given: Any) -> int:
            if failing.is_set():
                raise OSError(errno.ENODEV, "the drive is gone")
            return read(volume, *given)

        monkeypatch.setattr(Volume, "read", read_or_fail)
        progress = running.nodes[1].drain.progress
        drain(running, 1, rate=60 * NBYTES / 1.0)
        wait_until(lambda: progress.moved > 5)
        failing.set()
        wait_until(lambda: progress.state == "done")
        assert progress.moved + progress.left == progress.below_memory == 60
        assert progress.left > 0
        assert progress.left_nbytes == progress.left * NBYTES
        assert "tier 'ssd' is off" in progress.reason, progress.reason
        assert "the drive is gone" in progress.reason
        assert sum(stored_on(running, 0, running.client(SPACE).keys(names(60)))) == progress.moved


def test_a_damaged_chunk_of_the_ssd_is_left_and_the_others_are_moved(tmp_path):
    with cluster_on(tmp_path, 2) as running:
        sunk(running, 1, names(20))
        running.settle()
        for path in tmp_path.glob("*node-1/*"):
            data = path.read_bytes()
            if (at := data.find(content("chunk-7")[:64])) >= 0:
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        progress = drained(running, 1)
        assert (progress.moved, progress.left, progress.left_nbytes) == (19, 1, NBYTES)
        assert "not readable" in progress.reason


def test_chunks_of_a_shared_directory_stay_where_they_are(tmp_path):
    file = {"path": str(tmp_path / "shared"), "capacity_nbytes": 32 * MIB, "pack_nbytes": MIB, "seal_s": 0.1}
    with cluster_on(tmp_path, 2, ssd=None, file={**file, "scan_s": 0.05}) as running:
        sunk(running, 1, names(20))
        running.settle()
        progress = drained(running, 1)
        assert (progress.moved, progress.elsewhere, progress.below_memory, progress.left) == (0, 20, 20, 0)
        leave(running, 1)
        client = running.client(SPACE)
        wait_until(lambda: running.nodes[0].mover.tiers[0].has(client.keys(names(20))).all())
        assert get(client, names(20)) == (True,) * 20


def test_chunks_that_others_hold_are_not_sent_again(tmp_path):
    # Long heartbeats: the drain waits two for the owners of the keys, and a busy machine needs more than 0.06 s.
    with cluster_on(tmp_path, 3, heartbeat_s=0.5) as running:
        sunk(running, 2, names(20))
        with running.client(SPACE, node=0) as client:
            put(client, names(8))
        sunk(running, 1, names(12)[8:])
        running.settle()
        progress = drained(running, 2)
        assert (progress.moved, progress.elsewhere, progress.left) == (8, 12, 0)


def test_stopping_a_node_ends_its_drain_of_a_tier(tmp_path):
    with cluster_on(tmp_path, 2) as running:
        sunk(running, 1, names(40))
        drain(running, 1, rate=50_000.0)
        wait_until(lambda: running.nodes[1].drain.progress.moved > 0)
        began_s = time.monotonic()
        running.nodes[1].stop(unlink=True)
        assert time.monotonic() - began_s < 3.0
        assert running.nodes[1].failure is None
        assert running.nodes[1].drain.progress.state == "moving"


def test_parents_come_before_their_children_and_the_most_read_trees_first(rng: random.Random):
    count = 300
    keys = [rng.randbytes(16) for _ in range(count)]
    parent = [rng.randrange(place) if place and rng.random() < 0.8 else -1 for place in range(count)]
    depths = [0] * count
    for place in range(count):
        depths[place] = depths[parent[place]] + 1 if parent[place] >= 0 else 0
    reads = [rng.randrange(20) for _ in range(count)]
    here = [place for place in range(count) if rng.random() < 0.9]
    rng.shuffle(here)
    above = [keys[parent[place]] if parent[place] >= 0 else bytes(16) for place in here]
    order = parents_first(
        key_array([keys[place] for place in here]),
        key_array(above),
        np.array([depths[place] for place in here]),
        np.array([reads[place] for place in here]),
    )
    moved = [here[at] for at in order.tolist()]
    assert sorted(moved) == sorted(here)

    def root(place: int) -> int:
        return root(parent[place]) if parent[place] in here else place

    most = {top: max(reads[place] for place in here if root(place) == top) for top in map(root, here)}
    values = [most[root(place)] for place in moved]
    assert values == sorted(values, reverse=True)
    for at, place in enumerate(moved):
        assert parent[place] not in moved[at:]
    assert raw_keys(key_array(above)) == above
