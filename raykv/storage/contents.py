"""The part of a store that only reads."""

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory.layout import RowState
from raykv.memory.table import Table
from raykv.protocol.reasons import Place, Reason
from raykv.storage.allocator import Allocator, has_duplicates
from raykv.storage.eviction_log import Departures
from raykv.storage.evictor import Evictor
from raykv.types import Bits, KeyArray, Rows

_KEY: Final = struct.Struct("<QQ")


class Contents:
    """The methods of a store that change nothing."""

    def __init__(self, table: Table, allocator: Allocator, evictor: Evictor) -> None:
        self.table, self.allocator, self.evictor = table, allocator, evictor

    def missing(self, keys: KeyArray, *, now_s: float) -> npt.NDArray[np.int32]:
        """Positions of the keys that are not ready, in order. Of equal keys only the first position is returned."""
        rows, _ = self.table.find_ready(keys, self.table.ticks(now_s))
        absent = np.flatnonzero(rows < 0)
        return absent[is_first(keys[absent])].astype(np.int32)

    def history(self, keys: KeyArray, *, now_s: float) -> tuple[Bits, npt.NDArray[np.uint32], Departures]:
        """For each key: whether the chunk is here, its length (0 if not here), and its last departure."""
        columns, now = self.table.columns, self.table.ticks(now_s)
        rows = self.table.find(keys)
        here, rows = rows >= 0, np.maximum(rows, 0)
        departures = self.evictor.eviction_log.find(keys)
        expires = columns.expires[rows]
        expired = here & (expires > 0) & (expires <= now)  # still in the table, but no reader gets the chunk
        departures.reasons[expired], departures.tiers[expired] = Reason.EXPIRED, Place.DRAM
        departures.when_s[expired] = [self.table.seconds(tick) for tick in expires[expired].tolist()]
        here &= ~expired
        return here, np.where(here, columns.nbytes[rows], np.uint32(0)), departures

    def rows_of(self, group: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Ready rows of a quota group, and their generations, for `Store.drop`. Scans all rows."""
        columns = self.table.columns
        rows = np.flatnonzero(columns.group[: self.allocator.free_rows.fresh] == group).astype(np.int32)
        rows = rows[columns.state[rows] == RowState.READY]
        return rows, columns.generation[rows]

    def ready_keys(self) -> KeyArray:
        """All keys that can be read. Scans all rows. If the caller does not hold the lock, a few may be missing."""
        columns, rows = self.table.columns, self.table.ready_rows()
        return np.stack([columns.key_hi[rows], columns.key_lo[rows]], axis=1)

    def key_of(self, row: int) -> bytes:
        return _KEY.pack(self.table.cells.key_hi[row], self.table.cells.key_lo[row])

    def offset_of(self, row: int) -> int:
        return self.table.cells.page[row] * SLOT_ALIGNMENT_NBYTES

    @property
    def used_nbytes(self) -> int:
        return int(self.allocator.used_nbytes.sum())

    @property
    def lent_nbytes(self) -> int:
        return int(self.allocator.lent_nbytes.sum())

    @property
    def chunks(self) -> int:
        return self.allocator.chunks

    @property
    def extents_failed(self) -> int:
        return self.allocator.slots.extents_failed

    @property
    def written(self) -> tuple[int, int]:
        """A value that changes with every write to the store."""
        return self.evictor.counters.committed, self.allocator.slots.free_nbytes


def is_first(keys: KeyArray) -> Bits:
    if not has_duplicates(keys[:, 1]):
        return np.ones(len(keys), np.bool_)
    first = np.zeros(len(keys), np.bool_)
    first[np.unique(keys, axis=0, return_index=True)[1]] = True
    return first
