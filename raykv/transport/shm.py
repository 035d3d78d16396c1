"""Reading a node's chunks through shared memory: no call, no lock, one copy."""

from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory.arena import SharedMemory
from raykv.memory.copying import checksum_of, scatter
from raykv.memory.table import Table
from raykv.types import Bits, KeyArray, Rows


class ShmReader:
    """Chunks of one node on this host. Works on while the node process is dead or being upgraded. Thread-safe.

    Attributes:
        table, arena: Mapped; the arena writable only when asked for (a client copies its own chunks into it).
    """

    def __init__(self, table: str, arena: str, *, writable: bool) -> None:
        """Map a node's files.

        Raises:
            LostError: They are gone, or of another layout version.
        """
        self.table = Table(SharedMemory.attach(FilePath(table), writable=True))
        self.arena = SharedMemory.attach(FilePath(arena), writable=writable)

    def ready(self, keys: KeyArray, *, now_s: float) -> Bits:
        """Which keys could be read here now."""
        rows, _ = self.table.find_ready(keys, self.table.ticks(now_s))
        return rows >= 0

    def read(self, keys: KeyArray, into: Sequence[Sequence[memoryview]], *, verify: bool, now_s: float) -> Bits:
        """Copy chunks into the caller's buffers.

        Args:
            keys: Shape [n, 2].
            into: For each key writable byte views that together are as long as the chunk.
            verify: Also compare checksums.

        Returns:
            True where the buffers now hold the chunk's bytes; where False, they may hold anything.
        """
        now = self.table.ticks(now_s)
        rows, generations = self.table.find_ready(keys, now)
        columns = self.table.columns
        starts = columns.page[rows].astype(np.int64) * SLOT_ALIGNMENT_NBYTES
        lengths = columns.nbytes[rows]
        checksums = columns.checksum[rows]
        copied = np.zeros(len(keys), np.bool_)
        for place, (row, start, length) in enumerate(
            zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        ):
            if row >= 0:
                copied[place] = scatter(self.arena.view[start : start + length], into[place])
        hits: Bits = copied & self.table.unchanged(rows, generations)
        if verify:
            for place in np.flatnonzero(hits).tolist():
                hits[place] = checksum_of(into[place]) == int(checksums[place])
        touched: Rows = rows[hits]
        if touched.size:
            self.table.touch(touched, now)
        return hits

    def is_current(self) -> bool:
        """Whether the files that are mapped here are the ones that the names lead to now."""
        return self.table.memory.is_current() and self.arena.is_current()

    def close(self) -> None:
        """Unmap."""
        self.table.memory.close()
        self.arena.close()
