"""Reads a node's chunks from shared memory, with one copy, and without a lock or a call to the node."""

import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import LostError
from raykv.memory import native
from raykv.memory.arena import SharedMemory
from raykv.memory.copying import STREAM_NBYTES, CopyThreads, byte_views, checksum_of, scatter
from raykv.memory.layout import TICKS_PER_S
from raykv.memory.table import Table
from raykv.protocol.chunk_keys import KEY_NBYTES, from_bytes
from raykv.types import Bits, KeyArray, Rows, Scattered

ONE_THREAD: Final = CopyThreads(1)


class ShmReader:
    """Reads the chunks of one node on this host. Also works while the node is dead or being upgraded. Thread-safe.

    Reads of a damaged table are misses, not errors.

    Attributes:
        table, arena: The mapped files. The arena is read-only unless the caller asked for `writable`.
    """

    def __init__(self, table: str, arena: str, *, writable: bool) -> None:
        """Map a node's files. Raises LostError if a file is missing, damaged or of another layout version."""
        mapped = self.table = Table(SharedMemory.attach(FilePath(table), writable=True))
        if mapped.made_at_s > time.monotonic():
            raise LostError(f"{table} is damaged: it was made in the future")
        self.arena = SharedMemory.attach(FilePath(arena), writable=writable)
        self._compiled: Any = native.loops and native.loops.Reader(
            mapped.records, *mapped.copies, mapped.active, self.arena.view, mapped.columns.accessed,
            mapped.columns.frequency, mapped.made_at_s, TICKS_PER_S,
        )  # fmt: skip

    def ready(self, keys: KeyArray, *, now_s: float) -> Bits:
        return self._find(keys, self.table.ticks(now_s))[0] >= 0

    def lengths(self, keys: KeyArray, *, now_s: float) -> npt.NDArray[np.uint32]:
        """Return the length of each chunk, or 0 if the chunk cannot be read here now."""
        rows, generations = self._find(keys, self.table.ticks(now_s))
        lengths = self.table.columns.nbytes[rows]
        unchanged = (rows >= 0) & (self.table.columns.generation[rows] == generations)
        return np.where(unchanged, lengths, np.uint32(0))

    def ready_one(self, key: bytes) -> bool:
        """Whether the chunk of a 16-byte key can be read here now. Raises ValueError if the key has another length."""
        if self._compiled is not None:
            ready: bool = self._compiled.ready(key)
            return ready
        return bool(self.ready(_one_key(key), now_s=time.monotonic())[0])

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
            keys: Keys of the chunks, shape [n, 2].
            into: For each key, a writable and contiguous buffer of the chunk's length, or a list of buffers with that
                total length. A wrong length is a miss.
            verify: Whether to compare checksums. A wrong checksum is a miss.
            now_s: Time of the host's monotonic clock.
            threads: Threads that help to copy.

        Returns:
            Whether each key is a hit, and the total number of bytes of the hits. After a hit, the key's buffers hold
            the chunk. After a miss, their content is undefined.

        Raises:
            UsageError: An entry of `into` has a wrong type, is read-only, or is not contiguous.
        """
        table, now = self.table, self.table.ticks(now_s)
        rows, generations = self._find(keys, now)
        found = rows >= 0
        lengths = table.columns.nbytes[rows * found].astype(np.int64) * found
        total = int(lengths.sum())
        hits = np.zeros(len(keys), np.bool_)
        checksums = table.columns.checksum[rows * found] if verify else None
        try:
            if self._compiled is not None:
                call = threads.called(len(keys), total)
                self._compiled.read(rows, generations, into, hits, now, total >= STREAM_NBYTES, call)
            else:
                self._read(rows, generations, into, hits, now)
        except (BufferError, TypeError, ValueError):
            for place, target in enumerate(into):
                byte_views(target, f"into[{place}]", writable=True)  # raises UsageError for the wrong entry
            raise
        if checksums is not None:
            for place in np.flatnonzero(hits).tolist():
                views = byte_views(into[place], f"into[{place}]", writable=True)
                hits[place] = checksum_of(views) == int(checksums[place])
        return hits, total if hits.all() else int(lengths[hits].sum())

    def read_one(self, key: bytes, into: Scattered) -> bool:
        """Copy the chunk of one 16-byte key into a writable, contiguous buffer of the chunk's length.

        Returns:
            Whether the buffer now holds the chunk. If not, its content is undefined. A buffer of a wrong length gives
            False.

        Raises:
            ValueError: The key does not have 16 bytes.
            BufferError, TypeError, ValueError, UsageError: `into` is not a buffer, is read-only, or is not contiguous.
        """
        if self._compiled is not None:
            hit: bool = self._compiled.read_one(key, into)
            return hit
        if isinstance(into, list | tuple):
            raise TypeError("into: several buffers")
        byte_views(into, "into", writable=True)
        return bool(self.read(_one_key(key), [into], verify=False, now_s=time.monotonic())[0][0])

    def is_current(self) -> bool:
        """Whether the paths still name the mapped files. If not, a file was removed or replaced."""
        return self.table.memory.is_current() and self.arena.is_current()

    def close(self) -> None:
        self.table.memory.close()
        self.arena.close()

    def _find(self, keys: KeyArray, now: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        try:
            return self.table.find_ready(keys, now)
        except LostError:
            return np.full(len(keys), -1, np.int32), np.zeros(len(keys), np.uint32)

    def _read(
        self, rows: Rows, generations: npt.NDArray[np.uint32], into: Sequence[Scattered], hits: Bits, now: int
    ) -> None:
        """Copy chunks in Python, with the same result as `reader_read` in native/reader.c."""
        columns, view = self.table.columns, self.arena.view
        for place, row in enumerate(rows.tolist()):
            target = byte_views(into[place], f"into[{place}]", writable=True)
            if row < 0:
                continue
            start, length = int(columns.page[row]) * SLOT_ALIGNMENT_NBYTES, int(columns.nbytes[row])
            copied = scatter(view[start : start + length], target)
            if copied and columns.generation[row] == generations[place]:
                hits[place] = True
                self.table.touch(rows[place : place + 1], now)


def _one_key(key: bytes) -> KeyArray:
    if len(key) != KEY_NBYTES:
        raise ValueError(f"key: {len(key)} bytes; a key has {KEY_NBYTES}")
    return from_bytes(key)
