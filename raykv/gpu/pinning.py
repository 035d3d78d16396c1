"""Pins the arena for CUDA, extent by extent, in the background.

Copies to and from pinned memory run at the speed of the link, and kernels can address this memory. Copies of other
memory pass through a small buffer of the driver, and are several times slower. Pinning some gigabytes takes a second.
So the first use of an extent only requests that it is pinned, and does not wait for it.

Only extents with a lent slot or a chunk are used, and these have real memory. So pinning never takes memory.
"""

import logging
import threading
import weakref
from collections import deque

from raykv.errors import LostError
from raykv.gpu.device import Device
from raykv.memory.arena import SharedMemory

log = logging.getLogger(__name__)


class Pinning:
    """The pinned extents of an arena that this process has mapped. Thread-safe.

    If the node gets a new arena, make a new object, and drop the old one. When no copy refers to the old one any more,
    the old arena is unpinned and unmapped.

    Attributes:
        arena: The arena.
        refused: Why CUDA does not pin the arena. After a refusal, nothing more is tried. Empty: no refusal.
    """

    def __init__(self, device: Device, arena: SharedMemory, extent_nbytes: int) -> None:
        self.arena, self.refused = arena, ""
        self._device, self._extent_nbytes = device, extent_nbytes
        self._lock = threading.Lock()
        self._wanted, self._requested = deque[int](), set[int]()
        self._pinned: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        mapped = memoryview(arena.view)  # `SharedMemory.close` leaves the memory mapped while this view exists
        self._unpin = weakref.finalize(self, _unpin_all, device, self._pinned, mapped)

    def covers(self, address: int, nbytes: int) -> bool:
        """Return whether some memory of this process lies in pinned extents. Request missing extents. Never waits.

        Memory outside the arena is not covered.
        """
        start = address - self.arena.address
        if start < 0 or start + nbytes > self.arena.nbytes:
            return False
        extents = range(start // self._extent_nbytes, (start + max(nbytes, 1) - 1) // self._extent_nbytes + 1)
        missing = [extent for extent in extents if extent not in self._pinned]
        if missing:
            self._request(missing)
        return not missing

    def wait(self, timeout_s: float) -> bool:
        """Wait until all requested extents are pinned or refused. Returns False after `timeout_s`."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Unpin the arena. No copy may use it any more."""
        with self._lock:
            self.refused = self.refused or "closed"
            self._wanted.clear()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._unpin()

    def _request(self, extents: list[int]) -> None:
        with self._lock:
            new = [extent for extent in extents if extent not in self._requested]
            if self.refused or not new:
                return
            self._requested.update(new)
            self._wanted.extend(new)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="raykv-pin", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        """Pin extents until none is wanted. The thread then ends, so that it does not hold this object."""
        self._device.use()
        while (extent := self._next()) is not None:
            start = extent * self._extent_nbytes
            address = self.arena.address + start
            try:
                self._device.register(address, min(self._extent_nbytes, self.arena.nbytes - start))
            except LostError as error:
                with self._lock:
                    self.refused = str(error)
                    self._wanted.clear()
                log.warning("the arena is not pinned for the GPU, so copies are slower: %s", error)
            else:
                self._pinned[extent] = address

    def _next(self) -> int | None:
        with self._lock:
            if self._wanted:
                return self._wanted.popleft()
            self._thread = None
            return None


def _unpin_all(device: Device, pinned: dict[int, int], mapped: memoryview) -> None:
    device.use()
    while pinned:
        _, address = pinned.popitem()
        try:
            device.unregister(address)
        except LostError as error:  # for example, the process ends and CUDA is shut down already
            log.info("an extent was not unpinned: %s", error)
    mapped.release()


class ArenaPinning:
    """The pinning of the arena that this process uses now. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._current: Pinning | None = None

    def of(self, arena: SharedMemory, extent_nbytes: int) -> Pinning:
        """Return the pinning of an arena. If another arena was used before, it is unpinned after its last copy."""
        with self._lock:
            if self._current is None or self._current.arena is not arena:
                self._current = Pinning(self._device, arena, extent_nbytes)
            return self._current
