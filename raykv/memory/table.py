"""The chunk table in shared memory: one row per chunk, and a hash index that maps keys to rows.

One process writes (`raykv.storage`). Other processes read without a lock. A reader loads a row's `generation`, uses the
row and its bytes in the arena, and loads `generation` again. If both loads gave the same even number, nothing changed.

Source: seqlocks (Lameter, 2005; as in the Linux kernel), one per row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory
from raykv.memory.index import HashIndex
from raykv.memory.layout import (
    COLUMNS,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    MAX_NAMESPACES,
    NAMESPACE,
    RECORD,
    ROWS_AT_START,
    SPREAD_OFFSET,
    TEXT_OFFSET,
    TICKS_PER_S,
    Cells,
    Columns,
    Layout,
    RowState,
)
from raykv.types import Bits, KeyArray, Rows

MAX_MADE_AT_S: Final = 1e10
"""Largest time of the monotonic clock at which a table can have been made, in seconds (300 years)."""
SCANNED_ROWS: Final = 1 << 14
"""`Table.rows_used` looks at this many rows at a time, so that its arrays are small."""
RESTORED: Final = tuple(name for name in HEADER.names or () if name not in ("incarnation", "dirty", "recording"))
"""The fields of the header that `Table.restore_header` restores."""


class Table(HashIndex):
    """A mapped chunk table. Readers may call `touch`. All other methods that change the table are for the one writer.

    Attributes:
        header: The header; see `layout.HEADER`.
        own_header: The writer's copy of the header in private memory, for `restore_header`.
        spread: For each group number, 1 if the group's chunks are spread over the nodes (`NamespaceConfig.placement`).
        namespaces: Array of NAMESPACE, indexed by group number. `text` is the group as JSON; it is empty if no group
            has the number.
        extent_slots: The slot size of each extent of the arena, in bytes. In a free extent that has real memory, it is
            the size before the extent became free. 0: the extent has no real memory, or nobody knows.
    """

    def __init__(self, memory: SharedMemory) -> None:
        """Use a mapped file.

        Raises:
            LostError: The file is cut short, damaged, or not a table of this layout version.
        """
        self.memory = memory
        if memory.nbytes < HEADER.itemsize:
            raise LostError(f"{memory.path} is too short to be a chunk table")
        headers = np.frombuffer(memory.view, HEADER, 1)
        header = self.header = headers[0]
        self.own_header = headers.copy()[0]
        if header["magic"] != MAGIC or header["layout_version"] != LAYOUT_VERSION:
            raise LostError(f"{memory.path} is not a chunk table of layout version {LAYOUT_VERSION}")
        self.rows, self.extents = int(header["rows"]), int(header["extents"])
        self.extent_nbytes = int(header["extent_nbytes"])
        layout = Layout(self.rows, self.extents)
        self.made_at_s = float(header["made_at_s"])
        whole = 0 <= memory.nbytes - layout.nbytes < memory.page_nbytes and header["index_size"] == layout.index_size
        whole = whole and header["active_index"] < len(layout.indexes) and header["rows_populated"] <= self.rows
        if not (whole and 0.0 <= self.made_at_s <= MAX_MADE_AT_S):
            raise LostError(f"{memory.path} is cut short or damaged")
        view = memory.view
        self._layout = layout
        self.spread = np.frombuffer(view, np.uint8, MAX_NAMESPACES, SPREAD_OFFSET)
        self.namespaces = np.frombuffer(view, NAMESPACE, MAX_NAMESPACES, layout.namespaces)
        self._text_begins: npt.NDArray[np.uint8] = np.ndarray(
            MAX_NAMESPACES, np.uint8, view, layout.namespaces + TEXT_OFFSET, (NAMESPACE.itemsize,)
        )
        self.extent_slots = np.frombuffer(view, "<u4", self.extents, layout.extent_slots)
        records = np.frombuffer(view, RECORD, self.rows, layout.records)
        arrays = {name: records[name] for name in RECORD.names or ()}
        arrays |= {name: np.frombuffer(view, kind, self.rows, layout.columns[name]) for name, kind in COLUMNS.items()}
        self.columns = Columns(arrays)
        self.cells = Cells(self.columns)
        # Lookups use these attributes, because reading a header field through numpy costs more than a probe.
        self.records = view[layout.records : layout.records + self.rows * RECORD.itemsize]
        self._size = layout.index_size
        self.copies = [np.frombuffer(view, "<i4", self._size, start) for start in layout.indexes]
        self._copy_cells = [view[start : start + 4 * self._size].cast("i") for start in layout.indexes]
        self.active = headers["active_index"].data
        self._rows_populated = headers["rows_populated"].data
        self.removed = 0

    @classmethod
    def create(cls, path: Path | None, *, rows: int, extents: int, extent_nbytes: int, now_s: float) -> "Table":
        """Make an empty table. If `path` is None, use anonymous memory. The first ROWS_AT_START rows get real memory.

        Raises:
            ConfigError: The file cannot be made, or there is no room for the file.
        """
        layout = Layout(rows, extents)
        memory = SharedMemory.create(path, layout.nbytes)
        refusal = memory.refusal(layout.indexes[1])
        if refusal or not memory.populate(0, layout.indexes[1]):
            _refuse(path, layout, refusal)
        header = np.frombuffer(memory.view, HEADER, 1)[0]
        header["rows"], header["index_size"] = rows, layout.index_size
        header["extents"], header["extent_nbytes"] = extents, extent_nbytes
        header["made_at_s"], header["layout_version"] = now_s, LAYOUT_VERSION
        header["magic"] = MAGIC  # written last, so that a half-made file is refused
        table = cls(memory)
        if not table.populate_rows(ROWS_AT_START):
            _refuse(path, layout, memory.refusal(layout.indexes[1]))
        return table

    # -- real memory ------------------------------------------------------------------------------------------------

    @property
    def rows_populated(self) -> int:
        """The rows before this number have real memory. An access to any other row may kill the process."""
        return self._rows_populated[0]

    def populate_rows(self, upto: int) -> bool:
        """Take real memory for the rows before `upto`. Other threads and processes may read and write meanwhile.

        Returns False if the file system or the control group has no room. Then `rows_populated` does not change.
        """
        first, end = self.rows_populated, min(upto, self.rows)
        if end <= first:
            return True
        parts = self._layout.parts_of_rows(first, end)
        if end == self.rows:
            parts.append((self._layout.indexes[1], 4 * self._size))
        if self.memory.refusal(sum(nbytes for _, nbytes in parts)):
            return False
        if not all(self.memory.populate(offset, nbytes) for offset, nbytes in parts):
            return False
        self.own_header["rows_populated"] = end
        self._rows_populated[0] = end
        return True

    @property
    def place_of_records(self) -> tuple[int, int]:
        """Offset and length in the file, in bytes, of the array of RECORD."""
        return self._layout.records, self.rows * RECORD.itemsize

    def _populate_copy(self, number: int) -> bool:
        nbytes = 4 * self._size
        return not self.memory.refusal(nbytes) and self.memory.populate(self._layout.indexes[number], nbytes)

    # -- clock and header ------------------------------------------------------------------------------------------

    def ticks(self, now_s: float) -> int:
        """Convert a time of the host's monotonic clock to ticks. The result is at least 1, because 0 means never."""
        return max(1, int((now_s - self.made_at_s) * TICKS_PER_S))

    def seconds(self, ticks: int) -> float:
        return self.made_at_s + ticks / TICKS_PER_S

    @contextmanager
    def changing(self) -> Iterator[bool]:
        """Set the header's `dirty` to 1 for the `with` block, and to 0 at its end.

        If the process dies in the block, `dirty` stays 1, and recovery rebuilds the index. After an exception, `dirty`
        stays 1 until the next change ends.

        Yields:
            Whether `dirty` was 1 already. If so, an earlier change did not finish.
        """
        was_dirty = bool(self.header["dirty"])
        self.header["dirty"] = 1
        yield was_dirty
        self.header["dirty"] = 0

    def restore_header(self) -> list[str]:
        """Write the fields of the header again that another process has overwritten. Return their names."""
        lost = [name for name in RESTORED if self.header[name] != self.own_header[name]]
        for name in lost:
            self.header[name] = self.own_header[name]
        return lost

    @property
    def known_namespaces(self) -> Bits:
        """For each entry of `namespaces`, whether it is in use. Reads only the first byte of each text."""
        known: Bits = self._text_begins != 0
        return known

    def texts(self) -> dict[int, bytes]:
        texts = self.namespaces["text"]
        known = np.flatnonzero(self.known_namespaces).tolist()
        return {number: text for number in known if (text := bytes(texts[number]))}  # skip texts cleared meanwhile

    # -- rows -------------------------------------------------------------------------------------------------------

    def touch(self, rows: Rows, tick: int) -> None:
        """Count a read of each row. No row may be -1. No lock is needed, because a lost update does no harm."""
        self.columns.accessed[rows] = tick
        self.columns.frequency[rows] += 1

    def keys_of(self, rows: Rows) -> KeyArray:
        return np.stack([self.columns.key_hi[rows], self.columns.key_lo[rows]], axis=1)

    def rows_used(self) -> int:
        """Return the number of rows up to the last one that is or was in use. Many more rows may have real memory."""
        generation, state = self.columns.generation, self.columns.state
        for stop in range(self.rows_populated, 0, -SCANNED_ROWS):
            part = slice(max(0, stop - SCANNED_ROWS), stop)
            used = (generation[part] != 0) | (state[part] != RowState.FREE)
            if used.any():
                return stop - int(used[::-1].argmax())
        return 0

    def ready_rows(self) -> Rows:
        """Return all READY rows. This is slow, because it scans all rows."""
        used = self.rows_used()  # once, because other threads may use more rows meanwhile
        generation, state = self.columns.generation[:used], self.columns.state[:used]
        ready = (generation & 1 == 0) & (generation != 0) & (state != RowState.PENDING_DELETE)
        return np.flatnonzero(ready).astype(np.int32)


def _refuse(path: Path | None, layout: Layout, refusal: str) -> NoReturn:
    if path is not None:
        path.unlink()
    why = refusal or "the file system is full"
    raise ConfigError(f"field 'max_chunks': no room for a table of {layout.nbytes:,} bytes ({why}); lower max_chunks")
