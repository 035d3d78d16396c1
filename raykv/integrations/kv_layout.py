"""Copies blocks out of an engine's KV cache and back into it. Needs no engine.

An engine gives a worker one tensor `[blocks, ...]` per layer. The order of the axes in memory varies (vLLM names them
LBHNC, BLNHC and so on), and a CPU kernel may pack a block for its instruction set. Raykv treats a chunk as opaque
bytes: a block is a list of dense runs, computed from the strides alone. The namespace contains the layout.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from raykv.errors import ConfigError

if TYPE_CHECKING:
    import torch

MAX_RUNS_PER_LAYER: Final = 64
"""A layout that cuts a block into more pieces is refused."""
MAX_STAGED_CHUNKS: Final = 32
MAX_STAGED_NBYTES: Final = 256 << 20
"""Limits of the chunks that pass through pinned host memory at once."""


class Run(NamedTuple):
    """Adjacent bytes of every block: those of block `b` start at `offset + b * stride` of the allocation."""

    allocation: int
    offset: int
    stride: int
    nbytes: int


def runs_of(name: str, cache: "torch.Tensor", num_blocks: int, allocation: int = 0) -> list[Run]:
    """Find the dense runs of one layer's blocks, sorted by address.

    Args:
        cache: Shape [num_blocks * k, ...]. The kernel may divide each block into k smaller ones.

    Raises:
        ConfigError: The layout is not supported.
    """
    if cache.dim() < 2 or not num_blocks or cache.shape[0] % num_blocks:
        raise ConfigError(
            f"KV cache of layer {name}: shape {list(cache.shape)} does not begin with {num_blocks} blocks; "
            "this layout is not supported, set VLLM_KV_CACHE_LAYOUT to another one"
        )
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
            raise ConfigError(
                f"KV cache of layer {name}: strides {cache.stride()} overlap; this layout is not supported"
            )
    starts = sorted(sum(steps) for steps in itertools.product(*outer))
    if len(starts) > MAX_RUNS_PER_LAYER:
        raise ConfigError(
            f"KV cache of layer {name}: a block lies in {len(starts)} pieces; this layout is not supported, "
            "set VLLM_KV_CACHE_LAYOUT to another one"
        )
    base = cache.storage_offset() * item
    return [Run(allocation, base + start, cache.stride(0) * item * split, dense) for start in starts]


def merged(runs: Sequence[Run]) -> list[Run]:
    """Join runs that follow each other without a gap."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and run[:3] == (last.allocation, last.offset + last.nbytes, last.stride):
            joined[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined


def describe(cache: "torch.Tensor") -> str:
    """Describe one layer's blocks: shape, order of the axes in memory, element type."""
    order = sorted(range(1, cache.dim()), key=lambda axis: (-cache.stride(axis), axis))
    return f"{list(cache.shape[1:])}/{''.join(map(str, order))}/{str(cache.dtype).removeprefix('torch.')}"


class Layout(ABC):
    """The KV cache of one worker, as chunks of `chunk_nbytes`. `description` goes into the namespace."""

    batch_chunks: int | None = None
    """The most chunks in one call of `read` or `load`. None means no limit."""

    def __init__(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int, chunk_blocks: int) -> None:
        """Compute the layout of `caches`, which maps layer names to tensors. Layers that share a tensor count once.

        Raises:
            ConfigError: The layout of a layer is not supported, or `caches` is empty.
        """
        import torch

        self._allocations: list[torch.Tensor] = []
        runs: list[Run] = []
        known: dict[int, int] = {}
        layers: dict[int, torch.Tensor] = {}
        for name, cache in caches.items():
            if cache.data_ptr() in layers:
                continue
            layers[cache.data_ptr()] = cache
            storage = cache.untyped_storage()
            if storage.data_ptr() not in known:
                known[storage.data_ptr()] = len(self._allocations)
                self._allocations.append(torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage))
            runs += runs_of(name, cache, num_blocks, known[storage.data_ptr()])
        if not runs:
            raise ConfigError("this worker has no KV cache; a KV connector has nothing to do here")
        self._runs = merged(runs)
        self._block_nbytes = sum(run.nbytes for run in self._runs)
        self.chunk_nbytes = self._block_nbytes * chunk_blocks
        kinds = itertools.groupby(map(describe, layers.values()))
        self.description = ";".join(f"{len(list(group))}x{kind}" for kind, group in kinds)

    @abstractmethod
    def read(self, chunks: Sequence[Sequence[int]]) -> list[list[memoryview]]:
        """Return the bytes of chunks in host memory. The views are valid until the next call or the next step.

        Args:
            chunks: The blocks of each chunk. The kernels that compute them have ended or are queued on this stream.
        """

    @abstractmethod
    def targets(self, blocks: Sequence[int | None]) -> list[memoryview]:
        """Return buffers that receive one chunk. A None in `blocks` is a block that must not change."""

    @abstractmethod
    def load(self, chunks: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        """Copy received chunks from their `targets` into the KV cache. The copy has ended when this returns."""


class HostLayout(Layout):
    """A KV cache in host memory: its blocks are read and written in place."""

    def __init__(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int, chunk_blocks: int) -> None:
        super().__init__(caches, num_blocks, chunk_blocks)
        views = [memoryview(allocation.numpy()) for allocation in self._allocations]
        self._places = [(views[run.allocation], run.offset, run.stride, run.nbytes) for run in self._runs]

    def read(self, chunks: Sequence[Sequence[int]]) -> list[list[memoryview]]:
        return [[view for block in blocks for view in self._views(block)] for blocks in chunks]

    def targets(self, blocks: Sequence[int | None]) -> list[memoryview]:
        pieces: list[memoryview] = []
        for block in blocks:
            # The checksum covers the whole chunk, so a block that must not change is received into a scratch buffer.
            pieces += [memoryview(bytearray(self._block_nbytes))] if block is None else self._views(block)
        return pieces

    def load(self, chunks: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        """Do nothing: the targets are the blocks themselves."""

    def _views(self, block: int) -> list[memoryview]:
        return [
            view[(start := offset + block * stride) : start + nbytes] for view, offset, stride, nbytes in self._places
        ]


class DeviceLayout(Layout):
    """A KV cache in device memory. Each chunk passes through pinned host memory in one transfer.

    A save runs on the current stream, after the kernels that compute the blocks, and waits for the transfer. A load
    thread waits for its own stream before it reports the load.
    """

    def __init__(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int, chunk_blocks: int) -> None:
        super().__init__(caches, num_blocks, chunk_blocks)
        self.batch_chunks = max(1, min(MAX_STAGED_CHUNKS, MAX_STAGED_NBYTES // self.chunk_nbytes))
        self._staged: list[torch.Tensor] = []

    def read(self, chunks: Sequence[Sequence[int]]) -> list[list[memoryview]]:
        import torch

        while len(self._staged) < len(chunks):
            self._staged.append(self._pinned())
        staged = self._staged[: len(chunks)]
        for blocks, buffer in zip(chunks, staged, strict=True):
            chunk = torch.cat([piece for block in blocks for piece in self._pieces(block)])
            buffer.copy_(chunk, non_blocking=True)
        self._synchronize()
        return [[memoryview(buffer.numpy())] for buffer in staged]

    def targets(self, blocks: Sequence[int | None]) -> list[memoryview]:
        # torch reuses freed pinned memory of this size, so a target costs an allocation only once.
        return [memoryview(self._pinned().numpy())]

    def load(self, chunks: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        import torch

        sizes = [run.nbytes for run in self._runs]
        for blocks, (buffer,) in chunks:
            chunk = torch.frombuffer(buffer, dtype=torch.uint8).to(self._device, non_blocking=True)
            for block, part in zip(blocks, chunk.split(self._block_nbytes), strict=True):
                if block is not None:
                    for piece, source in zip(self._pieces(block), part.split(sizes), strict=True):
                        piece.copy_(source)
        self._synchronize()

    @property
    def _device(self) -> "torch.device":
        return self._allocations[0].device

    def _pinned(self) -> "torch.Tensor":
        import torch

        return torch.empty(self.chunk_nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _pieces(self, block: int) -> "list[torch.Tensor]":
        starts = [(run, run.offset + block * run.stride) for run in self._runs]
        return [self._allocations[run.allocation][start : start + run.nbytes] for run, start in starts]


def layout_of(caches: Mapping[str, "torch.Tensor"], num_blocks: int, chunk_blocks: int) -> Layout:
    """Make the layout for the device of these caches.

    Raises:
        ConfigError: The layout or the device is not supported.
    """
    devices = {cache.device.type for cache in caches.values()}
    if devices == {"cpu"}:
        return HostLayout(caches, num_blocks, chunk_blocks)
    if devices == {"cuda"}:
        return DeviceLayout(caches, num_blocks, chunk_blocks)
    raise ConfigError(f"a KV cache on {sorted(devices) or 'no device'} is not supported; cpu and cuda are")
