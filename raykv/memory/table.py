"""The chunk table: a row per chunk, an array per column, a hash index, all in shared memory.

One process writes (`raykv.storage.store`); any number read, without a lock. A reader takes a row's `generation`, uses the row
and the arena bytes it names, and takes `generation` again: the same even number means that nothing changed in between.
Odd means empty or being written; 0 means never used.

The side index is the one thing that writers of chunks change themselves (`_native.c: publish`): windows of a few
entries for rows on loan that they made ready, until the one writer has taken them into the index.

Source: seqlocks (Lameter, 2005; as in the Linux kernel), one per row.
"""

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import ConfigError, LostError
from raykv.memory import native, pages
from raykv.memory.arena import SharedMemory
from raykv.types import Bits, KeyArray, Rows

if TYPE_CHECKING:
    from raykv.memory.native._native import Reader

MAGIC: Final = 0x0031_564B_5941_52  # "RAYKV1"
LAYOUT_VERSION: Final = 3
MAX_NAMESPACES: Final = 1024
NAMESPACE_TEXT_NBYTES: Final = 2000
MAX_DEPTH: Final = 1 << 31
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
        ("rows_backed", "<u8"),
        ("extents", "<u8"),
        ("extent_nbytes", "<u8"),
        ("made_at_s", "<f8"),
        ("published", "<u8"),
        ("taken", "<u8"),
        ("recording", "<u8"),
    ]
)
NAMESPACE: Final = np.dtype([("capacity", "<u8"), ("text", f"S{NAMESPACE_TEXT_NBYTES}")])
_TEXT_OFFSET: Final = NAMESPACE.itemsize - NAMESPACE_TEXT_NBYTES
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
"""What a lookup and a read need of a row, side by side: two rows share a cache line, and one miss fetches all of it."""
COLUMNS: Final[dict[str, str]] = {
    "checksum": "<u8",
    "inserted": "<u4",
    "accessed": "<u4",
    "frequency": "<u4",
    "depth": "<u4",
    "parent": "<i4",
    "children": "<i4",
    "namespace": "<u2",
    "pins": "<u2",
}
INDEX_ENTRIES_PER_ROW: Final = 2
ROW_NBYTES: Final = (
    RECORD.itemsize
    + sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
    + 2 * INDEX_ENTRIES_PER_ROW * np.dtype(np.int32).itemsize
)
"""Memory of one row, both copies of the index included."""
ROWS_AT_START: Final = 1 << 16
"""Rows that have real memory when a table is made; the others get it as `back_rows` is called."""
HUGE_STEP_NBYTES: Final = 32 << 20
"""`use_huge_pages` does about so much a call: milliseconds, or 100 ms where a hypervisor must find the memory first."""

SIDE_ENTRIES: Final = 1 << 14
SIDE_WINDOW: Final = 8
"""Entries of the side index, and how many of them, side by side, may name the rows of one key: half a cache line."""

_MIX: Final = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiplication by it spreads what lies close
_LOW_64: Final = (1 << 64) - 1
_STRIDE: Final = RECORD.itemsize
_unpack: Final = struct.Struct("IIIIQQ").unpack_from  # native order and alignment: each field is read at once, in order
_WINDOWS: Final = SIDE_ENTRIES // SIDE_WINDOW
_EMPTY, _TOMBSTONE, _FIRST = 0, 1, 2
"""Index entries: free, was used (probing goes on), or row + 2. Fresh pages are zero: an empty index is free."""


class Columns:
    """The columns as numpy arrays over shared memory, one entry a row. Those of RECORD are strided views.

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
        namespace: Number of the quota group in the table's namespace list.
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


class Cells:
    """The same columns as memoryviews: one entry is read or written in 40 ns, where numpy takes a microsecond."""

    generation: "memoryview[int]"
    expires: "memoryview[int]"
    page: "memoryview[int]"
    nbytes: "memoryview[int]"
    key_hi: "memoryview[int]"
    key_lo: "memoryview[int]"
    checksum: "memoryview[int]"
    inserted: "memoryview[int]"
    accessed: "memoryview[int]"
    frequency: "memoryview[int]"
    depth: "memoryview[int]"
    parent: "memoryview[int]"
    children: "memoryview[int]"
    namespace: "memoryview[int]"
    pins: "memoryview[int]"

    def __init__(self, columns: Columns) -> None:
        for name, array in vars(columns).items():
            setattr(self, name, memoryview(array))


class _Layout:
    """Where each part lies in the file; a function of two numbers alone."""

    def __init__(self, rows: int, extents: int) -> None:
        self.index_size = INDEX_ENTRIES_PER_ROW * rows
        self._end = 0
        self.header = self._take(_HEADER.itemsize)
        self.namespaces = self._take(MAX_NAMESPACES * NAMESPACE.itemsize)
        self.extent_slots = self._take(4 * extents)
        self.side = self._take(4 * SIDE_ENTRIES)
        self.indexes = [self._take(4 * self.index_size) for _ in range(2)]
        self.records = self._take(rows * RECORD.itemsize)
        self.columns = {name: self._take(rows * np.dtype(kind).itemsize) for name, kind in COLUMNS.items()}
        self.nbytes = self._take(0)

    def _take(self, nbytes: int) -> int:
        start = self._end
        self._end = -(-(start + nbytes) // SLOT_ALIGNMENT_NBYTES) * SLOT_ALIGNMENT_NBYTES
        return start

    def parts_of_rows(self, first: int, end: int) -> list[tuple[int, int]]:
        """(offset, nbytes) of everything that belongs to rows first .. end - 1."""
        widths = [(self.records, RECORD.itemsize)]
        widths += [(start, np.dtype(COLUMNS[name]).itemsize) for name, start in self.columns.items()]
        return [(start + first * width, (end - first) * width) for start, width in widths]


def table_nbytes(rows: int, extents: int) -> int:
    """Size of the table's file in bytes."""
    return _Layout(rows, extents).nbytes


class Table:
    """The table as its readers and its writer see it. Methods that change it are the writer's alone.

    Attributes:
        columns: See `Columns`.
        cells: The same, for one entry at a time.
        records: The bytes of the columns of RECORD.
        namespaces: Array of NAMESPACE; an entry with empty text is free. The text is the quota group's JSON.
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
        whole = 0 <= memory.nbytes - layout.nbytes < memory.page_nbytes and header["index_size"] == layout.index_size
        whole = whole and header["active_index"] < len(layout.indexes) and header["rows_backed"] <= self.rows
        if not (whole and math.isfinite(self._made_at_s)):
            raise LostError(f"{memory.path} is cut short or damaged")
        view = memory.view
        self._layout = layout
        self.namespaces = np.frombuffer(view, NAMESPACE, MAX_NAMESPACES, layout.namespaces)
        self._text_begins: npt.NDArray[np.uint8] = np.ndarray(
            MAX_NAMESPACES, np.uint8, view, layout.namespaces + _TEXT_OFFSET, (NAMESPACE.itemsize,)
        )
        self.extent_slots = np.frombuffer(view, "<u4", self.extents, layout.extent_slots)
        records = np.frombuffer(view, RECORD, self.rows, layout.records)
        arrays = {name: records[name] for name in RECORD.names or ()}
        arrays |= {name: np.frombuffer(view, kind, self.rows, layout.columns[name]) for name, kind in COLUMNS.items()}
        self.columns = Columns(arrays)
        self.cells = Cells(self.columns)
        self._indexes = [np.frombuffer(view, "<i4", layout.index_size, start) for start in layout.indexes]
        self._size = layout.index_size
        # What the lookups use, found once: attributes of a header's fields cost more than a probe.
        self.records = view[layout.records : layout.records + self.rows * RECORD.itemsize]
        self._index_cells = [view[start : start + 4 * self._size].cast("i") for start in layout.indexes]
        self._side = np.frombuffer(view, "<i4", SIDE_ENTRIES, layout.side)
        self._side_cells = self._side.data
        self._active = _cell(view, "active_index")
        self._published, self._taken = _cell(view, "published"), _cell(view, "taken")
        self._counts = _cell(view, "published", 2)
        self._rows_backed = _cell(view, "rows_backed")
        self._huge_upto, self._small = -1, list[tuple[int, int]]()
        self._tombstones = 0  # as long as `note_removed` does not say otherwise

    @classmethod
    def create(cls, path: Path | None, *, rows: int, extents: int, extent_nbytes: int, now_s: float) -> "Table":
        """Make an empty table. Its first ROWS_AT_START rows have real memory; see `back_rows`.

        Raises:
            ConfigError: The file cannot be made, or there is no room for it.
        """
        layout = _Layout(rows, extents)
        memory = SharedMemory.create(path, layout.nbytes)
        if not memory.back(0, layout.indexes[1], hurry=True):
            memory.path.unlink()
            raise ConfigError(f"field 'max_chunks': no room for a table of {layout.nbytes:,} bytes; lower max_chunks")
        header = np.frombuffer(memory.view, _HEADER, 1)[0]
        header["rows"], header["index_size"] = rows, layout.index_size
        header["extents"], header["extent_nbytes"] = extents, extent_nbytes
        header["made_at_s"], header["layout_version"] = now_s, LAYOUT_VERSION
        header["magic"] = MAGIC  # last: a table without it is no table
        table = cls(memory)
        if not table.back_rows(ROWS_AT_START):
            memory.path.unlink()
            raise ConfigError(f"field 'max_chunks': no room for a table of {layout.nbytes:,} bytes; lower max_chunks")
        return table

    # -- real memory ------------------------------------------------------------------------------------------------

    @property
    def rows_backed(self) -> int:
        """Rows that may be used: the first so many have real memory. Touching one beyond may kill the process."""
        return self._rows_backed[0]

    def back_rows(self, upto: int) -> bool:
        """Take real memory for the rows before `upto`, as far as they have none. Safe beside readers and the writer.

        Returns:
            False when the file system has no room; `rows_backed` is what it was then.
        """
        first, end = self.rows_backed, min(upto, self.rows)
        if end <= first:
            return True
        parts = self._layout.parts_of_rows(first, end)
        if end == self.rows:
            parts.append((self._layout.indexes[1], 4 * self._size))
        if not all(self.memory.back(offset, nbytes) for offset, nbytes in parts):
            return False
        self._rows_backed[0] = end
        return True

    def use_huge_pages(self) -> bool:
        """Make huge pages, where they are to be had, of small ones that a start in a hurry and growth in steps left.

        For when nobody waits: lookups of many keys take 13 % less time then with 1 M rows, 40 % less with 10 M. Safe
        beside readers and the writer. Costs nothing while nothing has changed.

        Returns:
            Whether to call it again: it goes on where it was, step by step.
        """
        if not self._small and self._huge_upto != self.rows_backed:
            self._huge_upto = self.rows_backed
            self._small = list(self._steps(self._huge_upto))
        if self._small:
            self.memory.back(*self._small.pop(0))
        return bool(self._small)

    def _steps(self, rows: int) -> Iterator[tuple[int, int]]:
        """(offset, nbytes) of what has memory when so many rows have, cut where huge pages may begin."""
        parts = [(0, self._layout.indexes[1]), *self._layout.parts_of_rows(0, rows)]
        if rows == self.rows:
            parts = [(0, self._layout.nbytes)]
        step = max(HUGE_STEP_NBYTES, pages.huge_nbytes())
        for offset, nbytes in parts:
            cuts = [offset, *range((offset // step + 1) * step, offset + nbytes, step), offset + nbytes]
            yield from ((start, end - start) for start, end in pairwise(cuts))

    # -- clock and header ------------------------------------------------------------------------------------------

    def ticks(self, now_s: float) -> int:
        """A time by the host's monotonic clock, in the table's units; at least 1, since 0 means never."""
        return max(1, int((now_s - self._made_at_s) * TICKS_PER_S))

    def seconds(self, ticks: int) -> float:
        """The time that `ticks` stands for, by the host's monotonic clock."""
        return self._made_at_s + ticks / TICKS_PER_S

    @property
    def recording(self) -> bool:
        """Whether clients are to tell of the requests that they look up; see `raykv.client.trace_recorder`."""
        return bool(self._header["recording"])

    @recording.setter
    def recording(self, value: bool) -> None:
        self._header["recording"] = value

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
        return self._lookup(keys, None)[0]

    @property
    def known_namespaces(self) -> Bits:
        """Which entries of `namespaces` are in use. The texts of all of them are two megabytes."""
        known: Bits = self._text_begins != 0
        return known

    def texts(self) -> dict[int, bytes]:
        """Texts of the namespaces in use, by number."""
        texts = self.namespaces["text"]
        known = np.flatnonzero(self.known_namespaces).tolist()
        return {number: text for number in known if (text := bytes(texts[number]))}  # one may go meanwhile

    def find_ready(self, keys: KeyArray, now: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Rows of those keys that are ready and not expired at tick `now`, -1 for others.

        Returns:
            The rows, and their generations to compare after use (`unchanged`).
        """
        return self._lookup(keys, now)

    def look(self, keys: KeyArray, now: int | None) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """What `find_ready` gives, or `find` if `now` is None, and of what was published since. For readers."""
        if native.look is not None:
            rows, generations = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint32)
            native.look(
                self.records, *self._indexes, self._active, self._side, self._counts, np.ascontiguousarray(keys),
                rows, generations, -1 if now is None else now,
            )  # fmt: skip
            return rows, generations
        taken = self._taken[0]
        rows, generations = self._lookup(keys, now)
        if self._published[0] != taken and rows.size and int(rows.min()) < 0:
            # In this order: what is taken in meanwhile is in the index before it leaves the side index.
            for search in (self._lookup_side, self._lookup):
                missing = np.flatnonzero(rows < 0)
                rows[missing], generations[missing] = search(keys[missing], now)
        return rows, generations

    def look_one(self, hi: int, lo: int, now: int) -> tuple[int, int, int, int] | None:
        """What `find_ready_one` gives, and of what was published since."""
        taken = self._taken[0]
        found = self.find_ready_one(hi, lo, now)
        if found is not None or self._published[0] == taken:
            return found
        found = self._find_side(hi, lo, now)
        if found is not None:
            return found
        return self.find_ready_one(hi, lo, now)

    def find_one(self, hi: int, lo: int) -> int:
        """Row of one key, ready or not, or -1."""
        cells, index, size = self.cells, self._index_cells[self._active[0]], self._size
        position = (((hi ^ lo) * _MIX & _LOW_64) >> 32) * size >> 32
        for _ in range(size):  # bounded even if the index is being rewritten under us
            entry = index[position]
            if entry >= _FIRST:
                row = entry - _FIRST
                if cells.key_lo[row] == lo and cells.key_hi[row] == hi:
                    return row
            elif entry == _EMPTY:
                return -1
            position += 1
            if position == size:
                position = 0
        return -1

    def find_ready_one(self, hi: int, lo: int, now: int) -> tuple[int, int, int, int] | None:
        """(row, generation, page, nbytes) of one key if it is ready and not expired at tick `now`.

        Compare the row's generation after use.
        """
        records, index, size = self.records, self._index_cells[self._active[0]], self._size
        position = (((hi ^ lo) * _MIX & _LOW_64) >> 32) * size >> 32
        for _ in range(size):
            entry = index[position]
            if entry >= _FIRST:
                # The generation is read first: whatever it says holds for the rest as long as it stays.
                generation, expires, page, nbytes, key_hi, key_lo = _unpack(records, (entry - _FIRST) * _STRIDE)
                if key_lo == lo and key_hi == hi:
                    if generation & 1 or not generation or 0 < expires <= now:
                        return None
                    return entry - _FIRST, generation, page, nbytes
            elif entry == _EMPTY:
                return None
            position += 1
            if position == size:
                position = 0
        return None

    def reader(self, arena: memoryview) -> "Reader | None":
        """The compiled way to look up and read one chunk, if there is one."""
        if native.Reader is None:
            return None
        columns = self.columns
        made: Reader = native.Reader(
            self.records, *self._indexes, self._active, arena, columns.accessed, columns.frequency, columns.inserted,
            columns.checksum, columns.depth, columns.parent, columns.children, columns.namespace, self._side,
            self._counts, self._made_at_s, TICKS_PER_S,
        )  # fmt: skip
        return made

    def unchanged(self, rows: Rows, generations: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Whether each row still is what it was when `find_ready` gave its generation."""
        same: npt.NDArray[np.bool_] = (rows >= 0) & (self.columns.generation[rows] == generations)
        return same

    def touch(self, rows: Rows, tick: int) -> None:
        """Note a read of rows (none of them -1). Readers do this too: a lost update is harmless."""
        self.columns.accessed[rows] = tick
        self.columns.frequency[rows] += 1

    def touch_one(self, row: int, tick: int) -> None:
        """Note a read of one row."""
        cells = self.cells
        cells.accessed[row] = tick
        cells.frequency[row] = cells.frequency[row] + 1 & 0xFFFFFFFF

    def hold_all(
        self, keys: bytes, now: int, most: int, arena: memoryview
    ) -> "tuple[list[int], list[memoryview], bytes, bytes] | None":
        """Pin chunks, if all are ready at tick `now` and have fewer than `most` pins, and note a read of each.

        Args:
            keys: 16 bytes each.

        Returns:
            Rows, the views of the arena that the chunks make up in order, lengths (u32 each) and checksums (u64 each).
            None, and nothing was pinned, if not all are there, or without the compiled loops.
        """
        if native.hold is None:
            return None
        columns = self.columns
        held: tuple[list[int], list[memoryview], bytes, bytes] | None = native.hold(
            self.records, self._indexes[self._active[0]], keys, now, most, columns.pins, columns.checksum,
            columns.accessed, columns.frequency, arena,
        )  # fmt: skip
        return held

    def _lookup(self, keys: KeyArray, now: int | None) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Rows and generations; with `now` only of ready rows."""
        if native.find is not None:
            rows, generations = np.empty(len(keys), np.int32), np.empty(len(keys), np.uint32)
            raw = np.ascontiguousarray(keys)
            index = self._indexes[self._active[0]]
            native.find(self.records, index, raw, rows, generations, -1 if now is None else now)
            return rows, generations
        rows, _ = self._probe(keys)
        columns, safe = self.columns, np.maximum(rows, 0)
        generations = columns.generation[safe]
        if now is None:
            return rows, generations
        ready = (rows >= 0) & ((generations & 1) == 0) & (generations != 0)
        # The key again, after the generation: the row may have got another owner since the probe.
        ready &= (columns.key_hi[safe] == keys[:, 0]) & (columns.key_lo[safe] == keys[:, 1])
        expires = columns.expires[safe]
        ready &= (expires == 0) | (expires > now)
        return np.where(ready, rows, np.int32(-1)), generations

    def _lookup_side(self, keys: KeyArray, now: int | None) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """The same in the side index."""
        columns = self.columns
        hi, lo = keys[:, 0], keys[:, 1]
        entries = self._side.reshape(-1, SIDE_WINDOW)[_windows_of(hi, lo)]
        named = np.where((entries >= _FIRST) & (entries - _FIRST < self.rows_backed), entries - _FIRST, 0)
        seen = columns.generation[named]
        found = (entries >= _FIRST) & (columns.key_lo[named] == lo[:, None]) & (columns.key_hi[named] == hi[:, None])
        found &= (seen & 1 == 0) & (seen != 0)
        if now is not None:
            expires = columns.expires[named]
            found &= (expires == 0) | (expires > now)
        which = found.argmax(axis=1)[:, None]
        rows = np.where(found.any(axis=1), np.take_along_axis(named, which, axis=1)[:, 0], -1).astype(np.int32)
        return rows, np.take_along_axis(seen, which, axis=1)[:, 0]

    def side_states(self, keys: KeyArray) -> tuple[Bits, Bits]:
        """Of which keys the side index names a row that is ready, and of which one that is just being published."""
        hi, lo = keys[:, 0], keys[:, 1]
        entries = self._side.reshape(-1, SIDE_WINDOW)[_windows_of(hi, lo)]
        if not entries.any():
            return np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        columns = self.columns
        named = np.where((entries >= _FIRST) & (entries - _FIRST < self.rows_backed), entries - _FIRST, 0)
        theirs = (entries >= _FIRST) & (columns.key_lo[named] == lo[:, None]) & (columns.key_hi[named] == hi[:, None])
        seen = columns.generation[named]
        ready = theirs & (seen & 1 == 0) & (seen != 0)
        return ready.any(axis=1), (theirs & ~ready).any(axis=1)

    def _find_side(self, hi: int, lo: int, now: int) -> tuple[int, int, int, int] | None:
        """What `find_ready_one` gives, in the side index. Another row of the key may be about to be taken back."""
        side = self._side_cells
        first = _window_of(hi, lo)
        for position in range(first, first + SIDE_WINDOW):
            row = side[position] - _FIRST
            if 0 <= row < self.rows_backed:
                generation, expires, page, nbytes, key_hi, key_lo = _unpack(self.records, row * _STRIDE)
                if (key_hi, key_lo) == (hi, lo) and generation and not generation & 1 and not 0 < expires <= now:
                    return row, generation, page, nbytes
        return None

    def _home(self, hi: npt.NDArray[np.uint64], lo: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Where the search for keys begins: their halves mixed, since callers may bring keys that are no hashes."""
        mixed = (hi ^ lo) * np.uint64(_MIX) >> np.uint64(32)
        return (mixed * np.uint64(self._size) >> np.uint64(32)).astype(np.int64)

    def _probe(self, keys: KeyArray) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Row and index position of each key; -1 and the position of the empty entry that ended the search."""
        hi, lo = keys[:, 0], keys[:, 1]
        index = self._indexes[self._active[0]]
        key_hi, key_lo = self.columns.key_hi, self.columns.key_lo
        position = self._home(hi, lo)
        rows = np.full(len(keys), -1, np.int32)
        pending = np.arange(len(keys))
        for _ in range(len(index)):  # bounded even if the index is being rewritten under us
            entry = index[position[pending]]
            row = np.maximum(entry - _FIRST, 0)  # row 0 always has memory; one beyond `rows_backed` may not
            found = (entry >= _FIRST) & (key_lo[row] == lo[pending]) & (key_hi[row] == hi[pending])
            rows[pending[found]] = row[found]
            pending = pending[~found & (entry != _EMPTY)]
            if not pending.size:
                break
            position[pending] += 1
            position[position == self._size] = 0
        return rows, position

    # -- writing: the one writer ------------------------------------------------------------------------------------

    def insert(self, keys: KeyArray, rows: Rows) -> None:
        """Enter rows under keys that are not in the index; the keys are also written to their columns first."""
        self.columns.key_hi[rows], self.columns.key_lo[rows] = keys[:, 0], keys[:, 1]
        self._enter(self._indexes[self._active[0]], rows)

    def settle(
        self,
        writer: "Reader",
        keys: KeyArray,
        rows: Rows,
        *,
        nbytes: int,
        group: int,
        chained: bool,
        parent: int,
        depth: int,
    ) -> bool:
        """Enter rows that were published under these keys, and that are lent to this quota group, in one pass.

        Args:
            writer: From `reader`.
            rows: All different.
            parent, depth: Row before the first one, or -1, and the first one's place, if they are a chain.

        Returns:
            False, and nothing is changed, when one of them is not that, or another row has its key.
        """
        reused = writer.settle(rows, keys, self.rows_backed, nbytes, group, chained, parent, depth)
        if reused >= 0:
            self._tombstones -= reused
            self._taken[0] += len(rows)
        return reused >= 0

    def insert_one(self, hi: int, lo: int, row: int) -> None:
        """Enter one row under a key that is not in the index."""
        cells, index = self.cells, self._index_cells[self._active[0]]
        cells.key_hi[row], cells.key_lo[row] = hi, lo
        position = (((hi ^ lo) * _MIX & _LOW_64) >> 32) * self._size >> 32
        while (entry := index[position]) >= _FIRST:
            position = position + 1 if position + 1 < self._size else 0
        index[position] = row + _FIRST
        self._tombstones -= entry == _TOMBSTONE

    def remove(self, rows: Rows) -> None:
        """Take rows out of the index, as far as they are in it. Their generations must be odd by now."""
        for row in rows.tolist():
            self.remove_one(row)

    def remove_one(self, row: int) -> None:
        """Take one row out of the index, if it is in it. Its generation must be odd by now."""
        cells, index, size = self.cells, self._index_cells[self._active[0]], self._size
        hi, lo, wanted = cells.key_hi[row], cells.key_lo[row], row + _FIRST
        position = (((hi ^ lo) * _MIX & _LOW_64) >> 32) * size >> 32
        for _ in range(size):
            entry = index[position]
            if entry == wanted:
                break
            if entry == _EMPTY:
                return
            position = position + 1 if position + 1 < size else 0
        else:
            return
        if index[position + 1 if position + 1 < size else 0] != _EMPTY:
            index[position] = _TOMBSTONE
            self._tombstones += 1
            if self._tombstones > size // 4:
                self.rebuild_index(self.index_entries())
            return
        # Nothing lies behind it, so no search needs to go on here, nor at removed entries just before.
        index[position] = _EMPTY
        position = position - 1 if position else size - 1
        while index[position] == _TOMBSTONE:
            index[position] = _EMPTY
            self._tombstones -= 1
            position = position - 1 if position else size - 1

    def leave_side(self, rows: Rows) -> None:
        """Take rows out of the side index, as far as they are in it."""
        windows = self._side.reshape(-1, SIDE_WINDOW)
        columns = self.columns
        first = _windows_of(columns.key_hi[rows], columns.key_lo[rows])
        which, place = np.nonzero(windows[first] == rows[:, None] + _FIRST)
        windows[first[which], place] = _EMPTY

    def leave_side_all(self, rows: Rows) -> None:
        """Take rows out of the whole side index: not only of the windows of their keys, which may have been others."""
        gone = np.zeros(self.rows, np.bool_)
        gone[rows] = True
        side = self._side
        side[(side >= _FIRST) & gone[np.clip(side - _FIRST, 0, self.rows - 1)]] = _EMPTY

    @property
    def has_published(self) -> bool:
        """Whether the side index may name rows that were not taken into the index yet."""
        return self._published[0] != self._taken[0]

    @property
    def published(self) -> int:
        """How many rows were published, ever."""
        return self._published[0]

    def side_rows(self) -> list[int]:
        """Rows that the side index names."""
        entries = self._side[self._side >= _FIRST]
        return [row for row in (entries - _FIRST).tolist() if row < self.rows_backed]

    def leave_side_one(self, row: int) -> None:
        """The same for one row."""
        cells, side = self.cells, self._side_cells
        first = _window_of(cells.key_hi[row], cells.key_lo[row])
        for position in range(first, first + SIDE_WINDOW):
            if side[position] == row + _FIRST:
                side[position] = _EMPTY

    def note_taken(self, count: int) -> None:
        """So many more of the published rows have left the side index."""
        self._taken[0] += count

    def note_all_taken(self, upto: int) -> None:
        """All have, as of when `published` was this."""
        self._taken[0] = upto

    @property
    def index(self) -> npt.NDArray[np.int32]:
        """The index in use."""
        return self._indexes[self._active[0]]

    def count_removed(self) -> int:
        """How many of its entries are of removed rows. Reads all of it."""
        return int(np.count_nonzero(self.index == _TOMBSTONE))

    def note_removed(self, count: int) -> None:
        """So many are: for whoever begins to write to a table that was there."""
        self._tombstones = count

    def index_entries(self) -> Rows:
        """The rows that the index names, in no order."""
        index = self.index
        entries: Rows = index[(index != _EMPTY) & (index != _TOMBSTONE)] - _FIRST
        return entries

    def rebuild_index(self, rows: Rows) -> None:
        """Make a fresh index of `rows` beside the one in use, then switch: readers find all of them throughout."""
        fresh_number = 1 - self._active[0]
        fresh = self._indexes[fresh_number]
        if self.memory.back(self._layout.indexes[fresh_number], 4 * self._size):
            fresh[:] = _EMPTY
            self._enter(fresh, rows)
            self._active[0] = fresh_number
        else:  # no room for a second one: readers miss what is not entered yet
            fresh = self._indexes[self._active[0]]
            fresh[:] = _EMPTY
            self._enter(fresh, rows)
        self._tombstones = 0

    def _enter(self, index: npt.NDArray[np.int32], rows: Rows) -> None:
        """Put rows at the first free entries from their keys' homes on."""
        if native.enter is not None:
            self._tombstones -= native.enter(self.records, index, np.ascontiguousarray(rows))
            return
        position = self._home(self.columns.key_hi[rows], self.columns.key_lo[rows])
        pending = np.arange(len(rows))
        while pending.size:
            free = pending[index[position[pending]] < _FIRST]
            _, first = np.unique(position[free], return_index=True)  # of several that want one place, one gets it
            placed = free[first]
            self._tombstones -= int(np.count_nonzero(index[position[placed]] == _TOMBSTONE))
            index[position[placed]] = rows[placed] + _FIRST
            waiting = np.ones(len(rows), np.bool_)
            waiting[placed] = False
            pending = pending[waiting[pending]]
            position[pending] += 1
            position[position == self._size] = 0

    def ready_rows(self) -> Rows:
        """All rows that hold a committed chunk. Reads every row: for starts and views, not for each request."""
        generation = self.columns.generation[: self.rows_backed]
        return np.flatnonzero((generation & 1 == 0) & (generation != 0)).astype(np.int32)


def _cell(view: memoryview, field: str, count: int = 1) -> "memoryview[int]":
    fields = _HEADER.fields
    assert fields is not None
    start = fields[field][1]
    return view[start : start + 8 * count].cast("Q")


def _windows_of(hi: npt.NDArray[np.uint64], lo: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Number of the window that may name the row of each key."""
    mixed = (hi ^ lo) * np.uint64(_MIX) >> np.uint64(32)
    return (mixed * np.uint64(_WINDOWS) >> np.uint64(32)).astype(np.int64)


def _window_of(hi: int, lo: int) -> int:
    """First entry of the side index that may name the row of a key."""
    return ((((hi ^ lo) * _MIX & _LOW_64) >> 32) * _WINDOWS >> 32) * SIDE_WINDOW
