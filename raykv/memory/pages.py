"""Maps files with the alignment that huge pages need, and asks the kernel for huge pages.

The first use of 2 MiB costs a process one page fault with a huge page, and 512 page faults with small pages. There are
three ways to get huge pages:

* MADV_COLLAPSE (Linux 6.1 and later) replaces the small pages of a range by one huge page. It needs no privilege and no
  mount option. The range must contain at least one small page. `collapse` allocates just one small page, so that the
  kernel copies little.
* If the tmpfs is mounted with huge=within_size or huge=always, the kernel uses huge pages without a request.
* On hugetlbfs all pages are huge. They come from a pool that the administrator has filled.

A process can map a huge page only at a multiple of the huge page size. So this module chooses the addresses.
"""

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Final

MADV_COLLAPSE: Final = 25
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_HUGETLBFS_MAGIC: Final = 0x958458F6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@functools.cache
def huge_nbytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


def map_file(fd: int, nbytes: int, *, writable: bool, alignment: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """Map a whole file at an address that is a multiple of `alignment`, a power of two.

    Returns:
        The bytes of the file. The file is unmapped when the array and all its views are gone.

    Raises:
        OSError: The kernel refuses, for example with ENOMEM if a hugetlbfs has too few free pages.
    """
    # Reserve `alignment` more bytes than the file has. Map the file at the first multiple of `alignment` in this range,
    # and unmap the rest of the range.
    start = _mmap(None, nbytes + alignment, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-start // alignment) * alignment
    reserved_end, end = start + nbytes + alignment, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(start, nbytes + alignment)
        raise
    if address > start:
        _libc.munmap(start, address - start)
    if reserved_end > end:
        _libc.munmap(end, reserved_end - end)
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    # Do not unmap at exit, because threads may still read the memory then.
    weakref.finalize(array, _libc.munmap, address, nbytes).atexit = False
    return array


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def try_collapse() -> bool:
    """Ask the kernel to make one huge page of shared memory. Returns whether the kernel made one."""
    nbytes = huge_nbytes()
    if nbytes > 32 << 20:
        return False  # a huge page is larger than an extent of the default size
    fd = os.memfd_create("raykv-trial", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        mapped = map_file(fd, nbytes, writable=True, alignment=nbytes)
        return collapse(ctypes.addressof(mapped), fd, 0)
    except OSError:
        return False
    finally:
        os.close(fd)


def collapse(address: int, fd: int, offset: int) -> bool:
    """Ask the kernel for a huge page at `offset` of a file that is mapped at `address`. Returns whether it made one.

    Raises:
        OSError: The file system has no room for the first small page (ENOSPC or ENOMEM).
    """
    os.posix_fallocate(fd, offset, 1)
    # The mount may have given a huge page. Linux 6.18.44 answers EINVAL for it until something has touched it.
    ctypes.c_ubyte.from_address(address + offset).value  # noqa: B018
    return not _libc.madvise(address + offset, huge_nbytes(), MADV_COLLAPSE)


def hugetlb_page_nbytes(fd: int) -> int:
    """Return the page size of the hugetlbfs that contains a file or directory. Return 0 for any other file system."""
    result = (ctypes.c_long * 32)()  # struct statfs: type and block size come first
    return int(result[1]) if not _libc.fstatfs(fd, result) and result[0] == _HUGETLBFS_MAGIC else 0


def hugetlb_free_nbytes(page_nbytes: int, *, sys: Path = Path("/sys")) -> int:
    """Return the number of free and unreserved bytes in the hugetlb pool of this page size."""
    pool = sys / f"kernel/mm/hugepages/hugepages-{page_nbytes >> 10}kB"
    try:
        free, reserved = (int((pool / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return max(0, free - reserved) * page_nbytes


def syscall_error(number: int, *arguments: int) -> int:
    """Make a system call. Returns 0 after success, and the errno after an error."""
    return ctypes.get_errno() if _libc.syscall(number, *map(ctypes.c_long, arguments)) < 0 else 0
