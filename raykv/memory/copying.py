"""Copying chunk bytes between memory that is in one piece and memory that is in several."""

from collections.abc import Sequence

import numpy as np
import xxhash


def scatter(source: memoryview, into: Sequence[memoryview]) -> bool:
    """Copy one run of bytes into several views, in order. False, and nothing copied, when the lengths differ."""
    if len(into) == 1:
        if len(into[0]) != len(source):
            return False
        copy(into[0], source)
        return True
    if sum(map(len, into)) != len(source):
        return False
    start = 0
    for piece in into:
        copy(piece, source[start : start + len(piece)])
        start += len(piece)
    return True


def gather(target: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy several views into one run of bytes, in order. The lengths must agree."""
    start = 0
    for piece in pieces:
        copy(target[start : start + len(piece)], piece)
        start += len(piece)


_WITHOUT_GIL_NBYTES = 64 << 10


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes. Large copies let other threads run meanwhile; for small ones that would cost more than it gives."""
    if len(source) < _WITHOUT_GIL_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def checksum_of(pieces: Sequence[memoryview]) -> int:
    """xxh3-64 of the bytes of several views, in order."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()
