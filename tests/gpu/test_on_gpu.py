"""On a real GPU: the kernels as NVRTC compiles them, CUDA's streams, torch's tensors. Needs cupy and torch."""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raykv.errors import LostError
from raykv.gpu import driver
from raykv.gpu.copies import WAYS, Layers, PageCopies, Way
from raykv.gpu.device import CudaDevice, missing
from raykv.gpu.pinning import ArenaPinning, Pinning
from raykv.gpu.tiles import Run, Tiles
from raykv.memory.arena import SharedMemory

# Warnings of cupy and torch on their own lines are not ours to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

if reason := missing():
    pytest.skip(reason, allow_module_level=True)
torch = pytest.importorskip("torch")

LAYERS, PAGES, TOKENS, HEADS, CONTENT = 4, 256, 16, 8, 128
RUN_NBYTES = TOKENS * HEADS * CONTENT * 2
CHUNK_BLOCKS = 2
CHUNK_NBYTES = CHUNK_BLOCKS * LAYERS * 2 * RUN_NBYTES
EXTENT = 16 << 20
WAIT_S = 60.0


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture
def caches(device: CudaDevice, np_rng: np.random.Generator) -> dict[str, Any]:
    """Layers as vLLM's attention kernels have them: [2, pages, tokens, heads, content], seen as [pages, 2, ...]."""
    shape = (2, PAGES, TOKENS, HEADS, CONTENT)
    made = {}
    for number in range(LAYERS):
        layer = np_rng.integers(-(1 << 15), 1 << 15, shape, np.int16)
        made[f"{number}"] = torch.from_numpy(layer).cuda().view(torch.bfloat16).transpose(0, 1)
    torch.cuda.synchronize()
    return made


@pytest.fixture
def moving(device: CudaDevice, caches: dict[str, Any]) -> PageCopies:
    runs = [
        Run(layer[0, side].data_ptr(), layer.stride(0) * 2, RUN_NBYTES) for layer in caches.values() for side in (0, 1)
    ]
    return PageCopies(device, Tiles(runs), CHUNK_BLOCKS)


@pytest.fixture
def arena(shm_dir: Path) -> Iterator[SharedMemory]:
    memory = SharedMemory.create(shm_dir / "arena", 64 << 20)
    assert memory.populate(0, memory.nbytes)
    yield memory
    memory.close()


@pytest.fixture
def pinning(device: CudaDevice, arena: SharedMemory) -> Iterator[Pinning]:
    made = Pinning(device, arena, EXTENT)
    made.covers(arena.address, arena.nbytes)
    assert made.wait(WAIT_S)
    assert made.refused == ""
    assert made.covers(arena.address, arena.nbytes)
    yield made
    made.close()


def chunk_of(caches: dict[str, Any], pages: Sequence[int]) -> bytes:
    parts = [layer[page].contiguous().view(torch.int16).cpu().numpy() for page in pages for layer in caches.values()]
    return b"".join(part.tobytes() for part in parts)


def some_chunks(rng: random.Random, count: int) -> list[list[int]]:
    pages = rng.sample(range(PAGES), count * CHUNK_BLOCKS)
    return [pages[first : first + CHUNK_BLOCKS] for first in range(0, len(pages), CHUNK_BLOCKS)]


def slots(arena: SharedMemory, count: int, rng: random.Random) -> list[int]:
    return [arena.address + slot * CHUNK_NBYTES for slot in rng.sample(range(arena.nbytes // CHUNK_NBYTES), count)]


def at(arena: SharedMemory, address: int) -> bytes:
    start = address - arena.address
    return bytes(arena.view[start : start + CHUNK_NBYTES])


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_chunks_are_stored_and_loaded_bit_exactly(
    way: Way,
    is_pinned: bool,
    caches: dict[str, Any],
    moving: PageCopies,
    arena: SharedMemory,
    rng: random.Random,
    request,
):
    if is_pinned:
        request.getfixturevalue("pinning")
    chunks = some_chunks(rng, 40)
    addresses = slots(arena, 40, rng)
    seen = []
    for group in moving.store(chunks, addresses, way=way, is_pinned=is_pinned):
        for number in group:
            assert at(arena, addresses[number]) == chunk_of(caches, chunks[number])
            seen.append(number)
    assert sorted(seen) == list(range(40))
    before = {name: layer.clone() for name, layer in caches.items()}
    targets = some_chunks(rng, 40)
    torch.cuda.synchronize()
    moving.load(targets, addresses, way=way, is_pinned=is_pinned)
    expected = {name: layer.clone() for name, layer in before.items()}
    for source, target in zip(chunks, targets, strict=True):
        for one, other in zip(source, target, strict=True):
            for name, layer in expected.items():
                layer[other] = before[name][one]
    for name, layer in caches.items():
        assert torch.equal(layer.contiguous().view(torch.int16), expected[name].contiguous().view(torch.int16))


@pytest.mark.parametrize("way", WAYS)
def test_layers_are_copied_as_torch_computes_them(
    way: Way, caches: dict[str, Any], moving: PageCopies, arena: SharedMemory, pinning: Pinning, rng: random.Random
):
    chunks = some_chunks(rng, 20)
    addresses = slots(arena, 20, rng)
    busy = torch.randn(4096, 4096, device="cuda")

    def layers() -> Iterator[Layers]:
        for number, layer in enumerate(caches.values()):
            for _ in range(10):
                torch.matmul(busy, busy)  # so that the layer is written long after the event was recorded
            layer.view(torch.int16).bitwise_xor_(0x1234)
            yield range(2 * number, 2 * number + 2), torch.cuda.current_stream().record_event()

    assert list(moving.store(chunks, addresses, layers=layers(), way=way)) == [range(20)]
    for pages, address in zip(chunks, addresses, strict=True):
        assert at(arena, address) == chunk_of(caches, pages)


def test_calibration_measures_all_ways_and_leaves_the_cache_as_it_is(caches: dict[str, Any], moving: PageCopies):
    before = {name: layer.clone() for name, layer in caches.items()}
    rates = moving.calibrate(PAGES)
    assert set(rates) == {"store", "load"}
    assert all(rate > 1e8 for each in rates.values() for rate in each.values()), rates
    for name, layer in caches.items():
        assert torch.equal(layer.view(torch.int16), before[name].view(torch.int16))


def test_a_worker_on_a_gpu_shares_chunks_with_one_that_copies_through_the_cpu(caches: dict[str, Any]):
    """`DeviceLayout` and `GpuLayout` store the same bytes, over a real node."""
    import raykv
    from raykv.integrations.gpu_layout import GpuLayout, load_here, with_gpu_copies
    from raykv.integrations.kv_layout import DeviceLayout

    staged = DeviceLayout(caches, PAGES, CHUNK_BLOCKS)
    direct = with_gpu_copies(staged, PAGES, CHUNK_BLOCKS)
    assert isinstance(direct, GpuLayout)
    names = [f"{number}" for number in range(20)]
    blocks = [[2 * number, 2 * number + 1] for number in range(20)]
    expected = [chunk_of(caches, pages) for pages in blocks]
    with (
        raykv.embedded(1, arena_nbytes="64 MiB", extent_nbytes="16 MiB") as cluster,
        cluster.client(raykv.Namespace(model="m")) as client,
    ):
        direct.use_arena(client)
        for first in (0, 10):  # unpinned, then pinned
            (values,) = direct.values([blocks[first : first + 10]], direct.fence())
            put = raykv.Put(names[first : first + 10], values, chained=False)
            assert client.put_many([put], wait=True).stored == 10
            pinning = direct._pinning
            assert pinning is not None
            assert pinning.wait(WAIT_S)
            assert pinning.refused == ""
        into = [bytearray(CHUNK_NBYTES) for _ in names]
        assert all(client.get(names, into).hits)
        assert into == expected
        assert [b"".join(views) for views in staged.read(blocks, staged.fence())] == expected
        for layer in caches.values():
            layer.zero_()
        torch.cuda.synchronize()
        keys, me = client.keys(names), str(client.router.local_id)
        assert load_here(client, direct, keys, blocks, [me] * 20, 10.0).hits == (True,) * 20
        assert [chunk_of(caches, pages) for pages in blocks] == expected
        pinning.close()


def test_gpu_memory_is_exported_as_a_dma_buf(device: CudaDevice):
    memory = device.allocate(4 << 20)
    try:
        fd = driver.dma_buf(driver.library(), memory.address, memory.nbytes)
    except LostError as error:
        pytest.skip(f"this GPU or driver exports no dma-bufs: {error}")
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf")
    os.close(fd)


def test_an_arena_is_pinned_again_after_it_was_unpinned(device: CudaDevice, arena: SharedMemory):
    arenas = ArenaPinning(device)
    for _ in range(2):
        pinning = arenas.of(arena, EXTENT)
        pinning.covers(arena.address, arena.nbytes)
        assert pinning.wait(WAIT_S)
        assert pinning.refused == ""
        pinning.close()
        arenas = ArenaPinning(device)
