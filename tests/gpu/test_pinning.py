"""Which parts of the arena are pinned, and when. CUDA is a recorder."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from raykv.gpu.pinning import Pinning, PinningThread
from raykv.memory.arena import SharedMemory
from tests.support.gpu_device import HostDevice
from tests.support.nodes import wait_until

EXTENTS, EXTENT_NBYTES = 8, 1 << 20


class Mapped:
    """An arena, of which some extents are populated, and its pinning."""

    def __init__(self, rng, path: Path | None = None) -> None:
        self.arena = SharedMemory.create(path, EXTENTS * EXTENT_NBYTES, huge_pages="never")
        self.extent_slots = np.zeros(EXTENTS, np.uint32)
        self.device = HostDevice(rng)
        self.pinning = Pinning(self.device, self.arena, self.extent_slots, EXTENT_NBYTES)

    def populate(self, *extents: int) -> None:
        self.extent_slots[list(extents)] = 4096

    def pinned(self) -> list[int]:
        offsets = [address - self.arena.address for address in sorted(self.device.registered)]
        assert all(nbytes == EXTENT_NBYTES for nbytes in self.device.registered.values())
        assert all(offset % EXTENT_NBYTES == 0 for offset in offsets)
        return [offset // EXTENT_NBYTES for offset in offsets]

    def steps(self) -> int:
        count = 0
        while self.pinning.step():
            count += 1
        return count


@pytest.fixture
def mapped(rng):
    return Mapped(rng)


def test_only_populated_extents_are_pinned_each_once(mapped):
    assert mapped.steps() == 0
    mapped.populate(1, 5)
    assert (mapped.steps(), mapped.pinned()) == (2, [1, 5])
    mapped.extent_slots[5] = 8192  # the extent serves another slot size
    assert mapped.steps() == 0
    mapped.populate(*range(EXTENTS))
    assert (mapped.steps(), mapped.pinned()) == (EXTENTS - 2, list(range(EXTENTS)))
    assert mapped.pinning.pinned_nbytes == EXTENTS * EXTENT_NBYTES


def test_pinning_takes_no_memory(mapped):
    mapped.populate(0)
    mapped.steps()
    assert os.stat(mapped.arena.path).st_blocks == 0


def test_the_address_for_the_gpu(mapped):
    start, size = mapped.arena.address, EXTENT_NBYTES
    mapped.populate(1, 2)
    mapped.steps()
    gpu = mapped.device.gpu_offset
    assert mapped.pinning.gpu_address(start + size, size) == start + size + gpu
    assert mapped.pinning.gpu_address(start + 2 * size + 100, 7) == start + 2 * size + 100 + gpu
    assert mapped.pinning.gpu_address(start + 2 * size - 1, 2) is None, "this crosses two registrations"
    assert mapped.pinning.gpu_address(start, 1) is None
    assert mapped.pinning.gpu_address(start - 1, 1) is None
    assert mapped.pinning.gpu_address(start + EXTENTS * size, 1) is None


def test_after_a_refusal_the_rest_is_pinned_when_cuda_allows_it(mapped, caplog):
    mapped.populate(0, 1, 2, 3)
    mapped.device.lockable_nbytes = 2 * EXTENT_NBYTES
    assert (mapped.steps(), mapped.pinned()) == (2, [0, 1])
    assert "out of memory" in mapped.pinning.refused
    assert mapped.steps() == 0
    assert len(caplog.records) == 1
    assert mapped.pinning.gpu_address(mapped.arena.address + 2 * EXTENT_NBYTES, 1) is None
    mapped.device.lockable_nbytes = 1 << 40
    assert (mapped.steps(), mapped.pinned(), mapped.pinning.refused) == (2, [0, 1, 2, 3], "")


def test_close_unpins_before_the_memory_is_unmapped(mapped):
    mapped.populate(0, 3)
    mapped.steps()
    mapped.arena.close()
    gc.collect()
    address = mapped.arena.address
    assert is_mapped(address)
    mapped.pinning.close()
    gc.collect()
    assert mapped.pinned() == []
    assert not is_mapped(address)
    assert mapped.steps() == 0
    assert mapped.pinning.gpu_address(address, 1) is None


def is_mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_the_thread_pins_what_is_populated_and_unpins_at_close(mapped):
    mapped.populate(0, 1, 2)
    thread = PinningThread(mapped.pinning, poll_s=0.001)
    wait_until(lambda: len(mapped.device.registered) == 3)
    mapped.populate(6)
    wait_until(lambda: mapped.pinned() == [0, 1, 2, 6])
    assert threading.current_thread() not in mapped.device.registering_threads
    thread.close()
    assert mapped.pinned() == []
