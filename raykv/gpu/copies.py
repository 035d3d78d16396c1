"""Copies chunks between the pages of a KV cache in GPU memory and host memory, in one of three ways.

* `staged`: a kernel gathers a few chunks into GPU memory, and a copy engine moves them to the host in long copies. The
  kernel is done in a small part of the time that the link needs. Meanwhile the copy engine moves the chunks before.
* `direct`: a kernel writes into pinned host memory. It holds a few multiprocessors while the link works.
* `batched`: the copy engine copies each run by itself; one call of the driver queues all of them. No kernel.

`calibrate` measures them once. Loads do the same in the other direction. Nothing here blocks the thread of an engine:
all is queued on streams of this module, after events that the engine's thread has recorded.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from raykv.gpu.device import LINK_BLOCKS, STAGING_BLOCKS, Device, Event, Memory
from raykv.gpu.tiles import PLACE, TILE, Part, Places, Tiles, places_of

Way = Literal["staged", "direct", "batched"]
Direction = Literal["store", "load"]
Pages = Sequence[int | None]
"""The pages of one chunk. None: this block is not copied."""
Layers = tuple[range, Event | None]
"""Runs of a block that may be read after an event. None: at once."""

WAYS: Final[tuple[Way, ...]] = ("staged", "direct", "batched")
"""In the order of preference: the first one disturbs the engine least."""
GOOD_ENOUGH: Final = 0.95
"""`calibrate` takes the first way that has this share of the best way's rate."""
STAGE_NBYTES: Final = 8 << 20
"""Bytes of a stage: a copy of this length takes 150 us over PCIe 5, longer than the calls that queue it. A stage has
room for one chunk at least."""
STAGES: Final = 3
"""One stage is gathered while another one is copied, and the host prepares a third one."""
CALIBRATION_NBYTES: Final = 64 << 20
CALIBRATION_ROUNDS: Final = 3


@dataclass(slots=True)
class _Stage:
    """GPU memory that chunks pass through, and the places of one kernel's blocks.

    Attributes:
        memory: The chunks.
        places: The places in GPU memory.
        listed: The places in pinned host memory, array of PLACE.
        used: Occurs when the last use has ended. None: no use yet.
    """

    memory: Memory
    places: Memory
    listed: Places
    used: Event | None = None


class _Lane:
    """Streams and stages of one direction. One call uses a lane at a time."""

    def __init__(self, device: Device, stage_nbytes: int, most_places: int) -> None:
        self.lock = threading.Lock()
        self.kernels, self.copies = device.stream(), device.stream()
        self._device, self._next = device, 0
        places_nbytes = most_places * PLACE.itemsize
        self._stages = [
            _Stage(
                device.allocate(stage_nbytes),
                device.allocate(places_nbytes),
                device.host_memory(places_nbytes).view(PLACE),
            )
            for _ in range(STAGES)
        ]

    def stage(self) -> _Stage:
        """Return the stage that was used first. If it is still in use, sleep until its use ends."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % STAGES
        if stage.used is not None:
            self._device.synchronize(stage.used)
        return stage

    def drain(self) -> None:
        """Sleep until both streams are done."""
        for stream in (self.kernels, self.copies):
            self._device.synchronize(self._device.record(stream))


class PageCopies:
    """Copies chunks of one KV cache. Thread-safe; stores and loads run at the same time.

    Attributes:
        tiles: Where the bytes of a page lie.
        chunk_nbytes: Length of a chunk.
        ways: The way of each direction.
    """

    def __init__(self, device: Device, tiles: Tiles, chunk_blocks: int) -> None:
        """Allocate streams and stages. Raises LostError if the GPU has no memory left."""
        self.tiles, self.chunk_nbytes = tiles, chunk_blocks * tiles.block_nbytes
        self.ways: dict[Direction, Way] = {"store": "staged", "load": "staged"}
        self._device, self._chunk_blocks = device, chunk_blocks
        self._stage_nbytes = max(STAGE_NBYTES, self.chunk_nbytes)
        self._most_places = max(chunk_blocks, self._stage_nbytes // tiles.block_nbytes)
        device.use()
        self._lanes = {name: _Lane(device, self._stage_nbytes, self._most_places) for name in self.ways}
        self._table = device.allocate(tiles.table.nbytes)
        table = device.host_memory(tiles.table.nbytes)
        table[:] = tiles.table.view(np.uint8)
        lane = self._lanes["store"]
        device.copy(self._table.address, table.ctypes.data, len(table), lane.kernels)
        lane.drain()

    # -- stores ---------------------------------------------------------------------------------------------------

    def store(
        self,
        chunks: Sequence[Pages],
        addresses: Sequence[int],
        *,
        after: Event | None = None,
        layers: Iterable[Layers] | None = None,
        is_pinned: bool = True,
        way: Way | None = None,
    ) -> Iterator[range]:
        """Copy chunks out of the KV cache. The caller must take all that this iterator yields, or close it.

        Args:
            chunks: The pages of each chunk. No page is None.
            addresses: Where each chunk begins: in host memory, or in memory of this GPU for the way `direct`.
            after: The pages may be read after this event.
            layers: Parts of a block, in any order, with an event each. The iterator may wait for the engine's next
                layer. Together they are the whole block. None: the whole block after `after`.
            is_pinned: Whether kernels may write to the addresses. If not, the way is `staged`.
            way: None: that of `ways`.

        Yields:
            Ranges of chunks whose bytes have arrived. When the iterator ends or is closed, nothing writes to the
            addresses any more.

        Raises:
            LostError: CUDA failed.
        """
        lane, chosen = self._lanes["store"], (way or self.ways["store"]) if is_pinned else "staged"
        parts: Iterable[Layers] = [(range(self.tiles.runs), after)] if layers is None else layers
        with lane.lock:
            self._device.use()
            try:
                ends: list[tuple[range, Event]] = []
                for count, (runs, event) in enumerate(parts):
                    if event is not None:
                        self._device.wait(lane.kernels, event)
                    part = self.tiles.part(runs)
                    groups = list(self._groups(len(chunks), part))
                    done = [self._store(lane, chunks, addresses, group, part, chosen) for group in groups]
                    # A chunk that comes in several layers has arrived only with the last one.
                    ends = [] if count else list(zip(groups, done, strict=True))
                if not ends:
                    lane.drain()
                    ends = [(range(len(chunks)), None)]
                for group, event in ends:
                    if event is not None:
                        self._device.synchronize(event)
                    yield group
            finally:
                lane.drain()

    def _store(
        self, lane: _Lane, chunks: Sequence[Pages], addresses: Sequence[int], group: range, part: Part, way: Way
    ) -> Event:
        stage, device = lane.stage(), self._device
        chosen, block_nbytes = [chunks[place] for place in group], self.tiles.block_nbytes
        targets = [addresses[place] + part.offset for place in group]
        if way == "staged":
            step = self._chunk_blocks * part.nbytes
            staged = [stage.memory.address + number * step for number in range(len(group))]
            self._launch("gather", lane, stage, places_of(chosen, staged, part.nbytes), part, STAGING_BLOCKS)
            device.wait(lane.copies, device.record(lane.kernels))
            for target, source in zip(targets, staged, strict=True):
                if part.nbytes == block_nbytes:
                    device.copy(target, source, step, lane.copies)
                else:
                    rows = self._chunk_blocks, part.nbytes
                    device.copy_rows((target, block_nbytes), (source, part.nbytes), rows, lane.copies)
            stage.used = device.record(lane.copies)
        else:
            places = places_of(chosen, targets, block_nbytes)
            if way == "direct":
                self._launch("gather", lane, stage, places, part, LINK_BLOCKS)
            else:
                pages, slots, nbytes = self.tiles.pieces(places, part)
                device.copy_many((slots, pages, nbytes), lane.kernels)
            stage.used = device.record(lane.kernels)
        return stage.used

    # -- loads ----------------------------------------------------------------------------------------------------

    def load(
        self,
        chunks: Sequence[Pages],
        addresses: Sequence[int],
        *,
        is_pinned: bool = True,
        way: Way | None = None,
    ) -> None:
        """Copy chunks into the KV cache. The copies have ended when this method returns or raises.

        Arguments and errors as for `store`. Blocks whose page is None are not copied.
        """
        lane, chosen = self._lanes["load"], (way or self.ways["load"]) if is_pinned else "staged"
        with lane.lock:
            self._device.use()
            try:
                for group in self._groups(len(chunks), self.tiles.whole):
                    self._load(lane, [chunks[place] for place in group], [addresses[place] for place in group], chosen)
            finally:
                lane.drain()

    def _load(self, lane: _Lane, chunks: Sequence[Pages], addresses: Sequence[int], way: Way) -> None:
        stage, device, part = lane.stage(), self._device, self.tiles.whole
        if way == "staged":
            staged = [stage.memory.address + number * self.chunk_nbytes for number in range(len(chunks))]
            for target, source in zip(staged, addresses, strict=True):
                device.copy(target, source, self.chunk_nbytes, lane.copies)
            device.wait(lane.kernels, device.record(lane.copies))
            self._launch("scatter", lane, stage, places_of(chunks, staged, part.nbytes), part, STAGING_BLOCKS)
        else:
            places = places_of(chunks, addresses, part.nbytes)
            if way == "direct":
                self._launch("scatter", lane, stage, places, part, LINK_BLOCKS)
            elif len(places):
                device.copy_many(self.tiles.pieces(places, part), lane.kernels)
        stage.used = device.record(lane.kernels)

    # -- both -----------------------------------------------------------------------------------------------------

    def _groups(self, chunks: int, part: Part) -> Iterator[range]:
        """Divide chunks into groups that fit a stage."""
        size = max(1, self._stage_nbytes // (self._chunk_blocks * part.nbytes))
        size = min(size, max(1, self._most_places // self._chunk_blocks))
        return (range(start, min(start + size, chunks)) for start in range(0, chunks, size))

    def _launch(self, kernel: str, lane: _Lane, stage: _Stage, places: Places, part: Part, blocks: int) -> None:
        if not len(places):
            return
        stage.listed[: len(places)] = places
        self._device.copy(stage.places.address, stage.listed.ctypes.data, places.nbytes, lane.kernels)
        tiles = self._table.address + part.first_tile * TILE.itemsize
        count = part.last_tile - part.first_tile
        arguments = np.uint64(tiles), np.uint32(count), np.uint64(stage.places.address), np.uint32(len(places))
        self._device.launch(kernel, (*arguments, np.uint32(part.offset)), blocks, lane.kernels)

    def calibrate(
        self, pages: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> dict[Direction, dict[Way, float]]:
        """Measure all ways on this cache, and set `ways`. No kernel of the engine may use the cache meanwhile.

        The content of the cache does not change: each load writes what the store before has read.

        Args:
            pages: Number of pages in the cache.

        Returns:
            The rates in bytes a second.
        """
        count = max(1, min(CALIBRATION_NBYTES // self.chunk_nbytes, pages // self._chunk_blocks))
        memory = self._device.host_memory(count * self.chunk_nbytes)
        blocks = range(count * self._chunk_blocks)
        chunks = [blocks[first : first + self._chunk_blocks] for first in blocks[:: self._chunk_blocks]]
        addresses = [memory.ctypes.data + number * self.chunk_nbytes for number in range(count)]
        rates: dict[Direction, dict[Way, float]] = {"store": {}, "load": {}}
        ways = [way for way in WAYS if way != "batched" or self._device.has_batched_copies]
        for way in ways:
            calls: dict[Direction, Callable[[], object]] = {
                "store": lambda way=way: [*self.store(chunks, addresses, way=way)],  # type: ignore[misc]
                "load": lambda way=way: self.load(chunks, addresses, way=way),  # type: ignore[misc]
            }
            for direction, call in calls.items():
                rates[direction][way] = memory.nbytes / max(_fastest(call, clock), 1e-9)
        for direction, each in rates.items():
            good = GOOD_ENOUGH * max(each.values())
            self.ways[direction] = next(way for way in ways if each[way] >= good)
        return rates


def _fastest(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest of some durations, after one call that is not measured."""
    call()
    times = []
    for _ in range(CALIBRATION_ROUNDS):
        began_s = clock()
        call()
        times.append(clock() - began_s)
    return min(times)
