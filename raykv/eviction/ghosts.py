"""What policies remember: a value a row, and the keys of chunks that went."""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


def by_row(held: npt.NDArray[Scalar], rows: int) -> npt.NDArray[Scalar]:
    """The array, or a longer one with zeros behind, so that there is an entry for each of `rows`."""
    if len(held) >= rows:
        return held
    longer = np.zeros(rows, held.dtype)
    longer[: len(held)] = held
    return longer


class Ghosts:
    """Keys of chunks that went, oldest first, up to a bound."""

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[int], limit: int) -> None:
        """Note keys as the newest. The oldest beyond the limit are forgotten."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        self.keep(limit)

    def keep(self, limit: int) -> None:
        """Forget the oldest beyond the limit."""
        while len(self._keys) > max(0, limit):
            del self._keys[next(iter(self._keys))]

    def take(self, key: int) -> bool:
        """Whether the key was noted. It is forgotten."""
        return self._keys.pop(key, self) is None
