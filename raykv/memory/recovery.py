"""Taking over the table of an earlier process.

A killed process leaves a table that can be repaired (see `Table.changing`). A file that was cut short or overwritten is
refused, since its chunks cannot be trusted.
"""

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import LostError
from raykv.memory.free_rows import blocks
from raykv.memory.index import FIRST, REMOVED
from raykv.memory.layout import MAX_NAMESPACES, RowState
from raykv.memory.slots import slot_places
from raykv.memory.table import Table
from raykv.types import Bits, Rows


def require_sound(table: Table) -> None:
    """Raise LostError, which names the contradiction, if the table contradicts itself. Does not check chunk bytes."""
    sizes, known = table.extent_slots, table.known_namespaces
    impossible = (sizes % SLOT_ALIGNMENT_NBYTES != 0) | (sizes > table.extent_nbytes)
    _require(table, not impossible.any(), "extents of impossible slot sizes")
    taken = np.zeros(table.extents * (table.extent_nbytes // SLOT_ALIGNMENT_NBYTES), np.bool_)
    chunks = sum(_check_block(table, block, known, taken) for block in blocks(table.rows_populated))
    _require(table, np.count_nonzero(taken) == chunks, "two chunks in one slot")


def _check_block(table: Table, block: slice, known: Bits, taken: Bits) -> int:
    """Check the rows of a block, and set their slots in `taken`. Returns the number of rows that have a slot."""
    columns = table.columns
    generation, state = columns.generation[block].copy(), columns.state[block]
    _require(table, state.max() <= max(RowState), "rows in unknown states")
    has_slot = (generation != 0) & ((generation & 1 == 0) | (state != RowState.FREE))
    rows: Rows | slice = slice(None) if has_slot.all() else np.flatnonzero(has_slot).astype(np.int32)
    pages, nbytes = columns.page[block][rows].copy(), columns.nbytes[block][rows]
    if not len(pages):
        return 0
    _require(table, pages.max() < len(taken), "chunks outside the arena")
    slots = slot_places(pages, table.extent_slots, table.extent_nbytes)
    _require(table, slots.steps.all(), "chunks outside the arena")
    within, extent_pages = pages - slots.starts, table.extent_nbytes // SLOT_ALIGNMENT_NBYTES
    aligned = (slots.numbers - slots.starts) * slots.steps == within
    _require(table, aligned.all() and (within + slots.steps).max() <= extent_pages, "chunks off their slots")
    # The subtraction wraps a length of 0 to a number larger than any slot.
    fits = (nbytes - np.uint32(1)) // np.uint32(SLOT_ALIGNMENT_NBYTES) < slots.steps
    _require(table, fits.all(), "chunks without bytes, or larger than their slots")
    parents, groups = columns.parent[block][rows], columns.group[block][rows]
    _require(table, parents.min() >= -1 and parents.max() < table.rows, "parents that are no rows")
    _require(table, groups.max() < MAX_NAMESPACES and known[groups].all(), "chunks of unknown namespaces")
    taken[slots.numbers] = True
    return len(pages)


def _require(table: Table, sound: bool | np.bool_, problem: str) -> None:
    if not sound:
        raise LostError(f"{table.memory.path} is damaged: {problem}")


def take_over(table: Table) -> tuple[Rows, Rows]:
    """Keep committed chunks; take all other rows out of the index and the chains.

    A row with an even generation becomes READY. But PENDING_DELETE becomes FREE, since pins end with the connections of
    the earlier process. A row with an odd generation that was not FREE becomes QUARANTINED, since its writer may still
    fill the slot. Returns: the ready rows and the quarantined rows.
    """
    columns, populated = table.columns, slice(0, table.rows_populated)
    generations, state = columns.generation[populated].copy(), columns.state[populated]
    was_dirty, odd = bool(table.header["dirty"]), (generations & 1).astype(np.bool_)
    quarantined = odd & (state != RowState.FREE)
    deleted = np.flatnonzero(~odd & (state == RowState.PENDING_DELETE))
    generations[odd] = generations[deleted] = 0
    is_ready = generations != 0
    with table.changing():
        columns.generation[deleted] |= 1
        state[:] = np.uint8(RowState.READY) * is_ready + np.uint8(RowState.QUARANTINED) * quarantined
        columns.pins[populated] = 0
        ready, unfinished = (np.flatnonzero(which).astype(np.int32) for which in (is_ready, quarantined))
        if was_dirty or not _index_is_exact(table, ready):
            table.rebuild_index(ready)
        columns.parent[unfinished] = -1
        columns.children[populated] = 0
        for block in blocks(len(ready)):
            _relink(table, ready[block], generations)
        table.header["incarnation"] += 1
    return ready, unfinished


def _index_is_exact(table: Table, ready: Rows) -> bool:
    """Whether the index has one entry for each ready row, and no other rows. Sets `table.removed`.

    Compares the number of entries, their sum and the sum of their squares. Damage changes at least one of these.
    """
    index, expected = table.index, ready + np.int32(FIRST)
    table.removed = removed = int(np.count_nonzero(index == REMOVED))
    if np.count_nonzero(index) - removed != len(ready) or index.min() < 0 or index.max() >= table.rows + FIRST:
        return False
    sums = index.sum() - removed, index.dot(index) - np.int32(removed)
    return sums == (expected.sum(), expected.dot(expected))


def _relink(table: Table, ready: Rows, generations: npt.NDArray[np.uint32]) -> None:
    """Remove links to parents that are not ready, or whose depth is not one less than the chunk's. Count children.

    `generations` is 0 for rows that are not ready.
    """
    columns, first, last = table.columns, int(ready[0]), int(ready[-1])
    rows: Rows | slice = slice(first, last + 1) if last - first == len(ready) - 1 else ready
    parents = columns.parent[rows]
    above = np.clip(parents, 0, len(generations) - 1).astype(np.intp)  # numpy indexes faster by its own type
    expected = generations[above]
    linked = (parents == above) & (expected != 0) & (expected == columns.parent_generation[rows])
    linked &= columns.depth[rows] == columns.depth[above] + np.uint32(1)
    columns.parent[rows] = np.where(linked, parents, np.int32(-1))
    np.add.at(columns.children, above[linked], np.int32(1))
