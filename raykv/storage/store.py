"""The store of one node lends slots, and commits, pins and removes chunks. It is the only writer of the chunk table.

The store has no threads, sockets or clock. The node calls the store under one lock and passes the time. Readers on its
host read the table and the arena directly (`raykv.memory.reader`).
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.config import SLOT_ALIGNMENT_NBYTES, NamespaceConfig, StorageConfig
from raykv.errors import ConfigError, LostError, UsageError
from raykv.eviction import Score, policy
from raykv.eviction.base import Policy
from raykv.memory.arena import SharedMemory, require_room
from raykv.memory.layout import RowState
from raykv.memory.numa import usable_nodes
from raykv.memory.populate import Populator
from raykv.memory.recovery import recover
from raykv.memory.slots import slot_nbytes
from raykv.memory.table import Table
from raykv.protocol import chunk_keys
from raykv.protocol.hints import require_hints
from raykv.protocol.reasons import Place, Reason
from raykv.storage.allocator import NO_ROWS, Allocator, has_duplicates
from raykv.storage.batches import Written, chain_of, require_batch, require_size
from raykv.storage.eviction_log import Departures
from raykv.storage.evictor import MAX_PINS, Evictor
from raykv.storage.files import attach_files, create_files, remove_files
from raykv.storage.quota_groups import QuotaGroups
from raykv.storage.row_hints import RowHints
from raykv.types import Batch, Bits, KeyArray, Rows

log = logging.getLogger(__name__)

EXPIRE_ROWS: Final = 1 << 16
"""One step of `Store.expire` checks at most this many rows."""


class LentSlots(NamedTuple):
    """Slots for a writer to fill and to commit: the row of each slot, and the slot's offset in the arena in bytes."""

    rows: Rows
    offsets: npt.NDArray[np.uint64]


class Pinned(NamedTuple):
    """Chunks that stay in place until `unpin`, one entry per key.

    If a key has no readable chunk, its row is -1, and its other fields are undefined.
    """

    rows: Rows
    offsets: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint64]


class Store:
    """The arena, the chunk table and the slots of one node, and all operations that change them.

    Attributes:
        recovered: Number of chunks found at the start.
    """

    def __init__(self, config: StorageConfig, table: Table, arena: SharedMemory, *, now_s: float) -> None:
        """Take over a table: keep committed chunks, quarantine the slots of unfinished writes.

        Free rows, free slots and all counts are computed from the columns. Raises LostError if the table is damaged.
        """
        found = recover(table)
        self.groups = QuotaGroups(table, self._release_group)
        self.config, self.table, self.arena = config, table, arena
        self.recovered = len(found.ready)
        self.allocator = Allocator(config, table, found, now_s=now_s)
        self.row_hints = RowHints(table, active=found.expiring)
        self.evictor = Evictor(config, table, self.allocator, self.row_hints)
        self.evictor.learn(found.ready, table.ticks(now_s))
        self.eviction_log, self.counters = self.evictor.eviction_log, self.evictor.counters
        nodes = usable_nodes() if config.numa == "auto" else (0,)
        self.populator = Populator(arena, table, found.slots, self.allocator.free_rows, nodes=nodes)
        self._added: list[bytes] = []

    @classmethod
    def open(cls, config: StorageConfig, prefix: Path | None, *, now_s: float) -> Self:
        """Map this node's files. If the files are missing, damaged or not for `config`, make empty files.

        Args:
            config: The node's settings.
            prefix: Path of the files without their suffixes. None: use anonymous memory, which ends with the process.
            now_s: Time of the host's monotonic clock.

        Raises:
            ConfigError: There is no directory or no room for the files, or the kernel lacks the required huge pages.
        """
        require_room(config.shm_dir, 0, field="shm_dir")
        if prefix is not None:
            try:
                return cls(config, *attach_files(config, prefix, now_s=now_s), now_s=now_s)
            except LostError as error:
                log.info("starting empty: %s", str(error))  # text only: a logged traceback would keep the files mapped
                remove_files(prefix)
        return cls(config, *create_files(config, prefix, now_s=now_s), now_s=now_s)

    def close(self) -> None:
        """Unmap the memory. The files stay."""
        self.table.memory.close()
        self.arena.close()

    # -- reading -----------------------------------------------------------------------------------------------------

    def missing(self, keys: KeyArray, *, now_s: float) -> npt.NDArray[np.int32]:
        """Return the indices of the keys without a readable chunk, in order. Repeated keys are left out."""
        rows, _ = self.table.find_ready(keys, self.table.ticks(now_s))
        absent = np.flatnonzero(rows < 0)
        return absent[is_first(keys[absent])].astype(np.int32)

    def history(self, keys: KeyArray, *, now_s: float) -> tuple[Bits, npt.NDArray[np.uint32], Departures]:
        """Return for each key: whether the chunk is stored, its length (0 if not stored), and its last departure."""
        columns, now = self.table.columns, self.table.ticks(now_s)
        rows = self.table.find(keys)
        here, rows = rows >= 0, np.maximum(rows, 0)
        departures = self.evictor.eviction_log.find(keys)
        expires = columns.expires[rows]
        expired = here & (expires > 0) & (expires <= now)  # still in the table, but not readable
        departures.reasons[expired], departures.tiers[expired] = Reason.EXPIRED, Place.DRAM
        departures.when_s[expired] = [self.table.seconds(tick) for tick in expires[expired].tolist()]
        here &= ~expired
        return here, np.where(here, columns.nbytes[rows], np.uint32(0)), departures

    def rows_of(self, group: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Return the ready rows of a quota group, and their generations, for `Store.drop`. Scans all rows."""
        columns = self.table.columns
        rows = np.flatnonzero(columns.group[: self.allocator.free_rows.fresh] == group).astype(np.int32)
        rows = rows[columns.state[rows] == RowState.READY]
        return rows, columns.generation[rows]

    def ready_keys(self) -> KeyArray:
        """Return the keys of all READY rows. Scans all rows. If the lock is not held, a few keys may be missing."""
        return self.table.keys_of(self.table.ready_rows())

    @property
    def used_nbytes(self) -> int:
        return int(self.allocator.used_nbytes.sum())

    @property
    def lent_nbytes(self) -> int:
        return int(self.allocator.lent_nbytes.sum())

    @property
    def chunks(self) -> int:
        return self.allocator.chunks

    @property
    def written(self) -> tuple[int, int]:
        """A value that changes when a chunk is committed, and when the number of free bytes changes."""
        return self.counters.committed, self.allocator.slots.free_nbytes

    # -- writing -----------------------------------------------------------------------------------------------------

    def lend(
        self, group: int, nbytes: int, count: int, *, ahead: int = 0, protect: Sequence[KeyArray] = (), now_s: float
    ) -> LentSlots:
        """Lend slots to a writer. A lent slot counts as used. Readers do not see its bytes until `commit`.

        Args:
            group: The quota group of the chunks to be written.
            nbytes: Length of each chunk in bytes.
            count: Number of slots that the writer needs now. If necessary, chunks are evicted.
            ahead: Number of additional slots for later writes. Nothing is evicted for them.
            protect: Keys of chunks that must not be evicted.
            now_s: Time of the host's monotonic clock.

        Returns:
            The slots; fewer than requested if the store is full. Additional slots come last.

        Raises:
            UsageError: `nbytes` is 0 or larger than an extent.
        """
        require_size(nbytes, self.config.extent_nbytes)
        now, size = self.table.ticks(now_s), slot_nbytes(nbytes)
        self.allocator.release(now_s=now_s)
        lent, missing = [(NO_ROWS, np.empty(0, np.uint32))], count
        if count > 0:
            protected = np.concatenate([NO_ROWS, *map(self.table.find, protect)])
            for _ in range(2):  # a second try if fewer than `room` were lent: an extent got no real memory
                room = self.evictor.make_room(missing, size, group, protected, now)
                lent.append(self.allocator.lend(room, size, group))
                missing -= len(lent[-1][0])
                if not missing or len(lent[-1][0]) == room:
                    break
            self.counters.refused_full += missing
        if ahead > 0 and missing <= 0:
            lent.append(self.allocator.lend(min(ahead, self.allocator.most_ahead(size, group)), size, group))
        rows, pages = (np.concatenate(parts) for parts in zip(*lent, strict=True))
        return LentSlots(rows, pages.astype(np.uint64) * SLOT_ALIGNMENT_NBYTES)

    def commit(self, group: int, batch: Batch, written: Written, *, now_s: float) -> Bits:
        """Give keys to lent slots that the writer has filled, and make the chunks visible to all readers.

        Returns:
            For each slot, whether it was used. A slot is unused, and stays lent, if its key is already stored or occurs
            earlier in the batch.

        Raises:
            UsageError: The batch or the slots are not valid. Nothing is stored.
        """
        require_size(batch.nbytes, self.config.extent_nbytes)
        require_batch(batch, written)
        self.allocator.require_lent(written.rows, group, slot_nbytes(batch.nbytes))
        now = self.table.ticks(now_s)
        existing = self._without_expired(self.table.find(batch.keys), now)
        used: Bits = existing[written.positions] < 0
        used[used] = is_first(batch.keys[written.positions[used]])
        positions, rows = written.positions[used], written.rows[used]
        if rows.size:
            keys = np.ascontiguousarray(batch.keys[positions])
            chain = chain_of(self.table, batch, existing, positions, rows)
            self.row_hints.set_new(rows, batch.hints, group, now)
            self.allocator.commit(rows, keys, written.checksums[used], chain, batch.nbytes, now)
            self.evictor.policies.on_insert(rows, now)
            self.counters.committed += len(rows)
            self._added.append(keys.tobytes())
        return used

    def give_back(self, rows: Rows) -> None:
        """Take back lent slots that the writer no longer uses. Raises UsageError if a row is not lent."""
        self.allocator.require_lent(rows)
        self.allocator.give_back(rows)

    def quarantine(self, rows: Rows, *, now_s: float) -> None:
        """Take lent slots from a writer whose connection broke. Raises UsageError if a row is not lent.

        The slots are out of use for QUARANTINE_S, because the writer may still write to them.
        """
        self.allocator.require_lent(rows)
        self.allocator.quarantine(rows, now_s=now_s)

    def _without_expired(self, rows: Rows, now: int) -> Rows:
        expires = self.table.columns.expires[np.maximum(rows, 0)]
        expired = (rows >= 0) & (expires > 0) & (expires <= now)
        if not expired.any():
            return rows
        self.evictor.remove(np.unique(rows[expired]), now, Reason.EXPIRED)
        return np.where(expired, np.int32(-1), rows)

    # -- reading with a pin ------------------------------------------------------------------------------------------

    def pin(self, keys: KeyArray, *, now_s: float, touch: bool = True) -> Pinned:
        """Pin the readable chunks: their bytes stay in place until `unpin`. With `touch`, the pin counts as a read."""
        columns, now = self.table.columns, self.table.ticks(now_s)
        rows, _ = self.table.find_ready(keys, now)
        pinned = rows[rows >= 0]
        if pinned.size and int(columns.pins[pinned].max()) + len(pinned) > MAX_PINS:
            wanted = np.bincount(pinned, minlength=self.table.rows)  # a key may be in `keys` more than once
            rows[(rows >= 0) & (columns.pins[rows] + wanted[rows] > MAX_PINS)] = -1
            pinned = rows[rows >= 0]
        np.add.at(columns.pins, pinned, np.uint16(1))
        if touch:
            self.table.touch(pinned, now)
        safe = np.maximum(rows, 0)  # instead of row -1, read row 0, which always has memory
        offsets = columns.page[safe].astype(np.uint64) * SLOT_ALIGNMENT_NBYTES
        return Pinned(rows, offsets, columns.nbytes[safe], columns.checksum[safe])

    def unpin(self, rows: Rows) -> None:
        """Remove one pin per row. Rows of -1 are ignored.

        Raises:
            UsageError: A row has too few pins. No pin is removed.
        """
        pins, rows = self.table.columns.pins, rows[rows >= 0]
        before = pins[rows]
        np.subtract.at(pins, rows, np.uint16(1))
        if (pins[rows] > before).any():  # a number of pins has fallen below 0 and wrapped around
            np.add.at(pins, rows, np.uint16(1))
            raise UsageError("rows with fewer pins than are to end: unpin each row once for each pin")
        self.allocator.free_unpinned(rows)

    def corrupt(self, pinned: Pinned) -> Rows:
        """Return the rows of pinned chunks whose bytes do not match their checksums. The caller needs no lock."""
        found = [
            row
            for row, start, nbytes, checksum in zip(*(field.tolist() for field in pinned), strict=True)
            if row >= 0 and xxhash.xxh3_64_intdigest(self.arena.view[start : start + nbytes]) != checksum
        ]
        return np.unique(np.array(found, np.int32))

    # -- removing ----------------------------------------------------------------------------------------------------

    def delete(self, keys: KeyArray, *, now_s: float) -> int:
        """Remove chunks. The bytes of a pinned chunk stay until the last `unpin`. Returns the number removed."""
        rows = self.table.find(keys)
        rows = np.unique(rows[rows >= 0])
        self.evictor.remove(rows, self.table.ticks(now_s), Reason.DELETED)
        return len(rows)

    def drop(self, rows: Rows, generations: npt.NDArray[np.uint32], *, now_s: float) -> int:
        """Remove the chunks that `rows_of` found, if they are still there. Returns the number of removed chunks."""
        columns = self.table.columns
        rows = rows[(columns.generation[rows] == generations) & (columns.state[rows] == RowState.READY)]
        self.evictor.remove(rows, self.table.ticks(now_s), Reason.DROPPED)
        return len(rows)

    def drop_corrupt(self, rows: Rows, *, now_s: float) -> int:
        """Remove chunks that `corrupt` found. The caller must still hold the pins. Returns the number removed."""
        rows = rows[self.table.columns.state[rows] == RowState.READY]
        self.evictor.remove(rows, self.table.ticks(now_s), Reason.CORRUPT)
        return len(rows)

    def expire(self, lock: AbstractContextManager[Any], *, now_s: float) -> int:
        """Remove expired chunks in steps. Each step takes and releases `lock`. Returns the number of removed chunks."""
        if not self.row_hints.active:
            return 0
        count, now, columns = 0, self.table.ticks(now_s), self.table.columns
        for first in range(0, self.allocator.free_rows.fresh, EXPIRE_ROWS):
            expires = columns.expires[first : min(first + EXPIRE_ROWS, self.allocator.free_rows.fresh)]
            rows = (np.flatnonzero((expires > 0) & (expires <= now)) + first).astype(np.int32)
            if not rows.size:
                continue
            with lock:
                expires = columns.expires[rows]  # read again, because an expiry may have changed in between
                expired = (expires > 0) & (expires <= now) & (columns.state[rows] == RowState.READY)
                self.evictor.remove(rows[expired], now, Reason.EXPIRED)
                count += int(expired.sum())
        return count

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict_ahead(self, *, now_s: float) -> bool:
        """Do one step of eviction in advance, before a writer needs the space. Returns whether there is more to do."""
        self.allocator.release(now_s=now_s)
        return self.evictor.evict_ahead(self.table.ticks(now_s))

    def use_policy(self, group: int | None, chosen: str | type[Policy] | Score | None, *, now_s: float) -> None:
        """Evict by another policy from now on. The policy is given all stored chunks. Scans all rows.

        Args:
            group: The quota group whose policy changes. None: change the default policy, which applies to all groups
                without their own policy.
            chosen: The new policy. None: the group uses the default policy again. If `group` is None too, the
                default policy is the policy of the config again.
            now_s: Time of the host's monotonic clock.

        Raises:
            ConfigError: There is no such policy.
        """
        if chosen is None and group is None:
            chosen = self.config.policy
        self.evictor.use_policy(group, None if chosen is None else policy(chosen), self.table.ticks(now_s))

    def configure(self, group: int, config: NamespaceConfig, *, now_s: float) -> None:
        """Apply a config to a quota group. Chunks above the new quota are evicted later, by `evict_ahead`.

        Raises:
            ConfigError: The node does not know or not allow the policy. All other settings have been applied.
        """
        self.table.namespaces["capacity"][group] = config.dram_quota_nbytes or 0
        self.table.spread[group] = config.placement == "spread"
        self.row_hints.configure(group, config)
        self.evictor.over_quota.add(group)
        if self.evictor.policies.own(group) != config.policy:
            require_allowed(config.policy, self.config)
            self.use_policy(group, config.policy, now_s=now_s)

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
        """Change the hints of chunks. Returns how many of the chunks are stored.

        Args:
            keys: Keys of the chunks, shape [n, 2].
            ttl_s, priority, ended: See `RowHints.update`.
            touch: Whether this call counts as a read of the chunks.
            output_tokens: Number of tokens that a finished request generated. The request had read or stored these
                chunks. None: no request has finished.
            now_s: Time of the host's monotonic clock.

        Raises:
            UsageError: A hint is out of range.
        """
        require_hints(ttl_s, priority, output_tokens)
        now = self.table.ticks(now_s)
        rows, _ = self.table.find_ready(keys, now)
        rows = rows[rows >= 0]
        if rows.size:
            self.row_hints.update(rows, now, ttl_s, priority, ended=True if ended else False if touch else None)
            if touch:
                self.table.touch(rows, now)
            if output_tokens is not None:
                self.evictor.policies.on_request_done(rows, output_tokens, now)
        return len(rows)

    def _release_group(self, group: int) -> bool:
        """Free the number of a quota group for another group. Returns False if the old group still has rows."""
        if self.allocator.used_nbytes[group]:
            return False
        self.row_hints.configure(group, NamespaceConfig())
        self.evictor.reset_group(group)
        return True

    @property
    def has_changes(self) -> bool:
        return bool(self._added or self.evictor.removed)

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        added, removed = b"".join(self._added), b"".join(self.evictor.removed)
        self._added, self.evictor.removed = [], []
        return chunk_keys.from_bytes(added), chunk_keys.from_bytes(removed)


def require_allowed(name: str | None, config: StorageConfig) -> None:
    """Raise ConfigError if a namespace may not name this policy, because the operator has not allowed its module."""
    if name is not None and ":" in name and name not in (config.policy, *config.policies):
        raise ConfigError(
            f"field 'policy': {name!r} is not allowed here: add it to 'policies' in the node's storage config"
        )


def is_first(keys: KeyArray) -> Bits:
    if not has_duplicates(keys[:, 1]):
        return np.ones(len(keys), np.bool_)
    first = np.zeros(len(keys), np.bool_)
    first[np.unique(keys, axis=0, return_index=True)[1]] = True
    return first
