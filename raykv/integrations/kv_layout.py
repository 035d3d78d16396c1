"""Where a block's bytes lie in the engine's KV cache, and how they get out of it and back in.

vLLM hands a worker one view `[blocks, heads, tokens, content]` per layer into shared allocations. In memory the four
axes may come in many orders (vLLM names them LBHNC, BLNHC and so on), and a kernel may read its blocks packed by
instruction set. We do not interpret any of that: a chunk is the bytes of its blocks, and a block is a list of dense
runs of bytes, which strides alone tell. Whatever makes the same bytes mean something else is part of the namespace.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from raykv.errors import ConfigError
from raykv.memory.copying import gather

MAX_RUNS_PER_LAYER = 64
"""A layout that tears a block into more pieces than this is not one that we know."""


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of every block that lie side by side: block `b` has them at `offset + b * stride` of an allocation.

    Attributes:
        allocation: Which of the KV cache's allocations.
        offset: Of block 0.
        stride: From one block to the next.
        nbytes: Length of the run.
    """

    allocation: int
    offset: int
    stride: int
    nbytes: int


def runs_of(name: str, cache: torch.Tensor, num_blocks: int, allocation: int = 0) -> list[Run]:
    """Find the dense runs of one layer's blocks, in the order of their addresses.

    Args:
        name: The layer's, for the error.
        cache: Shape [num_blocks * k, ...]: the kernel may cut each block into k consecutive ones.
        num_blocks: Blocks as the engine counts them.
        allocation: Recorded in the runs.

    Raises:
        ConfigError: The strides are not those of a KV cache layout that we know.
    """
    if cache.dim() < 2 or not num_blocks or cache.shape[0] % num_blocks:
        raise ConfigError(
            f"KV cache of layer {name}: shape {list(cache.shape)} does not begin with {num_blocks} blocks; "
            "this layout is not supported, set VLLM_KV_CACHE_LAYOUT to another one"
        )
    item = cache.element_size()
    split = cache.shape[0] // num_blocks
    inner = [(split, cache.stride(0) * item)]
    inner += [(size, stride * item) for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)]
    dense = item
    outer: list[range] = []
    for size, stride in sorted(((s, t) for s, t in inner if s > 1), key=lambda axis: axis[1]):
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
    """Join runs that follow each other without a gap, such as all layers of a block in a block-outermost layout."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and (last.allocation, last.stride, last.offset + last.nbytes) == (
            run.allocation,
            run.stride,
            run.offset,
        ):
            joined[-1] = Run(last.allocation, last.offset, last.stride, last.nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined


def describe(name: str, cache: torch.Tensor) -> str:
    """Tell shape, order in memory and element type of one layer's blocks: what must be equal for bytes to be."""
    axes = range(1, cache.dim())
    order = sorted(axes, key=lambda axis: (-cache.stride(axis), axis))
    return f"{list(cache.shape[1:])}/{''.join(map(str, order))}/{str(cache.dtype).removeprefix('torch.')}"


class Layout(ABC):
    """The KV cache of one worker, as chunks of `chunk_blocks` blocks.

    Attributes:
        chunk_nbytes: Size of every chunk.
        description: Goes into the namespace.
        batch_chunks: Chunks to load at once, where their landing place is bounded; None where it is not.
    """

    batch_chunks: int | None = None

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, chunk_blocks: int) -> None:
        """Learn the layout of `caches`, in their order; layers that share a tensor are taken once.

        Raises:
            ConfigError: A layer's layout is unknown, or there is nothing to store.
        """
        self._allocations: list[torch.Tensor] = []
        runs: list[Run] = []
        seen: dict[int, int] = {}
        layers: dict[int, tuple[str, torch.Tensor]] = {}
        for name, cache in caches.items():
            if cache.data_ptr() in layers:
                continue
            layers[cache.data_ptr()] = (name, cache)
            storage = cache.untyped_storage()
            if storage.data_ptr() not in seen:
                seen[storage.data_ptr()] = len(self._allocations)
                self._allocations.append(torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage))
            runs += runs_of(name, cache, num_blocks, seen[storage.data_ptr()])
        if not runs:
            raise ConfigError("this worker has no KV cache; a KV connector has nothing to do here")
        self._runs = merged(runs)
        self._block_nbytes = sum(run.nbytes for run in self._runs)
        self.chunk_nbytes = self._block_nbytes * chunk_blocks
        kinds = [
            (kind, len(list(group))) for kind, group in itertools.groupby(describe(*one) for one in layers.values())
        ]
        self.description = ";".join(f"{count}x{kind}" for kind, count in kinds)

    @property
    def device(self) -> torch.device:
        return self._allocations[0].device

    @abstractmethod
    def read(self, blocks: Sequence[int], view: memoryview) -> None:
        """Copy a chunk out of the KV cache; `view` holds it when this returns.

        Args:
            blocks: The chunk's blocks in order, computed by kernels that are done or queued on the current stream.
            view: Writable, `chunk_nbytes` long.
        """

    @abstractmethod
    def landing(self, blocks: Sequence[int | None]) -> list[memoryview]:
        """Name the places to which a chunk's bytes go, in order, `chunk_nbytes` in all.

        Args:
            blocks: The chunk's blocks; None for one that must stay as it is.
        """

    @abstractmethod
    def landed(self, arrived: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        """Bring chunks whose bytes are in their `landing` into the KV cache; they are there when this returns."""


class HostLayout(Layout):
    """A KV cache in host memory: bytes are copied once, straight between the arena (or a socket) and the blocks."""

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, chunk_blocks: int) -> None:
        super().__init__(caches, num_blocks, chunk_blocks)
        self._bytes = [memoryview(allocation.numpy()) for allocation in self._allocations]

    def read(self, blocks: Sequence[int], view: memoryview) -> None:
        gather(view, self.landing(blocks))

    def landing(self, blocks: Sequence[int | None]) -> list[memoryview]:
        pieces = []
        for block in blocks:
            if block is None:  # a place of its own: a checksum is taken of where the bytes have landed
                pieces.append(memoryview(bytearray(self._block_nbytes)))
                continue
            for run in self._runs:
                start = run.offset + block * run.stride
                pieces.append(self._bytes[run.allocation][start : start + run.nbytes])
        return pieces

    def landed(self, arrived: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        pass


class DeviceLayout(Layout):
    """A KV cache in device memory: bytes go through host memory, one transfer a chunk each way.

    The plain way, correct by stream order: a save gathers the chunk on the current stream and waits for its transfer; a
    load lands in pinned memory and is scattered by the loading thread, which waits for its stream before the load is
    reported. No overlap with computation yet, and no direct transfer between the NIC and the device.
    """

    batch_chunks = 32

    def read(self, blocks: Sequence[int], view: memoryview) -> None:
        chunk = torch.cat([piece for block in blocks for piece in self._pieces(block)])
        torch.frombuffer(view, dtype=torch.uint8).copy_(chunk)

    def landing(self, blocks: Sequence[int | None]) -> list[memoryview]:
        # torch keeps freed pinned memory for the next request of that size, so this costs one allocation per place.
        pinned = torch.empty(self.chunk_nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return [memoryview(pinned.numpy())]

    def landed(self, arrived: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        for blocks, (buffer,) in arrived:
            chunk = torch.frombuffer(buffer, dtype=torch.uint8).to(self.device, non_blocking=True)
            for block, part in zip(blocks, chunk.split(self._block_nbytes), strict=True):
                if block is not None:
                    sizes = [run.nbytes for run in self._runs]
                    for piece, source in zip(self._pieces(block), part.split(sizes), strict=True):
                        piece.copy_(source)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _pieces(self, block: int) -> list[torch.Tensor]:
        starts = [(run, run.offset + block * run.stride) for run in self._runs]
        return [self._allocations[run.allocation][start : start + run.nbytes] for run, start in starts]


def layout_of(caches: Mapping[str, torch.Tensor], num_blocks: int, chunk_blocks: int) -> Layout:
    """Build the layout for wherever these caches lie.

    Raises:
        ConfigError: The layout, or the device, is unknown.
    """
    devices = {cache.device.type for cache in caches.values()}
    if devices == {"cpu"}:
        return HostLayout(caches, num_blocks, chunk_blocks)
    if devices == {"cuda"}:
        return DeviceLayout(caches, num_blocks, chunk_blocks)
    raise ConfigError(f"a KV cache on {sorted(devices) or 'no device'} is not supported; cpu and cuda are")
