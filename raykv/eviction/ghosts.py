"""State of policies: arrays with one value per row, and sets of keys of evicted chunks (ghosts)."""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from raykv.memory.layout import Columns

Scalar = TypeVar("Scalar", bound=np.generic)


def by_row(held: npt.NDArray[Scalar], columns: Columns) -> npt.NDArray[Scalar]:
    """Return `held`. If `held` is still empty, return zeros for all rows of the table."""
    return held if held.size else np.zeros(len(columns.frequency), held.dtype)


class Ghosts:
    """The keys of chunks that were evicted recently. The oldest keys are dropped first."""

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[int], limit: int) -> None:
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > max(0, limit):
            del self._keys[next(iter(self._keys))]

    def remove(self, key: int) -> bool:
        return self._keys.pop(key, self) is None
