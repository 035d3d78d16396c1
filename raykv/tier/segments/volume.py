"""Input and output of one directory of segment files, and the threads that do it.

Bytes go straight between a volume and the arena: O_DIRECT, and one call for a batch's record and all its chunks. Where
a file system refuses O_DIRECT, the page cache is told to forget them.

Threads over pwritev and preadv, not io_uring: through the `liburing` package (2026.3) it reached 0.97 to 1.02 of their
speed for writes of 64 KiB to 4 MiB at depth 4, and 0.96 to 1.04 for reads (one NVMe drive, Linux 6.18, medians of 4
interleaved rounds), and saved a third of their processor time at 64 KiB alone. `python -m benchmarks.tiers` shows what
the tier reaches beside fio.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from raykv.errors import ConfigError
from raykv.memory.host import give_way
from raykv.tier.segments.format import BLOCK_NBYTES

log = logging.getLogger(__name__)

OPEN_FILES: Final = 128
"""Segment files of a volume that are kept open."""
IOV_MAX: Final = 1024
"""Pieces that one call may take (the kernel's bound)."""

Direct = Literal["try", "require", "never"]


class Volume:
    """The segment files of one directory. Its methods may be called from several threads, and wait for the disk.

    Attributes:
        path: The directory.
        direct: Whether files are opened with O_DIRECT.
    """

    def __init__(self, path: Path, *, segment_nbytes: int, direct: Direct) -> None:
        """Touches nothing yet."""
        self.path, self.segment_nbytes = path, segment_nbytes
        self.direct = direct != "never"
        self._required = direct == "require"
        self._lock_fd = -1
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the directory if need be, and take it for this process. Again after it failed.

        Raises:
            ConfigError: Another process uses it; or O_DIRECT is required, and refused there.
            OSError: It cannot be used now.
        """
        self.close()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"field 'paths': another process uses {self.path}; give every node a node_id, or paths, of its own"
            ) from None
        os.pwrite(self._lock_fd, b"in use while a process holds its lock\n", 0)  # who cannot write here finds out now
        if self.direct and not self._direct_works():
            if self._required:
                self.close()
                raise ConfigError(f"field 'direct': the file system of {self.path} refuses O_DIRECT; use 'try'")
            self.direct = False

    def _direct_works(self) -> bool:
        try:
            os.close(os.open(self.path / "lock", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def check(self) -> None:
        """See to it that the directory still is what was opened, and can be written to.

        Raises:
            OSError: It was removed, replaced, or is read-only by now.
        """
        if not os.path.samestat(os.stat(self.path / "lock"), os.fstat(self._lock_fd)):
            raise OSError(errno.ENOENT, "the directory was replaced")
        os.utime(self._lock_fd)

    def numbers(self) -> dict[int, int]:
        """Length in bytes of each segment file, by its number."""
        found = {}
        for entry in os.scandir(self.path):
            match = re.fullmatch(r"(\d{6,9})\.segment", entry.name)
            if match:
                found[int(match[1])] = entry.stat().st_size
        return found

    def make(self, number: int) -> None:
        """Make a segment file, or give one its full length. All of its room is taken.

        Raises:
            OSError: ENOSPC when there is not enough; a file that was made is gone again then.
        """
        path = self._path(number)
        existed = path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.segment_nbytes)
            os.ftruncate(fd, self.segment_nbytes)
        except OSError:
            if not existed:
                path.unlink()
            raise
        finally:
            os.close(fd)

    def remove(self, number: int) -> None:
        """Remove a segment file that nobody uses."""
        with self._lock:
            file = self._files.pop(number, None)
        if file is not None:
            _close(file.fd)
        self._path(number).unlink(missing_ok=True)

    def write(self, number: int, offset: int, pieces: Sequence[memoryview]) -> int:
        """Write pieces one after another; all aligned to blocks. Returns how many bytes that were."""
        nbytes, done = sum(map(len, pieces)), 0
        with self._file(number) as fd:
            while done < nbytes:
                got = os.pwritev(fd, list(_rest(pieces, done))[:IOV_MAX] if done else pieces[:IOV_MAX], offset + done)
                if got == 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += got
            if not self.direct:
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return nbytes

    def read(self, number: int, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fill pieces one after another; all aligned to blocks. Returns how many bytes there were."""
        nbytes, done = sum(map(len, pieces)), 0
        with self._file(number) as fd:
            while done < nbytes:
                got = os.preadv(fd, list(_rest(pieces, done))[:IOV_MAX] if done else pieces[:IOV_MAX], offset + done)
                done += got
                if got == 0 or (self.direct and got % BLOCK_NBYTES):
                    break  # the file ends here
            if not self.direct:
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return done

    def sync(self, number: int) -> None:
        """See to it that what was written survives a power cut."""
        with self._file(number) as fd:
            os.fdatasync(fd)

    def close(self) -> None:
        """Let go of the directory. Nobody may be reading or writing."""
        with self._lock:
            files, self._files = list(self._files.values()), OrderedDict()
        for fd in [*(file.fd for file in files), self._lock_fd]:
            if fd >= 0:
                _close(fd)
        self._lock_fd = -1

    def _path(self, number: int) -> Path:
        return self.path / f"{number:06}.segment"

    @contextmanager
    def _file(self, number: int) -> Iterator[int]:
        with self._lock:
            file = self._files.get(number)
            if file is not None:
                self._files.move_to_end(number)
                file.users += 1
        if file is None:
            fd = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0))
            with self._lock:
                file = self._files.setdefault(number, _File(fd))
                file.users += 1
                if file.fd != fd:
                    os.close(fd)
                self._close_idle()
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1

    def _close_idle(self) -> None:
        for number, file in list(self._files.items()):
            if len(self._files) <= OPEN_FILES:
                return
            if not file.users:
                _close(self._files.pop(number).fd)


class _File:
    def __init__(self, fd: int) -> None:
        self.fd, self.users = fd, 0


def _close(fd: int) -> None:
    """Close a file, whatever the drive says to that: it is not ours any more in any case."""
    try:
        os.close(fd)
    except OSError as error:
        log.warning("closing a segment file: %s", error.strerror)


def _rest(pieces: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """What is left of pieces when so many bytes of them are done."""
    for piece in pieces:
        if done < len(piece):
            yield piece[done:]
        done = max(0, done - len(piece))


def aligned(nbytes: int) -> memoryview:
    """Memory of our own that begins at a page."""
    return memoryview(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class IoThreads:
    """A few threads that do, one after another, what they are handed; and since when each has been at it.

    They are threads of the background (SCHED_BATCH): one that a drive wakes takes an idle core, or waits for its turn,
    but does not interrupt who reads memory: where all cores are busy, p99 of such reads was up to three times as long.
    """

    def __init__(
        self,
        count: int,
        name: str,
        take: Callable[[int], Callable[[], None] | None],
        *,
        failed: Callable[[Exception], None],
        clock: Callable[[], float],
    ) -> None:
        """Start them.

        Args:
            take: Called with the thread's number; waits for something to do, and gives None to end the thread.
            failed: Called with what something raised that should not have.
            clock: Seconds that never go back.
        """
        self._take, self._failed, self._clock = take, failed, clock
        self._since: list[float | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def longest_s(self) -> float:
        """How long the one has been at it that began first; 0 if none is."""
        now_s = self._clock()
        return max((now_s - since for since in self._since if since is not None), default=0.0)

    def busy(self) -> int:
        """How many are at something."""
        return sum(since is not None for since in self._since)

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended. False if one has not: the disk holds it, and nothing can be done about that."""
        until_s = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        give_way()
        while (task := self._take(number)) is not None:
            self._since[number] = self._clock()
            try:
                task()
            except Exception as error:  # the path goes off, for everybody to see, and the thread stays
                log.exception("input or output failed in a way that nobody foresaw")
                self._failed(error)
            del task
            self._since[number] = None
