"""Reads over NIXL from a node in another process. UCX_TLS in the environment chooses the transports of UCX."""

import importlib.util
import os
import random
import threading
import time

import pytest

import raykv
from raykv.config import nixl_backends
from raykv.transport import nixl
from tests.support import nodes
from tests.support.nodes import NodeProcess, wait_until

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
MIB = 1 << 20


class NixlNode(NodeProcess):
    def start(self) -> None:
        self.fields["nixl"] = "auto"
        super().start()


def content(number: int, nbytes: int = MIB) -> bytes:
    return random.Random(number).randbytes(nbytes)


@pytest.fixture
def node(shm_dir):
    made = NixlNode(shm_dir)
    with made.client() as client:
        wait_until(lambda: client.stats()["nodes"]["n"]["nixl"].get("registered_nbytes"))
    yield made
    if made.process.poll() is None:
        made.process.communicate(timeout=30)
        assert made.process.returncode == 0


@pytest.fixture
def reader(node):
    with node.client(local=False, nixl="auto", timeout_s=10.0) as client:
        wait_until(lambda: refreshed(client))
        yield client


def refreshed(client: raykv.Client) -> bool:
    client.router.refresh(client.router.deadline(None))
    return "nixl" in client.router.refresh(client.router.deadline(None)).members[0].endpoints


def put(node: NixlNode, count: int, nbytes: int = MIB) -> None:
    with node.client() as writer:
        values = [content(number, nbytes) for number in range(count)]
        assert writer.put([str(number) for number in range(count)], values, chained=False).stored == count


def get(client: raykv.Client, count: int, nbytes: int = MIB, **options: float) -> raykv.GetResult:
    into = [bytearray(nbytes) for _ in range(count)]
    match = raykv.Match(count, ("n",) * count)
    result = client.get([str(number) for number in range(count)], into, match=match, **options)
    wrong = [number for number, hit in enumerate(result.hits) if hit and into[number] != content(number, nbytes)]
    assert not wrong
    return result


def get_over_nixl(node: NixlNode, client: raykv.Client, count: int) -> None:
    """Wait until all extents of the chunks are registered, and known here."""
    wait_until(lambda: get(client, count).nbytes_by_path == {"nixl": count * MIB})


@needs_nixl
def test_chunks_move_without_read_or_pin(node, reader):
    put(node, 8)
    get_over_nixl(node, reader, 8)
    before = node.stats()["requests"]
    for _ in range(3):
        assert get(reader, 8).chunks_by_source == {("n", "nixl"): 8}
    after = node.stats()["requests"]
    assert after["Find"] - before["Find"] == 3
    assert [after.get(name, 0) - before.get(name, 0) for name in ("Read", "Pin", "ConnectNixl")] == [0, 0, 0]


@needs_nixl
def test_buffers_in_pieces_and_other_lengths(node, reader):
    put(node, 3)
    get_over_nixl(node, reader, 3)
    into = [bytearray(MIB), bytearray(MIB + 1), bytearray(MIB)]
    pieces = [[memoryview(each)[:1000], memoryview(each)[1000:]] for each in into]
    match = raykv.Match(3, ("n",) * 3)
    assert reader.get(["0", "1", "2"], pieces, match=match).hits == (True, False, True)
    assert (into[0], into[2]) == (content(0), content(2))


@needs_nixl
def test_a_node_that_is_killed_during_reads(node, reader):
    put(node, 16)
    get_over_nixl(node, reader, 16)
    threading.Timer(0.2, node.kill).start()
    worst_s, result, until_s = 0.0, None, time.monotonic() + 3.0
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        result = get(reader, 16, timeout_s=1.0)
        worst_s = max(worst_s, time.monotonic() - began_s)
    assert result is not None
    assert not any(result.hits)
    assert worst_s < 1.5
    node.start()  # the reader's process lives, and reads from the next process of the node


@needs_nixl
def test_a_node_that_hangs_delays_no_read_and_harms_no_buffer(node, reader):
    put(node, 16)
    get_over_nixl(node, reader, 16)
    moving = threading.Event()
    failures: list[BaseException] = []

    def read_on() -> None:
        try:
            while not moving.is_set():
                get(reader, 16, timeout_s=0.5)
        except BaseException as error:  # noqa: BLE001 - the test reports it
            failures.append(error)

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    for _ in range(3):
        nodes.stop_process(node.process.pid)
        began_s = time.monotonic()
        get(reader, 16, timeout_s=0.5)
        assert time.monotonic() - began_s < 1.5
        os.kill(node.process.pid, 18)
        time.sleep(0.2)
    moving.set()
    for thread in threads:
        thread.join()
    assert not failures
    wait_until(lambda: get(reader, 16).nbytes_by_path == {"nixl": 16 * MIB})


@needs_nixl
def test_random_eviction_during_reads(node, reader):
    seed = int(os.environ.get("RAYKV_TEST_SEED", random.randrange(1 << 30)))
    print("seed", seed)
    rng, stopping, hits = random.Random(seed), threading.Event(), 0
    put(node, 24)
    get_over_nixl(node, reader, 24)

    def churn() -> None:
        with node.client() as writer:
            while not stopping.is_set():  # the arena of 32 MiB evicts chunks to make room
                number = rng.randrange(200)
                writer.put([str(number)], [content(number)], chained=False)

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(40):
        hits += sum(get(reader, 24).hits)
    stopping.set()
    thread.join()
    assert hits > 0


@needs_nixl
def test_an_unknown_backend(node):
    with pytest.raises(raykv.ConfigError, match=r"no backend NOTHING here; there are: .*UCX"):
        node.client(local=False, nixl="NOTHING")


@pytest.mark.parametrize(
    ("value", "tls", "backends"),
    [
        ("off", False, ()),
        ("auto", False, ("UCX",)),
        ("auto", True, ()),
        ("UCX", True, ("UCX",)),
        ("UCX,GDS", False, ("UCX", "GDS")),
    ],
)
def test_backends(value, tls, backends):
    assert nixl_backends(value, tls=tls) == backends


def test_nixl_is_not_installed(monkeypatch):
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda name: None)
    with nodes.running_node(nixl="auto") as node:
        assert "nixl is not installed" in node.stats()["nixl"]["reason"]
        assert "nixl" not in node.member.endpoints
