"""Promotion: reads chunks from a tier into lent slots of the arena, and commits them like a client's put."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from raykv.errors import RayKVError
from raykv.storage.batches import Written
from raykv.storage.store import LentSlots, Store
from raykv.tier.base import Found, Tier
from raykv.tier.segments.format import key_array, raw_keys
from raykv.types import Batch, Bits, KeyArray, Rows

log = logging.getLogger(__name__)

PROMOTED_SHARE: Final = 8
RUNS_AT_ONCE: Final = 4
"""All chunks being promoted take at most 1/PROMOTED_SHARE of the arena. One run takes at most 1/RUNS_AT_ONCE of
this share. Only a run of a single chunk may take more."""


@dataclass(slots=True, eq=False)
class _Run:
    """Chunks that one read of a tier promotes. The tier may write to their slots until it calls back.

    Attributes:
        batch: Consecutive chunks of one chain. The run reads only those at `positions`.
        positions: Indexes in `batch.keys` of the chunks that were neither in memory nor in another run.
        slots: A slot for each of `positions`.
        found: Metadata of the chunk at each of `positions`.
        unwanted: Keys of chunks that were deleted since the run began. They are not committed.
    """

    batch: Batch
    positions: list[int]
    slots: LentSlots
    found: list[Found]
    unwanted: set[bytes] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def nbytes(self) -> int:
        return self.batch.nbytes * len(self.positions)

    def keys(self) -> list[bytes]:
        return raw_keys(self.batch.keys[self.positions])


class Promotion:
    """Reads chunks from the tiers into one store. Thread-safe.

    Attributes:
        promoted: Number of chunks promoted.
        late: Number of `promote` calls whose deadline passed before all their reads had ended.
        nbytes: Bytes of the chunks being promoted now.
    """

    def __init__(self, store: Store, lock: threading.Lock, tiers: Sequence[Tier], changed: Callable[[], None]) -> None:
        self._store, self._lock, self._tiers, self._changed = store, lock, tiers, changed
        self._runs: dict[bytes, _Run] = {}  # each unfinished run, under the key of each of its chunks
        self._most_nbytes = store.arena.nbytes // PROMOTED_SHARE
        self.nbytes = self.promoted = self.late = 0

    def promote(self, keys: KeyArray, *, until_s: float) -> int:
        """Promote those chunks that are not in memory. Wait for the reads until the monotonic time `until_s`.

        With `until_s` 0, do not wait. Reads that take longer continue in the background. A chunk that another call is
        promoting is not read twice: this call waits for the other call's read.

        Returns:
            Number of chunks in all reads that this call began or joined.
        """
        with self._lock:
            wanted = keys[self._store.missing(keys, now_s=time.monotonic())]
        runs = set[_Run]()
        for tier in self._tiers:
            if not len(wanted):
                break
            found = tier.find(wanted)
            left = [entry is None for entry in found]
            for some in split_into_runs(wanted, found, self._most_nbytes // RUNS_AT_ONCE):
                entries = [entry for entry in found[some] if entry is not None]
                self._wait_for_room(entries[0].nbytes * len(entries), until_s)
                run, others = self._begin(wanted[some], entries)
                runs.update(others)
                if run is not None and self._read(tier, run):
                    runs.add(run)
                elif run is not None:  # the tier refused; a slower tier may have the chunks too
                    left[some] = [True] * len(entries)
            wanted = wanted[left]
        for run in runs:
            if not run.ended.wait(max(0.0, until_s - time.monotonic())):
                self.late += until_s > 0
                break
        return sum(len(run.positions) for run in runs)

    def _wait_for_room(self, nbytes: int, until_s: float) -> None:
        while self.nbytes + nbytes > self._most_nbytes:
            with self._lock:
                first = next(iter(self._runs.values()), None)
            if first is None or not first.ended.wait(max(0.0, until_s - time.monotonic())):
                return

    def _begin(self, keys: KeyArray, found: list[Found]) -> tuple[_Run | None, list[_Run]]:
        """Begin a run of those chunks that are neither in memory nor in another run.

        Returns the run, and the other runs that read some of the chunks. The run is None if no chunk is left for it, or
        if memory has no space.
        """
        store, first, now_s, raw = self._store, found[0], time.monotonic(), raw_keys(keys)
        parent = key_array([first.parent]) if first.parent else None
        batch = Batch(
            keys, first.nbytes, parent=parent, depth=first.depth, chained=len(found) > 1 or bool(first.parent)
        )
        with self._lock:
            others = [self._runs[key] for key in raw if key in self._runs]
            if self._runs and self.nbytes + first.nbytes * len(keys) > self._most_nbytes:
                return None, others
            positions = [each for each in store.missing(keys, now_s=now_s).tolist() if raw[each] not in self._runs]
            protect = [keys] if parent is None else [keys, parent]
            try:
                slots = store.lend(first.group, first.nbytes, len(positions), protect=protect, now_s=now_s)
            except RayKVError as error:
                log.warning("a chunk below memory that does not fit into it: %s", error)
                return None, others
            positions = positions[: len(slots.rows)]
            if not positions:
                return None, others
            run = _Run(batch, positions, slots, [found[each] for each in positions])
            self.nbytes += run.nbytes
            self._runs.update(dict.fromkeys(run.keys(), run))
        return run, others

    def _read(self, tier: Tier, run: _Run) -> bool:
        """Let the tier read the chunks of a run. Returns False if the tier refuses."""

        def done(arrived: Sequence[bool]) -> None:
            self._arrive(run, np.array(arrived, np.bool_))

        if tier.read(run.batch.keys[run.positions], run.found, run.slots.offsets.tolist(), done):
            return True
        self._arrive(run, np.zeros(len(run.positions), np.bool_))
        return False

    def _arrive(self, run: _Run, arrived: Bits) -> None:
        store, rows, now_s, keys = self._store, run.slots.rows, time.monotonic(), run.keys()
        with self._lock:
            arrived &= np.array([key not in run.unwanted for key in keys])
            positions = np.array(run.positions, np.int32)[arrived]
            checksums = np.array([found.checksum for found in run.found], np.uint64)[arrived]
            used = np.zeros(len(rows), np.bool_)
            try:
                written = Written(positions, rows[arrived], checksums)
                used[arrived] = store.commit(run.found[0].group, run.batch, written, now_s=now_s)
            except RayKVError as error:
                log.warning("chunks of a tier that could not be stored: %s", error)
            self._restore(rows[used], [run.found[place] for place in np.flatnonzero(used)], now_s)
            store.give_back(rows[~used])
            self.promoted += int(used.sum())
            self.nbytes -= run.nbytes
            for key in keys:
                del self._runs[key]
        run.ended.set()
        self._changed()

    def _restore(self, rows: Rows, found: Sequence[Found], now_s: float) -> None:
        """Give committed chunks the read counts and expiry times that they have in the tier."""
        store, today_s = self._store, time.time()
        columns, table = store.table.columns, store.table
        columns.frequency[rows] = [each.reads for each in found]
        columns.expires[rows] = [
            table.ticks(now_s + each.expires_s - today_s) if each.expires_s else 0 for each in found
        ]
        if any(each.expires_s for each in found):
            store.row_hints.active = True

    def give_up(self, keys: KeyArray) -> None:
        """Keep deleted chunks from being committed when their reads end. The caller holds the node's lock."""
        for key in self._runs.keys() & raw_keys(keys) if self._runs else ():
            self._runs[key].unwanted.add(key)

    def give_up_group(self, group: int) -> None:
        """Keep chunks of a dropped quota group from being committed when their reads end. Acquires the node's lock."""
        with self._lock:
            for run in self._runs.values():
                if run.found[0].group == group:
                    run.unwanted.update(run.keys())


def split_into_runs(keys: KeyArray, found: Sequence[Found | None], most_nbytes: int) -> list[slice]:
    """Divide the found chunks into runs. Each run is a slice of `keys`, and can be stored as one batch.

    The chunks of a run have the same size and quota group, and are consecutive in one chain. A run of several chunks
    takes at most `most_nbytes`.
    """
    raw, runs = raw_keys(keys), list[slice]()
    for place, entry in enumerate(found):
        before = found[place - 1] if place else None
        if entry is None:
            continue
        if before is not None and (entry.nbytes, entry.group) == (before.nbytes, before.group):
            fits = (place + 1 - runs[-1].start) * entry.nbytes <= most_nbytes
            if fits and entry.parent == raw[place - 1] and entry.depth == before.depth + 1:
                runs[-1] = slice(runs[-1].start, place + 1)
                continue
        runs.append(slice(place, place + 1))
    return runs
