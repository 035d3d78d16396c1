"""One node's storage: reserve, commit, pin, evict. The single writer of its chunk table.

Plain and synchronous: no thread, no socket, no clock. The node (`raykv.node`) calls it under one lock and passes the
time; readers use the table and the arena directly (`raykv.transport.shm`) and need none of this.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from raykv import keys as keys_
from raykv.config import SLOT_ALIGNMENT_NBYTES, StorageConfig
from raykv.errors import CapacityError, ConfigError, LostError, UsageError
from raykv.eviction import policy
from raykv.eviction.base import victims
from raykv.memory.arena import SharedMemory, require_room
from raykv.memory.recovery import index_is_whole, require_sound
from raykv.memory.slots import Slots, slot_nbytes
from raykv.memory.table import MAX_NAMESPACES, NAMESPACE_TEXT_NBYTES, Table, table_nbytes
from raykv.namespace import Namespace
from raykv.types import KeyArray, Rows

log = logging.getLogger(__name__)

QUARANTINE_S = 10.0
"""Slots whose writer was cut off stay out of use this long: it may not know of it yet, and still be writing."""
OWN_TIMEOUT_S = 10.0
"""How long to wait for the process that owned the memory before, which may just be dying."""
MAX_PINS = (1 << 16) - 1
MAX_DEPTH = 1 << 31
NO_ROWS: Rows = np.empty(0, np.int32)


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


@dataclass(slots=True)
class Counters:
    """What happened since this process took over, in chunks."""

    committed: int = 0
    evicted: int = 0
    deleted: int = 0
    aborted: int = 0
    refused_full: int = 0
    corrupt: int = 0


class Shard:
    """The arena, the table and the slots of one node, and all that changes them.

    Attributes:
        table, arena: Shared with readers.
        counters: See `Counters`.
        recovered: Chunks found at the start.
    """

    def __init__(self, config: StorageConfig, table: Table, arena: SharedMemory, *, now_s: float) -> None:
        """Take over the table: drop what nobody finished writing, keep what was committed.

        Everything that this process keeps for itself (free slots, free rows, use by account) is derived from the
        columns here, so it cannot disagree with them.
        """
        self.config, self.table, self.arena = config, table, arena
        self.counters = Counters()
        self._policy = policy(config.policy)
        self._added: list[KeyArray] = []
        self._removed: list[KeyArray] = []
        columns = table.columns

        torn = table.dirty or not index_is_whole(table, table.ready_rows())
        with table.changing():
            ready = table.ready_rows()
            unfinished = np.flatnonzero((columns.generation & 1 == 1) & (columns.nbytes > 0)).astype(np.int32)
            if torn:
                table.rebuild_index(ready)
            else:
                table.remove(unfinished)
            columns.pins[:] = 0  # a pin lives as long as its connection, and those are gone
            parents = columns.parent[ready]
            is_ready = np.zeros(table.rows, np.bool_)
            is_ready[ready] = True
            columns.parent[ready] = np.where((parents >= 0) & is_ready[parents], parents, -1)
            self._count_children(ready)
            table.incarnation += 1

        self.recovered = len(ready)
        self._slots = Slots(
            table.extent_slots,
            config.extent_nbytes,
            lambda extent: arena.back(extent * config.extent_nbytes, config.extent_nbytes),
            columns.page[np.concatenate([ready, unfinished])],
        )
        busy = is_ready
        busy[unfinished] = True
        self._free_rows: list[int] = np.flatnonzero(~busy)[::-1].tolist()
        self._quarantine = [(now_s + QUARANTINE_S, unfinished)]
        self._used_nbytes = np.bincount(
            columns.namespace[ready], weights=self._slot_sizes(ready), minlength=MAX_NAMESPACES
        ).astype(np.int64)
        self._accounts = _accounts(table)

    @classmethod
    def open(cls, config: StorageConfig, prefix: Path | None, *, now_s: float) -> "Shard":
        """Map this node's files, or make them.

        Args:
            prefix: Path that the files' names begin with. None: anonymous memory, gone with the process.

        Raises:
            ConfigError: No room for the arena or the table, or the place for them is no directory.
        """
        require_room(config.shm_dir, 0, field="shm_dir")
        if prefix is not None:
            try:
                return cls._attach(config, prefix, now_s=now_s)
            except LostError as error:  # none there, of another size or version, or damaged
                log.info("starting empty: %s", str(error))  # as text: whoever keeps the record must not keep the memory
                remove_files(prefix)
        size = config.extents * config.extent_nbytes
        table_path, arena_path = (None, None) if prefix is None else shard_files(prefix)
        require_room(config.shm_dir, size + table_nbytes(config.rows, config.extents), field="arena_nbytes")
        arena = SharedMemory.create(arena_path, size)
        try:
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
    def _attach(cls, config: StorageConfig, prefix: Path, *, now_s: float) -> "Shard":
        table_path, arena_path = shard_files(prefix)
        memory = SharedMemory.attach(table_path, writable=True)
        memory.own(timeout_s=OWN_TIMEOUT_S)
        table = Table(memory)
        arena = SharedMemory.attach(arena_path, writable=True)
        same = (
            (table.rows, table.extents, table.extent_nbytes) == (config.rows, config.extents, config.extent_nbytes)
            and arena.nbytes == config.extents * config.extent_nbytes
            and table.ticks(now_s) < 1 << 31  # a year and more: times are about to wrap
        )
        if not same:
            raise LostError(f"{table_path} was made with another configuration")
        require_sound(table)
        _accounts(table)
        return cls(config, table, arena, now_s=now_s)

    # -- accounts ---------------------------------------------------------------------------------------------------

    def open_account(self, namespace: Namespace, capacity_nbytes: int | None = None) -> int:
        """Number of the account that this namespace's chunks count under, made if need be.

        Args:
            capacity_nbytes: The most that its slots may take here; 0 for no bound but the arena; None leaves it.

        Raises:
            CapacityError: All MAX_NAMESPACES numbers are taken.
            UsageError: The namespace's fields are too long to be kept, or the capacity is no size.
        """
        if capacity_nbytes is not None and not 0 <= capacity_nbytes < 1 << 64:
            raise UsageError(f"capacity_nbytes {capacity_nbytes} is no size; 0 means no bound but the arena")
        account = namespace.account
        number = self._accounts.get(account.digest)
        if number is None:
            text = account.model_dump_json(exclude_defaults=True).encode()
            if len(text) > NAMESPACE_TEXT_NBYTES:
                raise UsageError(f"namespace of {len(text)} bytes as JSON; at most {NAMESPACE_TEXT_NBYTES} can be kept")
            free = np.flatnonzero(self.table.namespaces["text"] == b"")
            if not free.size:
                raise CapacityError(f"all {MAX_NAMESPACES} namespaces of this node are in use; drop one")
            number = int(free[0])
            self.table.namespaces["capacity"][number] = 0
            self.table.namespaces["text"][number] = text
            self._accounts[account.digest] = number
        if capacity_nbytes is not None:
            self.table.namespaces["capacity"][number] = capacity_nbytes
        return number

    def account(self, digest: bytes) -> int:
        """Number of an account that was opened.

        Raises:
            LostError: It was not, or this node began anew since. Open it (again).
        """
        number = self._accounts.get(digest)
        if number is None:
            raise LostError("this namespace is not open on this node")
        return number

    # -- writing ----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        keys: KeyArray,
        nbytes: int,
        account: int,
        *,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        now_s: float,
    ) -> Reserved:
        """Make room for those `keys` that this shard does not hold yet.

        A reserved chunk is invisible until `commit`. Keys already held, or being written by another caller, are left
        out, and are not evicted to make room for the rest: storing a prefix must not lose its head. When not all find
        room, the first ones get it.

        Args:
            keys: Chunks, all of the same size; a repeated key gets room once.
            nbytes: Size of each chunk in bytes.
            account: Number from `open_account` or `account`.
            chained: Whether each key follows the one before it in one prefix.
            parent: Key, shape [1, 2], of the chunk that keys[0] follows.
            depth: Place of keys[0] in its chain, in case its parent is not here to tell.
            now_s: Time by the host's monotonic clock.

        Raises:
            UsageError: The size is 0 or above an extent, or the depth is no such number.
        """
        if not 0 < nbytes <= self.config.extent_nbytes:
            raise UsageError(
                f"a chunk of {nbytes:,} bytes does not fit: at least 1, and at most extent_nbytes "
                f"({self.config.extent_nbytes:,}); raise extent_nbytes or cut the value into chunks"
            )
        if not 0 <= depth < MAX_DEPTH:
            raise UsageError(f"depth {depth} is not in 0 .. {MAX_DEPTH - 1}")
        now = self.table.ticks(now_s)
        self._release_quarantine(now_s)
        existing = self._drop_expired(self.table.find(keys), now)
        anchor = self.table.find(parent[:1]) if parent is not None else NO_ROWS
        if anchor.size and anchor[0] >= 0:
            depth = int(self.table.columns.depth[anchor[0]]) + 1
        positions = np.flatnonzero(existing < 0)
        first = np.unique(keys[positions], axis=0, return_index=True)[1]
        positions = positions[np.sort(first)]

        size = slot_nbytes(nbytes)
        protected = np.concatenate([existing[existing >= 0], anchor[anchor >= 0]])
        room = self._make_room(len(positions), size, account, protected, now)
        pages = self._slots.take(room, size)
        if len(pages) < room:  # the file system was full: some extents are of no use, and others must be emptied
            more = self._make_room(room - len(pages), size, account, protected, now)
            pages = np.concatenate([pages, self._slots.take(more, size)])
            room = len(pages)
        full, positions = len(positions) - room, positions[:room]
        self.counters.refused_full += full

        rows = np.array([self._free_rows.pop() for _ in range(room)], np.int32)
        with self.table.changing():
            self._fill(rows, pages, keys[positions], nbytes, account)
            self.table.columns.depth[rows] = depth + positions if chained else 0
            if chained:
                self._link(existing, anchor, positions, rows)
            self._used_nbytes[account] += room * size
        offsets = pages.astype(np.uint64) * SLOT_ALIGNMENT_NBYTES
        return Reserved(positions.astype(np.int32), rows, offsets, full)

    def commit(self, rows: Rows, checksums: npt.NDArray[np.uint64], *, now_s: float) -> None:
        """Make reserved chunks, whose bytes are written, visible to every reader."""
        columns, now = self.table.columns, self.table.ticks(now_s)
        columns.checksum[rows] = checksums
        columns.inserted[rows] = columns.accessed[rows] = now
        columns.frequency[rows] = 0
        columns.expires[rows] = 0
        even = columns.generation[rows] + np.uint32(1)
        columns.generation[rows] = np.where(even == 0, 2, even)  # 0 would mean never used
        self.counters.committed += len(rows)
        self._added.append(self._keys(rows))

    def abort(self, rows: Rows) -> None:
        """Give reserved rows up: their writer changed its mind."""
        self.counters.aborted += len(rows)
        self._free(rows)

    def abandon(self, rows: Rows, *, now_s: float) -> None:
        """Take reserved rows from a writer that was cut off. Their slots come back after QUARANTINE_S."""
        if rows.size:
            self.counters.aborted += len(rows)
            self._unlink(rows)
            self._quarantine.append((now_s + QUARANTINE_S, rows))

    def delete(self, keys: KeyArray) -> int:
        """Drop chunks. Pinned ones stay. Returns how many went."""
        rows = self.table.find(keys)
        rows = np.unique(rows[rows >= 0])
        rows = rows[self._evictable(rows)]
        self.counters.deleted += len(rows)
        self._drop(rows)
        return len(rows)

    # -- reading with a hold -----------------------------------------------------------------------------------------

    def pin(self, keys: KeyArray, *, now_s: float) -> Pinned:
        """Hold those keys that are ready: neither eviction nor deletion takes them until `unpin`."""
        columns, now = self.table.columns, self.table.ticks(now_s)
        rows, _ = self.table.find_ready(keys, now)
        wanted = np.bincount(rows[rows >= 0], minlength=1)  # a key may be asked for more than once
        rows = np.where((rows >= 0) & (columns.pins[rows] + wanted[rows] <= MAX_PINS), rows, np.int32(-1))
        held = rows[rows >= 0]
        np.add.at(columns.pins, held, 1)
        if held.size:
            self.table.touch(held, now)
        return Pinned(
            rows,
            columns.page[rows].astype(np.uint64) * SLOT_ALIGNMENT_NBYTES,
            columns.nbytes[rows],
            columns.checksum[rows],
        )

    def unpin(self, rows: Rows) -> None:
        """End holds that `pin` gave; entries of -1 are passed over."""
        np.subtract.at(self.table.columns.pins, rows[rows >= 0], 1)

    def verify(self, keys: KeyArray, *, now_s: float) -> int:
        """Check the bytes of chunks that somebody found wrong, and drop those that are. Returns how many went."""
        rows, _ = self.table.find_ready(keys, self.table.ticks(now_s))
        rows = np.unique(rows[rows >= 0])
        wrong = rows[[not self._intact(row) for row in rows.tolist()]] if rows.size else rows
        wrong = wrong[self._evictable(wrong)]
        self.counters.corrupt += len(wrong)
        self._drop(wrong)
        return len(wrong)

    # -- ahead of need -----------------------------------------------------------------------------------------------

    def tend(self, *, now_s: float) -> None:
        """Evict ahead of need: when little is free, free some more. To be called after writes."""
        self._release_quarantine(now_s)
        total = self.arena.nbytes
        if self._slots.free_nbytes >= self.config.low_water * total:
            return
        wanted_nbytes = self.config.high_water * total - self._slots.free_nbytes
        rows = self._candidates(NO_ROWS)
        if rows.size:
            mean = float(self._slot_sizes(rows).mean())
            self._evict(rows, int(wanted_nbytes / mean) + 1, self.table.ticks(now_s))

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Keys that came and that went since the last call."""
        added, removed = self._added, self._removed
        self._added, self._removed = [], []
        return np.concatenate([keys_.empty(), *added]), np.concatenate([keys_.empty(), *removed])

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would give any."""
        return bool(self._added or self._removed)

    def ready_keys(self) -> KeyArray:
        """All keys that can be read here."""
        return self._keys(self.table.ready_rows())

    @property
    def used_nbytes(self) -> int:
        """Bytes in slots that hold a chunk or are reserved."""
        return int(self._used_nbytes.sum())

    @property
    def chunks(self) -> int:
        """Chunks that can be read."""
        return len(self.table.ready_rows())

    @property
    def extents_unbacked(self) -> int:
        """Extents that could not be used because the file system was full."""
        return self._slots.extents_unbacked

    def close(self) -> None:
        """Let go of the memory; the files stay."""
        self.table.memory.close()
        self.arena.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make_room(self, count: int, size: int, account: int, protected: Rows, now: int) -> int:
        """Evict until `count` slots of `size` are free for the account. Returns for how many there is room."""
        capacity = int(self.table.namespaces["capacity"][account])
        if capacity:
            allowed = max(0, capacity - int(self._used_nbytes[account])) // size
            if allowed < count:
                rows = self._candidates(protected)
                rows = rows[self.table.columns.namespace[rows] == account]
                self._evict(rows, count - allowed, now)
                allowed = max(0, capacity - int(self._used_nbytes[account])) // size
            count = min(count, allowed)
        missing = count - len(self._free_rows)
        if missing > 0:
            self._evict(self._candidates(protected), missing, now)
            count = min(count, len(self._free_rows))
        while (missing := count - self._slots.free(size)) > 0:
            if not self._evict_for_slots(missing, size, protected, now):
                return self._slots.free(size)
        return count

    def _evict_for_slots(self, missing: int, size: int, protected: Rows, now: int) -> bool:
        """Free slots of one size: the coldest chunks of that size, or a whole extent of another that is colder yet."""
        accessed = self.table.columns.accessed
        rows = self._candidates(protected)
        own = rows[self._slot_sizes(rows) == size]
        mine = victims(self._policy, self.table.columns, own, missing, now)
        foreign, last_access = self._coldest_foreign_extent(size, rows)
        if foreign.size and (not mine.size or last_access < int(accessed[mine].min())):
            mine = foreign
        self.counters.evicted += len(mine)
        self._drop(mine)
        return bool(mine.size)

    def _coldest_foreign_extent(self, size: int, candidates: Rows) -> tuple[Rows, int]:
        """Rows of the extent, among those serving other sizes and wholly evictable, whose last read is longest ago."""
        extents = self._slots.extents_serving_others(size)
        if not extents.size:
            return NO_ROWS, 0
        columns = self.table.columns
        home = self._slots.extent_of(columns.page[candidates])
        evictable = np.bincount(home, minlength=self.table.extents)
        last = np.zeros(self.table.extents, np.int64)
        np.maximum.at(last, home, columns.accessed[candidates].astype(np.int64))
        extents = extents[evictable[extents] == self._slots.used(extents)]
        if not extents.size:
            return NO_ROWS, 0
        coldest = extents[np.argmin(last[extents])]
        return candidates[home == coldest], int(last[coldest])

    def _candidates(self, protected: Rows) -> Rows:
        rows = self.table.ready_rows()
        mask = self._evictable(rows)
        if protected.size:
            mask &= ~np.isin(rows, protected)
        return rows[mask]

    def _evictable(self, rows: Rows) -> npt.NDArray[np.bool_]:
        columns = self.table.columns
        mask: npt.NDArray[np.bool_] = (columns.generation[rows] & 1 == 0) & (columns.pins[rows] == 0)
        return mask

    def _evict(self, candidates: Rows, count: int, now: int) -> None:
        rows = victims(self._policy, self.table.columns, candidates, count, now)
        self.counters.evicted += len(rows)
        self._drop(rows)

    def _drop_expired(self, rows: Rows, now: int) -> Rows:
        """`rows` with -1 for those that had expired; they are gone then."""
        columns = self.table.columns
        expires = columns.expires[rows]
        expired = (rows >= 0) & (expires > 0) & (expires <= now)
        expired[expired] = self._evictable(rows[expired])
        self._drop(np.unique(rows[expired]))
        return np.where(expired, np.int32(-1), rows)

    def _fill(self, rows: Rows, pages: npt.NDArray[np.uint32], keys: KeyArray, nbytes: int, account: int) -> None:
        columns = self.table.columns
        columns.generation[rows] |= 1
        columns.page[rows] = pages
        columns.nbytes[rows] = nbytes
        columns.namespace[rows] = account
        columns.pins[rows] = 0
        columns.parent[rows] = -1
        columns.children[rows] = 0
        self.table.insert(keys, rows)

    def _link(self, existing: Rows, anchor: Rows, positions: npt.NDArray[np.int64], rows: Rows) -> None:
        """Hang new rows of a chain below the rows before them."""
        columns = self.table.columns
        chain = existing.copy()
        chain[positions] = rows
        before = np.concatenate([anchor[:1] if anchor.size else np.array([-1], np.int32), chain[:-1]])
        parents = before[positions]
        columns.parent[rows] = parents
        np.add.at(columns.children, parents[parents >= 0], 1)

    def _drop(self, rows: Rows) -> None:
        """Take ready rows away from readers, then free them."""
        if rows.size:
            self._removed.append(self._keys(rows))
            self._free(rows)

    def _free(self, rows: Rows) -> None:
        if rows.size:
            self._unlink(rows)
            self._give_back(rows)

    def _unlink(self, rows: Rows) -> None:
        """Take rows out of index, chains and accounts. They and their slots stay taken."""
        columns = self.table.columns
        with self.table.changing():
            columns.generation[rows] += columns.generation[rows] & 1 ^ 1  # even becomes odd: readers turn away first
            self.table.remove(rows)
            if columns.children[rows].any():
                columns.parent[np.isin(columns.parent, rows)] = -1
            parents = columns.parent[rows]
            np.subtract.at(columns.children, parents[parents >= 0], 1)
            np.subtract.at(self._used_nbytes, columns.namespace[rows], self._slot_sizes(rows))
            columns.parent[rows] = -1
            columns.children[rows] = 0

    def _give_back(self, rows: Rows) -> None:
        self.table.columns.nbytes[rows] = 0
        self._slots.give(self.table.columns.page[rows])
        self._free_rows.extend(rows.tolist())

    def _release_quarantine(self, now_s: float) -> None:
        while self._quarantine and now_s >= self._quarantine[0][0]:
            self._give_back(self._quarantine.pop(0)[1])

    def _count_children(self, ready: Rows) -> None:
        columns = self.table.columns
        parents = columns.parent[ready]
        columns.children[:] = np.bincount(parents[parents >= 0], minlength=self.table.rows)

    def _slot_sizes(self, rows: Rows) -> npt.NDArray[np.int64]:
        pages = -(-self.table.columns.nbytes[rows].astype(np.int64) // SLOT_ALIGNMENT_NBYTES)
        sizes: npt.NDArray[np.int64] = pages * SLOT_ALIGNMENT_NBYTES
        return sizes

    def _keys(self, rows: Rows) -> KeyArray:
        return np.stack([self.table.columns.key_hi[rows], self.table.columns.key_lo[rows]], axis=1)

    def _intact(self, row: int) -> bool:
        columns = self.table.columns
        start = int(columns.page[row]) * SLOT_ALIGNMENT_NBYTES
        chunk = self.arena.view[start : start + int(columns.nbytes[row])]
        return xxhash.xxh3_64_intdigest(chunk) == int(columns.checksum[row])


def _accounts(table: Table) -> dict[bytes, int]:
    """Numbers of the accounts in the table's list, by digest.

    Raises:
        LostError: The list is damaged.
    """
    try:
        return {
            Namespace.model_validate_json(text).digest: number
            for number, text in enumerate(table.namespaces["text"].tolist())
            if text
        }
    except ValidationError as error:
        raise LostError(f"{table.memory.path} is damaged: a namespace that is none") from error


def shard_files(prefix: Path) -> tuple[Path, Path]:
    """Paths of a node's table and arena."""
    return prefix.with_name(prefix.name + ".table"), prefix.with_name(prefix.name + ".arena")


def remove_files(prefix: Path) -> None:
    """Forget a node's memory. Whoever still maps it keeps it until they let go."""
    for path in shard_files(prefix):
        path.unlink(missing_ok=True)
