"""Where the bytes of a paged KV cache lie, as the tables that the kernels read. Knows neither CUDA nor an engine.

The content of a block is the bytes of all its runs, in order: the runs of layer 0, then those of layer 1, and so on. A
chunk is the contents of its blocks. This is the order of `raykv.integrations.kv_layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.errors import UsageError

SLICE_NBYTES: Final = 2048
"""The warps of a kernel copy this many bytes at a time: SLICE in kernels.cu."""
RUN: Final = np.dtype([("address", "<u8"), ("distance", "<u8"), ("nbytes", "<u8"), ("offset", "<u8")])
PLACE: Final = np.dtype([("block", "<u8"), ("address", "<u8")])

Places = npt.NDArray[np.void]
"""Array of PLACE: blocks of the KV cache, and the address of each block's content in contiguous memory."""


class Run(NamedTuple):
    """A contiguous byte range that each block has, for example the keys of one layer.

    Attributes:
        address: Address in GPU memory of the run of block 0.
        distance: Bytes from a block's run to the same run of the next block.
        nbytes: Length in bytes.
    """

    address: int
    distance: int
    nbytes: int


class Part(NamedTuple):
    """Successive layers of a cache.

    Attributes:
        first, runs: Index of the first run, and number of runs.
        slices: Number of slices of the longest run.
        origin: Offset of the first run in a block's content.
        nbytes: Bytes of these layers in one block.
    """

    first: int
    runs: int
    slices: int
    origin: int
    nbytes: int


@dataclass(frozen=True)
class PagedCache:
    """A paged KV cache in GPU memory.

    Attributes:
        runs: Array of RUN, in the order of a block's content.
        first_runs: For each layer the index of its first run, and at the end the number of runs.
        block_nbytes: Bytes of one block, over all layers.
        blocks: Number of blocks.
    """

    runs: npt.NDArray[np.void]
    first_runs: tuple[int, ...]
    block_nbytes: int
    blocks: int

    @classmethod
    def of(cls, layers: Sequence[Sequence[Run]], blocks: int) -> "PagedCache":
        """Describe a cache of `blocks` blocks by the runs of each layer.

        Raises:
            UsageError: There is no run, or a run is empty or longer than its distance.
        """
        flat = [run for layer in layers for run in layer]
        wrong = [run for run in flat if not 0 < run.nbytes <= run.distance]
        if not flat or wrong:
            raise UsageError(f"the KV cache has no runs, or wrong ones: {wrong[:3]}")
        table, sizes = np.zeros(len(flat), RUN), [run.nbytes for run in flat]
        table["address"], table["distance"], table["nbytes"] = np.array(flat, np.uint64).T
        table["offset"][1:] = np.cumsum(sizes[:-1])
        first_runs = tuple(np.cumsum([0, *map(len, layers)]).tolist())
        return cls(table, first_runs, sum(sizes), blocks)

    @property
    def layers(self) -> int:
        return len(self.first_runs) - 1

    def part(self, first_layer: int, layers: int) -> Part:
        """Describe `layers` successive layers.

        Raises:
            UsageError: The cache does not have these layers, or they have no runs.
        """
        if not 0 <= first_layer < first_layer + layers <= self.layers:
            raise UsageError(f"layers {first_layer} to {first_layer + layers - 1} of a cache of {self.layers} layers")
        first, end = self.first_runs[first_layer], self.first_runs[first_layer + layers]
        runs = self.runs[first:end]
        if not len(runs):
            raise UsageError(f"layers {first_layer} to {first_layer + layers - 1} have no runs")
        slices = -(-int(runs["nbytes"].max()) // SLICE_NBYTES)
        return Part(first, end - first, slices, int(runs["offset"][0]), int(runs["nbytes"].sum()))

    def places(self, chunks: Sequence[tuple[Sequence[int | None], int]]) -> Places:
        """Return the places of the blocks of chunks.

        Args:
            chunks: The blocks of each chunk, and the chunk's address. None stands for a block that is not copied; its
                bytes in the chunk are skipped.

        Raises:
            UsageError: The cache does not have such a block.
        """
        found = [
            (block, address + place * self.block_nbytes)
            for blocks, address in chunks
            for place, block in enumerate(blocks)
            if block is not None
        ]
        if any(not 0 <= block < self.blocks for block, _ in found):
            raise UsageError(f"block numbers outside the KV cache (0 .. {self.blocks - 1})")
        return np.array(found, PLACE)


def streaks(places: Places, block_nbytes: int, chunks: npt.NDArray[np.intp] | None = None) -> list[tuple[int, int]]:
    """Cut places into streaks: successive places of one chunk whose contents are adjacent in memory.

    A streak never contains two chunks, because these may lie in extents that are registered with CUDA one by one.

    Args:
        chunks: The number of each place's chunk: see `chunk_numbers`. None: all belong to one chunk.

    Returns:
        (Index of the first place, number of places) of each streak.
    """
    if not len(places):
        return []
    is_cut = np.diff(places["address"]) != block_nbytes
    if chunks is not None:
        is_cut |= np.diff(chunks) != 0
    cuts = np.flatnonzero(is_cut) + 1
    starts = [0, *cuts.tolist()]
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], len(places)], strict=True)]


def chunk_numbers(chunks: Sequence[tuple[Sequence[int | None], int]]) -> npt.NDArray[np.intp]:
    """Return for each of `PagedCache.places(chunks)` the index of its chunk."""
    return np.repeat(np.arange(len(chunks)), [len(blocks) - list(blocks).count(None) for blocks, _ in chunks])
