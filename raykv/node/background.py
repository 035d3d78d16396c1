"""Runs the background tasks of a node."""

import logging
import threading
from collections.abc import Callable

from raykv.memory.host import give_way

log = logging.getLogger(__name__)


class BackgroundThreads:
    """The background threads of one node. They give way to the threads that serve requests.

    Attributes:
        failure: The exception that ended a task; None if there was none.
    """

    def __init__(self, node_id: str, stopping: threading.Event) -> None:
        """`stopping`: once set, tasks may end with any exception."""
        self._node_id, self._stopping = node_id, stopping
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None

    def start(self, name: str, task: Callable[[], None]) -> None:
        """Run a task on a thread of its own."""
        thread = threading.Thread(target=self._run, args=(task,), name=f"raykv-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self, task: Callable[[], None]) -> None:
        give_way()
        try:
            task()
        except BaseException as error:
            if not self._stopping.is_set():
                log.critical("node %s: a background thread died", self._node_id, exc_info=True)
                self.failure = error

    def join(self, timeout_s: float) -> None:
        """Wait for the end of each task, but no longer than `timeout_s` seconds for one."""
        for thread in self._threads:  # a task may start another one meanwhile, which comes last in this list
            thread.join(timeout_s)
