"""A GPU without a GPU: runs the kernels of raykv/gpu/kernels.cu on the CPU, and streams in a random legal order.

What is queued runs only when somebody waits for an event. The next operation comes from a random stream whose first
operation may run. So a copy that misses an event, or reuses memory too early, gives wrong bytes for some seeds.
"""

import ctypes
import functools
import random
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from raykv.errors import LostError
from raykv.gpu.device import KERNELS
from raykv.gpu.tiles import PLACE, TILE

SHIM = Path(__file__).with_name("cuda_on_cpu.cpp")
WARP = 32


@functools.cache
def kernels() -> Any:
    """Compile the kernels for the CPU. Skips the test if there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    place = tempfile.mkdtemp(prefix="raykv-kernels-")
    try:
        library = f"{place}/kernels.so"
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # a GPU refuses words at odd addresses
        subprocess.run([compiler, *flags, f'-DKERNELS="{KERNELS}"', str(SHIM), "-o", library], check=True)
        return ctypes.CDLL(library)
    finally:
        shutil.rmtree(place)


class CpuEvent:
    def __init__(self) -> None:
        self.done = False


class CpuMemory:
    """Memory of the GPU, filled with garbage."""

    def __init__(self, nbytes: int, rng: random.Random) -> None:
        self.array: npt.NDArray[np.uint8] = np.frombuffer(bytearray(rng.randbytes(nbytes)), np.uint8)
        self.address, self.nbytes = self.array.ctypes.data, nbytes


class CpuDevice:
    """Implements `raykv.gpu.device.Device`.

    Attributes:
        go: `register` waits until this event is set. It is set at first.
        refusal: If not empty, `register` fails with this text.
        registered: Registered ranges: address -> length.
        launches: Names of the kernels that ran.
        unpinned_nbytes: Bytes that copies moved to or from memory that CUDA does not know.
    """

    has_batched_copies = True

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._lock, self._kernels = rng, threading.RLock(), kernels()
        self._queues: list[deque[tuple[CpuEvent | None, Callable[[], None]]]] = []
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._adopted: dict[int, int] = {}
        self.go = threading.Event()
        self.go.set()
        self.refusal = ""
        self.registered: dict[int, int] = {}
        self.launches: list[str] = []
        self.unpinned_nbytes = 0
        self.used_by: set[int] = set()

    def adopt(self, address: int, nbytes: int) -> None:
        """Regard some memory of the caller as memory of this GPU."""
        self._adopted[address] = nbytes

    def use(self) -> None:
        self.used_by.add(threading.get_ident())

    def register(self, address: int, nbytes: int) -> None:
        assert self.go.wait(20.0)
        if self.refusal:
            raise LostError(self.refusal)
        with self._lock:
            for start, length in self.registered.items():
                assert address + nbytes <= start or start + length <= address, "CUDA refuses to register memory twice"
            self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.registered[address]

    def allocate(self, nbytes: int) -> CpuMemory:
        memory = CpuMemory(nbytes, self._rng)
        self._known[memory.address] = memory.array
        return memory

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self.allocate(nbytes).array

    def stream(self) -> int:
        self._queues.append(deque())
        return len(self._queues) - 1

    def record(self, stream: int) -> CpuEvent:
        event = CpuEvent()
        self._queue(stream, lambda: setattr(event, "done", True))
        return event

    def wait(self, stream: int, event: CpuEvent) -> None:
        self._queue(stream, lambda: None, event)

    def synchronize(self, event: CpuEvent) -> None:
        with self._lock:
            while not event.done:
                ready = [queue for queue in self._queues if queue and (queue[0][0] is None or queue[0][0].done)]
                assert ready, "the event never occurs"
                self._rng.choice(ready).popleft()[1]()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy_rows((target, nbytes), (source, nbytes), (1, nbytes), stream)

    def copy_rows(self, target: tuple[int, int], source: tuple[int, int], shape: tuple[int, int], stream: int) -> None:
        rows, width = shape
        assert width <= min(target[1], source[1])

        def run() -> None:
            for row in range(rows):
                self._move(target[0] + row * target[1], source[0] + row * source[1], width)

        self._queue(stream, run)

    def copy_many(self, pieces: Sequence[npt.NDArray[np.uint64]], stream: int) -> None:
        assert len(pieces[0])
        columns = [column.tolist() for column in pieces]
        order = list(zip(*columns, strict=True))
        self._rng.shuffle(order)
        self._queue(stream, lambda: [self._move(*piece) for piece in order] and None)

    def launch(self, kernel: str, arguments: Sequence[Any], blocks: int, stream: int) -> None:
        types = [argument.dtype.str for argument in arguments]
        assert types == ["<u8", "<u4", "<u8", "<u4", "<u4"], types
        tiles, tile_count, places, place_count, base = map(int, arguments)

        def run() -> None:
            self.launches.append(kernel)
            self._check(tiles, tile_count, places, place_count, base)
            pointers = ctypes.c_void_p(tiles), tile_count, ctypes.c_void_p(places), place_count, base
            self._kernels.launch(int(kernel == "gather"), blocks, 2 * WARP, *pointers)

        self._queue(stream, run)

    def _queue(self, stream: int, run: Callable[[], None], event: CpuEvent | None = None) -> None:
        assert threading.get_ident() in self.used_by, "this thread has not chosen its GPU"
        with self._lock:
            self._queues[stream].append((event, run))

    def _move(self, target: int, source: int, nbytes: int) -> None:
        for address in (target, source):
            for start, length in self.registered.items():
                apart = address + nbytes <= start or start + length <= address
                assert apart or (start <= address and address + nbytes <= start + length), (
                    "CUDA refuses a copy that lies only partly in a registration"
                )
            self.unpinned_nbytes += 0 if self._knows(address, nbytes) else nbytes
        ctypes.memmove(target, source, nbytes)

    def _check(self, tiles: int, tile_count: int, places: int, place_count: int, base: int) -> None:
        """Check that a kernel uses only memory that a GPU can address."""
        listed = _array(tiles, tile_count, TILE), _array(places, place_count, PLACE)
        for place in listed[1].tolist():
            for address, stride, offset, nbytes in listed[0].tolist():
                assert self._knows(address + stride * place[0], nbytes), "not a page"
                assert self._knows(place[1] + offset - base, nbytes), "a kernel uses memory that is not pinned"

    def _knows(self, address: int, nbytes: int) -> bool:
        ranges = [
            *self.registered.items(),
            *self._adopted.items(),
            *((start, array.nbytes) for start, array in self._known.items()),
        ]
        return any(start <= address and address + nbytes <= start + length for start, length in ranges)


def _array(address: int, count: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)
