"""Taking over a table that another process left behind, if that can be done.

A process that is killed leaves it sound (see `Table.changing`). Anything else may not: a file of another program, one
that was cut, bytes that were overwritten. Then it is better to begin anew than to serve what cannot be trusted.
"""

from typing import Final

import numpy as np

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import LostError
from raykv.memory import native
from raykv.memory.rows import LENT
from raykv.memory.table import MAX_NAMESPACES, RECORD, Table
from raykv.types import Bits, Rows

BLOCK_ROWS: Final = 1 << 16
COMPLAINTS: Final = (
    "chunks outside the arena",
    "chunks off their slots",
    "chunks larger than their slots",
    "parents that are no rows",
    "chunks of unknown namespaces",
    "chunks without bytes",
)
"""What may be wrong with a row. Of several, the first is told."""


def require_sound(table: Table) -> None:
    """Refuse a table that contradicts itself. Bytes of chunks are not read: checksums stand behind them.

    Raises:
        LostError: Says what is wrong.
    """
    if table.rows_backed > table.rows:
        raise LostError(f"{table.memory.path} is damaged: more rows with memory than rows")
    sizes = table.extent_slots.astype(np.int64)
    if np.any((sizes % SLOT_ALIGNMENT_NBYTES != 0) | (sizes > table.extent_nbytes)):
        raise LostError(f"{table.memory.path} is damaged: extents of impossible slot sizes")
    taken = np.zeros(table.extents * (table.extent_nbytes // SLOT_ALIGNMENT_NBYTES), np.bool_)
    known = table.known_namespaces
    look = _look if native.check is None else _look_compiled
    chunks = 0
    for first in range(0, table.rows_backed, BLOCK_ROWS):  # what is looked at stays in the cache
        found = look(table, known, taken, slice(first, min(first + BLOCK_ROWS, table.rows_backed)))
        if found < 0:
            raise LostError(f"{table.memory.path} is damaged: {COMPLAINTS[-1 - found]}")
        chunks += found
    if np.count_nonzero(taken) != chunks:
        raise LostError(f"{table.memory.path} is damaged: two chunks in one slot")


def _look(table: Table, known: Bits, taken: Bits, block: slice) -> int:
    """Look at some rows, and note the first pages of their chunks in `taken`.

    Returns:
        How many have a slot; or for the first of COMPLAINTS that one of them gives cause to -1, for the next -2.
    """
    columns = table.columns
    generation, nbytes = columns.generation[block], columns.nbytes[block]
    rows = np.flatnonzero((generation != 0) & (nbytes != 0))
    without_bytes = (generation != 0) & (generation & 1 == 0) & (nbytes == 0)
    nbytes, pages = nbytes[rows], columns.page[block][rows].astype(np.int64)
    extent_pages = table.extent_nbytes // SLOT_ALIGNMENT_NBYTES
    extents = pages // extent_pages
    within = (pages - extents * extent_pages) * SLOT_ALIGNMENT_NBYTES
    slots = table.extent_slots[np.minimum(extents, table.extents - 1)].astype(np.int64)
    parents, namespaces = columns.parent[block][rows], columns.namespace[block][rows]
    wrong = (
        (extents >= table.extents) | (slots == 0),
        (within % np.maximum(slots, 1) != 0) | (within + slots > table.extent_nbytes),
        nbytes > slots,
        (parents < LENT) | (parents >= table.rows),
        (namespaces >= MAX_NAMESPACES) | ~known[np.minimum(namespaces, MAX_NAMESPACES - 1)],
        without_bytes,
    )
    for complaint, some in enumerate(wrong):
        if np.any(some):
            return -1 - complaint
    taken[pages] = True
    return len(rows)


def _look_compiled(table: Table, known: Bits, taken: Bits, block: slice) -> int:
    assert native.check is not None
    columns = table.columns
    found: int = native.check(
        _records(table, block), columns.parent[block], columns.namespace[block], table.extent_slots, known, taken,
        table.rows, table.extent_nbytes,
    )  # fmt: skip
    return found


def _records(table: Table, block: slice) -> memoryview:
    return table.records[block.start * RECORD.itemsize : block.stop * RECORD.itemsize]


def removed_entries(table: Table, ready: Rows) -> int:
    """How many entries of the index are of removed rows; -1 unless it names only rows, and each ready one once."""
    if native.survey is not None:
        removed: int = native.survey(table.index, table.rows, ready)
        return removed
    entries = table.index_entries()
    if entries.size and (entries.min() < 0 or entries.max() >= table.rows):
        return -1
    if (np.bincount(entries, minlength=table.rows)[ready] != 1).any():
        return -1
    return table.count_removed()


def take_over(table: Table) -> tuple[Rows, Rows]:
    """Keep what was committed or published, and whole; take everything else out of index and chains.

    Writers may not have noticed yet that the node died, and still be writing, and publishing.

    Returns:
        Rows of chunks; and rows, in no index, whose slots somebody may still be writing to.
    """
    columns, everywhere = table.columns, slice(0, table.rows_backed)
    ready, unfinished, published = _sort_out(table)
    told = np.setdiff1d(ready, published, assume_unique=True) if published.size else ready
    removed = -1 if table.dirty else removed_entries(table, told)
    with table.changing():
        had_keys = unfinished[columns.parent[unfinished] != LENT]
        if removed < 0:
            table.rebuild_index(np.append(told, _of_new_keys(table, told, published)))
        else:
            table.note_removed(removed)
            table.remove(had_keys)
        columns.parent[had_keys] = -1
        columns.pins[everywhere] = 0  # a pin lives as long as its connection, and those are gone
        repeated = np.array([row for row in published.tolist() if not _enter_published(table, row)], np.int32)
        if repeated.size:
            ready, unfinished = np.setdiff1d(ready, repeated), np.append(unfinished, repeated)
        table.leave_side_all(np.append(ready, published))  # the process may have ended before an entry was cleared
        columns.parent[published] = -1
        _chain(table, ready)
        table.incarnation += 1
    return ready, unfinished


def _sort_out(table: Table) -> tuple[Rows, Rows, Rows]:
    """Rows that are ready, those that have a slot but are not, and those of the ready ones that are lent."""
    columns, everywhere = table.columns, slice(0, table.rows_backed)
    if native.sort_out is not None:
        found = [np.empty(table.rows_backed, np.int32) for _ in range(3)]
        counts = native.sort_out(_records(table, everywhere), columns.parent[everywhere], *found)
        ready, unfinished, published = (rows[:count] for rows, count in zip(found, counts, strict=True))
        return ready, unfinished, published
    generation = columns.generation[everywhere].copy()
    ready = np.flatnonzero((generation & 1 == 0) & (generation != 0)).astype(np.int32)
    unfinished = np.flatnonzero((generation & 1 == 1) & (columns.nbytes[everywhere] > 0)).astype(np.int32)
    return ready, unfinished, ready[columns.parent[ready] == LENT]


def _chain(table: Table, ready: Rows) -> None:
    """Let ready rows have only ready rows for parents, and count children anew."""
    columns, everywhere = table.columns, slice(0, table.rows_backed)
    if native.chain is not None:
        native.chain(columns.parent[everywhere], columns.children[everywhere], np.ascontiguousarray(ready))
        return
    parents = columns.parent[ready]
    is_ready = np.zeros(table.rows, np.bool_)
    is_ready[ready] = True
    parents = np.where((parents >= 0) & is_ready[parents], parents, np.int32(-1))
    columns.parent[ready] = parents
    columns.children[everywhere] = np.bincount(parents[parents >= 0], minlength=table.rows_backed)


def _of_new_keys(table: Table, told: Rows, published: Rows) -> Rows:
    """Published rows whose keys none that was told of has, one a key: readers may have them from the index by now."""
    hi, lo = table.columns.key_hi, table.columns.key_lo
    alike = told[np.isin(lo[told], lo[published])]
    held = set(zip(hi[alike].tolist(), lo[alike].tolist(), strict=True))
    found: list[int] = []
    for row, key in zip(
        published.tolist(), zip(hi[published].tolist(), lo[published].tolist(), strict=True), strict=True
    ):
        if key not in held:
            held.add(key)
            found.append(row)
    return np.array(found, np.int32)


def _enter_published(table: Table, row: int) -> bool:
    """Enter a published row into the index if it is not in it. False: another row has its key, and it is odd now."""
    cells = table.cells
    key = cells.key_hi[row], cells.key_lo[row]
    existing = table.find_one(*key)
    if existing < 0:
        table.insert_one(*key, row)
    elif existing != row:
        cells.generation[row] = cells.generation[row] + 1 & 0xFFFFFFFF
        return False
    return True
