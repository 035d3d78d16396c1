"""Earliest expiry first."""

from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy
from raykv.memory.layout import Columns
from raykv.types import Rows

_NEVER: Final = np.uint64(np.iinfo(np.uint32).max)


class TTL(Policy):
    """Evict the chunk that expires first; LRU among chunks that expire together or never."""

    leaf_first = True

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint64]:
        expires = columns.expires[rows].astype(np.uint64)
        ends: npt.NDArray[np.uint64] = np.where(expires == 0, _NEVER, expires) << np.uint64(32)
        return ends | columns.accessed[rows]
