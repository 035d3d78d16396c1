"""Copies blocks out of an engine's KV cache and back into it. Needs no engine.

An engine gives a worker one tensor `[blocks, ...]` per layer. The order of the axes in memory varies: vLLM has LBHNC,
BLNHC and other orders. A CPU kernel may also pack a block for its instruction set. So raykv treats a chunk as opaque
bytes. A block is a list of runs (contiguous byte ranges), which are computed from the strides alone. The namespace
contains a description of the layout, so engines with different layouts never share a chunk.
"""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from raykv.errors import ConfigError
from raykv.types import DirectValues, Scattered

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Values: TypeAlias = Sequence[Scattered] | DirectValues
"""The values of a put."""

MAX_RUNS_PER_LAYER: Final = 64
"""A layout is refused if it cuts a block of one layer into more runs than this."""
MAX_STAGED_CHUNKS: Final = 32
MAX_STAGED_NBYTES: Final = 256 << 20
"""Limits of one batch of chunks in pinned host memory, and MAX_STAGED_NBYTES also of copied chunks. A larger chunk is a
batch of its own."""


def runs_of(name: str, cache: "torch.Tensor", num_blocks: int) -> "list[torch.Tensor]":
    """Find the runs (contiguous byte ranges) of one layer's blocks.

    Args:
        cache: Shape [num_blocks * k, ...]. The kernel may divide each block into k smaller ones.

    Returns:
        Views of type uint8 and shape [num_blocks, bytes of the run], one per run, sorted by address.

    Raises:
        ConfigError: The layout is not supported.
    """
    import torch

    if cache.dim() < 2 or not num_blocks or cache.shape[0] % num_blocks:
        raise _unsupported(name, f"shape {list(cache.shape)} does not begin with {num_blocks} blocks")
    item = cache.element_size()
    split = cache.shape[0] // num_blocks
    axes = [(split, cache.stride(0)), *zip(cache.shape[1:], cache.stride()[1:], strict=True)]
    dense = item
    outer: list[range] = []
    for size, stride in sorted(((size, stride * item) for size, stride in axes if size > 1), key=lambda axis: axis[1]):
        if stride == dense and not outer:
            dense *= size
        elif stride >= dense:
            outer.append(range(0, size * stride, stride))
        else:
            raise _unsupported(name, f"strides {cache.stride()} overlap")
    starts = sorted(cache.storage_offset() * item + sum(steps) for steps in itertools.product(*outer))
    if len(starts) > MAX_RUNS_PER_LAYER:
        raise _unsupported(name, f"a block lies in {len(starts)} pieces")
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return [memory.as_strided((num_blocks, dense), (cache.stride(0) * item * split, 1), start) for start in starts]


def _unsupported(name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"KV cache of layer {name}: {problem}; this layout is not supported, set VLLM_KV_CACHE_LAYOUT to another one"
    )


def merged(runs: "Sequence[torch.Tensor]") -> "list[torch.Tensor]":
    """Join runs that are adjacent in memory in every block."""
    joined: list[torch.Tensor] = []
    for run in runs:
        last = joined[-1] if joined else run
        adjacent = last.data_ptr() + last.shape[1] == run.data_ptr() and last.stride() == run.stride()
        if adjacent and last.untyped_storage().data_ptr() == run.untyped_storage().data_ptr():
            joined[-1] = last.as_strided((len(run), last.shape[1] + run.shape[1]), run.stride())
        else:
            joined.append(run)
    return joined


def stacked(runs: "Sequence[torch.Tensor]") -> "list[torch.Tensor]":
    """Join successive runs that have the same length and lie at equal distances in memory.

    Returns:
        Views of shape [num_blocks, number of joined runs, bytes of a run].
    """
    views: list[torch.Tensor] = []
    for run in runs:
        last = views[-1] if views else run.unsqueeze(1)
        step = run.data_ptr() - last.data_ptr() - (last.shape[1] - 1) * last.stride(1)
        alike = run.shape[1] == last.shape[2] and run.stride(0) == last.stride(0)
        same = run.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        if alike and same and step > 0 and (last.shape[1] == 1 or step == last.stride(1)):
            views[-1] = last.as_strided((len(run), last.shape[1] + 1, run.shape[1]), (run.stride(0), step, 1))
        else:
            views.append(run.unsqueeze(1))
    return views


def part_of(name: str, cache: "torch.Tensor", part: tuple[int, int]) -> "torch.Tensor":
    """Divide a layer's KV heads into equal parts and return one part.

    Args:
        cache: Shape [blocks, heads, tokens, content].
        part: (Index of the part, number of parts).

    Raises:
        ConfigError: The heads cannot be divided into this number of parts.
    """
    number, parts = part
    if parts == 1:
        return cache
    if cache.dim() != 4 or cache.shape[1] % parts:
        raise ConfigError(
            f"KV cache of layer {name}: shape {list(cache.shape)} has no heads to divide into {parts} parts; leave the "
            "field 'store_tp_size' out"
        )
    heads = cache.shape[1] // parts
    return cache.narrow(1, number * heads, heads)


def describe(cache: "torch.Tensor") -> str:
    """Describe one layer's blocks: shape, order of the axes in memory, element type.

    If `cache` is a view of a part of a tensor, the description is that of a tensor with only this part.
    """
    order = sorted(range(1, cache.dim()), key=lambda axis: (-cache.stride(axis), axis))
    strides = {axis: math.prod(cache.shape[inner] for inner in order[place + 1 :]) for place, axis in enumerate(order)}
    order.sort(key=lambda axis: (-strides[axis], axis))
    return f"{list(cache.shape[1:])}/{''.join(map(str, order))}/{str(cache.dtype).removeprefix('torch.')}"


class Layout:
    """The KV cache of one worker in host memory, as chunks of `chunk_nbytes`. Blocks are read and written in place.

    Attributes:
        description: Text that describes the layout. It becomes a part of the namespace.
        batch_chunks: One call of `read` or `load` takes at most this many chunks.
        staged_chunks: One call of `copied` takes at most this many chunks.
    """

    batch_chunks = sys.maxsize

    def __init__(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int, chunk_blocks: int) -> None:
        """Compute the layout of `caches`, which maps layer names to tensors. Layers that share a tensor count once.

        Raises:
            ConfigError: The layout of a layer is not supported.
        """
        layers = {cache.data_ptr(): (name, cache) for name, cache in caches.items()}.values()
        self._runs = merged([run for name, cache in layers for run in runs_of(name, cache, num_blocks)])
        self._block_nbytes = sum(run.shape[1] for run in self._runs)
        self.chunk_nbytes = self._block_nbytes * chunk_blocks
        self.staged_chunks = max(1, MAX_STAGED_NBYTES // self.chunk_nbytes)
        kinds = itertools.groupby(describe(cache) for _, cache in layers)
        self.description = ";".join(f"{len(list(group))}x{kind}" for kind, group in kinds)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The runs, in the order of a block's bytes: (address in block 0, bytes between blocks, length)."""
        return [(run.data_ptr(), run.stride(0), run.shape[1]) for run in self._runs]

    @cached_property
    def _arrays(self) -> "list[npt.NDArray[np.uint8]]":
        """The runs as NumPy arrays, which are much faster to index than tensors."""
        return [run.numpy() for run in self._runs]

    def fence(self) -> Any:
        """Mark the end of the kernels that are queued on the current stream. `read` waits for this marker."""
        return None

    def read(self, chunks: Sequence[Sequence[int]], fence: Any = None) -> list[list[memoryview]]:
        """Return the bytes of chunks as views of host memory, which are valid until the next call of `read`.

        Args:
            chunks: The blocks of each chunk.
            fence: A marker that `fence` returned after the kernels that compute the chunks were queued. None: no wait.
        """
        return [[array[block].data for block in blocks for array in self._arrays] for blocks in chunks]

    def values(self, puts: Sequence[Sequence[Sequence[int]]], fence: Any = None) -> list[Values]:
        """Return the values of several puts. `puts`: the blocks of each chunk of each put. Otherwise as `read`."""
        views = iter(self.read([blocks for chunks in puts for blocks in chunks], fence))
        return [list(itertools.islice(views, len(chunks))) for chunks in puts]

    def copied(self, puts: Sequence[Sequence[Sequence[int]]], fence: Any = None) -> list[Sequence[Scattered]]:
        """Return copies of the values of several puts, so that the blocks may change. Otherwise as `values`."""
        return [list(map(self._copy, chunks)) for chunks in puts]

    def _copy(self, blocks: Sequence[int]) -> memoryview:
        """Copy one chunk. Other threads of Python run meanwhile."""
        import numpy as np

        buffer = np.empty(self.chunk_nbytes, np.uint8)
        np.concatenate([array[block] for block in blocks for array in self._arrays], out=buffer)
        return buffer.data

    def targets(self, blocks: Sequence[int | None]) -> list[memoryview]:
        """Return buffers that receive one chunk. None in `blocks` stands for a block that must not change."""
        pieces: list[memoryview] = []
        for block in blocks:
            # The checksum covers the whole chunk, so a block that must not change is received into a scratch buffer.
            pieces += [memoryview(bytearray(self._block_nbytes))] if block is None else self.read([[block]])[0]
        return pieces

    def load(self, chunks: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        """Copy received chunks from their `targets` into the KV cache. The copy has ended when this method returns.

        In host memory the targets are the blocks themselves, so there is nothing to copy.
        """


class DeviceLayout(Layout):
    """The KV cache of one worker in device memory. Each chunk passes through pinned host memory in one transfer.

    `read` copies on a separate CUDA stream, after the kernels that `fence` marked. `load` copies on the current stream
    of the calling thread. Both return when the copy has ended.
    """

    def __init__(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int, chunk_blocks: int) -> None:
        import torch

        super().__init__(caches, num_blocks, chunk_blocks)
        self.batch_chunks = self.staged_chunks = min(MAX_STAGED_CHUNKS, self.staged_chunks)
        self._device = self._runs[0].device
        # If layers have several runs, one copy for all runs of a layer is faster than a copy for each run.
        is_cut = len(self._runs) > len(caches)
        self._views = stacked(self._runs) if is_cut else self._runs
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def gpu(self) -> int | None:
        """Number of the GPU. None: the device is not a CUDA device."""
        import torch

        if self._device.type != "cuda":
            return None
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def fence(self) -> "torch.cuda.Event | None":
        import torch

        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps, instead of holding a core
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, chunks: Sequence[Sequence[int]], fence: Any = None) -> list[list[memoryview]]:
        import torch

        staged = [self._pinned() for _ in chunks]
        with torch.cuda.stream(self._stream):  # type: ignore[no-untyped-call]
            if self._stream is not None and fence is not None:
                self._stream.wait_event(fence)
            for blocks, buffer in zip(chunks, staged, strict=True):
                pieces = [view[block].flatten() for block in blocks for view in self._views]
                buffer.copy_(torch.cat(pieces), non_blocking=True)
            self._synchronize()
        return [[buffer.numpy().data] for buffer in staged]

    def copied(self, puts: Sequence[Sequence[Sequence[int]]], fence: Any = None) -> list[Sequence[Scattered]]:
        views = iter(self.read([blocks for chunks in puts for blocks in chunks], fence))  # copies in host memory
        return [list(itertools.islice(views, len(chunks))) for chunks in puts]

    def targets(self, blocks: Sequence[int | None]) -> list[memoryview]:
        return [self._pinned().numpy().data]

    def load(self, chunks: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        import torch

        for blocks, (buffer,) in chunks:
            chunk = torch.frombuffer(buffer, dtype=torch.uint8).to(self._device, non_blocking=True)
            places = list(itertools.product(blocks, self._views))
            pieces = chunk.split([view[0].numel() for _, view in places])
            for (block, view), piece in zip(places, pieces, strict=True):
                if block is not None:
                    view[block].copy_(piece.view(view.shape[1:]))
        self._synchronize()

    def _pinned(self) -> "torch.Tensor":
        """Allocate host memory for one chunk. torch keeps freed pinned memory, so later calls are cheap."""
        import torch

        return torch.empty(self.chunk_nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def layout_of(
    caches: "Mapping[str, torch.Tensor | Sequence[torch.Tensor]]",
    num_blocks: int,
    chunk_blocks: int,
    *,
    part: tuple[int, int] = (0, 1),
) -> Layout:
    """Make the layout for the device of these caches.

    Args:
        caches: The tensor or tensors of each layer. A state-space layer has several.
        part: (Index of the part, number of parts). The heads of each layer are divided into equal parts. The layout
            contains only the heads of this part.

    Raises:
        ConfigError: The layout or the device is not supported.
    """
    tensors = {
        f"{name}/{number}": part_of(name, tensor, part)
        for name, cache in caches.items()
        for number, tensor in enumerate(cache if isinstance(cache, list | tuple) else [cache])
    }
    devices = {tensor.device.type for tensor in tensors.values()}
    if devices not in ({"cpu"}, {"cuda"}):
        raise ConfigError(f"a KV cache on {sorted(devices) or 'no device'} is not supported; cpu and cuda are")
    kind = Layout if devices == {"cpu"} else DeviceLayout
    return kind(tensors, num_blocks, chunk_blocks)
