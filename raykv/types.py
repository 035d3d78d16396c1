"""Types that all packages share. Standard library and numpy only."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

KeyArray: TypeAlias = npt.NDArray[np.uint64]
"""Keys of n chunks, shape [n, 2]: the high and the low half of each 128-bit key (`raykv.protocol.chunk_keys`)."""

Bits: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[np.int32]
"""Row numbers of the chunk table. -1: no row."""

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
"""A C-contiguous object with the buffer protocol."""

Scattered: TypeAlias = Buffer | Sequence[Buffer]
"""One chunk's bytes: one buffer, or several buffers in order. An engine may store one chunk in many pages."""

Path: TypeAlias = Literal["shm", "nixl", "rdma", "tcp"]
"""How bytes travel: through shared memory of one host, or through a TCP socket."""

NodeId: TypeAlias = str


class Hints(NamedTuple):
    """Expiry and priority of chunks, set by the writer.

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
        keys: Keys of the chunks, shape [n, 2].
        nbytes: Size of each chunk.
        parent: Key of the chunk before keys[0] in its chain, shape [1, 2]. None: there is no such chunk.
        depth: Number of chunks before keys[0] in its chain. The node uses this number if it does not have the parent.
        chained: Whether the chunks are consecutive in one chain. False: they are independent objects.
        hints: Expiry and priority.
    """

    keys: KeyArray
    nbytes: int
    parent: KeyArray | None = None
    depth: int = 0
    chained: bool = True
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class DirectValues:
    """The values of a put that are written straight into the arena, for example by a GPU.

    Attributes:
        count: Number of chunks.
        nbytes: Size of each chunk.
        write: Called with the positions of some chunks, and for each of them a view to fill. Returns the xxh3-64
            checksums of these chunks. It must take less than a second, and nothing may write to the views afterwards.
            It is not called for chunks that are stored already or get no slot.
    """

    count: int
    nbytes: int
    write: Callable[[Sequence[int], Sequence[memoryview]], npt.NDArray[np.uint64]]

    def part(self, first: int, count: int) -> "DirectValues":
        """Return the values of `count` chunks, from index `first` on."""

        def write(positions: Sequence[int], views: Sequence[memoryview]) -> npt.NDArray[np.uint64]:
            return self.write([first + position for position in positions], views)

        return DirectValues(min(count, self.count - first), self.nbytes, write)


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of one `put`. The counts add up to the number of chunks given.

    Attributes:
        stored: Chunks written and visible to all readers on the node's host.
        existed: Chunks that were stored already, and were not written again.
        skipped: Chunks that were not stored, for example because the arena is full or the node is down.
        reason: Why chunks were skipped, or are still `posted` after a call that waited. Empty if there are none.
        posted: Chunks whose commit was sent but not yet answered. `Client.flush` returns their results.
    """

    stored: int = 0
    existed: int = 0
    skipped: int = 0
    reason: str = ""
    posted: int = 0

    def __add__(self, other: "PutResult") -> "PutResult":
        """Add the counts. The sum has the first reason that is not empty."""
        return PutResult(
            self.stored + other.stored,
            self.existed + other.existed,
            self.skipped + other.skipped,
            self.reason or other.reason,
            self.posted + other.posted,
        )


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a list of keys.

    Attributes:
        count: Number of chunks in the stored prefix.
        holders: For each chunk of the prefix, the node from which to read it.
        below_memory: Number of chunks of the prefix that are only on SSD or file. Reading these takes longer.
        nbytes: Length of each chunk of the prefix, 0 if unknown. Empty if no length is known.
        low: Indices of the chunks that are only on SSD or file.
    """

    count: int
    holders: tuple[NodeId, ...] = ()
    below_memory: int = 0
    nbytes: tuple[int, ...] = ()
    low: tuple[int, ...] = ()


class Holder(NamedTuple):
    """A node that holds a chunk.

    Attributes:
        node_id: The node from which to read the chunk.
        below_memory: Whether every holder of the chunk has it only on SSD or file.
    """

    node_id: NodeId
    below_memory: bool = False


@dataclass(frozen=True, slots=True)
class GetResult:
    """Which chunks of one `get` arrived, from which node and by which path.

    Attributes:
        hits: One entry per key. True: the chunk is in the buffer. False: the buffer's content is undefined.
        nbytes_by_path: Number of bytes that arrived by each path.
        chunks_by_source: Number of chunks that arrived from each (holder, path).
    """

    hits: tuple[bool, ...]
    nbytes_by_path: dict[Path, int] = field(default_factory=dict)
    chunks_by_source: dict[tuple[NodeId, Path], int] = field(default_factory=dict)

    def __add__(self, other: "GetResult") -> "GetResult":
        """Return the result of one `get` for the keys of this one, followed by those of the other one."""
        paths = Counter(self.nbytes_by_path)
        paths.update(other.nbytes_by_path)
        sources = Counter(self.chunks_by_source)
        sources.update(other.chunks_by_source)
        return GetResult(self.hits + other.hits, dict(paths), dict(sources))

    @property
    def prefix(self) -> int:
        """Number of chunks before the first miss."""
        return self.hits.index(False) if False in self.hits else len(self.hits)


def host_identity() -> str:
    """Return a name for this host. Two processes get the same name if and only if they can share memory.

    The name contains the kernel's boot id and the device of the /dev/shm mount. So two containers on one machine with
    separate /dev/shm mounts are different hosts.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}-{os.stat('/dev/shm').st_dev:x}"
