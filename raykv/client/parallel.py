"""Runs calls to several nodes at the same time, in worker threads."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

from raykv.errors import RayKVError
from raykv.transport.forking import drop_after_fork

K = TypeVar("K")
T = TypeVar("T")

MAX_PARALLEL: Final = 16
"""Largest number of worker threads of one client. Further tasks wait for a thread."""


class Parallel:
    """Worker threads of one client, started at first use. A forked child starts its own threads."""

    def __init__(self) -> None:
        self._closed = False
        self.after_fork()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Begin without threads, because the parent's threads do not exist in the child."""
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None

    def run(self, work: Mapping[K, Callable[[], T]]) -> dict[K, T | RayKVError]:
        """Run all tasks, and wait for them. If a task raises a RayKVError, the error is the task's result.

        The calling thread runs tasks itself. So the work is done even if all worker threads are busy with other calls.
        Each task must have its own deadline, because this method waits without a time limit.
        """
        waiting = deque(work.items())
        results: dict[K, T | RayKVError] = {}

        def run_waiting() -> None:
            while waiting:
                try:
                    name, task = waiting.popleft()
                except IndexError:  # another thread took the last task
                    return
                results[name] = _caught(task)

        helpers: list[Future[None]] = []
        try:
            while len(helpers) < len(work) - 1 and (helper := self._submit(run_waiting)) is not None:
                helpers.append(helper)
            run_waiting()
        finally:  # even after a bug or an interrupt, no task may write to the caller's buffers after this call
            waiting.clear()
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()  # raises only after a bug: each RayKVError is in `results`
        return {name: results[name] for name in work}

    def in_background(self, task: Callable[[], object]) -> None:
        """Start a task, and ignore its RayKVError. Does nothing after `close`, or if no thread can be started."""
        self._submit(lambda: _caught(task))

    def _submit(self, task: Callable[[], T]) -> "Future[T] | None":
        """Give a task to a worker thread. Returns None if no thread can be started, or this object is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._workers is None:
                self._workers = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="raykv-client")
            try:
                return self._workers.submit(task)
            except RuntimeError:
                return None

    def close(self) -> None:
        """Wait for all submitted tasks, and end the threads."""
        self._closed = True
        if self._workers is not None:
            self._workers.shutdown()


def _caught(task: Callable[[], T]) -> T | RayKVError:
    try:
        return task()
    except RayKVError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # the traceback would keep the caller's buffers in memory
