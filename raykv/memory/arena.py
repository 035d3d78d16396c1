"""Shared memory that outlives its process: a file in a tmpfs or hugetlbfs, or anonymous memory with a path."""

import fcntl
import mmap
import os
import time
import weakref
from functools import cached_property
from pathlib import Path
from typing import Self

from raykv.config import HugePages, StorageConfig
from raykv.errors import ConfigError, LostError
from raykv.memory import pages


class SharedMemory:
    """One mapped file, for its owner's user alone. Ends with `close`, or with the last reference to it.

    Attributes:
        path: Other processes of the same user open it by this path.
        view: All of its bytes.
        address: Where they begin in this process; a multiple of the huge page, unless they are fewer than that.
        page_nbytes: The page of a hugetlbfs, else the host's. The file's length is a multiple of it.
        huge_pages: Whether `populate` asks for huge pages.
    """

    def __init__(self, fd: int, path: Path, nbytes: int, *, writable: bool, huge_pages: HugePages = "never") -> None:
        self.path, self.nbytes, self.huge_pages = path, nbytes, huge_pages
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        hugetlb, huge = pages.hugetlb_page_nbytes(fd), pages.huge_nbytes()
        self.page_nbytes = hugetlb or mmap.PAGESIZE
        alignment = huge if nbytes >= huge and not hugetlb else mmap.PAGESIZE
        self._map: pages.Mapping | None = pages.Mapping(fd, nbytes, writable=writable, alignment=alignment)
        self.view, self.address = self._map.view, self._map.address
        self._huge_blocks = bytearray(nbytes // huge)

    @classmethod
    def create(cls, path: Path | None, nbytes: int, *, huge_pages: HugePages = "try") -> Self:
        """Make a file of zeros. It has no memory yet: see `populate`.

        With path None: anonymous memory that ends with its last user. On hugetlbfs the length becomes a multiple of the
        page. Raises ConfigError: The file exists, or its directory does not let us make it, or a hugetlbfs has no room.
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
        """Map a file that `create` made. Raises LostError: It does not exist (any more), or may not be opened."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise LostError(f"shared memory {path}: {error.strerror}") from error
        nbytes = os.fstat(fd).st_size
        if nbytes == 0:
            os.close(fd)
            raise LostError(f"shared memory {path} is empty")
        try:
            return cls(fd, path, nbytes, writable=writable, huge_pages=huge_pages)
        except OSError as error:  # such as a directory
            raise LostError(f"shared memory {path} cannot be mapped: {error.strerror}") from error

    def populate(self, offset: int, nbytes: int, *, hurry: bool = False) -> bool:
        """Take real memory for a part of the file, so that touching it later cannot kill us with SIGBUS.

        Uses huge pages where they fit, are wanted, and the kernel has some. Other threads run meanwhile. A second call
        costs little, and turns small pages into huge ones where that has become possible; the part may be in use.
        `hurry`: a writer waits: take small pages, which is quicker at worst, unless huge ones are required. Returns:
        False when the file system has no room (or, where huge pages are required, no huge ones). Nothing was taken
        then, unless another process took the last of it at the same time.
        """
        mapping = self._map
        if mapping is None:
            return False
        try:
            huge = self.page_nbytes > mmap.PAGESIZE
            if not huge and not (hurry and self.huge_pages != "require"):
                huge = self._take_huge_pages(mapping, offset, nbytes)
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if pages.is_full(error):
                return False
            raise
        return huge or self.huge_pages != "require"

    @property
    def huge_nbytes(self) -> int:
        """Bytes in huge pages: all of a hugetlbfs file, else those that `populate` found or made in this process."""
        if self.page_nbytes > mmap.PAGESIZE and self._close_fd.alive:
            return os.fstat(self._fd).st_blocks * 512
        return self._huge_blocks.count(1) * pages.huge_nbytes()

    def _take_huge_pages(self, mapping: pages.Mapping, offset: int, nbytes: int) -> bool:
        """Take the huge pages that fit into a part. True when it got all of them. Raises OSError: No room for one."""
        found = os.fstatvfs(self._fd)
        if self.huge_pages == "never" or (found.f_blocks and found.f_bavail * found.f_frsize < nbytes):
            return False  # with so little room only `posix_fallocate` as a whole gives all back if it fails
        block = pages.huge_nbytes()
        for number in range(-(-offset // block), (offset + nbytes) // block):
            if self._huge_blocks[number]:
                continue
            if pages.collapse_works():
                got = pages.collapse(mapping, self._fd, number * block)
            else:
                got = self._faults_are_huge and pages.fault(mapping, number * block)
            if not got:
                return False  # the next one is not likelier, and each try may cost the kernel a search for room
            self._huge_blocks[number] = 1
        return True

    @cached_property
    def _faults_are_huge(self) -> bool:
        return pages.grant_of(self._fd) not in ("never", "deny")

    def own(self, *, timeout_s: float) -> None:
        """Become the one process that writes here. Ends with the process, however that ends.

        Raises ConfigError: Another process still owns it after `timeout_s`. (A killed process may take a moment to
        end.)
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
        """Whether `path` still leads to this file, not to a new one."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Unmap, and give up the ownership. Views that are still in use keep the mapping until they end."""
        if self._close_fd.alive:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # else it would last as long as those views: they share the open file
            self._close_fd()
        try:
            self.view.release()
        except BufferError:
            pass  # numpy arrays still point here; the mapping ends with the last of them
        self._map = None


def free_nbytes(directory: Path | None) -> int:
    """Bytes that are free in the file system of `directory`, or (None) in the host's memory."""
    if directory is None:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stat, page = os.fstatvfs(fd), pages.hugetlb_page_nbytes(fd)
    finally:
        os.close(fd)
    free = stat.f_bavail * stat.f_frsize
    if page:  # a hugetlbfs may be mounted without a bound of its own
        return min(free if stat.f_blocks else 1 << 62, pages.hugetlb_free_nbytes(page))
    return free


def sized_by_share(config: StorageConfig, share: float) -> StorageConfig:
    """The same config with an arena of a share of its directory, in whole extents.

    Raises ConfigError: The share holds no extent, or the directory has no size of its own.
    """
    if config.shm_dir is None or not config.shm_dir.is_dir():
        raise ConfigError(f"field 'arena_share': {config.shm_dir} is no directory to take a share of; set arena_nbytes")
    stat = os.statvfs(config.shm_dir)
    extents = int(stat.f_blocks * stat.f_frsize * share) // config.extent_nbytes
    if not extents:
        raise ConfigError(f"field 'arena_share': {share:.0%} of {config.shm_dir} holds no extent; raise it or its size")
    return config.model_copy(update={"arena_nbytes": extents * config.extent_nbytes})


def require_room(directory: Path | None, nbytes: int, *, field: str) -> None:
    """Refuse sizes that cannot be served, before any file is made.

    Raises ConfigError: Not a directory, or less than `nbytes` is free there.
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
    """Refuse (ConfigError) extents that are not whole pages, and hosts without huge pages where those are required."""
    required = arena.huge_pages == "require"
    page = max(arena.page_nbytes, pages.huge_nbytes() if required else 0)
    if extent_nbytes % page:
        raise ConfigError(f"field 'extent_nbytes': must be a multiple of the page there, {page:,} bytes")
    if required and not arena.populate(0, page):
        raise ConfigError("field 'huge_pages': required, but the kernel gives none; 'raykv doctor' says what to do")
