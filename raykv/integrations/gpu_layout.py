"""The KV cache of a worker on a GPU, whose chunks move between the pages and the arena without a copy on the CPU.

Without cupy, or if CUDA refuses something, `DeviceLayout` is used as before: chunks pass through other pinned memory,
and the CPU copies them into the arena and out of it.
"""

import functools
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raykv.errors import RayKVError, TransientError
from raykv.gpu.copies import PageCopies
from raykv.gpu.device import CudaDevice, Device, missing
from raykv.gpu.pinning import ArenaPinning, Pinning
from raykv.gpu.tiles import Run, Tiles
from raykv.integrations.kv_layout import DeviceLayout, Layout, Values
from raykv.memory.copying import checksum_of
from raykv.types import DirectValues, GetResult, KeyArray, NodeId, Scattered

if TYPE_CHECKING:
    from raykv.client.client import Client

log = logging.getLogger(__name__)


class GpuLayout(Layout):
    """A KV cache in GPU memory. Chunks from and to other hosts still pass through the memory of `DeviceLayout`."""

    def __init__(self, staged: Layout, device: Device, pinning: ArenaPinning, *, chunk_blocks: int) -> None:
        """Wrap the `DeviceLayout` of the same KV cache.

        Raises:
            LostError: The GPU has no memory left for stages.
        """
        self._staged, self._device, self._arenas = staged, device, pinning
        self._pinning: Pinning | None = None
        self.description, self.chunk_nbytes = staged.description, staged.chunk_nbytes
        self.batch_chunks, self.staged_chunks = staged.batch_chunks, staged.staged_chunks
        self.copies = PageCopies(device, Tiles([Run(*run) for run in staged.runs]), chunk_blocks)

    def use_arena(self, client: "Client") -> None:
        """Pin the arena that a client has mapped, in the background. Call this before the arena is used."""
        local = client.router.local
        if local is not None:
            reader = local.reader
            self._pinning = self._arenas.of(reader.arena, reader.table.extent_nbytes)

    def fence(self) -> Any:
        return self._staged.fence()

    def read(self, chunks: Sequence[Sequence[int]], fence: Any = None) -> list[list[memoryview]]:
        return self._staged.read(chunks, fence)

    def targets(self, blocks: Sequence[int | None]) -> list[memoryview]:
        return self._staged.targets(blocks)

    def load(self, chunks: Sequence[tuple[Sequence[int | None], list[memoryview]]]) -> None:
        self._staged.load(chunks)

    def copied(self, puts: Sequence[Sequence[Sequence[int]]], fence: Any = None) -> list[Sequence[Scattered]]:
        return self._staged.copied(puts, fence)

    def values(self, puts: Sequence[Sequence[Sequence[int]]], fence: Any = None) -> list[Values]:
        if fence is not None:
            # Wait here, and not on the GPU: a step can take seconds, and slots must be filled soon after they are lent.
            self._device.use()
            self._device.synchronize(fence)
        return [DirectValues(len(chunks), self.chunk_nbytes, functools.partial(self._write, chunks)) for chunks in puts]

    def _write(
        self, chunks: Sequence[Sequence[int]], positions: Sequence[int], views: Sequence[memoryview]
    ) -> npt.NDArray[np.uint64]:
        """Copy chunks into slots. The checksums are computed while the GPU copies the next chunks."""
        pinning, addresses = self._pinning, list(map(_address_of, views))
        checksums = np.zeros(len(views), np.uint64)
        chosen = [chunks[position] for position in positions]
        is_pinned = _all_pinned(pinning, addresses, self.chunk_nbytes)
        for group in self.copies.store(chosen, addresses, is_pinned=is_pinned):
            for place in group:
                checksums[place] = checksum_of([views[place]])
        return checksums

    def load_views(self, chunks: Sequence[Sequence[int | None]], views: Sequence[memoryview]) -> None:
        """Copy chunks from views of the arena into the KV cache. The copies have ended when this method returns."""
        pinning, addresses = self._pinning, list(map(_address_of, views))
        self.copies.load(chunks, addresses, is_pinned=_all_pinned(pinning, addresses, self.chunk_nbytes))


def _all_pinned(pinning: Pinning | None, addresses: Sequence[int], nbytes: int) -> bool:
    if pinning is None:
        return False
    covered = [pinning.covers(address, nbytes) for address in addresses]  # a list, so that all extents are requested
    return all(covered)


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def load_here(
    client: "Client",
    layout: GpuLayout,
    keys: KeyArray,
    blocks: Sequence[Sequence[int | None]],
    holders: Sequence[NodeId],
    timeout_s: float,
) -> GetResult:
    """Load the leading chunks that this host's node holds, straight from the arena.

    Returns:
        The result for these chunks; it has no misses. Other chunks must be loaded in another way.
    """
    me = client.router.local_id
    count = len(list(takewhile(lambda holder: holder == me, holders)))
    if not count or me is None:
        return GetResult(())
    try:
        pins = client.pin(keys[:count], timeout_s=timeout_s)
    except TransientError:
        return GetResult(())
    layout.use_arena(client)
    with pins:
        views: list[memoryview] = []
        for view in pins.views:
            if view is None or len(view) != layout.chunk_nbytes:
                break
            views.append(view)
        layout.load_views(blocks[: len(views)], views)
        if not views or not pins.valid():
            return GetResult(())
    nbytes = len(views) * layout.chunk_nbytes
    return GetResult((True,) * len(views), {"shm": nbytes}, {(me, "shm"): len(views)})


@functools.cache
def _gpu(number: int) -> tuple[CudaDevice, ArenaPinning]:
    device = CudaDevice(number)
    return device, ArenaPinning(device)


def with_gpu_copies(layout: Layout, num_blocks: int, chunk_blocks: int) -> Layout:
    """Return a `GpuLayout` for a KV cache on a GPU. If that is not possible, log why, and return `layout` itself.

    Measures the ways of copies on the KV cache, so nothing may use the cache during this call.
    """
    number = layout.gpu if isinstance(layout, DeviceLayout) else None
    if number is None:
        return layout
    if reason := missing():
        log.warning("raykv copies through the CPU: %s", reason)
        return layout
    try:
        made = GpuLayout(layout, *_gpu(number), chunk_blocks=chunk_blocks)
        rates = made.copies.calibrate(num_blocks)
    except RayKVError as error:
        log.warning("raykv copies through the CPU: %s", error)
        return layout
    log.info("copies between GPU and arena: %s; measured, in GB/s: %s", made.copies.ways, _in_gb(rates))
    return made


def _in_gb(rates: Any) -> dict[str, dict[str, float]]:
    return {name: {way: round(rate / 1e9, 1) for way, rate in each.items()} for name, each in rates.items()}
