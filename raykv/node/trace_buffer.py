"""A buffer for the requests that clients report while a trace is recorded."""

import threading
from collections import deque
from typing import Final

from raykv.protocol.trace_requests import TracedRequest, unpack

MAX_BUFFER_KEYS: Final = 1 << 21
"""The most keys in the buffer. Requests beyond this limit are dropped and counted."""


class TraceBuffer:
    """Recorded requests of this node's clients, oldest first. Thread-safe.

    Attributes:
        left_out: Number of requests that did not fit since the last `drain`.
    """

    def __init__(self) -> None:
        self._requests: deque[TracedRequest] = deque()
        self._keys = self.left_out = 0
        self._lock = threading.Lock()

    def add(self, raw: bytes) -> None:
        """Add requests, encoded by `trace_requests.pack`.

        Raises:
            UsageError: The bytes are damaged. The requests before the damaged part were added.
        """
        for each in unpack(raw):
            with self._lock:
                weight = max(1, len(each.keys))
                if self._keys + weight > MAX_BUFFER_KEYS:
                    self.left_out += 1
                    continue
                self._requests.append(each)
                self._keys += weight

    def drain(self, max_keys: int = MAX_BUFFER_KEYS) -> tuple[list[TracedRequest], int]:
        """Remove the oldest requests, up to `max_keys` keys but at least one request. Returns them and `left_out`."""
        requests: list[TracedRequest] = []
        with self._lock:
            drained, left_out = 0, self.left_out
            while self._requests and (not drained or drained + max(1, len(self._requests[0].keys)) <= max_keys):
                each = self._requests.popleft()
                requests.append(each)
                drained += max(1, len(each.keys))
            self._keys -= drained
            self.left_out = 0
        return requests, left_out

    def __bool__(self) -> bool:
        """Return whether the buffer holds requests."""
        return bool(self._requests)
