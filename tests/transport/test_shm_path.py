"""Reads from the shared memory of a node on this host. The store is real. The node answers three kinds of requests."""

import time

import pytest

from raykv.protocol import chunk_keys, messages
from raykv.protocol.placement import Member
from raykv.transport import data_path
from raykv.transport.base import Reply
from raykv.transport.bulk_read import ReadProgress, ReadRun
from raykv.transport.data_path import PathEnvironment, ShmPath
from raykv.transport.pool import ConnectionPool
from raykv.transport.server import SocketServer
from tests.support.stores import LETTERS, Bench, content, names_to_keys
from tests.support.transports import WarehouseSession, soon

NBYTES = 4096


class Attaching:
    """A node that answers Attach, Promote and Suspect. If a Promote waits, the node stores the chunks in `below` first.

    Attributes:
        asked: One tuple per past request: (Attach,), (Promote, number of keys, whether it waits), or (Suspect, names).
    """

    epoch = 1

    def __init__(self, bench: Bench, below: str = "") -> None:
        self.bench, self.below = bench, below
        self.asked: list[tuple[object, ...]] = []

    def session(self, *, local: bool) -> WarehouseSession:
        return WarehouseSession(local)

    def answer(self, request: messages.Message, session: object) -> Reply:
        store = self.bench.store
        if isinstance(request, messages.Attach):
            self.asked.append((messages.Attach,))
            table, arena = str(store.table.memory.path), str(store.arena.path)
            return Reply(messages.Attached("n", "host", table, arena, tiers=bool(self.below)))
        assert isinstance(request, messages.Promote | messages.Suspect)
        keys = chunk_keys.from_bytes(request.keys).tolist()
        names = [name for name in LETTERS if names_to_keys([name])[0].tolist() in keys]
        if isinstance(request, messages.Suspect):
            self.asked.append((messages.Suspect, "".join(names)))
            return Reply(messages.Count(0))
        self.asked.append((messages.Promote, len(names), request.timeout_s > 0))
        if request.timeout_s:
            self.bench.put([name for name in names if name in self.below], chained=False)
        return Reply(messages.Count(len(names)))


@pytest.fixture
def bench(shm_dir):
    made = Bench.open(shm_dir / "n", now_s=time.monotonic())
    yield made
    made.close()


@pytest.fixture
def node(bench):
    return Attaching(bench)


@pytest.fixture
def make(node):
    """Return a function that opens a path and returns the path and the node's `Member`."""
    address = f"unix:@raykv-test-{time.monotonic_ns()}"
    server = SocketServer(node, address, b"", io_timeout_s=5.0, max_connections=8)
    server.serve()
    pool = ConnectionPool(b"", breaker_s=0.1, max_idle=2)
    there, paths = Member("n", "host", {"unix": address}, 1.0, 1), []

    def make(**fields) -> tuple[ShmPath, Member]:
        paths.append(ShmPath(PathEnvironment(pool, "host", **fields)))
        return paths[-1], there

    yield make
    for path in paths:
        path.close()
    pool.close()
    server.close()


def read(made, names: str, sizes: list[int] | None = None, *, locate: bool = False) -> ReadRun:
    path, there = made
    into = [bytearray(size) for size in sizes or [NBYTES] * len(names)]
    progress = ReadProgress(names_to_keys(list(names)), [[memoryview(each)] for each in into], list(map(len, into)))
    run = ReadRun(progress, "n", list(range(len(names))), locate=locate)
    assert path.can_reach(there, deadline_s=soon())
    path.read(there, run, deadline_s=soon())
    for place in run.arrived:
        assert bytes(into[place]) == content(names[place], NBYTES)
    return run


def test_what_is_in_memory_arrives_and_the_rest_is_gone(bench, node, make):
    bench.put("ABCDEF")
    made = make()
    run = read(made, "AXBYC")
    assert (run.arrived, run.gone, run.path) == ([0, 2, 4], [1, 3], "shm")
    run = read(made, "AXBYC", [NBYTES, NBYTES, NBYTES + 1, 5, NBYTES])
    assert (run.arrived, run.gone, run.other_size) == ([0, 4], [1, 3], [2])
    assert node.asked == [(messages.Attach,)]


def test_an_owner_is_only_asked_for_what_is_in_its_memory(bench, node, make):
    bench.put("AB")
    node.below = "C"
    run = read(make(), "ABCD", locate=True)
    assert (run.arrived, run.gone, run.named, run.missing) == ([0, 1], [], {}, [2, 3])
    assert node.asked == [(messages.Attach,)]


@pytest.mark.parametrize("verify", [True, False])
def test_corrupt_chunks_when_checksums_are_compared(bench, node, make, verify):
    bench.put("ABC")
    start = bench.column("page", "B")[0] * 4096
    bench.store.arena.view[start + 9] ^= 1
    made = make(verify="always" if verify else "remote")
    if not verify:
        with pytest.raises(AssertionError):
            read(made, "ABC")
        return
    run = read(made, "ABC")
    assert (run.arrived, run.corrupt, run.gone) == ([0, 2], [1], [])
    assert node.asked == [(messages.Attach,), (messages.Suspect, "B")]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_chunks_below_memory_are_promoted_a_part_ahead(bench, node, make, monkeypatch, parts):
    monkeypatch.setattr(data_path, "PROMOTE_NBYTES", 2 * NBYTES)
    below = LETTERS[1 : 1 + 2 * parts]
    bench.put("A")
    node.below = below[:-1]
    run = read(make(), "A" + below)
    assert sorted(run.arrived) == list(range(2 * parts))
    assert run.gone == [2 * parts]
    promotes = [each[2] for each in node.asked if each[0] is messages.Promote]
    ahead = [False, False] if parts > 1 else []
    assert promotes == [*ahead, True, *([False, True] * (parts - 2)), *([True] if parts > 1 else [])]


def test_a_life_is_mapped_once_and_dropped_with_its_member(bench, node, make):
    bench.put("A")
    path, there = made = make()
    read(made, "A")
    path.retain([there])
    read(made, "A")
    assert len(node.asked) == 1
    path.retain([])
    read(made, "A")
    assert len(node.asked) == 2


def test_a_node_that_does_not_answer_is_not_led_to(make):
    path, _ = make()
    silent = Member("m", "host", {"unix": "unix:@raykv-test-nobody"}, 1.0, 1)
    assert not path.can_reach(silent, deadline_s=soon(0.2))
    assert not path.can_reach(Member("m", "host", {}, 1.0, 2), deadline_s=soon(0.2))
