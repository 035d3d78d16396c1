"""Types that all packages share. Standard library and numpy only."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

KeyArray: TypeAlias = npt.NDArray[np.uint64]
"""Keys of n chunks, shape [n, 2], each row the (high, low) half of a 128-bit key. See `raykv.protocol.chunk_keys`."""

Bits: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[np.int32]
"""Row numbers of the chunk table; -1 where there is none."""

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Anything with the buffer protocol that is C-contiguous."""

Scattered: TypeAlias = Buffer | Sequence[Buffer]
"""One chunk's bytes in memory: one buffer, or several in order (an engine keeps a chunk in many pages)."""

Path: TypeAlias = Literal["shm", "tcp", "memory"]
"""How bytes travel: through shared memory on one host, a TCP socket, or a call within the process."""

NodeId: TypeAlias = str


class Hints(NamedTuple):
    """Expiry and priority that a writer gives its chunks.

    Attributes:
        ttl_s: Seconds from the commit to the expiry. 0: the namespace's config decides.
        priority: -100 to 100. Higher priorities are evicted later. 0: the namespace's config decides.
    """

    ttl_s: float = 0.0
    priority: int = 0


NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of one size that are stored together.

    Attributes:
        keys: Their keys, shape [n, 2].
        nbytes: Size of each chunk.
        parent: Key of the chunk before keys[0], shape [1, 2].
        depth: Place of keys[0] in its chain. Used when the parent is not on the node.
        chained: Whether each key follows the one before it in one chain.
        hints: Expiry and priority.
    """

    keys: KeyArray
    nbytes: int
    parent: KeyArray | None = None
    depth: int = 0
    chained: bool = True
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of one `put`: counts that add up to the chunks given.

    Attributes:
        stored: Written and visible to every reader.
        existed: Already there, so not written again.
        skipped: Not stored, because the arena is full or the node is away. The caller goes on without them.
        reason: Why chunks were skipped; empty when none was.
        posted: Written, and soon visible. `Client.flush` returns their results.
    """

    stored: int
    existed: int
    skipped: int
    reason: str = ""
    posted: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a list of keys.

    Attributes:
        count: Number of leading chunks that some node holds.
        holders: For each of these chunks the node that will be asked for it.
        below_memory: How many of them no node has in memory: they come from a tier below it, and take longer.
        nbytes: Length of each of them, 0 for unknown; empty when no length is known.
    """

    count: int
    holders: tuple[NodeId, ...] = ()
    below_memory: int = 0
    nbytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GetResult:
    """Which chunks of one `get` arrived, and how.

    Attributes:
        hits: One entry per key. True: its buffer holds exactly the bytes that were put. False: the buffer's content is
            undefined.
        nbytes_by_path: Bytes that arrived, by path.
        chunks_by_source: Chunks that arrived, by (holder, path).
    """

    hits: tuple[bool, ...]
    nbytes_by_path: dict[Path, int] = field(default_factory=dict)
    chunks_by_source: dict[tuple[NodeId, Path], int] = field(default_factory=dict)

    @property
    def prefix(self) -> int:
        """Leading chunks that arrived."""
        return self.hits.index(False) if False in self.hits else len(self.hits)


def host_identity() -> str:
    """Name this host so that two processes agree exactly when they can share memory.

    Returns:
        The kernel's boot identity and the identity of the /dev/shm mount: containers that share a kernel but not their
        shared memory are different hosts.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}-{os.stat('/dev/shm').st_dev:x}"
