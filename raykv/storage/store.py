"""One node's storage: reserve, commit, pin, evict. The single writer of its chunk table.

Plain and synchronous: no thread, no socket, no clock. The node (`raykv.node.node`) calls it under one lock and passes the
time; readers use the table and the arena directly (`raykv.memory.reader`) and need none of this.
"""

import logging
import struct
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.config import SLOT_ALIGNMENT_NBYTES, NamespaceConfig, StorageConfig
from raykv.errors import ConfigError, LostError, UsageError
from raykv.eviction import policy
from raykv.eviction.base import Policy
from raykv.eviction.user_policy import Score
from raykv.memory.arena import SharedMemory, require_pages, require_room
from raykv.memory.numa import in_turns, spread, usable_nodes
from raykv.memory.recovery import require_sound, take_over
from raykv.memory.rows import LENT
from raykv.memory.slots import FEW, Slots, slot_nbytes
from raykv.memory.table import MAX_DEPTH, Table, table_nbytes
from raykv.protocol import chunk_keys
from raykv.protocol.reasons import Place, Reason
from raykv.storage.eviction_log import Departures
from raykv.storage.quota_groups import QuotaGroups
from raykv.storage.room import MAX_PINS, NO_ROWS, SWEEP_ROWS, Room
from raykv.types import Bits, KeyArray, Rows

log = logging.getLogger(__name__)

OWN_TIMEOUT_S = 10.0
"""How long to wait for the process that owned the memory before, which may just be dying."""
BACKED_AHEAD_NBYTES: Final = 256 << 20
BACKED_AHEAD_SHARE: Final = 8
"""Free extents that are given real memory ahead of need: so many bytes, or this part of the arena if that is less."""
PUBLISH_S: Final = 0.001
"""How long a row that is just being published is waited for: it takes a writer a microsecond, if it is not killed."""
ROWS_AHEAD: Final = 1 << 18
"""Free rows that are given real memory ahead of need."""
_PAIR: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room for chunks that nobody else is writing.

    Attributes:
        positions: Which of the keys asked for got room, in order; others exist, are being written, or found none.
        rows: Their rows, to name them in `commit` and `abort`.
        offsets: Where in the arena their bytes go.
        full: Keys that found no room.
    """

    positions: npt.NDArray[np.int32]
    rows: Rows
    offsets: npt.NDArray[np.uint64]
    full: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """Chunks that stay until `unpin`. Entries of keys that are not here have row -1.

    Attributes:
        rows, offsets, nbytes, checksums: One entry a key.
    """

    rows: Rows
    offsets: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Loan:
    """Slots without keys, for a writer to fill and then to `store`.

    Attributes:
        rows, offsets: Of each slot its row, and where in the arena it begins.
    """

    rows: Rows
    offsets: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run of keys stands among what is here.

    Attributes:
        existing: Row of each key, -1 where there is none.
        anchor: Row of the chunk before keys[0], -1 if there is none or it is not here.
        depth: Of keys[0] in its chain.
    """

    existing: Rows
    anchor: int
    depth: int


class Store:
    """The arena, the table and the slots of one node, and all that changes them.

    Attributes:
        table, arena: Shared with readers.
        quota groups: Who may use it.
        counters: See `Counters`.
        recovered: Chunks found at the start.
        memory_nodes: Memory node of each part of the arena (`numa.part_of`); () if nothing was asked of the kernel.
    """

    def __init__(self, config: StorageConfig, table: Table, arena: SharedMemory, *, now_s: float) -> None:
        """Take over the table: drop what nobody finished writing, keep what was committed.

        Everything that this process keeps for itself (free slots, free rows, use by quota group) is derived from the
        columns here, so it cannot disagree with them.
        """
        self.config, self.table, self.arena = config, table, arena
        wanted_nodes = usable_nodes() if config.numa == "auto" else ()
        self.memory_nodes = spread(arena, config.extents, config.extent_nbytes, wanted_nodes)
        self._added: list[bytes] = []
        ready, unfinished = take_over(table)
        self.recovered = len(ready)
        slots = Slots(
            table.extent_slots,
            config.extent_nbytes,
            partial(_back, arena, config.extent_nbytes, hurry=True),
            table.columns.page,
            np.concatenate([ready, unfinished]) if unfinished.size else ready,
            in_turns(config.extents, len(self.memory_nodes)) if self.memory_nodes else None,
        )
        self.room = Room(config, table, slots, ready=ready, unfinished=unfinished, now_s=now_s)
        self.counters = self.room.counters
        self.groups = QuotaGroups(table)
        self.groups.let_go = self.room.let_go
        self._writer = table.reader(arena.view)
        self._now = table.ticks(now_s)
        self._doomed: dict[int, int] = {}  # pinned rows of quota groups that were dropped, and their generations then
        self._spent: set[int] = set()  # lent rows whose chunk came and went before its writer told us of it
        self.take_in(now_s=now_s)

    @classmethod
    def open(cls, config: StorageConfig, prefix: Path | None, *, now_s: float) -> "Store":
        """Map this node's files, or make them.

        Args:
            prefix: Path that the files' names begin with. None: anonymous memory, gone with the process.

        Raises:
            ConfigError: No room for the arena or the table, the place for them is no directory, or its pages are not
                those that the configuration asks for.
        """
        require_room(config.shm_dir, 0, field="shm_dir")
        if prefix is not None:
            try:
                return cls._attach(config, prefix, now_s=now_s)
            except LostError as error:  # none there, of another size or version, or damaged
                log.info("starting empty: %s", str(error))  # as text: whoever keeps the record must not keep the memory
                remove_files(prefix)
        size = config.extents * config.extent_nbytes
        table_path, arena_path = (None, None) if prefix is None else store_files(prefix)
        require_room(config.shm_dir, size + table_nbytes(config.rows, config.extents), field="arena_nbytes")
        arena = SharedMemory.create(arena_path, size, huge_pages=config.huge_pages)
        try:
            require_pages(arena, config.extent_nbytes)
            table = Table.create(
                table_path, rows=config.rows, extents=config.extents, extent_nbytes=config.extent_nbytes, now_s=now_s
            )
        except ConfigError:
            if prefix is not None:
                remove_files(prefix)
            raise
        table.memory.own(timeout_s=OWN_TIMEOUT_S)
        return cls(config, table, arena, now_s=now_s)

    @classmethod
    def _attach(cls, config: StorageConfig, prefix: Path, *, now_s: float) -> "Store":
        table_path, arena_path = store_files(prefix)
        memory = SharedMemory.attach(table_path, writable=True, huge_pages="try")
        memory.own(timeout_s=OWN_TIMEOUT_S)
        table = Table(memory)
        arena = SharedMemory.attach(arena_path, writable=True, huge_pages=config.huge_pages)
        same = (
            (table.rows, table.extents, table.extent_nbytes) == (config.rows, config.extents, config.extent_nbytes)
            and arena.nbytes == config.extents * config.extent_nbytes
            and table.ticks(now_s) < 1 << 31  # a year and more: times are about to wrap
        )
        if not same:
            raise LostError(f"{table_path} was made with another configuration")
        require_pages(arena, config.extent_nbytes)
        require_sound(table)
        QuotaGroups(table)
        return cls(config, table, arena, now_s=now_s)

    # -- writing ----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        keys: KeyArray,
        nbytes: int,
        group: int,
        *,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        now_s: float,
    ) -> Reserved:
        """Make room for those `keys` that this store does not hold yet.

        A reserved chunk is invisible until `commit`. Keys already held, or being written by another caller, are left
        out, and are not evicted to make room for the rest: storing a prefix must not lose its head. When not all find
        room, the first ones get it.

        Args:
            keys: Chunks, all of the same size; a repeated key gets room once.
            nbytes: Size of each chunk in bytes.
            quota group: Number from `groups`.
            chained: Whether each key follows the one before it in one prefix.
            parent: Key, shape [1, 2], of the chunk that keys[0] follows.
            depth: Place of keys[0] in its chain, in case its parent is not here to tell.
            now_s: Time by the host's monotonic clock.

        Raises:
            UsageError: The size is 0 or above an extent, or the depth is no such number.
        """
        self._require_size(nbytes, depth)
        now = self.table.ticks(now_s)
        self._wake(now_s=now_s)
        place = self._find_place(keys, parent, depth, now)
        positions = _first_of_each(keys, np.flatnonzero(place.existing < 0))
        protected = np.append(place.existing, np.int32(place.anchor))
        rows, pages = self.room.take(len(positions), slot_nbytes(nbytes), group, protected, now)
        full, positions = len(positions) - len(rows), positions[: len(rows)]
        self.counters.refused_full += full
        self._enter(keys, positions, rows, nbytes, place, chained=chained)
        published = self._published_meanwhile(keys[positions])
        if published.any():  # they are told as stored, and stay; who aborts this reservation must not take them along
            self.room.free(rows[published])
            positions, rows, pages = positions[~published], rows[~published], pages[~published]
        return Reserved(positions.astype(np.int32), rows, _offsets(pages), full)

    def _published_meanwhile(self, keys: KeyArray) -> Bits:
        """Of which keys, that have just been entered, others published a row before they could see that.

        As publishers do, so that one of two sees the other: enter first, then look.
        """
        until_s = time.monotonic() + PUBLISH_S
        while True:
            ready, begun = self.table.side_states(keys)
            if not (begun & ~ready).any() or time.monotonic() >= until_s:  # (a writer may be killed in between)
                return ready
            time.sleep(0.0)

    def lend(
        self,
        count: int,
        nbytes: int,
        group: int,
        *,
        ahead: int = 0,
        keys: KeyArray | None = None,
        parent: KeyArray | None = None,
        now_s: float,
    ) -> Loan:
        """Lend slots to a writer, which knows best which keys it will write to them.

        A lent slot counts as used. It is invisible, also to `reserve`, until `store`; `abort` and `abandon` give it
        back.

        Args:
            count: Slots that are needed now. Others are evicted for them if need be.
            nbytes: Size of the chunks that they are for, or less than that by less than a page.
            quota group: Number from `groups`.
            ahead: Slots to have beside, as far as there is plenty: nothing is evicted for them.
            keys, parent: What is about to be written, and the chunk before it: what is here of that is not evicted.

        Returns:
            Fewer than `count` if there is no more room.

        Raises:
            UsageError: The size is 0 or above an extent.
        """
        self._require_size(nbytes)
        now, size = self.table.ticks(now_s), slot_nbytes(nbytes)
        rows, pages = NO_ROWS, np.empty(0, np.uint32)
        if count:
            self._wake(now_s=now_s)
            spared = (self.table.find(each) for each in (keys, parent) if each is not None)
            protected = np.concatenate([NO_ROWS, *spared])
            rows, pages = self.room.take(count, size, group, protected, now)
            self.counters.refused_full += count - len(rows)
        if ahead > 0 and len(rows) == count:
            more_rows, more_pages = self.room.take_ahead(ahead, size, group)
            rows, pages = np.concatenate([rows, more_rows]), np.concatenate([pages, more_pages])
        return Loan(rows, _offsets(pages))

    def store(
        self,
        keys: KeyArray,
        positions: npt.NDArray[np.int32],
        rows: Rows,
        checksums: npt.NDArray[np.uint64],
        nbytes: int,
        group: int,
        *,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        now_s: float,
        ttl_s: float = 0.0,
        priority: int = 0,
    ) -> Bits:
        """Give keys to lent slots, whose bytes are written, and make them visible to every reader.

        Their writer may have made them visible itself (`published`): then this does the rest.

        Args:
            keys: A run of chunks, of which some were written.
            positions, rows, checksums: Which of them, and for each its slot and the checksum of its bytes.
            nbytes, quota group, chained, parent, depth, now_s: As for `reserve`.
            ttl_s, priority: When they expire, and who goes first; 0: as the quota group's config says.

        Returns:
            Which of the slots were used. The others stay lent: somebody else stores, or is writing, their keys by now.

        Raises:
            UsageError: A slot is not lent, or not to that quota group, or is for chunks of another size; a position is
                none of the keys'. Nothing was stored then.
        """
        self._require_size(nbytes, depth)
        if len(positions) != len(rows) or len(checksums) != len(rows):
            raise UsageError(f"{len(positions)} positions and {len(checksums)} checksums for {len(rows)} rows")
        if positions.size and not (positions.min() >= 0 and positions.max() < len(keys)):
            raise UsageError(f"a position beyond the {len(keys)} keys")
        now = self.table.ticks(now_s)
        if self._settle(keys, positions, rows, nbytes, group, chained, parent, depth, now, ttl_s, priority):
            return np.ones(len(rows), np.bool_)
        if len(rows) <= FEW:
            return self._store_few(
                keys, positions, rows, checksums, nbytes, group, chained, parent, depth, now_s, ttl_s, priority
            )
        self._require_lent(rows, nbytes, group)
        columns = self.table.columns
        if (columns.generation[rows] & 1).any():
            self.take_in(now_s=now_s)  # somebody may have published the keys of the others
        published = columns.generation[rows] & 1 == 0  # as it is by now: some may have been withdrawn
        place = self._find_place(keys, parent, depth, now)
        if (place.existing[positions] == rows).any() or self._spent:
            return self._store_each(keys, positions, rows, checksums, nbytes, place, chained, now_s, ttl_s, priority)
        self._require_keys(keys[positions[published]], rows[published])
        used = place.existing[positions] < 0
        first = _first_of_each(keys, positions[used])
        if len(first) < int(used.sum()):
            used &= np.isin(positions, first)
        for row in rows[published & ~used].tolist():
            self._withdraw(row)
        taken = int(published.sum())
        rows, positions, published = rows[used], positions[used], published[used]
        self._enter(keys, positions, rows, nbytes, place, chained=chained)
        self.table.leave_side(rows[published])
        self.table.note_taken(taken)  # last: readers look for none of them in the side index from here on
        self.commit(rows, checksums[used], now_s=now_s, ttl_s=ttl_s, priority=priority)
        return used

    def _settle(
        self,
        keys: KeyArray,
        positions: npt.NDArray[np.int32],
        rows: Rows,
        nbytes: int,
        group: int,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        now: int,
        ttl_s: float,
        priority: int,
    ) -> bool:
        """`store` of a whole run that was published, as nearly every one is. False: it is not so simple."""
        table, count = self.table, len(rows)
        if self._writer is None or self._spent or count != len(keys) or not count:
            return False
        if len(set(rows.tolist())) < count or positions[0] != 0 or not (positions[1:] - positions[:-1] == 1).all():
            return False
        anchor = table.find_one(int(parent[0, 0]), int(parent[0, 1])) if parent is not None and chained else -1
        depth = self._depth_below(anchor, depth)
        raw = np.ascontiguousarray(keys)
        with table.changing():
            if not table.settle(
                self._writer, raw, rows, nbytes=nbytes, group=group, chained=chained, parent=anchor, depth=depth
            ):
                return False
        self.room.lent_nbytes -= count * slot_nbytes(nbytes)
        self.counters.committed += count
        self.room.chunks += count
        self.room.row_hints.came(rows, now, ttl_s, priority)
        self.room.policies.came(rows, now)
        self._added.append(raw.tobytes())
        return True

    def _store_few(
        self,
        keys: KeyArray,
        positions: npt.NDArray[np.int32],
        rows: Rows,
        checksums: npt.NDArray[np.uint64],
        nbytes: int,
        group: int,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        now_s: float,
        ttl_s: float,
        priority: int,
    ) -> Bits:
        numbers, generation = rows.tolist(), self.table.cells.generation
        if len(set(numbers)) < len(numbers) or not all(self._is_lent(row, nbytes, group) for row in numbers):
            self._require_lent(rows, nbytes, group)  # says what is wrong
        if any(generation[row] & 1 for row in numbers):
            self.take_in(now_s=now_s)
        place = self._find_place(keys, parent, depth, self.table.ticks(now_s))
        return self._store_each(keys, positions, rows, checksums, nbytes, place, chained, now_s, ttl_s, priority)

    def _store_each(
        self,
        keys: KeyArray,
        positions: npt.NDArray[np.int32],
        rows: Rows,
        checksums: npt.NDArray[np.uint64],
        nbytes: int,
        place: _Place,
        chained: bool,
        now_s: float,
        ttl_s: float,
        priority: int,
    ) -> Bits:
        now, generation = self.table.ticks(now_s), self.table.cells.generation
        named = [not generation[row] & 1 and row not in self._spent for row in rows.tolist()]
        self._require_keys(keys[positions[named]], rows[named])  # before the first of them is stored
        before = [place.anchor, *place.existing.tolist()]
        used = []
        for position, row, checksum in zip(positions.tolist(), rows.tolist(), checksums.tolist(), strict=True):
            key = int(keys[position, 0]), int(keys[position, 1])
            anchor, deep = (before[position], place.depth + position) if chained else (-1, 0)
            used.append(self._store_at(key, row, checksum, nbytes, anchor, deep, now, ttl_s, priority))
            if used[-1]:
                before[position + 1] = row
        return np.array(used, np.bool_)

    def store_one(
        self,
        key: tuple[int, int],
        row: int,
        checksum: int,
        nbytes: int,
        group: int,
        *,
        parent: tuple[int, int] | None,
        depth: int,
        now_s: float,
        ttl_s: float = 0.0,
        priority: int = 0,
    ) -> bool:
        """The same for one chunk, in a fraction of the time.

        Args:
            key, parent: Their halves, high and low.

        Returns:
            Whether the slot was used.
        """
        self._require_size(nbytes, depth)
        if not self._is_lent(row, nbytes, group):
            self._require_lent(np.array([row], np.int32), nbytes, group)  # says what is wrong
        if self.table.cells.generation[row] & 1:
            self.take_in(now_s=now_s)  # somebody may have published this key
        anchor = -1 if parent is None else self.table.find_one(*parent)
        depth = self._depth_below(anchor, depth)
        return self._store_at(key, row, checksum, nbytes, anchor, depth, self.table.ticks(now_s), ttl_s, priority)

    def _store_at(
        self,
        key: tuple[int, int],
        row: int,
        checksum: int,
        nbytes: int,
        anchor: int,
        depth: int,
        now: int,
        ttl_s: float,
        priority: int,
    ) -> bool:
        """Store in one lent row. Whether it was used."""
        cells, table = self.table.cells, self.table
        if self._spent and row in self._spent:
            self._spent.discard(row)
            return False
        generation = cells.generation[row]
        published = not generation & 1
        if published and (cells.key_hi[row], cells.key_lo[row]) != key:
            raise UsageError("a slot that was published under another key")
        existing = table.find_one(*key)
        if existing != row and existing >= 0 and not self._make_way(existing, now):
            if published:
                self._withdraw(row)
                table.note_taken(1)
            return False
        with table.changing():
            self.room.keep(row, nbytes)
            cells.depth[row] = depth
            cells.parent[row] = anchor
            if anchor >= 0:
                cells.children[anchor] += 1
            if existing != row:
                table.insert_one(*key, row)
        if published:
            table.leave_side_one(row)
        else:
            cells.checksum[row] = checksum
            cells.inserted[row] = cells.accessed[row] = now
            cells.expires[row] = 0
            cells.generation[row] = (generation + 1 & 0xFFFFFFFF) or 2
        if existing != row:
            self._note_added(key)
            table.note_taken(published)
        self.room.row_hints.came_one(row, now, ttl_s, priority)
        self.room.policies.came_one(row, now)
        return True

    def _note_added(self, key: tuple[int, int]) -> None:
        self.counters.committed += 1
        self.room.chunks += 1
        self._added.append(_PAIR.pack(*key))

    # -- what writers published ---------------------------------------------------------------------------------------

    def take_in(self, *, now_s: float | None = None, whole: bool = False) -> None:
        """Enter what writers published into the index; readers on this host find it without that.

        Such a row stays on loan, and so in place, until its writer has told us the rest, or is gone.

        Args:
            now_s: None: as at the last call.
            whole: Look even if all that was counted is here: a writer may have been killed before it counted.
        """
        table, cells = self.table, self.table.cells
        if now_s is not None:
            self._now = table.ticks(now_s)
        if not (whole or table.has_published):
            return
        upto, now = table.published, self._now
        for row in table.side_rows():
            if cells.generation[row] & 1 or cells.parent[row] != LENT:
                continue  # not done yet, or killed while it was at it
            key = cells.key_hi[row], cells.key_lo[row]
            existing = table.find_one(*key)
            if existing == row:
                table.leave_side_one(row)
                continue
            if existing >= 0 and not self._make_way(existing, now):
                self._withdraw(row)
                continue
            with table.changing():
                table.insert_one(*key, row)
            table.leave_side_one(row)
            self._note_added(key)
            if self.room.rests(row):  # nobody will tell us more
                self._keep_as_is(row)
        table.note_all_taken(upto)

    def _withdraw(self, row: int) -> None:
        """Make a published row invisible again: it is lent, as before."""
        cells = self.table.cells
        cells.generation[row] = cells.generation[row] + 1 & 0xFFFFFFFF
        cells.nbytes[row] = slot_nbytes(cells.nbytes[row])
        self.table.leave_side_one(row)

    def _keep_as_is(self, row: int) -> None:
        """A row that was taken in is a chunk like any other, without a place in a chain."""
        cells = self.table.cells
        with self.table.changing():
            self.room.keep(row, cells.nbytes[row])
            cells.parent[row], cells.depth[row] = -1, 0
        self.room.row_hints.came_one(row, self._now)
        self.room.policies.came_one(row, self._now)

    def _without_published(self, rows: Rows) -> Rows:
        """Of rows whose lease ends those that hold no chunk; others are chunks like any other from now on."""
        self._spent.difference_update(rows.tolist())
        generation = self.table.columns.generation
        if (generation[rows] & 1).all():
            return rows
        self.take_in(whole=True)
        for row in rows[generation[rows] & 1 == 0].tolist():
            if self.table.cells.parent[row] == LENT:
                self._keep_as_is(row)
        left: Rows = rows[generation[rows] & 1 == 1]
        return left

    def _wake(self, *, now_s: float) -> None:
        self.take_in(now_s=now_s, whole=self.room.may_wake(now_s=now_s))
        self.room.wake(now_s=now_s)

    def commit(
        self,
        rows: Rows,
        checksums: npt.NDArray[np.uint64],
        *,
        now_s: float,
        ttl_s: float = 0.0,
        priority: int = 0,
    ) -> None:
        """Make reserved chunks, whose bytes are written, visible to every reader.

        Args:
            rows: Of one quota group.
            ttl_s, priority: As for `store`.
        """
        columns, now = self.table.columns, self.table.ticks(now_s)
        columns.checksum[rows] = checksums
        columns.inserted[rows] = columns.accessed[rows] = now
        columns.expires[rows] = 0
        even = columns.generation[rows] + (columns.generation[rows] & 1)  # what was published is even already
        columns.generation[rows] = np.where(even == 0, 2, even)  # 0 would mean never used
        self.counters.committed += len(rows)
        self.room.chunks += len(rows)
        self.room.row_hints.came(rows, now, ttl_s, priority)
        self.room.policies.came(rows, now)
        self._added.append(self._keys(rows).tobytes())

    def abort(self, rows: Rows) -> None:
        """Give reserved or lent rows up: their writer changed its mind."""
        rows = self._without_published(rows)
        self.counters.aborted += int(np.count_nonzero(self.table.columns.parent[rows] != LENT))
        self.room.free(rows)

    def abandon(self, rows: Rows, *, now_s: float) -> None:
        """Take reserved or lent rows from a writer that was cut off. Their slots come back after QUARANTINE_S."""
        rows = self._without_published(rows)
        self.counters.aborted += int(np.count_nonzero(self.table.columns.parent[rows] != LENT))
        self.room.rest(rows, now_s=now_s)

    def delete(self, keys: KeyArray, *, now_s: float | None = None) -> int:
        """Drop chunks. Pinned ones stay. Returns how many went.

        Args:
            now_s: None: as at the last call.
        """
        self.take_in(now_s=now_s)
        rows = self.table.find(keys)
        rows = np.unique(rows[rows >= 0])
        lent = rows[self.table.columns.parent[rows] == LENT] if rows.size else rows
        if lent.size:
            return self._take_from_writers(lent, Reason.DELETED) + self._delete(np.setdiff1d(rows, lent))
        return self._delete(rows)

    def _take_from_writers(self, rows: Rows, reason: Reason) -> int:
        """Drop what was taken in, but whose writer has not told us yet: it gets the slots back when it does."""
        cells, count = self.table.cells, 0
        for row in rows.tolist():
            if not cells.pins[row] and not cells.generation[row] & 1:
                with self.table.changing():
                    self._withdraw(row)
                    self.table.remove_one(row)
                    self.room.orphan(row)
                self._spent.add(row)
                self.room.note_removed(row, self._now, reason)
                count += 1
        return count

    def _delete(self, rows: Rows) -> int:
        rows = rows[self.room.evictable(rows)]
        self.room.drop(rows, self._now, Reason.DELETED)
        return len(rows)

    # -- reading with a hold -----------------------------------------------------------------------------------------

    def pin(self, keys: KeyArray, *, now_s: float) -> Pinned:
        """Hold those keys that are ready: neither eviction nor deletion takes them until `unpin`."""
        self.take_in(now_s=now_s)
        columns, now = self.table.columns, self.table.ticks(now_s)
        rows, _ = self.table.find_ready(keys, now)
        held = rows[rows >= 0]
        if held.size and int(columns.pins[held].max()) + len(held) > MAX_PINS:
            wanted = np.bincount(held, minlength=self.table.rows)  # a key may be asked for more than once
            rows[(rows >= 0) & (columns.pins[rows] + wanted[rows] > MAX_PINS)] = -1
            held = rows[rows >= 0]
        if held.size:
            np.add.at(columns.pins, held, np.uint16(1))
            self.table.touch(held, now)
        here = rows >= 0
        safe = rows * here  # row 0 for those that are not here: it always has memory
        return Pinned(
            rows,
            columns.page[safe].astype(np.uint64) * SLOT_ALIGNMENT_NBYTES,
            columns.nbytes[safe] * here,
            columns.checksum[safe],
        )

    def pin_one(self, hi: int, lo: int, *, now_s: float) -> tuple[int, int, int, int]:
        """The same for one key.

        Returns:
            Row, offset, nbytes and checksum; row -1 and zeros when it is not ready.
        """
        table = self.table
        if table.has_published:
            self.take_in(now_s=now_s)
        now = table.ticks(now_s)
        found = table.find_ready_one(hi, lo, now)
        if found is None:
            return -1, 0, 0, 0
        row, _, page, nbytes = found
        cells = table.cells
        pins = cells.pins[row]
        if pins == MAX_PINS:
            return -1, 0, 0, 0
        cells.pins[row] = pins + 1
        table.touch_one(row, now)
        return row, page * SLOT_ALIGNMENT_NBYTES, nbytes, cells.checksum[row]

    def pin_each(self, keys: KeyArray, *, now_s: float) -> tuple[list[int], list[int], list[int], list[int]]:
        """The same as lists, for a holder that sends: arrays would cost more than the chunks that one message names.

        Returns:
            Rows, offsets, lengths and checksums; row -1 and zeros for keys that are not ready.
        """
        self.take_in(now_s=now_s)
        table = self.table
        now, cells = table.ticks(now_s), table.cells
        pins, pages, nbytes, checksum = cells.pins, cells.page, cells.nbytes, cells.checksum
        accessed, frequency = cells.accessed, cells.frequency
        rows: list[int] = table.find_ready(keys, now)[0].tolist()
        starts, lengths, checksums = [0] * len(rows), [0] * len(rows), [0] * len(rows)
        for place, row in enumerate(rows):
            if row < 0:
                continue
            if (held := pins[row]) == MAX_PINS:
                rows[place] = -1
                continue
            pins[row] = held + 1
            accessed[row], frequency[row] = now, frequency[row] + 1 & 0xFFFFFFFF
            starts[place], lengths[place] = pages[row] * SLOT_ALIGNMENT_NBYTES, nbytes[row]
            checksums[place] = checksum[row]
        return rows, starts, lengths, checksums

    def pin_all(self, keys: bytes, *, now_s: float) -> "tuple[list[int], list[memoryview], bytes, bytes] | None":
        """Hold all these, 16 bytes each, or none: see `Table.hold_all`. In a fraction of the time."""
        table = self.table
        if table.has_published:
            self.take_in(now_s=now_s)
        return table.hold_all(keys, table.ticks(now_s), MAX_PINS, self.arena.view)

    def unpin(self, rows: Rows) -> None:
        """End holds that `pin` gave; entries of -1 are passed over."""
        np.subtract.at(self.table.columns.pins, rows[rows >= 0], np.uint16(1))
        if self._doomed:
            self._drop_unpinned()

    def unpin_each(self, rows: Sequence[int]) -> None:
        """The same for holds that `pin_each` gave."""
        pins = self.table.cells.pins
        for row in rows:
            if row >= 0:
                pins[row] -= 1
        if self._doomed:
            self._drop_unpinned()

    def unpin_one(self, row: int) -> None:
        """End a hold that `pin_one` gave."""
        self.table.cells.pins[row] -= 1
        if self._doomed:
            self._drop_unpinned()

    def spoilt(self, pinned: Pinned) -> Rows:
        """Those of the pinned chunks whose bytes are not what was put. Looks at every byte; needs no lock."""
        rows = np.unique(pinned.rows[pinned.rows >= 0])
        return rows[[not self._intact(row) for row in rows.tolist()]] if rows.size else rows

    def drop_spoilt(self, rows: Rows) -> int:
        """Drop what `spoilt` found, unpinned by now. Returns how many went; what others have pinned stays."""
        wrong = rows[self.room.evictable(rows)]
        self.room.drop(wrong, self._now, Reason.CORRUPT)
        return len(wrong)

    # -- which chunks go first ---------------------------------------------------------------------------------------

    def use_policy(self, group: int | None, chosen: str | type[Policy] | Score | None, *, now_s: float) -> None:
        """Evict by another policy from now on. It goes on with the chunks that are here. Looks at all rows.

        Args:
            quota group: None: for all quota groups that have no policy of their own.
            chosen: A name or a user's own, as for `raykv.eviction.policy`. None: that of the config, for an quota group
                the one for all.

        Raises:
            ConfigError: There is no such policy. Nothing was changed.
        """
        self.take_in(now_s=now_s)
        if chosen is None and group is None:
            chosen = self.config.policy
        self.room.use_policy(group, None if chosen is None else policy(chosen), self.table.ticks(now_s))

    # -- namespaces --------------------------------------------------------------------------------------------------

    def configure(self, group: int, config: NamespaceConfig, *, now_s: float) -> None:
        """From now on an quota group's chunks are treated so. What is above its quota is evicted ahead of need.

        Raises:
            ConfigError: There is no such policy here. The rest holds all the same.
        """
        self.table.namespaces["capacity"][group] = config.dram_quota_nbytes or 0
        self.room.row_hints.configure(group, config)
        self.room.over_quota.add(group)
        if self.room.policies.own(group) != config.policy:
            self.use_policy(group, config.policy, now_s=now_s)

    def doomed(self, group: int, *, now_s: float) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """What is to go when an quota group is dropped now: rows and their generations, for `drop_doomed`."""
        self.take_in(now_s=now_s)
        columns = self.table.columns
        rows = np.flatnonzero(columns.namespace[: self.room.free_rows.fresh] == group).astype(np.int32)
        generations = columns.generation[rows]
        ready = (generations & 1 == 0) & (generations != 0)
        return rows[ready], generations[ready]

    def drop_doomed(self, rows: Rows, generations: npt.NDArray[np.uint32]) -> int:
        """Drop those of the chunks that are still there. Pinned ones go when they are unpinned.

        Slots that are lent or reserved stay with their writers. Returns how many chunks went.
        """
        columns = self.table.columns
        rows = rows[columns.generation[rows] == generations]
        self._doomed.update((row, int(columns.generation[row])) for row in rows[columns.pins[rows] > 0].tolist())
        lent = columns.parent[rows] == LENT
        free, published = rows[~lent], rows[lent]
        free = free[self.room.evictable(free)]
        self.room.drop(free, self._now, Reason.DROPPED)
        published = published[self.table.find(self._keys(published)) == published]  # others we have not heard of yet
        return len(free) + self._take_from_writers(published, Reason.DROPPED)

    def _drop_unpinned(self) -> None:
        """Those of the doomed that nobody holds any more."""
        pins = self.table.cells.pins
        ended = {row: generation for row, generation in self._doomed.items() if not pins[row]}
        for row in ended:
            del self._doomed[row]
        self.drop_doomed(np.array(list(ended), np.int32), np.array(list(ended.values()), np.uint32))

    def hint(
        self,
        keys: KeyArray,
        *,
        ttl_s: float | None = None,
        priority: int | None = None,
        ended: bool = False,
        touch: bool = False,
        output_tokens: int | None = None,
        now_s: float,
    ) -> int:
        """Somebody knows more of these chunks: see `RowHints.hint`. Returns how many of them are here.

        Args:
            touch: They count as read now.
            output_tokens: So many did the request make that read or stored them, and is done.
        """
        self.take_in(now_s=now_s)
        now = self.table.ticks(now_s)
        rows, _ = self.table.find_ready(keys, now)
        rows = rows[rows >= 0]
        if rows.size:
            self.room.row_hints.hint(rows, now, ttl_s, priority, ended=True if ended else False if touch else None)
            if touch:
                self.table.touch(rows, now)
            if output_tokens is not None:
                self.room.policies.told(rows, output_tokens, now)
        return len(rows)

    def sweep(self, lock: AbstractContextManager[Any], *, now_s: float) -> int:
        """Drop what has expired, in steps, each of them under the lock. Returns how many chunks went."""
        if not self.room.row_hints.expiring:
            return 0
        count, now = 0, self.table.ticks(now_s)
        for first in range(0, self.room.free_rows.fresh, SWEEP_ROWS):
            rows = self.room.expired(first, now)
            if rows.size:
                with lock:
                    count += self.room.drop_expired(rows, now)
        return count

    # -- what became of chunks ---------------------------------------------------------------------------------------

    def what_of(self, keys: KeyArray, *, now_s: float) -> tuple[Bits, npt.NDArray[np.uint32], Departures]:
        """What is known of some keys, one entry each.

        Returns:
            Whether it is here; its length, 0 while it is being written; and its last departure.
        """
        self.take_in(now_s=now_s)
        columns, now = self.table.columns, self.table.ticks(now_s)
        rows = self.table.find(keys)
        here, rows = rows >= 0, np.maximum(rows, 0)
        ready = here & (columns.generation[rows] & 1 == 0)
        went = self.room.eviction_log.find(keys)
        expired = ready & (columns.expires[rows] > 0) & (columns.expires[rows] <= now)
        for place in np.flatnonzero(expired).tolist():
            went.reasons[place], went.tiers[place] = Reason.EXPIRED, Place.DRAM
            went.when_s[place] = self.table.seconds(int(columns.expires[rows[place]]))
        return here & ~expired, np.where(ready & ~expired, columns.nbytes[rows], np.uint32(0)), went

    # -- ahead of need -----------------------------------------------------------------------------------------------

    def tend(self, *, now_s: float) -> bool:
        """Evict ahead of need: when little is free, free some more. To be called after writes while `short`.

        Returns:
            Whether there is more to do: a large store is tended in steps.
        """
        self._wake(now_s=now_s)
        return self.room.tend(self.table.ticks(now_s))

    @property
    def short(self) -> bool:
        """Whether `tend` would evict."""
        return self.room.short

    def bare_extent(self, *, quiet: bool = False) -> int:
        """The extent to call `back_extent` for now, without a lock, and then `note_backed`; -1 if there is none.

        Args:
            quiet: Nobody writes at the moment: the time to take memory for all of the arena, if the host has enough
                (`has_to_spare`). Taken while chunks are written, it costs them a core and bandwidth.
        """
        ahead_nbytes = min(BACKED_AHEAD_NBYTES, self.arena.nbytes // BACKED_AHEAD_SHARE)
        slots = self.room.slots
        if not quiet:
            return slots.bare_extent(ahead_nbytes)
        extent = slots.bare_extent(self.arena.nbytes)
        return extent if extent >= 0 else slots.refused_extent()

    @property
    def written(self) -> tuple[int, int]:
        """Not the same if anything was written since."""
        return self.counters.committed, self.room.slots.free_nbytes

    def back_extent(self, extent: int) -> bool:
        """Take real memory for an extent; takes its time. False when the file system has none left."""
        return _back(self.arena, self.config.extent_nbytes, extent)

    def note_backed(self, extent: int) -> None:
        """An extent has real memory by now."""
        self.room.slots.note_backed(extent)

    def bare_rows(self) -> int:
        """Up to where to call `table.back_rows` now, without a lock, and then `note_rows_backed`; 0 if enough are."""
        backed = self.table.rows_backed
        wanted = backed < self.table.rows and len(self.room.free_rows) < ROWS_AHEAD
        return min(self.table.rows, backed + ROWS_AHEAD) if wanted else 0

    def note_rows_backed(self) -> None:
        """More rows may be used now."""
        self.room.free_rows.limit = self.table.rows_backed

    # -- what it holds -----------------------------------------------------------------------------------------------

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Keys that came and that went since the last call."""
        added, removed = b"".join(self._added), b"".join(self.room.removed)
        self._added, self.room.removed = [], []
        return chunk_keys.from_bytes(added), chunk_keys.from_bytes(removed)

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would give any."""
        return bool(self._added or self.room.removed)

    def key_of(self, row: int) -> bytes:
        """A row's key as 16 bytes."""
        return _PAIR.pack(self.table.cells.key_hi[row], self.table.cells.key_lo[row])

    def offset_of(self, row: int) -> int:
        """Where in the arena a row's slot begins."""
        return self.table.cells.page[row] * SLOT_ALIGNMENT_NBYTES

    def ready_keys(self) -> KeyArray:
        """All keys that can be read here. Looks at every row; needs no lock, and then may miss what comes meanwhile."""
        return self._keys(self.table.ready_rows())

    @property
    def used_nbytes(self) -> int:
        """Bytes in slots that hold a chunk, are reserved, or lent."""
        return self.room.total_nbytes

    @property
    def lent_nbytes(self) -> int:
        """Bytes in slots that are lent."""
        return self.room.lent_nbytes

    @property
    def chunks(self) -> int:
        """Chunks that can be read."""
        return self.room.chunks

    @property
    def extents_unbacked(self) -> int:
        """Extents that could not be used because the file system was full."""
        return self.room.slots.extents_unbacked

    def close(self) -> None:
        """Let go of the memory; the files stay."""
        self.table.memory.close()
        self.arena.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _require_size(self, nbytes: int, depth: int = 0) -> None:
        if not 0 < nbytes <= self.config.extent_nbytes:
            raise UsageError(
                f"a chunk of {nbytes:,} bytes does not fit: at least 1, and at most extent_nbytes "
                f"({self.config.extent_nbytes:,}); raise extent_nbytes or cut the value into chunks"
            )
        if not 0 <= depth < MAX_DEPTH:
            raise UsageError(f"depth {depth} is not in 0 .. {MAX_DEPTH - 1}")

    def _is_lent(self, row: int, nbytes: int, group: int) -> bool:
        cells = self.table.cells
        return (
            0 <= row < self.table.rows_backed
            and cells.parent[row] == LENT
            and cells.namespace[row] == group
            and slot_nbytes(cells.nbytes[row]) == slot_nbytes(nbytes)
        )

    def _require_lent(self, rows: Rows, nbytes: int, group: int) -> None:
        columns = self.table.columns
        if rows.size and not (rows.min() >= 0 and rows.max() < self.table.rows_backed):
            raise UsageError("rows that are none")
        if not (columns.parent[rows] == LENT).all() or len(np.unique(rows)) != len(rows):
            raise UsageError("rows that are not lent, or named twice")
        if not (columns.namespace[rows] == group).all():
            raise UsageError("rows that are lent for another namespace")
        if not (self.room.slot_sizes(rows) == slot_nbytes(nbytes)).all():
            raise UsageError(f"rows whose slots are not for chunks of {nbytes:,} bytes")

    def _require_keys(self, keys: KeyArray, rows: Rows) -> None:
        columns = self.table.columns
        if not ((columns.key_hi[rows] == keys[:, 0]) & (columns.key_lo[rows] == keys[:, 1])).all():
            raise UsageError("slots that were published under other keys")

    def _find_place(self, keys: KeyArray, parent: KeyArray | None, depth: int, now: int) -> _Place:
        existing = self._drop_expired(self.table.find(keys), now)
        anchor = self.table.find_one(int(parent[0, 0]), int(parent[0, 1])) if parent is not None else -1
        return _Place(existing, anchor, self._depth_below(anchor, depth))

    def _depth_below(self, anchor: int, told: int) -> int:
        """Of a chunk that hangs on this row, if there is one; `told` by its writer, if the row's is not known yet."""
        cells = self.table.cells
        return cells.depth[anchor] + 1 if anchor >= 0 and cells.parent[anchor] != LENT else told

    def _drop_expired(self, rows: Rows, now: int) -> Rows:
        """`rows` with -1 for those that had expired; they are gone then."""
        expires = self.table.columns.expires[rows[rows >= 0]]
        if not expires.any():
            return rows
        return np.array([-1 if row >= 0 and self._make_way(row, now) else row for row in rows.tolist()], np.int32)

    def _make_way(self, row: int, now: int) -> bool:
        """Drop a chunk if it has expired. Whether its key is free now."""
        cells = self.table.cells
        if not 0 < cells.expires[row] <= now or self.table.find_one(cells.key_hi[row], cells.key_lo[row]) != row:
            return False
        rows = np.array([row], np.int32)
        if not self.room.evictable(rows).all():
            return False
        self.room.drop(rows, now, Reason.EXPIRED)
        return True

    def _enter(
        self,
        keys: KeyArray,
        positions: npt.NDArray[np.integer],
        rows: Rows,
        nbytes: int,
        place: _Place,
        *,
        chained: bool,
    ) -> None:
        """Give lent rows the keys at `positions`, enter them into the index, and hang them below those before them."""
        if not rows.size:
            return
        columns = self.table.columns
        size = slot_nbytes(nbytes)
        with self.table.changing():
            self.room.lent_nbytes -= len(rows) * size
            columns.nbytes[rows] = nbytes
            columns.depth[rows] = place.depth + positions if chained else 0
            columns.parent[rows] = -1
            if chained:
                chain = np.append(np.int32(place.anchor), place.existing)
                chain[1 + positions] = rows
                parents = chain[positions]
                np.add.at(columns.children, parents[parents >= 0], 1)
                columns.parent[rows] = parents
            self.table.insert(keys[positions], rows)

    def _keys(self, rows: Rows) -> KeyArray:
        return np.stack([self.table.columns.key_hi[rows], self.table.columns.key_lo[rows]], axis=1)

    def _intact(self, row: int) -> bool:
        columns = self.table.columns
        start = int(columns.page[row]) * SLOT_ALIGNMENT_NBYTES
        chunk = self.arena.view[start : start + int(columns.nbytes[row])]
        return xxhash.xxh3_64_intdigest(chunk) == int(columns.checksum[row])


def _first_of_each(keys: KeyArray, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """`positions` without those whose key stands at an earlier one too."""
    if len(np.unique(keys[positions, 1])) == len(positions):
        return positions
    first = np.unique(keys[positions], axis=0, return_index=True)[1]
    return positions[np.sort(first)]


def _back(arena: SharedMemory, extent_nbytes: int, extent: int, *, hurry: bool = False) -> bool:
    return arena.back(extent * extent_nbytes, extent_nbytes, hurry=hurry)


def _offsets(pages: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    return pages.astype(np.uint64) * SLOT_ALIGNMENT_NBYTES


def store_files(prefix: Path) -> tuple[Path, Path]:
    """Paths of a node's table and arena."""
    return prefix.with_name(prefix.name + ".table"), prefix.with_name(prefix.name + ".arena")


def remove_files(prefix: Path) -> None:
    """Forget a node's memory. Whoever still maps it keeps it until they let go."""
    for path in store_files(prefix):
        path.unlink(missing_ok=True)
