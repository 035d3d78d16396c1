"""The benchmark's checks and its table, on a GPU whose kernels run on the CPU."""

import random

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu import Rig, Shape, checksum_rate, measure, pinned_arena, table
from raykv.gpu.copies import WAYS
from tests.support.cpu_gpu import CpuDevice

SHAPE = Shape(runs=6, run_nbytes=512, layer_runs=2, layer_flops=1.0, page_tokens=4)
PAGES = 40


@pytest.fixture
def rig(rng: random.Random, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "EXTENT_NBYTES", 1 << 16)
    device = CpuDevice(rng)
    with pinned_arena(device, PAGES * SHAPE.block_nbytes) as (arena, rate):
        assert rate > 0
        yield Rig(device, SHAPE, arena, 2 * PAGES, rng)
    assert not device.registered


def test_every_way_is_checked_byte_by_byte(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    for way in WAYS:
        rig.check(way)
    store, load = rig.store, rig.load

    def damaged(way):
        store(way)
        np.frombuffer(rig.arena.view, np.uint8)[rig.addresses[7] - rig.arena.address + 99] ^= 1

    monkeypatch.setattr(rig, "store", damaged)
    with pytest.raises(AssertionError, match="a stored chunk differs"):
        rig.check("staged")
    monkeypatch.setattr(rig, "store", store)
    monkeypatch.setattr(rig, "load", lambda way: [load(way), rig.chunks.pop()])
    with pytest.raises(AssertionError, match="direct"):  # a page that nobody asked for has changed
        rig.check("direct")


def test_all_lines_are_measured_and_move_all_bytes(rig: Rig):
    rates = measure(rig)
    assert list(rates) == ["plain copy", *WAYS, "a copy a run"]
    assert all(rate > 0 for each in rates.values() for rate in each.values())
    assert checksum_rate(rig) > 0
    memory = np.frombuffer(rig.arena.view, np.uint8)
    memory[:] = 0
    rig.copies.load(rig.chunks, rig.addresses)
    rig._copy_whole(rig.cache.address, rig.content.ctypes.data)
    rig.per_run(to_host=True)
    page, address = rig.chunks[5][0], rig.addresses[5] - rig.arena.address
    assert np.array_equal(memory[address:][: SHAPE.block_nbytes], rig.content[:, page].ravel())


def test_the_table_shows_shares_of_the_plain_copy():
    text = table({"plain copy": {"store": 50e9, "load": 40e9}, "staged": {"store": 45e9, "load": 10e9}})
    assert "45.00 GB/s   90.0%" in text
    assert "10.00 GB/s   25.0%" in text


def test_the_shape_of_a_70b_model():
    assert gpu.SHAPES["70b"].block_nbytes == 5 << 20
