"""How much of this node each quota group uses."""

import threading
from collections.abc import Callable
from typing import Final

MAX_GROUPS: Final = 4096
"""Quota groups that are counted. The oldest ones that this node no longer knows make room for others."""


class GroupTraffic:
    """Requests and bytes served, by the digest of the quota group. Thread-safe.

    Reads from shared memory are not counted: the node does not see them.
    """

    def __init__(self, is_known: Callable[[bytes], bool]) -> None:
        """Args: is_known: Whether this node has such a quota group; others are not counted."""
        self._is_known = is_known
        self._counts: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, group: bytes, nbytes: int) -> None:
        """Count a request, and the bytes of chunks that its answer brings."""
        with self._lock:
            counts = self._counts.get(group)
            if counts is None:
                if not self._is_known(group):
                    return
                if len(self._counts) >= MAX_GROUPS:
                    self._counts = {each: some for each, some in self._counts.items() if self._is_known(each)}
                counts = self._counts[group] = [0, 0]
            counts[0] += 1
            counts[1] += nbytes

    def stats(self, group: bytes) -> dict[str, int]:
        """Counts of one quota group, as plain values."""
        with self._lock:
            requests, nbytes = self._counts.get(group, (0, 0))
        return {"requests": requests, "served_nbytes": nbytes}
