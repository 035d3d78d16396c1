"""Shared memory: anonymous memory, or a file in a tmpfs or hugetlbfs. A file outlives the process that made it."""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
import weakref
from pathlib import Path
from typing import Self

from raykv.config import HugePages, StorageConfig
from raykv.errors import ConfigError, LostError
from raykv.memory import pages
from raykv.memory.cgroup import memory_limit
from raykv.memory.host import meminfo


class SharedMemory:
    """One mapped file. Only processes of the same user may open it.

    Attributes:
        path: Other processes open the file by this path.
        view: All bytes of the file.
        address: Address of the first byte in this process, a multiple of the huge page size.
        page_nbytes: Page size of the hugetlbfs, or of the host if the file is not on a hugetlbfs.
        huge_pages: "try": `populate` asks for huge pages. "require": `populate` fails without huge pages. "never":
            `populate` takes only small pages.
    """

    def __init__(self, fd: int, path: Path, nbytes: int, *, writable: bool, huge_pages: HugePages = "never") -> None:
        self.path, self.nbytes, self.huge_pages = path, nbytes, huge_pages
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.page_nbytes, huge = pages.hugetlb_page_nbytes(fd) or mmap.PAGESIZE, pages.huge_nbytes()
        mapped = pages.map_file(fd, nbytes, writable=writable, alignment=max(huge, self.page_nbytes))
        view = memoryview(mapped).cast("B")
        self.view, self.address = view if writable else view.toreadonly(), ctypes.addressof(mapped)
        self._mapped: object = mapped
        self._huge_blocks = bytearray(nbytes // huge)

    @classmethod
    def create(cls, path: Path | None, nbytes: int, *, huge_pages: HugePages = "try") -> Self:
        """Make a file of zeros. The file takes no real memory until `populate` or the first access.

        If `path` is None, make anonymous memory. On hugetlbfs the length is rounded up to whole pages.

        Raises:
            ConfigError: The file exists, its directory is not writable, or a hugetlbfs has no room.
        """
        if path is None:
            fd = os.memfd_create("raykv")
            path = Path(f"/proc/{os.getpid()}/fd/{fd}")
        else:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(f"field 'shm_dir': cannot make {path}: {error.strerror}") from error
        page = pages.hugetlb_page_nbytes(fd) or 1
        nbytes = -(-nbytes // page) * page
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd, path, nbytes, writable=True, huge_pages=huge_pages)
        except OSError as error:
            path.unlink()
            raise ConfigError(f"field 'shm_dir': no room for {nbytes:,} bytes in {path}: {error.strerror}") from error

    @classmethod
    def attach(cls, path: Path, *, writable: bool, huge_pages: HugePages = "never") -> Self:
        """Map a file that `create` made.

        Raises:
            LostError: The file is missing, is empty, or cannot be opened or mapped. Or another user could have made or
                changed it: it is a symbolic link, belongs to another user, or others may write to it.
        """
        anonymous = path.is_relative_to("/proc")  # there the kernel's links name the memory of processes
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(path, flags if anonymous else flags | os.O_NOFOLLOW)
        except OSError as error:
            raise LostError(f"shared memory {path}: {error.strerror}") from error
        found = os.fstat(fd)
        nbytes = found.st_size
        others_write = not anonymous and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or not nbytes or found.st_uid != os.geteuid() or others_write:
            os.close(fd)
            raise LostError(
                f"shared memory {path} is refused: {nbytes:,} bytes, mode {stat.filemode(found.st_mode)}, "
                f"user {found.st_uid}; needed is a file with content of user {os.geteuid()} that nobody else may write"
            )
        try:
            return cls(fd, path, nbytes, writable=writable, huge_pages=huge_pages)
        except OSError as error:  # for example, the path is a directory
            raise LostError(f"shared memory {path} cannot be mapped: {error.strerror}") from error

    def populate(self, offset: int, nbytes: int, *, hurry: bool = False) -> bool:
        """Allocate real memory for a part of the file, so that a later access cannot kill this process with SIGBUS.

        Takes huge pages if `huge_pages` allows them and the kernel has some. The call releases the GIL. Other threads
        may use the part meanwhile. A second call for the same part replaces small pages by huge pages, if possible.

        Args:
            offset: Start of the part, in bytes.
            nbytes: Length of the part.
            hurry: Whether a writer waits for this call. If so, huge pages are tried only if they are required.

        Returns:
            False if the file system has no room, or if huge pages are required and the kernel has none.
        """
        mapped = self._mapped  # this reference prevents an unmap during the call
        if mapped is None:
            return False
        try:
            huge = self.page_nbytes > mmap.PAGESIZE
            if not huge and not (hurry and self.huge_pages != "require"):
                huge = self._take_huge_pages(offset, nbytes)
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return huge or self.huge_pages != "require"

    def refusal(self, nbytes: int) -> str:
        """Return why this file must not take `nbytes` more bytes now. Empty: the control group's limit allows it.

        `populate` does not check the limit, because the kernel enforces it by killing a process of the group.
        """
        limit = memory_limit() if self.page_nbytes == mmap.PAGESIZE else None  # the limit does not count a hugetlbfs
        if limit is None or nbytes <= limit.room_nbytes:
            return ""
        return (
            f"the container's memory limit is {limit.nbytes:,} bytes, and {limit.used_nbytes:,} are in use: "
            "raise the limit, or lower arena_nbytes"
        )

    @property
    def huge_nbytes(self) -> int:
        """Number of bytes in huge pages. On tmpfs, only huge pages that this process made in `populate` count."""
        if self.page_nbytes > mmap.PAGESIZE and self._close_fd.alive:
            return os.fstat(self._fd).st_blocks * 512
        return self._huge_blocks.count(1) * pages.huge_nbytes()

    def _take_huge_pages(self, offset: int, nbytes: int) -> bool:
        """Allocate the huge pages that are wholly within a part of the file.

        Returns:
            Whether all of these huge pages are allocated.

        Raises:
            OSError: The file system has no room.
        """
        found = os.fstatvfs(self._fd)
        if self.huge_pages == "never" or (found.f_blocks and found.f_bavail * found.f_frsize < nbytes):
            return False  # with too little room, the caller's `posix_fallocate` fails and takes no memory
        block = pages.huge_nbytes()
        for number in range(-(-offset // block), (offset + nbytes) // block):
            if not self._huge_blocks[number] and not pages.collapse(self.address, self._fd, number * block):
                return False  # the kernel has no more huge pages, and each further try may be a long search
            self._huge_blocks[number] = 1
        return True

    def own(self, *, timeout_s: float) -> None:
        """Become the one process that writes to this file. The ownership ends with `close` or with the process.

        If another process owns the file, wait up to `timeout_s` seconds for the end of that process, because a killed
        process takes a moment to end.

        Raises:
            ConfigError: Another process still owns the file after that time.
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
        if self._close_fd.alive:
            os.utime(self._fd)

    def is_current(self) -> bool:
        """Whether `path` still names this file. If not, the file was removed or replaced."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Give up the ownership, and close the file. The memory is unmapped when its last view is gone."""
        if self._close_fd.alive:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # otherwise the ownership would last as long as the mapping
            self._close_fd()
        try:
            self.view.release()
        except BufferError:
            pass  # numpy arrays still use the memory; the last of them unmaps it
        self._mapped = None


def free_nbytes(directory: Path | None) -> int:
    """Return the free bytes in the file system of `directory`, or in the host's memory if `directory` is None."""
    if directory is None:
        return meminfo()["MemAvailable"]
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stat, page = os.fstatvfs(fd), pages.hugetlb_page_nbytes(fd)
    finally:
        os.close(fd)
    free = stat.f_bavail * stat.f_frsize
    if page:  # a hugetlbfs that is mounted without a size limit reports f_blocks 0
        return min(free if stat.f_blocks else 1 << 62, pages.hugetlb_free_nbytes(page))
    return free


def sized_by_share(config: StorageConfig, share: float) -> StorageConfig:
    """Return the config with `arena_nbytes` set to a share of `shm_dir`'s file system, rounded down to whole extents.

    Raises:
        ConfigError: The share is smaller than an extent, or `shm_dir` is not a directory.
    """
    if config.shm_dir is None or not config.shm_dir.is_dir():
        raise ConfigError(f"field 'arena_share': {config.shm_dir} is no directory to take a share of; set arena_nbytes")
    stat = os.statvfs(config.shm_dir)
    extents = int(stat.f_blocks * stat.f_frsize * share) // config.extent_nbytes
    if not extents:
        raise ConfigError(f"field 'arena_share': {share:.0%} of {config.shm_dir} holds no extent; raise it or its size")
    return config.model_copy(update={"arena_nbytes": extents * config.extent_nbytes})


def require_room(directory: Path | None, nbytes: int, *, field: str) -> None:
    """Check that `directory` has `nbytes` bytes free. If `directory` is None, check the host's memory.

    Raises:
        ConfigError: There are fewer free bytes, or `directory` is not a directory. The message names `field`.
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


def require_pages(arena: SharedMemory, extent_nbytes: int) -> None:
    """Raise ConfigError if an extent does not consist of whole pages, or if the kernel lacks required huge pages."""
    required = arena.huge_pages == "require"
    page = max(arena.page_nbytes, pages.huge_nbytes() if required else 0)
    if extent_nbytes % page:
        raise ConfigError(f"field 'extent_nbytes': must be a multiple of the page there, {page:,} bytes")
    if required and not arena.populate(0, page):
        raise ConfigError("field 'huge_pages': required, but the kernel gives none; 'raykv doctor' says what to do")
