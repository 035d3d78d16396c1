"""Reads over RDMA between two nodes. They need two devices; see conftest.py."""

import random
import threading
import time

import pytest

import raykv
from raykv.errors import CapacityError
from raykv.protocol import chunk_keys
from tests.rdma.support import TIMEOUT_S, content, pair
from tests.support.nodes import wait_until

pytestmark = pytest.mark.verbs

SIZES = [1, 31, 4096, 65_536, 65_537, 300_000, 1 << 20, 2_000_001]


@pytest.fixture(scope="module")
def both():
    with pair() as made:
        made.wait_registered()
        yield made


def test_no_byte_over_tcp_and_one_request(both):
    names = both.put(SIZES)
    both.get(names[:1], SIZES[:1])  # connects the queue pairs
    before = both.requests()
    result, into = both.get(names, SIZES)
    assert result.hits == (True,) * len(SIZES)
    assert result.nbytes_by_path == {"rdma": sum(SIZES)}
    assert [bytes(each) for each in into] == [content(number, size) for number, size in enumerate(SIZES)]
    asked = both.requests() - before
    assert {name: asked[name] for name in ("Read", "Pin", "Unpin", "Suspect")} == dict.fromkeys(
        ("Read", "Pin", "Unpin", "Suspect"), 0
    )
    assert asked["Find"] <= 2  # one as the owner of some keys, one as the holder of the others


def test_chunks_in_several_buffers(both, rng):
    size = 200_000
    (name,) = both.put([size], first=100)
    cuts = sorted(rng.sample(range(size), 20))
    pieces = [bytearray(end - start) for start, end in zip([0, *cuts], [*cuts, size], strict=True)]
    assert both.reader.get([name], [pieces]).hits == (True,)
    assert b"".join(pieces) == content(100, size)


def test_missing_chunks_and_wrong_lengths(both):
    sizes = [1000, 2000, 3000]
    names = both.put(sizes, first=200)
    result, into = both.get([names[0], "nothing", names[1], names[2]], [1000, 10, 1999, 3000])
    assert result.hits == (True, False, False, True)
    assert bytes(into[3]) == content(202, 3000)


def test_a_corrupt_chunk_is_a_miss_and_dropped(both):
    (name,) = both.put([50_000], first=300)
    node = both.cluster.nodes[0]
    with node.lock:
        pinned = node.store.pin(chunk_keys.from_bytes(both.writer.key(name)), now_s=time.monotonic())
        node.store.unpin(pinned.rows)
    start = int(pinned.offsets[0])
    node.store.arena.view[start + 777] ^= 1
    result, _ = both.get([name], [50_000])
    assert result.hits == (False,)
    wait_until(lambda: not both.writer.exists([name])[0])


def test_several_windows(both, monkeypatch):
    monkeypatch.setattr("raykv.transport.one_sided.remote_read.STAGE_NBYTES", 700_000)  # two chunks, and their records
    sizes = [300_000] * 7
    names = both.put(sizes, first=400)
    result, into = both.get(names, sizes)
    assert result.nbytes_by_path == {"rdma": sum(sizes)}
    assert [bytes(each) for each in into] == [content(number, 300_000) for number in range(400, 407)]


@pytest.mark.parametrize("gets", [10, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_reads_under_eviction(both, rng, gets):
    """The writer replaces all chunks again and again, while readers read them at random: no wrong byte."""
    size, at_once, problems, done = 20_000, 25, list[str](), threading.Event()
    names = [f"busy-{number}" for number in range(60)]
    counts = {"hit": 0, "miss": 0}

    def bytes_of(name: str, version: int) -> bytes:
        return f"{name}/{version}/".encode() * 2000

    def write(seed: int) -> None:
        own = random.Random(seed)
        while not done.is_set():
            some = own.sample(names, 20)
            both.writer.delete(some)
            both.writer.put(some, [bytes_of(name, own.randrange(1000))[:size] for name in some])

    def read(seed: int) -> None:
        own, client = random.Random(seed), both.reader
        for _ in range(gets):
            some = own.sample(names, at_once)
            into = [bytearray(size) for _ in some]
            hits = client.get(some, into, timeout_s=TIMEOUT_S).hits
            for name, hit, each in zip(some, hits, into, strict=True):
                counts["hit" if hit else "miss"] += 1
                head = bytes(each[: each.index(b"/", len(name) + 1) + 1]) if hit else b""
                if hit and (not head.startswith(f"{name}/".encode()) or bytes(each) != (head * 2000)[:size]):
                    problems.append(name)

    writer = threading.Thread(target=write, args=(rng.randrange(1 << 30),))
    readers = [threading.Thread(target=read, args=(rng.randrange(1 << 30),)) for _ in range(2)]
    writer.start()
    for each in readers:
        each.start()
    for each in readers:
        each.join()
    done.set()
    writer.join()
    print(counts)
    assert not problems
    assert sum(counts.values()) == 2 * at_once * gets
    assert counts["hit"] > sum(counts.values()) / 4


def test_memory_that_is_not_registered_is_read_over_tcp(monkeypatch):
    from raykv.transport.rdma.device import Device

    register, taken = Device.register, []

    def limited(self, address, nbytes, *, remote):
        if remote and nbytes == 4 << 20:
            taken.append(address)
            if len(taken) > 2:  # one extent, with two devices
                raise CapacityError("the limit of locked memory")
        return register(self, address, nbytes, remote=remote)

    monkeypatch.setattr(Device, "register", limited)
    with pair(name="limited") as made:
        names = made.put([1 << 20] * 12)
        wait_until(lambda: made.cluster.nodes[0].stats()["rdma"]["reason"])
        result, into = made.get(names, [1 << 20] * 12)
        assert result.hits == (True,) * 12
        assert [bytes(each) for each in into] == [content(number, 1 << 20) for number in range(12)]
        assert result.nbytes_by_path["tcp"] > 0
        assert "locked memory" in made.cluster.nodes[0].stats()["rdma"]["reason"]


def test_off_means_tcp(both):
    (name,) = both.put([5000], first=500)
    client = both.cluster.client(raykv.Namespace(model="m"), node=1, rdma="off")
    assert client.get([name], [bytearray(5000)]).nbytes_by_path == {"tcp": 5000}
