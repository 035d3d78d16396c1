"""Least recently used."""

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy
from raykv.memory.layout import Columns
from raykv.types import Rows


class LRU(Policy):
    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint32]:
        return columns.accessed[rows]
