"""Measures once which way of copying is the faster one on this GPU, link and cache (see `raykv.gpu.copies`).

The measurement uses scratch memory of its own: a few blocks with runs as long as the cache's. It takes some tenths of a
second, so make it before the engine serves requests.
"""

import statistics
from typing import Final, get_args

from raykv.gpu.copies import Direction, PagedCopies, Pinned, Way
from raykv.gpu.device import Device
from raykv.gpu.paged import PagedCache, Run

SAMPLE_NBYTES: Final = 128 << 20
"""A measured transfer has about this many bytes, and at least one block."""
ROUNDS: Final = 3
MIN_GAIN: Final = 1.05
"""The way "kernel" must be this much faster, because it takes multiprocessors from the engine during the whole copy."""


class AllPinned:
    """Memory that is pinned for sure."""

    def gpu_address(self, address: int, nbytes: int) -> int | None:
        return address


def scratch_like(cache: PagedCache, blocks: int, address: int) -> PagedCache:
    """Describe a cache of fewer blocks at `address`, with runs of the same lengths. It has blocks * block_nbytes bytes.

    As in the real cache, each run has an array of all blocks.
    """
    runs, start = [], address
    for nbytes in cache.runs["nbytes"].tolist():
        runs.append(Run(start, nbytes, nbytes))
        start += nbytes * blocks
    ends = zip(cache.first_runs, cache.first_runs[1:], strict=False)
    return PagedCache.of([runs[first:end] for first, end in ends], blocks)


def rates(device: Device, cache: PagedCache, direction: Direction) -> dict[Way, float]:
    """Return the bytes per second of each way, as the median of ROUNDS transfers. Waits for the GPU.

    Raises:
        OSError: Work on the GPU has failed.
        MemoryError: There is no scratch memory.
    """
    blocks = max(1, SAMPLE_NBYTES // cache.block_nbytes)
    nbytes = blocks * cache.block_nbytes
    paged, chunk = device.allocate(nbytes), device.allocate_pinned(nbytes)
    scratch, order = scratch_like(cache, blocks, paged.address), [*range(1, blocks, 2), *range(0, blocks, 2)]
    stream, found = device.new_stream(), {}
    for way in get_args(Way):
        copies = PagedCopies(device, scratch, AllPinned(), direction, way)
        times_s = []
        for _ in range(ROUNDS + 1):
            begin = device.record(stream, timed=True)
            end = copies.begin([(order, chunk.address)]).queue(after=begin, timed=True)
            device.synchronize(end)
            times_s.append(device.elapsed_s(begin, end))
        found[way] = nbytes / statistics.median(times_s[1:])  # the first transfer also loads the kernel
        copies.close()
    return found


def choose(measured: dict[Way, float]) -> Way:
    """Return the way to use: "staged", unless "kernel" is faster by MIN_GAIN."""
    return "kernel" if measured["kernel"] >= MIN_GAIN * measured["staged"] else "staged"


def calibrated(device: Device, cache: PagedCache, pinned: Pinned) -> tuple[PagedCopies, PagedCopies]:
    """Measure, and return the copies for stores and those for loads, each with the way that suits it."""
    store, load = (
        PagedCopies(device, cache, pinned, direction, choose(rates(device, cache, direction)))
        for direction in get_args(Direction)
    )
    return store, load
