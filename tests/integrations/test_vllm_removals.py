"""KV events for removed blocks: real nodes evict, drop, expire and move published chunks."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockRemoved, BlockStored

import raykv
from raykv.integrations.vllm import removals as removals_module
from raykv.integrations.vllm.metadata import Rank, Scope
from raykv.integrations.vllm.removals import Removals
from tests.support.nodes import wait_until
from tests.support.tier_clusters import push_out

pytestmark = pytest.mark.vllm

SPACE = raykv.Namespace(model="m")
NBYTES = 50_000
SCOPE = Scope()


def names(count: int, prefix: str = "chunk") -> list[bytes]:
    return [hashlib.sha256(f"{prefix} {number}".encode()).digest() for number in range(count)]


def stored(hashes: list[bytes], *, group: int = 0, locality: str = "LOCAL") -> BlockStored:
    """Make the event of some blocks. Only its hashes, group and locality matter here."""
    fields = {"parent_block_hash": None, "token_ids": [], "block_size": 4, "lora_id": None, "lora_name": None}
    return BlockStored(block_hashes=hashes, medium="CPU", group_idx=group, locality=locality, **fields)


class Bench:
    """`Removals` with one client for each rank. It has no thread: checks happen only when a test calls for them."""

    def __init__(self, *clients: raykv.Client) -> None:
        ranks: dict[Rank, raykv.Client] = {(0, place): client for place, client in enumerate(clients)}
        self.clients, self.removals = clients, Removals(lambda scope: ranks if scope == SCOPE else {})

    def store(self, some: list[bytes], **options: Any) -> None:
        """Store chunks for all ranks, and publish them."""
        for client in self.clients:
            assert client.put(some, [bytes(NBYTES)] * len(some), **options).skipped == 0
        self.publish(some)

    def publish(self, some: list[bytes]) -> None:
        self.removals.add(SCOPE, some, stored(some))

    def check(self) -> list[bytes]:
        """Check all chunks twice. Returns the removed hashes."""
        for _ in range(2 * (len(self.removals) // removals_module.CHECK_CHUNKS + 1)):
            self.removals.check()
        return self.take()

    def take(self) -> list[bytes]:
        events = list(self.removals.take())
        assert all((each.medium, each.group_idx, each.locality) == ("CPU", 0, "LOCAL") for each in events)
        return [each for event in events for each in event.block_hashes]


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, arena_nbytes="4 MiB", extent_nbytes="1 MiB") as made:
        yield made


@pytest.fixture
def bench(cluster: raykv.EmbeddedCluster) -> Bench:
    return Bench(cluster.client(SPACE))


def test_evicted_chunks_are_removed_and_no_others(bench: Bench, cluster: raykv.EmbeddedCluster):
    (client,) = bench.clients
    some = names(60)
    bench.store(some)
    cluster.settle()
    assert bench.check() == []
    client.put(names(50, "other"), [bytes(NBYTES)] * 50)
    cluster.settle()
    held = dict(zip(some, client.exists(some).tolist(), strict=True))
    gone = [name for name in some if not held[name]]
    assert 0 < len(gone) < len(some)
    assert sorted(bench.check()) == sorted(gone)
    assert bench.check() == []


@pytest.mark.parametrize("how", ["delete", "drop", "ttl"])
def test_chunks_that_end_otherwise_are_removed(bench: Bench, cluster: raykv.EmbeddedCluster, how: str):
    (client,) = bench.clients
    some = names(8)
    bench.store(some, ttl_s=0.3 if how == "ttl" else None)
    cluster.settle()
    if how != "ttl":
        assert bench.check() == []
        assert (client.delete(some) if how == "delete" else client.drop_namespace()) == len(some)
    wait_until(lambda: not client.exists(some).any())
    assert sorted(bench.check()) == sorted(some)
    bench.store(some)
    assert bench.check() == [], "they are stored again"


def test_chunks_on_other_nodes_and_on_ssd_are_not_removed(tmp_path: Path):
    ssd = {"paths": [tmp_path], "capacity_nbytes": "64 MiB", "segment_nbytes": "1 MiB"}
    with raykv.embedded(nodes=1, arena_nbytes="4 MiB", extent_nbytes="1 MiB", ssd=ssd) as cluster:
        texts = [f"chunk-{number}" for number in range(8)]
        client = cluster.client(SPACE)
        bench, some = Bench(client), [text.encode() for text in texts]
        bench.store(some)
        for _ in range(2):  # only chunks that were read are moved to the SSD
            client.get(some, [bytearray(NBYTES) for _ in some])
        push_out(cluster, client, texts)
        assert all(holder is not None and holder.below_memory for holder in client.locate(some))
        assert bench.check() == []
    with raykv.embedded(nodes=2, arena_nbytes="4 MiB", extent_nbytes="1 MiB") as cluster:
        there, here = cluster.client(SPACE, node=1), Bench(cluster.client(SPACE))
        there.put(some, [bytes(NBYTES)] * len(some))
        cluster.settle()
        here.publish(some)
        assert here.check() == []
        there.delete(some[:3])
        cluster.settle()
        assert sorted(here.check()) == sorted(some[:3])


def test_an_owner_that_does_not_answer_removes_nothing(bench: Bench, cluster: raykv.EmbeddedCluster):
    some = names(16)
    cluster.client(SPACE, node=1).put(some, [bytes(NBYTES)] * len(some))
    cluster.settle()
    bench.publish(some)
    (client,) = bench.clients
    assert client.exists(some).all()
    assert not client.absent(some).any()
    cluster.kill(1)
    missing, absent = ~client.exists(some), client.absent(some)
    owned = [name for name, is_absent in zip(some, absent.tolist(), strict=True) if is_absent]
    assert missing.any()
    assert (missing & ~absent).any(), "the other node owns some of the keys"
    assert set(bench.check()) <= set(owned)


def test_a_chunk_is_removed_when_the_part_of_any_rank_is_gone(cluster: raykv.EmbeddedCluster):
    first, second = (cluster.client(raykv.Namespace(model="m", tp_rank=rank, tp_size=2)) for rank in range(2))
    bench, some = Bench(first, second), names(6)
    bench.store(some)
    cluster.settle()
    assert bench.check() == []
    second.delete(some[2:3])
    first.delete(some[4:5])
    cluster.settle()
    assert sorted(bench.check()) == sorted([some[2], some[4]])


def test_a_chunk_must_be_missing_twice_in_a_row(bench: Bench, cluster: raykv.EmbeddedCluster):
    (client,) = bench.clients
    some = names(1)
    bench.store(some)
    client.delete(some)
    cluster.settle()
    bench.removals.check()
    assert bench.take() == []
    client.put(some, [bytes(NBYTES)])
    bench.removals.check()
    assert bench.take() == []


def test_a_chunk_that_is_published_again_is_not_removed(bench: Bench, cluster: raykv.EmbeddedCluster):
    """A chunk may be stored again between the check and the event. Then no event says that the chunk is removed."""
    (client,) = bench.clients
    some = names(2)
    bench.store(some)
    client.delete(some)
    cluster.settle()
    for _ in range(2):
        bench.removals.check()
    bench.store(some[:1])
    assert bench.take() == some[1:]


def test_events_name_the_group_and_the_locality_of_the_stored_event():
    removals = Removals(lambda _: {})
    removals.add(SCOPE, [b"a", b"b"], stored([b"a", b"b"]))
    removals.add(SCOPE, [b"a/1"], stored([b"a"], group=1))
    removals.add(SCOPE, [b"c"], stored([b"c"], locality="REMOTE"))
    removals.clear()
    assert list(removals.take()) == [
        BlockRemoved([b"a", b"b"], "CPU", group_idx=0, locality="LOCAL"),
        BlockRemoved([b"a"], "CPU", group_idx=1, locality="LOCAL"),
        BlockRemoved([b"c"], "CPU", group_idx=0, locality="REMOTE"),
    ]
    assert list(removals.take()) == []
    assert not len(removals)


def test_a_block_is_removed_with_the_last_chunk_that_names_it(bench: Bench, cluster: raykv.EmbeddedCluster):
    """Two prompts share the first block of a chunk, but not the rest. So two chunks name the same first block."""
    (client,) = bench.clients
    ends = [b"2", b"2'"]
    client.put(ends, [bytes(NBYTES)] * 2, chained=False)
    for end in ends:
        bench.removals.add(SCOPE, [end], stored([b"1", end]))
    for end, removed in zip(ends, [[b"2"], [b"1", b"2'"]], strict=True):
        client.delete([end])
        cluster.settle()
        assert bench.check() == removed


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(removals_module, "MAX_PUBLISHED_CHUNKS", 100)
    monkeypatch.setattr(removals_module, "FORGET_CHUNKS", 10)
    removals, some = Removals(lambda _: {}), names(1000)
    for number, name in enumerate(some):
        removals.add(SCOPE, [name], stored([b"%d" % number, name]))
        assert len(removals) <= 100
    removals.check()
    removals.clear()
    ended = {each for event in removals.take() for each in event.block_hashes}
    assert ended >= set(some[-90:]), "the oldest are forgotten first"
    assert not ended & set(some[:900])
    assert not removals._named


def test_the_thread_checks_and_ends(bench: Bench, cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(removals_module, "CHECK_INTERVAL_S", 0.01)
    (client,) = bench.clients
    some = names(4)
    bench.store(some)
    cluster.settle()
    bench.removals.start()
    client.delete(some[:2])
    removed: list[bytes] = []
    wait_until(lambda: removed.extend(bench.take()) or len(removed) == 2)
    assert sorted(removed) == sorted(some[:2])
    bench.removals.close()
