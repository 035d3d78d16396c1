"""The same on a real GPU: kernels, pinned memory, streams and events of CUDA. Skipped without cupy and a GPU."""

import ctypes
import gc
from dataclasses import replace

import numpy as np
import pytest

from raykv.gpu.calibration import calibrated
from raykv.gpu.copies import PagedCopies
from raykv.gpu.device import Pitched, missing, open_device
from raykv.gpu.pinning import Pinning
from raykv.memory.arena import SharedMemory
from tests.support.gpu import HostCache, random_sizes

LACK = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(LACK), reason=LACK)]

EXTENTS, EXTENT_NBYTES = 4, 2 << 20


@pytest.fixture(scope="module")
def device():
    return open_device()


class World:
    """A random cache in GPU memory, and an arena of which all extents but the last are pinned."""

    def __init__(self, rng, np_rng, device):
        self.device, self.stream = device, device.new_stream()
        self.host = HostCache(rng, np_rng, random_sizes(rng), 10)
        self.gpu = device.allocate(self.host.memory.nbytes)
        self.pinned = device.allocate_pinned(self.host.memory.nbytes)
        runs = self.host.cache.runs.copy()
        runs["address"] = runs["address"].astype(np.int64) + (self.gpu.address - self.host.memory.ctypes.data)
        self.cache = replace(self.host.cache, runs=runs)
        self.arena = SharedMemory.create(None, EXTENTS * EXTENT_NBYTES)
        self.bytes = np.frombuffer(self.arena.view, np.uint8)
        self.bytes[:] = np_rng.integers(0, 256, self.bytes.nbytes, dtype=np.uint8)
        slots = np.full(EXTENTS, 4096, np.uint32)
        slots[-1] = 0
        self.pinning = Pinning(device, self.arena, slots, EXTENT_NBYTES)
        while self.pinning.step():
            pass
        assert self.pinning.pinned_nbytes == (EXTENTS - 1) * EXTENT_NBYTES, self.pinning.refused
        order = rng.sample(range(10), 10)
        self.chunks = [(order[0:4], self.place(0)), ([order[4], None, order[5]], self.place(1))]
        self.chunks += [(order[6:8], self.place(2)), (order[8:10], self.place(EXTENTS - 1))]

    def place(self, extent):
        return self.arena.address + extent * EXTENT_NBYTES + 4096

    def upload(self, content):
        self.view()[:] = content
        self.copy(self.gpu.address, self.pinned.address)

    def download(self):
        self.copy(self.pinned.address, self.gpu.address)
        return self.view().copy()

    def view(self):
        return np.ctypeslib.as_array((ctypes.c_ubyte * self.pinned.nbytes).from_address(self.pinned.address))

    def copy(self, to, source):
        self.device.copy_rows(Pitched(to, 0), Pitched(source, 0), self.gpu.nbytes, 1, self.stream)
        self.device.synchronize(self.device.record(self.stream))

    def parts(self):
        """Yield each block that is copied, and the place of its bytes in the arena."""
        size = self.cache.block_nbytes
        for blocks, address in self.chunks:
            for place, block in enumerate(blocks):
                if block is not None:
                    start = address - self.arena.address + place * size
                    yield block, slice(start, start + size)

    def close(self):
        self.pinning.close()
        self.arena.close()


@pytest.fixture
def world(rng, np_rng, device):
    made = World(rng, np_rng, device)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["kernel", "staged"])
@pytest.mark.parametrize("number", range(5))
def test_a_layerwise_store_is_exact(world, device, way, number):
    world.upload(world.host.memory)
    expected = world.bytes.copy()
    for block, part in world.parts():
        expected[part] = world.host.content(block)
    copies = PagedCopies(device, world.cache, world.pinning, "store", way, staging_nbytes=5 * world.cache.block_nbytes)
    transfer = copies.begin(world.chunks)
    for layer in range(world.cache.layers):
        transfer.queue(layer, 1, after=device.record(world.stream))
    transfer.wait()
    copies.close()
    assert np.array_equal(world.bytes, expected)


@pytest.mark.parametrize("way", ["kernel", "staged"])
@pytest.mark.parametrize("number", range(5))
def test_a_load_is_exact(world, device, way, number):
    world.upload(world.host.memory)
    blocks, parts = zip(*world.parts(), strict=True)
    contents = [world.bytes[part] for part in parts]
    expected = world.host.expect_loaded(list(blocks), contents, range(len(world.host.sizes)))
    copies = PagedCopies(device, world.cache, world.pinning, "load", way, staging_nbytes=5 * world.cache.block_nbytes)
    copies.begin(world.chunks).queue()
    gc.collect()
    copies.close()
    assert np.array_equal(world.download(), expected)


def test_the_calibration_chooses_ways(world, device):
    store, load = calibrated(device, world.cache, world.pinning)
    assert (store.direction, load.direction) == ("store", "load")
    store.close()
    load.close()


def test_cuda_refuses_to_pin_the_same_memory_twice(world, device):
    with pytest.raises(OSError, match="CUDA"):
        device.register(world.arena.address, EXTENT_NBYTES)
