"""A GPU in host memory, for tests of the logic of `raykv.gpu`.

Streams are queues. Nothing that is queued runs until a thread waits for an event. Then the streams run in a random
order that the queues and the events allow. So a forgotten wait shows as wrong bytes. The kernels are those of
kernels.cu, compiled by g++.

Each access is checked: a kernel may use only GPU memory and pinned host memory, and no memory that was freed.
"""

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.gpu.device import WARP_THREADS, WARPS_PER_BLOCK, Memory, Pitched
from raykv.gpu.paged import PLACE, RUN


@dataclass(eq=False)
class Event:
    """An event of a stream. `at_s`: simulated time at which it happened; None if it has not."""

    at_s: float | None = None


@dataclass
class Work:
    """A queued operation. `run` does it, and returns how many simulated seconds it takes."""

    run: Callable[[], float]


class HostDevice:
    """See `raykv.gpu.device.Device`.

    Attributes:
        registered: Length of each registered part, by address.
        gpu_offset: Distance from an address of registered memory in this process to its address for the GPU. Only
            devices without kernels may have another than 0.
        lockable_nbytes: CUDA refuses to pin more than this.
        rates: Bytes a simulated second of "gather", "scatter", "copy", and of kernels that use only GPU memory: "gpu".
        now_s: Simulated time of the host. It advances when a thread has waited.
        counts: Number of calls by kind: "gather", "scatter", "copy", "synchronize".
        waiting_threads: The threads that have waited for an event.
    """

    def __init__(self, rng: random.Random, kernels: Any = None) -> None:
        self._rng, self._kernels, self._lock = rng, kernels, threading.RLock()
        self.registered: dict[int, int] = {}
        self.registering_threads: set[threading.Thread] = set()
        self.waiting_threads: set[threading.Thread] = set()
        self.gpu_offset = 0 if kernels else 1 << 44
        self.lockable_nbytes = 1 << 40
        self.rates = dict.fromkeys(["gather", "scatter", "copy", "gpu"], 1e9)
        self.now_s = 0.0
        self.counts = dict.fromkeys(["gather", "scatter", "copy", "synchronize"], 0)
        self._allocated: dict[int, int] = {}
        self._queues: dict[int, deque[tuple[Work | Event | tuple[Event], float]]] = {}
        self._clocks: dict[int, float] = {}
        self._speeds: dict[int, float] = {}

    # -- memory -----------------------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> int:
        self.registering_threads.add(threading.current_thread())
        if sum(self.registered.values()) + nbytes > self.lockable_nbytes:
            raise OSError("CUDA: out of memory")
        if address in self.registered:
            raise OSError("CUDA: the memory is already registered")
        self.registered[address] = nbytes
        return address + self.gpu_offset

    def unregister(self, address: int) -> None:
        queued = [entry for queue in self._queues.values() for entry, _ in queue]
        assert not any(isinstance(entry, Work) for entry in queued), "work is queued that may use the memory"
        del self.registered[address]

    def add(self, array: npt.NDArray[np.uint8]) -> None:
        """Let a test's array be GPU memory."""
        self._allocated[array.ctypes.data] = array.nbytes

    def allocate(self, nbytes: int) -> Memory:
        owner = np.full(nbytes + 64, 0xA5, np.uint8)
        address = -(-owner.ctypes.data // 64) * 64
        with self._lock:
            self._allocated[address] = nbytes
        weakref.finalize(owner, self._allocated.pop, address)
        return Memory(address, nbytes, owner)

    allocate_pinned = allocate

    def upload(self, table: npt.NDArray[Any], stream: int) -> Memory:
        memory, content = self.allocate(table.nbytes), table.tobytes()
        address = memory.address  # the queue must not hold the memory

        def copy() -> float:
            self._require([(address, len(content))])
            ctypes.memmove(address, content, len(content))
            return 0.0

        self._queue(stream, Work(copy))
        return memory

    def _require(self, spans: Iterable[tuple[int, int]]) -> None:
        """Check that the GPU may access these (address, length)."""
        usable = [*self.registered.items(), *self._allocated.copy().items()]
        for address, nbytes in spans:
            inside = (start <= address and address + nbytes <= start + length for start, length in usable)
            assert any(inside), f"{nbytes} bytes at {address:#x} are not memory of the GPU or pinned, or were freed"

    # -- streams ----------------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        number = len(self._queues) + 1
        self._queues[number], self._clocks[number] = deque(), 0.0
        self._speeds[number] = 10 ** self._rng.uniform(-3, 0)  # streams of very different speed are the hardest case
        return number

    def compute(self, stream: int, run: Callable[[], float]) -> None:
        """Queue work of the engine."""
        self._queue(stream, Work(run))

    def _queue(self, stream: int, work: "Work | Event | tuple[Event]") -> None:
        with self._lock:
            self._queues[stream].append((work, self.now_s))

    def record(self, stream: int, *, timed: bool = False) -> Event:
        event = Event()
        self._queue(stream, event)
        return event

    def wait(self, stream: int, event: Event) -> None:
        self._queue(stream, (event,))

    def is_done(self, event: Event) -> bool:
        with self._lock:
            for _ in range(self._rng.randrange(3)):
                self._advance()
            return event.at_s is not None

    def synchronize(self, event: Event) -> None:
        self.waiting_threads.add(threading.current_thread())
        with self._lock:
            self.counts["synchronize"] += 1
            while event.at_s is None:
                assert self._advance(), "the event never happens"
            self.now_s = max(self.now_s, event.at_s)

    def run_all(self) -> None:
        """Run all queued work."""
        with self._lock:
            while self._advance():
                pass

    def _advance(self) -> bool:
        """Run the first entry of a random stream, if there is one that need not wait."""
        heads = [(stream, queue) for stream, queue in self._queues.items() if queue]
        ready = [(s, q) for s, q in heads if not isinstance(q[0][0], tuple) or q[0][0][0].at_s is not None]
        if not ready:
            return False
        stream, queue = self._rng.choices(ready, [self._speeds[stream] for stream, _ in ready])[0]
        head, queued_s = queue.popleft()
        self._clocks[stream] = max(self._clocks[stream], queued_s)
        if isinstance(head, Event):
            head.at_s = self._clocks[stream]
        elif isinstance(head, tuple):
            self._clocks[stream] = max(self._clocks[stream], head[0].at_s or 0.0)
        else:
            self._clocks[stream] += head.run()
        return True

    def elapsed_s(self, begin: Event, end: Event) -> float:
        assert begin.at_s is not None
        assert end.at_s is not None
        return end.at_s - begin.at_s

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy_rows(self, to: Pitched, source: Pitched, nbytes: int, rows: int, stream: int) -> None:
        assert rows == 1 or min(to.pitch, source.pitch) >= nbytes
        self.counts["copy"] += 1

        def copy() -> float:
            for row in range(rows):
                there, here = to.address + row * to.pitch, source.address + row * source.pitch
                self._require([(there, nbytes), (here, nbytes)])
                ctypes.memmove(there, here, nbytes)
            return nbytes * rows / self.rates["copy"]

        self._queue(stream, Work(copy))

    def launch(self, kernel: str, arguments: Sequence[np.generic], blocks: int, stream: int) -> None:
        assert [type(each) for each in arguments] == [
            np.uint64, np.uint32, np.uint64, np.uint32, np.uint32, np.uint64, np.uint64, np.uint64,
        ]  # fmt: skip
        assert blocks > 0
        runs, run_count, places, place_count, _, origin, staging, pitch = (int(each) for each in arguments)
        self.counts[kernel] += 1

        def run() -> float:
            self._require([(runs, run_count * RUN.itemsize), (places, place_count * PLACE.itemsize)])
            run_table, place_table = _table(runs, run_count, RUN), _table(places, place_count, PLACE)
            part = int(run_table["nbytes"].sum())
            targets = [int(address) + origin for address in place_table["address"]]
            if pitch:
                targets = [staging + pitch * index for index in range(place_count)]
            self._require((target, part) for target in targets)
            self._require(
                (int(run["address"]) + int(place["block"]) * int(run["distance"]), int(run["nbytes"]))
                for place in place_table
                for run in run_table
            )
            self._kernels(kernel == "gather", blocks, WARPS_PER_BLOCK * WARP_THREADS, *map(int, arguments))
            return place_count * part / self.rates["gpu" if pitch else kernel]

        self._queue(stream, Work(run))


def _table(address: int, count: int, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)
