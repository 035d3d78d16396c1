"""Mapping files so that huge pages fit, and asking the kernel for them.

The first touch of 2 MiB costs every process one fault with huge pages, and 512 without. Shared memory gets them:

* By MADV_COLLAPSE (Linux 6.1 and later): makes one huge page of a block in which any page is present. Needs no
  privilege and no setting of the tmpfs. With only the first page present before, nothing is copied.
* Before 6.1: by fault, after MADV_HUGEPAGE, if the tmpfs is mounted with huge=advise, within_size or always.
* On hugetlbfs all pages are huge, from a pool that the administrator has filled.

A process uses a huge page as one only where the mapping is aligned to it. So we choose the addresses.
"""

import ctypes
import errno
import functools
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Final

MADV_POPULATE_WRITE: Final = 23
MADV_COLLAPSE: Final = 25
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_HUGETLBFS_MAGIC: Final = 0x958458F6
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@functools.cache
def huge_nbytes() -> int:
    try:
        return int((_THP / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


class Mapping:
    """A file in this process's memory. It ends with this object and the last view of it."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool, alignment: int) -> None:
        """Map a whole file.

        `alignment` of the address: a power of two. On hugetlbfs the kernel aligns by itself. Raises OSError: Such as
        ENOMEM when hugetlbfs has fewer free pages.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _map(fd, nbytes, protection, alignment)
        self._array = (ctypes.c_ubyte * nbytes).from_address(self.address)  # every view keeps it alive
        # Not at exit: threads may still be reading then.
        weakref.finalize(self._array, _libc.munmap, self.address, nbytes).atexit = False
        view = memoryview(self._array).cast("B")
        self.view = view if writable else view.toreadonly()

    def advise(self, offset: int, nbytes: int, advice: int) -> int:
        """Call madvise for a part, without the interpreter lock. Returns 0, or the error's number."""
        return ctypes.get_errno() if _libc.madvise(self.address + offset, nbytes, advice) else 0


def _map(fd: int, nbytes: int, protection: int, alignment: int) -> int:
    if alignment <= mmap.PAGESIZE:
        return _mmap(None, nbytes, protection, mmap.MAP_SHARED, fd)
    # Reserve one alignment more, use the part from the first multiple on, and give the rest back.
    start = _mmap(None, nbytes + alignment, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-start // alignment) * alignment
    reserved_end, end = start + nbytes + alignment, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(start, nbytes + alignment)
        raise
    if address > start:
        _libc.munmap(start, address - start)
    if reserved_end > end:
        _libc.munmap(end, reserved_end - end)
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


@functools.cache
def collapse_works() -> bool:
    """Whether the kernel makes huge pages of shared memory on request: since 6.1. An older one is tried."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (version is not None and (int(version[1]), int(version[2])) >= (6, 1)) or try_collapse()


def try_collapse() -> bool:
    """Whether one huge page of shared memory can be made on request. Takes 5 ms."""
    nbytes = huge_nbytes()
    if nbytes > 32 << 20:
        return False  # larger than extents
    fd = os.memfd_create("raykv-trial", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return collapse(Mapping(fd, nbytes, writable=True, alignment=nbytes), fd, 0)
    except OSError:
        return False
    finally:
        os.close(fd)


def collapse(mapping: Mapping, fd: int, offset: int) -> bool:
    """Make the block at `offset` one huge page. False when the kernel has none.

    Raises OSError: ENOSPC or ENOMEM: no room for the block's first page.
    """
    os.posix_fallocate(fd, offset, 1)
    return mapping.advise(offset, huge_nbytes(), MADV_COLLAPSE) == 0


def fault(mapping: Mapping, offset: int) -> bool:
    """Touch the block at `offset`: the kernel may take a huge page for it. False when it has no room at all."""
    nbytes = huge_nbytes()
    mapping.advise(offset, nbytes, mmap.MADV_HUGEPAGE)
    return mapping.advise(offset, nbytes, MADV_POPULATE_WRITE) == 0  # EFAULT in place of SIGBUS


def grant_of(fd: int, *, proc: Path = Path("/proc"), thp: Path = _THP) -> str:
    """Huge pages by the mount of a file: "never", "advise", "within_size", "always", "deny" or "force"."""
    try:
        overall = (thp / "shmem_enabled").read_text()
        overall = overall[overall.index("[") + 1 : overall.index("]")]
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except (OSError, ValueError):
        return "never"
    if overall in ("deny", "force"):
        return overall
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        fields, _, options = line.partition(" - ")
        if fields.split()[2] == name:
            words = [word for word in options.split()[-1].split(",") if word.startswith("huge=")]
            return words[-1].removeprefix("huge=") if words else "never"
    return overall  # a memfd: its mount is hidden


def hugetlb_page_nbytes(fd: int) -> int:
    """Page size of the hugetlbfs that a file or directory lies in; 0 in another file system."""
    result = (ctypes.c_long * 32)()  # struct statfs: type and block size come first
    return int(result[1]) if not _libc.fstatfs(fd, result) and result[0] == _HUGETLBFS_MAGIC else 0


def hugetlb_free_nbytes(page_nbytes: int, *, sys: Path = Path("/sys")) -> int:
    """Bytes of the hugetlb pool of that page size that are neither in use nor reserved."""
    pool = sys / f"kernel/mm/hugepages/hugepages-{page_nbytes >> 10}kB"
    try:
        free, reserved = (int((pool / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return max(0, free - reserved) * page_nbytes


def syscall_error(number: int, *arguments: int) -> int:
    """Make a system call. Returns 0, or the error's number."""
    return ctypes.get_errno() if _libc.syscall(number, *map(ctypes.c_long, arguments)) < 0 else 0


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.ENOMEM)
