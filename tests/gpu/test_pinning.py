"""Extents are pinned in the background, once, and unpinned when nothing uses them."""

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.gpu.pinning import ArenaPinning, Pinning
from raykv.memory.arena import SharedMemory
from tests.support.cpu_gpu import CpuDevice

EXTENT, EXTENTS = 1 << 20, 4
WAIT_S = 20.0


@pytest.fixture
def arena(shm_dir: Path) -> Iterator[SharedMemory]:
    memory = SharedMemory.create(shm_dir / "arena", EXTENTS * EXTENT)
    yield memory
    memory.close()


@pytest.fixture
def device(rng: random.Random) -> Iterator[CpuDevice]:
    """A device whose `register` waits until the test lets it go on."""
    made = CpuDevice(rng)
    made.go.clear()
    yield made
    made.go.set()


def test_the_first_use_of_an_extent_requests_it_and_does_not_wait(device: CpuDevice, arena: SharedMemory):
    pinning = Pinning(device, arena, EXTENT)
    for _ in range(3):
        assert not pinning.covers(arena.address + EXTENT + 5, 1000)  # `register` has not ended
    assert not device.registered
    device.go.set()
    assert pinning.wait(WAIT_S)
    assert device.registered == {arena.address + EXTENT: EXTENT}
    assert pinning.covers(arena.address + EXTENT, EXTENT)
    assert not pinning.covers(arena.address + 2 * EXTENT - 1, 2), "one of its two bytes is in another extent"
    assert pinning.wait(WAIT_S)
    assert pinning.covers(arena.address + 2 * EXTENT - 1, 2)
    pinning.close()
    assert not device.registered


def test_memory_outside_the_arena_is_not_pinned(device: CpuDevice, arena: SharedMemory):
    device.go.set()
    pinning = Pinning(device, arena, EXTENT)
    for start, nbytes in ((-1, 10), (EXTENTS * EXTENT - 1, 2), (EXTENTS * EXTENT, 1)):
        assert not pinning.covers(arena.address + start, nbytes)
    assert pinning.wait(WAIT_S)
    assert not device.registered
    pinning.close()


def test_a_refusal_ends_the_attempts(device: CpuDevice, arena: SharedMemory, caplog: pytest.LogCaptureFixture):
    device.go.set()
    device.refusal = "cudaHostRegister: not supported"
    pinning = Pinning(device, arena, EXTENT)
    for extent in range(EXTENTS):
        assert not pinning.covers(arena.address + extent * EXTENT, 1)
        assert pinning.wait(WAIT_S)
    assert pinning.refused == "cudaHostRegister: not supported"
    assert caplog.text.count("not pinned") == 1
    pinning.close()


def test_an_arena_is_unpinned_when_the_last_copy_drops_it(device: CpuDevice, arena: SharedMemory):
    device.go.set()
    pinning = Pinning(device, arena, EXTENT)
    for extent in range(EXTENTS):
        pinning.covers(arena.address + extent * EXTENT, 1)
    assert pinning.wait(WAIT_S)
    assert len(device.registered) == EXTENTS
    del pinning
    gc.collect()
    assert not device.registered


def test_close_waits_for_the_extent_that_is_being_pinned(device: CpuDevice, arena: SharedMemory):
    pinning = Pinning(device, arena, EXTENT)
    pinning.covers(arena.address, EXTENTS * EXTENT)
    closing = threading.Thread(target=pinning.close)
    closing.start()
    assert closing.is_alive()
    device.go.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert not device.registered
    assert not pinning.covers(arena.address, 1)
    assert pinning.wait(WAIT_S)
    assert not device.registered


def test_a_new_arena_replaces_the_old_one(device: CpuDevice, arena: SharedMemory, shm_dir: Path):
    device.go.set()
    current, other = ArenaPinning(device), SharedMemory.create(shm_dir / "other", EXTENT)
    old = current.of(arena, EXTENT)
    assert current.of(arena, EXTENT) is old
    old.covers(arena.address, 1)
    assert old.wait(WAIT_S)
    new = current.of(other, EXTENT)
    new.covers(other.address, 1)
    assert new.wait(WAIT_S)
    assert set(device.registered) == {arena.address, other.address}, "a copy may still use the old arena"
    del old
    gc.collect()
    assert set(device.registered) == {other.address}
    new.close()
    other.close()
