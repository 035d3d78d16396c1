"""The last entries of requests' trails, which routers and engines on this host have sent to the node."""

from collections import deque
from typing import Final

from raykv.protocol.request_trail import MAX_ENTRIES, TrailEntry

ENTRIES: Final = 4096
"""A node has at most this many entries, of at most 1 024 characters each. Newer entries replace the oldest."""


class RequestTrails:
    """The entries of all requests, in the order of their arrival. Thread-safe."""

    def __init__(self) -> None:
        self._entries: deque[TrailEntry] = deque(maxlen=ENTRIES)

    def add(self, entries: list[TrailEntry]) -> None:
        self._entries.extend(entries)

    def find(self, text: str) -> list[TrailEntry]:
        """Return the newest entries of the requests whose id contains `text`."""
        return [each for each in self._entries.copy() if text in each.request_id][-MAX_ENTRIES:]
