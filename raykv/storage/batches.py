"""Checks a batch of chunks before its commit, and computes the parent and depth of each chunk."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.errors import UsageError
from raykv.memory.layout import MAX_DEPTH
from raykv.memory.table import Table
from raykv.protocol.hints import require_hints
from raykv.types import Batch, Rows


class Written(NamedTuple):
    """Chunks of a batch that were written to slots: the index in the batch, row and xxh3-64 checksum of each chunk."""

    positions: npt.NDArray[np.int32]
    rows: Rows
    checksums: npt.NDArray[np.uint64]


class Chain(NamedTuple):
    """For each chunk, the row of its parent (-1: none), and the number of chunks before it in its chain."""

    parents: Rows
    depths: npt.NDArray[np.int64]


def require_batch(batch: Batch, written: Written) -> None:
    """Raise UsageError if a field of the batch is not valid. The message names the field. Shapes are not checked."""
    require_hints(batch.hints.ttl_s, batch.hints.priority)
    if not 0 <= batch.depth < MAX_DEPTH:
        raise UsageError(f"field 'depth': {batch.depth} is not in 0 .. {MAX_DEPTH - 1}")
    positions, rows, checksums = written
    if not len(positions) == len(rows) == len(checksums):
        raise UsageError(f"{len(positions)} positions, {len(rows)} rows, {len(checksums)} checksums: give one of each")
    if positions.size and not (positions.min() >= 0 and positions.max() < len(batch.keys)):
        raise UsageError(f"field 'positions': not in 0 .. {len(batch.keys) - 1}, the places of the keys")


def require_size(nbytes: int, extent_nbytes: int) -> None:
    if not 0 < nbytes <= extent_nbytes:
        raise UsageError(
            f"a chunk of {nbytes:,} bytes does not fit: at least 1, and at most extent_nbytes ({extent_nbytes:,}); "
            "raise extent_nbytes or cut the value into chunks"
        )


def chain_of(table: Table, batch: Batch, existing: Rows, positions: npt.NDArray[np.int32], rows: Rows) -> Chain:
    """Return the parents and depths of new chunks.

    The parent of a chunk is the chunk before it in the batch. The parent of the first chunk is `batch.parent`. If the
    parent is neither stored nor new, its row is -1. The depth of a chunk is the parent's depth plus one. Without a
    parent, the depth is `batch.depth` plus the chunk's index in the batch.

    Args:
        table: The chunk table.
        batch: The batch.
        existing: For each key of the batch, the row of the stored chunk; -1 if the chunk is not stored.
        positions: Indices of the new chunks in the batch.
        rows: Rows of the new chunks.
    """
    if not batch.chained:
        return Chain(np.full(len(rows), -1, np.int32), np.zeros(len(rows), np.int64))
    before = np.full(1, -1, np.int32) if batch.parent is None else table.find(batch.parent)
    line = np.concatenate([before, existing])
    place = np.arange(len(line))
    depths = np.where(line >= 0, table.columns.depth[np.maximum(line, 0)], batch.depth - 1 + place)
    old = np.ones(len(line), np.bool_)
    old[1 + positions] = False
    line[1 + positions] = rows
    last = np.maximum.accumulate(np.where(old, place, 0))
    return Chain(line[positions], (depths[last] + place - last)[1 + positions])
