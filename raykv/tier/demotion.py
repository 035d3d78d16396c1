"""Demotion: writes chunks to the tiers before memory evicts them.

Eviction itself writes nothing. So no `put` waits for a disk.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from raykv.eviction.base import live_parents
from raykv.memory.slots import slot_nbytes
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.tier.admission import Admission
from raykv.tier.base import Chunk, Tier, Written
from raykv.tier.segments.format import key_array, raw_keys
from raykv.types import KeyArray, Rows

AHEAD_SHARE: Final = 0.125
AHEAD_NBYTES: Final = 1 << 30
MOST_AHEAD_SHARE: Final = 0.5
"""The chunks that eviction takes next are demoted in advance: AHEAD_SHARE of the arena, or AHEAD_NBYTES if that is
more, at most MOST_AHEAD_SHARE of the arena for all tiers together. Tiers write no more than that at once, because what
they write stays in memory: a put must find room while a drive hangs. A larger burst of puts may evict chunks before a
tier has written them. An engine stores all chunks of a step at once: some MB to 1 GB, whatever the size of the arena.
"""
NEW_SHARE: Final = 32
"""Demotion is due when more than 1 / NEW_SHARE of the store's chunks are new since the last `demote`."""
STEP_CHUNKS: Final = 1024
"""One call of `Tier.write` gets at most this many chunks."""
WRITE_WAIT_S: Final = 0.1
"""A put waits at most this long for room while chunks that memory would evict are being written."""


class Demotion:
    """Writes chunks of one store to its tiers. Thread-safe.

    Attributes:
        demoted: Number of chunks that the tiers have reported as stored.
    """

    def __init__(
        self, store: Store, lock: threading.Lock, tiers: Sequence[Tier], written: Callable[[KeyArray], None]
    ) -> None:
        """Demote chunks of `store`, which `lock` guards.

        When a write ends, successfully or not, `written` is called with the keys, without the lock.
        """
        self._store, self._lock, self._tiers, self._on_written = store, lock, tiers, written
        self._write_ended = threading.Condition(lock)
        now_s = time.monotonic()
        self._admissions = {tier: Admission(tier.write_nbytes_per_day, now_s=now_s) for tier in tiers}
        most = MOST_AHEAD_SHARE / max(1, len(tiers))
        self._ahead = min(most, max(AHEAD_SHARE, AHEAD_NBYTES / store.arena.nbytes))
        self._writing = dict.fromkeys(tiers, 0)  # number of chunks that each tier is writing
        self._barred: Counter[int | bytes] = Counter()  # quota groups and keys that are being deleted right now
        self._committed = 0  # `store.counters.committed` at the last `demote`
        self.demoted = 0

    @property
    def due(self) -> bool:
        """Whether enough chunks were stored since the last `demote` for another `demote`. Cheap."""
        store = self._store
        return bool(self._tiers) and store.counters.committed - self._committed > store.chunks // NEW_SHARE

    @property
    def writing(self) -> bool:
        return any(self._writing.values())

    def wait_for_room(self, room: Callable[[], bool], until_s: float = math.inf) -> None:
        """Wait for writes to the tiers until `room`, which evicts, has made room. Wait at most WRITE_WAIT_S.

        A chunk that is being written stays in memory, and with it all chunks before it in its prompt. If memory holds
        few prompts, nothing else may be left to evict. The caller holds the node's lock, which is released meanwhile.
        """
        until_s = min(until_s, time.monotonic() + WRITE_WAIT_S)
        while self.writing and not room() and self._write_ended.wait(max(0.0, until_s - time.monotonic())):
            pass

    def demote(self) -> None:
        """Begin to write to the tiers the chunks that memory will evict next. Call this whenever it is `due`."""
        self._committed = self._store.counters.committed
        for tier, admission in self._admissions.items():
            self._demote_to(tier, admission)

    def left_nbytes(self, tier: Tier, *, now_s: float) -> float:
        """Return how many bytes the budget of a tier has left: infinite without a budget."""
        return self._admissions[tier].left_nbytes(now_s=now_s)

    def spend(self, tier: Tier, nbytes: int, *, now_s: float) -> None:
        """Take bytes from the budget of a tier, for chunks that did not ask `Admission`."""
        self._admissions[tier].spend(nbytes, now_s=now_s)

    def _demote_to(self, tier: Tier, admission: Admission) -> None:
        now_s, store, columns = time.monotonic(), self._store, self._store.table.columns
        with self._lock:
            now = store.table.ticks(now_s)
            rows = store.evictor.upcoming(self._ahead, now)
            rows = rows[store.evictor.evictable(rows)]
            may, priority = store.row_hints.below(rows, now)
            rows, priority = rows[may], priority[may]
            keys = store.table.keys_of(rows)
            parents = live_parents(columns, rows)
            parent_reads = np.where(parents >= 0, columns.frequency[np.maximum(parents, 0)], 0).astype(np.int64)
            sizes = store.allocator.slot_sizes(rows)
            # A chunk that was evicted and then stored again was requested twice: that counts as a read.
            evicted_before = store.eviction_log.find(keys).reasons == Reason.EVICTED
            reads = columns.frequency[rows].astype(np.int64) + evicted_before
            room = max(0, math.ceil(self._ahead * store.chunks) - self._writing[tier])
        missing = ~tier.has(keys)
        missing[missing] = admission.admit(
            reads[missing],
            parent_reads[missing],
            sizes[missing],
            now_s=now_s,
            priority=priority[missing],
        )
        chosen, later = np.split(np.flatnonzero(missing), [room])
        admission.spend(-int(sizes[later].sum()), now_s=now_s)
        for first in range(0, len(chosen), STEP_CHUNKS):
            some = chosen[first : first + STEP_CHUNKS]
            chunks, taken = self.write(tier, rows[some], keys[some])
            if taken < len(chunks):  # the queue is full: give the bytes of the other chunks back to the budget
                taken_nbytes = sum(slot_nbytes(chunk.nbytes) for chunk in chunks[:taken])
                admission.spend(taken_nbytes - int(sizes[chosen[first:]].sum()), now_s=now_s)
                return

    def write(self, tier: Tier, rows: Rows, keys: KeyArray) -> tuple[list[Chunk], int]:
        """Offer the tier those of the chunks that are still evictable.

        Returns the offered chunks, and how many of them the tier took.
        """
        chunks, pinned = self._pin(tier, rows, keys)
        taken = tier.write(chunks, self._written(tier, pinned)) if chunks else 0
        self._unpin(tier, pinned[taken:])
        return chunks, taken

    def _pin(self, tier: Tier, rows: Rows, keys: KeyArray) -> tuple[list[Chunk], Rows]:
        store, columns, now_s = self._store, self._store.table.columns, time.monotonic()
        today_s = time.time() - now_s
        with self._lock:
            wanted = store.evictor.evictable(rows)
            if self._barred:
                wanted &= [key not in self._barred for key in raw_keys(keys)]
                wanted &= [group not in self._barred for group in columns.group[rows].tolist()]
            pinned = store.pin(keys[wanted], now_s=now_s, touch=False)
            here = pinned.rows >= 0
            rows = pinned.rows[here]
            self._writing[tier] += len(rows)
            parents = live_parents(columns, rows)
            parent_keys = raw_keys(store.table.keys_of(parents))
            fields = zip(
                raw_keys(keys[wanted][here]),
                pinned.offsets[here].tolist(),
                pinned.nbytes[here].tolist(),
                pinned.checksums[here].tolist(),
                columns.group[rows].tolist(),
                columns.depth[rows].tolist(),
                [key if parent >= 0 else b"" for key, parent in zip(parent_keys, parents.tolist(), strict=True)],
                columns.frequency[rows].tolist(),
                [today_s + store.table.seconds(ticks) if ticks else 0.0 for ticks in columns.expires[rows].tolist()],
                strict=True,
            )
            return [Chunk(*each) for each in fields], rows

    def _written(self, tier: Tier, rows: Rows) -> Written:
        def done(chunks: Sequence[Chunk], written: Sequence[bool]) -> None:
            self._unpin(tier, rows[: len(chunks)])
            self.demoted += sum(written)
            self._on_written(key_array([chunk.key for chunk in chunks]))

        return done

    def _unpin(self, tier: Tier, rows: Rows) -> None:
        with self._lock:
            self._store.unpin(rows)
            self._writing[tier] -= len(rows)
            self._write_ended.notify_all()

    @contextmanager
    def barring(self, keys: KeyArray | None = None, *, group: int | None = None) -> Iterator[None]:
        """While the context lasts, write no chunk of these keys or of this quota group to a tier.

        A deletion runs in this context, because it deletes chunks first in the tiers and then in memory. Otherwise
        demotion could write a chunk to a tier again between these two steps.
        """
        barred: list[int | bytes] = [] if keys is None or not self._tiers else [*raw_keys(keys)]
        barred += [] if group is None or not self._tiers else [group]
        with self._lock:
            self._barred.update(barred)
        try:
            yield
        finally:
            with self._lock:
                self._barred.subtract(barred)
                self._barred = +self._barred
