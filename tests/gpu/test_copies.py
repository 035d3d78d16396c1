"""Chunks are stored and loaded byte for byte, in any order in which a GPU may run what is queued."""

import gc
import sys
import threading

import numpy as np
import pytest

from raykv.errors import UsageError
from raykv.gpu.copies import PagedCopies
from tests.support.gpu import HostCache, compile_kernels, random_sizes
from tests.support.gpu_device import HostDevice

WAYS = ["kernel", "staged"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def switch_often():
    """Let Python switch between threads after each few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class PinnedParts:
    """Slots of which some are pinned."""

    def __init__(self, device):
        self._device = device

    def gpu_address(self, address, nbytes):
        return address if self._device.registered.get(address, -1) >= nbytes else None


class World:
    """A random cache on a GPU, chunks of its blocks, and slots for them. Some slots are not pinned."""

    def __init__(self, rng, np_rng, kernels, *, sizes=None, blocks=12, pinned=0.6):
        self.device = HostDevice(rng, kernels)
        self.host = HostCache(rng, np_rng, sizes or random_sizes(rng), blocks)
        self.device.add(self.host.memory)
        self.cache, self.engine = self.host.cache, self.device.new_stream()
        order, self.chunks = rng.sample(range(blocks), blocks), []
        while order:
            taken = [order.pop() for _ in range(rng.randint(1, min(4, len(order))))]
            self.chunks.append([None if rng.random() < 0.15 else block for block in taken])
        sizes = [len(chunk) * self.cache.block_nbytes for chunk in self.chunks]
        self.slots = [np_rng.integers(0, 256, nbytes + 32, dtype=np.uint8) for nbytes in sizes]
        for slot, nbytes in zip(self.slots, sizes, strict=True):
            if rng.random() < pinned:
                self.device.register(slot.ctypes.data, nbytes)
        self.pinned = PinnedParts(self.device)

    def copies(self, direction, way, **options):
        return PagedCopies(self.device, self.cache, self.pinned, direction, way, **options)

    def targets(self):
        return [(chunk, slot.ctypes.data) for chunk, slot in zip(self.chunks, self.slots, strict=True)]

    def expected_slots(self):
        """Return what the slots must be after a store. Bytes of no block are unchanged."""
        expected = [slot.copy() for slot in self.slots]
        for chunk, slot in zip(self.chunks, expected, strict=True):
            for place, block in enumerate(chunk):
                if block is not None:
                    start = place * self.cache.block_nbytes
                    slot[start : start + self.cache.block_nbytes] = self.host.content(block)
        return expected

    def expected_memory(self):
        """Return what the cache must be after a load."""
        size, blocks, contents = self.cache.block_nbytes, [], []
        for chunk, slot in zip(self.chunks, self.slots, strict=True):
            for place, block in enumerate(chunk):
                if block is not None:
                    blocks.append(block)
                    contents.append(slot[place * size : (place + 1) * size])
        return self.host.expect_loaded(blocks, contents, range(len(self.host.sizes)))

    def compute_layer(self, layer, final):
        """Queue the engine's kernels of a layer, which give it its bytes of `final`. Returns the event at their end."""

        def compute():
            for run in range(*self.cache.first_runs[layer : layer + 2]):
                for block in range(self.host.blocks):
                    self.host.run(run, block)[:] = self.host.run(run, block, final)
            return 0.0

        self.device.compute(self.engine, compute)
        return self.device.record(self.engine)


def options_of(rng, cache):
    """Choose a small staging memory, so that it is used several times."""
    return {"staging_nbytes": rng.randint(1, 8) * cache.block_nbytes, "kernel_blocks": rng.randint(1, 3)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(15))
def test_a_layerwise_store_copies_each_layer_after_it_was_computed(kernels, rng, np_rng, way, number):
    world = World(rng, np_rng, kernels)
    copies = world.copies("store", way, **options_of(rng, world.cache))
    final = world.host.memory.copy()
    expected = world.expected_slots()
    world.host.memory[:] = 0xEE
    transfer = copies.begin(world.targets())
    for layer in range(world.cache.layers):
        transfer.queue(layer, 1, after=world.compute_layer(layer, final))
    assert not world.device.waiting_threads, "the engine's thread never waits"
    transfer.wait()
    for slot, wanted in zip(world.slots, expected, strict=True):
        assert np.array_equal(slot, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_without_the_event_of_a_layer_the_bytes_are_wrong(kernels, rng, np_rng, way):
    """This shows that the test above can fail."""
    wrong = 0
    for _ in range(10):
        world = World(rng, np_rng, kernels)
        copies, final = world.copies("store", way), world.host.memory.copy()
        expected = world.expected_slots()
        world.host.memory[:] = 0xEE
        transfer = copies.begin(world.targets())
        for layer in range(world.cache.layers):
            world.compute_layer(layer, final)
            transfer.queue(layer, 1)
        transfer.wait()
        wrong += any(not np.array_equal(*each) for each in zip(world.slots, expected, strict=True))
    assert wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(15))
def test_a_load_changes_the_blocks_that_it_names_and_nothing_else(kernels, rng, np_rng, way, number):
    world = World(rng, np_rng, kernels)
    copies = world.copies("load", way, **options_of(rng, world.cache))
    expected = world.expected_memory()
    transfer = copies.begin(world.targets())
    layers, first = world.cache.layers, 0
    while first < layers:
        count = rng.randint(1, layers - first)
        event = transfer.queue(first, count)
        first += count
    seen = []
    world.device.wait(world.engine, event)
    world.device.compute(world.engine, lambda: seen.append(world.host.memory.copy()) or 0.0)
    assert not world.device.waiting_threads
    world.device.run_all()
    assert np.array_equal(seen[0], expected), "after the event, the engine sees the loaded bytes"
    assert np.array_equal(world.host.memory, expected)


@pytest.mark.parametrize("way", WAYS)
def test_transfers_share_streams_and_staging_memory(kernels, rng, np_rng, way, switch_often):
    """Two threads store different chunks at the same time."""
    world = World(rng, np_rng, kernels, blocks=40)
    copies, expected = world.copies("store", way, **options_of(rng, world.cache)), world.expected_slots()
    targets = world.targets()

    def store(part):
        for target in part:
            transfer = copies.begin([target])
            for layer in range(world.cache.layers):
                transfer.queue(layer, 1)
            transfer.wait()

    threads = [threading.Thread(target=store, args=(targets[start::2],)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot, wanted in zip(world.slots, expected, strict=True):
        assert np.array_equal(slot, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_a_dropped_transfer_lives_until_the_gpu_has_ended(kernels, rng, np_rng, way):
    world = World(rng, np_rng, kernels, pinned=1.0)
    copies, expected = world.copies("store", way), world.expected_slots()
    for target in world.targets():
        copies.begin([target]).queue()
    gc.collect()
    world.device.run_all()
    for slot, wanted in zip(world.slots, expected, strict=True):
        assert np.array_equal(slot, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_close_waits_for_transfers_that_nobody_waits_for(kernels, rng, np_rng, way):
    world = World(rng, np_rng, kernels, pinned=1.0)
    copies, expected = world.copies("load", way), world.expected_memory()
    copies.begin(world.targets()).queue()
    copies.close()
    assert np.array_equal(world.host.memory, expected)


def test_staged_copies_are_few(kernels, rng, np_rng):
    """The blocks of a chunk take one copy of the copy engine, whatever the number of runs and blocks."""
    world = World(rng, np_rng, kernels, sizes=[[64, 64], [64, 64]], blocks=8, pinned=1.0)
    world.chunks = [[5, 1, 7, 2], [0, 6, 3, 4]]
    world.slots = [np.zeros(4 * 256, np.uint8) for _ in world.chunks]
    for slot in world.slots:
        world.device.register(slot.ctypes.data, slot.nbytes)
    transfer, device = world.copies("store", "staged").begin(world.targets()), world.device
    transfer.queue()
    assert (device.counts["copy"], device.counts["gather"]) == (2, 1)
    for layer in range(2):
        transfer.queue(layer, 1)
    assert (device.counts["copy"], device.counts["gather"]) == (6, 3)
    transfer.wait()


@pytest.mark.parametrize("way", WAYS)
def test_no_chunks_and_no_layers(kernels, rng, np_rng, way):
    world = World(rng, np_rng, kernels)
    copies = world.copies("store", way)
    transfer = copies.begin([([], 0), ([None], world.slots[0].ctypes.data)])
    transfer.wait()
    transfer.queue()
    transfer.wait()
    assert world.device.counts["gather"] == world.device.counts["copy"] == 0
    with pytest.raises(UsageError, match="layers"):
        transfer.queue(world.cache.layers)


@pytest.mark.parametrize("way", WAYS)
def test_close_waits_for_the_tables_of_unused_copies(kernels, rng, np_rng, way):
    """Otherwise they would be freed during their upload."""
    world = World(rng, np_rng, kernels, pinned=1.0)
    copies = world.copies("store", way)
    copies.close()
    del copies
    gc.collect()
    world.device.run_all()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_no_copy_crosses_from_one_registered_extent_to_the_next(kernels, rng, np_rng, direction):
    """CUDA refuses such a copy, also if the extents are neighbours. Here chunks fill their extents."""
    world = World(rng, np_rng, kernels, sizes=[[4096], [4096]], blocks=8)
    size, extents = world.cache.block_nbytes, np.zeros(8 * 8192, np.uint8)
    world.chunks = [[5, 1], [0, 6], [3, 4]]
    for number in range(4):
        world.device.register(extents.ctypes.data + 2 * size * number, 2 * size)
    targets = [(chunk, extents.ctypes.data + 2 * size * number) for number, chunk in enumerate(world.chunks)]
    transfer = world.copies(direction, "staged").begin(targets)
    transfer.queue()
    transfer.wait()
    assert world.device.counts["copy"] == 3
