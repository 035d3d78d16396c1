"""Decides of which chunks a reader puts a copy into its own host's memory.

The first chunk of a hot prompt is read by every host of the cluster, again and again. Each such read asks the chunk's
owner first. So a host that reads the first chunk of a `get` from other hosts COPY_READS times within WINDOW_S stores a
copy. All engines of the host then find it without a call. The copy has the lowest priority, and expires after
COPY_TTL_S.
"""

from collections import OrderedDict
from typing import Final

from raykv.config import HIGHEST_PRIORITY
from raykv.types import Hints

COPY_READS: Final = 4
WINDOW_S: Final = 10.0
COPY_TTL_S: Final = 60.0
COPY_S: Final = 0.05
"""A `get` spends at most this long on storing a copy."""
COPY_HINTS: Final = Hints(COPY_TTL_S, -HIGHEST_PRIORITY)
MAX_COUNTED: Final = 256
"""The first chunks that were read most recently are counted, at most this many."""


class RootCopies:
    """Counts reads of first chunks from other hosts. Not thread-safe: concurrent calls may lose a count."""

    def __init__(self) -> None:
        self._reads: OrderedDict[bytes, list[float]] = OrderedDict()

    def count(self, key: bytes, *, now_s: float) -> bool:
        """Count a read of this chunk from another host. Return whether to store a copy now."""
        recent = [at for at in self._reads.pop(key, []) if now_s - at < WINDOW_S]
        recent.append(now_s)
        if len(recent) >= COPY_READS:
            return True
        self._reads[key] = recent
        if len(self._reads) > MAX_COUNTED:
            self._reads.popitem(last=False)
        return False
