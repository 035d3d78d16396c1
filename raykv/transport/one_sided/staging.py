"""Registered memory of a process: stages, through which bytes go to and from buffers that are not registered."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from raykv.errors import CapacityError
from raykv.memory.arena import SharedMemory
from raykv.transport.one_sided.base import Registrar, Registration

STAGE_NBYTES: Final = 32 << 20
"""Size of a stage. Larger chunks go over TCP."""
ALIGNMENT_NBYTES: Final = 64
"""Chunks in a stage begin at multiples of this."""
MAX_STAGES: Final = 8
"""One process has at most this many stages. Further reads wait for a free one; further writes go over TCP."""
PARKED_POLL_S: Final = 0.01


class Stage:
    """Registered memory. One transfer uses it at a time.

    Attributes:
        view: The memory.
        address: Its address.
        keys: For each device the local key of the registration.
    """

    def __init__(self, devices: Sequence[Registrar]) -> None:
        """Take memory and register it. Raises CapacityError if there is no memory, or if a device refuses."""
        memory = self._memory = SharedMemory.create(None, STAGE_NBYTES)  # a fork does not move pages of shared memory
        if not memory.populate(0, STAGE_NBYTES):
            raise CapacityError(f"no memory for {STAGE_NBYTES:,} bytes to read or write one-sidedly")
        self.view, self.address = memory.view, memory.address
        self._registrations: list[Registration] = []
        for device in devices:
            self._registrations.append(device.register(self.address, STAGE_NBYTES, remote=0))
        self.keys = tuple(int(registration.lkey) for registration in self._registrations)

    def close(self) -> None:
        for registration in self._registrations:
            registration.close()
        self._memory.close()


class Stages:
    """The stages of one process. Thread-safe."""

    def __init__(self, devices: Sequence[Registrar]) -> None:
        self._devices = devices
        self._free: list[Stage] = []
        self._parked: list[tuple[Stage, Callable[[], bool]]] = []  # bytes may still arrive in these
        self._made = 0
        self._changed = threading.Condition()

    def take(self, *, deadline_s: float) -> Stage | None:
        """Take a stage. If all are in use, wait. Returns None at the deadline.

        Raises:
            CapacityError: A device refuses to register another stage, and there is no other.
        """
        with self._changed:
            self._unpark()
            while not self._free:
                if self._made < MAX_STAGES:
                    self._made += 1
                    break
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, PARKED_POLL_S) if self._parked else left_s)
                self._unpark()
            else:
                return self._free.pop()
        try:
            return Stage(self._devices)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise

    def give(self, stage: Stage, idle: Callable[[], bool] | None = None) -> None:
        """Give a stage back. It is used again when `idle` says that no byte can arrive in it; None: that is so now."""
        with self._changed:
            if idle is None:
                self._free.append(stage)
            else:
                self._parked.append((stage, idle))
            self._unpark()
            self._changed.notify()

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for stage, idle in parked:
            if idle():
                self._free.append(stage)
            else:
                self._parked.append((stage, idle))

    def close(self) -> None:
        """Free the stages that are not in use, and in which nothing can arrive any more."""
        with self._changed:
            self._unpark()
            free, self._free = self._free, []
            self._made -= len(free)
        for stage in free:
            stage.close()


def aligned(nbytes: int) -> int:
    """Return how many bytes of a stage a chunk takes."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
