"""The interface of a tier below memory. A tier writes chunks from the arena and reads chunks back into it.

A tier has its own lock and threads. No call waits for a disk: `write` and `read` queue the chunks, or refuse if the
queue is full. A thread of the tier calls back when the work is done. How to add a tier: docs/tiers.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from raykv.protocol.reasons import Place
from raykv.types import Bits, KeyArray


class Chunk(NamedTuple):
    """A chunk in the arena that a tier shall write. The node keeps its bytes unchanged until the tier has called back.

    Attributes:
        key: 16 bytes, as `chunk_keys.to_bytes` writes them.
        offset, nbytes: Offset of the chunk in the arena (a multiple of a page), and its length. Its slot takes
            a whole number of pages.
        checksum: xxh3-64 of the bytes.
        group: The number that identifies the quota group on this node.
        depth: Number of chunks before it in its chain (the consecutive chunks of a prompt).
        parent: Key of the chunk before it in its chain; b"" if there is none.
        reads: Number of reads so far.
        expires_s: Expiry in seconds since 1970; 0 for never.
    """

    key: bytes
    offset: int
    nbytes: int
    checksum: int
    group: int
    depth: int = 0
    parent: bytes = b""
    reads: int = 0
    expires_s: float = 0.0


class Found(NamedTuple):
    """Metadata of a chunk in a tier; fields as in `Chunk`."""

    nbytes: int
    checksum: int
    group: int
    depth: int
    parent: bytes
    reads: int
    expires_s: float


def is_same(found: Found | None, nbytes: int, checksum: int) -> bool:
    return found is not None and (found.nbytes, found.checksum) == (nbytes, checksum)


Written = Callable[[Sequence[Chunk], Sequence[bool]], None]
"""The callback of `Tier.write`: called once, if the tier took chunks. Arguments: the chunks that it took; for each,
whether the tier has it now."""
Arrived = Callable[[Sequence[bool]], None]
"""The callback of `Tier.read`: called once, if the tier accepted the call. Argument: for each chunk, whether the arena
has it now, undamaged."""


class GroupNames(Protocol):
    """Maps quota groups' numbers to names and back. Files hold names, as a restart may change numbers. Thread-safe."""

    def text(self, group: int) -> bytes: ...

    def number(self, text: bytes) -> int | None:
        """Return the group's number here; a new group gets one. None: no number is free, or `text` is invalid."""
        ...


class Environment(NamedTuple):
    """What a tier gets from its node.

    Attributes:
        arena: The node's arena, writable. It begins at a page boundary. `Chunk.offset` is relative to its first byte.
        node: Name of the node: unique, the same after a restart, valid as a file name.
    """

    arena: memoryview
    node: str
    groups: GroupNames


class Tier(ABC):
    """Stores chunks of one node, below the node's memory. Thread-safe.

    Attributes:
        name: Name in the registry and in `stats`.
        place: Where its chunks lie, as `client.why` reports it.
        write_nbytes_per_day: The most bytes that the node writes to the tier in a day, see `Admission`; None: no limit.
    """

    name: str
    place: Place = Place.OTHER
    write_nbytes_per_day: int | None = None

    @abstractmethod
    def has(self, keys: KeyArray) -> Bits:
        """Return for each key whether the tier has its chunk. Does no I/O."""

    @abstractmethod
    def find(self, keys: KeyArray) -> list[Found | None]:
        """Metadata of each chunk; None if the chunk is not in the tier or has expired. Does no I/O."""

    @abstractmethod
    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """Queue chunks to be written. A chunk that the tier already has is not written again; `done` gets True for it.

        Returns how many chunks the tier took; they are the first ones of `chunks`. `done` is called once, for these
        only. Returns 0, and never calls `done`, while the queue is full, the tier is off, or no space can be made.
        """

    @abstractmethod
    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """Queue chunks to be read into slots of the arena. The tier may write to these slots until it calls back.

        `found` is the result of `find`; the slots begin at `offsets`. `done` gets False for a chunk that is missing,
        has another length or checksum than in `found`, or has wrong bytes; the tier drops a chunk with wrong bytes.
        Returns False, and never calls `done`, while the queue is full or the tier is off.
        """

    @abstractmethod
    def delete(self, keys: KeyArray) -> int:
        """Delete chunks; they stay deleted after a restart. Returns how many the tier had."""

    @abstractmethod
    def drop(self, group: int) -> int:
        """Delete all chunks of a quota group; they stay deleted after a restart. Returns how many the tier had."""

    def set_quota(self, group: int, nbytes: int | None) -> None:  # noqa: B027 - need not be overridden
        """Limit the bytes of a quota group (`ssd_quota_nbytes`) by removing its oldest chunks. None: no limit."""

    @abstractmethod
    def keys(self) -> KeyArray:
        """Keys of all chunks in the tier. If nodes share the tier: only the keys of chunks that this node wrote."""

    @abstractmethod
    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Keys added (written, or found at the start) and keys removed since the last call.

        If nodes share the tier: only the keys of chunks that this node wrote.
        """

    @abstractmethod
    def used_nbytes(self, group: int | None = None) -> int:
        """Bytes of a quota group's chunks in the tier. With None, bytes of all chunks."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """State and counters, as plain values.

        `state` ("starting", "on", "slow", "off") and its `reason`; `chunks`, `used_nbytes` and `capacity_nbytes`.
        Counters since the start: `written_nbytes` (chunks from callers), `moved_nbytes` (chunks that the tier moved to
        another of its segments), `disk_nbytes` (everything written to the disk), `read_nbytes`; the numbers of
        `refused` and `corrupt` chunks; the numbers of `timeouts` and `errors` of the disk.
        """

    @abstractmethod
    def close(self) -> None:
        """End the threads. Queued chunks are given up: their callbacks get False."""
