"""Copies blocks of a paged KV cache into chunks in host memory (store), and back (load), on streams of their own.

There are two ways:

* "kernel": a kernel reads and writes the host's memory itself. It is one launch, but it occupies multiprocessors for as
  long as the link needs.
* "staged": a kernel gathers the blocks in GPU memory, which takes a fraction of that time, and the copy engines move
  them in batches, one copy for each chunk. For loads it is the reverse. Two staging buffers take turns, so that the
  kernel works on one while the copy engine moves the other.

`raykv.gpu.calibration` measures both and chooses one.

Only pinned memory can be used by kernels, and by copies that do not block. The bytes of a chunk that is not pinned (see
`raykv.gpu.pinning`) pass through other pinned memory; `begin` and `wait` copy them.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raykv.gpu.device import WARPS_PER_BLOCK, Device, Memory, Pitched
from raykv.gpu.paged import PLACE, RUN, PagedCache, Part, Places, chunk_numbers, streaks

Direction = Literal["store", "load"]
Way = Literal["kernel", "staged"]
Chunk = tuple[Sequence[int | None], int]
"""The blocks of a chunk, and the address of the chunk's bytes in this process. None: a block that is not copied."""

KERNEL_BLOCKS: Final = 16
"""A kernel has at most this many blocks, so it leaves the other multiprocessors to the engine. 16 blocks have 512 KiB
under way. A link of 64 GB/s with a round trip of 2 us needs 128 KiB."""
STAGING_NBYTES: Final = 32 << 20


class Pinned(Protocol):
    def gpu_address(self, address: int, nbytes: int) -> int | None:
        """Return the GPU's address of memory of this process, or None if it is not pinned."""
        ...


class Bounce(NamedTuple):
    """Pinned memory in the place of a chunk that is not pinned.

    Attributes:
        memory: As long as the chunk.
        pieces: (Address in the chunk, address in `memory`, length) of the parts that are copied.
    """

    memory: Memory
    pieces: list[tuple[int, int, int]]


class Targets(NamedTuple):
    """The blocks of a transfer.

    Attributes:
        places: Blocks, and their addresses for the GPU.
        chunks: The number of the chunk of each place.
    """

    places: Places
    chunks: npt.NDArray[np.intp]

    def batch(self, first: int, count: int) -> "Targets":
        return Targets(self.places[first : first + count], self.chunks[first : first + count])


class PagedCopies:
    """Copies in one direction between one paged cache and host memory. Thread-safe.

    Stores and loads belong to two objects with their own streams, because the link works in both directions at once.

    Call `close` before dropping the object.

    Attributes:
        lock: Guards the order in which work is queued, because transfers share the streams and the staging memory.
    """

    def __init__(
        self,
        device: Device,
        cache: PagedCache,
        pinned: Pinned,
        direction: Direction,
        way: Way,
        *,
        staging_nbytes: int = STAGING_NBYTES,
        kernel_blocks: int = KERNEL_BLOCKS,
    ) -> None:
        self.direction, self.way, self.cache = direction, way, cache
        self.device, self._pinned, self._kernel_blocks = device, pinned, kernel_blocks
        self._lanes = [device.new_stream() for _ in range(2 if way == "staged" else 1)]
        self._half_nbytes = max(staging_nbytes // 2, cache.block_nbytes)
        self._joined, self._tables, self._turn = device.new_stream(), device.new_stream(), 0
        self._staging = [device.allocate(self._half_nbytes) for _ in self._lanes if way == "staged"]
        self._runs = device.upload(cache.runs, self._tables)
        self.lock = threading.Lock()
        self._unfinished: dict[int, Transfer] = {}

    def begin(self, chunks: Sequence[Chunk]) -> "Transfer":
        """Begin a transfer. Nothing of the KV cache is read or written before `Transfer.queue`.

        For a load, the chunks' bytes must not change until the transfer has ended. Those that are not pinned are read
        here, so call this on a thread that may wait.

        Raises:
            UsageError: The cache does not have such a block.
        """
        targets: list[Chunk] = []
        bounces: list[Bounce] = []
        for blocks, address in chunks:
            nbytes = self.cache.block_nbytes * len(blocks)
            target = self._pinned.gpu_address(address, nbytes) if nbytes else address
            if target is None:
                bounces.append(self._bounce(blocks, address))
                target = bounces[-1].memory.address
            targets.append((blocks, target))
        return Transfer(self, Targets(self.cache.places(targets), chunk_numbers(targets)), bounces)

    def _bounce(self, blocks: Sequence[int | None], address: int) -> Bounce:
        """Provide pinned memory for a chunk. For a load, it gets the chunk's bytes."""
        places = self.cache.places([(blocks, address)])
        memory, size = self.device.allocate_pinned(self.cache.block_nbytes * len(blocks)), self.cache.block_nbytes
        starts = [(int(places["address"][first]), count) for first, count in streaks(places, size)]
        pieces = [(start, memory.address + start - address, count * size) for start, count in starts]
        for slot, pinned, nbytes in pieces if self.direction == "load" else ():
            _copy_bytes(pinned, slot, nbytes)
        return Bounce(memory, pieces)

    def close(self) -> None:
        """Wait for all that is queued. After it, memory may be unpinned and freed."""
        with self.lock:
            for stream in (*self._lanes, self._tables):
                self.device.synchronize(self.device.record(stream))
            self._unfinished.clear()

    # -- for Transfer, with the lock held ----------------------------------------------------------------------------

    def hold_locked(self, transfer: "Transfer") -> None:
        """Hold what a transfer uses until the GPU has ended. Let go of ended transfers."""
        for number in [number for number, each in self._unfinished.items() if each.is_done()]:
            del self._unfinished[number]
        self._unfinished[id(transfer)] = transfer

    def upload_locked(self, places: Places) -> Memory:
        """Upload a transfer's places. All later work begins after this upload, and after that of the runs before it."""
        memory = self.device.upload(places, self._tables)
        self._fork_locked(self.device.record(self._tables))
        return memory

    def queue_locked(self, part: Part, targets: Targets, table: Memory, after: Any, *, timed: bool) -> Any:
        """Queue the copies of some layers. Returns an event at their end."""
        if after is not None:
            self._fork_locked(after)
        if self.way == "kernel":
            self._launch_locked(part, table.address, len(targets.places), self._lanes[0], staging=0)
        else:
            batch = self._half_nbytes // part.nbytes
            for first in range(0, len(targets.places), batch):
                self._stage_locked(part, targets.batch(first, batch), table.address + first * PLACE.itemsize)
        # The lanes do not wait for each other. So the kernel for one layer runs during the copy of the layer before.
        for lane in self._lanes:
            self.device.wait(self._joined, self.device.record(lane))
        return self.device.record(self._joined, timed=timed)

    def _fork_locked(self, event: Any) -> None:
        """Let the later work of all lanes begin after `event`."""
        for lane in self._lanes:
            self.device.wait(lane, event)

    def _stage_locked(self, part: Part, targets: Targets, table: int) -> None:
        """Copy some layers of a batch of blocks through one half of the staging memory."""
        self._turn = 1 - self._turn
        lane, staging, places = self._lanes[self._turn], self._staging[self._turn].address, targets.places
        if self.direction == "store":
            self._launch_locked(part, table, len(places), lane, staging=staging)
        for first, count in streaks(places, self.cache.block_nbytes, targets.chunks):
            host = Pitched(int(places["address"][first]) + part.origin, self.cache.block_nbytes)
            staged = Pitched(staging + first * part.nbytes, part.nbytes)
            to, source = (host, staged) if self.direction == "store" else (staged, host)
            whole = part.nbytes == self.cache.block_nbytes  # then the rows are adjacent on both sides
            nbytes, rows = (part.nbytes * count, 1) if whole else (part.nbytes, count)
            self.device.copy_rows(to, source, nbytes, rows, lane)
        if self.direction == "load":
            self._launch_locked(part, table, len(places), lane, staging=staging)

    def _launch_locked(self, part: Part, table: int, count: int, lane: int, *, staging: int) -> None:
        if not count:
            return
        arguments = (
            np.uint64(self._runs.address + part.first * RUN.itemsize),
            np.uint32(part.runs),
            np.uint64(table),
            np.uint32(count),
            np.uint32(part.slices),
            np.uint64(part.origin),
            np.uint64(staging),
            np.uint64(part.nbytes if staging else 0),
        )
        blocks = min(self._kernel_blocks, -(-count * part.runs * part.slices // WARPS_PER_BLOCK))
        self.device.launch("gather" if self.direction == "store" else "scatter", arguments, blocks, lane)


class Transfer:
    """Copies of some chunks. For one thread at a time.

    Until the queued copies have ended, `PagedCopies` holds what the GPU uses, also if the caller drops the transfer.
    """

    def __init__(self, copies: PagedCopies, targets: Targets, bounces: Sequence[Bounce]) -> None:
        self._copies, self._targets, self._bounces = copies, targets, bounces
        self._table: Memory | None = None
        self._event: Any = None

    def queue(self, first_layer: int = 0, layers: int | None = None, *, after: Any = None, timed: bool = False) -> Any:
        """Queue the copies of some layers, by default of all. The calling thread does not wait.

        Args:
            first_layer, layers: The layers.
            after: An event after which the copies may begin, for example the end of the kernels that compute a layer.
            timed: Whether the returned event may be passed to `Device.elapsed_s`.

        Returns:
            An event at the end of the copies. For a load, the engine's stream waits for it before it reads
            these layers. For a store, see `wait`.

        Raises:
            UsageError: The cache does not have these layers.
            OSError: Work on the GPU has failed.
        """
        copies = self._copies
        part = copies.cache.part(first_layer, copies.cache.layers - first_layer if layers is None else layers)
        with copies.lock:
            if self._table is None and len(self._targets.places):
                self._table = copies.upload_locked(self._targets.places)
            table = self._table or Memory(0, 0, None)
            self._event = copies.queue_locked(part, self._targets, table, after, timed=timed)
            copies.hold_locked(self)
        return self._event

    def wait(self) -> None:
        """Wait until all queued copies have ended. Then a stored chunk's bytes are in place.

        Call this on a thread that may wait, and when all layers are queued.

        Raises:
            OSError: Work on the GPU has failed. The bytes are undefined.
        """
        self.synchronize()
        for bounce in self._bounces if self._copies.direction == "store" else ():
            for slot, pinned, nbytes in bounce.pieces:
                _copy_bytes(slot, pinned, nbytes)
        self._bounces = ()

    def synchronize(self) -> None:
        if self._event is not None:
            self._copies.device.synchronize(self._event)

    def is_done(self) -> bool:
        return self._event is not None and self._copies.device.is_done(self._event)


def _copy_bytes(to: int, source: int, nbytes: int) -> None:
    """Copy host memory. numpy releases the GIL meanwhile."""
    there, here = ((ctypes.c_ubyte * nbytes).from_address(address) for address in (to, source))
    np.copyto(np.ctypeslib.as_array(there), np.ctypeslib.as_array(here))
