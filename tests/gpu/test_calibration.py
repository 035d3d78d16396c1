"""The measurement chooses the faster way, in simulated time, and leaves the engine's cache alone."""

import numpy as np
import pytest

from raykv.gpu import calibration
from raykv.gpu.calibration import calibrated, choose, rates, scratch_like
from raykv.gpu.paged import RUN
from tests.support.gpu import HostCache, compile_kernels
from tests.support.gpu_device import HostDevice

NBYTES = 4 << 20


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def host(rng, np_rng, monkeypatch):
    monkeypatch.setattr(calibration, "SAMPLE_NBYTES", NBYTES)
    return HostCache(rng, np_rng, [[4096, 4096], [1024], [4096, 4096]], blocks=3)


def test_rates_are_bytes_by_the_seconds_of_the_gpu(rng, kernels, host):
    device = HostDevice(rng, kernels)
    device.rates = {"gather": 5e9, "scatter": 2e9, "copy": 1e9, "gpu": 4e9}
    for direction, kernel in (("store", 5e9), ("load", 2e9)):
        found = rates(device, host.cache, direction)
        assert found["kernel"] == pytest.approx(kernel)
        assert found["staged"] == pytest.approx(0.8e9)  # the sample is one batch: first the kernel, then the copy


@pytest.mark.parametrize(
    ("gather", "scatter", "copy", "ways"),
    [
        (5e9, 5e9, 5e9, ("staged", "staged")),
        (5.5e9, 2e9, 5e9, ("kernel", "staged")),
        (2e9, 5.5e9, 5e9, ("staged", "kernel")),
        (9e9, 9e9, 5e9, ("kernel", "kernel")),
    ],
)
def test_each_direction_gets_a_way(rng, kernels, host, gather, scatter, copy, ways):
    device = HostDevice(rng, kernels)
    device.rates = {"gather": gather, "scatter": scatter, "copy": copy, "gpu": 1e15}
    before = host.memory.copy()
    pair = calibrated(device, host.cache, calibration.AllPinned())
    assert tuple(copies.way for copies in pair) == ways
    assert [copies.direction for copies in pair] == ["store", "load"]
    assert np.array_equal(host.memory, before)


@pytest.mark.parametrize(
    ("kernel", "staged", "way"),
    [(1.0, 1.0, "staged"), (1.04, 1.0, "staged"), (1.06, 1.0, "kernel"), (0.5, 1.0, "staged")],
)
def test_a_kernel_must_be_clearly_faster(kernel, staged, way):
    assert choose({"kernel": kernel, "staged": staged}) == way


def test_the_scratch_cache_has_runs_of_the_same_lengths_side_by_side(host):
    scratch = scratch_like(host.cache, 7, 1000)
    assert scratch.runs["nbytes"].tolist() == host.cache.runs["nbytes"].tolist()
    assert scratch.first_runs == host.cache.first_runs
    assert scratch.runs.dtype == RUN
    ends = scratch.runs["address"] + scratch.runs["nbytes"] * 7
    assert [1000, *ends[:-1]] == scratch.runs["address"].tolist()
    assert ends[-1] == 1000 + 7 * scratch.block_nbytes
