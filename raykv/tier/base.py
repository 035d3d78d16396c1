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
    """A chunk in the arena that a tier shall write. Its bytes stay unchanged until the tier has called back.

    Attributes:
        key: 16 bytes, as `chunk_keys.to_bytes` writes them.
        offset: Position of the first byte in the arena: a multiple of the page size.
        nbytes: Length of the chunk. Its slot in the arena may be longer, because a slot ends at a page boundary.
        checksum: xxh3-64 of the bytes.
        group: Number of the quota group on this node.
        depth: Number of preceding chunks in the chain. A chain is the consecutive chunks of a prompt.
        parent: Key of the preceding chunk in the chain; b"" if there is none.
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
    """Metadata of a chunk that a tier has. The fields are those of `Chunk`."""

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
"""The callback of `Tier.write`. It gets the chunks that the tier took, and whether the tier now has each chunk."""
Arrived = Callable[[Sequence[bool]], None]
"""The callback of `Tier.read`. It gets one bool per chunk: whether the arena now has the chunk, undamaged."""


class GroupNames(Protocol):
    """Maps numbers of quota groups to names, and names to numbers. Thread-safe.

    Files hold the names, because a restart may change the numbers.
    """

    def text(self, group: int) -> bytes: ...

    def number(self, text: bytes) -> int | None:
        """Return the number of the group named `text`. A new group gets a number.

        Returns None if no number is free or the name is invalid.
        """
        ...


class Environment(NamedTuple):
    """What a tier gets from its node.

    Attributes:
        arena: The node's arena, writable. It begins at a page boundary. `Chunk.offset` is relative to its first byte.
        node: Name of the node: unique, the same after a restart, valid as a file name.
        groups: The names and numbers of the node's quota groups.
    """

    arena: memoryview
    node: str
    groups: GroupNames


class Tier(ABC):
    """Stores chunks of one node, below the node's memory. Thread-safe.

    Attributes:
        name: Name in the registry and in `stats`.
        place: Kind of storage, as `client.why` reports it.
        write_nbytes_per_day: Budget for demotion to this tier, in bytes per day (see `Admission`). None: no limit.
        shared: Whether other nodes read this node's chunks from the same storage, even after this node has left.
    """

    name: str
    place: Place = Place.OTHER
    shared: bool = False
    write_nbytes_per_day: int | None = None

    @abstractmethod
    def has(self, keys: KeyArray) -> Bits:
        """Return for each key whether the tier has its chunk. Does no I/O."""

    @abstractmethod
    def find(self, keys: KeyArray) -> list[Found | None]:
        """Return the metadata of each chunk; None if the chunk is not in the tier or has expired. Does no I/O."""

    @abstractmethod
    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """Queue chunks to be written. The tier takes the first ones, up to the limit of its queue.

        `done` is called once, for the chunks taken. A chunk that the tier already has is not written again; `done` gets
        True for it.

        Returns:
            Number of chunks taken: 0 if the queue is full, the tier is off, or no space can be made. If it is 0,
            `done` is never called.
        """

    @abstractmethod
    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """Queue chunks to be read into slots of the arena. The tier may write to these slots until it calls back.

        `done` is called once. It gets False for a chunk that the tier no longer has, or has only with another length or
        checksum than in `found`. It also gets False for a chunk with wrong bytes, which the tier drops.

        Args:
            found: What `find` returned for `keys`.
            offsets: Position in the arena of the slot for each chunk.

        Returns:
            Whether the tier accepted the call: False if the queue is full or the tier is off. If False, `done` is
            never called.
        """

    @abstractmethod
    def delete(self, keys: KeyArray) -> int:
        """Delete chunks. They stay deleted after a restart. Returns how many of them the tier had."""

    @abstractmethod
    def drop(self, group: int) -> int:
        """Delete all chunks of a quota group. They stay deleted after a restart. Returns how many the tier had."""

    def set_quota(self, group: int, nbytes: int | None) -> None:  # noqa: B027 - need not be overridden
        """Limit the bytes of a quota group (`ssd_quota_nbytes`). None: no limit.

        The tier removes the oldest chunks of a group that is above its limit.
        """

    def spare_chunks(self, group: int, nbytes: int) -> int:
        """Return how many chunks of `nbytes` bytes the tier can take now without removing others.

        A tier that returns 0, as by default, gets no chunks of other nodes: see `raykv.tier.transit`.
        """
        return 0

    @abstractmethod
    def keys(self) -> KeyArray:
        """Return the keys of all chunks in the tier. A tier that nodes share omits chunks that other nodes wrote."""

    @abstractmethod
    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Return the keys added and the keys removed since the last call. Chunks found at the start count as added.

        A tier that nodes share omits chunks that other nodes wrote.
        """

    @abstractmethod
    def used_nbytes(self, group: int | None = None) -> int:
        """Return the bytes of a quota group's chunks in the tier; with None, of all chunks."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return state and counters, as plain values.

        * `state`: "starting", "on", "slow" or "off"; `reason`: why it is not "on".
        * `chunks`, `used_nbytes`, `capacity_nbytes`: what the tier holds, and how much it can hold.
        * `written_nbytes`, `read_nbytes`: bytes of the chunks written and read for callers since the start.
        * `moved_nbytes`: bytes of chunks that the tier moved to another of its segments.
        * `disk_nbytes`: all bytes written to the disk.
        * `spare_nbytes` (if `spare_chunks` is ever above 0): about how many bytes fit without removing others.
        * `refused`, `corrupt`: numbers of chunks. `timeouts`, `errors`: numbers of operations on the disk.
        """

    @abstractmethod
    def close(self) -> None:
        """End the threads. Callbacks get False for chunks that are still queued."""
