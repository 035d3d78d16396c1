"""Namespaces with placement "spread": bytes lie at the owners, and follow them as nodes join and leave."""

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

import raykv
from raykv.config import NodeConfig
from raykv.embedded import EmbeddedCluster
from raykv.errors import ConfigError
from raykv.node import spreading
from raykv.node.spreading import misplaced
from raykv.storage.store import Store
from raykv.supervisor.handle import NodeHandle
from raykv.types import KeyArray
from tests.support.clients import remote_client
from tests.support.drains import drained, leave, stored_on
from tests.support.nodes import NBYTES, SPACE, cluster, content, names, put, wait_until

CHAIN = 4


DROP_S = spreading.DROP_S


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "DROP_S", 0.05)
    monkeypatch.setattr(spreading, "RETRY_S", 0.1)


def spread(running: EmbeddedCluster, placement: str = "spread") -> None:
    running.client(SPACE).configure(placement=placement)
    wait_until(
        lambda: all(
            node.store.table.spread.any() == (placement == "spread") for node in running.nodes if not node.stopped
        )
    )


def chains(client: raykv.Client, count: int) -> list[KeyArray]:
    """Store chains of CHAIN chunks. The content of each chunk is that of its key as hexadecimal text."""
    found = []
    for number in range(count):
        keys = client.chain([number * 100 + token for token in range(CHAIN)])
        assert client.put(keys, [content(key.tobytes().hex()) for key in keys]).stored == CHAIN
        found.append(keys)
    return found


def owner_of(running: EmbeddedCluster, keys: KeyArray) -> int:
    """Return the number of the node that owns the first key, by the directory's view."""
    ring = running.membership.logic.view.ring
    return int(ring.nodes[ring.owners(keys[:1])[0]].removeprefix("node-"))


def holders(running: EmbeddedCluster, keys: KeyArray) -> set[int]:
    """Return the nodes that have any of these chunks in memory."""
    return {n for n, node in enumerate(running.nodes) if not node.stopped and any(stored_on(running, n, keys))}


def placed(running: EmbeddedCluster, some: list[KeyArray]) -> bool:
    """Whether each chain lies whole at its owner, and nowhere else."""
    return all(
        holders(running, keys) == {owner_of(running, keys)} and all(stored_on(running, owner_of(running, keys), keys))
        for keys in some
    )


def check_placed(running: EmbeddedCluster, some: list[KeyArray]) -> None:
    """Most chains were written to their owner. Those whose owner was too slow, on a busy machine, move there soon."""
    assert sum(placed(running, [keys]) for keys in some) > len(some) / 2
    wait_until(lambda: placed(running, some))


def readable(client: raykv.Client, some: list[KeyArray]) -> list[bool]:
    hits = []
    for keys in some:
        into = [bytearray(NBYTES) for _ in keys]
        got = client.get(keys, into)
        assert all(into[n] == content(keys[n].tobytes().hex()) for n, hit in enumerate(got.hits) if hit)
        hits.append(all(got.hits))
    return hits


def test_the_bytes_of_a_put_go_to_the_owner_of_its_first_key():
    with cluster(4) as running:
        spread(running)
        client = running.client(SPACE, node=1)
        some = chains(client, 20)
        check_placed(running, some)
        assert len({owner_of(running, keys) for keys in some}) == 4
        running.settle()
        assert all(readable(running.client(SPACE, node=2), some))
        assert client.put(some[0], [content(key.tobytes().hex()) for key in some[0]]).existed == CHAIN
        for node in running.nodes:
            assert node.store.lent_nbytes <= node.store.arena.nbytes // 8


def test_every_way_to_put():
    with cluster(3) as running:
        spread(running)
        with running.client(SPACE, node=0) as client, remote_client(running, 1) as remote:
            keys = client.keys(names(12))
            for place in range(12):
                key, value = keys[place : place + 1], content(f"chunk-{place}")
                match place % 4:
                    case 0:
                        assert client.put(key, [value], wait=False).skipped == 0
                    case 1:
                        assert client.put_one(key.tobytes(), value)
                    case 2:
                        assert client.put_many([raykv.Put(key, [value])], wait=True).stored == 1
                    case 3:
                        assert remote.put(key, [value]).stored == 1
            flushed = client.flush()
            assert (flushed.skipped, flushed.posted) == (0, 0)
            check_placed(running, [keys[place : place + 1] for place in range(12)])


def test_a_namespace_that_is_local_stays_where_it_was_written():
    with cluster(3) as running:
        spread(running)
        other = raykv.Namespace(model="other")
        with running.client(other, node=1) as client:
            assert client.put(names(10), [content(name) for name in names(10)], chained=False).stored == 10
            assert all(stored_on(running, 1, client.keys(names(10))))
            node = running.nodes[1]
            assert misplaced(node.store, node.view, "node-1") == {}


def test_a_config_that_changes_moves_chunks_and_changes_later_puts(rng: random.Random):
    with cluster(3) as running:
        client = running.client(SPACE, node=1)
        some = chains(client, 12)
        assert all(holders(running, keys) == {1} for keys in some)
        spread(running)
        wait_until(lambda: placed(running, some))
        assert all(readable(client, some))
        departures = Counter[str]()
        for node in running.nodes:
            for each in node.stats()["namespaces"].values():
                departures.update(each["departures"])
        assert departures == {"moved": sum(CHAIN for keys in some if owner_of(running, keys) != 1)}
        gone = next(keys for keys in some if owner_of(running, keys) != 1)
        assert client.why(gone)[0].reason == "here"
        spread(running, "local")
        assert client.put(["later"], [content("later")]).stored == 1
        assert all(stored_on(running, 1, client.keys(["later"])))


def test_slots_of_a_reservation_are_local_and_move_later():
    with cluster(3) as running:
        spread(running)
        client = running.client(SPACE, node=0)
        for number in range(6):
            keys = client.keys([f"r-{number}"])
            reservation = client.reserve(keys, NBYTES)
            reservation.views[0][:] = content(keys[0].tobytes().hex())
            assert reservation.commit().stored == 1
            wait_until(lambda keys=keys: placed(running, [keys]))


def test_four_nodes_become_five_and_four_again_and_all_is_readable_the_whole_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spreading, "DROP_S", DROP_S)  # reads see what users see, on a busy machine, too
    with cluster(4, arena_nbytes="16 MiB", member_timeout_s=30.0) as running:
        spread(running)
        some = chains(running.client(SPACE, node=1), 120)
        wait_until(lambda: placed(running, some))  # a chain stays here first if its owner is too slow to take it
        running.settle()
        moved_before = sum(node.stats()["spread"]["moved"] for node in running.nodes)
        before = [owner_of(running, keys) for keys in some]
        stop, reads, missed = threading.Event(), [0], [0]

        def read() -> None:
            rng = random.Random(1)
            with running.client(SPACE, node=0) as client:
                while not stop.is_set():
                    hits = readable(client, [rng.choice(some)])
                    reads[0] += 1
                    missed[0] += not all(hits)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            number = running.add()
            spread(running)
            wait_until(lambda: placed(running, some), timeout_s=30.0)
            moved = sum(owner_of(running, keys) != owner for keys, owner in zip(some, before, strict=True))
            assert running.nodes[number].store.chunks == moved * CHAIN
            assert abs(moved / len(some) - 1 / 5) < 0.1
            total = sum(node.stats()["spread"]["moved"] for node in running.nodes)
            assert total - moved_before == moved * CHAIN
            assert drained(running, number).left == 0
            leave(running, number)
            wait_until(lambda: placed(running, some))
            assert [owner_of(running, keys) for keys in some] == before
        finally:
            stop.set()
            reader.join()
        assert all(readable(running.client(SPACE), some))
        print(f"{reads[0]} reads, {missed[0]} missed")
        assert reads[0] > 10
        assert missed[0] <= max(1, reads[0] / 100)  # a busy machine reads less than 100 times
        columns = running.nodes[0].store.table.columns
        for keys in some:
            if owner_of(running, keys) == 0:
                rows = running.nodes[0].store.table.find(keys)
                assert columns.parent[rows].tolist() == [-1, *rows[:-1].tolist()]
                assert columns.depth[rows].tolist() == list(range(CHAIN))


def test_a_new_owner_that_is_killed_loses_only_chunks_that_it_had_confirmed(shm_dir, monkeypatch):
    monkeypatch.setattr(spreading, "NBYTES_PER_S", 2_000_000)
    monkeypatch.setattr(spreading, "WINDOW_ROWS", 2 * CHAIN)
    with cluster(3, arena_nbytes="16 MiB") as running:
        spread(running)
        some = chains(running.client(SPACE, node=1), 90)
        everything = np.concatenate(some)
        running.settle()
        storage = {"arena_nbytes": "16 MiB", "extent_nbytes": "64 KiB", "shm_dir": str(shm_dir)}
        config = NodeConfig.load({"node_id": "new", "host": "new", "storage": storage, "heartbeat_s": 0.05})
        new = NodeHandle(config, secret=bytes.fromhex(running.secret), membership=running.membership)
        try:
            wait_until(lambda: new.stats()["chunks"] > 3 * CHAIN)
            new.supervisor.kill()  # the kernel kills the node, too
            new.supervisor.wait()
            wait_until(lambda: len(running.membership.logic.view.members) == 3)
            running.settle()
            store = Store.open(config.storage, config.file_prefix, now_s=time.monotonic())
            confirmed = _raw(store.ready_keys())
            store.close()
            here = np.any([stored_on(running, node, everything) for node in range(3)], axis=0)
            assert _raw(everything[~here]) <= confirmed
            assert 3 * CHAIN < len(confirmed) < len(everything)
            client = running.client(SPACE)
            for keys in some:
                if not _raw(keys) & _raw(everything[~here]):
                    assert readable(client, [keys]) == [True]
        finally:
            new.stop(unlink=True)


def _raw(keys: KeyArray) -> set[bytes]:
    return {key.tobytes() for key in keys}


def test_an_owner_without_room_takes_nothing_and_nothing_is_lost():
    with cluster(2, arena_nbytes="2 MiB") as running:
        with running.client(SPACE, node=0) as client:
            mine = chains(client, 5)
        with running.client(raykv.Namespace(model="filler"), node=1) as client:
            put(client, names(40, "filler"))
        wait_until(lambda: not running.nodes[1].store.evictor.needs_eviction)
        evicted = running.nodes[1].store.counters.evicted
        spread(running)
        theirs = [keys for keys in mine if owner_of(running, keys) == 1]
        assert theirs
        wait_until(lambda: running.nodes[1].stats()["requests"].get("Write", 0) >= 3)
        assert all(readable(running.client(SPACE), mine))
        assert running.nodes[1].store.counters.evicted == evicted


def test_misplaced_chains_by_brute_force(rng: random.Random):
    """Each chunk belongs to the owner of the first key of its chain on the node; parents come first."""
    with cluster(3) as running:
        client = running.client(SPACE, node=0)
        trunk = client.chain(list(range(8)))
        branches = [client.chain([*range(rng.randrange(1, 8)), *range(100 * n, 100 * n + 3)]) for n in range(1, 9)]
        for keys in (trunk, *branches):
            client.put(keys, [b"x" * 100 for _ in keys])
        node = running.nodes[0]
        table, view = node.store.table, running.nodes[0].view
        with node.lock:
            node.store.delete(trunk[2:3], now_s=time.monotonic())  # the chunks after it begin chains of their own
            table.spread[int(table.columns.group[table.find(trunk[:1])[0]])] = 1
        parents = {
            key.tobytes(): keys[place - 1].tobytes() if place else b""
            for keys in (trunk, *branches)
            for place, key in enumerate(keys)
        }
        here = {key.tobytes() for key in node.store.ready_keys()}

        def root(key: bytes) -> bytes:
            return root(parents[key]) if parents[key] in here else key

        expected: dict[str, set[bytes]] = {}
        for key in here:
            first = np.frombuffer(root(key), "<u8").reshape(1, 2)
            owner = view.ring.nodes[view.ring.owners(first)[0]]
            if owner != "node-0":
                expected.setdefault(owner, set()).add(key)
        found = misplaced(node.store, view, "node-0")
        assert {name: _raw(keys) for name, keys in found.items()} == expected
        assert expected
        for keys in found.values():
            order = [key.tobytes() for key in keys]
            for place, key in enumerate(order):
                assert parents[key] not in order[place:]


def test_a_wrong_placement_is_refused():
    with cluster(1) as running, pytest.raises(ConfigError, match="placement"):
        running.client(SPACE).configure(placement="anywhere")
