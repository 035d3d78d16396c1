"""Why a chunk is gone, and where one lies. The numbers travel in messages."""

from enum import IntEnum


class Reason(IntEnum):
    """Why a chunk went."""

    NONE = 0
    EVICTED = 1
    EXPIRED = 2
    DELETED = 3
    DROPPED = 4
    CORRUPT = 5
    DEMOTED = 6

    @property
    def word(self) -> str:
        """How it is told."""
        return self.name.lower()


class Place(IntEnum):
    """Where a chunk lies, or went from."""

    NOWHERE = 0
    DRAM = 1
    SSD = 2
    FILE = 3
    OTHER = 4

    @property
    def word(self) -> str:
        """How it is told."""
        return self.name.lower()
