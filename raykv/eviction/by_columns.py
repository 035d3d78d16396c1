"""Policies whose scores consist of one or two columns."""

from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import Policy
from raykv.memory.layout import Columns
from raykv.types import Rows

_NEVER: Final = np.uint64(np.iinfo(np.uint32).max)


class FIFO(Policy):
    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint32]:
        return columns.inserted[rows]


class LRU(Policy):
    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint32]:
        return columns.accessed[rows]


class LeafLRU(LRU):
    """LRU that evicts a chunk only after all chunks that follow it in a chain.

    Source: SGLang's RadixAttention (Zheng et al., 2024) evicts leaves by recency.
    """

    leaf_first = True


class LFU(Policy):
    """Evict the chunk with the fewest reads; LRU among chunks with equally many reads."""

    leaf_first = True

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint64]:
        reads: npt.NDArray[np.uint64] = columns.frequency[rows].astype(np.uint64) << np.uint64(32)
        return reads | columns.accessed[rows]


class TTL(Policy):
    """Evict the chunk that expires first; LRU among chunks that expire together or never."""

    leaf_first = True

    def score(self, columns: Columns, rows: Rows, now: int) -> npt.NDArray[np.uint64]:
        expires = columns.expires[rows].astype(np.uint64)
        ends: npt.NDArray[np.uint64] = np.where(expires == 0, _NEVER, expires) << np.uint64(32)
        return ends | columns.accessed[rows]
