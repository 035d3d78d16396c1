"""Slots that the node lends to a writer before the writer needs them. This module does no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from raykv.memory.layout import QUARANTINE_S
from raykv.protocol.namespace import Namespace
from raykv.types import Batch, PutResult

MAX_POOL_SLOTS: Final = 512
MAX_POOL_NBYTES: Final = 256 << 20
MAX_POOL_SHARE: Final = 16
"""A pool has at most MAX_POOL_SLOTS slots, MAX_POOL_NBYTES bytes, and 1/MAX_POOL_SHARE of the arena's bytes."""
POOL_IDLE_S: Final = 5.0
"""If no put uses a pool for this long, the pool's slots are given back to the node."""
TRUST_S: Final = QUARANTINE_S / 4
"""When the node has answered a request, the writer may start to write to lent slots until TRUST_S after it sent the
request. Later, the writer must first get another answer. If the node dies right after an answer, no slot is reused for
QUARANTINE_S. So a writer that starts in time has at least QUARANTINE_S - TRUST_S to write."""

Slot = tuple[int, int]
"""Row number of a slot in the chunk table, and the slot's byte offset in the arena."""


class SlotPool:
    """Slots of one size, lent to one writer for one quota group.

    Attributes:
        size: Length of each slot in bytes.
        life: Number of the connection on which the slots were lent.
        most: Largest number of slots in the pool.
        wanted: Target number of slots. It grows with use.
        slots: The slots in the pool. No batch uses them.
        coming: Number of slots that were requested and are not lent yet.
        used_at_s: When a put last took slots, or `Client.prepare` last requested slots.
    """

    def __init__(self, size: int, arena_nbytes: int, *, life: int = 0) -> None:
        self.size, self.life = size, life
        self.most = min(MAX_POOL_SLOTS, MAX_POOL_NBYTES // size, arena_nbytes // MAX_POOL_SHARE // size)
        self.wanted = self.coming = 0
        self.used_at_s = 0.0
        self.slots: list[Slot] = []

    def pop(self, count: int, now_s: float) -> list[Slot]:
        """Remove up to `count` slots from the pool, and return them."""
        self.used_at_s = now_s
        left = max(0, len(self.slots) - count)
        popped = self.slots[left:]
        del self.slots[left:]
        return popped

    def pop_surplus(self, idle_since_s: float) -> list[Slot]:
        """Remove the slots that the pool does not need, and return them.

        If the pool was not used since `idle_since_s` and no slots are coming, remove all slots. Otherwise leave at most
        `most` slots in the pool.
        """
        if self.used_at_s < idle_since_s and not self.coming:
            self.wanted = 0
            return self.pop(len(self.slots), self.used_at_s)
        return self.pop(max(0, len(self.slots) - self.most), self.used_at_s)

    def grow(self, count: int) -> None:
        """Raise `wanted` because a put needed `count` slots, and the pool had fewer."""
        self.wanted = min(self.most, max(4 * self.wanted, 2 * count))

    def lacking(self) -> int:
        """Return how many slots to request in advance.

        The result is 0 if `slots` and `coming` together are more than half of `wanted`. Otherwise this method first
        doubles `wanted`, so that a busy pool needs few requests. Then it returns how many slots are lacking.
        """
        have = len(self.slots) + self.coming
        if 2 * have > self.wanted:
            return 0
        self.wanted = min(self.most, 2 * self.wanted)
        return self.wanted - have


@dataclass(slots=True, eq=False)
class LentBatch:
    """Slots lent for those chunks of a batch that are not stored yet. The writer fills and then commits the slots.

    Attributes:
        group: The quota group.
        batch: The chunks to store.
        positions: For each slot, the position of its chunk in the batch.
        slots: The lent slots.
        views: For each slot, the bytes to fill.
        checksums: For each slot, the u64 checksum of the bytes. Empty until the slots are filled.
        pool: The pool from which the slots were taken. None: there are no slots.
        existed: Number of chunks of the batch that were stored already.
        reason: Why there are too few slots. Empty if there are enough slots.
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
        """Number of the connection on which the slots were lent. -1: there are no slots."""
        return -1 if self.pool is None else self.pool.life

    @property
    def result(self) -> PutResult:
        """The counts that are known before the commit: chunks that were stored already, and chunks without a slot."""
        skipped = len(self.batch.keys) - self.existed - len(self.slots)
        return PutResult(0, self.existed, skipped, self.reason)
