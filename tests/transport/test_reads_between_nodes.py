"""Reads from other nodes: in parts, from several holders, over broken connections, from holders that answer wrongly."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.embedded import EmbeddedCluster
from raykv.node.node import Node
from raykv.protocol import messages
from raykv.transport import bulk_read
from raykv.transport.base import Reply
from raykv.transport.bulk_read import BulkRead
from tests.support import nodes

SPACE = raykv.Namespace(model="m")
NBYTES = 5000


def content(number: int, nbytes: int = NBYTES) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


@pytest.fixture
def running():
    with raykv.embedded(3, arena_nbytes="16 MiB", extent_nbytes="1 MiB", heartbeat_s=0.01) as made:
        yield made


@pytest.fixture
def small_parts(loops, monkeypatch):
    """Limit a request to three keys, so that few chunks need many requests. `loops` runs each test twice."""
    monkeypatch.setattr(bulk_read, "PART_KEYS", 3)


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def stored(running: EmbeddedCluster, count: int, *nodes: int) -> raykv.Client:
    """Put chunks on some nodes. Returns a client of node 2."""
    for node in nodes:
        client = running.client(SPACE, node=node)
        assert client.put(names(count), [content(n) for n in range(count)]).stored == count
    running.settle()
    return running.client(SPACE, node=2)


def wrong(into: list[bytearray], hits: tuple[bool, ...]) -> list[int]:
    return [n for n, hit in enumerate(hits) if hit and bytes(into[n]) != content(n, len(into[n]))]


def buffers(count: int, nbytes: int = NBYTES) -> list[bytearray]:
    return [bytearray(nbytes) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 50])
def test_parts_and_partial_hits(running, small_parts, count):
    reader = stored(running, count, 0)
    reader.delete([str(n) for n in range(0, count, 3)])
    into = buffers(count)
    result = reader.get(names(count), into, match=raykv.Match(count, ("node-0",) * count))
    assert result.hits == tuple(n % 3 > 0 for n in range(count))
    assert not wrong(into, result.hits)


def test_buffers_of_other_lengths_among_right_ones(running, small_parts):
    reader = stored(running, 20, 0)
    into = [bytearray(NBYTES + (n % 4 == 1) - (n % 4 == 3) * n) for n in range(20)]
    into[9] = bytearray()
    result = reader.get(names(20), into)
    assert result.hits == tuple(n % 4 in (0, 2) for n in range(20))
    assert not wrong(into, result.hits)
    assert reader.get(names(20), buffers(20)).prefix == 20


@pytest.mark.parametrize("streams", [1, 3])
def test_a_large_read_over_several_connections(running, monkeypatch, streams):
    monkeypatch.setattr("raykv.client.fetcher.STREAM_NBYTES", 10 * NBYTES)
    stored(running, 100, 0)
    reader = running.client(SPACE, node=2, streams_per_peer=streams)
    match = reader.match(names(100))
    before = running.nodes[0].stats()["requests"].get("Read", 0)
    into = buffers(100)
    assert reader.get(names(100), into, match=match).chunks_by_source == {("node-0", "tcp"): 100}
    assert not wrong(into, (True,) * 100)
    assert running.nodes[0].stats()["requests"]["Read"] - before == streams


@pytest.mark.parametrize("verify", ["remote", "never"])
def test_large_chunks_among_small_ones(running, verify):
    sizes = [NBYTES, 1 << 20, NBYTES, 300_001, 1 << 20, 1]
    values = [content(n, size) for n, size in enumerate(sizes)]
    assert running.client(SPACE).put(names(6), values, chained=False).stored == 6
    running.settle()
    store, reader = running.nodes[0].store, running.client(SPACE, node=2, verify=verify)
    row = int(store.table.find(reader.keys(["4"]))[0])
    store.arena.view[(int(store.table.columns.page[row]) << 12) + 700_000] ^= 1
    into = [bytearray(size) for size in sizes]
    cut = [[memoryview(each)[: len(each) // 3], memoryview(each)[len(each) // 3 :]] for each in into]
    hits = reader.get(names(6), cut).hits
    assert hits == (True, True, True, True, verify == "never", True)
    assert [n for n in range(6) if into[n] != values[n]] == [4]
    assert store.counters.corrupt == (verify == "remote")


def test_chunks_that_go_between_two_requests_are_misses(running, small_parts, monkeypatch):
    reader = stored(running, 60, 0)
    node, check = running.nodes[0], BulkRead._check

    def check_and_lose_some(self, **how):
        check(self, **how)
        with node.lock:
            node.store.delete(reader.keys([str(n) for n in range(1, 60, 2)]), now_s=time.monotonic())

    monkeypatch.setattr(BulkRead, "_check", check_and_lose_some)
    into = buffers(60)
    hits = reader.get(names(60), into).hits
    assert all(hits[::2])
    assert not all(hits)
    assert not wrong(into, hits)


def test_a_second_holder_is_asked_in_the_same_get(running):
    reader = stored(running, 30, 0, 1)
    for node, gone in ((0, range(0, 30, 2)), (1, range(1, 30, 2))):
        with running.nodes[node].lock:  # the chunks vanish without an announcement
            running.nodes[node].store.delete(reader.keys([str(n) for n in gone]), now_s=time.monotonic())
            running.nodes[node].store.take_changes()
    into = buffers(30)
    result = reader.get(names(30), into)
    assert result.chunks_by_source == {("node-0", "tcp"): 15, ("node-1", "tcp"): 15}
    assert not wrong(into, result.hits)


def owned_by(running: EmbeddedCluster, node: int, count: int) -> list[str]:
    """Find `count` names whose keys have `node` as owner."""
    client, found, number = running.client(SPACE, node=node), [], 0
    while len(found) < count:
        if [*running.nodes[0].view.ring.shares(client.keys([str(number)]))] == [f"node-{node}"]:
            found.append(str(number))
        number += 1
    return found


def put_on(running: EmbeddedCluster, node: int, some: list[str]) -> None:
    values = [content(int(name)) for name in some]
    assert running.client(SPACE, node=node).put(some, values, chained=False).stored == len(some)


def requests_of(node: Node) -> tuple[int, int]:
    requests = node.stats()["requests"]
    return requests.get("Locate", 0), requests.get("Read", 0)


def get_named(reader: raykv.Client, some: list[str]) -> raykv.GetResult:
    into = buffers(len(some))
    result = reader.get(some, into)
    assert all(bytes(into[n]) == content(int(name)) for n, name in enumerate(some) if result.hits[n])
    return result


@pytest.mark.parametrize("count", [1, 2, 30])
def test_an_owner_that_holds_the_chunks_is_asked_once(running, count):
    some = owned_by(running, 0, count)
    put_on(running, 0, some)
    running.settle()
    reader = running.client(SPACE, node=2)
    before = requests_of(running.nodes[0])
    assert get_named(reader, some).chunks_by_source == {("node-0", "tcp"): count}
    after = requests_of(running.nodes[0])
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)
    into = bytearray(NBYTES)
    assert reader.get_one(reader.key(some[0]), into)
    assert into == content(int(some[0]))
    assert requests_of(running.nodes[0]) == (after[0], after[1] + 1)


@pytest.mark.parametrize("count", [1, 2, 30])
def test_an_owner_names_the_holders_of_what_it_has_not_got(running, small_parts, count):
    some = owned_by(running, 0, count)
    put_on(running, 1, some)
    running.settle()
    reader = running.client(SPACE, node=2)
    before = requests_of(running.nodes[0])
    assert get_named(reader, some).chunks_by_source == {("node-1", "tcp"): count}
    after = requests_of(running.nodes[0])
    assert after[1] - before[1] <= bulk_read.PARTS_AHEAD
    # If keys are left over after these Reads, one Locate asks for all of them.
    assert after[0] - before[0] == (count > bulk_read.PARTS_AHEAD * bulk_read.PART_KEYS)
    into = bytearray(NBYTES)
    assert reader.get_one(reader.key(some[0]), into)
    assert into == content(int(some[0]))


@pytest.mark.parametrize("count", [1, 2, 30])
def test_of_what_nobody_holds_the_owner_is_asked_and_nobody_else(running, count):
    some = owned_by(running, 0, count)
    reader = running.client(SPACE, node=2)
    assert not any(get_named(reader, some).hits)
    assert not reader.get_one(reader.key(some[0]), bytearray(NBYTES))
    assert not reader.exists_one(reader.key(some[0]))
    assert requests_of(running.nodes[1])[1] == 0


@pytest.mark.parametrize("count", [1, 20])
def test_an_owner_holds_some_and_others_the_rest(running, small_parts, count):
    some = owned_by(running, 0, 3 * count)
    put_on(running, 0, some[::3])
    put_on(running, 1, some[1::3])
    running.settle()
    result = get_named(running.client(SPACE, node=2), some)
    assert result.hits == (True, True, False) * count
    assert result.chunks_by_source == {("node-0", "tcp"): count, ("node-1", "tcp"): count}


@pytest.mark.parametrize("count", [1, 8])
def test_a_second_holder_is_asked_for_what_the_owner_sends_wrong(running, count):
    some = owned_by(running, 0, count)
    put_on(running, 0, some)
    put_on(running, 1, some)
    running.settle()
    store, reader = running.nodes[0].store, running.client(SPACE, node=2)
    for row in store.table.find(reader.keys(some)).tolist():
        store.arena.view[int(store.table.columns.page[row]) * 4096 + 9] ^= 1
    assert get_named(reader, some).chunks_by_source == {("node-1", "tcp"): count}
    assert store.counters.corrupt == count


@pytest.mark.parametrize("count", [1, 8])
def test_an_owner_that_lost_its_own_chunks_finds_out(running, count):
    some = owned_by(running, 0, count)
    put_on(running, 0, some)
    put_on(running, 1, some)
    running.settle()
    node, reader = running.nodes[0], running.client(SPACE, node=2)
    with node.lock:  # the chunks vanish without an announcement
        node.store.delete(reader.keys(some), now_s=time.monotonic())
        node.store.take_changes()
    assert get_named(reader, some).chunks_by_source == {("node-1", "tcp"): count}
    until_s = time.monotonic() + 5.0
    while any("node-0" in holders for holders in node.location_index.locate(reader.keys(some))):
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_memory_of_a_neighbour_is_checked_if_that_is_wanted(count):
    with raykv.embedded(
        2, arena_nbytes="16 MiB", extent_nbytes="1 MiB", heartbeat_s=0.01, separate_hosts=False
    ) as running:
        put_on(running, 0, names(count))
        running.settle()
        reader = running.client(SPACE, node=1, verify="always")
        into = buffers(count)
        assert reader.get(names(count), into).chunks_by_source == {("node-0", "shm"): count}
        store = running.nodes[0].store
        for row in store.table.find(reader.keys(names(count))).tolist():
            store.arena.view[int(store.table.columns.page[row]) * 4096 + 9] ^= 1
        assert not any(reader.get(names(count), into).hits)
        assert not reader.get_one(reader.key("0"), into[0])


def test_one_chunk(running):
    reader = stored(running, 2, 0)
    match = raykv.Match(1, ("node-0",))

    def get(name: str, into: bytearray, match: raykv.Match | None = match, timeout_s: float = 5.0) -> bool:
        return reader.get([name], [into], match=match, timeout_s=timeout_s).hits[0]

    into = bytearray(NBYTES)
    assert get("1", into)
    assert into == content(1)
    assert reader.get_one(reader.key("0"), into)
    assert into == content(0)
    assert not get("1", bytearray(NBYTES + 1))
    assert not get("nothing", into)
    assert not get("1", into, timeout_s=1e-9)
    assert get("1", into, raykv.Match(1, ("nobody",)))  # the owner names the real holder
    store = running.nodes[0].store
    row = int(store.table.find(reader.keys(["1"]))[0])
    store.arena.view[int(store.table.columns.page[row]) * 4096 + 9] ^= 1
    assert not get("1", into)
    assert store.counters.corrupt == 1
    assert not store.table.columns.pins.any()


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle(shm_dir: Path, monkeypatch):
    monkeypatch.setattr(bulk_read, "PART_NBYTES", 4 * nodes.NBYTES)
    some = nodes.names(60)
    with nodes.node_process(shm_dir) as process, process.client(local=False) as client:
        assert nodes.put(client, some, chained=False).stored == len(some)
        checked, check = [], BulkRead._check

        def check_and_kill(self, **how):
            checked.extend(self._expected[0])
            check(self, **how)
            if len(checked) == 8:
                process.kill()

        monkeypatch.setattr(BulkRead, "_check", check_and_kill)
        into = [bytearray(nodes.NBYTES) for _ in some]
        began_s = time.monotonic()
        hits = client.get(some, into, match=raykv.Match(len(some), ("n",) * len(some))).hits
        assert time.monotonic() - began_s < 10.0
        assert all(hits[:8])
        assert not all(hits)
        assert all(not hit or into[n] == nodes.content(some[n]) for n, hit in enumerate(hits))
        for buffer in into:  # raises an error if anything still refers to the buffer
            buffer.append(1)


def test_small_calls_do_not_wait_for_large_reads(running):
    reader = stored(running, 100, 0)
    node, release = running.nodes[0], threading.Event()
    read = node.handlers[messages.Read]

    def read_slowly(request: messages.Read, session: object) -> Reply:
        release.wait(10.0)
        return read(request, session)

    node.handlers[messages.Read] = read_slowly
    into = buffers(100)
    bulk = threading.Thread(target=lambda: reader.get(names(100), into))
    bulk.start()
    began_s = time.monotonic()
    for _ in range(20):
        assert reader.match(names(100)).count == 100
    assert time.monotonic() - began_s < 5.0
    assert bulk.is_alive()
    release.set()
    bulk.join()
    assert not wrong(into, (True,) * 100)
