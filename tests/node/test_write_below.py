"""A Write with `below` stores chunks in a tier, through slots that are never committed, and replaces nothing."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raykv.config import NamespaceConfig
from raykv.memory.slots import slot_nbytes
from raykv.node.node import Node
from raykv.protocol import chunk_keys
from raykv.transport.bulk_write import BulkWrite
from raykv.transport.link import Link
from raykv.types import Batch, Hints, KeyArray
from tests.support.nodes import NBYTES, SPACE, Peer, content, names, running_node, wait_until

MIB = 1 << 20


def node_on(path: Path, **ssd: Any) -> Any:
    fields = {"paths": [str(path)], "capacity_nbytes": 16 * MIB, "segment_nbytes": MIB, **ssd}
    return running_node(storage={"ssd": fields})


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with node_on(tmp_path) as made:
        wait_until(lambda: made.mover.tiers[0].stats()["state"] == "on")
        yield made


def keys_of(some: list[str]) -> KeyArray:
    return chunk_keys.named(SPACE.digest, some)


def write(node: Node, some: list[str], nbytes: int = NBYTES, **fields: Any) -> tuple[int, int]:
    """Write chunks below memory, in as many steps as the node asks for. Returns how many were stored, and not taken."""
    stored, values = 0, [[memoryview(content(name, nbytes))] for name in some]
    with closing(Link.connect(node.member.local_address, b"", deadline_s=time.monotonic() + 5.0)) as link:
        while True:
            batch = Batch(keys_of(some), nbytes, **{"chained": False, **fields})
            bulk = BulkWrite(SPACE.group, batch, values, evict=False, below=True)
            now = bulk.send(link, deadline_s=time.monotonic() + 10.0)
            stored += now
            if not bulk.full or not now:
                return stored, bulk.full


def group_of(node: Node) -> int:
    return node.store.groups.open(SPACE.group)


def test_chunks_are_in_the_tier_with_their_metadata_and_not_in_memory(node):
    parent = keys_of(["parent"])
    now_s = time.time()
    some = names(3)
    assert write(node, some, parent=parent, depth=5, chained=True, hints=Hints(500.0, 7)) == (3, 0)
    raw = [b"", *(key.tobytes() for key in keys_of(some))]
    for place, found in enumerate(node.mover.tiers[0].find(keys_of(some))):
        assert found is not None
        assert (found.nbytes, found.depth, found.group) == (NBYTES, 5 + place, group_of(node))
        assert found.parent == (raw[place] or parent.tobytes())
        assert 490.0 < found.expires_s - now_s < 510.0
    assert (node.store.chunks, node.store.lent_nbytes, node.store.allocator.transit_nbytes) == (0, 0, 0)
    assert write(node, some) == (0, 0), "they are there already"


def test_the_namespace_decides_about_expiry_and_tiers(node):
    node.store.configure(group_of(node), NamespaceConfig(ttl_s=100.0), now_s=time.monotonic())
    assert write(node, ["a"]) == (1, 0)
    (found,) = node.mover.tiers[0].find(keys_of(["a"]))
    assert found is not None
    assert 90.0 < found.expires_s - time.time() < 110.0
    node.store.configure(group_of(node), NamespaceConfig(tiers="dram"), now_s=time.monotonic())
    assert write(node, ["b"]) == (0, 1)


def test_a_quota_of_the_tier_is_not_exceeded(node):
    node.mover.set_quota(group_of(node), 5 * NBYTES)
    assert write(node, names(8)) == (5, 3)
    assert node.mover.tiers[0].has(keys_of(names(8))).sum() == 5


def test_the_budget_for_writes_is_not_exceeded(tmp_path):
    with node_on(tmp_path, write_nbytes_per_day=24 * 10 * 53_248) as node:  # the bucket begins with an hour's budget
        wait_until(lambda: node.mover.tiers[0].stats()["state"] == "on")
        assert write(node, names(15)) == (10, 5)


def test_a_node_that_drains_or_has_no_tier_of_its_own_takes_nothing(node, tmp_path):
    node.drain.started.set()
    assert write(node, ["a"]) == (0, 1)
    shared = {"path": str(tmp_path / "shared"), "capacity_nbytes": 8 * MIB, "pack_nbytes": MIB}
    with running_node(node_id="other", storage={"file": shared}) as other:
        assert write(other, ["a"]) == (0, 1)


def test_damaged_chunks_are_not_stored(node, monkeypatch):
    def damaged(self: BulkWrite) -> Any:
        self._sent[0] ^= 1
        return closing_message(self)

    closing_message = BulkWrite._closing
    monkeypatch.setattr(BulkWrite, "_closing", damaged)
    stored, _ = write(node, ["a"])
    assert stored == 0
    assert not node.mover.tiers[0].has(keys_of(["a"]))[0]
    assert (node.store.lent_nbytes, node.store.allocator.transit_nbytes) == (0, 0)


def test_memory_is_not_evicted_for_them_even_at_the_low_water_mark(node):
    store, peer = node.store, Peer(node).open()
    low_nbytes = store.config.low_water * store.allocator.slots.usable_nbytes
    while store.allocator.slots.free_nbytes - store.config.extent_nbytes >= low_nbytes:
        name = f"m{store.chunks}"
        assert peer.commit(peer.filled([name], NBYTES))[0].problem == ""
    assert store.allocator.slots.free(slot_nbytes(NBYTES)) > 0
    chunks = store.chunks
    assert write(node, names(30)) == (30, 0)
    node._wake_all()
    assert (store.chunks, store.counters.evicted, store.evictor.needs_eviction) == (chunks, 0, False)
    peer.close()


def test_writes_at_the_same_time_do_not_overfill_the_tier(tmp_path):
    with node_on(tmp_path, capacity_nbytes=6 * MIB) as node:
        tier = node.mover.tiers[0]
        wait_until(lambda: tier.stats()["state"] == "on")
        assert write(node, names(40)) == (40, 0)
        results: list[tuple[int, int]] = []
        threads = [
            threading.Thread(target=lambda n=n: results.append(write(node, names(40, f"from-{n}")))) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tier.has(keys_of(names(40))).all(), "nothing was removed"
        there = sum(int(tier.has(keys_of(names(40, f"from-{n}"))).sum()) for n in range(4))
        assert there == sum(stored for stored, _ in results) > 0
        assert tier.stats()["spare_nbytes"] == 0 or there < 160
        assert sum(full for _, full in results) > 0
