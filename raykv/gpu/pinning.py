"""Pins this process's mapping of the arena for CUDA, extent by extent, in the background.

A GPU reads and writes pinned memory at the full rate of its link. Pinning takes milliseconds for an extent, so a whole
arena takes seconds to minutes. Meanwhile everything works: what is not pinned yet passes through other pinned memory
(`raykv.gpu.copies`).

Only populated extents are pinned. Pinning another one would take real memory without the node, which watches the
container's memory limit. The chunk table shows which extents are populated. A populated extent never loses its memory.
"""

import logging
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.gpu.device import Device
from raykv.memory.arena import SharedMemory

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""When all populated extents are pinned, the thread looks for new ones at this interval."""
RETRY_POLLS: Final = 30
"""After a refusal of CUDA, the thread tries again after this many polls."""


class Pinning:
    """The pinned extents of one mapped arena. One thread calls `step`; `gpu_address` is for all threads.

    Attributes:
        refused: Why CUDA refused to pin the last extent. Empty if it did not.
    """

    def __init__(
        self, device: Device, arena: SharedMemory, extent_slots: npt.NDArray[np.uint32], extent_nbytes: int
    ) -> None:
        """Pin nothing yet.

        Args:
            arena: The mapping to pin. It stays mapped until `close`, even if the arena is closed before.
            extent_slots: The slot sizes in the chunk table: `Table.extent_slots`.
            extent_nbytes: Size of an extent.
        """
        self._device, self._address = device, arena.address
        self._mapped: npt.NDArray[np.uint8] | None = np.frombuffer(arena.view, np.uint8)
        self._extent_slots, self._extent_nbytes = extent_slots, extent_nbytes
        self._gpu_addresses = np.zeros(len(extent_slots), np.uint64)  # 0: the extent is not pinned
        self.refused = ""

    @property
    def pinned_nbytes(self) -> int:
        return int(np.count_nonzero(self._gpu_addresses)) * self._extent_nbytes

    def step(self) -> bool:
        """Pin one more populated extent.

        Returns:
            True: the caller should call again at once. False: all populated extents are pinned, or CUDA refused.
        """
        waiting = np.flatnonzero((self._gpu_addresses == 0) & (self._extent_slots != 0))
        if self._mapped is None or not waiting.size:
            return False
        extent = int(waiting[0])
        address = self._address + extent * self._extent_nbytes
        try:
            self._gpu_addresses[extent] = self._device.register(address, self._extent_nbytes)
        except OSError as error:
            if not self.refused:
                log.warning("%d bytes of the arena are pinned, and no more for now: %s", self.pinned_nbytes, error)
            self.refused = str(error)
            return False
        self.refused = ""
        return True

    def gpu_address(self, address: int, nbytes: int) -> int | None:
        """Return the GPU's address of memory of this process. None: it is not pinned, or not within one extent."""
        extent, start = divmod(address - self._address, self._extent_nbytes)
        if not 0 <= extent < len(self._gpu_addresses) or start + nbytes > self._extent_nbytes:
            return None
        first = int(self._gpu_addresses[extent])
        return first + start if first else None

    def close(self) -> None:
        """Unpin everything, and give the mapping up. No copy may be under way, and no thread in `step`."""
        for extent in np.flatnonzero(self._gpu_addresses).tolist():
            self._gpu_addresses[extent] = 0
            self._device.unregister(self._address + extent * self._extent_nbytes)
        self._mapped = None


class PinningThread:
    """Calls `Pinning.step` in the background, from the constructor to `close`."""

    def __init__(self, pinning: Pinning, *, poll_s: float = POLL_S) -> None:
        self._pinning, self._poll_s, self._stopped = pinning, poll_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="raykv-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if not self._pinning.step():
                self._stopped.wait(self._poll_s * (RETRY_POLLS if self._pinning.refused else 1))

    def close(self) -> None:
        """End the thread, then unpin everything. No copy may be under way."""
        self._stopped.set()
        self._thread.join()
        self._pinning.close()
