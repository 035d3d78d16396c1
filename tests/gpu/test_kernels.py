"""The kernels copy the right bytes. The same source runs on the CPU, compiled by g++ with a shim for the CUDA words."""

import re
import shutil
import subprocess

import numpy as np
import pytest

from raykv.errors import UsageError
from raykv.gpu.paged import PLACE, RUN, SLICE_NBYTES, PagedCache, Run, chunk_numbers, streaks
from tests.support.gpu import KERNELS, HostCache, compile_kernels, random_sizes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


def launch(run, to_places, cache, part, places, grid, staging=0, pitch=0):
    runs = np.ascontiguousarray(cache.runs[part.first : part.first + part.runs])
    tables = (runs.ctypes.data, part.runs, places.ctypes.data, len(places))
    run(to_places, *grid, *tables, part.slices, part.origin, staging, pitch)


class Case:
    """A random cache, some of its layers, some of its blocks, and contiguous memory for them."""

    def __init__(self, rng, np_rng):
        self.host = HostCache(rng, np_rng, random_sizes(rng), rng.randint(1, 9))
        cache = self.cache = self.host.cache
        first = rng.randrange(cache.layers)
        self.layers = first, rng.randint(1, cache.layers - first)
        self.part = cache.part(*self.layers)
        self.blocks = rng.sample(range(cache.blocks), rng.randint(0, cache.blocks))
        self.starts = [rng.choice([0, 5, 16]) + cache.block_nbytes * place for place in range(len(self.blocks))]
        self.starts = [start + 64 * place for place, start in enumerate(self.starts)]
        rng.shuffle(self.starts)
        self.chunks = np_rng.integers(0, 256, cache.block_nbytes * len(self.blocks) + 2000, dtype=np.uint8)
        base = self.chunks.ctypes.data
        pairs = [(block, base + start) for block, start in zip(self.blocks, self.starts, strict=True)]
        self.places = np.array(pairs, PLACE)
        self.grid = rng.randint(1, 3), 32 * rng.randint(1, 4)

    @property
    def runs(self):
        return range(self.part.first, self.part.first + self.part.runs)

    @property
    def span(self):
        return slice(self.part.origin, self.part.origin + self.part.nbytes)


@pytest.mark.parametrize("number", range(60))
def test_gather_and_scatter_equal_the_copy_by_numpy(run, rng, np_rng, number):
    case = Case(rng, np_rng)
    expected = case.chunks.copy()
    for block, start in zip(case.blocks, case.starts, strict=True):
        expected[start : start + case.cache.block_nbytes][case.span] = case.host.content(block)[case.span]
    launch(run, 1, case.cache, case.part, case.places, case.grid)
    assert np.array_equal(case.chunks, expected)

    case.chunks[:] = np_rng.integers(0, 256, len(case.chunks), dtype=np.uint8)
    contents = [case.chunks[start : start + case.cache.block_nbytes] for start in case.starts]
    loaded = case.host.expect_loaded(case.blocks, contents, case.runs)
    launch(run, 0, case.cache, case.part, case.places, case.grid)
    assert np.array_equal(case.host.memory, loaded)


@pytest.mark.parametrize("number", range(20))
def test_with_a_pitch_the_parts_of_the_blocks_lie_one_after_the_other(run, rng, np_rng, number):
    case = Case(rng, np_rng)
    nbytes, count = case.part.nbytes, len(case.blocks)
    pitch = nbytes + rng.choice([0, 3, 16])
    staging = np_rng.integers(0, 256, pitch * count + 64, dtype=np.uint8)
    expected = staging.copy()
    for place, block in enumerate(case.blocks):
        expected[place * pitch : place * pitch + nbytes] = case.host.content(block)[case.span]
    launch(run, 1, case.cache, case.part, case.places, case.grid, staging.ctypes.data, pitch)
    assert np.array_equal(staging, expected)

    staging[:] = np_rng.integers(0, 256, len(staging), dtype=np.uint8)
    contents = []
    for place in range(count):
        content = np.zeros(case.cache.block_nbytes, np.uint8)
        content[case.span] = staging[place * pitch : place * pitch + nbytes]
        contents.append(content)
    loaded = case.host.expect_loaded(case.blocks, contents, case.runs)
    launch(run, 0, case.cache, case.part, case.places, case.grid, staging.ctypes.data, pitch)
    assert np.array_equal(case.host.memory, loaded)


def test_nvcc_compiles_the_kernels_with_vector_accesses_and_without_spilled_registers(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    ptx = tmp_path / "kernels.ptx"
    subprocess.run([nvcc, "-arch=sm_90", "-ptx", "-o", ptx, KERNELS], check=True)
    assert re.search(r"\bld\.(global\.)?v4\.[ub]32", ptx.read_text()), "loads of 16 bytes"
    assert re.search(r"\bst\.(global\.)?v4\.[ub]32", ptx.read_text()), "stores of 16 bytes"
    options = ["-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "kernels.cubin"]
    done = subprocess.run([nvcc, *options, KERNELS], check=True, capture_output=True, text=True)
    assert done.stderr.count("0 bytes stack frame, 0 bytes spill stores") == 2


def test_the_tables_are_what_the_kernels_read():
    source = KERNELS.read_text()
    assert f"SLICE = {SLICE_NBYTES};" in source
    for name, table in (("Run", RUN), ("Place", PLACE)):
        fields = re.search(rf"struct {name} \{{(.*?)\}};", source, re.DOTALL)
        assert fields
        assert re.findall(r"u64 (\w+);", fields[1]) == list(table.names)
        assert table.itemsize == 8 * len(table.names)


def test_the_content_of_a_block_is_its_layers_in_order():
    cache = PagedCache.of([[Run(1000, 64, 10), Run(2000, 64, 20)], [Run(3000, 64, 30)]], blocks=4)
    assert (cache.layers, cache.block_nbytes) == (2, 60)
    assert cache.runs["offset"].tolist() == [0, 10, 30]
    assert cache.part(0, 1) == (0, 2, 1, 0, 30)
    assert cache.part(1, 1) == (2, 1, 1, 30, 30)
    assert cache.part(0, 2) == (0, 3, 1, 0, 60)


def test_places_skip_blocks_that_are_not_copied_and_streaks_end_there():
    cache = PagedCache.of([[Run(1000, 64, 60)]], blocks=9)
    places = cache.places([([7, None, 1, 2], 10_000), ([3], 10_240), ([4], 20_000), ([], 5)])
    assert places.tolist() == [(7, 10_000), (1, 10_120), (2, 10_180), (3, 10_240), (4, 20_000)]
    assert streaks(places, 60) == [(0, 1), (1, 3), (4, 1)]
    assert streaks(places[:0], 60) == []
    assert chunk_numbers([([7, None, 1, 2], 0), ([], 0), ([3], 0)]).tolist() == [0, 0, 0, 2]
    assert streaks(places, 60, np.array([0, 0, 0, 1, 2])) == [(0, 1), (1, 2), (3, 1), (4, 1)]


@pytest.mark.parametrize("runs", [[], [Run(0, 8, 0)], [Run(0, 8, 9)]])
def test_a_cache_without_runs_or_with_wrong_ones_is_refused(runs):
    with pytest.raises(UsageError, match="runs"):
        PagedCache.of([runs], blocks=1)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 3), (2, 1)])
def test_layers_that_the_cache_lacks_are_refused(first, count):
    cache = PagedCache.of([[Run(0, 8, 8)], [Run(0, 8, 8)]], blocks=1)
    with pytest.raises(UsageError, match="layers"):
        cache.part(first, count)


@pytest.mark.parametrize("block", [-1, 2])
def test_blocks_that_the_cache_lacks_are_refused(block):
    with pytest.raises(UsageError, match="block numbers"):
        PagedCache.of([[Run(0, 8, 8)]], blocks=2).places([([0, block], 0)])
