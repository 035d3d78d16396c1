"""Registered memory of a process: stages, through which bytes go to and from buffers that are not registered."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from raykv.errors import CapacityError
from raykv.memory.arena import SharedMemory
from raykv.transport.rdma.device import Device

STAGE_NBYTES: Final = 32 << 20
"""Size of a stage. Larger chunks go over TCP."""
ALIGNMENT_NBYTES: Final = 64
"""Chunks in a stage begin at multiples of this."""
MAX_STAGES: Final = 8
"""One process has at most this many stages. Further reads wait for a free one; further writes go over TCP."""


class Stage:
    """Registered memory. One transfer uses it at a time.

    Attributes:
        view: The memory.
        address: Its address.
        keys: For each device the local key of the registration.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        """Take memory and register it. Raises CapacityError if there is no memory, or if a device refuses."""
        memory = self._memory = SharedMemory.create(None, STAGE_NBYTES)  # a fork does not move pages of shared memory
        if not memory.populate(0, STAGE_NBYTES):
            raise CapacityError(f"no memory for {STAGE_NBYTES:,} bytes to use RDMA")
        self.view, self.address = memory.view, memory.address
        self._registrations: list[Any] = []
        for device in devices:
            self._registrations.append(device.register(self.address, STAGE_NBYTES, remote=0))
        self.keys = tuple(int(registration.lkey) for registration in self._registrations)

    def close(self) -> None:
        for registration in self._registrations:
            registration.close()
        self._memory.close()


class Stages:
    """The stages of one process. Thread-safe."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._free: list[Stage] = []
        self._made = 0
        self._changed = threading.Condition()

    def take(self, *, deadline_s: float) -> Stage | None:
        """Take a stage. If all are in use, wait. Returns None at the deadline.

        Raises:
            CapacityError: A device refuses to register another stage, and there is no other.
        """
        with self._changed:
            while not self._free:
                if self._made < MAX_STAGES:
                    self._made += 1
                    break
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    return None
            else:
                return self._free.pop()
        try:
            return Stage(self._devices)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise

    def give(self, stage: Stage) -> None:
        """Give a stage back. No device may still use it."""
        with self._changed:
            self._free.append(stage)
            self._changed.notify()

    def close(self) -> None:
        """Free the stages that are not in use."""
        with self._changed:
            free, self._free = self._free, []
            self._made -= len(free)
        for stage in free:
            stage.close()


def aligned(nbytes: int) -> int:
    """Return how many bytes of a stage a chunk takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
