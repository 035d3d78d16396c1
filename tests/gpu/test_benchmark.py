"""The benchmark computes rates and compares bytes, on a device in host memory and in simulated time."""

import pytest

from benchmarks.gpu import Bench, Shape, bars, table
from raykv.gpu.device import Pitched
from tests.support.gpu import compile_kernels
from tests.support.gpu_device import HostDevice

SMALL = Shape(layers=3, heads=1, head_nbytes=16, blocks=24, chunk_blocks=2, extent_nbytes=64 << 10)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def bench(rng, kernels):
    device = HostDevice(rng, kernels)
    device.rates = {"gather": 0.95e9, "scatter": 0.8e9, "copy": 1e9, "gpu": 1e18}
    made = Bench(
        device, lambda to, source, n, stream: device.copy_rows(Pitched(to, 0), Pitched(source, 0), n, 1, stream), SMALL
    )
    yield made
    made.close()


def test_rates_are_shares_of_the_plain_copy(bench):
    for _ in range(2):
        bench.round()
    rates = bench.rates()
    limit = rates["store: plain copy, cudaHostAlloc"]
    assert limit == pytest.approx(1e9)
    assert rates["store: kernel, all layers"] == pytest.approx(0.95e9)
    assert rates["load: kernel, by layer"] == pytest.approx(0.8e9)
    assert len(rates) == 14
    assert all(len(times) == 2 for times in bench.seconds.values())
    found = bars(rates, {"kernel, prefill": {"slowdown": 1.02}, "staged, prefill": {"slowdown": 1.001}}, bench.wrong)
    assert [line.split()[0] for line in found] == ["met"] * 4
    assert "staged, prefill: 1.0010" in found[2]
    slow = dict.fromkeys(rates, 1.0) | {"load: plain copy, cudaHostAlloc": 1.2}
    found = bars(slow, {"kernel, prefill": {"slowdown": 1.02}}, ["a line"])
    assert [line.split()[0] for line in found] == ["met", "MISSED", "MISSED", "MISSED"]
    assert len(table(rates)) == 15


def test_wrong_bytes_are_found(bench):
    bench.round()
    assert bench.wrong == []
    block = bench.moved[3]
    bench.contents[1][5] ^= 1  # of the expected bytes of the second chunk
    bench.round()
    assert {line.partition(":")[0] for line in bench.wrong} == {"store", "load"}
    assert len(bench.wrong) == 8
    assert block in bench.chunks[1][0]
