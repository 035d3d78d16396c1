"""Least frequently used."""

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy
from raykv.memory.layout import Columns
from raykv.types import Rows


class LFU(Policy):
    """Evict the chunk with the fewest reads; among equals, the one whose last read is oldest."""

    leaf_first = True

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint64]:
        reads: npt.NDArray[np.uint64] = columns.frequency[rows].astype(np.uint64) << np.uint64(32)
        return reads | columns.accessed[rows]
