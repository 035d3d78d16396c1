"""The kernels of raykv/gpu on the CPU, and random paged caches."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import raykv.gpu
from raykv.gpu.paged import PagedCache, Run

KERNELS = Path(raykv.gpu.__file__).with_name("kernels.cu")
SHIM = Path(__file__).with_name("gpu_shim.cpp")

Bytes = npt.NDArray[np.uint8]


def compile_kernels(directory: Path) -> Any:
    """Compile the kernels with g++ and return the function `run` of the shim. Skips the test without g++.

    A misaligned access or another undefined operation ends the process.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels with")
    library = directory / "kernels.so"
    checks = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *checks]
    subprocess.run([compiler, *options, f"-I{KERNELS.parent}", SHIM, "-o", library], check=True)
    run = ctypes.CDLL(str(library)).run
    word, address = ctypes.c_uint, ctypes.c_uint64
    run.argtypes = [ctypes.c_int, word, word, address, word, address, word, word, address, address, address]
    run.restype = None
    return run


class HostCache:
    """A paged cache in host memory, with random content, gaps between the runs, and odd addresses.

    Attributes:
        memory: All bytes, with gaps.
        cache: The description for `raykv.gpu`.
        starts: For each run, its first byte in `memory`.
    """

    def __init__(self, rng: random.Random, np_rng: np.random.Generator, sizes: list[list[int]], blocks: int) -> None:
        """Make a cache. `sizes`: for each layer, the length of each of its runs."""
        flat = [nbytes for layer in sizes for nbytes in layer]
        gap = rng.choice([0, 1, 16, 40])
        self.distances = [nbytes + rng.choice([0, 1, 16, 33]) for nbytes in flat]
        self.starts, end = [], rng.choice([0, 3, 16])
        for distance in self.distances:
            self.starts.append(end)
            end += distance * blocks + gap
        self.sizes, self.blocks = flat, blocks
        self.memory: Bytes = np_rng.integers(0, 256, end + 64, dtype=np.uint8)
        base = self.memory.ctypes.data
        runs = iter(
            Run(base + start, distance, nbytes)
            for start, distance, nbytes in zip(self.starts, self.distances, flat, strict=True)
        )
        self.cache = PagedCache.of([[next(runs) for _ in layer] for layer in sizes], blocks)

    def run(self, run: int, block: int, memory: Bytes | None = None) -> Bytes:
        """Return a view of one run of one block in `memory`, which is by default this cache's."""
        start = self.starts[run] + self.distances[run] * block
        return (self.memory if memory is None else memory)[start : start + self.sizes[run]]

    def content(self, block: int) -> Bytes:
        return np.concatenate([self.run(run, block) for run in range(len(self.sizes))])

    def expect_loaded(self, blocks: list[int], contents: list[Bytes], runs: range) -> Bytes:
        """Return `memory` as it must be when `runs` of these blocks have been loaded from `contents`."""
        memory = self.memory.copy()
        offsets = np.cumsum([0, *self.sizes])
        for block, content in zip(blocks, contents, strict=True):
            for run in runs:
                self.run(run, block, memory)[:] = content[offsets[run] : offsets[run + 1]]
        return memory


def random_sizes(rng: random.Random) -> list[list[int]]:
    """Choose the runs of a few layers. Many lengths are no multiple of 16 bytes, or end near the end of a slice."""
    lengths = [1, 2, 15, 16, 17, 100, 256, 1000, 2047, 2048, 2049, 4096, 6000]
    alike = rng.choice(lengths)
    return [
        [rng.choice([alike, rng.choice(lengths)]) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 4))
    ]
