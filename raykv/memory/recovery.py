"""Taking over a table that another process left behind, if that can be done.

A process that is killed leaves it sound (see `Table.changing`). Anything else may not: a file of another program, one
that was cut, bytes that were overwritten. Then it is better to begin anew than to serve what cannot be trusted.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import LostError
from raykv.memory.rows import LENT
from raykv.memory.table import MAX_NAMESPACES, Table
from raykv.types import Bits, Rows

BLOCK_ROWS: Final = 1 << 16


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
    chunks = 0
    for first in range(0, table.rows_backed, BLOCK_ROWS):  # what is looked at stays in the cache
        chunks += _require_sound_rows(table, sizes, taken, slice(first, min(first + BLOCK_ROWS, table.rows_backed)))
    if np.count_nonzero(taken) != chunks:
        raise LostError(f"{table.memory.path} is damaged: two chunks in one slot")


def _require_sound_rows(table: Table, sizes: npt.NDArray[np.int64], taken: Bits, block: slice) -> int:
    """The same for some rows; notes the first pages of their chunks in `taken`. Returns how many have a slot."""
    columns = table.columns
    nbytes = columns.nbytes[block]
    rows = np.flatnonzero((columns.generation[block] != 0) & (nbytes != 0))
    nbytes, pages = nbytes[rows], columns.page[block][rows].astype(np.int64)
    extent_pages = table.extent_nbytes // SLOT_ALIGNMENT_NBYTES
    extents = pages // extent_pages
    within = (pages - extents * extent_pages) * SLOT_ALIGNMENT_NBYTES
    slots = sizes[np.minimum(extents, table.extents - 1)]
    parents, namespaces = columns.parent[block][rows], columns.namespace[block][rows]
    used = (table.namespaces["text"] != b"")[np.minimum(namespaces, MAX_NAMESPACES - 1)]
    for complaint, wrong in (
        ("chunks outside the arena", (extents >= table.extents) | (slots == 0)),
        ("chunks off their slots", (within % np.maximum(slots, 1) != 0) | (within + slots > table.extent_nbytes)),
        ("chunks larger than their slots", nbytes > slots),
        ("parents that are no rows", (parents < LENT) | (parents >= table.rows)),
        ("chunks of unknown namespaces", (namespaces >= MAX_NAMESPACES) | ~used),
    ):
        if np.any(wrong):
            raise LostError(f"{table.memory.path} is damaged: {complaint}")
    taken[pages] = True
    return len(rows)


def index_is_whole(table: Table, ready: Rows) -> bool:
    """Whether the index in use names only rows, and each ready one once."""
    entries = table.index_entries()
    if entries.size and (entries.min() < 0 or entries.max() >= table.rows):
        return False
    return bool((np.bincount(entries, minlength=table.rows)[ready] == 1).all())


def take_over(table: Table) -> tuple[Rows, Rows]:
    """Keep what was committed or published, and whole; take everything else out of index and chains.

    Writers may not have noticed yet that the node died, and still be writing, and publishing.

    Returns:
        Rows of chunks; and rows, in no index, whose slots somebody may still be writing to.
    """
    columns, everywhere = table.columns, slice(0, table.rows_backed)
    generation = columns.generation[everywhere].copy()
    ready = np.flatnonzero((generation & 1 == 0) & (generation != 0)).astype(np.int32)
    unfinished = np.flatnonzero((generation & 1 == 1) & (columns.nbytes[everywhere] > 0)).astype(np.int32)
    lent = columns.parent[everywhere] == LENT
    published, told = ready[lent[ready]], ready[~lent[ready]]
    torn = table.dirty or not index_is_whole(table, told)
    with table.changing():
        had_keys = unfinished[~lent[unfinished]]
        if torn:
            table.rebuild_index(told)
        else:
            table.remove(had_keys)
        columns.parent[had_keys] = -1
        columns.pins[everywhere] = 0  # a pin lives as long as its connection, and those are gone
        repeated = np.array([row for row in published.tolist() if not _enter_published(table, row)], np.int32)
        if repeated.size:
            ready, unfinished = np.setdiff1d(ready, repeated), np.append(unfinished, repeated)
        table.leave_side(published)
        columns.parent[published] = -1
        parents = columns.parent[ready]
        is_ready = np.zeros(table.rows, np.bool_)
        is_ready[ready] = True
        parents = np.where((parents >= 0) & is_ready[parents], parents, np.int32(-1))
        columns.parent[ready] = parents
        columns.children[everywhere] = np.bincount(parents[parents >= 0], minlength=table.rows_backed)
        table.incarnation += 1
    return ready, unfinished


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
