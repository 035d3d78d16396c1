"""Chunks on their way down to the tiers below memory, and back up.

What memory would evict next is written down before its turn comes, if it deserves it: eviction itself writes nothing,
and nobody waits for a disk to get room. What is asked for and lies below is read into slots of the arena, committed as
if somebody had put it, and served from there.

No thread of its own: the node's forerunner calls `demote`, whoever answers a request calls `promote`, and the tiers
call back from their threads. All changes of the store happen under the node's lock, which no tier is asked for anything
under that takes time.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from raykv.config import NodeConfig
from raykv.errors import RayKVError
from raykv.memory.slots import slot_nbytes
from raykv.memory.table import NAMESPACE_TEXT_NBYTES
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.namespace import Namespace
from raykv.protocol.reasons import Place, Reason
from raykv.storage.store import Store
from raykv.tier.admission import Admission
from raykv.tier.base import Chunk, Found, Tier
from raykv.types import Bits, KeyArray, Rows

log = logging.getLogger(__name__)

AHEAD_SHARE: Final = 0.125
"""Demotion begins when less than this share of the arena, beside what is kept free anyway, could be evicted without
losing anything: so much is what writers may take at once before the disk has to keep up."""
STEPS_AHEAD: Final = 32
"""What would go is looked at again when so much of what memory holds was stored since (one part in so many)."""
STEP_CHUNKS: Final = 1024
"""Chunks that are handed to a tier at once."""
PROMOTED_SHARE: Final = 8
RUNS_AT_ONCE: Final = 4
"""Chunks on their way up take at most this part of the arena (one in so many), and one run this part of that."""


@dataclass(slots=True)
class _Rising:
    """Chunks of one run on their way up, whose slots are a tier's to write to until it calls back."""

    keys: KeyArray
    rows: Rows
    found: list[Found]
    nbytes: int
    unwanted: set[bytes] = field(default_factory=set)
    """Keys that were deleted meanwhile."""
    ended: threading.Event = field(default_factory=threading.Event)


class Names:
    """How the tiers' files name quota groups: by their fields. See `tier.base.GroupNames`."""

    def __init__(self, store: Store, lock: threading.Lock) -> None:
        self._shard, self._lock = store, lock

    def text(self, group: int) -> bytes:
        """The quota group's fields as JSON."""
        return bytes(self._shard.table.namespaces["text"][group])

    def number(self, text: bytes) -> int | None:
        """Its number on this node, made if need be."""
        if len(text) > NAMESPACE_TEXT_NBYTES:
            return None
        try:
            namespace = Namespace.model_validate_json(text)
            with self._lock:
                return self._shard.groups.open(namespace)
        except (ValueError, RayKVError):
            return None


class Tiers:
    """The tiers of one node, fastest first, and the traffic between them and memory. Thread-safe.

    Attributes:
        tiers: May be none.
        demoted, promoted: Chunks that were written down; that came up.
        late: Requests that did not wait for the end of a read.
    """

    def __init__(
        self,
        store: Store,
        lock: threading.Lock,
        tiers: Sequence[Tier],
        *,
        admissions: Sequence[Admission],
        changed: Callable[[], None],
    ) -> None:
        """Begin to move chunks of `store`, under the node's lock.

        Args:
            admissions: What each tier takes.
            changed: Called when there is something to announce.
        """
        self.tiers, self._shard, self._lock, self._changed = tuple(tiers), store, lock, changed
        self._admissions = tuple(admissions)
        self._taking = threading.Lock()
        self._taken: list[KeyArray] = []  # changes that nobody was told of yet
        self._rising: dict[bytes, _Rising] = {}
        self._rising_nbytes = 0
        self._most_nbytes = store.arena.nbytes // PROMOTED_SHARE
        self._in_hand = np.zeros(store.table.rows, np.bool_)  # rows that a tier is writing
        self._unwanted: set[int] = set()  # those of them whose chunks were deleted meanwhile
        self._barred: Counter[int | bytes] = Counter()  # quota groups and keys that are being forgotten right now
        self._committed = 0  # chunks that had been stored at the last look at what would go
        self.demoted = self.promoted = self.late = 0

    def __bool__(self) -> bool:
        return bool(self.tiers)

    @property
    def due(self) -> bool:
        """Whether so much was stored since the last `demote` that the next one should not wait. Cheap."""
        store = self._shard
        return bool(self.tiers) and store.counters.committed - self._committed > store.chunks // STEPS_AHEAD

    @property
    def writing(self) -> bool:
        """Whether a tier is writing chunks down."""
        return bool(self._in_hand.any())

    # -- down -------------------------------------------------------------------------------------------------------

    def demote(self) -> None:
        """Hand the tiers what memory would evict next, as far as they take it. Call it often: before evictions."""
        self._committed = self._shard.counters.committed
        for tier, gate in zip(self.tiers, self._admissions, strict=True):
            self._demote_to(tier, gate)

    def _demote_to(self, tier: Tier, gate: Admission) -> None:
        now_s = time.monotonic()
        store = self._shard
        with self._lock:
            rows = store.room.upcoming(AHEAD_SHARE, store.table.ticks(now_s))
            rows = rows[~self._in_hand[rows]]
            may, hints = store.room.row_hints.below(rows, store.table.ticks(now_s))
            rows, hints = rows[may], None if hints is None else hints[may]
            if not rows.size:
                return
            columns = store.table.columns
            keys = np.stack([columns.key_hi[rows], columns.key_lo[rows]], axis=1)
            reads = columns.frequency[rows].astype(np.int64)
            above = columns.parent[rows]
            above_reads = np.where(above >= 0, columns.frequency[np.maximum(above, 0)], 0).astype(np.int64)
            sizes = store.room.slot_sizes(rows)
            # What was evicted once, and was stored again since, was asked for twice.
            reads += store.room.eviction_log.find(keys).reasons == Reason.EVICTED
        lacking = ~tier.has(keys)
        priority = None if hints is None else hints[lacking]
        lacking[lacking] = gate.admit(
            reads[lacking], above_reads[lacking], sizes[lacking], now_s=now_s, priority=priority
        )
        chosen = np.flatnonzero(lacking)
        for first in range(0, len(chosen), STEP_CHUNKS):
            some = chosen[first : first + STEP_CHUNKS]
            chunks, held = self._hold(rows[some], keys[some])
            taken = tier.write(chunks, self._written(held)) if chunks else 0
            self._let_go(held[taken:])
            if taken < len(chunks):  # it has enough to do
                written_nbytes = sum(slot_nbytes(chunk.nbytes) for chunk in chunks[:taken])
                gate.spend(written_nbytes - int(sizes[chosen[first:]].sum()), now_s=now_s)
                return

    def _hold(self, rows: Rows, keys: KeyArray) -> tuple[list[Chunk], Rows]:
        """Pin those rows that still hold these keys. Returns what a tier must know of them, and the rows."""
        store = self._shard
        chunks: list[Chunk] = []
        held: list[int] = []
        now_s, today_s = time.monotonic(), time.time()
        with self._lock:
            cells, table = store.table.cells, store.table
            sound = store.room.evictable(rows)
            now = table.ticks(now_s)
            for row, (hi, lo), fits in zip(rows.tolist(), keys.tolist(), sound.tolist(), strict=True):
                if not fits or (cells.key_hi[row], cells.key_lo[row]) != (hi, lo) or self._in_hand[row]:
                    continue
                if self._barred and (cells.namespace[row] in self._barred or store.key_of(row) in self._barred):
                    continue
                expires, above = cells.expires[row], cells.parent[row]
                if 0 < expires <= now:
                    continue
                chunks.append(
                    Chunk(
                        key=store.key_of(row),
                        offset=store.offset_of(row),
                        nbytes=cells.nbytes[row],
                        checksum=cells.checksum[row],
                        group=cells.namespace[row],
                        depth=cells.depth[row],
                        parent=store.key_of(above) if above >= 0 else b"",
                        reads=cells.frequency[row],
                        expires_s=today_s + table.seconds(expires) - now_s if expires else 0.0,
                    )
                )
                cells.pins[row] += 1
                self._in_hand[row] = True
                held.append(row)
        return chunks, np.array(held, np.int32)

    def _written(self, rows: Rows) -> Callable[[Sequence[Chunk], Sequence[bool]], None]:
        def done(chunks: Sequence[Chunk], kept: Sequence[bool]) -> None:
            self._let_go(rows[: len(chunks)])
            self.demoted += sum(kept)
            self._changed()

        return done

    def _let_go(self, rows: Rows) -> None:
        store = self._shard
        with self._lock:
            self._in_hand[rows] = False
            gone = [row for row in rows.tolist() if row in self._unwanted] if self._unwanted else []
            self._unwanted.difference_update(gone)
            keys = chunk_keys.from_bytes(b"".join(map(store.key_of, gone)))
            store.unpin(rows)
            if gone:
                store.delete(keys, now_s=time.monotonic())
        if gone:
            self.delete(keys)

    # -- up ---------------------------------------------------------------------------------------------------------

    def promote(self, keys: KeyArray, *, until_s: float) -> int:
        """Bring those of the keys into memory that are not there, and wait for them until `until_s`.

        What takes longer still comes. With `until_s` 0 nobody waits.

        Returns:
            How many of the keys are on their way, or came.
        """
        wanted = self._absent(keys)
        if not len(wanted):
            return 0
        runs = self._others(wanted)
        for tier in self.tiers:
            if not len(wanted):
                break
            found = tier.find(wanted)
            left = [entry is None for entry in found]
            for some in _runs(wanted, found, self._most_nbytes // RUNS_AT_ONCE):
                entries = [entry for entry in found[some] if entry is not None]
                self._wait_for_room(entries[0].nbytes * len(entries), until_s)
                run = self._make_room(wanted[some], entries)
                if run is not None and self._start(tier, run):
                    runs.append(run)
                elif run is not None:  # the tier is slow, or has too much to do: the next one may have it too
                    left[some] = [True] * len(entries)
            wanted = wanted[left]
        for run in runs:
            if not run.ended.wait(max(0.0, until_s - time.monotonic())):
                self.late += until_s > 0
                break
        return sum(len(run.keys) for run in runs)

    def _wait_for_room(self, nbytes: int, until_s: float) -> None:
        """Until others have come up, if too much is on its way."""
        while self._rising_nbytes + nbytes > self._most_nbytes:
            with self._lock:
                first = next(iter(self._rising.values()), None)
            if first is None or not first.ended.wait(max(0.0, until_s - time.monotonic())):
                return

    def _absent(self, keys: KeyArray) -> KeyArray:
        """Those that are not in memory; each once."""
        table = self._shard.table
        with self._lock:
            rows, _ = table.find_ready(keys, table.ticks(time.monotonic()))
        absent = keys[rows < 0]
        if len(absent) < 2:
            return absent
        first = np.unique(absent, axis=0, return_index=True)[1]
        return absent[np.sort(first)]

    def _others(self, keys: KeyArray) -> list[_Rising]:
        """Runs under way that some of the keys are part of."""
        raw = chunk_keys.to_bytes(keys)
        with self._lock:
            if not self._rising:
                return []
            runs = [self._rising.get(raw[at : at + KEY_NBYTES]) for at in range(0, len(raw), KEY_NBYTES)]
        return list({id(run): run for run in runs if run is not None}.values())

    def _make_room(self, keys: KeyArray, found: list[Found]) -> _Rising | None:
        """Slots for a run of chunks of one size, one quota group and one chain."""
        store, first, now_s = self._shard, found[0], time.monotonic()
        parent = chunk_keys.from_bytes(first.parent) if first.parent else None
        chained = parent is not None or (len(found) > 1 and bool(found[1].parent))
        with self._lock:
            if self._rising and self._rising_nbytes + first.nbytes * len(keys) > self._most_nbytes:
                return None
            try:
                reserved = store.reserve(
                    keys,
                    first.nbytes,
                    first.group,
                    chained=chained,
                    parent=parent,
                    depth=first.depth,
                    now_s=now_s,
                )
            except RayKVError as error:
                log.warning("a chunk below memory that does not fit: %s", str(error))
                return None
            if not len(reserved.rows):
                return None
            places = reserved.positions.tolist()
            run = _Rising(keys[places], reserved.rows, [found[place] for place in places], first.nbytes * len(places))
            self._rising_nbytes += run.nbytes
            for key in _split(run.keys):
                self._rising[key] = run
        return run

    def _start(self, tier: Tier, run: _Rising) -> bool:
        """False when the tier does not take it."""
        offsets = [self._shard.offset_of(row) for row in run.rows.tolist()]

        def done(arrived: Sequence[bool]) -> None:
            self._arrived(run, np.array(arrived, np.bool_))

        if tier.read(run.keys, run.found, offsets, done):
            return True
        self._arrived(run, np.zeros(len(run.rows), np.bool_))
        return False

    def _arrived(self, run: _Rising, arrived: Bits) -> None:
        """Make visible what is there, and give back what did not come."""
        store, now_s, today_s = self._shard, time.monotonic(), time.time()
        checksums = np.array([found.checksum for found in run.found], np.uint64)
        with self._lock:
            if run.unwanted:
                arrived = arrived & np.array([key not in run.unwanted for key in _split(run.keys)])
            rows, table = run.rows[arrived], store.table
            store.commit(rows, checksums[arrived], now_s=now_s)
            came = [found for found, here in zip(run.found, arrived.tolist(), strict=True) if here]
            for row, found in zip(rows.tolist(), came, strict=True):
                table.cells.frequency[row] = found.reads
                if found.expires_s:
                    table.cells.expires[row] = table.ticks(now_s + found.expires_s - today_s)
                    store.room.row_hints.expiring = store.room.row_hints.active = True
            store.abort(run.rows[~arrived])
            self.promoted += len(rows)
            self._rising_nbytes -= run.nbytes
            for key in _split(run.keys):
                if self._rising.get(key) is run:
                    del self._rising[key]
        run.ended.set()
        self._changed()

    # -- what they hold ---------------------------------------------------------------------------------------------

    def has(self, keys: KeyArray) -> Bits:
        """Which of the keys some tier holds."""
        here = np.zeros(len(keys), np.bool_)
        for tier in self.tiers:
            here |= tier.has(keys)
        return here

    def keys(self) -> KeyArray:
        """All that some tier holds, but for what other nodes know as well as we do."""
        return np.concatenate([chunk_keys.empty(), *(tier.keys() for tier in self.tiers)])

    def take_changes(self) -> list[KeyArray]:
        """Keys that came to a tier or went from one since the last call."""
        with self._taking:
            changes, self._taken = self._taken, []
            for tier in self.tiers:
                changes += self._take(tier, Reason.EVICTED)
        return changes

    def _take(self, tier: Tier, reason: Reason) -> tuple[KeyArray, KeyArray]:
        came, went = tier.take_changes()
        if len(went):
            with self._lock:
                self._shard.room.eviction_log.note(went, reason, tier=Place[tier.name.upper()], now_s=time.monotonic())
        return came, went

    def delete(self, keys: KeyArray) -> int:
        """Forget chunks; then `give_up` what is on its way. Returns how many were there, each tier's counted."""
        return self._forget(lambda tier: tier.delete(keys), Reason.DELETED)

    def drop(self, group: int) -> int:
        """Forget an quota group's chunks, and what is on its way. Returns how many there were."""
        count = self._forget(lambda tier: tier.drop(group), Reason.DROPPED)
        with self._lock:
            for run in self._rising.values():
                if run.found[0].group == group:
                    run.unwanted.update(_split(run.keys))
            self._unwanted.update(
                np.flatnonzero(self._in_hand & (self._shard.table.columns.namespace == group)).tolist()
            )
        return count

    @contextmanager
    def barring(self, keys: KeyArray | None = None, *, group: int | None = None) -> Iterator[None]:
        """Until the end, nothing of these keys, or of this quota group, begins to go down.

        What is forgotten is forgotten below first and then in memory, which may have it written down again in between.
        """
        barred: list[int | bytes] = []
        if self.tiers:
            barred += [] if keys is None else _split(keys)
            barred += [] if group is None else [group]
        with self._lock:
            self._barred.update(barred)
        try:
            yield
        finally:
            with self._lock:
                self._barred.subtract(barred)
                self._barred = +self._barred

    def give_up(self, keys: KeyArray) -> None:
        """These were deleted, below and in memory: what of them is on its way up or down goes when it arrives.

        Under the node's lock, in which they were deleted in memory.
        """
        for key in _split(keys) if self._rising else ():
            run = self._rising.get(key)
            if run is not None:
                run.unwanted.add(key)
        if self.writing:
            rows = self._shard.table.find(keys)
            self._unwanted.update(row for row in rows[rows >= 0].tolist() if self._in_hand[row])

    def _forget(self, how: Callable[[Tier], int], reason: Reason) -> int:
        """What goes between these two looks goes for this reason."""
        count = 0
        with self._taking:
            for tier in self.tiers:
                self._taken += self._take(tier, Reason.EVICTED)
                count += how(tier)
                self._taken += self._take(tier, reason)
        return count

    def set_quota(self, group: int, nbytes: int | None) -> None:
        """Bound what an quota group's chunks may take on the SSDs; None: no bound but their capacity."""
        for tier in self.tiers:
            if tier.name == "ssd":
                tier.set_quota(group, nbytes)

    def stats(self) -> dict[str, Any]:
        """Of each tier, by its name; and the traffic."""
        return {
            "tiers": {tier.name: tier.stats() for tier in self.tiers},
            "demoted": self.demoted,
            "promoted": self.promoted,
            "promotions_late": self.late,
            "promoting_nbytes": self._rising_nbytes,
        }

    def close(self) -> None:
        """End the tiers' threads. What was on its way up is given back."""
        for tier in self.tiers:
            tier.close()


def open_tiers(config: NodeConfig, store: Store, lock: threading.Lock, *, changed: Callable[[], None]) -> Tiers:
    """The tiers that a node's config asks for.

    Raises:
        ConfigError: A directory is not to be had.
    """
    tiers: list[Tier] = []
    admissions: list[Admission] = []
    ssd, name = config.storage.ssd, f"raykv-{config.cluster}-{config.node_id}"
    if ssd is not None:
        from raykv.tier.ssd.tier import SsdTier

        tiers.append(SsdTier(ssd, store.arena.view, name, Names(store, lock)))
        admissions.append(Admission(ssd.write_nbytes_per_day, now_s=time.monotonic()))
    if config.storage.file is not None:
        from raykv.tier.file.tier import FileTier

        tiers.append(FileTier(config.storage.file, store.arena.view, name, Names(store, lock)))
        admissions.append(Admission(config.storage.file.write_nbytes_per_day, now_s=time.monotonic()))
    return Tiers(store, lock, tiers, admissions=admissions, changed=changed)


def _runs(keys: KeyArray, found: list[Found | None], most_nbytes: int) -> list[slice]:
    """Cut what was found into runs that one `reserve` makes room for.

    All of a run have one size and one quota group, and each is the next of the chain, or none is part of any. A run of
    several takes no more than `most_nbytes`.
    """
    raw = _split(keys)
    runs: list[slice] = []
    first, kind = 0, ""
    for place in range(len(found) + 1 if found else 0):
        link = _link(found[place - 1], found[place], raw[place - 1]) if 0 < place < len(found) else ""
        size = 0 if (entry := found[first]) is None else entry.nbytes
        full = (place - first + 1) * size > most_nbytes
        if place and (not link or full or (place - first > 1 and link != kind)):
            if found[first] is not None:
                runs.append(slice(first, place))
            first = place
        kind = link
    return runs


def _link(before: Found | None, now: Found | None, key_before: bytes) -> str:
    """How a chunk belongs to the run of the one before it."""
    if before is None or now is None or (before.nbytes, before.group) != (now.nbytes, now.group):
        return ""
    if now.parent == key_before and now.depth == before.depth + 1:
        return "chained"
    return "apart" if not (before.parent or now.parent) else ""


def _split(keys: KeyArray) -> list[bytes]:
    raw = chunk_keys.to_bytes(keys)
    return [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]
