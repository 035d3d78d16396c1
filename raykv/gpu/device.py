"""The few calls of CUDA that the rest of the package needs. The only module that imports cupy, and only when used.

`Device` is the contract. `CudaDevice` implements it on a GPU. The tests implement it on a CPU, with the same kernels.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from raykv.errors import ConfigError, LostError
from raykv.gpu import driver
from raykv.gpu.driver import Pieces

KERNELS: Final = Path(__file__).with_name("kernels.cu")
THREADS: Final = 512
"""Threads of a kernel's block."""
STAGING_BLOCKS: Final = 32
"""Blocks of a kernel between GPU memories: a quarter of a Hopper GPU moves bytes many times faster than a link."""
LINK_BLOCKS: Final = 8
"""Blocks of a kernel that moves bytes over the link to the host. They wait for the link most of the time, so few of
them are enough, and more would only take multiprocessors from the engine."""

REMEDY: Final = "docker run --gpus all, and pip install cupy-cuda12x (cupy-cuda13x for CUDA 13)"
"""How to get what `missing` names."""

Stream = int
"""A handle of CUDA. Streams are made once and live as long as the process."""
Event = Any
"""An event of cupy or of torch."""


Rows = tuple[int, int]
"""Rows in memory: (address of the first row, bytes from one row to the next)."""


class Memory(Protocol):
    """GPU memory. It is freed when nothing refers to it.

    Attributes:
        address, nbytes: The memory.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Device(Protocol):
    """One GPU. Every method but `use` needs that the thread has called `use`.

    A failed call raises LostError. After most of CUDA's errors the process can use its GPU no more.
    """

    has_batched_copies: bool

    def use(self) -> None:
        """Make this GPU the calling thread's current GPU."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that kernels can address it and copies run at the link's speed. Slow for many GB."""

    def unregister(self, address: int) -> None: ...

    def allocate(self, nbytes: int) -> Memory: ...

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned host memory of this process."""

    def stream(self) -> Stream: ...

    def record(self, stream: Stream) -> Event:
        """Return an event that occurs when all that is queued on a stream has ended."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make what is queued on a stream from now on wait for an event. The host does not wait."""

    def synchronize(self, event: Event) -> None:
        """Make the calling thread sleep until an event has occurred."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None: ...

    def copy_rows(self, target: Rows, source: Rows, shape: tuple[int, int], stream: Stream) -> None:
        """Copy rows at equal distances. `shape`: number of rows, bytes of a row."""

    def copy_many(self, pieces: Pieces, stream: Stream) -> None:
        """Queue many copies with one call of the driver where it has one, else with a call each."""

    def launch(self, kernel: str, arguments: Sequence[Any], blocks: int, stream: Stream) -> None:
        """Queue a kernel of kernels.cu. Its arguments are NumPy scalars."""


class CudaDevice:
    """A GPU, through cupy and the driver. It shares the context of torch in the same process."""

    def __init__(self, number: int = 0) -> None:
        """Compile the kernels for GPU `number`, unless cupy has them in its cache.

        Raises:
            ConfigError: cupy, the driver or the GPU is missing: `missing` says which.
        """
        if reason := missing():
            raise ConfigError(f"GPU copies: {reason}")
        self._cupy: Any = import_module("cupy")
        self._runtime: Any = self._cupy.cuda.runtime
        self._driver = driver.library()
        self._device = self._cupy.cuda.Device(number)
        self._streams: dict[Stream, Any] = {}
        self.has_batched_copies = driver.has_batched_copies(self._driver)
        try:
            self.use()
            module = self._cupy.RawModule(code=KERNELS.read_text())
            self._kernels = {name: module.get_function(name) for name in ("gather", "scatter")}
        except Exception as error:  # cupy has many kinds of errors
            raise ConfigError(f"GPU copies: cupy cannot compile or load the kernels: {error}") from error

    def use(self) -> None:
        self._run("cudaSetDevice", self._device.use)

    def register(self, address: int, nbytes: int) -> None:
        portable_and_mapped = 3  # for all contexts of the process, and with an address for kernels
        self._run("cudaHostRegister", self._runtime.hostRegister, address, nbytes, portable_and_mapped)

    def unregister(self, address: int) -> None:
        self._run("cudaHostUnregister", self._runtime.hostUnregister, address)

    def allocate(self, nbytes: int) -> "_CudaMemory":
        # Not from cupy's pool: memory that is given back must really become free.
        return _CudaMemory(self._run("cudaMalloc", self._cupy.cuda.Memory, nbytes), nbytes)

    def host_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = self._run("cudaHostAlloc", self._cupy.cuda.alloc_pinned_memory, nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def stream(self) -> Stream:
        made = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[made.ptr] = made
        return int(made.ptr)

    def record(self, stream: Stream) -> Event:
        event = self._cupy.cuda.Event(block=True, disable_timing=True)
        event.record(self._streams[stream])
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._run("cudaStreamWaitEvent", self._runtime.streamWaitEvent, stream, _handle(event))

    def synchronize(self, event: Event) -> None:
        self._run("cudaEventSynchronize", self._runtime.eventSynchronize, _handle(event))

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        kind = self._runtime.memcpyDefault
        self._run("cudaMemcpyAsync", self._runtime.memcpyAsync, target, source, nbytes, kind, stream)

    def copy_rows(self, target: Rows, source: Rows, shape: tuple[int, int], stream: Stream) -> None:
        rows, width = shape
        call, kind = self._runtime.memcpy2DAsync, self._runtime.memcpyDefault
        self._run("cudaMemcpy2DAsync", call, *target, *source, width, rows, kind, stream)

    def copy_many(self, pieces: Pieces, stream: Stream) -> None:
        if self.has_batched_copies:
            driver.copy_batch(self._driver, pieces, stream)
        else:
            for target, source, nbytes in zip(*(column.tolist() for column in pieces), strict=True):
                self.copy(target, source, nbytes, stream)

    def launch(self, kernel: str, arguments: Sequence[Any], blocks: int, stream: Stream) -> None:
        with self._streams[stream]:
            self._run(kernel, self._kernels[kernel], (blocks,), (THREADS,), tuple(arguments))

    def _run(self, name: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (RuntimeError, MemoryError) as error:  # the bases of cupy's errors of CUDA
            raise LostError(f"{name}: {error}") from error


class _CudaMemory:
    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory, self.address, self.nbytes = memory, int(memory.ptr), nbytes


def _handle(event: Event) -> int:
    """Return CUDA's handle of an event of cupy (`ptr`) or of torch (`cuda_event`)."""
    return int(event.ptr if hasattr(event, "ptr") else event.cuda_event)


def has_gpu(root: Path = Path("/")) -> bool:
    return any((root / "dev").glob("nvidia*"))


def missing(root: Path = Path("/")) -> str:
    """Return what this host lacks for GPU copies. Empty: nothing. Does not initialize CUDA, which would take memory."""
    if not has_gpu(root):
        return "no NVIDIA GPU is visible in /dev"
    if driver.library() is None:
        return f"there is a GPU, but {driver.LIBRARY} is missing"
    if find_spec("cupy") is None:
        return "there is a GPU, but cupy is missing"
    return ""
