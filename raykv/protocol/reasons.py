"""Why a chunk left a node, and where it is. The numbers travel in messages."""

from enum import IntEnum


class _Word(IntEnum):
    @property
    def word(self) -> str:
        """For people."""
        return self.name.lower()


class Reason(_Word):
    """Why a chunk left."""

    NONE = 0
    EVICTED = 1
    EXPIRED = 2
    DELETED = 3
    DROPPED = 4
    CORRUPT = 5
    DEMOTED = 6


class Place(_Word):
    """Where a chunk is, or left from."""

    NOWHERE = 0
    DRAM = 1
    SSD = 2
    FILE = 3
    OTHER = 4
