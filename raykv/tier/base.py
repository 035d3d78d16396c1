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
    """A chunk in the arena, to be written. Its bytes do not change until the tier has called back.

    Attributes:
        key: 16 bytes, as `chunk_keys.to_bytes` writes them.
        offset, nbytes: Place in the arena. The chunk begins at a page, and its slot is a whole number of pages.
        checksum: xxh3-64 of the bytes.
        group: Number of the quota group on this node.
        depth: Number of chunks before it in its chain.
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
"""Called once for each `write` that took chunks. Arguments: these chunks; whether the tier now has each of them."""
Arrived = Callable[[Sequence[bool]], None]
"""Called once for each accepted `read`. Argument: whether each chunk is now in the arena, with a right checksum."""


class GroupNames(Protocol):
    """Maps numbers of quota groups to names. Files hold names, because numbers differ after a restart. Thread-safe."""

    def text(self, group: int) -> bytes: ...

    def number(self, text: bytes) -> int | None:
        """Number of the group on this node, assigned if new. None: no number is free, or the text is invalid."""
        ...


class Environment(NamedTuple):
    """What a tier gets from its node.

    Attributes:
        arena: Writable bytes that begin at a page. `Chunk.offset` is relative to its first byte.
        node: Name of the node: unique, stable, valid as a file name.
    """

    arena: memoryview
    node: str
    groups: GroupNames


class Tier(ABC):
    """Chunks of one node below its memory. Thread-safe.

    Attributes:
        name: Name in the registry and in `stats`.
        place: Where its chunks lie, as `client.why` reports it.
        write_nbytes_per_day: Budget of `Admission`; None: no limit.
    """

    name: str
    place: Place = Place.OTHER
    write_nbytes_per_day: int | None = None

    @abstractmethod
    def has(self, keys: KeyArray) -> Bits:
        """Which of the keys the tier has. Does no I/O."""

    @abstractmethod
    def find(self, keys: KeyArray) -> list[Found | None]:
        """Metadata of each chunk; None if the chunk is not in the tier or has expired. Does no I/O."""

    @abstractmethod
    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """Queue chunks to be written. A chunk that the tier already has is not written again; `done` gets True for it.

        Returns how many chunks were taken, from the front; `done` is called for these chunks only. Returns 0, and
        never calls `done`, while the queue is full, the tier is off, or no space can be made.
        """

    @abstractmethod
    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """Queue chunks to be read into slots of the arena. The tier may write to these slots until it calls back.

        `found` is the result of `find`. `done` gets False for a chunk that is missing, has another length or checksum
        than in `found`, or has wrong bytes; a chunk with wrong bytes is dropped from the tier.
        Returns False, and never calls `done`, while the queue is full or the tier is off.
        """

    @abstractmethod
    def delete(self, keys: KeyArray) -> int:
        """Delete chunks; they stay deleted after a restart. Returns how many the tier had."""

    @abstractmethod
    def drop(self, group: int) -> int:
        """Delete all chunks of a quota group; they stay deleted after a restart. Returns how many the tier had."""

    def set_quota(self, group: int, nbytes: int | None) -> None:  # noqa: B027 - need not be overridden
        """Limit a quota group (`ssd_quota_nbytes`). The tier removes its oldest chunks beyond that. None: no limit."""

    @abstractmethod
    def keys(self) -> KeyArray:
        """Keys of all chunks in the tier. If nodes share the tier: keys of chunks that this node wrote."""

    @abstractmethod
    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Keys added (written, or found at the start) and keys removed since the last call. Covers `keys()` only."""

    @abstractmethod
    def used_nbytes(self, group: int | None = None) -> int:
        """Bytes of the chunks of a quota group in the tier. None: of all quota groups."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Content and counters, as plain values.

        state ("starting", "on", "slow", "off"), reason, chunks, used_nbytes, capacity_nbytes, written_nbytes (of chunks
        that callers wrote), disk_nbytes (all writes), moved_nbytes, read_nbytes, refused, timeouts, errors, corrupt.
        """

    @abstractmethod
    def close(self) -> None:
        """End the threads. Callbacks of queued chunks get False."""
