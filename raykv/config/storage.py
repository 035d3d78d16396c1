"""Settings of one node's memory, of the tiers below it, and of a namespace in them."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raykv.config.base import GIB, KIB, MIB, SLOT_ALIGNMENT_NBYTES, HugePages, Model, Name, Nbytes, Seconds

POLICY_NAMES = ("leaf_lru", "lru", "lfu", "fifo", "ttl", "arc", "s3fifo", "density")
HIGHEST_PRIORITY = 100


def parse_policy(name: str) -> str:
    """Check the name of a policy. A user's own is not imported here.

    Raises:
        ValueError: It is neither in POLICY_NAMES nor of the form "module:attribute".
    """
    if name in POLICY_NAMES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        return name
    raise ValueError(f"unknown policy; there are: {', '.join(POLICY_NAMES)}, or 'module:attribute' of your own")


PolicyName = Annotated[str, AfterValidator(parse_policy)]
"""One of POLICY_NAMES, or "module:attribute" of a user's own policy."""


def _check_units(capacity_nbytes: int, field: str, nbytes: int) -> None:
    if nbytes % SLOT_ALIGNMENT_NBYTES or nbytes < 16 * SLOT_ALIGNMENT_NBYTES:
        raise ValueError(f"{field} must be a multiple of {SLOT_ALIGNMENT_NBYTES}, and at least 64 KiB")
    if capacity_nbytes < 4 * nbytes:
        raise ValueError(
            f"capacity_nbytes ({capacity_nbytes}) must be at least 4 x {field} ({nbytes}): raise or lower it"
        )


class SsdConfig(Model):
    """One node's SSDs.

    Attributes:
        paths: A directory on each drive; made if it does not exist.
        capacity_nbytes: Of each of them.
        segment_nbytes: Space is taken and reclaimed in segments of this size.
        depth: Operations in flight on each path.
        write_nbytes_per_day: The most that is written in a day, to all paths together. None: no limit.
        io_timeout_s: A drive that needs longer for one operation gets no others until it is done.
        direct: Whether reads and writes bypass the page cache: if the file system supports it ("try"), or not
            ("never"). With "require", a node does not start without.
        max_chunks: Rows of the index, for all paths together. None: one per 64 KiB. A row takes about 100 bytes.
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
    """A directory on a file system that nodes share, also nodes of other clusters.

    Attributes:
        path: Made if it does not exist.
        capacity_nbytes: The most that all nodes together keep there; the same for all of them. Each node fills one pack
            at a time, so it should be several times `pack_nbytes` for each node.
        pack_nbytes: Chunks are gathered into files of this size.
        seal_s: A pack that is not full by then is published as it is. Only then do others see its chunks.
        scan_s: Time between looks for packs of other nodes.
        depth: Reads in flight.
        io_timeout_s: While an operation needs longer, the file system gets no others.
        write_nbytes_per_day: The most that this node writes there in a day. None: no limit.
        max_chunks: Rows of the index. None: one per 64 KiB, at most 8 Mi. A row takes about 100 bytes.
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
    """One node's memory.

    Attributes:
        arena_nbytes: Shared memory for chunks, in shm_dir. It gets real memory extent by extent: ahead of writes, and
            completely while nobody writes, but an eighth of the host's (and container's) memory and of shm_dir stays
            free.
        extent_nbytes: The arena is cut into extents; one extent serves one slot size. The largest chunk is one extent.
        max_chunks: Rows of the chunk table. None: one per 64 KiB of the arena. A row takes 89 bytes.
        policy: Decides which chunks are evicted first, for namespaces without a policy of their own.
        low_water: Eviction starts when less than this share of the arena is free.
        high_water: Eviction stops when this share is free.
        shm_dir: Directory for arena, table and socket: a tmpfs, or hugetlbfs. None: anonymous memory, which ends with
            the process.
        huge_pages: Whether memory comes in pages of 2 MiB: if the host has any ("try"), or not ("never"). With
            "require", a node does not start without, and an extent without huge pages is not used.
        numa: On hosts with several memory nodes, "auto" gives each an equal part of the arena.
        ssd: The tier below memory. None: there is none.
        file: The tier below that, shared with other nodes. None: there is none.
        tiers: Options of tiers that were registered from outside the package, by name.
    """

    arena_nbytes: Nbytes = 1 * GIB
    extent_nbytes: Nbytes = 32 * MIB
    max_chunks: Annotated[int, Field(ge=16, le=1 << 30)] | None = None
    policy: PolicyName = "leaf_lru"
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
    """What a node does with the chunks of one namespace, with all its salts and adapters.

    Attributes:
        policy: Decides which of its chunks are evicted first. None: the node's policy.
        ttl_s: Chunks expire this long after they were stored. None: never.
        tiers: Where its chunks may lie. "ssd": memory only serves to write and read them.
        dram_quota_nbytes: The most that its slots may take in one node's memory. None: no limit but the arena.
        ssd_quota_nbytes: The same on one node's SSDs.
        chunk_tokens: Tokens in a chunk, for information; must be the namespace's.
        priority: Of chunks that are stored without one: -100 to 100. Higher ones are evicted later.
    """

    policy: PolicyName | None = None
    ttl_s: Annotated[float, Field(gt=0, le=365 * 86_400)] | None = None
    tiers: Literal["dram", "ssd", "both"] = "both"
    dram_quota_nbytes: Annotated[Nbytes, Field(gt=0, lt=1 << 63)] | None = None
    ssd_quota_nbytes: Annotated[Nbytes, Field(gt=0, lt=1 << 63)] | None = None
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
