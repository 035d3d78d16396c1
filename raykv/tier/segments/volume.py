"""I/O on a directory of segment files.

O_DIRECT transfers bytes between the drive and the arena without a copy. One call writes a batch: a record and all its
chunks. If a file system refuses O_DIRECT, bytes pass through the page cache and are dropped from it at once.

Each operation opens its file again, so that a removed directory is noticed at once. This costs microseconds.
"""

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from raykv.errors import ConfigError
from raykv.tier.segments.format import BLOCK_NBYTES, Record, encode

IOV_MAX: Final = 1024
"""Limit of Linux: the most buffers in one system call."""


class Volume:
    """The segment files of a directory. Thread-safe; methods wait for the disk. `direct`: whether O_DIRECT is used."""

    def __init__(self, path: Path, *, segment_nbytes: int, direct: Literal["try", "require", "never"]) -> None:
        self.path, self.segment_nbytes = path, segment_nbytes
        self.direct = direct != "never"
        self._required = direct == "require"
        self._lock_fd = -1

    def open(self) -> None:
        """Create the directory if it is missing, and lock it for this process. May be called again.

        Raises:
            ConfigError: Another process uses the directory, or O_DIRECT is required and the file system refuses it.
            OSError: The directory cannot be used now.
        """
        self.close()
        make_directory(self.path)
        self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"field 'paths': another process uses {self.path}; give every node a node_id, or paths, of its own"
            ) from None
        os.pwrite(self._lock_fd, b"in use while a process holds its lock\n", 0)  # fails if the file system is read-only
        try:
            flags = os.O_DIRECT if self.direct else 0
            os.close(os.open(self.path / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
        if self._required and not self.direct:
            self.close()
            raise ConfigError(f"field 'direct': the file system of {self.path} refuses O_DIRECT; use 'try'")

    def numbers(self) -> dict[int, int]:
        """Return the length in bytes of each segment file, by number."""
        return {
            int(match[1]): entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(self.path)
            if (match := re.fullmatch(r"(\d{6,9})\.segment", entry.name))
        }

    def make(self, number: int) -> None:
        """Create a segment file, or extend a short one to full length. If this fails, a newly made file is removed."""
        path = self._path(number)
        existed = path.exists()
        with self._file(number, os.O_CREAT) as fd:
            try:
                os.posix_fallocate(fd, 0, self.segment_nbytes)
                os.ftruncate(fd, self.segment_nbytes)
            except OSError:
                if not existed:
                    path.unlink()
                raise

    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def write(self, number: int, offset: int, buffers: Sequence[memoryview], *, sync: bool = False) -> int:
        """Write buffers one after another. Offset, and addresses and lengths of buffers, must be multiples of a block.

        `sync` calls fdatasync, so that the whole segment survives a power cut. Returns the number of bytes written.
        """
        with self._file(number) as fd:
            nbytes = write_all(fd, buffers, offset)
            if sync:
                os.fdatasync(fd)
            if not self.direct:
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return nbytes

    def read(self, number: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers, aligned as for `write`. Returns the number of bytes read, which is lower if the file ends."""
        with self._file(number) as fd:
            nbytes = transfer(os.preadv, fd, buffers, offset)
            if not self.direct:
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return nbytes

    def close(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self.path / f"{number:06}.segment"

    @contextmanager
    def _file(self, number: int, flags: int = 0) -> Iterator[int]:
        flags |= os.O_DIRECT if self.direct and not flags else 0
        fd = os.open(self._path(number), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory that only this user may enter. Missing parents get the default permissions.

    Raises:
        ConfigError: The directory exists, and another user could change its files.
        OSError: The directory cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path} is refused: mode {stat.filemode(found.st_mode)}, user {found.st_uid}; needed is a directory of "
            f"user {os.geteuid()} that other users may not write to"
        )


def transfer(call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Repeat `os.preadv` or `os.pwritev` until all buffers are done or the file ends. Returns the number of bytes."""
    left, done = list(buffers), 0
    while left:
        got = call(fd, left[:IOV_MAX], offset + done)
        if not got:
            break
        done += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]
            if got % BLOCK_NBYTES and call is os.preadv:
                break  # the file ends within a block
    return done


def write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write buffers one after another. Returns the number of bytes. Raises OSError also after a partial write."""
    nbytes = transfer(os.pwritev, fd, buffers, offset)
    if nbytes < sum(map(len, buffers)):
        raise OSError(errno.EIO, "nothing was written")
    return nbytes


def aligned(nbytes: int) -> memoryview:
    """Allocate private, page-aligned memory of at least `nbytes`."""
    return memoryview(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def encoded(record: Record) -> memoryview:
    buffer = aligned(record.blocks() * BLOCK_NBYTES)
    return buffer[: encode(record, buffer)]
