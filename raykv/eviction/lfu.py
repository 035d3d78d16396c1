"""Least frequently used."""

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy
from raykv.memory.table import Columns
from raykv.types import Rows


class LFU(Policy):
    """The chunk with the fewest reads goes first; among equals, the one that was not read for longest."""

    leaf_first = True

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint64]:
        reads: npt.NDArray[np.uint64] = columns.frequency[rows].astype(np.uint64) << np.uint64(32)
        return reads | columns.accessed[rows]
