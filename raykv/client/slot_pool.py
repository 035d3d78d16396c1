"""Slots that a writer has at hand: lent by the node before they are needed. Logic only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from raykv.memory.layout import QUARANTINE_S
from raykv.protocol.namespace import Namespace
from raykv.types import Batch, PutResult

MAX_POOL_SLOTS: Final = 512
MAX_POOL_NBYTES: Final = 256 << 20
MAX_POOL_SHARE: Final = 16
"""Bounds of one pool: this many slots, this many bytes, and one part in MAX_POOL_SHARE of the arena."""
POOL_IDLE_S: Final = 5.0
"""The slots of a pool that was not used for this long go back to the node."""
GROW_S: Final = 1.0
"""A pool that needs slots twice within this time asks for more the second time: a busy writer seldom runs short."""
TRUST_S: Final = QUARANTINE_S / 4
"""A lent slot is surely ours for this long after the node's last answer. Had the node cut us off, or died, right after
that answer, the slot would still be in quarantine. Later, nothing is written before the node has answered again."""

Slot = tuple[int, int]
"""Row of a slot, and where in the arena the slot begins."""


class QuotaGroup(NamedTuple):
    """The quota group of a namespace, as nodes need it.

    Attributes:
        digest: Names the group in requests.
        text: Fields of the group's namespace as JSON.
    """

    digest: bytes
    text: bytes

    @classmethod
    def of(cls, namespace: Namespace) -> Self:
        """The quota group that a namespace's chunks count under."""
        group = namespace.group
        return cls(group.digest, group.model_dump_json(exclude_defaults=True).encode())


class SlotPool:
    """Slots of one size, lent to one writer for one quota group.

    Attributes:
        life: Number of the connection that the lease belongs to.
        most: Slots that it may hold.
        wanted: Slots that it should hold; grows with use.
        slots: The slots at hand.
        coming: Slots requested ahead of need, without an answer yet.
        used_at_s: When slots were last removed.
    """

    def __init__(self, size: int, arena_nbytes: int, *, life: int = 0) -> None:
        self.life = life
        self.most = min(MAX_POOL_SLOTS, MAX_POOL_NBYTES // size, arena_nbytes // MAX_POOL_SHARE // size)
        self.wanted = self.coming = 0
        self.used_at_s = 0.0
        self._asked_at_s = -GROW_S
        self.slots: list[Slot] = []

    def pop(self, count: int, now_s: float) -> list[Slot]:
        """Remove up to `count` slots."""
        self.used_at_s = now_s
        left = max(0, len(self.slots) - count)
        popped = self.slots[left:]
        del self.slots[left:]
        return popped

    def pop_surplus(self, idle_since_s: float) -> list[Slot]:
        """Remove the slots above `most`; all of them if the pool was last used before `idle_since_s`."""
        if self.used_at_s < idle_since_s and not self.coming:
            self.wanted = 0
            return self.pop(len(self.slots), self.used_at_s)
        return self.pop(max(0, len(self.slots) - self.most), self.used_at_s)

    def grow(self, count: int) -> None:
        """`count` slots were needed at once, and there were fewer: hold more from now on."""
        self.wanted = min(self.most, max(4 * self.wanted, 2 * count))

    def lacking(self, now_s: float) -> int:
        """Slots to request ahead of need now; none while the pool is more than half full."""
        have = len(self.slots) + self.coming
        if 2 * have > self.wanted:
            return 0
        if now_s < self._asked_at_s + GROW_S:
            self.wanted = min(self.most, 2 * self.wanted)
        self._asked_at_s = now_s
        return self.wanted - have


@dataclass(slots=True, eq=False)
class LentBatch:
    """Lent slots for the chunks of a batch that are not stored yet: to be filled, then committed.

    Attributes:
        group, batch: Which chunks.
        positions: Which of the batch's keys the slots are for, in order.
        slots, views: One entry a position; `views` are the bytes to fill.
        pool: The pool that the slots belong to.
        life: As the pool's.
        existed: Chunks of the batch that were stored already.
        reason: Why there are fewer slots than chunks; empty when there are enough.
        ahead: Slots that the commit requests for what comes next.
    """

    group: QuotaGroup
    batch: Batch
    positions: Sequence[int] = ()
    slots: list[Slot] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    pool: SlotPool | None = None
    life: int = 0
    existed: int = 0
    reason: str = ""
    ahead: int = 0

    @property
    def skipped(self) -> int:
        """Chunks without a slot."""
        return len(self.batch.keys) - self.existed - len(self.slots)


def sum_of(first: PutResult, second: PutResult) -> PutResult:
    """The results of two puts as one, with the first reason."""
    return PutResult(
        first.stored + second.stored,
        first.existed + second.existed,
        first.skipped + second.skipped,
        first.reason or second.reason,
        first.posted + second.posted,
    )
