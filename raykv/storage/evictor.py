"""Eviction by policy, and the removal of chunks for any reason.

In a small table, all rows are candidates for eviction. In a large table, the candidates come from a sample of the rows.
If the sample has too few rows of a quota group, the whole table is scanned for rows of the group.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from raykv.config import StorageConfig
from raykv.eviction import policy
from raykv.eviction.base import Policy
from raykv.eviction.group_policies import GroupPolicies
from raykv.memory.layout import MAX_NAMESPACES, RowState
from raykv.memory.table import Table
from raykv.protocol.reasons import Reason
from raykv.storage.allocator import NO_ROWS, Allocator
from raykv.storage.eviction_log import EvictionLog
from raykv.storage.row_hints import RowHints
from raykv.types import Bits, Rows

SAMPLE_ROWS: Final = 1 << 16
"""In a table that has used at most this many rows, all of them are candidates for eviction. In other tables, the
candidates come from a sample of this many rows."""
EXACT_ROWS: Final = 1 << 14
"""Up to this many rows, `upcoming` is exact. With more, its rows are many prompts, and then it matters little that the
last of these prompts would be evicted from its end. The exact order of this many rows takes some milliseconds."""
SAMPLE_SHARE: Final = 128
"""At least 1 / SAMPLE_SHARE of a sample is evicted, because taking a sample costs milliseconds. One step of
`evict_ahead` evicts exactly 1 / SAMPLE_SHARE of a sample, because other threads wait for the lock."""
FOREIGN_EXTENTS: Final = 64
"""An extent (a part of the arena) has slots of one size. An empty extent can get another slot size. To find an extent
that can be emptied, at most this many extents are checked, the coldest first."""
MAX_PINS: Final = (1 << 16) - 1


@dataclass
class Counters:
    committed: int = 0
    evicted: int = 0
    expired: int = 0
    deleted: int = 0
    dropped: int = 0
    refused_full: int = 0
    corrupt: int = 0
    retired: int = 0
    moved: int = 0


class Evictor:
    """Evicts chunks to make room in a store, and removes chunks for other reasons.

    Attributes:
        departures: Number of chunks that this process has removed, by quota group and reason.
        reads_of_departed: Total number of reads of the removed chunks, by quota group.
        removed: Keys of the chunks removed since the store's last `take_changes`, 16 bytes each.
        over_quota: Quota groups that may use more bytes than their quota, because the quota was lowered.
    """

    def __init__(self, config: StorageConfig, table: Table, allocator: Allocator, row_hints: RowHints) -> None:
        self._config, self._table, self._allocator = config, table, allocator
        self.policies = GroupPolicies(policy(config.policy), table.columns, row_hints.ranks)
        self.eviction_log = EvictionLog()
        self.counters = Counters()
        self.departures = np.zeros((MAX_NAMESPACES, len(Reason)), np.int64)
        self.reads_of_departed = np.zeros(MAX_NAMESPACES, np.int64)
        self.removed: list[bytes] = []
        self.over_quota: set[int] = set()
        self._evicting_ahead = False

    # -- removal -----------------------------------------------------------------------------------------------------

    def remove(self, rows: Rows, now: int, reason: Reason) -> None:
        """Remove ready chunks from the index. The bytes of a pinned chunk stay in place until the last `unpin`.

        If a chunk has expired, its eviction counts as an expiry.
        """
        if not rows.size:
            return
        columns, evicted = self._table.columns, reason is Reason.EVICTED
        self.policies.on_remove(rows, now, evicted=evicted)
        groups, expires = columns.group[rows], columns.expires[rows]
        reasons = np.full(len(rows), reason, np.uint8)
        if evicted:
            reasons[(expires > 0) & (expires <= now)] = Reason.EXPIRED
        for number, count in zip(*(part.tolist() for part in np.unique(reasons, return_counts=True)), strict=True):
            vars(self.counters)[Reason(number).word] += count
        np.add.at(self.departures, (groups, reasons), 1)
        np.add.at(self.reads_of_departed, groups, columns.frequency[rows])
        policies = self.policies.names(rows) if evicted else ""
        keys = self._table.keys_of(rows)
        self.eviction_log.add(keys, reasons, policies=policies, now_s=self._table.seconds(now))
        self.removed.append(keys.tobytes())
        self._allocator.remove(rows)

    def reset_group(self, group: int) -> None:
        """Prepare a group number for its next quota group: remove the old group's policy, and set the counts to 0."""
        self.policies.use(group, None, NO_ROWS, 1)
        self.departures[group] = self.reads_of_departed[group] = 0

    # -- eviction for a waiting writer -------------------------------------------------------------------------------

    def make_room(self, count: int, size: int, group: int, protected: Rows, now: int) -> int:
        """Evict until the group can get `count` slots of `size` bytes. Rows in `protected` are not evicted.

        Returns:
            The number of slots that the group can get, at most `count`.
        """
        allocator = self._allocator
        enough = min(allocator.slots.free(size), len(allocator.free_rows)) >= count
        if not enough or self._within_quota(count, size, group) < count:
            with self._shielded(protected):
                count = self._make_room_in_quota(count, size, group, now)
                while (missing := count - len(allocator.free_rows)) > 0:
                    if not self._evict(self._candidates(), missing, now):
                        count = len(allocator.free_rows)
                while (missing := count - allocator.slots.free(size)) > 0:
                    if not self._evict_for_slots(missing, size, now):
                        return allocator.slots.free(size)
        return count

    def _make_room_in_quota(self, count: int, size: int, group: int, now: int) -> int:
        """Evict chunks of the group until its quota has room for `count` slots. Return the number of slots that fit."""
        quota = int(self._table.namespaces["capacity"][group])
        count = min(count, quota // size) if quota else count
        while (allowed := self._within_quota(count, size, group)) < count:
            rows = self._candidates_of(group, wanted=count - allowed)
            missing_nbytes = int(self._allocator.used_nbytes[group]) + count * size - quota
            if not self._evict(rows, self._as_chunks(missing_nbytes, rows), now):
                break
        return allowed

    def _within_quota(self, count: int, size: int, group: int) -> int:
        quota = int(self._table.namespaces["capacity"][group])
        if not quota:
            return count
        return min(count, max(0, quota - int(self._allocator.used_nbytes[group])) // size)

    def _as_chunks(self, nbytes: int, rows: Rows) -> int:
        """Convert bytes to a number of chunks by the mean slot size of `rows`. Rounds up."""
        mean = int(self._allocator.slot_sizes(rows).mean()) if rows.size else 1
        return -(-nbytes // max(1, mean))

    def _evict_for_slots(self, missing: int, size: int, now: int) -> bool:
        """Evict chunks from slots of `size` bytes. If an extent with another slot size is colder, empty that extent.

        Returns False if nothing could be evicted.
        """
        victims = self._victims(self._candidates(size=size), missing, now)
        foreign, last_access = self._coldest_foreign_extent(size, self._candidates())
        if foreign.size and (not victims.size or last_access < int(self._table.columns.accessed[victims].min())):
            victims = foreign
        self.remove(victims, now, Reason.EVICTED)
        return bool(victims.size)

    def _coldest_foreign_extent(self, size: int, candidates: Rows) -> tuple[Rows, int]:
        """Return the rows of the coldest extent that can be emptied, and the tick of their last access.

        Only extents whose slot size is not `size` are checked. The coldest extent is the one whose `candidates` were
        last accessed the longest ago. Returns no rows if none of the checked extents can be emptied.
        """
        columns, slots = self._table.columns, self._allocator.slots
        last = np.full(self._table.extents, np.iinfo(np.int64).max)
        home = slots.extent_of(columns.page[candidates])
        last[home] = -1
        np.maximum.at(last, home, columns.accessed[candidates].astype(np.int64))
        extents = slots.extents_serving_others(size)
        for extent in extents[np.argsort(last[extents], kind="stable")][:FOREIGN_EXTENTS].tolist():
            rows = slots.rows_in(extent)
            if rows.size and self.evictable(rows).all():
                return rows, int(columns.accessed[rows].max())
        return NO_ROWS, 0

    # -- eviction ahead of need --------------------------------------------------------------------------------------

    @property
    def needs_eviction(self) -> bool:
        return self._evicting_ahead or bool(self.over_quota) or self._lacking(self._config.low_water) > 0

    @property
    def nearly_full(self) -> bool:
        """Whether memory is so short that eviction must not wait for the lower tiers to copy the chunks."""
        return self._lacking(self._config.low_water / 2) > 0

    def evict_ahead(self, now: int) -> bool:
        """Do one step of eviction toward the quotas and the high-water mark. Returns whether there is more to do."""
        if self.over_quota:
            self._evict_over_quota(now)
            if self.over_quota:
                return True
        count = self._lacking(self._config.high_water)
        if not self.needs_eviction or count <= 0 or not self._allocator.chunks:
            self._evicting_ahead = False
            return False
        gone = self._evict(self._candidates(), count, now, one_step=True)
        self._evicting_ahead = 0 < gone < count
        return self._evicting_ahead

    def spare_slots(self, size: int) -> int:
        """Return how many slots of `size` bytes can be lent without any eviction, now or in the background."""
        share, slots = self._config.high_water, self._allocator.slots
        spare = slots.free(size) - math.ceil(share * slots.usable_nbytes / size)
        return max(0, min(spare, len(self._allocator.free_rows) - math.ceil(share * self._table.rows)))

    def upcoming(self, share: float, now: int) -> Rows:
        """Return the rows that eviction would remove next, until this share of the arena is free. Evicts nothing.

        With more than EXACT_ROWS rows, chains are not evicted from their ends here. In a large table, return this share
        of a sample instead.
        """
        count = self._lacking(share)
        if count <= 0 or not self._allocator.chunks:
            return NO_ROWS
        rows = self._candidates()
        if not self._is_small():
            count = math.ceil(len(rows) * share)
        return self.policies.upcoming(rows, count, now, exact=len(rows) <= EXACT_ROWS and self._is_small())

    def _evict_over_quota(self, now: int) -> None:
        group = min(self.over_quota)
        quota = int(self._table.namespaces["capacity"][group])
        excess = int(self._allocator.used_nbytes[group]) - quota if quota else 0
        if excess > 0:
            rows = self._candidates_of(group, wanted=SAMPLE_SHARE)
            if self._evict(rows, self._as_chunks(excess, rows), now, one_step=True):
                return
        self.over_quota.discard(group)  # within its quota now, or only pinned and lent rows are left

    def _lacking(self, share: float) -> int:
        """Return the number of chunks to evict until this share of the arena and of the rows is free."""
        allocator, slots = self._allocator, self._allocator.slots
        by_rows = math.ceil(share * self._table.rows) - (self._table.rows - allocator.rows_in_use)
        nbytes = share * slots.usable_nbytes - slots.free_nbytes - allocator.transit_nbytes
        if nbytes <= 0 or not allocator.rows_in_use:
            return max(0, by_rows)
        mean = int(allocator.used_nbytes.sum()) / allocator.rows_in_use
        return max(by_rows, int(nbytes / mean) + 1)

    # -- victims -----------------------------------------------------------------------------------------------------

    def use_policy(self, group: int | None, chosen: Policy | None, now: int) -> None:
        self.policies.use(group, chosen, self._in_order(self._table.ready_rows()), now)

    def learn(self, rows: Rows, now: int) -> None:
        """Report recovered chunks to the default policy, oldest first. Does nothing if the policy ignores inserts."""
        if type(self.policies.default).on_insert is not Policy.on_insert:
            self.policies.on_insert(self._in_order(rows), now)

    def _in_order(self, rows: Rows) -> Rows:
        columns = self._table.columns
        ordered: Rows = rows[np.lexsort((columns.depth[rows], columns.inserted[rows]))]
        return ordered

    def evictable(self, rows: Rows) -> Bits:
        columns = self._table.columns
        mask: Bits = (columns.state[rows] == RowState.READY) & (columns.pins[rows] == 0)
        return mask

    def _may_evict(self, row: int) -> bool:
        cells = self._table.cells
        return cells.state[row] == RowState.READY and cells.pins[row] == 0

    def _candidates(self, *, size: int | None = None) -> Rows:
        """Return evictable rows: all of a small table, or a sample of a large table.

        If `size` is given, return only rows with slots of this size.
        """
        if not self._is_small():
            rows = self._allocator.slots.sample(SAMPLE_ROWS, self._rng, size)
            return rows[self.evictable(rows)]
        rows = self._table.ready_rows()
        wanted = self.evictable(rows)
        return rows[wanted if size is None else wanted & (self._allocator.slot_sizes(rows) == size)]

    def _candidates_of(self, group: int, *, wanted: int) -> Rows:
        """Return evictable rows of one quota group. Scans the whole table if a sample has too few rows of the group."""
        columns, used = self._table.columns, self._allocator.used_nbytes
        if self._is_small() or used[group] * SAMPLE_SHARE > used.sum():
            rows = self._candidates()
            mine: Rows = rows[columns.group[rows] == group]
            if self._is_small() or len(mine) >= max(wanted, SAMPLE_SHARE):
                return mine
        mine = np.flatnonzero(columns.group[: self._allocator.free_rows.fresh] == group).astype(np.int32)
        if len(mine) > SAMPLE_ROWS:
            start = int(self._rng.integers(0, len(mine) - SAMPLE_ROWS))
            mine = mine[start : start + SAMPLE_ROWS]
        return mine[self.evictable(mine)]

    def _evict(self, candidates: Rows, count: int, now: int, *, one_step: bool = False) -> int:
        """Evict candidates; see `_victims`. Returns how many were evicted."""
        rows = self._victims(candidates, count, now, one_step=one_step)
        self.remove(rows, now, Reason.EVICTED)
        return len(rows)

    def _victims(self, candidates: Rows, count: int, now: int, *, one_step: bool = False) -> Rows:
        """Choose `count` candidates to evict.

        From a sample, choose at least 1 / SAMPLE_SHARE of the candidates. With `one_step`, choose exactly this
        share, even if `count` is higher.
        """
        if not self._is_small() and count > 0:
            count = max(1 if one_step else count, len(candidates) // SAMPLE_SHARE)
        return self.policies.victims(candidates, count, now, None if self._is_small() else self._may_evict)

    def _is_small(self) -> bool:
        """Whether a scan of all used rows costs no more than a sample."""
        return self._allocator.free_rows.fresh <= SAMPLE_ROWS

    @cached_property
    def _rng(self) -> "np.random.Generator":
        """Random generator for samples. Made at the first use, because `numpy.random` would delay a node's start."""
        return np.random.default_rng(int(self._table.header["incarnation"]))

    @contextmanager
    def _shielded(self, rows: Rows) -> Iterator[None]:
        """Pin rows in the `with` block, so that they are not evicted. Rows of -1 are ignored.

        If the process crashes in the block, recovery removes the pins.
        """
        pins = self._table.columns.pins
        rows = np.unique(rows[rows >= 0])
        rows = rows[pins[rows] < MAX_PINS]
        pins[rows] += 1
        try:
            yield
        finally:
            pins[rows] -= 1
