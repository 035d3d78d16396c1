"""The pack that a process is filling."""

import os
import time
from collections.abc import Sequence

import numpy as np

from raykv.tier.file.folder import WRITE, Folder, Name, lock, write_summary
from raykv.tier.segments.format import BLOCK_NBYTES, DELETED, DROPPED, Array, Counts, encode
from raykv.tier.segments.log import Log
from raykv.tier.segments.volume import aligned, write_all


class Part:
    """See the module. One thread's. A part that is `broken`, by a failed write, gets no more chunks."""

    def __init__(self, folder: Folder, sequence: int, *, nbytes: int) -> None:
        self.name, self.begun_s, self.broken, self.nbytes = folder.name(sequence, "part"), time.monotonic(), False, 0
        self._folder = folder
        self._log = Log(limit=1, segment_blocks=nbytes // BLOCK_NBYTES, incarnation=sequence)
        self._log.add_free(0)
        self._segment = self._log.open_next()
        with folder.operation():
            self._fd = os.open(folder.path / str(self.name), WRITE | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                lock(self._fd)
                os.ftruncate(self._fd, nbytes)
            except OSError:
                self.close()
                folder.discard(self.name)
                raise

    def fits(self, counts: Counts, *, blocks: int) -> bool:
        """Whether there is room for one more batch with chunks of `blocks`."""
        return not self.broken and self._log.fits(counts, blocks=blocks)

    def write(self, entries: Array, texts: tuple[bytes, ...], views: Sequence[memoryview]) -> int:
        """Write a batch that fits. Fills in the place of each chunk. Returns the number of bytes."""
        deleted, dropped = np.zeros(0, DELETED), np.zeros(0, DROPPED)
        batch = self._log.place(entries=entries, deleted=deleted, dropped=dropped, texts=texts, content=None)
        buffer = aligned(batch.record.blocks() * BLOCK_NBYTES)
        start = batch.start * BLOCK_NBYTES
        with self._folder.operation():
            try:
                nbytes = write_all(self._fd, [buffer[: encode(batch.record, buffer)], *views], start)
                # So that it is on its way to the disk long before `seal` waits for it.
                os.posix_fadvise(self._fd, start, nbytes, os.POSIX_FADV_DONTNEED)
            except OSError:
                self.broken = True
                raise
        self._log.finish(batch)
        self.nbytes = start + nbytes
        return nbytes

    def seal(self) -> Name | None:
        """Publish it. Returns the pack's name; None if it was empty, or was removed: it is gone then.

        Raises:
            OSError: It could not be done now, and may be tried again.
        """
        assert self._segment is not None
        if not self._segment.records:
            self._folder.remove(self.name)
            self.close()
            return None
        with self._folder.operation():
            self.nbytes += write_summary(self._fd, self._log.summary(self._segment))
            try:
                self._folder.publish(self._fd, self.name, "pack")
            except FileNotFoundError:
                self.close()
                return None
        self.close()
        return self.name._replace(kind="pack")

    def close(self) -> None:
        """Close the file, once: its descriptor may belong to another file soon."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
