"""What clients report while `raykv record` runs, until somebody fetches it."""

import threading
from collections import deque
from typing import Final

from raykv.protocol.trace_requests import TracedRequest, unpack

MAX_BUFFER_KEYS: Final = 1 << 21
"""Keys of requests that nobody has fetched from a node yet; beyond that requests are left out, and counted."""


class TraceBuffer:
    """A node's part: what clients told, until somebody fetches it. Thread-safe.

    Attributes:
        left_out: Requests that there was no room for.
    """

    def __init__(self) -> None:
        self._requests: deque[TracedRequest] = deque()
        self._keys = self.left_out = 0
        self._lock = threading.Lock()

    def add(self, raw: bytes) -> None:
        """What a client told.

        Raises:
            UsageError: It is damaged. What comes before the damage is kept.
        """
        for each in unpack(raw):
            with self._lock:
                weight = max(1, len(each.keys))
                if self._keys + weight > MAX_BUFFER_KEYS:
                    self.left_out += 1
                    continue
                self._requests.append(each)
                self._keys += weight

    def take(self, most_keys: int = MAX_BUFFER_KEYS) -> tuple[list[TracedRequest], int]:
        """All of it, or as much as has so many keys, and how many were left out since the last time."""
        requests: list[TracedRequest] = []
        with self._lock:
            taken, left_out = 0, self.left_out
            while self._requests and (not taken or taken + max(1, len(self._requests[0].keys)) <= most_keys):
                each = self._requests.popleft()
                requests.append(each)
                taken += max(1, len(each.keys))
            self._keys -= taken
            self.left_out = 0
        return requests, left_out

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._requests)
