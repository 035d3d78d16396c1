"""The hash index of a chunk table maps a 128-bit key to a row. It uses open addressing with linear probing.

Only one process writes. Other processes read without a lock. An entry is empty, removed, or a row number. A search
stops at an empty entry and continues past a removed entry. The index has two copies, of which one is in use.
`rebuild_index` fills the other copy, then switches to that copy.

An index without an empty entry is full or damaged. In such an index, a search for a missing key raises LostError. A
restart of the node rebuilds the index.
"""

from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from raykv.errors import DamagedError
from raykv.memory import native
from raykv.memory.layout import Cells, Columns
from raykv.types import KeyArray, Rows

EMPTY: Final = 0
"""The value of an empty entry. It is 0, so that the zeros in new pages are an empty index."""
REMOVED: Final = 1
"""The value of a removed entry."""
FIRST: Final = 2
"""The value of an entry for row 0. An entry for row n has the value FIRST + n."""
MOST_REMOVED_SHARE: Final = 4
"""The index is rebuilt when more than 1/MOST_REMOVED_SHARE of its entries are removed entries."""

_MIX: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiplying by it spreads similar keys
_LOW_64: Final = (1 << 64) - 1
_LONG_SEARCH: Final = 256  # after this many steps, the numpy loops check whether the index is full


class HashIndex:
    """Lookups for readers, and changes for the one writer.

    Attributes:
        records: The records of all rows, as bytes; see `layout.RECORD`.
        removed: Number of removed entries in the copy in use. Correct only in the writer's process.
    """

    columns: Columns
    cells: Cells
    records: memoryview
    removed: int
    copies: "list[npt.NDArray[np.int32]]"
    _copy_cells: "list[memoryview[int]]"
    active: "memoryview[int]"
    own_header: "np.void"
    _size: int

    def _populate_copy(self, number: int) -> bool:
        raise NotImplementedError

    def find(self, keys: KeyArray) -> Rows:
        """Return the row of each key; -1 if the key is not in the index. The state of the row is not checked.

        A lookup may rarely miss a key while the writer rebuilds the index (see `rebuild_index`). A row may change right
        after this call, so a reader must compare the row's generation before and after use.

        Raises:
            LostError: The index is full or damaged.
        """
        return self._lookup(keys, None)[0]

    def find_ready(self, keys: KeyArray, now: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Return the row of each key, and the row's generation.

        The row is -1 if the index has no ready chunk with this key, or if that chunk is expired at tick `now`. Raises
        LostError like `find`.
        """
        return self._lookup(keys, now)

    def _lookup(self, keys: KeyArray, now: int | None) -> tuple[Rows, npt.NDArray[np.uint32]]:
        if native.loops is not None:
            rows, generations = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint32)
            index, tick = self.index, -1 if now is None else now
            if not native.loops.find(self.records, index, np.ascontiguousarray(keys), rows, generations, tick):
                self._raise_damaged()
            return rows, generations
        rows = self._probe(keys)
        columns, safe = self.columns, np.maximum(rows, 0)
        generations = columns.generation[safe]
        if now is None:
            return rows, generations
        ready = (rows >= 0) & ((generations & 1) == 0) & (generations != 0)
        # Compare the key again after reading the generation: the row may have got another key since the probe.
        ready &= (columns.key_hi[safe] == keys[:, 0]) & (columns.key_lo[safe] == keys[:, 1])
        expires = columns.expires[safe]
        ready &= (expires == 0) | (expires > now)
        return np.where(ready, rows, np.int32(-1)), generations

    def _probe(self, keys: KeyArray) -> Rows:
        hi, lo = keys[:, 0], keys[:, 1]
        index, columns = self.index, self.columns
        position = self._home(hi, lo)
        rows = np.full(len(keys), -1, np.int32)
        pending, last_row = np.arange(len(keys)), len(columns.key_lo) - 1
        for step in range(1, self._size + 1):
            entry = index[position[pending]]
            # For an entry without a row, read row 0, which always has real memory. Later rows may have none.
            row = np.where((entry >= FIRST) & (entry <= last_row + FIRST), entry - FIRST, 0)
            found = (entry >= FIRST) & (columns.key_lo[row] == lo[pending]) & (columns.key_hi[row] == hi[pending])
            rows[pending[found]] = row[found]
            pending = pending[~found & (entry != EMPTY)]
            if not pending.size:
                return rows
            position[pending] += 1
            position[position == self._size] = 0
            if step == _LONG_SEARCH and not (index == EMPTY).any():
                break
        return self._raise_damaged()

    def _home(self, hi: npt.NDArray[np.uint64], lo: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the index entry at which the search for each key begins.

        Both halves of a key are mixed, because keys need not be hashes.
        """
        mixed = (hi ^ lo) * np.uint64(_MIX) >> np.uint64(32)
        return (mixed * np.uint64(self._size) >> np.uint64(32)).astype(np.int64)

    def _raise_damaged(self) -> NoReturn:
        raise DamagedError("the index of the chunk table is full or damaged; restart the node, which rebuilds it")

    # -- changes, by the one writer ---------------------------------------------------------------------------------

    @property
    def index(self) -> npt.NDArray[np.int32]:
        number = self.active[0]
        return self.copies[number] if number < len(self.copies) else self._raise_damaged()

    def index_entries(self) -> Rows:
        entries: Rows = self.index[(self.index != EMPTY) & (self.index != REMOVED)] - np.int32(FIRST)
        return entries

    def insert(self, keys: KeyArray, rows: Rows) -> None:
        """Write keys to the columns of `rows`, then put the rows into the index. The keys must be new to the index."""
        self.columns.key_hi[rows], self.columns.key_lo[rows] = keys[:, 0], keys[:, 1]
        self._enter(self.index, rows)

    def remove(self, rows: Rows) -> None:
        """Take rows out of the index. Rows that are not in the index are skipped.

        The generation of each unpinned row must be odd already, so that readers reject the row.
        """
        for row in rows.tolist():
            self._remove_one(row)

    def _remove_one(self, row: int) -> None:
        index, size, wanted = self._copy_cells[self.active[0]], self._size, row + FIRST
        mixed = (self.cells.key_hi[row] ^ self.cells.key_lo[row]) * _MIX & _LOW_64
        position = (mixed >> 32) * size >> 32  # as in `_home`
        for _ in range(size):
            entry = index[position]
            if entry == wanted:
                break
            if entry == EMPTY:
                return
            position = position + 1 if position + 1 < size else 0
        else:
            self._raise_damaged()
        if index[position + 1 if position + 1 < size else 0] != EMPTY:
            index[position] = REMOVED
            self.removed += 1
            if self.removed > size // MOST_REMOVED_SHARE:
                self.rebuild_index(self.index_entries())
            return
        # The next entry is empty, so no search has to continue past this entry or the removed entries just before it.
        index[position] = EMPTY
        position = position - 1 if position else size - 1
        while index[position] == REMOVED:
            index[position] = EMPTY
            self.removed -= 1
            position = position - 1 if position else size - 1

    def rebuild_index(self, rows: Rows) -> None:
        """Fill the other copy of the index with `rows`, then switch to that copy.

        Lookups during the rebuild find all rows in the copy in use. Only a lookup that began before the previous
        rebuild may miss rows. If there is no memory for the other copy, the copy in use is cleared and filled again.
        In that case all lookups may miss rows until the rebuild ends.
        """
        number = 1 - self.active[0]
        if not self._populate_copy(number):
            number = self.active[0]
        self.copies[number][:] = EMPTY
        self._enter(self.copies[number], rows)
        self.own_header["active_index"] = number
        self.active[0] = number
        self.removed = 0

    def _enter(self, index: npt.NDArray[np.int32], rows: Rows) -> None:
        """Write each row to the first empty or removed entry at or after the `_home` of its key."""
        if native.loops is not None:
            reused = native.loops.enter(self.records, index, np.ascontiguousarray(rows))
            if reused < 0:
                self._raise_damaged()
            self.removed -= reused
            return
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self.columns.key_lo)):
            self._raise_damaged()
        position = self._home(self.columns.key_hi[rows], self.columns.key_lo[rows])
        pending = np.arange(len(rows))
        for step in range(1, self._size + 1):
            free = pending[index[position[pending]] < FIRST]
            _, first = np.unique(position[free], return_index=True)  # an entry can hold only one row
            placed = free[first]
            self.removed -= int(np.count_nonzero(index[position[placed]] == REMOVED))
            index[position[placed]] = rows[placed] + FIRST
            waiting = np.ones(len(rows), np.bool_)
            waiting[placed] = False
            pending = pending[waiting[pending]]
            if not pending.size:
                return
            position[pending] += 1
            position[position == self._size] = 0
            if step == _LONG_SEARCH and (index < FIRST).sum() < pending.size:
                break
        self._raise_damaged()
