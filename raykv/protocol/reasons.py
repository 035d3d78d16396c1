"""Reasons why a chunk left a node, and places where a chunk can be. Messages contain their numbers."""

from enum import IntEnum


class _Word(IntEnum):
    @property
    def word(self) -> str:
        """The name in lower case, for output."""
        return self.name.lower()


class Reason(_Word):
    """Why a chunk left a node."""

    NONE = 0
    EVICTED = 1
    EXPIRED = 2
    DELETED = 3
    DROPPED = 4
    CORRUPT = 5
    DEMOTED = 6


class Place(_Word):
    """The tier that a chunk is in, or that it left."""

    NOWHERE = 0
    DRAM = 1
    SSD = 2
    FILE = 3
    OTHER = 4
