"""Mapping files with the alignment that huge pages need, and asking the kernel for huge pages.

The first touch of 2 MiB costs a process one page fault with a huge page, and 512 without. Ways to get huge pages:

* MADV_COLLAPSE (Linux 6.1 and later) turns a block with at least one page into a huge page. It needs no privilege and
  no mount option. `collapse` takes only the first page before, so the kernel copies next to nothing.
* Before 6.1: a page fault after MADV_HUGEPAGE, if the tmpfs is mounted with huge=advise, within_size or always.
* On hugetlbfs all pages are huge. They come from a pool that the administrator has filled.

A process can map a huge page only at a multiple of the huge page size. So this module chooses the addresses.
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
    """A file mapped into this process. The mapping ends when this object and all views of it are gone."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool, alignment: int) -> None:
        """Map a whole file at a multiple of `alignment`, a power of two. On hugetlbfs the kernel aligns by itself.

        Raises OSError: Such as ENOMEM when a hugetlbfs has too few free pages.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _map(fd, nbytes, protection, alignment)
        self._array = (ctypes.c_ubyte * nbytes).from_address(self.address)  # every view keeps it alive
        # Not at exit, since threads may still read the mapping then.
        weakref.finalize(self._array, _libc.munmap, self.address, nbytes).atexit = False
        view = memoryview(self._array).cast("B")
        self.view = view if writable else view.toreadonly()

    def advise(self, offset: int, nbytes: int, advice: int) -> int:
        """Call madvise on a part, without the GIL. Returns 0, or the errno."""
        return ctypes.get_errno() if _libc.madvise(self.address + offset, nbytes, advice) else 0


def _map(fd: int, nbytes: int, protection: int, alignment: int) -> int:
    if alignment <= mmap.PAGESIZE:
        return _mmap(None, nbytes, protection, mmap.MAP_SHARED, fd)
    # Reserve `alignment` bytes more, map the file at the first multiple of it, and unmap the rest.
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
    """Whether the kernel makes huge pages of shared memory on request. Linux 6.1 does; an older kernel is tested."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (version is not None and (int(version[1]), int(version[2])) >= (6, 1)) or try_collapse()


def try_collapse() -> bool:
    """Try to make one huge page of shared memory on request. Takes 5 ms. Returns whether it worked."""
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
    """Make the block at `offset` one huge page. Returns False when the kernel has no free huge page.

    Raises OSError: ENOSPC or ENOMEM: The file system has no room for the block's first page.
    """
    os.posix_fallocate(fd, offset, 1)
    return mapping.advise(offset, huge_nbytes(), MADV_COLLAPSE) == 0


def fault(mapping: Mapping, offset: int) -> bool:
    """Touch the block at `offset`, for which the kernel may take a huge page. Returns False when there is no room."""
    nbytes = huge_nbytes()
    mapping.advise(offset, nbytes, mmap.MADV_HUGEPAGE)
    return mapping.advise(offset, nbytes, MADV_POPULATE_WRITE) == 0  # without room: EFAULT instead of SIGBUS


def grant_of(fd: int, *, proc: Path = Path("/proc"), thp: Path = _THP) -> str:
    """The `huge` option that holds for a file: "never", "advise", "within_size", "always", "deny" or "force"."""
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
    return overall  # a memfd: mountinfo does not list its mount


def hugetlb_page_nbytes(fd: int) -> int:
    """Page size of the hugetlbfs of a file or directory; 0 for any other file system."""
    result = (ctypes.c_long * 32)()  # struct statfs: type and block size come first
    return int(result[1]) if not _libc.fstatfs(fd, result) and result[0] == _HUGETLBFS_MAGIC else 0


def hugetlb_free_nbytes(page_nbytes: int, *, sys: Path = Path("/sys")) -> int:
    """Bytes that are neither in use nor reserved in the hugetlb pool of this page size."""
    pool = sys / f"kernel/mm/hugepages/hugepages-{page_nbytes >> 10}kB"
    try:
        free, reserved = (int((pool / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return max(0, free - reserved) * page_nbytes


def syscall_error(number: int, *arguments: int) -> int:
    """Make a system call. Returns 0, or the errno."""
    return ctypes.get_errno() if _libc.syscall(number, *map(ctypes.c_long, arguments)) < 0 else 0


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.ENOMEM)
