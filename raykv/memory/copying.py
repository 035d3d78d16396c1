"""Copying chunk bytes between memory that is in one piece and memory that is in several."""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.errors import UsageError
from raykv.memory import native
from raykv.types import Scattered

STREAM_NBYTES: Final = 512 << 10
"""Copies of this many bytes at once go past the cache, where the compiled loops are there: what is so large leaves it
again before anybody uses it, and the target's old bytes need not be fetched."""
STREAM_ONE_NBYTES: Final = 64 << 10
"""The same for a single chunk that is read: from here on it was measured to pay."""
STREAM_STORE_NBYTES: Final = 16 << 10
"""And for one that is stored: nobody on this core reads the slot next, and what is hashed on the way is read once."""
HASH_NBYTES: Final = 256 << 10
"""Bytes are copied and hashed in turns of this size, so that the second pass finds them in the cache."""
CHECKSUM: Final = struct.Struct("<Q")
_WITHOUT_GIL_NBYTES: Final = 64 << 10
TINY_NBYTES: Final = 240
"""Up to here the checksum is another algorithm, which the compiled loops leave to xxhash."""
_libc = ctypes.PyDLL(None)  # it does not let go of the interpreter lock for a call of nanoseconds
_SHARE_NBYTES: Final = 1 << 20
"""No thread is woken for less."""


def copy(target: memoryview, source: memoryview, *, stream: bool = False) -> None:
    """Copy bytes. Large copies let other threads run meanwhile; for small ones that would cost more than it gives."""
    if len(source) < _WITHOUT_GIL_NBYTES:
        target[:] = source
    elif native.copy is not None:
        native.copy(target, source, stream)
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


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


def store(target: memoryview, pieces: Sequence[memoryview], *, stream: bool = False) -> int:
    """Copy several views into one run of bytes, in order, and hash them on the way. The lengths must agree.

    Args:
        stream: Past the cache; for copies of STREAM_NBYTES and more in all, or a chunk of STREAM_STORE_NBYTES.

    Returns:
        The checksum, as `checksum_of` gives it.
    """
    if native.fill is not None and len(target) > TINY_NBYTES:
        checksum = np.empty(1, np.uint64)
        native.fill([target], [pieces], checksum, stream, None)
        return int(checksum[0])
    if len(pieces) == 1 and len(target) <= HASH_NBYTES:
        copy(target, pieces[0], stream=stream)
        return xxhash.xxh3_64_intdigest(pieces[0])
    state, start = xxhash.xxh3_64(), 0
    for piece in pieces:
        for first in range(0, len(piece), HASH_NBYTES):
            part = piece[first : first + HASH_NBYTES]
            copy(target[start : start + len(part)], part, stream=stream)
            state.update(part)
            start += len(part)
    return state.intdigest()


def checksum_of(pieces: Sequence[memoryview]) -> int:
    """xxh3-64 of the bytes of several views, in order."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def checksums_of(chunks: Sequence[Sequence[memoryview]]) -> bytes:
    """The same of each of many, u64 each, as they travel."""
    return b"".join([CHECKSUM.pack(checksum_of(pieces)) for pieces in chunks])


def byte_views(scattered: Scattered, name: str, *, writable: bool) -> list[memoryview]:
    """Byte views of one buffer or several.

    Raises:
        UsageError: Not a buffer, not contiguous, or read-only where we write. Calls it by `name`.
    """
    if native.wrap is not None and (wrapped := native.wrap((scattered,), writable)) is not None:
        views: list[memoryview] = wrapped[0][0]
        return views
    parts = scattered if isinstance(scattered, list | tuple) else [scattered]
    views = []
    for part in parts:
        try:
            view = memoryview(part)  # type: ignore[arg-type]  # finding that out is what the `except` is for
        except (TypeError, ValueError):
            hint = "; for a CPU tensor pass tensor.view(torch.uint8).numpy()" if hasattr(part, "numpy") else ""
            raise UsageError(f"field '{name}': {type(part).__name__} is not a buffer{hint}") from None
        if not view.c_contiguous:
            raise UsageError(f"field '{name}': the buffer is not contiguous; pass its pieces as a list")
        if writable and view.readonly:
            raise UsageError(f"field '{name}': the buffer is read-only")
        views.append(view.cast("B") if view.nbytes else memoryview(bytearray()))
    return views


def all_byte_views(many: Sequence[Scattered], name: str, *, writable: bool) -> tuple[list[list[memoryview]], list[int]]:
    """The same of each of many, which are called by `name` and their place; and how many bytes each has.

    Raises:
        UsageError: As `byte_views`.
    """
    if native.wrap is not None:
        wrapped: tuple[list[list[memoryview]], list[int]] | None = native.wrap(many, writable)
        if wrapped is not None:
            return wrapped
    views = [byte_views(each, f"{name}[{place}]", writable=writable) for place, each in enumerate(many)]
    return views, [sum(map(len, pieces)) for pieces in views]


def default_copy_threads() -> int:
    """Half of the cores that this process may use, at most 4: the engine needs the rest."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


class CopyThreads:
    """Threads that share the copies of one large batch with the caller. Thread-safe.

    The caller does what nobody else does: a thread that wakes late, is busy with another batch, or has to give its core
    away, copies less. When a call returns, also by an exception, nobody is copying any more.

    Attributes:
        count: Threads that copy at the same time, the caller included.
    """

    def __init__(self, count: int) -> None:
        """Threads are started at the first use."""
        self.count = count
        self._jobs: SimpleQueue[object] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._cores: set[int] = set()  # where the threads may run
        self._left_out = -1

    def called(self, chunks: int, nbytes: int) -> Callable[[object], None] | None:
        """What `native.read` or `native.fill` of so many chunks and bytes calls helpers with; None: nobody is worth it.

        Nobody helps without the compiled loops either, nor in a child by fork, which has no such threads.
        """
        shares = min(self.count, chunks, nbytes // _SHARE_NBYTES)
        if shares <= 1 or native.share is None or os.getpid() != self._process:
            return None
        try:
            self._start(shares - 1)
        except RuntimeError:  # this process may have no more threads
            if not self._threads:
                return None
        self._make_way()
        return partial(self._call, shares - 1)

    def fill(self, slots: list[memoryview], values: list[Sequence[memoryview]]) -> npt.NDArray[np.uint64]:
        """Copy chunks, each from several views, into slots of the same length. Returns their checksums."""
        nbytes = sum(map(len, slots))
        stream = nbytes >= STREAM_NBYTES
        checksums = np.empty(len(slots), np.uint64)
        if native.fill is not None and slots and len(slots[0]) > TINY_NBYTES:
            native.fill(slots, values, checksums, stream, self.called(len(slots), nbytes))
        else:
            for place, (slot, value) in enumerate(zip(slots, values, strict=True)):
                checksums[place] = store(slot, value, stream=stream)
        return checksums

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            self._threads = []

    def _start(self, wanted: int) -> None:
        while len(self._threads) < wanted:
            with self._lock:
                if len(self._threads) < wanted:
                    thread = threading.Thread(target=self._work, name="raykv-copy", daemon=True)
                    thread.start()
                    self._threads.append(thread)
                    self._cores, self._left_out = os.sched_getaffinity(thread.native_id or 0), -1

    def _make_way(self) -> None:
        """Keep the threads off the caller's core, where it is about to copy.

        A thread that wakes there, because the other cores are busy for a moment, stays: for 4 to 8 ms, until the
        kernel looks again how work is spread. One in two batches of 128 MiB took 14 to 18 ms so, instead of 10.
        """
        core = _libc.sched_getcpu()
        if core == self._left_out or len(self._cores) < 2:
            return
        with self._lock:
            left, self._left_out = self._left_out, core
            for thread in self._threads:
                try:
                    if not thread.is_alive() or thread.native_id is None:
                        continue  # also in a child by fork, where the number is that of the parent's thread
                    found = os.sched_getaffinity(thread.native_id)
                    if found not in (self._cores, self._cores - {left}):
                        self._cores = found  # somebody has moved us
                    os.sched_setaffinity(thread.native_id, self._cores - {core})
                except OSError:
                    pass  # it has just ended, or none of these cores are ours any more

    def _call(self, others: int, job: object) -> None:
        for _ in range(others):
            self._jobs.put(job)

    def _work(self) -> None:
        assert native.share is not None
        while (job := self._jobs.get()) is not None:
            native.share(job)
            del job
