"""Where the bytes of a page lie, as a table that the kernels read. Pure: no CUDA, no I/O.

A page (a "block" of vLLM) is a list of runs: byte ranges that are contiguous in every page, such as the keys of one
layer. A chunk consists of blocks; a block has the bytes of all runs of one page, in the order of the runs. Layouts of
every kind are lists of runs: `raykv.integrations.kv_layout` computes them.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

TILE_NBYTES: Final = 8192
"""A warp copies this much at a time: 16 words of 16 bytes for each of its 32 threads."""
TILE: Final = np.dtype([("address", "<u8"), ("stride", "<i8"), ("offset", "<u4"), ("nbytes", "<u4")])
PLACE: Final = np.dtype([("page", "<i8"), ("address", "<u8")])
"""The structs `Tile` and `Place` of kernels.cu."""

Places = npt.NDArray[Any]
"""Array of PLACE."""
Addresses = npt.NDArray[np.uint64]


class Run(NamedTuple):
    """Bytes that are contiguous in every page.

    Attributes:
        address: Of the run in page 0.
        stride: Bytes from one page to the next.
        nbytes: Length of the run.
    """

    address: int
    stride: int
    nbytes: int


class Part(NamedTuple):
    """Consecutive runs, such as one layer, as a part of a block.

    Attributes:
        first_run, last_run: The runs first_run .. last_run - 1.
        first_tile, last_tile: The tiles of these runs.
        offset: Offset of the part in a block.
        nbytes: Length of the part.
    """

    first_run: int
    last_run: int
    first_tile: int
    last_tile: int
    offset: int
    nbytes: int


class Tiles:
    """The runs of a KV cache, cut into tiles.

    Attributes:
        runs: Number of runs.
        table: Array of TILE.
        block_nbytes: Length of a block: the sum of the runs' lengths.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = len(runs)
        self._runs: Addresses = np.array(runs, np.int64).reshape(-1, 3).astype(np.uint64)  # strides may be negative
        lengths = [run.nbytes for run in runs]
        self._offsets = np.cumsum([0, *lengths])
        self.block_nbytes = int(self._offsets[-1])
        assert self.block_nbytes < 1 << 32, "offsets in a block have 32 bits"
        cut = [range(0, nbytes, TILE_NBYTES) for nbytes in lengths]
        self._tiles = np.cumsum([0, *map(len, cut)])
        self.table: npt.NDArray[Any] = np.array(
            [
                (run.address + start, run.stride, offset + start, min(TILE_NBYTES, run.nbytes - start))
                for run, starts, offset in zip(runs, cut, self._offsets.tolist(), strict=False)
                for start in starts
            ],
            TILE,
        )

    def part(self, runs: range) -> Part:
        """Return the part of a block that consists of some consecutive runs."""
        first, last = runs.start, runs.stop
        offset, stop = int(self._offsets[first]), int(self._offsets[last])
        return Part(first, last, int(self._tiles[first]), int(self._tiles[last]), offset, stop - offset)

    @property
    def whole(self) -> Part:
        return self.part(range(self.runs))

    def pieces(self, places: Places, part: Part) -> tuple[Addresses, Addresses, Addresses]:
        """Return copies that need no kernel: one for each run of each place, in the order of the chunk's bytes.

        Returns:
            (addresses in the pages, addresses in the chunks, lengths).
        """
        runs = self._runs[part.first_run : part.last_run]
        offsets = (self._offsets[part.first_run : part.last_run] - part.offset).astype(np.uint64)
        pages = places["page"].astype(np.uint64)[:, None] * runs[:, 1] + runs[:, 0]
        chunks = places["address"][:, None] + offsets
        return pages.ravel(), chunks.ravel(), np.tile(runs[:, 2], len(places))


def places_of(chunks: Sequence[Sequence[int | None]], addresses: Sequence[int], pitch: int) -> Places:
    """List the blocks to copy.

    Args:
        chunks: The pages of each chunk. None: this block is not copied.
        addresses: Where each chunk begins, or the copied part of its first block.
        pitch: Bytes from one block of a chunk to the next.

    Returns:
        Array of PLACE.
    """
    listed = [
        (page, address + position * pitch)
        for pages, address in zip(chunks, addresses, strict=True)
        for position, page in enumerate(pages)
        if page is not None
    ]
    return np.array(listed, PLACE)
