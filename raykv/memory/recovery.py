"""Takes over the table of an earlier process.

If a process was killed, its table can be repaired (see `Table.changing`). A table that contradicts itself is refused,
because its chunks cannot be trusted.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import DamagedError, LostError
from raykv.memory.free_rows import blocks
from raykv.memory.index import FIRST, REMOVED
from raykv.memory.layout import MAX_NAMESPACES, RowState
from raykv.memory.slots import Slots, slot_places
from raykv.memory.table import Table
from raykv.types import Rows


class Recovered(NamedTuple):
    """What `recover` found in a table.

    Attributes:
        ready: Rows that hold a chunk.
        quarantined: Rows with a slot that a writer may still fill.
        slots: The arena's slots. The slots of `ready` and `quarantined` rows are in use.
        used_nbytes: Bytes in the used slots, by quota group.
        expiring: Whether any ready or quarantined row has an expiry.
    """

    ready: Rows
    quarantined: Rows
    slots: Slots
    used_nbytes: npt.NDArray[np.int64]
    expiring: bool


def recover(table: Table) -> Recovered:
    """Keep committed chunks, and take all other rows out of the index and the chains. Chunk bytes are not checked.

    Each row gets a new state:

    * A row with an even generation above 0 becomes READY. But a PENDING_DELETE row becomes FREE, because its pins ended
      with the earlier process.
    * A row with an odd generation becomes QUARANTINED if it was not FREE, because its writer may still fill the slot.
    * All other rows become FREE.

    Raises:
        LostError: The table contradicts itself. The message names the contradiction. The table is unchanged.
    """
    _require(table, table.rows_populated > 0, "no rows have real memory")
    columns, used = table.columns, slice(0, max(1, table.rows_used()))
    generations, state = columns.generation[used].copy(), columns.state[used]
    _require(table, state.max() <= max(RowState), "rows in unknown states")
    odd = (generations & 1).astype(np.bool_)
    quarantined = odd & (state != RowState.FREE)
    deleted = np.flatnonzero((state == RowState.PENDING_DELETE) & ~odd)
    generations *= ~odd
    generations[deleted] = 0
    is_ready = generations != 0
    ready, unfinished = (np.flatnonzero(which).astype(np.int32) for which in (is_ready, quarantined))
    found = _check(table, ready, unfinished)
    with table.changing() as was_dirty:
        columns.generation[deleted] |= 1
        state[:] = np.uint8(RowState.READY) * is_ready + np.uint8(RowState.QUARANTINED) * quarantined
        columns.pins[used] = 0
        columns.children[used] = 0
        _clear_unused(table, used.stop)
        if was_dirty or not _index_is_exact(table, ready):
            table.rebuild_index(ready)
        columns.parent[unfinished] = -1
        for block in blocks(len(ready)):
            _relink(table, ready[block], generations)
        table.header["incarnation"] += 1
        found.slots.open_extents()
    return found


def require_sound(table: Table) -> None:
    """Check a table in use. The caller holds the lock of the node, so that nothing changes.

    Raises:
        DamagedError: The table contradicts itself. The message names the contradiction.
    """
    columns, populated = table.columns, slice(0, table.rows_populated)
    generations, state = columns.generation[populated], columns.state[populated]
    try:
        _require(table, len(state) > 0, "no rows have real memory")
        _require(table, state.max() <= max(RowState), "rows in unknown states")
        is_ready = state == RowState.READY
        _require(table, (generations[is_ready] != 0).all(), "ready rows without a chunk")
        _require(table, not (generations[is_ready] & 1).any(), "ready rows that are being written")
        parents = columns.parent[populated][is_ready]
        _require(table, ((parents >= -1) & (parents < table.rows)).all(), "parents outside the table")
        others = (state != RowState.FREE) & ~is_ready
        _check(table, *(np.flatnonzero(which).astype(np.int32) for which in (is_ready, others)))
    except LostError as error:
        raise DamagedError(str(error)) from None


def _clear_unused(table: Table, used: int) -> None:
    """Remove pins and children from rows that were never in use. Only damage can have put them there."""
    for column in (table.columns.pins, table.columns.children):
        unused = column[used : table.rows_populated]
        if unused.any():
            unused[:] = 0


def _check(table: Table, ready: Rows, unfinished: Rows) -> Recovered:
    """Check the rows that have a slot, and enter these rows in new `Slots`."""
    sizes = table.extent_slots
    impossible = (sizes % SLOT_ALIGNMENT_NBYTES != 0) | (sizes > table.extent_nbytes)
    _require(table, not impossible.any(), "extents of impossible slot sizes")
    slots, used_nbytes, expiring = Slots(sizes, table.extent_nbytes), np.zeros(MAX_NAMESPACES, np.int64), False
    for rows in (ready, unfinished):
        for block in blocks(len(rows)):
            _check_rows(table, rows[block], slots, used_nbytes)
            expiring = expiring or bool(table.columns.expires[_range(rows[block])].any())
    return Recovered(ready, unfinished, slots, used_nbytes, expiring)


def _check_rows(table: Table, rows: Rows, slots: Slots, used_nbytes: npt.NDArray[np.int64]) -> None:
    columns, where = table.columns, _range(rows)
    pages, nbytes, groups = columns.page[where].copy(), columns.nbytes[where], columns.group[where]
    extent_pages = table.extent_nbytes // SLOT_ALIGNMENT_NBYTES
    _require(table, pages.max() < table.extents * extent_pages, "chunks outside the arena")
    places = slot_places(pages, table.extent_slots, table.extent_nbytes)
    steps, within = places.steps, pages - places.starts
    _require(table, steps.all(), "chunks outside the arena")
    aligned = (places.numbers - places.starts) * steps == within
    _require(table, aligned.all() and (within + steps).max() <= extent_pages, "chunks off their slots")
    slot_sizes = steps * np.uint32(SLOT_ALIGNMENT_NBYTES)
    # If a chunk is longer than its slot, the unsigned subtraction wraps around to a very large number.
    fits = slot_sizes - nbytes < SLOT_ALIGNMENT_NBYTES
    _require(table, fits.all(), "chunks that do not fit their slots")
    _require(table, slots.enter(rows, places), "two chunks in one slot")
    known = table.known_namespaces
    if (groups == groups[0]).all() and groups[0] < MAX_NAMESPACES and len(slot_sizes) == 1:  # the usual case
        _require(table, known[groups[0]], "chunks of unknown namespaces")
        used_nbytes[groups[0]] += len(rows) * int(slot_sizes[0])
    else:
        _require(table, groups.max() < MAX_NAMESPACES and known[groups].all(), "chunks of unknown namespaces")
        np.add.at(used_nbytes, groups, slot_sizes)


def _require(table: Table, sound: bool | np.bool_, problem: str) -> None:
    if not sound:
        raise LostError(f"{table.memory.path} is damaged: {problem}")


def _range(rows: Rows) -> Rows | slice:
    """Return the rows as a slice if they are consecutive, because numpy reads a slice faster."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows


def _index_is_exact(table: Table, ready: Rows) -> bool:
    """Whether the index has one entry for each ready row, and none for other rows. Sets `table.removed`.

    Compares the number of entries, their sum and the sum of their squares. Damage almost always changes one of these.
    """
    index, expected = table.index, ready + np.int32(FIRST)
    table.removed = removed = sum(int(np.count_nonzero(index[block] == REMOVED)) for block in blocks(len(index)))
    if np.count_nonzero(index) - removed != len(ready):
        return False
    sums = index.sum() - removed, index.dot(index) - np.int32(removed)
    return sums == (expected.sum(), expected.dot(expected))


def _relink(table: Table, ready: Rows, generations: npt.NDArray[np.uint32]) -> None:
    """Remove wrong links to parents, and count the children of each parent.

    A link is right if the parent's row is ready, has the same chunk as when the link was made, and has a depth lower by
    one. `generations` has one entry per row of the table. The entry is 0 if the row is not ready.
    """
    columns, rows = table.columns, _range(ready)
    parents = columns.parent[rows]
    above = np.clip(parents, 0, len(generations) - 1).astype(np.intp)  # numpy indexes fastest with `intp`
    expected = generations[above]
    linked = (parents == above) & (expected != 0) & (expected == columns.parent_generation[rows])
    linked &= columns.depth[rows] == columns.depth[above] + np.uint32(1)
    columns.parent[ready[~linked & (parents != -1)]] = -1
    np.add.at(columns.children, above[linked], np.int32(1))
