"""The layout of a chunk table in shared memory. A table has a header, an index, and arrays with one entry per row."""

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES

MAGIC: Final = 0x0031_564B_5941_52  # "RAYKV1"
LAYOUT_VERSION: Final = 4
MAX_NAMESPACES: Final = 1024
NAMESPACE_TEXT_NBYTES: Final = 2000
MAX_DEPTH: Final = 1 << 31
TICKS_PER_S: Final = 64
"""Times in the table are 32-bit numbers of ticks since the table was made. These numbers wrap after two years."""
ROWS_AT_START: Final = 1 << 16
"""Number of rows that get real memory when a table is made. `Table.populate_rows` adds more."""
QUARANTINE_S: Final = 10.0
"""If a writer's connection breaks, its slots stay out of use for this time, because the writer may still fill them."""


class RowState(IntEnum):
    """The state of a row. Only the node changes it; docs/storage.md shows all transitions."""

    FREE = 0
    """The row has no slot and no key."""
    LENT = 1
    """A writer fills the slot. The row has no key yet."""
    READY = 2
    """The row holds a chunk and is in the index."""
    QUARANTINED = 3
    """The writer's connection broke, but the writer may still fill the slot. After QUARANTINE_S the row is FREE."""
    PENDING_DELETE = 4
    """The chunk was removed while pinned. The row is not in the index, and becomes FREE at the last unpin."""


HEADER: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("layout_version", "<u8"),
        ("incarnation", "<u8"),
        ("dirty", "<u8"),
        ("rows", "<u8"),
        ("index_size", "<u8"),
        ("active_index", "<u8"),
        ("rows_populated", "<u8"),
        ("extents", "<u8"),
        ("extent_nbytes", "<u8"),
        ("made_at_s", "<f8"),
        ("recording", "<u8"),
    ]
)
"""`incarnation` counts the processes that have owned the table. `dirty` is 1 during a change. If a new owner finds
`dirty` 1, the last owner did not finish a change. While `recording` is 1, clients must report their lookups to the node
(`client.trace_recorder`)."""
NAMESPACE: Final = np.dtype([("capacity", "<u8"), ("text", f"S{NAMESPACE_TEXT_NBYTES}")])
SPREAD_OFFSET: Final = 2048
"""Where the header's page has one byte for each namespace: 1 if its config says placement "spread", else 0."""
TEXT_OFFSET: Final = NAMESPACE.itemsize - NAMESPACE_TEXT_NBYTES
RECORD: Final = np.dtype(
    [
        ("generation", "<u4"),
        ("expires", "<u4"),
        ("page", "<u4"),
        ("nbytes", "<u4"),
        ("key_hi", "<u8"),
        ("key_lo", "<u8"),
    ]
)
"""The fields of a row for lookups and reads. Two records fill one cache line, so reading a record costs at most one
cache miss."""
COLUMNS: Final[dict[str, str]] = {
    "checksum": "<u8",
    "inserted": "<u4",
    "accessed": "<u4",
    "frequency": "<u4",
    "depth": "<u4",
    "parent": "<i4",
    "parent_generation": "<u4",
    "children": "<i4",
    "group": "<u2",
    "pins": "<u2",
    "state": "<u1",
}
INDEX_ENTRIES_PER_ROW: Final = 2
INDEX_COPIES: Final = 2
ROW_NBYTES: Final = (
    RECORD.itemsize
    + sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
    + INDEX_COPIES * INDEX_ENTRIES_PER_ROW * np.dtype(np.int32).itemsize
)
"""Bytes of shared memory per row, both copies of the index included."""


class Columns:
    """The columns of the table, as numpy arrays over shared memory. Each array has one entry per row.

    The fields of RECORD are columns too. Their arrays are strided views of the records. Readers write `accessed` and
    `frequency` without a lock, because a lost update does no harm.

    Attributes:
        key_hi, key_lo: The two halves of the key.
        checksum: xxh3-64 of the chunk's bytes.
        generation: Readers may use the row if this number is even and not 0. Each new chunk in the row gets a new
            number.
        page: Start of the slot in the arena, in units of SLOT_ALIGNMENT_NBYTES.
        nbytes: Length of the chunk in bytes. In a LENT row, the size of the slot.
        inserted: Time of the commit, in ticks. In a QUARANTINED row, the end of the quarantine.
        accessed: Time of the last read, in ticks. Before the first read, the time of the commit.
        expires: Time of the expiry, in ticks. 0 means never.
        frequency: Number of reads of the chunk. Reads before a promotion from a tier are included.
        depth: Number of chunks before this chunk in its chain.
        parent: Row of the chunk before this chunk in its chain; -1 if there is none.
        parent_generation: Generation of the parent's row at this chunk's commit. If that row has another generation
            now, the parent chunk is gone.
        children: Number of READY rows whose parent is the chunk in this row.
        group: The quota group, as an index into the table's list of namespaces.
        pins: Number of pins on the chunk. A pinned chunk's bytes stay in place.
        state: See `RowState`.
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
    parent_generation: npt.NDArray[np.uint32]
    children: npt.NDArray[np.int32]
    group: npt.NDArray[np.uint16]
    pins: npt.NDArray[np.uint16]
    state: npt.NDArray[np.uint8]

    def __init__(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        self.__dict__.update(arrays)


class Cells:
    """`Columns` as memoryviews. Reading or writing a single entry is much faster than with numpy."""

    def __init__(self, columns: Columns) -> None:
        self.__dict__.update({name: memoryview(array) for name, array in vars(columns).items()})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> "memoryview[int]": ...


class Layout:
    """The offset in bytes of each part of the table's file. Offsets depend only on the numbers of rows and extents."""

    def __init__(self, rows: int, extents: int) -> None:
        self.index_size = INDEX_ENTRIES_PER_ROW * rows
        self._end = 0
        self.header = self._add(HEADER.itemsize)
        self.namespaces = self._add(MAX_NAMESPACES * NAMESPACE.itemsize)
        self.extent_slots = self._add(4 * extents)
        self.indexes = [self._add(4 * self.index_size) for _ in range(INDEX_COPIES)]
        self.records = self._add(rows * RECORD.itemsize)
        self.columns = {name: self._add(rows * np.dtype(kind).itemsize) for name, kind in COLUMNS.items()}
        self.nbytes = self._end

    def _add(self, nbytes: int) -> int:
        start = self._end
        self._end = -(-(start + nbytes) // SLOT_ALIGNMENT_NBYTES) * SLOT_ALIGNMENT_NBYTES
        return start

    def parts_of_rows(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of each part of the file that holds data of the rows from `first` to `end` - 1."""
        widths = [(self.records, RECORD.itemsize)]
        widths += [(start, np.dtype(COLUMNS[name]).itemsize) for name, start in self.columns.items()]
        return [(start + first * width, (end - first) * width) for start, width in widths]


def table_nbytes(rows: int, extents: int) -> int:
    return Layout(rows, extents).nbytes
