"""Functions of CUDA's driver that cupy does not offer, called through ctypes. Every host with a GPU has the driver."""

import ctypes
import functools
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from raykv.errors import LostError, UsageError

LIBRARY: Final = "libcuda.so.1"
_ALIGNMENT_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP_WITH_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_DMA_BUF_FD: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

Pieces = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Copies: (target addresses, source addresses, lengths)."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The two locations are hints for managed memory only, so they stay 0."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


@functools.cache
def library(name: str = LIBRARY) -> Any:
    """Load CUDA's driver. Returns None if this host has none."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def has_batched_copies(driver: Any) -> bool:
    """Whether the driver has cuMemcpyBatchAsync: CUDA 12.8 or later."""
    return hasattr(driver, "cuMemcpyBatchAsync_v2") or hasattr(driver, "cuMemcpyBatchAsync")


def copy_batch(driver: Any, pieces: Pieces, stream: int) -> None:
    """Queue many copies with one call. Their order is undefined.

    Args:
        pieces: At least one copy. Each copy has at least one byte.
        stream: A stream that is not the default stream.

    Raises:
        LostError: The driver refused the copies.
    """
    columns = [np.ascontiguousarray(column) for column in pieces]
    attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
    first = ctypes.c_size_t(0)  # the attributes hold from copy 0 on
    pointers = [ctypes.c_void_p(column.ctypes.data) for column in columns]
    arguments = (*pointers, ctypes.c_size_t(len(columns[0])), ctypes.byref(attributes), ctypes.byref(first))
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        code = driver.cuMemcpyBatchAsync_v2(*arguments, ctypes.c_size_t(1), ctypes.c_void_p(stream))
        _check(code, "cuMemcpyBatchAsync")
    else:  # the older form also reports which copy failed
        failed = ctypes.c_size_t(0)
        where = ctypes.byref(failed), ctypes.c_void_p(stream)
        code = driver.cuMemcpyBatchAsync(*arguments, ctypes.c_size_t(1), *where)
        _check(code, f"cuMemcpyBatchAsync, copy {failed.value}")


def dma_buf(driver: Any, address: int, nbytes: int) -> int:
    """Export GPU memory as a dma-buf, which an RDMA NIC can register.

    Args:
        address, nbytes: A range of one GPU allocation, in whole pages of the host.

    Returns:
        A file descriptor, which the caller closes. The memory must not be freed while the dma-buf is in use.

    Raises:
        UsageError: The range does not consist of whole pages.
        LostError: The GPU or the driver exports no dma-bufs. The open kernel modules of NVIDIA's driver are needed.
    """
    if address % _ALIGNMENT_NBYTES or nbytes % _ALIGNMENT_NBYTES or not nbytes:
        raise UsageError(f"field 'nbytes': {nbytes:,} bytes at {address:#x} are not whole pages of the host")
    fd = ctypes.c_int(-1)
    code = driver.cuMemGetHandleForAddressRange(
        ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(nbytes), _DMA_BUF_FD, ctypes.c_ulonglong(0)
    )
    _check(code, "cuMemGetHandleForAddressRange")
    return fd.value


def _check(code: int, name: str) -> None:
    if code:
        raise LostError(f"{name}: CUDA error {code}")
