"""Shared memory that outlives its process: a file in a tmpfs (or hugetlbfs), or anonymous memory with a path."""

import errno
import fcntl
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Self

from raykv.errors import ConfigError, LostError

NO_SPACE = (errno.ENOSPC, errno.ENOMEM)


class SharedMemory:
    """One mapped file, readable by its owner's user alone. Ends with `close`, or with the last reference to it.

    Attributes:
        path: By which other processes of the same user open it.
        view: All of its bytes.
    """

    def __init__(self, fd: int, path: Path, nbytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, path: Path | None, nbytes: int) -> Self:
        """Make a file of zeros. It takes no memory yet: see `back`.

        Args:
            path: The file, which must not exist. None: anonymous memory that is gone with its last user.

        Raises:
            ConfigError: The file exists, or its directory does not let us make it.
        """
        if path is None:
            fd = os.memfd_create("raykv")
            path = Path(f"/proc/{os.getpid()}/fd/{fd}")
        else:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(f"field 'shm_dir': cannot make {path}: {error.strerror}") from error
        os.ftruncate(fd, nbytes)
        return cls(fd, path, nbytes, writable=True)

    @classmethod
    def attach(cls, path: Path, *, writable: bool) -> Self:
        """Map a file that `create` made.

        Raises:
            LostError: It is not there (any more), or not ours to open.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise LostError(f"shared memory {path}: {error.strerror}") from error
        nbytes = os.fstat(fd).st_size
        if nbytes == 0:
            os.close(fd)
            raise LostError(f"shared memory {path} is empty")
        return cls(fd, path, nbytes, writable=writable)

    def back(self, offset: int, nbytes: int) -> bool:
        """Take real memory for a part of the file, so that touching it later cannot kill us with SIGBUS.

        Returns:
            False when the file system has no room for it; nothing was taken then.
        """
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno in NO_SPACE:
                return False
            raise
        return True

    def own(self, *, timeout_s: float) -> None:
        """Become the one process that writes here. Ends with the process, however that ends.

        Raises:
            ConfigError: Another process still owns it after `timeout_s` (a killed one may take a moment to go).
        """
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise ConfigError(
                        f"field 'node_id': another process serves {self.path}; give every node a node_id of its own"
                    ) from None
                time.sleep(0.02)

    def touch(self) -> None:
        """Mark the file as in use, by its time."""
        if self._close_fd.alive:
            os.utime(self._fd)

    def is_current(self) -> bool:
        """Whether `path` still leads to this file, not to one made anew."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the mapping, and of its ownership. Views that are still in use keep it alive until they go."""
        if self._close_fd.alive:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # or it would last as long as those views: they share the open file
            self._close_fd()
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # numpy arrays still point here; the mapping goes with the last of them


def free_nbytes(directory: Path | None) -> int:
    """Bytes that can still be had: in the file system of `directory`, or (None) of the host's memory."""
    if directory is None:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def require_room(directory: Path | None, nbytes: int, *, field: str) -> None:
    """Refuse sizes that cannot be served, before anything is made.

    Raises:
        ConfigError: Not a directory, or less than `nbytes` is free there; names the field and the remedy.
    """
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"field 'shm_dir': {directory} is not a directory; name a mounted tmpfs such as /dev/shm")
    free = free_nbytes(directory)
    if nbytes <= free:
        return
    if directory is None:
        raise ConfigError(f"field '{field}': {nbytes:,} bytes, but the host has only {free:,} free; lower {field}")
    raise ConfigError(
        f"field '{field}': {nbytes:,} bytes do not fit in {directory}, which has {free:,} free; "
        f"lower {field}, remove files there, or enlarge it (mount -o remount,size=... {directory})"
    )
