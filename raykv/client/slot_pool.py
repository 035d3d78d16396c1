"""What a client keeps between its puts: slots on loan, and stores that nobody has answered yet. Logic only."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from raykv.memory.reader import ShmReader
from raykv.memory.rows import QUARANTINE_S
from raykv.protocol.namespace import Namespace
from raykv.types import PutResult

MAX_POOL_SLOTS: Final = 512
MAX_POOL_NBYTES: Final = 256 << 20
MAX_POOL_SHARE: Final = 16
"""A client has at most so many slots, so many bytes of them, or this part of the arena (one in so many), of one size
for one quota group lent ahead of need."""
POOL_IDLE_S: Final = 5.0
"""Slots of a pool that was not used for so long go back."""
GROW_S: Final = 1.0
"""A pool that is half empty again within this time has more next time: a writer that goes on asks seldom."""
TRUST_S: Final = QUARANTINE_S / 4
"""So long after the node's last answer a lent slot is surely ours still: had the node cut us off, or died, right after
it, the slot would still rest. Later, nothing is written to it before the node has answered again."""
MAX_POSTED_KEYS: Final = 4096
"""Keys in stores that nobody has answered yet. The answers to them must fit into the socket's buffers."""


Slot = tuple[int, int, int]
"""A slot's row, where in the arena it begins, and the row's generation when it was lent."""


class QuotaGroup(NamedTuple):
    """What a node must know of a namespace.

    Attributes:
        digest: Of the namespace's quota group.
        text: Its fields as JSON.
    """

    digest: bytes
    text: bytes

    @classmethod
    def of(cls, namespace: Namespace) -> Self:
        """The quota group that the namespace's chunks count under."""
        group = namespace.group
        return cls(group.digest, group.model_dump_json(exclude_defaults=True).encode())


class SlotPool:
    """Slots of one size that are lent to us for one quota group.

    Attributes:
        most: Slots that it may hold.
        wanted: Slots that it would hold if there were enough; grows with use.
        slots: Those that nobody has taken.
        used_at_s: When something was taken last.
        coming: Slots that were asked for ahead of need, in stores that nobody has answered yet.
    """

    def __init__(self, size: int, arena_nbytes: int) -> None:
        self.most = min(MAX_POOL_SLOTS, MAX_POOL_NBYTES // size, arena_nbytes // MAX_POOL_SHARE // size)
        self.wanted = self.coming = 0
        self.used_at_s = 0.0
        self._asked_at_s = -GROW_S
        self.slots: list[Slot] = []

    def take(self, count: int, now_s: float) -> list[Slot]:
        """Up to `count` slots."""
        self.used_at_s = now_s
        slots = self.slots
        if count == 1 and slots:
            return [slots.pop()]
        keep = max(0, len(slots) - count)
        taken = slots[keep:]
        del slots[keep:]
        return taken

    def ran_short(self, count: int) -> None:
        """`count` slots were needed, and there were fewer: have more next time."""
        self.wanted = min(self.most, max(4 * self.wanted, 2 * count))

    def lacking(self, now_s: float) -> int:
        """Slots to ask for ahead of need now; none while it is more than half full."""
        have = len(self.slots) + self.coming
        if 2 * have > self.wanted:
            return 0
        if now_s < self._asked_at_s + GROW_S:
            self.wanted = min(self.most, 2 * self.wanted)
        self._asked_at_s = now_s
        return self.wanted - have


class Outcome:
    """What became of posted chunks, until somebody asks."""

    def __init__(self) -> None:
        self._stored = self._existed = self._skipped = 0
        self._reason = ""

    def note(self, *, stored: int = 0, existed: int = 0, skipped: int = 0, reason: str = "") -> None:
        """So many more."""
        self._stored += stored
        self._existed += existed
        self._skipped += skipped
        self._reason = self._reason or reason

    def take(self) -> PutResult:
        """All of it, once."""
        result = PutResult(self._stored, self._existed, self._skipped, self._reason)
        self.__init__()  # type: ignore[misc]
        return result


@dataclass(slots=True, eq=False)
class LentSlots:
    """Slots taken from a pool, to be written now; and then the store that told of them, until it is answered.

    Attributes:
        life: Number of the connection that they hang on.
        reader: The memory that they lie in.
        published: Their chunks are visible already.
        keys: How many the store names.
        asked_at_s: When it was sent.
        ahead: Slots that it asks for.
        outcome: Who is told what became of it, if anybody wants to know.
    """

    pool: SlotPool
    life: int
    reader: ShmReader
    slots: list[Slot]
    published: bool = False
    keys: int = 0
    asked_at_s: float = 0.0
    ahead: int = 0
    outcome: Outcome | None = None

    def note(self, *, stored: int = 0, existed: int = 0, skipped: int = 0, reason: str = "") -> None:
        """What became of the store."""
        if self.outcome is not None:
            self.outcome.note(stored=stored, existed=existed, skipped=skipped, reason=reason)
