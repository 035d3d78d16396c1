"""Threads that wait for a disk, and the thread that calls a tier's callbacks."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from raykv.errors import RayKVError
from raykv.memory.host import give_way

log = logging.getLogger(__name__)


class IoThreads:
    """Threads, each of which runs tasks one after another. `longest_s` shows whether a task takes too long.

    The threads use the scheduling policy SCHED_BATCH. Because of it, a thread that wakes up after I/O does not preempt
    threads that serve reads from memory.
    """

    def __init__(
        self,
        count: int,
        name: str,
        next_task: Callable[[int], Callable[[], None] | None],
        *,
        failed: Callable[[Exception], None],
    ) -> None:
        """Start the threads.

        Args:
            next_task: Takes the number of a thread, waits, and returns that thread's next task. None ends the thread.
            failed: Is called with any exception that a task raises, and should turn the tier off. The thread continues.
        """
        self._next_task, self._failed = next_task, failed
        self._since: list[float | None] = [None] * count
        self.threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def longest_s(self) -> float:
        """Age of the oldest running task; 0 if none runs."""
        now_s = time.monotonic()
        return max((now_s - since for since in self._since if since is not None), default=0.0)

    def busy(self) -> int:
        return sum(since is not None for since in self._since)

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for all threads to end. Returns whether all have ended."""
        until_s = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _work(self, number: int) -> None:
        give_way()
        while (task := self._next_task(number)) is not None:
            self._since[number] = time.monotonic()
            try:
                task()
            except Exception as error:
                if not isinstance(error, (OSError, RayKVError)):
                    log.exception("an unforeseen error in a tier's input or output")
                self._failed(error)
            del task
            self._since[number] = None


class Callbacks:
    """A thread that calls callbacks. I/O threads must not do this, because callbacks may acquire locks and be slow."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: Sequence[threading.Thread] = ()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        self._queue.put(call)

    def close(self, threads: Sequence[threading.Thread], timeout_s: float) -> None:
        """End the thread once all `threads` have ended and all callbacks were called. Waits at most `timeout_s`."""
        self._threads = threads
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        give_way()
        while (call := self._queue.get()) is not None:
            self._call(call)
            del call
        for thread in self._threads:
            thread.join()
        while not self._queue.empty():
            self._call(self._queue.get())

    def _call(self, call: Callable[[], None] | None) -> None:
        try:
            if call is not None:
                call()
        except Exception:  # an error of one callback must not prevent the others
            log.exception("a tier's caller failed in its callback")
