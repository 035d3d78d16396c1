"""All ways of copies, on a device that runs its streams in random legal orders, against NumPy."""

import random
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from raykv.errors import LostError
from raykv.gpu import copies
from raykv.gpu.copies import WAYS, Layers, PageCopies, Way
from raykv.gpu.tiles import Run, Tiles
from tests.support.cpu_gpu import CpuDevice, CpuMemory

PAGES, LAYERS, RUN_NBYTES, CHUNK_BLOCKS = 40, 3, 272, 2
BLOCK_NBYTES = LAYERS * 2 * RUN_NBYTES
CHUNK_NBYTES = CHUNK_BLOCKS * BLOCK_NBYTES
LAYER_RUNS = [range(2 * layer, 2 * layer + 2) for layer in range(LAYERS)]


class Cache:
    """A paged KV cache in the memory of a device: keys and values of each layer, [layers, 2, pages, bytes]."""

    def __init__(self, device: CpuDevice, np_rng: np.random.Generator) -> None:
        self.memory: CpuMemory = device.allocate(LAYERS * 2 * PAGES * RUN_NBYTES)
        self.array = self.memory.array.reshape(LAYERS, 2, PAGES, RUN_NBYTES)
        self.array[:] = np_rng.integers(0, 256, self.array.shape, np.uint8)
        layers = self.array.reshape(LAYERS * 2, PAGES, RUN_NBYTES)
        self.tiles = Tiles([Run(layer.ctypes.data, RUN_NBYTES, RUN_NBYTES) for layer in layers])

    def chunk(self, pages: list[int]) -> npt.NDArray[np.uint8]:
        return np.concatenate([self.array[:, :, page].ravel() for page in pages])


@pytest.fixture
def device(rng: random.Random) -> CpuDevice:
    return CpuDevice(rng)


@pytest.fixture
def cache(device: CpuDevice, np_rng: np.random.Generator) -> Cache:
    return Cache(device, np_rng)


@pytest.fixture
def moving(device: CpuDevice, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> PageCopies:
    """Copies with stages for two chunks, so that every call uses each stage several times."""
    monkeypatch.setattr(copies, "STAGE_NBYTES", 2 * CHUNK_NBYTES + 100)
    return PageCopies(device, cache.tiles, CHUNK_BLOCKS)


def some_chunks(rng: random.Random, count: int) -> list[list[int]]:
    pages = rng.sample(range(PAGES), count * CHUNK_BLOCKS)
    return [pages[first : first + CHUNK_BLOCKS] for first in range(0, len(pages), CHUNK_BLOCKS)]


def slots(memory: npt.NDArray[np.uint8], count: int, rng: random.Random) -> list[int]:
    return [memory.ctypes.data + number * CHUNK_NBYTES for number in rng.sample(range(count), count)]


def at(memory: npt.NDArray[np.uint8], address: int) -> npt.NDArray[np.uint8]:
    return memory[address - memory.ctypes.data :][:CHUNK_NBYTES]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", range(5))
def test_chunks_are_stored_and_loaded_bit_exactly(
    case: int, way: Way, device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random
):
    count = rng.randint(1, 13)
    chunks = some_chunks(rng, count)
    memory = device.host_memory(count * CHUNK_NBYTES)
    addresses = slots(memory, count, rng)
    seen = []
    for group in moving.store(chunks, addresses, way=way):
        for number in group:  # the bytes of these chunks are there now, not only at the end
            assert (at(memory, addresses[number]) == cache.chunk(chunks[number])).all()
            seen.append(number)
    assert sorted(seen) == list(range(count))

    targets: list[list[int | None]] = [[*pages] for pages in some_chunks(rng, count)]
    targets[0][rng.randrange(CHUNK_BLOCKS)] = None
    expected = cache.array.copy()
    old = cache.array.copy()
    for source, target in zip(chunks, targets, strict=True):
        for one, other in zip(source, target, strict=True):
            if other is not None:
                expected[:, :, other] = old[:, :, one]
    moving.load(targets, addresses, way=way)
    assert (cache.array == expected).all()
    assert device.unpinned_nbytes == 0
    assert bool(device.launches) == (way != "batched")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", range(3))
def test_layers_are_copied_as_the_engine_computes_them(
    case: int, way: Way, device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random
):
    count, engine = rng.randint(1, 9), device.stream()
    device.use()
    chunks = some_chunks(rng, count)
    memory = device.host_memory(count * CHUNK_NBYTES)
    addresses = slots(memory, count, rng)
    computed = np.random.default_rng(case).integers(0, 256, cache.array.shape, np.uint8)
    source = CpuMemory(cache.array.nbytes, rng)
    source.array[:] = computed.ravel()
    layer_nbytes = 2 * PAGES * RUN_NBYTES

    def layers() -> Iterator[Layers]:
        for layer in range(LAYERS):
            start = layer * layer_nbytes
            device.copy(cache.memory.address + start, source.address + start, layer_nbytes, engine)
            yield LAYER_RUNS[layer], device.record(engine)

    assert list(moving.store(chunks, addresses, layers=layers(), way=way)) == [range(count)]
    for pages, address in zip(chunks, addresses, strict=True):
        expected = np.concatenate([computed[:, :, page].ravel() for page in pages])
        assert (at(memory, address) == expected).all()


def test_a_store_reads_the_pages_after_the_event_of_the_engine(
    device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random
):
    device.use()
    engine, new = device.stream(), device.allocate(cache.array.nbytes)
    device.copy(cache.memory.address, new.address, new.nbytes, engine)
    memory = device.host_memory(CHUNK_NBYTES)
    list(moving.store([[3, 5]], [memory.ctypes.data], after=device.record(engine)))
    expected = new.array.reshape(cache.array.shape)
    assert (memory == np.concatenate([expected[:, :, page].ravel() for page in (3, 5)])).all()


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_is_not_pinned_is_copied_without_kernels_that_address_it(
    way: Way, device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random
):
    chunks, memory = some_chunks(rng, 3), np.zeros(3 * CHUNK_NBYTES, np.uint8)
    addresses = slots(memory, 3, rng)
    list(moving.store(chunks, addresses, is_pinned=False, way=way))
    assert device.unpinned_nbytes == memory.nbytes
    for pages, address in zip(chunks, addresses, strict=True):
        assert (at(memory, address) == cache.chunk(pages)).all()
    before = cache.array.copy()
    cache.array[:] = 0
    moving.load(chunks, addresses, is_pinned=False, way=way)
    used = [page for pages in chunks for page in pages]
    assert (cache.array[:, :, used] == before[:, :, used]).all()


@pytest.mark.parametrize("way", WAYS)
def test_an_abandoned_store_writes_nothing_afterwards(
    way: Way, device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random
):
    chunks, memory = some_chunks(rng, 12), device.host_memory(12 * CHUNK_NBYTES)
    running = moving.store(chunks, slots(memory, 12, rng), way=way)
    next(running)
    running.close()
    memory[:] = 7  # the slots belong to somebody else now
    other = device.host_memory(CHUNK_NBYTES)
    list(moving.store(chunks[:1], [other.ctypes.data], way=way))
    assert (memory == 7).all()


def test_an_error_of_cuda_leaves_the_copies_usable(
    device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random, monkeypatch: pytest.MonkeyPatch
):
    chunks, memory = some_chunks(rng, 2), device.host_memory(2 * CHUNK_NBYTES)
    addresses = slots(memory, 2, rng)

    def fail(*_: object) -> None:
        raise LostError("cudaMemcpyAsync: out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(device, "launch", fail)
        with pytest.raises(LostError, match="out of luck"):
            list(moving.store(chunks, addresses))
        with pytest.raises(LostError, match="out of luck"):
            moving.load(chunks, addresses)
    list(moving.store(chunks, addresses))
    assert (at(memory, addresses[1]) == cache.chunk(chunks[1])).all()


def test_stores_and_loads_of_several_threads(device: CpuDevice, cache: Cache, moving: PageCopies, rng: random.Random):
    """Each thread moves its own pages back and forth. The other pages belong to the other threads."""
    before, problems = cache.array.copy(), []
    every = some_chunks(rng, 20)
    works = [every[first : first + 5] for first in range(0, 20, 5)]
    seeds = [rng.random() for _ in works]

    def work(chunks: list[list[int]], seed: float) -> None:
        mine = random.Random(seed)
        device.use()
        memory = device.host_memory(5 * CHUNK_NBYTES)
        addresses = slots(memory, 5, mine)
        for _ in range(8):
            way = mine.choice(WAYS)
            list(moving.store(chunks, addresses, way=way))
            for pages, address in zip(chunks, addresses, strict=True):
                expected = np.concatenate([before[:, :, page].ravel() for page in pages])
                if not (at(memory, address) == expected).all():
                    problems.append(way)
                cache.array[:, :, pages] = 0
            moving.load(chunks, addresses, way=mine.choice(WAYS))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(works, seeds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert (cache.array == before).all()


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"staged": 1.0, "direct": 0.97, "batched": 3.0}, "staged"),
        ({"staged": 1.0, "direct": 0.9, "batched": 3.0}, "direct"),
        ({"staged": 2.0, "direct": 2.0, "batched": 1.0}, "batched"),
    ],
)
def test_the_way_that_disturbs_least_is_chosen_among_the_fast_ones(
    seconds: dict[Way, float], chosen: Way, device: CpuDevice, cache: Cache, moving: PageCopies, monkeypatch
):
    before = cache.array.copy()
    now_s, store, load = [0.0], moving.store, moving.load

    def timed_store(*args, way, **kwargs):
        yield from store(*args, way=way, **kwargs)
        now_s[0] += seconds[way]

    def timed_load(*args, way, **kwargs):
        load(*args, way=way, **kwargs)
        now_s[0] += seconds["staged" if way == chosen else "batched"] + (way != "direct")

    monkeypatch.setattr(moving, "store", timed_store)
    monkeypatch.setattr(moving, "load", timed_load)
    rates = moving.calibrate(PAGES, clock=lambda: now_s[0])
    assert moving.ways["store"] == chosen
    assert rates["store"] == pytest.approx({way: PAGES * BLOCK_NBYTES / s for way, s in seconds.items()})
    best = max(rates["load"].values())
    assert rates["load"][moving.ways["load"]] >= 0.95 * best
    assert (cache.array == before).all(), "calibration leaves the cache as it was"
    device.has_batched_copies = False
    assert set(moving.calibrate(PAGES, clock=lambda: now_s[0])["store"]) == {"staged", "direct"}
