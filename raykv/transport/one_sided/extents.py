"""Registers the extents of a node's arena in the background, after they got real memory."""

import threading
import time
from collections import deque
from typing import Final

REST_SHARE: Final = 2.0
"""After each registration the thread rests for this many times as long, because a registration may hold the GIL."""


class ExtentQueue:
    """The extents that wait for their registration. Subclasses register them. Thread-safe.

    Attributes:
        refused: Why memory could not be registered; empty if all was. Nothing is registered after that.
    """

    def __init__(self, extent_nbytes: int) -> None:
        self.refused = ""
        self._extent_nbytes = extent_nbytes
        self._waiting: deque[int] = deque()
        self._due = threading.Event()

    def add(self, offset: int, nbytes: int) -> None:
        """Register a part of the arena later: whole extents that have real memory. Returns at once."""
        first, end = offset // self._extent_nbytes, (offset + nbytes) // self._extent_nbytes
        self._waiting.extend(range(first, end))
        self._due.set()

    def run(self, stopping: threading.Event) -> None:
        """Register what was added, until `stopping` is set and `wake` was called."""
        while not stopping.is_set():
            self._due.wait()
            self._due.clear()
            while self._waiting and not self.refused and not stopping.is_set():
                began_s = time.perf_counter()
                self._register(self._waiting.popleft())
                stopping.wait(REST_SHARE * (time.perf_counter() - began_s))

    def wake(self) -> None:
        """Let `run` look at its `stopping` event."""
        self._due.set()

    def _register(self, extent: int) -> None:
        """Register one extent. If that fails, set `refused`."""
        raise NotImplementedError
