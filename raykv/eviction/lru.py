"""Least recently used."""

import numpy as np
import numpy.typing as npt

from raykv.memory.table import Columns
from raykv.types import Rows


class LRU:
    """The chunk that was not read for longest goes first."""

    leaf_first = False

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint32]:
        return columns.accessed[rows]
