"""Reading a node's chunks through shared memory: no call, no lock, one copy."""

import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory import native
from raykv.memory.arena import SharedMemory
from raykv.memory.copying import (
    STREAM_NBYTES,
    STREAM_ONE_NBYTES,
    STREAM_STORE_NBYTES,
    TINY_NBYTES,
    CopyThreads,
    byte_views,
    checksum_of,
    scatter,
    store,
)
from raykv.memory.table import Table
from raykv.protocol.chunk_keys import halves
from raykv.types import Bits, KeyArray, Rows, Scattered

ONE_THREAD: Final = CopyThreads(1)


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
        self._one = self.table.reader(self.arena.view)

    def ready(self, keys: KeyArray, *, now_s: float) -> Bits:
        """Which keys could be read here now."""
        rows, _ = self.table.look(keys, self.table.ticks(now_s))
        return rows >= 0

    def ready_one(self, key: bytes) -> bool:
        """Whether the chunk of a 16-byte key could be read here now.

        Raises:
            ValueError: The key has not 16 bytes.
        """
        if self._one is not None:
            return self._one.ready(key)
        hi, lo = halves(key)
        return self.table.look_one(hi, lo, self.table.ticks(time.monotonic())) is not None

    def known_one(self, key: bytes) -> bool:
        """Whether the chunk of a 16-byte key is here, or somebody is writing it.

        Raises:
            ValueError: The key has not 16 bytes.
        """
        if self._one is not None:
            return self._one.known(key)
        if self.ready_one(key):
            return True
        row = self.table.find_one(*halves(key))
        if row < 0:
            return False
        expires = self.table.cells.expires[row]
        return not expires or expires > self.table.ticks(time.monotonic())

    def read(
        self,
        keys: KeyArray,
        into: Sequence[Scattered],
        *,
        verify: bool,
        now_s: float,
        threads: CopyThreads = ONE_THREAD,
    ) -> tuple[Bits, int]:
        """Copy chunks into the caller's buffers.

        Args:
            keys: Shape [n, 2].
            into: For each key a writable, contiguous buffer, or several, that together are as long as the chunk.
            verify: Also compare checksums.
            threads: Share a large batch.

        Returns:
            True where the buffers now hold the chunk's bytes; where False, they may hold anything. And how many bytes
            arrived.

        Raises:
            UsageError: An entry of `into` is no such buffer.
        """
        table = self.table
        now = table.ticks(now_s)
        rows, generations = table.look(keys, now)
        found = rows >= 0
        lengths = table.columns.nbytes[rows * found].astype(np.int64) * found
        total = int(lengths.sum())
        hits = np.zeros(len(keys), np.bool_)
        checksums = table.columns.checksum[rows * found] if verify else None

        try:
            if native.read is not None:
                columns = table.columns
                native.read(
                    table.records, self.arena.view, rows, generations, into, hits, columns.accessed, columns.frequency,
                    now, total >= STREAM_NBYTES, threads.called(len(keys), total),
                )  # fmt: skip
            else:
                self._read(rows, generations, into, hits, now)
        except (BufferError, TypeError, ValueError):
            for place, target in enumerate(into):
                byte_views(target, f"into[{place}]", writable=True)  # says which one it is
            raise
        if checksums is not None:
            for place in np.flatnonzero(hits).tolist():
                views = byte_views(into[place], f"into[{place}]", writable=True)
                hits[place] = checksum_of(views) == int(checksums[place])
        return hits, total if hits.all() else int(lengths[hits].sum())

    def _read(
        self,
        rows: Rows,
        generations: npt.NDArray[np.uint32],
        into: Sequence[Scattered],
        hits: Bits,
        now: int,
    ) -> None:
        """What `_native.c: read` does."""
        cells, view = self.table.cells, self.arena.view
        for place, row in enumerate(rows.tolist()):
            target = byte_views(into[place], f"into[{place}]", writable=True)
            if row < 0:
                continue
            start, length = cells.page[row] * SLOT_ALIGNMENT_NBYTES, cells.nbytes[row]
            copied = scatter(view[start : start + length], target)
            if copied and cells.generation[row] == generations[place]:
                hits[place] = True
                self.table.touch_one(row, now)

    def read_one(self, key: bytes, into: Scattered) -> bool:
        """Copy the chunk of one 16-byte key into a writable, contiguous buffer of its length.

        Returns:
            Whether the buffer now holds the chunk; if not, it may hold anything.

        Raises:
            ValueError: The key has not 16 bytes.
            BufferError, TypeError, ValueError, UsageError: `into` is no such buffer; TypeError if it is several.
        """
        if self._one is not None:
            return self._one.read(key, into, STREAM_ONE_NBYTES)
        table = self.table
        now = table.ticks(time.monotonic())
        hi, lo = halves(key)
        found = table.look_one(hi, lo, now)
        if found is None:
            return False
        row, generation, page, nbytes = found
        if isinstance(into, list | tuple):
            raise TypeError("into: several buffers")
        start = page * SLOT_ALIGNMENT_NBYTES
        if not scatter(self.arena.view[start : start + nbytes], byte_views(into, "into", writable=True)):
            return False
        if table.cells.generation[row] != generation:
            return False
        table.touch_one(row, now)
        return True

    def publish(
        self,
        rows: list[int],
        generations: list[int],
        keys: bytes,
        checksums: bytes | npt.NDArray[np.uint64],
        nbytes: int,
    ) -> bool:
        """Make lent rows, whose slots are written, visible to every reader on this host, without the node.

        Args:
            generations: As they were when the rows were lent.
            keys: 16 bytes a row.
            checksums: 8 bytes a row.
            nbytes: Length of each chunk.

        Returns:
            Whether all are. If not, the node has to say what became of them: somebody has one of the keys, the loan
            has ended, too much is under way, or the compiled loops are not there.
        """
        if self._one is None:
            return False
        return self._one.publish(rows, generations, keys, checksums, nbytes) == b"\1" * len(rows)

    def store_one(
        self, row: int, generation: int, start: int, key: bytes, pieces: Sequence[memoryview], nbytes: int
    ) -> tuple[bool, bytes]:
        """Copy one chunk into the slot of a lent row, and make it visible: `publish` in the same call.

        Args:
            row, generation, start: The row, its generation when it was lent, and where in the arena its slot begins.
            key: 16 bytes.
            pieces: Together the chunk's `nbytes` bytes.

        Returns:
            Whether it is visible, as `publish` says; and 8 bytes of checksum.
        """
        if self._one is not None and nbytes > TINY_NBYTES:
            return self._one.store(row, generation, start, key, pieces, STREAM_STORE_NBYTES)
        slot = self.arena.view[start : start + nbytes]
        checksum = store(slot, pieces, stream=nbytes >= STREAM_STORE_NBYTES).to_bytes(8, "little")
        return self.publish([row], [generation], key, checksum, nbytes), checksum

    def is_current(self) -> bool:
        """Whether the files that are mapped here are the ones that the names lead to now."""
        return self.table.memory.is_current() and self.arena.is_current()

    def close(self) -> None:
        """Unmap."""
        self.table.memory.close()
        self.arena.close()
