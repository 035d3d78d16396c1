"""Settings of a node's memory, of the tiers below it, and of a namespace."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raykv.config.base import GIB, KIB, MIB, SLOT_ALIGNMENT_NBYTES, HugePages, Model, Name, Nbytes, Seconds

POLICY_NAMES = ("leaf_lru", "lru", "lfu", "fifo", "ttl", "arc", "s3fifo", "density")
HIGHEST_PRIORITY = 100


def parse_policy(name: str) -> str:
    """Check the name of a policy. This does not import a user's own policy.

    Raises:
        ValueError: `name` is neither in POLICY_NAMES nor of the form "module:attribute".
    """
    if name in POLICY_NAMES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        return name
    raise ValueError(f"unknown policy; there are: {', '.join(POLICY_NAMES)}, or 'module:attribute' of your own")


PolicyName = Annotated[str, Field(max_length=256), AfterValidator(parse_policy)]
"""One of POLICY_NAMES, or "module:attribute" of a user's own policy."""


def _check_units(capacity_nbytes: int, field: str, nbytes: int) -> None:
    if nbytes % SLOT_ALIGNMENT_NBYTES or nbytes < 16 * SLOT_ALIGNMENT_NBYTES:
        raise ValueError(f"{field} must be a multiple of {SLOT_ALIGNMENT_NBYTES}, and at least 64 KiB")
    if capacity_nbytes < 4 * nbytes:
        raise ValueError(
            f"capacity_nbytes ({capacity_nbytes}) must be at least 4 x {field} ({nbytes}): raise or lower it"
        )


class SsdConfig(Model):
    """Settings of one node's SSD tier.

    Attributes:
        paths: A directory on each drive. The node creates missing directories.
        capacity_nbytes: Space to use on each path.
        segment_nbytes: Space is allocated and reclaimed in segments of this size.
        depth: At most this many operations run at once on each path.
        write_nbytes_per_day: Daily budget for writes to all paths together. While the budget is used up, the node
            copies no chunk to the SSDs. None means no limit.
        io_timeout_s: If an operation takes longer, its drive gets no other operations until the slow one ends.
        direct: Whether to use direct I/O, which bypasses the page cache. "try": if the file system supports it.
            "never": no. "require": yes, and the node does not start if the file system does not support it.
        max_chunks: Largest number of chunks in the index of all paths. Each chunk takes about 100 bytes of memory. None
            means one chunk per 64 KiB of capacity.
    """

    paths: Annotated[tuple[Path, ...], Field(min_length=1, max_length=64)]
    capacity_nbytes: Nbytes
    segment_nbytes: Nbytes = 64 * MIB
    depth: Annotated[int, Field(ge=1, le=256)] = 4
    write_nbytes_per_day: Nbytes | None = None
    io_timeout_s: Seconds = 5.0
    direct: Literal["try", "require", "never"] = "try"
    max_chunks: Annotated[int, Field(ge=16, le=1 << 30)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_units(self.capacity_nbytes, "segment_nbytes", self.segment_nbytes)
        return self


class FileTierConfig(Model):
    """Settings of the file tier: a directory that several nodes share, even nodes of different clusters.

    Chunks are stored in packs. A pack is a file of many chunks.

    Attributes:
        path: The directory. The node creates a missing directory.
        capacity_nbytes: Limit for the files of all nodes together. All nodes must have the same value. Each node fills
            one pack at a time, so allow several times `pack_nbytes` for each node.
        pack_nbytes: Size of a pack.
        seal_s: A pack is published after this time, even if it is not full. Other nodes see only published packs.
        scan_s: Time between scans for packs of other nodes.
        depth: At most this many reads run at once.
        io_timeout_s: If an operation takes longer, the file system gets no other operations until the slow one ends.
        write_nbytes_per_day: Daily budget for writes of this node. While the budget is used up, the node copies no
            chunk to this tier. None means no limit.
        max_chunks: Largest number of chunks in the index. Each chunk takes about 100 bytes of memory. None means one
            chunk per 64 KiB of capacity, at most 8 Mi chunks.
    """

    path: Path
    capacity_nbytes: Nbytes
    pack_nbytes: Nbytes = 256 * MIB
    seal_s: Seconds = 30.0
    scan_s: Seconds = 5.0
    depth: Annotated[int, Field(ge=1, le=256)] = 4
    io_timeout_s: Seconds = 10.0
    write_nbytes_per_day: Nbytes | None = None
    max_chunks: Annotated[int, Field(ge=16, le=1 << 30)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_units(self.capacity_nbytes, "pack_nbytes", self.pack_nbytes)
        return self

    @property
    def rows(self) -> int:
        return self.max_chunks or min(8 << 20, max(1024, self.capacity_nbytes // (64 * KIB)))


class StorageConfig(Model):
    """Settings of one node's memory and tiers.

    Attributes:
        arena_nbytes: Size of the arena: the shared memory for chunks, in shm_dir. The node allocates the arena's pages
            extent by extent, before writes need them. While nobody writes, it also allocates the remaining extents, as
            long as an eighth of the host's memory stays free.
        extent_nbytes: The arena is divided into extents of this size. As in a slab of memcached, all slots of an extent
            have the same size. A chunk must fit into one extent.
        max_chunks: Number of rows of the chunk table. A chunk takes one row, which has 89 bytes. None means one row per
            64 KiB of the arena.
        policy: The eviction policy for namespaces without their own policy.
        policies: Own policies, as "module:attribute", that the config of a namespace may name. Every client can change
            such a config, and the node imports the module. So all other modules are refused.
        low_water: Eviction in the background starts when less than this share of the arena is free.
        high_water: Eviction in the background stops when this share of the arena is free.
        shm_dir: Directory for arena, table and socket, on tmpfs or hugetlbfs. None means anonymous memory, which is
            freed when the process ends.
        huge_pages: Whether to use pages of 2 MiB. "try": if the host has any. "never": no. "require": yes, and the node
            does not start on a host without huge pages, and does not use an extent without them. "require" needs
            Linux 6.1 or a hugetlbfs.
        numa: "auto" divides the arena equally among the host's NUMA nodes. "off" leaves the choice to the kernel.
        ssd: The SSD tier below memory. None means that there is none.
        file: The file tier below the SSD tier, shared with other nodes. None means that there is none.
        tiers: Tiers that other packages have registered. Maps the name of each tier to its options.
    """

    arena_nbytes: Nbytes = 1 * GIB
    extent_nbytes: Nbytes = 32 * MIB
    max_chunks: Annotated[int, Field(ge=16, le=1 << 30)] | None = None
    policy: PolicyName = "leaf_lru"
    policies: tuple[PolicyName, ...] = ()
    low_water: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.02
    high_water: Annotated[float, Field(gt=0.0, lt=0.9)] = 0.05
    shm_dir: Path | None = Path("/dev/shm")
    huge_pages: HugePages = "try"
    numa: Literal["auto", "off"] = "auto"
    ssd: SsdConfig | None = None
    file: FileTierConfig | None = None
    tiers: dict[Name, dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.extent_nbytes < SLOT_ALIGNMENT_NBYTES or self.extent_nbytes % SLOT_ALIGNMENT_NBYTES:
            raise ValueError(f"extent_nbytes must be a multiple of {SLOT_ALIGNMENT_NBYTES}")
        if self.arena_nbytes < self.extent_nbytes:
            raise ValueError(
                f"arena_nbytes ({self.arena_nbytes}) must hold at least one extent; "
                f"raise it or lower extent_nbytes ({self.extent_nbytes})"
            )
        if self.low_water >= self.high_water:
            raise ValueError("low_water must be below high_water")
        return self

    @property
    def extents(self) -> int:
        return self.arena_nbytes // self.extent_nbytes

    @property
    def rows(self) -> int:
        return self.max_chunks or max(1024, self.arena_nbytes // (64 * KIB))


class NamespaceConfig(Model):
    """Settings of one namespace. One config applies to all salts and adapters of the namespace together.

    Attributes:
        policy: The eviction policy for the namespace's chunks. None means the node's policy.
        ttl_s: Chunks expire this long after they were stored. None means never.
        tiers: Where chunks are stored. "dram": only in memory. "ssd": in tiers below memory; memory is only a buffer
            for writes and reads. "both": in memory and in tiers below memory.
        dram_quota_nbytes: Limit for the bytes of the chunks' slots in one node's memory. At the limit, a new chunk
            replaces chunks of the same namespace. None means no limit.
        ssd_quota_nbytes: Limit for the bytes of the chunks on one node's SSDs. None means no limit.
        priority: Default priority of chunks, from -100 to 100. Chunks with a higher priority are evicted later.
        placement: Which node's memory gets the chunks of a put. "local": the node on the writer's host. "spread": the
            owner of the put's first key. As the owners of keys change, the chunks move to the new owners.
    """

    policy: PolicyName | None = None
    ttl_s: Annotated[float, Field(gt=0, le=365 * 86_400)] | None = None
    tiers: Literal["dram", "ssd", "both"] = "both"
    dram_quota_nbytes: Annotated[Nbytes, Field(gt=0, lt=1 << 63)] | None = None
    ssd_quota_nbytes: Annotated[Nbytes, Field(gt=0, lt=1 << 63)] | None = None
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    placement: Literal["local", "spread"] = "local"
