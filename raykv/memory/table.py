"""The chunk table: a row per chunk, an array per column, a hash index, all in shared memory.

One process writes (`raykv.shard`); any number read, without a lock. A reader takes a row's `generation`, uses the row
and the arena bytes it names, and takes `generation` again: the same even number means that nothing changed in between.
Odd means empty or being written; 0 means never used.

Source: seqlocks (Lameter, 2005; as in the Linux kernel), one per row.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory
from raykv.types import KeyArray, Rows

MAGIC: Final = 0x0031_564B_5941_52  # "RAYKV1"
LAYOUT_VERSION: Final = 1
MAX_NAMESPACES: Final = 1024
NAMESPACE_TEXT_NBYTES: Final = 2000
TICKS_PER_S: Final = 64
"""Times in the table are 32-bit ticks since it was made: 2 years before they wrap."""

_HEADER: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("layout_version", "<u8"),
        ("incarnation", "<u8"),
        ("dirty", "<u8"),
        ("rows", "<u8"),
        ("index_size", "<u8"),
        ("active_index", "<u8"),
        ("extents", "<u8"),
        ("extent_nbytes", "<u8"),
        ("made_at_s", "<f8"),
    ]
)
NAMESPACE: Final = np.dtype([("capacity", "<u8"), ("text", f"S{NAMESPACE_TEXT_NBYTES}")])
COLUMNS: Final[dict[str, str]] = {
    "key_hi": "<u8",
    "key_lo": "<u8",
    "checksum": "<u8",
    "generation": "<u4",
    "page": "<u4",
    "nbytes": "<u4",
    "inserted": "<u4",
    "accessed": "<u4",
    "expires": "<u4",
    "frequency": "<u4",
    "depth": "<u4",
    "parent": "<i4",
    "children": "<i4",
    "namespace": "<u2",
    "pins": "<u2",
}
ROW_NBYTES: Final = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())

_EMPTY, _TOMBSTONE, _FIRST = 0, 1, 2
"""Index entries: free, was used (probing goes on), or row + 2. Fresh pages are zero: an empty index is free."""


class Columns:
    """The columns as numpy arrays over shared memory, one entry a row.

    Attributes:
        key_hi, key_lo: The key.
        checksum: xxh3-64 of the chunk's bytes.
        generation: See the module.
        page: Where the bytes begin in the arena, in units of SLOT_ALIGNMENT_NBYTES.
        nbytes: Length of the chunk.
        inserted, accessed, expires: In ticks; expires 0 is never. Readers write `accessed` and `frequency` without a
            lock; a lost update costs nothing.
        frequency: Reads.
        depth: Chunks before this one in its chain.
        parent: Row of the chunk before this one, if it is here, else -1.
        children: Rows whose parent this is.
        namespace: Number of the account in the table's namespace list.
        pins: Readers that hold a view of the bytes.
    """

    key_hi: npt.NDArray[np.uint64]
    key_lo: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]
    generation: npt.NDArray[np.uint32]
    page: npt.NDArray[np.uint32]
    nbytes: npt.NDArray[np.uint32]
    inserted: npt.NDArray[np.uint32]
    accessed: npt.NDArray[np.uint32]
    expires: npt.NDArray[np.uint32]
    frequency: npt.NDArray[np.uint32]
    depth: npt.NDArray[np.uint32]
    parent: npt.NDArray[np.int32]
    children: npt.NDArray[np.int32]
    namespace: npt.NDArray[np.uint16]
    pins: npt.NDArray[np.uint16]

    def __init__(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        self.__dict__.update(arrays)


class _Layout:
    """Where each part lies in the file; a function of three numbers alone."""

    def __init__(self, rows: int, extents: int) -> None:
        self.index_size = 1 << max(4, (2 * rows - 1).bit_length())
        self._end = 0
        self.header = self._take(_HEADER.itemsize)
        self.namespaces = self._take(MAX_NAMESPACES * NAMESPACE.itemsize)
        self.extent_slots = self._take(4 * extents)
        self.columns = {name: self._take(rows * np.dtype(kind).itemsize) for name, kind in COLUMNS.items()}
        self.indexes = [self._take(4 * self.index_size) for _ in range(2)]
        self.nbytes = self._take(0)

    def _take(self, nbytes: int) -> int:
        start = self._end
        self._end = -(-(start + nbytes) // SLOT_ALIGNMENT_NBYTES) * SLOT_ALIGNMENT_NBYTES
        return start


def table_nbytes(rows: int, extents: int) -> int:
    """Size of the table's file in bytes."""
    return _Layout(rows, extents).nbytes


class Table:
    """The table as its readers and its writer see it. Methods that change it are the writer's alone.

    Attributes:
        columns: See `Columns`.
        namespaces: Array of NAMESPACE; an entry with empty text is free. The text is the account's JSON.
        extent_slots: Per extent of the arena the slot size it serves, in bytes; 0 when free.
    """

    def __init__(self, memory: SharedMemory) -> None:
        """Use a mapped table.

        Raises:
            LostError: This is no table of this layout version, or it is cut short.
        """
        self.memory = memory
        if memory.nbytes < _HEADER.itemsize:
            raise LostError(f"{memory.path} is too short to be a chunk table")
        self._header = np.frombuffer(memory.view, _HEADER, 1)[0]
        header = self._header
        if header["magic"] != MAGIC or header["layout_version"] != LAYOUT_VERSION:
            raise LostError(f"{memory.path} is not a chunk table of layout version {LAYOUT_VERSION}")
        self.rows, self.extents = int(header["rows"]), int(header["extents"])
        self.extent_nbytes = int(header["extent_nbytes"])
        layout = _Layout(self.rows, self.extents)
        self._made_at_s = float(header["made_at_s"])
        whole = memory.nbytes == layout.nbytes and header["index_size"] == layout.index_size
        if not (whole and header["active_index"] < len(layout.indexes) and math.isfinite(self._made_at_s)):
            raise LostError(f"{memory.path} is cut short or damaged")
        view = memory.view
        self.namespaces = np.frombuffer(view, NAMESPACE, MAX_NAMESPACES, layout.namespaces)
        self.extent_slots = np.frombuffer(view, "<u4", self.extents, layout.extent_slots)
        self.columns = Columns(
            {name: np.frombuffer(view, kind, self.rows, layout.columns[name]) for name, kind in COLUMNS.items()}
        )
        self._indexes = [np.frombuffer(view, "<i4", layout.index_size, start) for start in layout.indexes]
        self._mask = np.uint64(layout.index_size - 1)
        self._tombstones = int(np.count_nonzero(self._indexes[int(header["active_index"])] == _TOMBSTONE))

    @classmethod
    def create(cls, path: Path | None, *, rows: int, extents: int, extent_nbytes: int, now_s: float) -> "Table":
        """Make an empty table.

        Raises:
            ConfigError: The file cannot be made, or there is no room for it.
        """
        layout = _Layout(rows, extents)
        memory = SharedMemory.create(path, layout.nbytes)
        if not memory.back(0, layout.nbytes):
            memory.path.unlink()
            raise ConfigError(f"field 'max_chunks': no room for a table of {layout.nbytes:,} bytes; lower max_chunks")
        header = np.frombuffer(memory.view, _HEADER, 1)[0]
        header["rows"], header["index_size"] = rows, layout.index_size
        header["extents"], header["extent_nbytes"] = extents, extent_nbytes
        header["made_at_s"], header["layout_version"] = now_s, LAYOUT_VERSION
        header["magic"] = MAGIC  # last: a table without it is no table
        return cls(memory)

    # -- clock and header ------------------------------------------------------------------------------------------

    def ticks(self, now_s: float) -> int:
        """A time by the host's monotonic clock, in the table's units; at least 1, since 0 means never."""
        return max(1, int((now_s - self._made_at_s) * TICKS_PER_S))

    @property
    def incarnation(self) -> int:
        """How many processes have owned this table, this one included."""
        return int(self._header["incarnation"])

    @incarnation.setter
    def incarnation(self, value: int) -> None:
        self._header["incarnation"] = value

    @property
    def dirty(self) -> bool:
        """True while a change is under way; still true at a start means that the last owner died in one."""
        return bool(self._header["dirty"])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark a change. If it does not finish, the mark stays, and recovery rebuilds what can be torn."""
        self._header["dirty"] = 1
        yield
        self._header["dirty"] = 0

    # -- reading: lock-free -----------------------------------------------------------------------------------------

    def find(self, keys: KeyArray) -> Rows:
        """Row of each key, ready or not, or -1. Many keys cost a few array passes.

        A key that moves in the index meanwhile may be missed: to a reader that is a miss. A row that is found may
        change at once: compare `generation` around its use.
        """
        return self._probe(keys)[0]

    def find_ready(self, keys: KeyArray, now: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Rows of those keys that are ready and not expired at tick `now`, -1 for others.

        Returns:
            The rows, and their generations to compare after use (`unchanged`).
        """
        rows = self._probe(keys)[0]
        columns = self.columns
        generations = columns.generation[rows]  # rows of -1 read the last row; masked below
        ready = (rows >= 0) & ((generations & 1) == 0) & (generations != 0)
        # The key again, after the generation: the row may have got another owner since the probe.
        ready &= (columns.key_hi[rows] == keys[:, 0]) & (columns.key_lo[rows] == keys[:, 1])
        expires = columns.expires[rows]
        ready &= (expires == 0) | (expires > now)
        return np.where(ready, rows, np.int32(-1)), generations

    def unchanged(self, rows: Rows, generations: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Whether each row still is what it was when `find_ready` gave its generation."""
        same: npt.NDArray[np.bool_] = (rows >= 0) & (self.columns.generation[rows] == generations)
        return same

    def touch(self, rows: Rows, tick: int) -> None:
        """Note a read of rows (none of them -1). Readers do this too: a lost update is harmless."""
        self.columns.accessed[rows] = tick
        self.columns.frequency[rows] += 1

    def _probe(self, keys: KeyArray) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Row and index position of each key; -1 and the position of the empty entry that ended the search."""
        hi, lo = keys[:, 0], keys[:, 1]
        index = self._indexes[int(self._header["active_index"])]
        key_hi, key_lo = self.columns.key_hi, self.columns.key_lo
        position = (lo & self._mask).astype(np.int64)
        rows = np.full(len(keys), -1, np.int32)
        pending = np.arange(len(keys))
        for _ in range(len(index)):  # bounded even if the index is being rewritten under us
            entry = index[position[pending]]
            row = entry - _FIRST
            found = (entry >= _FIRST) & (key_hi[row] == hi[pending]) & (key_lo[row] == lo[pending])
            rows[pending[found]] = row[found]
            pending = pending[~found & (entry != _EMPTY)]
            if not pending.size:
                break
            position[pending] = (position[pending] + 1) & int(self._mask)
        return rows, position

    # -- writing: the one writer ------------------------------------------------------------------------------------

    def insert(self, keys: KeyArray, rows: Rows) -> None:
        """Enter rows under keys that are not in the index; the keys are also written to their columns first."""
        self.columns.key_hi[rows], self.columns.key_lo[rows] = keys[:, 0], keys[:, 1]
        _insert(self._indexes[int(self._header["active_index"])], keys[:, 1], rows, int(self._mask))

    def remove(self, rows: Rows) -> None:
        """Take rows out of the index. Their generations must be odd by now."""
        columns = self.columns
        found, position = self._probe(np.stack([columns.key_hi[rows], columns.key_lo[rows]], axis=1))
        index = self._indexes[int(self._header["active_index"])]
        index[position[found == rows]] = _TOMBSTONE
        self._tombstones += len(rows)
        if self._tombstones > len(index) // 4:
            self.rebuild_index(self.index_entries())

    def index_entries(self) -> Rows:
        """The rows that the index names, in no order."""
        index = self._indexes[int(self._header["active_index"])]
        entries: Rows = index[(index != _EMPTY) & (index != _TOMBSTONE)] - _FIRST
        return entries

    def rebuild_index(self, rows: Rows) -> None:
        """Make a fresh index of `rows` beside the one in use, then switch: readers find all of them throughout."""
        fresh_number = 1 - int(self._header["active_index"])
        fresh = self._indexes[fresh_number]
        fresh[:] = _EMPTY
        _insert(fresh, self.columns.key_lo[rows], rows, int(self._mask))
        self._header["active_index"] = fresh_number
        self._tombstones = 0

    def ready_rows(self) -> Rows:
        """All rows that hold a committed chunk."""
        generation = self.columns.generation
        return np.flatnonzero((generation & 1 == 0) & (generation != 0)).astype(np.int32)


def _insert(index: npt.NDArray[np.int32], lo: npt.NDArray[np.uint64], rows: Rows, mask: int) -> None:
    position = (lo & np.uint64(mask)).astype(np.int64)
    pending = np.arange(len(rows))
    while pending.size:
        free = pending[index[position[pending]] < _FIRST]
        _, first = np.unique(position[free], return_index=True)  # of several that want one place, one gets it
        placed = free[first]
        index[position[placed]] = rows[placed] + _FIRST
        waiting = np.ones(len(rows), np.bool_)
        waiting[placed] = False
        pending = pending[waiting[pending]]
        position[pending] = (position[pending] + 1) & mask
