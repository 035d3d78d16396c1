"""Whether a table that another process left behind can be taken over.

A process that is killed leaves it sound (see `Table.changing`). Anything else may not: a file of another program, one
that was cut, bytes that were overwritten. Then it is better to begin anew than to serve what cannot be trusted.
"""

import numpy as np

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import LostError
from raykv.memory.rows import LENT
from raykv.memory.table import MAX_NAMESPACES, Table
from raykv.types import Rows


def require_sound(table: Table) -> None:
    """Refuse a table that contradicts itself. Bytes of chunks are not read: checksums stand behind them.

    Raises:
        LostError: Says what is wrong.
    """
    columns = table.columns
    if table.rows_backed > table.rows:
        raise LostError(f"{table.memory.path} is damaged: more rows with memory than rows")
    rows = np.flatnonzero((columns.generation[: table.rows_backed] != 0) & (columns.nbytes[: table.rows_backed] != 0))
    sizes = table.extent_slots.astype(np.int64)
    pages = columns.page[rows].astype(np.int64)
    extent_pages = table.extent_nbytes // SLOT_ALIGNMENT_NBYTES
    extents, within = pages // extent_pages, (pages % extent_pages) * SLOT_ALIGNMENT_NBYTES
    slots = sizes[np.minimum(extents, table.extents - 1)]
    parents = columns.parent[rows]
    used = (table.namespaces["text"] != b"")[np.minimum(columns.namespace[rows], MAX_NAMESPACES - 1)]
    for complaint, wrong in (
        ("extents of impossible slot sizes", (sizes % SLOT_ALIGNMENT_NBYTES != 0) | (sizes > table.extent_nbytes)),
        ("chunks outside the arena", (extents >= table.extents) | (slots == 0)),
        ("chunks off their slots", (within % np.maximum(slots, 1) != 0) | (within + slots > table.extent_nbytes)),
        ("chunks larger than their slots", columns.nbytes[rows] > slots),
        ("two chunks in one slot", len(np.unique(pages)) != len(pages)),
        ("parents that are no rows", (parents < LENT) | (parents >= table.rows)),
        ("chunks of unknown namespaces", (columns.namespace[rows] >= MAX_NAMESPACES) | ~used),
    ):
        if np.any(wrong):
            raise LostError(f"{table.memory.path} is damaged: {complaint}")


def index_is_whole(table: Table, ready: Rows) -> bool:
    """Whether the index in use names only rows, and each ready one once."""
    entries = table.index_entries()
    if entries.size and (entries.min() < 0 or entries.max() >= table.rows):
        return False
    return bool((np.bincount(entries, minlength=table.rows)[ready] == 1).all())
