"""What every tier below memory offers. Chunks go there from the arena and come back into it; nothing else moves bytes.

A tier has a lock of its own and threads for its input and output. Whoever calls it never waits for a disk: `write` and
`read` queue up to a bound, or refuse, and call back from one of the tier's threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from raykv.types import Bits, KeyArray


class Chunk(NamedTuple):
    """A chunk in the arena, to be written. Its bytes stay as they are until the tier has called back.

    Attributes:
        key: 16 bytes, as `keys.to_bytes` writes them.
        offset, nbytes: Where in the arena it lies; it begins at a page, and the slot behind it goes on to a whole page.
        checksum: xxh3-64 of its bytes.
        quota group: Number of its quota group on this node.
        depth: Its place in its chain.
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
    """A chunk that a tier has: what it takes to make room for it. As in `Chunk`."""

    nbytes: int
    checksum: int
    group: int
    depth: int
    parent: bytes
    reads: int
    expires_s: float


def is_same(found: Found | None, nbytes: int, checksum: int) -> bool:
    """Whether a chunk of this length and checksum is the one that was found."""
    return found is not None and (found.nbytes, found.checksum) == (nbytes, checksum)


Written = Callable[[Sequence[Chunk], Sequence[bool]], None]
"""Called once for each `write` that was taken: its chunks, and which of them the tier has now."""
Arrived = Callable[[Sequence[bool]], None]
"""Called once for each `read` that was taken: which of the chunks are in the arena now, every byte as it was stored."""


class GroupNames(Protocol):
    """How a tier, whose files outlive the node's memory, names quota groups. Thread-safe."""

    def text(self, group: int) -> bytes:
        """The quota group's fields as JSON, at most `NAMESPACE_TEXT_NBYTES` bytes."""
        ...

    def number(self, text: bytes) -> int | None:
        """Its number on this node, made if need be; None when there is no more room for one, or it is not JSON."""
        ...


class Tier(ABC):
    """Chunks of one node below its memory. Thread-safe.

    Attributes:
        name: "ssd" or "file".
    """

    name: str

    @abstractmethod
    def has(self, keys: KeyArray) -> Bits:
        """Which of the keys are here. No input or output."""

    @abstractmethod
    def find(self, keys: KeyArray) -> list[Found | None]:
        """What is known of each; None for what is not here, or has expired. No input or output."""

    @abstractmethod
    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        """Queue chunks to be written. What is here already is skipped, and counts as taken.

        Returns:
            How many were taken, from the front; `done` is called for these and no others. 0 (then `done` is not called)
            while the queue is full, the tier is off, or there is no room that may be made.
        """

    @abstractmethod
    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        """Queue chunks to be read into slots of the arena, which are the tier's to write to until `done`.

        What is not here any more, or is not what was stored, is False in `done`; wrong bytes are dropped from the tier.

        Args:
            found: What `find` said, for which room was made: another chunk of the same key may lie here by now, and
                count as not here.

        Returns:
            False (then `done` is not called) while the queue is full or the tier is off.
        """

    @abstractmethod
    def delete(self, keys: KeyArray) -> int:
        """Forget chunks, also across a restart. Returns how many were here."""

    @abstractmethod
    def drop(self, group: int) -> int:
        """Forget all chunks of an quota group, also across a restart. Returns how many there were."""

    def set_quota(self, group: int, nbytes: int | None) -> None:  # noqa: B027 - need not be overridden
        """Bound what an quota group's chunks may take; the oldest go when it is more. None: no bound but the capacity."""

    @abstractmethod
    def keys(self) -> KeyArray:
        """All that is here; of a tier that all nodes share, what this one wrote."""

    @abstractmethod
    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        """Of `keys`, those that came (written, or found at the start) and that went since the last call."""

    @abstractmethod
    def used_nbytes(self, group: int | None = None) -> int:
        """Bytes of chunks that are here, of one quota group or of all."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """What it holds and what it did, as plain values.

        Returns:
            state ("starting", "on", "slow", "off"), reason, chunks, used_nbytes, capacity_nbytes, written_nbytes (of
            chunks that were handed in), disk_nbytes (all that was written for them), moved_nbytes, read_nbytes,
            refused, timeouts, errors, corrupt.
        """

    @abstractmethod
    def close(self) -> None:
        """End the threads; what is queued is called back as not done."""
