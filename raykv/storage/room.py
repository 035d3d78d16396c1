"""Who has which rows and slots, and making room: the part of a store that gives, takes back and evicts.

Plain and synchronous, like the store that owns it. Nothing here looks at all rows of a large table: victims are
sought in a sample, and what is counted is counted as it changes.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import SLOT_ALIGNMENT_NBYTES, StorageConfig
from raykv.eviction import policy
from raykv.eviction.base import Policy
from raykv.eviction.group_policies import Policies
from raykv.memory import native
from raykv.memory.rows import LENT, QUARANTINE_S, FreeRows
from raykv.memory.slots import Pages, Slots, slot_nbytes
from raykv.memory.table import MAX_NAMESPACES, Table
from raykv.protocol.reasons import Reason
from raykv.storage.eviction_log import EvictionLog
from raykv.storage.row_hints import RowHints
from raykv.types import Bits, Rows

log = logging.getLogger(__name__)

SAMPLE_ROWS: Final = 1 << 16
"""Victims are sought among so many rows at once: all of a small table, runs from anywhere in a large one."""
SAMPLE_SHARE: Final = 128
"""A sample costs milliseconds, so this part of what it found evictable goes (one in so many): no less, and in one step
ahead of need no more, since others wait for the lock meanwhile."""
SCAN_SHARE: Final = 8
"""Where all rows had to be looked at for those of a small quota group, this part of them goes (one in so many)."""
SWEEP_ROWS: Final = 1 << 16
"""Expired chunks are sought among so many rows at a time."""
FOREIGN_EXTENTS: Final = 64
"""Extents of other slot sizes that are looked at, coldest first, for one that can be emptied."""
AHEAD_SHARE: Final = 2
"""Slots are lent ahead of need from what is free above the low-water mark: one in so many at a time. With one in eight,
who writes batches at full speed into a full arena had to ask, and to wait, before four of five of them."""
AHEAD_OWN_SHARE: Final = 8
"""The same of an quota group's capacity, and of rows."""
AHEAD_TOTAL_SHARE: Final = 8
"""And all slots that are lent take at most this part of the arena (one in so many) before few go ahead of need."""
AHEAD_LITTLE_SHARE: Final = 1024
AHEAD_MOST_SHARE: Final = 4
"""Then so little at a time (one part in so many of the arena), so that small chunks do not suffer from large ones,
until this part of it is lent: then none."""
MAX_PINS: Final = (1 << 16) - 1
NO_ROWS: Rows = np.empty(0, np.int32)


@dataclass(slots=True)
class Counters:
    """What happened since this process took over, in chunks."""

    committed: int = 0
    evicted: int = 0
    expired: int = 0
    deleted: int = 0
    dropped: int = 0
    aborted: int = 0
    refused_full: int = 0
    corrupt: int = 0


class Room:
    """Rows and slots of one node: free, lent, in use, or resting.

    Attributes:
        slots, free_rows: What is free.
        counters: See `Counters`.
        row hints: Who goes before others, and when chunks expire.
        eviction log: What went, and why.
        departures: Chunks that went, by quota group and reason, since this process took over.
        reads_of_gone: How often chunks that went had been read, by quota group.
        used_nbytes: Bytes of slots that hold a chunk, are reserved or lent, by quota group.
        total_nbytes: Their sum.
        lent_nbytes: Bytes of those that are lent.
        chunks: Chunks that can be read.
        removed: Keys of chunks that went, as `keys.to_bytes` writes them, since somebody took note.
    """

    def __init__(
        self, config: StorageConfig, table: Table, slots: Slots, *, ready: Rows, unfinished: Rows, now_s: float
    ) -> None:
        """Start from what the columns say.

        Args:
            ready: Rows of chunks.
            unfinished: Rows, in no index, whose slots somebody may still be writing to: they rest.
        """
        self._config, self._table, self.slots = config, table, slots
        self._arena_nbytes = config.extents * config.extent_nbytes
        self.policies = Policies(policy(config.policy), table.columns)
        self.counters = Counters()
        self.over_quota: set[int] = set()
        self.eviction_log = EvictionLog()
        self.departures = np.zeros((MAX_NAMESPACES, len(Reason)), np.int64)
        self.reads_of_gone = np.zeros(MAX_NAMESPACES, np.int64)
        self.removed: list[bytes] = []
        self.used_nbytes = np.zeros(MAX_NAMESPACES, np.int64)
        expiring = self._add_up(ready)
        self.row_hints = RowHints(table, expiring=expiring)
        busy = np.zeros(table.rows_backed, np.bool_)
        busy[ready] = busy[unfinished] = True
        self.free_rows = FreeRows(busy, rows=table.rows, limit=table.rows_backed)
        self._used_cells = self.used_nbytes.data
        self.total_nbytes = int(self.used_nbytes.sum())
        self.lent_nbytes = 0
        self.chunks = len(ready)
        self._in_use = len(ready)  # rows that `total_nbytes` counts
        self._left_behind = 0  # rows whose chunk went before those that follow it; see `give_back`
        self._resting: list[tuple[float, Rows]] = self._go_on_resting(unfinished, now_s)
        self._resting_rows = {row: until_s for until_s, rows in self._resting for row in rows.tolist()}
        self._tending = False
        if self.policies.remember:
            self.policies.came(self._in_order(ready), table.ticks(now_s))

    def _add_up(self, ready: Rows) -> bool:
        """Count these rows' slots as used. Whether any of their chunks expires."""
        table, columns = self._table, self._table.columns
        if native.add_up is not None:
            expiring: bool = native.add_up(table.records, columns.namespace, ready, self.used_nbytes)
            return expiring
        sizes = self.slot_sizes(ready)
        self.used_nbytes += np.bincount(columns.namespace[ready], sizes, MAX_NAMESPACES).astype(np.int64)
        return bool(columns.expires[ready].any())

    # -- giving ------------------------------------------------------------------------------------------------------

    def take(self, count: int, size: int, group: int, protected: Rows, now: int) -> tuple[Rows, Pages]:
        """Rows with slots of `size` for the quota group; others are evicted for them if need be.

        The rows are lent: they have no key yet, and are in no index.

        Args:
            protected: Rows that must not go for it; entries of -1 are passed over.

        Returns:
            As many rows as there is room for, and the first page of each one's slot.
        """
        room = self._make(count, size, group, protected, now)
        pages = self.slots.take(room, size)
        if len(pages) < room:  # the file system was full: some extents are of no use, and others must be emptied
            more = self._make(room - len(pages), size, group, protected, now)
            pages = np.concatenate([pages, self.slots.take(more, size)])
        rows = self.free_rows.take(len(pages))
        self._lend(rows, pages, size, group)
        return rows, pages

    def take_ahead(self, count: int, size: int, group: int) -> tuple[Rows, Pages]:
        """The same ahead of need: nothing is evicted for it, and only a part of what is free is given."""
        left_nbytes = self._arena_nbytes // AHEAD_TOTAL_SHARE - self.lent_nbytes
        if self.lent_nbytes < self._arena_nbytes // AHEAD_MOST_SHARE:
            left_nbytes = max(left_nbytes, self._arena_nbytes // AHEAD_LITTLE_SHARE)
        spare_nbytes = min(
            (self.slots.free_nbytes - int(self._config.low_water * self.slots.usable_nbytes)) // AHEAD_SHARE,
            left_nbytes,
        )
        capacity = int(self._table.namespaces["capacity"][group])
        if capacity:
            spare_nbytes = min(spare_nbytes, (capacity - self._used_cells[group]) // AHEAD_OWN_SHARE)
        spare = min(spare_nbytes // size, self.slots.free_backed(size), len(self.free_rows) // AHEAD_OWN_SHARE)
        pages = self.slots.take(max(0, min(count, spare)), size)
        rows = self.free_rows.take(len(pages))
        self._lend(rows, pages, size, group)
        return rows, pages

    def _lend(self, rows: Rows, pages: Pages, size: int, group: int) -> None:
        if not rows.size:
            return
        columns = self._table.columns
        columns.generation[rows] |= 1
        columns.parent[rows] = LENT
        columns.page[rows] = pages
        columns.namespace[rows] = group
        columns.nbytes[rows] = size  # last: from now on the row has a slot
        columns.pins[rows] = 0
        columns.expires[rows] = 0
        columns.frequency[rows] = 0  # here, since what its writer publishes may be read before we hear of it
        self.slots.note_rows(pages, rows)
        self._count(group, len(rows), size)
        self.lent_nbytes += len(rows) * size

    def _count(self, group: int, rows: int, size: int) -> None:
        self._used_cells[group] += rows * size
        self.total_nbytes += rows * size
        self._in_use += rows

    # -- taking back -------------------------------------------------------------------------------------------------

    def drop(self, rows: Rows, now: int, reason: Reason) -> None:
        """Take ready rows away from readers, then free them. What is evicted but had expired counts as that."""
        if rows.size:
            evicted = reason is Reason.EVICTED
            self.policies.went(rows, now, evicted=evicted)
            self._note_gone(rows, now, reason, self.policies.names(rows) if evicted else "")
            self.free(rows)

    def note_removed(self, row: int, now: int, reason: Reason) -> None:
        """A chunk went, but its row stays with whom it is lent to."""
        self._note_gone(np.array([row], np.int32), now, reason, "")

    def _note_gone(self, rows: Rows, now: int, reason: Reason, policies: str | list[str]) -> None:
        columns, counters = self._table.columns, self.counters
        groups, expires = columns.namespace[rows], columns.expires[rows]
        keys = np.stack([columns.key_hi[rows], columns.key_lo[rows]], axis=1)
        reasons = np.full(len(rows), reason, np.uint8)
        if reason is Reason.EVICTED:
            reasons[(expires > 0) & (expires <= now)] = Reason.EXPIRED
        counts = np.bincount(reasons, minlength=len(Reason)).tolist()
        counters.evicted += counts[Reason.EVICTED]
        counters.expired += counts[Reason.EXPIRED]
        counters.deleted += counts[Reason.DELETED]
        counters.dropped += counts[Reason.DROPPED]
        counters.corrupt += counts[Reason.CORRUPT]
        np.add.at(self.departures, (groups, reasons), 1)
        np.add.at(self.reads_of_gone, groups, columns.frequency[rows])
        self.eviction_log.note(keys, reasons, policies=policies, now_s=self._table.seconds(now))
        self.chunks -= len(rows)
        self.removed.append(keys.tobytes())

    def free(self, rows: Rows) -> None:
        """Free rows, whatever they hold."""
        if rows.size:
            self._unlink(rows)
            self._give_back(rows)

    def _go_on_resting(self, unfinished: Rows, now_s: float) -> list[tuple[float, Rows]]:
        """Rows that a process before this one left unfinished rest from now on, but for those that rested already.

        How long, is in their `inserted`: no row that holds a chunk has one that lies ahead.
        """
        if not unfinished.size:
            return []
        table, inserted = self._table, self._table.columns.inserted
        now, latest = table.ticks(now_s), table.ticks(now_s + QUARANTINE_S)
        ends = inserted[unfinished]
        rested = (ends > now) & (ends <= latest)
        inserted[unfinished[~rested]] = latest
        groups = [
            (table.seconds(end), unfinished[rested & (ends == end)]) for end in sorted(set(ends[rested].tolist()))
        ]
        return [*groups, (now_s + QUARANTINE_S, unfinished[~rested])]

    def rest(self, rows: Rows, *, now_s: float) -> None:
        """Free unfinished rows of a writer that was cut off. Their slots come back after QUARANTINE_S."""
        if rows.size:
            self._unlink(rows)
            self._table.columns.inserted[rows] = self._table.ticks(now_s + QUARANTINE_S)
            self._resting.append((now_s + QUARANTINE_S, rows))
            self._resting_rows.update(dict.fromkeys(rows.tolist(), now_s + QUARANTINE_S))

    def may_wake(self, *, now_s: float) -> bool:
        """Whether `wake` has something to do."""
        return bool(self._resting) and now_s >= self._resting[0][0]

    def wake(self, *, now_s: float) -> None:
        """Give back what has rested long enough."""
        while self.may_wake(now_s=now_s):
            until_s, rows = self._resting.pop(0)
            # One that was kept meanwhile may rest again, for longer.
            rested = [self._resting_rows.get(row) == until_s for row in rows.tolist()]
            rows = rows[np.array(rested, np.bool_)]
            for row in rows.tolist():
                del self._resting_rows[row]
            if rows.size:
                self._table.leave_side(rows)  # whoever was killed while it published
                self._give_back(rows)

    def keep(self, row: int, nbytes: int) -> None:
        """A row that was lent, or rests, holds a chunk of `nbytes` now."""
        cells = self._table.cells
        size = slot_nbytes(nbytes)
        if row in self._resting_rows:
            del self._resting_rows[row]
            self._count(cells.namespace[row], 1, size)
        else:
            self.lent_nbytes -= size
        cells.nbytes[row] = nbytes

    @property
    def resting(self) -> Rows:
        """Rows whose slots rest."""
        return np.array(sorted(self._resting_rows), np.int32)

    def rests(self, row: int) -> bool:
        """Whether this row's slot rests."""
        return row in self._resting_rows

    def _unlink(self, rows: Rows) -> None:
        """Take rows out of index, chains and quota groups. They and their slots stay taken."""
        table, columns = self._table, self._table.columns
        sizes = self.slot_sizes(rows)
        with table.changing():
            columns.generation[rows] |= 1  # even becomes odd: readers turn away first
            lent = columns.parent[rows] == LENT
            self.lent_nbytes -= int(sizes[lent].sum())
            others = rows[~lent] if lent.any() else rows
            table.remove(others)
            self._let_go(others)
            np.subtract.at(self.used_nbytes, columns.namespace[rows], sizes)
            self.total_nbytes -= int(sizes.sum())
            self._in_use -= len(rows)

    def _let_go(self, rows: Rows) -> None:
        """End what these rows say of their parents. Parents that were only kept for it are free."""
        columns = self._table.columns
        parents = columns.parent[rows]
        columns.parent[rows] = -1
        parents = parents[parents >= 0]
        if not parents.size:
            return
        np.subtract.at(columns.children, parents, 1)
        if self._left_behind:
            parents = np.unique(parents)
            free = parents[(columns.children[parents] == 0) & (columns.nbytes[parents] == 0)]
            self._left_behind -= len(free)
            self.free_rows.give(free)

    def _give_back(self, rows: Rows) -> None:
        """Free the slots, and those of the rows that no other row names as its parent.

        To find a row's children would mean to look at all rows. So a row stays out of use until they have gone too, or
        until `_end_parenthood` has come by.
        """
        columns = self._table.columns
        columns.nbytes[rows] = 0
        columns.generation[rows] += 2  # whoever still thinks that the row is lent to it cannot publish it any more
        columns.parent[rows] = -1
        self.slots.give(columns.page[rows])
        childless = columns.children[rows] == 0
        if not childless.all():
            self._left_behind += len(rows) - int(childless.sum())
            rows = rows[childless]
        self.free_rows.give(rows)

    def orphan(self, row: int) -> None:
        """No row names this one as its parent any more. Looks at all rows if one does."""
        columns = self._table.columns
        if self._table.cells.children[row]:
            columns.parent[np.flatnonzero(columns.parent[: self.free_rows.fresh] == row)] = -1
            columns.children[row] = 0

    def _end_parenthood(self, count: int) -> None:
        """Make rows free that only their children keep, until `count` rows are free. May look at all rows."""
        columns = self._table.columns
        for first in range(0, self.free_rows.fresh, SAMPLE_ROWS):
            if not self._left_behind or len(self.free_rows) >= count:
                return
            parents = columns.parent[first : min(first + SAMPLE_ROWS, self.free_rows.fresh)]
            rows = np.flatnonzero(parents >= 0)
            rows = rows[columns.nbytes[parents[rows]] == 0] + first
            self._let_go(rows.astype(np.int32))

    def let_go(self, group: int) -> bool:
        """Whether nothing counts under an quota group's number. Then its counters begin anew."""
        unused = not self._used_cells[group]
        if unused:
            self.departures[group] = self.reads_of_gone[group] = 0
        return unused

    # -- ahead of need -----------------------------------------------------------------------------------------------

    @property
    def short(self) -> bool:
        """Whether `tend` has something to do."""
        return self._tending or bool(self.over_quota) or self._lacking(self._config.low_water) > 0

    @property
    def in_need(self) -> bool:
        """Whether so little is free that what goes must go now."""
        return self._lacking(self._config.low_water / 2) > 0

    def tend(self, now: int) -> bool:
        """Evict ahead of need: when little is free, free some more, in steps. Returns whether there is more to do."""
        if self.over_quota:
            self._tend_quota(now)
            if self.over_quota:
                return True
        count = self._lacking(self._config.high_water)
        if not self.short or count <= 0 or not self._in_use:
            self._tending = False
            return False
        rows = self._candidates()
        gone = self._evict(rows, min(count, self._at_once(len(rows))), now)
        self._tending = 0 < gone < count
        return self._tending

    def upcoming(self, share: float, now: int) -> Rows:
        """Those of the chunks, or of a sample, that would be evicted first, up to this share of them."""
        if not self._in_use or self._lacking(share) <= 0:
            return NO_ROWS
        rows = self._candidates()
        count = self._lacking(share) if self._is_small() else math.ceil(len(rows) * share)
        self.policies.ranks = self.row_hints.ranks if self.row_hints.active else None
        return self.policies.upcoming(rows, count, now)

    def _tend_quota(self, now: int) -> None:
        """Evict from an quota group that holds more than it may since its quota was lowered, in steps."""
        group = min(self.over_quota)
        capacity = int(self._table.namespaces["capacity"][group])
        excess = self._used_cells[group] - capacity if capacity else 0
        if excess > 0:
            rows = self._candidates(group=group, wanted=SAMPLE_SHARE)
            sizes = self.slot_sizes(rows)
            mean = int(sizes.mean()) if rows.size else 1
            if self._evict(rows, min(-(-excess // mean), self._at_once(len(rows))), now):
                return
        self.over_quota.discard(group)  # it keeps to it; or what is left is pinned, or lent

    def expired(self, first: int, now: int) -> Rows:
        """Of SWEEP_ROWS rows from the first on, those that have expired; for `drop_expired`. Needs no lock."""
        expires = self._table.columns.expires[first : min(first + SWEEP_ROWS, self.free_rows.fresh)]
        return (np.flatnonzero((expires > 0) & (expires <= now)) + first).astype(np.int32)

    def drop_expired(self, rows: Rows, now: int) -> int:
        """Of these rows, drop those that have expired and may go. Returns how many did."""
        expires = self._table.columns.expires[rows]
        rows = rows[(expires > 0) & (expires <= now)]
        rows = rows[self.evictable(rows)]
        self.drop(rows, now, Reason.EXPIRED)
        return len(rows)

    def _lacking(self, share: float) -> int:
        """Chunks that must go for this share of the arena, and of the rows, to be free."""
        free_rows = len(self.free_rows) + self._table.rows - self._table.rows_backed
        by_rows = math.ceil(share * self._table.rows) - free_rows
        nbytes = share * self.slots.usable_nbytes - self.slots.free_nbytes
        by_nbytes = int(nbytes * self._in_use / self.total_nbytes) + 1 if nbytes > 0 and self._in_use else 0
        return max(by_rows, by_nbytes)

    # -- making room -------------------------------------------------------------------------------------------------

    def _make(self, count: int, size: int, group: int, protected: Rows, now: int) -> int:
        """Evict until `count` slots of `size` are free for the quota group. Returns for how many there is room."""
        capacity = int(self._table.namespaces["capacity"][group])
        if self._allowed(capacity, group, size, count) == count and self._free(size) >= count:
            return count
        with self._shielded(protected):
            if capacity:
                count = self._make_for_group(min(count, capacity // size), size, group, now)
            if count > len(self.free_rows):
                self._end_parenthood(count)
                self._evict(self._candidates(), count - len(self.free_rows), now)
                self._end_parenthood(count)
                count = min(count, len(self.free_rows))
            while (missing := count - self.slots.free(size)) > 0:
                if not self._evict_for_slots(missing, size, now):
                    return self.slots.free(size)
        return count

    def _make_for_group(self, count: int, size: int, group: int, now: int) -> int:
        """Evict the quota group's own until it may have `count` more slots of `size`. Returns how many it may have."""
        capacity = int(self._table.namespaces["capacity"][group])
        while (allowed := self._allowed(capacity, group, size, count)) < count:
            missing_nbytes = self._used_cells[group] + count * size - capacity
            rows = self._candidates(group=group, wanted=count - allowed)
            sizes = self.slot_sizes(rows)
            mean = max(1, int(sizes.mean())) if rows.size else 1
            missing = -(-missing_nbytes // mean)  # they may be smaller than what is to come
            scanned = not self._is_small() and len(rows) < SAMPLE_ROWS // SAMPLE_SHARE
            if not self._evict(rows, max(missing, len(rows) // SCAN_SHARE) if scanned else missing, now):
                break
        return allowed

    def _free(self, size: int) -> int:
        return min(self.slots.free(size), len(self.free_rows))

    def _allowed(self, capacity: int, group: int, size: int, count: int) -> int:
        """How many of `count` slots the quota group may have."""
        if not capacity:
            return count
        return min(count, max(0, capacity - self._used_cells[group]) // size)

    def _evict_for_slots(self, missing: int, size: int, now: int) -> bool:
        """Free slots of one size: the coldest chunks of that size, or a whole extent of another that is colder yet."""
        columns = self._table.columns
        rows = self._candidates()
        if self._is_small():
            own = rows[self.slot_sizes(rows) == size]
        else:
            own = self._candidates(size=size)
            missing = max(missing, len(own) // SAMPLE_SHARE)
        mine = self._victims(own, missing, now)
        foreign, last_access = self._coldest_foreign_extent(size, rows)
        if foreign.size and (not mine.size or last_access < int(columns.accessed[mine].min())):
            mine = foreign
        self.drop(mine, now, Reason.EVICTED)
        return bool(mine.size)

    def _coldest_foreign_extent(self, size: int, candidates: Rows) -> tuple[Rows, int]:
        """Rows of the extent, among those serving other sizes and wholly evictable, whose last read is longest ago.

        Which extents are cold is told by the candidates, a sample perhaps. The one that is chosen is looked at whole.
        """
        columns = self._table.columns
        last = np.full(self._table.extents, np.iinfo(np.int64).max)
        home = self.slots.extent_of(columns.page[candidates])
        last[home] = -1
        np.maximum.at(last, home, columns.accessed[candidates].astype(np.int64))
        extents = self.slots.extents_serving_others(size)
        for extent in extents[np.argsort(last[extents], kind="stable")][:FOREIGN_EXTENTS].tolist():
            rows = self.slots.rows_in(extent)
            if rows.size and self.evictable(rows).all():
                return rows, int(columns.accessed[rows].max())
        return NO_ROWS, 0

    def _candidates(self, *, group: int | None = None, size: int | None = None, wanted: int = 0) -> Rows:
        """Rows that may go: all of a small table, a sample of a large one.

        Args:
            quota group: Only those of this quota group. If that is a small part of a large table, all rows' quota group numbers are
                looked at (two bytes each), since a sample would have few of them.
            size: Only those in slots of this size.
        """
        columns = self._table.columns
        if group is None or self._is_small() or self._used_cells[group] * SAMPLE_SHARE > self.total_nbytes:
            rows = self._table.ready_rows() if self._is_small() else self.slots.sample(SAMPLE_ROWS, self._rng, size)
            rows = rows[self.evictable(rows)]
            if group is None:
                return rows
            mine: Rows = rows[columns.namespace[rows] == group]
            if self._is_small() or len(mine) >= max(wanted, SAMPLE_SHARE):
                return mine
        mine = np.flatnonzero(columns.namespace[: self.free_rows.fresh] == group).astype(np.int32)
        if len(mine) > SAMPLE_ROWS:
            start = int(self._rng.integers(0, len(mine) - SAMPLE_ROWS))
            mine = mine[start : start + SAMPLE_ROWS]
        return mine[self.evictable(mine)]

    @cached_property
    def _rng(self) -> "np.random.Generator":
        """For samples. Made with the first of them: a start need not wait for the import of `numpy.random`."""
        return np.random.default_rng(self._table.incarnation)

    def _is_small(self) -> bool:
        """Whether looking at all rows costs no more than a sample."""
        return self.free_rows.fresh <= SAMPLE_ROWS

    def _at_once(self, candidates: int) -> int:
        return candidates if self._is_small() else max(1, candidates // SAMPLE_SHARE)

    def _evict(self, candidates: Rows, count: int, now: int) -> int:
        if not self._is_small() and count > 0:
            count = max(count, len(candidates) // SAMPLE_SHARE)
        rows = self._victims(candidates, count, now)
        self.drop(rows, now, Reason.EVICTED)
        return len(rows)

    def use_policy(self, group: int | None, chosen: Policy | None, now: int) -> None:
        """See `Store.use_policy`. Looks at all rows."""
        ready = self._table.ready_rows()
        ready = ready[self._table.columns.parent[ready] != LENT]
        self.policies.use(group, chosen, self._in_order(ready), now)

    def _in_order(self, rows: Rows) -> Rows:
        """Oldest first, parents before children."""
        columns = self._table.columns
        ordered: Rows = rows[np.lexsort((columns.depth[rows], columns.inserted[rows]))]
        return ordered

    def _victims(self, candidates: Rows, count: int, now: int) -> Rows:
        self.policies.ranks = self.row_hints.ranks if self.row_hints.active else None
        return self.policies.victims(candidates, count, now, None if self._is_small() else self._may_go)

    def _may_go(self, row: int) -> bool:
        """What `evictable` says of one row."""
        cells = self._table.cells
        generation = cells.generation[row]
        return generation & 1 == 0 and generation != 0 and cells.pins[row] == 0 and cells.parent[row] != LENT

    @contextmanager
    def _shielded(self, rows: Rows) -> Iterator[None]:
        """Keep rows from eviction by a pin. A process that dies within leaves no trace: pins do not outlive it."""
        pins = self._table.columns.pins
        rows = np.unique(rows[rows >= 0])
        rows = rows[pins[rows] < MAX_PINS]
        pins[rows] += 1
        try:
            yield
        finally:
            pins[rows] -= 1

    def evictable(self, rows: Rows) -> Bits:
        """Which rows hold a chunk that nobody has pinned, and that its writer has told us of."""
        columns = self._table.columns
        generation = columns.generation[rows]
        mask: Bits = (generation & 1 == 0) & (generation != 0) & (columns.pins[rows] == 0)
        mask &= columns.parent[rows] != LENT
        return mask

    def slot_sizes(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Bytes of each row's slot."""
        pages = -(-self._table.columns.nbytes[rows].astype(np.int64) // SLOT_ALIGNMENT_NBYTES)
        sizes: npt.NDArray[np.int64] = pages * SLOT_ALIGNMENT_NBYTES
        return sizes
