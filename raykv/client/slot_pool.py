"""Slots that the node lends to a writer before the writer needs them. Logic only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from raykv.memory.layout import QUARANTINE_S
from raykv.protocol.namespace import Namespace
from raykv.types import Batch, PutResult

MAX_POOL_SLOTS: Final = 512
MAX_POOL_NBYTES: Final = 256 << 20
MAX_POOL_SHARE: Final = 16
"""Limits of one pool: this many slots, this many bytes, and 1/MAX_POOL_SHARE of the arena."""
POOL_IDLE_S: Final = 5.0
"""A pool that is unused for this long gives its slots back to the node."""
TRUST_S: Final = QUARANTINE_S / 4
"""The writer may write to a lent slot for this long after the node's last answer. If the node died or closed the
connection right after that answer, the slot is still in quarantine. Later the writer must ask the node first."""

Slot = tuple[int, int]
"""Row of a slot, and its offset in the arena."""


class SlotPool:
    """Slots of one size, lent to one writer for one quota group.

    Attributes:
        life: Number of the connection that the lease belongs to.
        most: Largest number of slots in the pool.
        wanted: Target number of slots. It grows with use.
        slots: The free slots.
        coming: Number of slots that are requested but not yet granted.
        used_at_s: When slots were last removed.
    """

    def __init__(self, size: int, arena_nbytes: int, *, life: int = 0) -> None:
        self.life = life
        self.most = min(MAX_POOL_SLOTS, MAX_POOL_NBYTES // size, arena_nbytes // MAX_POOL_SHARE // size)
        self.wanted = self.coming = 0
        self.used_at_s = 0.0
        self.slots: list[Slot] = []

    def pop(self, count: int, now_s: float) -> list[Slot]:
        """Remove up to `count` slots."""
        self.used_at_s = now_s
        left = max(0, len(self.slots) - count)
        popped = self.slots[left:]
        del self.slots[left:]
        return popped

    def pop_surplus(self, idle_since_s: float) -> list[Slot]:
        """Remove the slots above `most`. Remove all slots if the pool is unused since `idle_since_s`."""
        if self.used_at_s < idle_since_s and not self.coming:
            self.wanted = 0
            return self.pop(len(self.slots), self.used_at_s)
        return self.pop(max(0, len(self.slots) - self.most), self.used_at_s)

    def grow(self, count: int) -> None:
        """Raise `wanted` after a put that needed `count` slots found too few."""
        self.wanted = min(self.most, max(4 * self.wanted, 2 * count))

    def lacking(self) -> int:
        """Return how many slots to request in advance, and double `wanted`. 0 while the pool is more than half full.

        A pool that is used all the time so needs few requests. An idle pool starts again: see `pop_surplus`.
        """
        have = len(self.slots) + self.coming
        if 2 * have > self.wanted:
            return 0
        self.wanted = min(self.most, 2 * self.wanted)
        return self.wanted - have


@dataclass(slots=True, eq=False)
class LentBatch:
    """Lent slots for the chunks of a batch that are not stored yet. The writer fills and then commits the slots.

    Attributes:
        group: The quota group.
        positions: For each slot, the position of its key in the batch.
        slots, views: One entry per position. `views` are the bytes to fill.
        checksums: Checksum (u64) of each slot's bytes, after they are written.
        pool: The pool from which the slots were taken. None: there are no slots.
        existed: Number of chunks of the batch that were stored already.
        reason: Why there are too few slots. Empty if there are enough.
        ahead: Number of slots that the commit requests in advance for later puts.
    """

    group: Namespace
    batch: Batch
    positions: Sequence[int] = ()
    slots: list[Slot] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    checksums: bytes = b""
    pool: SlotPool | None = None
    existed: int = 0
    reason: str = ""
    ahead: int = 0

    @property
    def life(self) -> int:
        """Number of the connection that the lease belongs to."""
        return -1 if self.pool is None else self.pool.life

    @property
    def result(self) -> PutResult:
        """What is known before the commit: chunks that were stored already, and chunks without a slot."""
        skipped = len(self.batch.keys) - self.existed - len(self.slots)
        return PutResult(0, self.existed, skipped, self.reason)
