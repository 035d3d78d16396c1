"""The part of cupy that raykv uses, in host memory: each call has ended when it returns.

Signatures and order of arguments are those of cupy 14.2.
"""

import ctypes
import types
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gpu import compile_kernels


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class Block:
    """Host memory in the place of `cupy.cuda.Memory`, `MemoryPointer` and `PinnedMemoryPointer`."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.full(nbytes + 512, 0xA5, np.uint8)
        self.ptr = -(-self._array.ctypes.data // 512) * 512


class Runtime:
    """`cupy.cuda.runtime`.

    Attributes:
        registered: Length and flags of each registered part, by address.
        devices: The devices that were set, in order.
    """

    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4  # noqa: N815  cupy's name

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self.devices: list[int] = []
        self.copies = 0

    def getDeviceCount(self) -> int:  # noqa: N802
        return 2

    def setDevice(self, number: int) -> None:  # noqa: N802
        self.devices.append(number)

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        if ptr in self.registered:
            raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        self.registered[ptr] = size, flags

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        if self.registered.pop(ptr, None) is None:
            raise CUDARuntimeError("cudaErrorHostMemoryNotRegistered")

    def pointerGetAttributes(self, ptr: int) -> Any:  # noqa: N802
        return types.SimpleNamespace(devicePointer=ptr, hostPointer=ptr, device=0, type=1)

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        assert event
        assert stream

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        assert event
        assert stream

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self.memcpy2DAsync(dst, size, src, size, size, 1, kind, stream)

    def memcpy2DAsync(  # noqa: N802
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        assert kind == self.memcpyDefault
        assert stream
        if min(dpitch, spitch) < width:
            raise CUDARuntimeError("cudaErrorInvalidPitchValue")
        self.copies += 1
        for row in range(height):
            ctypes.memmove(dst + row * dpitch, src + row * spitch, width)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.blocks, self.is_timed, self.ptr, self.done = block, not disable_timing, id(self), True

    def synchronize(self) -> None:
        assert self.blocks, "the waiting thread would spin"


def fake_cupy(directory: Path) -> Any:
    """Make the module. Skips the test without g++."""
    run, runtime, current = compile_kernels(directory), Runtime(), []

    class Stream:
        def __init__(self, *, non_blocking: bool = False) -> None:
            assert non_blocking, "the stream would wait for the engine's default stream"
            self.ptr = id(self)

        def __enter__(self) -> None:
            current.append(self)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class RawModule:
        def __init__(self, code: str) -> None:
            assert 'extern "C" __global__ void gather' in code

        def get_function(self, name: str) -> Any:
            def call(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
                assert current, "the kernel would run on the default stream"
                sizes = [np.dtype(type(each)).itemsize for each in args]
                assert sizes == [8, 4, 8, 4, 4, 8, 8, 8]  # as in the kernel's signature
                run(name == "gather", *grid, *block, *map(int, args))

            return call

    def elapsed_ms(begin: Event, end: Event) -> float:
        assert begin.is_timed
        assert end.is_timed
        return 250.0

    driver = types.SimpleNamespace(CUDADriverError=CUDADriverError)
    cuda = types.SimpleNamespace(
        runtime=runtime, driver=driver, Event=Event, Stream=Stream, Memory=Block, alloc=Block,
        alloc_pinned_memory=Block, get_elapsed_time=elapsed_ms,
    )  # fmt: skip
    return types.SimpleNamespace(cuda=cuda, RawModule=RawModule)
