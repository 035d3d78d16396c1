"""Transit: chunks that go from a tier to another node, or from another node to a tier, through lent slots.

The slots are never committed, so no reader sees the chunks in memory, and memory keeps what it has. A node that leaves
reads its tiers in this way, and a node whose memory is full stores the chunks of the other node in this way.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.memory.slots import slot_nbytes
from raykv.storage.store import LentSlots, Store
from raykv.tier.base import Chunk, Found, Tier
from raykv.tier.demotion import Demotion
from raykv.types import Bits, KeyArray, Rows

READ_S: Final = 10.0
WRITE_S: Final = 5.0
"""A read from a tier, and a write to a tier, may take this long. A write must end before the sender's deadline."""


class Arrived(NamedTuple):
    """The offsets in the arena of the first chunks of a read, and whether each has been read."""

    offsets: list[int]
    right: Bits


class Transit:
    """Moves chunks of one node between its tiers and other nodes. Thread-safe."""

    def __init__(
        self, store: Store, lock: threading.Lock, tiers: Sequence[Tier], demotion: Demotion, changed: Callable[[], None]
    ) -> None:
        """Use slots of `store`, which `lock` guards. `changed` is called when a tier has got chunks."""
        self._store, self._lock, self._changed = store, lock, changed
        self.own = tuple(tier for tier in tiers if not tier.shared)
        self._demotion = demotion

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of a slot."""
        return self._store.arena.view[offset : offset + nbytes]

    @contextmanager
    def reading(
        self, tier: Tier, keys: KeyArray, found: Sequence[Found], stopping: threading.Event
    ) -> Iterator[Arrived]:
        """Read chunks of one size and one quota group into slots, which are given back at the end of the context.

        If memory lacks slots, only the first chunks are read. Their slots may replace chunks that nobody has pinned. A
        read that has not ended after READ_S, or when `stopping` is set, gives its slots back when it ends.
        """
        ended, right, abandoned = threading.Event(), np.zeros(len(keys), np.bool_), False
        with self._lock:
            slots = self._store.lend(found[0].group, found[0].nbytes, len(keys), now_s=time.monotonic())
        count, offsets = len(slots.rows), slots.offsets.tolist()

        def done(arrived: Sequence[bool]) -> None:
            right[:count] = arrived
            with self._lock:
                ended.set()
                if abandoned:
                    self._store.give_back(slots.rows)

        if not (count and tier.read(keys[:count], found[:count], offsets, done)):
            ended.set()
        until_s = time.monotonic() + READ_S
        while not ended.wait(0.05) and time.monotonic() < until_s and not stopping.is_set():
            pass
        try:
            yield Arrived(offsets, right[:count].copy() if ended.is_set() else np.zeros(count, np.bool_))
        finally:
            with self._lock:
                abandoned = not ended.is_set()
                if not abandoned:
                    self._store.give_back(slots.rows)

    def lend(self, group: int, nbytes: int, count: int) -> tuple[Tier | None, LentSlots]:
        """Lend free slots for chunks that a tier of this node alone can take without removing others.

        Nothing is evicted for these slots, now or later. The caller fills them for `write`, or gives them back by
        `end`. A namespace that stays in memory only, the group's quota and the tier's budget for writes are obeyed.

        Returns:
            The tier, and at most `count` slots. The tier is None if there are no slots.
        """
        size, allocator = slot_nbytes(nbytes), self._store.allocator
        with self._lock:
            rows, pages = allocator.lend_transit(count, size, group)
        # Calls at the same time see each other's slots, so together they never take more than a tier has room for.
        others_nbytes, chosen, most = allocator.transit_nbytes - len(rows) * size, None, 0
        for tier in self.own if len(rows) and self._store.row_hints.config(group).tiers != "dram" else ():
            budget_nbytes = self._demotion.left_nbytes(tier, now_s=time.monotonic()) - others_nbytes
            spare = tier.spare_chunks(group, nbytes) - others_nbytes // size
            most = max(0, int(min(spare, budget_nbytes // size)))
            if most:
                chosen = tier
                break
        self.end(rows[most:])
        return chosen, LentSlots(rows[:most], pages[:most].astype(np.uint64) * SLOT_ALIGNMENT_NBYTES)

    def end(self, rows: Rows) -> None:
        """Give slots of `lend` back. Acquires the lock."""
        if len(rows):
            with self._lock:
                self._store.allocator.end_transit(rows)

    def write(self, tier: Tier, chunks: Sequence[Chunk], rows: Rows) -> int:
        """Write chunks in slots of `lend` to a tier, and wait. A slot is given back when the tier has read it.

        Returns:
            How many of the chunks the tier has after WRITE_S at the latest.
        """
        ended, stored = threading.Event(), list[bool]()

        def done(taken: Sequence[Chunk], written: Sequence[bool]) -> None:
            self.end(rows[: len(taken)])
            stored.extend(written)
            ended.set()
            self._changed()

        count = tier.write(chunks, done) if chunks else 0
        self.end(rows[count:])
        if not count:
            return 0
        self._demotion.spend(tier, sum(slot_nbytes(chunk.nbytes) for chunk in chunks[:count]), now_s=time.monotonic())
        return sum(stored) if ended.wait(WRITE_S) else 0
