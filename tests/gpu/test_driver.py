"""The calls of CUDA's driver, against a driver of the tests that has the same two functions."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raykv.errors import LostError, UsageError
from raykv.gpu import driver

SOURCE = r"""
#include <string.h>

/* As in cuda.h of CUDA 12.8 and 13. */
typedef struct { int type, id; } Location;
typedef struct { int order; Location source, target; unsigned int flags; } Attributes;

static int copy(unsigned long long *targets, unsigned long long *sources, size_t *sizes, size_t count,
                Attributes *attributes, size_t *firsts, size_t kinds, void *stream)
{
    if (kinds != 1 || firsts[0] != 0 || attributes->order != 1 || attributes->flags != 1 || stream != (void *)77)
        return 1;
    if (attributes->source.type || attributes->source.id || attributes->target.type || attributes->target.id)
        return 1;
    for (size_t each = 0; each < count; each++)
        memcpy((void *)targets[each], (void *)sources[each], sizes[each]);
    return 0;
}

#ifdef OLD
int cuMemcpyBatchAsync(unsigned long long *targets, unsigned long long *sources, size_t *sizes, size_t count,
                       Attributes *attributes, size_t *firsts, size_t kinds, size_t *failed, void *stream)
{
    *failed = 3;
    return copy(targets, sources, sizes, count, attributes, firsts, kinds, stream);
}
#else
int cuMemcpyBatchAsync_v2(unsigned long long *targets, unsigned long long *sources, size_t *sizes, size_t count,
                          Attributes *attributes, size_t *firsts, size_t kinds, void *stream)
{
    return copy(targets, sources, sizes, count, attributes, firsts, kinds, stream);
}
#endif

int cuMemGetHandleForAddressRange(void *handle, unsigned long long address, size_t nbytes, int kind,
                                  unsigned long long flags)
{
    if (kind != 1 || flags != 0 || nbytes != 8192)
        return 801;
    *(int *)handle = (int)(address >> 12);
    return 0;
}
"""


@pytest.fixture(params=["old", "new"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(SOURCE)
    flags = ["-DOLD"] if request.param == "old" else []
    subprocess.run(
        [compiler, *flags, "-shared", "-fPIC", tmp_path / "driver.c", "-o", tmp_path / "driver.so"], check=True
    )
    return ctypes.CDLL(str(tmp_path / "driver.so"))


def pieces(source: np.ndarray, target: np.ndarray) -> driver.Pieces:
    starts = np.array([0, 10, 30], np.uint64)
    lengths = np.array([5, 20, 1], np.uint64)
    return starts[::-1] + np.uint64(target.ctypes.data), starts + np.uint64(source.ctypes.data), lengths


def test_a_batch_of_copies_is_one_call(library: Any, np_rng: np.random.Generator):
    source, target = np_rng.integers(0, 256, 64, np.uint8), np.zeros(64, np.uint8)
    assert driver.has_batched_copies(library)
    driver.copy_batch(library, pieces(source, target), 77)
    expected = np.zeros(64, np.uint8)
    for at, start, length in ((30, 0, 5), (10, 10, 20), (0, 30, 1)):
        expected[at : at + length] = source[start : start + length]
    assert (target == expected).all()


def test_a_refused_batch_is_an_error(library: Any):
    memory = np.zeros(64, np.uint8)
    with pytest.raises(LostError, match=r"cuMemcpyBatchAsync.*CUDA error 1"):
        driver.copy_batch(library, pieces(memory, memory), 0)


def test_gpu_memory_is_exported_as_a_dma_buf(library: Any):
    assert driver.dma_buf(library, 5 << 12, 8192) == 5
    with pytest.raises(LostError, match=r"cuMemGetHandleForAddressRange.*801"):
        driver.dma_buf(library, 5 << 12, 4096)
    with pytest.raises(UsageError, match="not whole pages"):
        driver.dma_buf(library, (5 << 12) + 1, 8192)


def test_a_host_without_the_driver_has_none():
    assert driver.library("libraykv-no-such-driver.so.1") is None
