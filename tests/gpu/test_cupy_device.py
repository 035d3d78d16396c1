"""What CupyDevice asks of cupy, with a module in its place that does the same in host memory."""

import numpy as np
import pytest

from raykv.gpu.copies import PagedCopies
from raykv.gpu.device import CupyDevice, Pitched
from raykv.gpu.pinning import Pinning
from raykv.memory.arena import SharedMemory
from tests.support.fake_cupy import fake_cupy
from tests.support.gpu import HostCache

EXTENT_NBYTES = 1 << 20


@pytest.fixture(scope="module")
def cupy(tmp_path_factory):
    return fake_cupy(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def device(cupy):
    cupy.cuda.runtime.devices.clear()
    return CupyDevice(cupy, 1)


@pytest.mark.parametrize("way", ["kernel", "staged"])
def test_bytes_survive_a_store_and_a_load(rng, np_rng, device, way):
    host = HostCache(rng, np_rng, [[4096, 100], [33], [2048, 2048]], 10)
    arena = SharedMemory.create(None, 2 * EXTENT_NBYTES)
    pinning = Pinning(device, arena, np.array([4096, 0], np.uint32), EXTENT_NBYTES)
    assert pinning.step()
    slots = np.frombuffer(arena.view, np.uint8)
    chunks = [([7, 2, 5], arena.address + 4096), ([0, 9], arena.address + EXTENT_NBYTES)]  # the second is not pinned
    store, load = (PagedCopies(device, host.cache, pinning, each, way) for each in ("store", "load"))
    transfer = store.begin(chunks)
    for layer in range(3):
        transfer.queue(layer, 1)
    transfer.wait()
    stored = np.concatenate([host.content(block) for block in (7, 2, 5)])
    assert np.array_equal(slots[4096 : 4096 + len(stored)], stored)
    right = host.memory.copy()
    for block in (7, 2, 5, 0, 9):
        for run in range(5):
            host.run(run, block)[:] = 0
    assert not np.array_equal(host.memory, right)
    load.begin(chunks).queue()
    load.close()
    assert np.array_equal(host.memory, right)
    pinning.close()
    arena.close()


def test_memory_is_registered_for_kernels_and_all_contexts(cupy, device):
    registered = cupy.cuda.runtime.registered
    assert device.register(4096, 8192) == 4096
    assert registered == {4096: (8192, 3)}
    with pytest.raises(OSError, match="CUDA: cudaErrorHostMemoryAlreadyRegistered"):
        device.register(4096, 8192)
    device.unregister(4096)
    device.unregister(4096)
    assert registered == {}


def test_each_call_uses_the_gpu_of_this_object(cupy, device):
    devices = cupy.cuda.runtime.devices
    stream = device.new_stream()
    begin, end = device.record(stream, timed=True), device.record(stream, timed=True)
    device.wait(stream, begin)
    device.synchronize(end)
    assert device.is_done(end)
    assert device.elapsed_s(begin, end) == 0.25
    assert set(devices) == {1}
    assert len(devices) == 8


def test_rows_are_copied_by_one_call_with_both_pitches(np_rng, cupy, device):
    source, to = np_rng.integers(0, 256, 100, dtype=np.uint8), np.zeros(100, np.uint8)
    before = cupy.cuda.runtime.copies
    device.copy_rows(Pitched(to.ctypes.data, 30), Pitched(source.ctypes.data, 20), 7, 3, device.new_stream())
    assert cupy.cuda.runtime.copies == before + 1
    expected = np.zeros(100, np.uint8)
    for row in range(3):
        expected[30 * row : 30 * row + 7] = source[20 * row : 20 * row + 7]
    assert np.array_equal(to, expected)
