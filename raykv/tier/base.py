"""The interface of a tier below memory. Chunks go there from the arena, and come back into it.

A tier has a lock and threads of its own. No call waits for a disk: `write` and `read` queue up to a bound, or refuse,
and call back from a thread of the tier. How to add one: docs/tiers.md.
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
        offset, nbytes: Place in the arena. It begins at a page, and its slot goes on to a whole page.
        checksum: xxh3-64 of its bytes.
        group: Number of its quota group on this node.
        depth: Chunks before it in its chain.
        parent: Key of the chunk before it; b"" if there is none.
        reads: How often it was read so far.
        expires_s: When it expires, in seconds since 1970; 0 for never.
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
    """What a tier knows of a chunk; fields as in `Chunk`."""

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
"""Called once for each `write` that took chunks: these chunks, and which of them the tier has now."""
Arrived = Callable[[Sequence[bool]], None]
"""Called once for each accepted `read`: which chunks are in the arena now, every byte as it was stored."""


class GroupNames(Protocol):
    """Names of quota groups in files, which outlive the numbers that a node gives them. Thread-safe."""

    def text(self, group: int) -> bytes: ...

    def number(self, text: bytes) -> int | None:
        """Its number on this node, made if need be; None without room for one more, or if it is not such JSON."""
        ...


class Environment(NamedTuple):
    """What a tier gets from its node.

    Attributes:
        arena: Writable bytes that begin at a page; offsets in chunks count from there.
        node: Name of the node, unique and stable, fit for a file's name.
        groups: Names of quota groups.
    """

    arena: memoryview
    node: str
    groups: GroupNames


class Tier(ABC):
    """Chunks of one node below its memory. Thread-safe.

    Attributes:
        name: By which it is registered, and shown in `stats`.
        place: Where its chunks lie, as `client.why` says it.
        write_nbytes_per_day: Budget of `Admission`; None: no limit.
    """

    name: str
    place: Place = Place.OTHER
    write_nbytes_per_day: int | None = None

    @abstractmethod
    def has(self, keys: KeyArray) -> Bits:
        """Which of the keys are here. No input or output."""

    @abstractmethod
    def find(self, keys: KeyArray) -> list[Found | None]:
        """What is known of each; None if it is not here, or has expired. No input or output."""

    @abstractmethod
    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """Queue chunks to be written. A chunk that is here already is not written again, and is True in `done`.

        Returns how many were taken, from the front; `done` is called for these alone. 0 (then `done` is not called)
        while the queue is full, the tier is off, or no space can be made.
        """

    @abstractmethod
    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """Queue chunks to be read into slots of the arena. The tier may write to these slots until it calls back.

        A chunk that is not here any more, or is not what was stored, is False in `done`. Wrong bytes are dropped.
        `found` is what `find` returned; a chunk of another length or checksum, stored since, counts as not here.
        Returns False (then `done` is not called) while the queue is full or the tier is off.
        """

    @abstractmethod
    def delete(self, keys: KeyArray) -> int:
        """Delete chunks, also across a restart. Returns how many were here."""

    @abstractmethod
    def drop(self, group: int) -> int:
        """Delete all chunks of a quota group, also across a restart. Returns how many there were."""

    def set_quota(self, group: int, nbytes: int | None) -> None:  # noqa: B027 - need not be overridden
        """Bound a quota group's chunks (`ssd_quota_nbytes`); the oldest go beyond it. None: no bound but capacity."""

    @abstractmethod
    def keys(self) -> KeyArray:
        """All chunks here; of a tier that all nodes share, those that this node wrote."""

    @abstractmethod
    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Of `keys`, those added (written, or found at the start) and removed since the last call."""

    @abstractmethod
    def used_nbytes(self, group: int | None = None) -> int:
        """Bytes of the chunks here, of one quota group or of all."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Content and work so far, as plain values.

        state ("starting", "on", "slow", "off"), reason, chunks, used_nbytes, capacity_nbytes, written_nbytes (of chunks
        that callers wrote), disk_nbytes (all that was written), moved_nbytes, read_nbytes, refused, timeouts, errors,
        corrupt.
        """

    @abstractmethod
    def close(self) -> None:
        """End the threads. Queued chunks are called back as not done."""
