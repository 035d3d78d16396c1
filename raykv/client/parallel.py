"""Calls to several nodes at the same time, with one common deadline."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, TypeVar

from raykv.errors import PeerUnavailable, RayKVError
from raykv.transport.forking import drop_after_fork

K = TypeVar("K")
T = TypeVar("T")

MAX_PARALLEL: Final = 16
"""Most nodes that one client asks at the same time."""


class Parallel:
    """Worker threads of one client, started at first use. A forked child starts its own."""

    def __init__(self) -> None:
        self._closed = False
        self.after_fork()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Start without threads: the parent's threads do not exist in the child."""
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._background: ThreadPoolExecutor | None = None  # a separate pool, because its tasks wait for workers

    def run(self, work: Mapping[K, Callable[[], T]], deadline_s: float) -> dict[K, T | RayKVError]:
        """Run all tasks, and wait for them. A task's RayKVError becomes its result.

        Args:
            deadline_s: Each task must end by then by itself. A task that is still queued then does not run.
        """
        if len(work) == 1:
            ((name, only),) = work.items()
            return {name: _caught(only)}
        boxes: dict[K, list[Callable[[], T]]] = {name: [task] for name, task in work.items()}
        futures: dict[K, Future[T | RayKVError]] = {}
        done: dict[K, T | RayKVError] = {}
        try:
            for name, box in boxes.items():
                try:
                    futures[name] = self.submit(partial(_unpacked, box))
                except RuntimeError:  # no thread can be started
                    if self._closed:
                        raise
                    done[name] = _caught(box.pop())  # a thread that finds the box empty does nothing
            return done | {name: _result(future, boxes[name], deadline_s) for name, future in futures.items()}
        except BaseException:  # a bug or an interrupt: no task may write to the caller's buffers afterwards
            for box in boxes.values():
                box.clear()
            wait([future for future in futures.values() if not future.cancel()])
            raise

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Run a task in a worker thread.

        Raises:
            RuntimeError: No thread can be started, or this object is closed.
        """
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="raykv-client")
            return self._workers.submit(task)

    def in_background(self, task: Callable[[], object]) -> None:
        """Run a task without waiting for it. Does nothing after `close`."""
        try:
            with self._lock:
                if self._background is None:
                    self._background = ThreadPoolExecutor(1, thread_name_prefix="raykv-background")
                self._background.submit(_caught, task)
        except RuntimeError:
            pass

    def close(self) -> None:
        """Wait for running tasks, and end the threads."""
        self._closed = True
        for executor in (self._background, self._workers):
            if executor is not None:
                executor.shutdown()


def _caught(task: Callable[[], T]) -> T | RayKVError:
    try:
        return task()
    except RayKVError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # the traceback would keep the caller's buffers in memory


def _unpacked(box: list[Callable[[], T]]) -> T | RayKVError:
    return _caught(box.pop()) if box else PeerUnavailable("not asked any more")


def _result(future: "Future[T | RayKVError]", box: list[Any], deadline_s: float) -> T | RayKVError:
    try:
        return future.result(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        if not future.cancel():
            return future.result()  # the task is running, and may be writing to the caller's buffers
        box.clear()  # frees the task now; its queue entry stays until a thread removes it
        return PeerUnavailable(f"not asked in time: calls to {MAX_PARALLEL} other nodes were waiting")
