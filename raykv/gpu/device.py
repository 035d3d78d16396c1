"""The calls of CUDA that raykv makes, as an interface, and their implementation with cupy.

Addresses and streams are plain integers, as in CUDA. So a stream of torch can be passed by its number:
`torch.cuda.Stream.cuda_stream`. Tests implement the same interface without a GPU.
"""

import contextlib
import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raykv.errors import UsageError

KERNELS: Final = Path(__file__).with_name("kernels.cu")
WARPS_PER_BLOCK: Final = 16
WARP_THREADS: Final = 32
_PORTABLE_AND_MAPPED: Final = 1 | 2
"""Flags of cudaHostRegister and cudaHostAlloc: pinned for all contexts of the process, and readable by kernels."""

_LARGE_NBYTES: Final = 1 << 20
"""From this length on, GPU memory is allocated and freed by CUDA itself instead of cupy's pool."""


class Memory(NamedTuple):
    """Memory that is freed when `owner` is gone. Queued work that uses it must have ended before.

    Attributes:
        address: Address of the first byte, for the GPU and for copies.
        nbytes: Length.
        owner: What holds the memory.
    """

    address: int
    nbytes: int
    owner: object


class Pitched(NamedTuple):
    """The address of the first row, and the distance between two rows in bytes."""

    address: int
    pitch: int


class Device(Protocol):
    """One GPU. Thread-safe.

    Methods with a `stream` queue work and return at once. `synchronize` waits. An event is an opaque object.
    """

    def register(self, address: int, nbytes: int) -> int:
        """Pin a part of this process's memory. Returns the address of the part for the GPU.

        Raises:
            OSError: CUDA refuses, for example because no more memory may be locked.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`. No queued work may use the memory. Never raises."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Allocate GPU memory."""
        ...

    def allocate_pinned(self, nbytes: int) -> Memory:
        """Allocate pinned host memory. May wait for the GPU."""
        ...

    def upload(self, table: npt.NDArray[Any], stream: int) -> Memory:
        """Copy a small table into new GPU memory."""
        ...

    def new_stream(self) -> int: ...

    def record(self, stream: int, *, timed: bool = False) -> Any:
        """Return an event that happens when all work that is queued on `stream` now has ended."""
        ...

    def wait(self, stream: int, event: Any) -> None:
        """Let work that is queued on `stream` later begin after `event`. The calling thread does not wait."""
        ...

    def is_done(self, event: Any) -> bool: ...

    def synchronize(self, event: Any) -> None:
        """Let the calling thread wait for `event`, without spinning.

        Raises:
            OSError: Queued work has failed. The GPU is of no more use to this process.
        """
        ...

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two timed events that have happened."""
        ...

    def copy_rows(self, to: Pitched, source: Pitched, nbytes: int, rows: int, stream: int) -> None:
        """Copy `rows` rows of `nbytes` bytes with a copy engine. Both sides are GPU memory or pinned host memory."""
        ...

    def launch(self, kernel: str, arguments: Sequence[np.generic], blocks: int, stream: int) -> None:
        """Start a kernel in `blocks` blocks of WARPS_PER_BLOCK warps, on a stream that `new_stream` made."""
        ...


def missing(root: Path = Path("/")) -> str:
    """Return what this host lacks for `open_device`. Empty: nothing, and cupy sees a GPU."""
    if not gpus_of(root):
        return "no NVIDIA GPU"
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001  cupy raises many kinds if libraries of CUDA are missing or too old
        return f"cupy finds no usable CUDA: {error}"
    return "" if count else "cupy sees no GPU"


def gpus_of(root: Path) -> list[str]:
    """Return the device files of this host's NVIDIA GPUs."""
    return sorted(each.name for each in (root / "dev").glob("nvidia[0-9]*"))


def open_device(number: int = 0) -> Device:
    """Open a GPU and compile the kernels. This takes a second or more, if cupy has not compiled them before.

    Raises:
        UsageError: cupy, CUDA or this GPU is missing.
    """
    if lack := missing():
        raise UsageError(f"no GPU for raykv: {lack}; raykv works without one, and 'raykv doctor' says what to install")
    import cupy

    if not 0 <= number < cupy.cuda.runtime.getDeviceCount():
        raise UsageError(f"there is no GPU {number}")
    try:
        return CupyDevice(cupy, number)
    except Exception as error:  # cupy raises many kinds if a library of CUDA is missing or the compiler fails
        raise UsageError(f"GPU {number} is of no use to raykv: {error}") from error


class CupyDevice:
    """A GPU, by cupy. See `Device`."""

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy, self._runtime, self._number = cupy, cupy.cuda.runtime, number
        self._streams: dict[int, Any] = {}
        self._runtime.setDevice(number)
        module = cupy.RawModule(code=KERNELS.read_text())
        self._kernels = {name: module.get_function(name) for name in ("gather", "scatter")}

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Use this GPU on the calling thread. Turns errors of CUDA into OSError."""
        try:
            self._runtime.setDevice(self._number)
            yield
        except (self._runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
            raise OSError(f"CUDA: {error}") from error

    def register(self, address: int, nbytes: int) -> int:
        with self._errors():
            self._runtime.hostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
            return int(self._runtime.pointerGetAttributes(address).devicePointer)

    def unregister(self, address: int) -> None:
        with contextlib.suppress(OSError), self._errors():
            self._runtime.hostUnregister(address)

    def allocate(self, nbytes: int) -> Memory:
        with self._errors():
            # The pool never gives memory back to the engine, so it is only for tables.
            memory = self._cupy.cuda.Memory(nbytes) if nbytes >= _LARGE_NBYTES else self._cupy.cuda.alloc(nbytes)
        return Memory(int(memory.ptr), nbytes, memory)

    def allocate_pinned(self, nbytes: int) -> Memory:
        with self._errors():
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return Memory(int(memory.ptr), nbytes, memory)

    def upload(self, table: npt.NDArray[Any], stream: int) -> Memory:
        here, there = self.allocate_pinned(table.nbytes), self.allocate(table.nbytes)
        ctypes.memmove(here.address, np.ascontiguousarray(table).ctypes.data, table.nbytes)
        self.copy_rows(Pitched(there.address, 0), Pitched(here.address, 0), table.nbytes, 1, stream)
        return Memory(there.address, table.nbytes, (here, there))

    def new_stream(self) -> int:
        with self._errors():
            stream = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[int(stream.ptr)] = stream
        return int(stream.ptr)

    def record(self, stream: int, *, timed: bool = False) -> Any:
        with self._errors():
            event = self._cupy.cuda.Event(block=True, disable_timing=not timed)
            self._runtime.eventRecord(event.ptr, stream)
        return event

    def wait(self, stream: int, event: Any) -> None:
        with self._errors():
            self._runtime.streamWaitEvent(stream, event.ptr)

    def is_done(self, event: Any) -> bool:
        with self._errors():
            return bool(event.done)

    def synchronize(self, event: Any) -> None:
        with self._errors():
            event.synchronize()

    def elapsed_s(self, begin: Any, end: Any) -> float:
        with self._errors():
            return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1000.0

    def copy_rows(self, to: Pitched, source: Pitched, nbytes: int, rows: int, stream: int) -> None:
        runtime = self._runtime
        with self._errors():
            if rows == 1:
                runtime.memcpyAsync(to.address, source.address, nbytes, runtime.memcpyDefault, stream)
            else:
                runtime.memcpy2DAsync(*to, *source, nbytes, rows, runtime.memcpyDefault, stream)

    def launch(self, kernel: str, arguments: Sequence[np.generic], blocks: int, stream: int) -> None:
        with self._errors(), self._streams[stream]:
            self._kernels[kernel]((blocks,), (WARPS_PER_BLOCK * WARP_THREADS,), tuple(arguments))
