"""First in, first out."""

import numpy as np
import numpy.typing as npt

from raykv.memory.table import Columns
from raykv.types import Rows


class FIFO:
    """The chunk that was stored first goes first, read or not."""

    leaf_first = False

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint32]:
        return columns.inserted[rows]
