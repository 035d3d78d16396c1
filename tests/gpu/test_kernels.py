"""The kernels, compiled for the CPU, against NumPy on random layouts; and compiled for GPUs where nvcc is installed."""

import ctypes
import random
import shutil
import subprocess

import numpy as np
import numpy.typing as npt
import pytest

from raykv.gpu.device import KERNELS
from raykv.gpu.tiles import PLACE, TILE, TILE_NBYTES, Run, Tiles, places_of
from tests.support.cpu_gpu import kernels

PAGES = 9


def random_runs(rng: random.Random) -> tuple[list[Run], npt.NDArray[np.uint8], list[npt.NDArray[np.uint8]]]:
    """Make a KV cache of random layout.

    Returns:
        The runs; the memory that they lie in; and for each run a view [PAGES, bytes of the run].
    """
    unit = rng.choice([1, 2, 4, 16, 16, 16])
    lengths = [unit * rng.choice([1, 3, 8, 64, TILE_NBYTES // 16, 700]) for _ in range(rng.randint(1, 5))]
    memory = np.zeros(sum(lengths) * PAGES * 2 + 4096, np.uint8)
    start = -memory.ctypes.data % 16 + unit * rng.randint(0, 3)
    runs, views = [], []
    if rng.random() < 0.5:  # pages are outermost, with gaps between them
        stride = sum(lengths) + unit * rng.randint(0, 2)
        for nbytes in lengths:
            views.append(np.lib.stride_tricks.as_strided(memory[start:], (PAGES, nbytes), (stride, 1)))
            start += nbytes
    else:
        for nbytes in lengths:
            stride = nbytes + unit * rng.randint(0, 2)
            views.append(np.lib.stride_tricks.as_strided(memory[start:], (PAGES, nbytes), (stride, 1)))
            start += stride * PAGES
    runs = [Run(view.ctypes.data, view.strides[0], view.shape[1]) for view in views]
    return runs, memory, views


def launch(kernel: str, tiles: Tiles, places: npt.NDArray[np.void], runs: range, rng: random.Random) -> None:
    part = tiles.part(runs)
    table = tiles.table[part.first_tile : part.last_tile].copy()
    pointers = ctypes.c_void_p(table.ctypes.data), len(table), ctypes.c_void_p(places.ctypes.data), len(places)
    blocks, threads = rng.randint(1, 5), 32 * rng.randint(1, 4)
    kernels().launch(int(kernel == "gather"), blocks, threads, *pointers, part.offset)


@pytest.mark.parametrize("case", range(60))
def test_gather_and_scatter_move_exactly_the_bytes_of_the_pages(
    case: int, rng: random.Random, np_rng: np.random.Generator
):
    runs, memory, views = random_runs(rng)
    tiles = Tiles(runs)
    memory[:] = np_rng.integers(0, 256, memory.shape, np.uint8)
    chunks = [rng.sample(range(PAGES), 2) for _ in range(3)]
    chunk_nbytes, misalignment = 2 * tiles.block_nbytes, rng.choice([0, 0, 1, 4])
    buffer = np.zeros(3 * chunk_nbytes + 64, np.uint8)
    begin = -buffer.ctypes.data % 16 + misalignment
    addresses = [buffer.ctypes.data + begin + number * chunk_nbytes for number in (2, 0, 1)]  # out of order
    expected = buffer.copy()
    for number, pages in zip((2, 0, 1), chunks, strict=True):
        chunk = np.concatenate([view[page] for page in pages for view in views])
        expected[begin + number * chunk_nbytes :][:chunk_nbytes] = chunk
    first = rng.randrange(len(runs) + 1)
    for part in (range(first), range(first, len(runs))):  # one layer after the other
        offset = tiles.part(part).offset
        places = places_of(chunks, [address + offset for address in addresses], tiles.block_nbytes)
        launch("gather", tiles, places, part, rng)
    assert (buffer == expected).all()

    before = memory.copy()
    buffer[:] = np_rng.integers(0, 256, buffer.shape, np.uint8)
    used = set[int]()
    listed: list[list[int | None]] = []
    for pages in chunks:  # no page twice, and one block that must not be written
        listed.append([None if page in used else page for page in pages])
        used.update(pages)
    launch("scatter", tiles, places_of(listed, addresses, tiles.block_nbytes), range(len(runs)), rng)
    for number, pages in zip((2, 0, 1), listed, strict=True):
        at = begin + number * chunk_nbytes
        for page in pages:
            for view in views:
                if page is not None:
                    assert (view[page] == buffer[at : at + view.shape[1]]).all()
                at += view.shape[1]
    written = np.zeros(memory.shape, np.bool_)
    for view in views:
        start = view.ctypes.data - memory.ctypes.data
        for page in used:
            written[start + page * view.strides[0] :][: view.shape[1]] = True
    assert (memory == before)[~written].all(), "bytes outside the pages have changed"


def test_the_structs_of_the_kernels_have_the_layout_of_the_tables():
    assert (TILE.itemsize, PLACE.itemsize) == (24, 16)
    assert [TILE.fields[name][1] for name in ("address", "stride", "offset", "nbytes")] == [0, 8, 16, 20]


def test_a_run_is_cut_into_tiles_that_keep_its_alignment():
    tiles = Tiles([Run(4096, 1 << 20, 2 * TILE_NBYTES + 48), Run(1 << 30, 64, 16)])
    assert tiles.table["nbytes"].tolist() == [TILE_NBYTES, TILE_NBYTES, 48, 16]
    assert tiles.table["offset"].tolist() == [0, TILE_NBYTES, 2 * TILE_NBYTES, 2 * TILE_NBYTES + 48]
    assert tiles.part(range(1, 2)) == (1, 2, 3, 4, 2 * TILE_NBYTES + 48, 16)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_compiles_the_kernels_without_spills(architecture: str, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [nvcc, f"-arch={architecture}", "-cubin", "-Xptxas", "-v", str(KERNELS), "-o", str(tmp_path / "cubin")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2, run.stderr
