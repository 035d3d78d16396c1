"""Reasons why a chunk left a tier, and the tiers where a chunk can be. Messages contain the enum values."""

from enum import IntEnum


class _Word(IntEnum):
    @property
    def word(self) -> str:
        """The name in lower case, for output."""
        return self.name.lower()


class Reason(_Word):
    """Why a chunk left memory or a lower tier.

    NONE: no departure is known. DROPPED: the quota group was dropped. RETIRED: a replica that was not needed any more.
    MOVED: its owner has the chunk now, because the namespace is spread.
    """

    NONE = 0
    EVICTED = 1
    EXPIRED = 2
    DELETED = 3
    DROPPED = 4
    CORRUPT = 5
    DEMOTED = 6
    RETIRED = 7
    MOVED = 8


class Place(_Word):
    """A tier where a chunk is or was. DRAM: the arena. OTHER: a tier of another kind."""

    NOWHERE = 0
    DRAM = 1
    SSD = 2
    FILE = 3
    OTHER = 4
