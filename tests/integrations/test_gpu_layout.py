"""Chunks between a KV cache on a GPU and the arena of a real node. The kernels run on the CPU; needs no engine."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import raykv  # noqa: E402
from raykv.client.leases import Pins  # noqa: E402
from raykv.errors import LostError  # noqa: E402
from raykv.gpu.pinning import ArenaPinning  # noqa: E402
from raykv.integrations import gpu_layout  # noqa: E402
from raykv.integrations.gpu_layout import GpuLayout, load_here, with_gpu_copies  # noqa: E402
from raykv.integrations.kv_layout import DeviceLayout, Layout  # noqa: E402
from tests.support.cpu_gpu import CpuDevice  # noqa: E402

LAYERS, BLOCKS, CHUNK_BLOCKS, CHUNKS = 3, 40, 2, 9
SPACE = raykv.Namespace(model="toy", chunk_tokens=4)
NAMES = [f"chunk {number}".encode() for number in range(CHUNKS)]
WAIT_S = 20.0


class Engine:
    """A KV cache with a client. Chunk n consists of the blocks 2 n and 2 n + 1."""

    def __init__(self, client: raykv.Client, rng: random.Random) -> None:
        self.client, self.gpu = client, CpuDevice(rng)
        self.layers = {f"layer.{n}": torch.zeros((BLOCKS, 2, 4, 16), dtype=torch.bfloat16) for n in range(LAYERS)}
        for layer in self.layers.values():
            self.gpu.adopt(layer.data_ptr(), layer.nbytes)
        staged = Layout(self.layers, BLOCKS, CHUNK_BLOCKS)
        self.layout = GpuLayout(staged, self.gpu, ArenaPinning(self.gpu), chunk_blocks=CHUNK_BLOCKS)
        self.keys, self.blocks = client.keys(NAMES), [[2 * n, 2 * n + 1] for n in range(CHUNKS)]

    def compute(self) -> None:
        for number, layer in enumerate(self.layers.values()):
            layer.view(torch.int16).random_(generator=torch.Generator().manual_seed(number))

    def save(self, first: int = 0, last: int = CHUNKS, fence: Any = None) -> raykv.PutResult:
        self.layout.use_arena(self.client)
        (values,) = self.layout.values([self.blocks[first:last]], fence)
        parent = self.keys[first - 1 : first] if first else None
        put = raykv.Put(self.keys[first:last], values, parent, first)
        return self.client.put_many([put], wait=True)

    def load(self, holders: Sequence[str] = ("node-0",) * CHUNKS) -> raykv.GetResult:
        return load_here(self.client, self.layout, self.keys, self.blocks, holders, WAIT_S)

    def wait_until_pinned(self) -> None:
        self.layout.use_arena(self.client)
        pinning = self.layout._pinning
        assert pinning is not None
        assert pinning.wait(WAIT_S)

    def holds(self, other: "Engine", chunks: range) -> bool:
        used = [block for number in chunks for block in self.blocks[number]]
        rest = [block for block in range(BLOCKS) if block not in used]
        return all(
            torch.equal(mine[used].view(torch.int16), theirs[used].view(torch.int16)) and not mine[rest].any()
            for mine, theirs in zip(self.layers.values(), other.layers.values(), strict=True)
        )


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, separate_hosts=True, arena_nbytes="16 MiB", extent_nbytes="1 MiB") as made:
        yield made


@pytest.fixture
def engines(cluster: raykv.EmbeddedCluster, rng: random.Random) -> Iterator[list[Engine]]:
    """Two engines of one host. The first one has computed KV."""
    clients = [cluster.client(SPACE) for _ in range(2)]
    made = [Engine(client, rng) for client in clients]
    made[0].compute()
    yield made
    for engine, client in zip(made, clients, strict=True):
        if engine.layout._pinning is not None:
            engine.layout._pinning.close()
        assert not engine.gpu.registered
        client.close()


def test_chunks_are_the_bytes_that_a_layout_in_host_memory_has(engines: list[Engine]):
    here, _ = engines
    assert here.save().stored == CHUNKS
    host = Layout(here.layers, BLOCKS, CHUNK_BLOCKS)
    into = [bytearray(host.chunk_nbytes) for _ in NAMES]
    assert all(here.client.get(here.keys, into).hits)
    assert into == [b"".join(views) for views in host.read(here.blocks)]


def test_the_first_copies_do_not_wait_for_pinning_and_later_ones_use_pinned_memory(engines: list[Engine]):
    here, there = engines
    here.gpu.go.clear()
    there.gpu.go.clear()
    assert here.save(0, 4).stored == 4
    assert here.gpu.unpinned_nbytes == 4 * here.layout.chunk_nbytes
    here.gpu.go.set()
    here.wait_until_pinned()
    assert here.save(4, CHUNKS).stored == CHUNKS - 4
    assert here.gpu.unpinned_nbytes == 4 * here.layout.chunk_nbytes, "the extent is pinned now"
    for _ in range(2):
        got = there.load()
        assert got.hits == (True,) * CHUNKS
        assert got.chunks_by_source == {("node-0", "shm"): CHUNKS}
        assert got.nbytes_by_path == {"shm": CHUNKS * here.layout.chunk_nbytes}
        assert there.holds(here, range(CHUNKS))
        there.gpu.go.set()
        there.wait_until_pinned()
    assert there.gpu.unpinned_nbytes == CHUNKS * here.layout.chunk_nbytes, "only the first load"


def test_the_checksums_are_those_of_the_bytes(engines: list[Engine], cluster: raykv.EmbeddedCluster):
    """Another host verifies them when it reads over the network."""
    here, _ = engines
    assert here.save().stored == CHUNKS
    cluster.settle()
    with cluster.client(SPACE, node=1) as client:
        into = [bytearray(here.layout.chunk_nbytes) for _ in NAMES]
        assert all(client.get(client.keys(NAMES), into).hits)


def test_only_leading_chunks_of_this_host_are_loaded_here(engines: list[Engine]):
    here, there = engines
    here.save(0, 3)
    here.save(4, 8)
    assert there.load().hits == (True,) * 3, "the fourth is not stored"
    assert there.holds(here, range(3))
    assert there.load(["node-0", "node-1", *["node-0"] * 7]).hits == (True,)
    assert there.load(["node-1"] * CHUNKS).hits == ()


def test_chunks_of_another_size_are_left_to_the_caller(engines: list[Engine]):
    here, there = engines
    assert here.client.put(here.keys[:1], [bytes(100)]).stored == 1
    assert there.load().hits == ()
    assert there.holds(here, range(0))


def test_pins_that_were_lost_during_the_copy_do_not_count(engines: list[Engine], monkeypatch: pytest.MonkeyPatch):
    here, there = engines
    here.save()
    monkeypatch.setattr(Pins, "valid", lambda _: False)
    assert there.load().hits == ()


def test_a_save_reads_the_cache_after_the_step(engines: list[Engine]):
    here, _ = engines
    here.gpu.use()
    stream, computed = here.gpu.stream(), torch.full((BLOCKS, 2, 4, 16), 1.5, dtype=torch.bfloat16)
    here.gpu.adopt(computed.data_ptr(), computed.nbytes)
    layer = here.layers["layer.1"]
    here.gpu.copy(layer.data_ptr(), computed.data_ptr(), computed.nbytes, stream)
    event = here.gpu.record(stream)
    assert not torch.equal(layer, computed)
    assert here.save(fence=event).stored == CHUNKS
    into = bytearray(here.layout.chunk_nbytes)
    assert here.client.get(here.keys[:1], [into]).hits == (True,)
    assert bytes(into) == b"".join(Layout(here.layers, BLOCKS, CHUNK_BLOCKS).read([[0, 1]])[0])
    assert torch.equal(layer, computed)


def test_an_error_of_cuda_is_raised_and_nothing_is_stored_or_pinned(
    engines: list[Engine], cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
):
    here, there = engines

    def fail(*_: object) -> None:
        raise LostError("gather: out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(here.gpu, "launch", fail)
        with pytest.raises(LostError, match="out of luck"):
            here.save()
    assert not here.client.exists(here.keys).any()
    assert here.save().stored == CHUNKS
    with monkeypatch.context() as patch:
        patch.setattr(there.gpu, "launch", fail)
        with pytest.raises(LostError, match="out of luck"):
            there.load()
    assert there.load().hits == (True,) * CHUNKS
    assert not cluster.nodes[0].store.table.columns.pins.any()


def test_without_cuda_the_layout_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    layers = {"layer": torch.zeros((BLOCKS, 2, 4, 16))}
    for layout in (Layout(layers, BLOCKS, 1), DeviceLayout(layers, BLOCKS, 1)):
        assert with_gpu_copies(layout, BLOCKS, 1) is layout
    assert not caplog.text
    monkeypatch.setattr(DeviceLayout, "gpu", 0)
    monkeypatch.setattr(gpu_layout, "missing", lambda: "cupy is missing")
    assert with_gpu_copies(layout, BLOCKS, 1) is layout
    assert "copies through the CPU: cupy is missing" in caplog.text


def test_a_gpu_with_cupy_gets_measured_copies(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    layers = {"layer": torch.ones((BLOCKS, 2, 4, 16))}
    gpu = CpuDevice(rng)
    gpu.adopt(layers["layer"].data_ptr(), layers["layer"].nbytes)
    monkeypatch.setattr(DeviceLayout, "gpu", 0)
    monkeypatch.setattr(gpu_layout, "missing", lambda: "")
    monkeypatch.setattr(gpu_layout, "_gpu", lambda _: (gpu, ArenaPinning(gpu)))
    layout = DeviceLayout(layers, BLOCKS, 1)
    with caplog.at_level("INFO"):
        made = with_gpu_copies(layout, BLOCKS, 1)
    assert isinstance(made, GpuLayout)
    assert (made.chunk_nbytes, made.description) == (layout.chunk_nbytes, layout.description)
    assert made.batch_chunks == layout.batch_chunks
    assert "copies between GPU and arena" in caplog.text
    assert bool((layers["layer"] == 1).all())
    monkeypatch.setattr(gpu, "allocate", lambda _: (_ for _ in ()).throw(LostError("cudaMalloc: no memory")))
    assert with_gpu_copies(layout, BLOCKS, 1) is layout
    assert "copies through the CPU: cudaMalloc: no memory" in caplog.text
