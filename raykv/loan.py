"""What a client keeps between its puts: slots on loan, and stores that nobody has answered yet. Logic only."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from raykv.memory.rows import QUARANTINE_S
from raykv.namespace import Namespace
from raykv.transport.shm import ShmReader
from raykv.types import PutResult

MAX_POOL_SLOTS: Final = 512
MAX_POOL_NBYTES: Final = 256 << 20
MAX_POOL_SHARE: Final = 16
"""A client has at most so many slots, so many bytes of them, or this part of the arena (one in so many), of one size
for one account lent ahead of need."""
POOL_IDLE_S: Final = 5.0
"""Slots of a pool that was not used for so long go back."""
GROW_S: Final = 1.0
"""A pool that is half empty again within this time has more next time: a writer that goes on asks seldom."""
TRUST_S: Final = QUARANTINE_S / 4
"""So long after the node's last answer a lent slot is surely ours still: had the node cut us off, or died, right after
it, the slot would still rest. Later, nothing is written to it before the node has answered again."""
MAX_POSTED_KEYS: Final = 4096
"""Keys in stores that nobody has answered yet. The answers to them must fit into the socket's buffers."""


class Account(NamedTuple):
    """What a node must know of a namespace.

    Attributes:
        digest: Of the namespace's account.
        text: Its fields as JSON.
    """

    digest: bytes
    text: bytes

    @classmethod
    def of(cls, namespace: Namespace) -> Self:
        """The account that the namespace's chunks count under."""
        account = namespace.account
        return cls(account.digest, account.model_dump_json(exclude_defaults=True).encode())


class Pool:
    """Slots of one size that are lent to us for one account.

    Attributes:
        most: Slots that it may hold.
        wanted: Slots that it would hold if there were enough; grows with use.
        used_at_s: When something was taken last.
        coming: Slots that were asked for ahead of need, in stores that nobody has answered yet.
    """

    def __init__(self, size: int, arena_nbytes: int) -> None:
        self.most = min(MAX_POOL_SLOTS, MAX_POOL_NBYTES // size, arena_nbytes // MAX_POOL_SHARE // size)
        self.wanted = self.coming = 0
        self.used_at_s = 0.0
        self._asked_at_s = -GROW_S
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._generations: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: list[int], starts: list[int], generations: list[int]) -> None:
        """These are lent to us (again)."""
        self._rows += rows
        self._starts += starts
        self._generations += generations

    def take(self, count: int, now_s: float) -> tuple[list[int], list[int], list[int]]:
        """Up to `count` slots: their rows, where in the arena they begin, and the rows' generations."""
        self.used_at_s = now_s
        keep = max(0, len(self._rows) - count)
        taken = self._rows[keep:], self._starts[keep:], self._generations[keep:]
        del self._rows[keep:], self._starts[keep:], self._generations[keep:]
        return taken

    def ran_short(self, count: int) -> None:
        """`count` slots were needed, and there were fewer: have more next time."""
        self.wanted = min(self.most, max(4 * self.wanted, 2 * count))

    def lacking(self, now_s: float) -> int:
        """Slots to ask for ahead of need now; none while it is more than half full."""
        have = len(self._rows) + self.coming
        if 2 * have > self.wanted:
            return 0
        if now_s < self._asked_at_s + GROW_S:
            self.wanted = min(self.most, 2 * self.wanted)
        self._asked_at_s = now_s
        return self.wanted - have


@dataclass(slots=True)
class Borrowed:
    """Slots taken from a pool, to be written now.

    Attributes:
        life: Number of the connection that they hang on.
        reader: The memory that they lie in.
        rows, starts, generations: One entry a slot.
    """

    pool: Pool
    life: int
    reader: ShmReader
    rows: list[int]
    starts: list[int]
    generations: list[int]


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


class Posted(NamedTuple):
    """A store that was sent and not answered yet.

    Attributes:
        ahead: Slots that it asks for.
        published: Its chunks are visible already.
    """

    borrowed: Borrowed
    keys: int
    asked_at_s: float
    ahead: int
    outcome: Outcome
    published: bool
