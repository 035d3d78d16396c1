"""Copies with checksums, one chunk at a time."""

from collections.abc import Sequence

import numpy as np

from raykv.memory import native
from raykv.memory.copying import TINY_NBYTES, CopyThreads


def gather_hashed(target: memoryview, pieces: Sequence[memoryview], *, stream: bool = False) -> int:
    """Copy and hash one chunk, as `CopyThreads.fill` does. With `stream`, compiled loops may bypass the CPU cache."""
    if native.loops is None or len(target) <= TINY_NBYTES:
        return int(CopyThreads(1).fill([target], [pieces])[0])
    checksum = np.empty(1, np.uint64)
    native.loops.fill([target], [pieces], checksum, stream, None)
    return int(checksum[0])
