"""Copies chunk bytes between one contiguous buffer and several buffers, and computes checksums."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.errors import UsageError
from raykv.memory import native
from raykv.types import Scattered

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

STREAM_NBYTES: Final = 512 << 10
"""Copying a batch of at least this many bytes bypasses the CPU cache: the cache would evict the bytes before use."""
TINY_NBYTES: Final = 240
"""For up to this many bytes, xxh3 uses an algorithm that the compiled loops do not implement."""
_WITHOUT_GIL_NBYTES: Final = 64 << 10
_SHARE_NBYTES: Final = 1 << 20  # a batch gets one thread per this many bytes, because waking a thread takes time


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes. A large copy releases the GIL. For a small copy, releasing the GIL would cost more than it saves."""
    if len(source) < _WITHOUT_GIL_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(source: memoryview, into: Sequence[memoryview]) -> bool:
    """Copy contiguous bytes into several views, in order. Returns False and copies nothing if the lengths differ."""
    if sum(map(len, into)) != len(source):
        return False
    start = 0
    for piece in into:
        copy(piece, source[start : start + len(piece)])
        start += len(piece)
    return True


def gather(target: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy several views into one contiguous target, in order. Raises ValueError if the lengths differ."""
    if len(target) != (needed := sum(map(len, pieces))):
        raise ValueError(f"slot: {len(target)} bytes where {needed} are needed")
    start = 0
    for piece in pieces:
        copy(target[start : start + len(piece)], piece)
        start += len(piece)


def checksum_of(pieces: Sequence[memoryview]) -> int:
    """Return the xxh3-64 checksum of the bytes of several views, in order."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def checksums_of(chunks: Sequence[Sequence[memoryview]]) -> bytes:
    """Return the checksum of each chunk, packed as little-endian u64."""
    return b"".join([checksum_of(pieces).to_bytes(8, "little") for pieces in chunks])


def byte_views(scattered: Scattered, name: str, *, writable: bool) -> list[memoryview]:
    """Return byte views of one buffer or of a list of buffers.

    Raises:
        UsageError: A buffer has the wrong type, is not contiguous, or is read-only although `writable` is True. The
            message calls the argument `name`.
    """
    views = []
    for part in scattered if isinstance(scattered, list | tuple) else (scattered,):
        try:
            view = memoryview(part)
        except (TypeError, ValueError):
            hint = "; for a CPU tensor pass tensor.view(torch.uint8).numpy()" if hasattr(part, "numpy") else ""
            raise UsageError(f"field '{name}': {type(part).__name__} is not a buffer{hint}") from None
        if not view.c_contiguous:
            raise UsageError(f"field '{name}': the buffer is not contiguous; pass its pieces as a list")
        if writable and view.readonly:
            raise UsageError(f"field '{name}': the buffer is read-only")
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B") if view.nbytes else memoryview(bytearray())
        views.append(view)
    return views


def all_byte_views(many: Sequence[Scattered], name: str, *, writable: bool) -> tuple[list[list[memoryview]], list[int]]:
    """Return byte views of each value, and the number of bytes of each value.

    Raises:
        UsageError: As for `byte_views`. The message gives the index of the wrong value.
    """
    views = [byte_views(each, f"{name}[{place}]", writable=writable) for place, each in enumerate(many)]
    return views, [sum(map(len, pieces)) for pieces in views]


def default_copy_threads() -> int:
    """Return half the number of cores that this process may use, at least 1, at most 4. The rest is for the engine."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class CopyThreads:
    """Threads that help the caller copy one large batch. Thread-safe. Usable after a fork.

    The caller's thread copies too. It copies more if a helper wakes late or is busy with another batch. When a call has
    returned or raised, no thread copies for that call any more.

    Attributes:
        count: Number of threads that copy one batch, the caller's thread included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def called(self, chunks: int, nbytes: int) -> Callable[[object], None] | None:
        """Return a function that wakes helper threads for a batch of this size. None means that no thread helps.

        The compiled loops call the function.
        """
        helpers = min(self.count, chunks, nbytes // _SHARE_NBYTES) - 1
        return partial(self._call, helpers) if helpers > 0 and native.loops is not None else None

    def _call(self, helpers: int, job: object) -> None:
        assert native.loops is not None
        pool = self._pool
        if pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
            from concurrent.futures import ThreadPoolExecutor  # imported late, because this makes a node start faster

            pool = self._pool = ThreadPoolExecutor(self.count - 1, "raykv-copy")
            self._pid = os.getpid()
        try:
            for _ in range(helpers):
                pool.submit(native.loops.share, job)
        except RuntimeError:
            pass  # the process ends or cannot start a thread, so fewer threads copy

    def fill(self, targets: list[memoryview], values: list[Sequence[memoryview]]) -> npt.NDArray[np.uint64]:
        """Copy each chunk, given as several views, into its target. Returns the chunks' checksums.

        Raises:
            ValueError: A chunk and its target differ in length.
        """
        nbytes = sum(map(len, targets))
        stream = nbytes >= STREAM_NBYTES
        checksums = np.empty(len(targets), np.uint64)
        if native.loops is not None and targets and min(map(len, targets)) > TINY_NBYTES:
            native.loops.fill(targets, values, checksums, stream, self.called(len(targets), nbytes))
        else:
            for place, (target, value) in enumerate(zip(targets, values, strict=True)):
                gather(target, value)
                checksums[place] = checksum_of([target])
        return checksums

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
