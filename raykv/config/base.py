"""Every setting of raykv, typed, and the only place that reads the environment.

Models are frozen and refuse unknown fields. Sizes end in `_nbytes` and also take text such as "4 GiB"; times end in
`_s`. A part that is absent is `None`. Whoever starts a part logs its whole effective config once.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from raykv.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SLOT_ALIGNMENT_NBYTES = 4096
"""Slots start at multiples of a page, so that direct I/O and memory registration need no copy."""

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}


def parse_nbytes(value: object) -> object:
    """Turn text such as "512 MiB" into bytes; leave everything else as it is.

    Raises:
        ValueError: Text that is no size. Decimal units (GB) are refused rather than guessed at.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes as a number, or text such as '512 MiB' or '4 GiB'")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def parse_policy(name: str) -> str:
    """Refuse what is neither the name of a policy nor of something that could be one; it is not imported here.

    Raises:
        ValueError: Lists the names there are.
    """
    if name in POLICY_NAMES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
        return name
    raise ValueError(f"unknown policy; there are: {', '.join(POLICY_NAMES)}, or 'module:attribute' of your own")


Nbytes = Annotated[int, BeforeValidator(parse_nbytes), Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
POLICY_NAMES = ("leaf_lru", "lru", "lfu", "fifo", "ttl", "arc", "s3fifo", "density")
PolicyName = Annotated[str, AfterValidator(parse_policy)]
"""One of POLICY_NAMES, or "module:attribute" of a user's own."""
HIGHEST_PRIORITY = 100
HugePages = Literal["try", "require", "never"]

ModelT = TypeVar("ModelT", bound="Model")


class Model(BaseModel):
    """What all configs share: frozen, strict about names, and errors that a person can act on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Self:
        """Check `fields` and build the config.

        Raises:
            ConfigError: Names every field that is wrong or unknown, and for an unknown one the fields there are.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or model.__name__
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown field '{where}'; {model.__name__} has: {', '.join(sorted(model.model_fields))}")
        else:
            lines.append(f"field '{where}': {problem['msg']} (got {problem['input']!r})")
    return f"{model.__name__}: " + "; ".join(lines)


class SsdConfig(Model):
    """One node's SSDs.

    Attributes:
        paths: A directory on each drive; made if it is not there.
        capacity_nbytes: Of each of them.
        segment_nbytes: Space is taken and given back in segments of this size.
        depth: Operations under way on each path.
        write_nbytes_per_day: All that may be written in a day, to all paths together. None: no limit.
        io_timeout_s: A drive that takes longer for one operation is given nothing more until it is done.
        direct: Whether reads and writes go past the page cache: where the file system lets them ("try"), or nowhere
            ("never"). With "require", a node does not start without.
        max_chunks: Rows of the index, for all paths together. None: one for every 64 KiB. A row costs about 100 bytes.
    """

    paths: Annotated[tuple[Path, ...], Field(min_length=1, max_length=64)]
    capacity_nbytes: Nbytes
    segment_nbytes: Nbytes = 64 * MIB
    depth: Annotated[int, Field(ge=1, le=256)] = 4
    write_nbytes_per_day: Nbytes | None = None
    io_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    direct: Literal["try", "require", "never"] = "try"
    max_chunks: Annotated[int, Field(ge=16, le=1 << 30)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.segment_nbytes % SLOT_ALIGNMENT_NBYTES or self.segment_nbytes < 16 * SLOT_ALIGNMENT_NBYTES:
            raise ValueError(f"segment_nbytes must be a multiple of {SLOT_ALIGNMENT_NBYTES}, and at least 64 KiB")
        if self.capacity_nbytes < 4 * self.segment_nbytes:
            raise ValueError(
                f"capacity_nbytes ({self.capacity_nbytes}) must hold at least four segments; "
                f"raise it or lower segment_nbytes ({self.segment_nbytes})"
            )
        return self


class FileTierConfig(Model):
    """A directory on a file system that all nodes share, also those of other clusters.

    Attributes:
        path: Made if it is not there.
        capacity_nbytes: What all nodes together keep there; must be the same for all of them. Each fills one pack at a
            time, so it should be a multiple of `pack_nbytes` for each node.
        pack_nbytes: Chunks are gathered into files of this size.
        seal_s: A pack that was not filled by then is published all the same: others see its chunks from then on.
        scan_s: How often it is looked for what others wrote.
        depth: Reads under way at once.
        io_timeout_s: While an operation takes longer, nothing more is given to the file system.
        write_nbytes_per_day: All that this node may write there in a day. None: no limit.
        max_chunks: Rows of the index. None: one for every 64 KiB, at most 8 Mi. A row costs about 100 bytes.
    """

    path: Path
    capacity_nbytes: Nbytes
    pack_nbytes: Nbytes = 256 * MIB
    seal_s: Annotated[float, Field(gt=0)] = 30.0
    scan_s: Annotated[float, Field(gt=0)] = 5.0
    depth: Annotated[int, Field(ge=1, le=256)] = 4
    io_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    write_nbytes_per_day: Nbytes | None = None
    max_chunks: Annotated[int, Field(ge=16, le=1 << 30)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.pack_nbytes % SLOT_ALIGNMENT_NBYTES or self.pack_nbytes < 16 * SLOT_ALIGNMENT_NBYTES:
            raise ValueError(f"pack_nbytes must be a multiple of {SLOT_ALIGNMENT_NBYTES}, and at least 64 KiB")
        if self.capacity_nbytes < 4 * self.pack_nbytes:
            raise ValueError(
                f"capacity_nbytes ({self.capacity_nbytes}) must hold at least four packs; "
                f"raise it or lower pack_nbytes ({self.pack_nbytes})"
            )
        return self

    @property
    def rows(self) -> int:
        return self.max_chunks or min(8 << 20, max(1024, self.capacity_nbytes // (64 * KIB)))


class StorageConfig(Model):
    """One node's memory.

    Attributes:
        arena_nbytes: Shared memory for chunks, in shm_dir. Taken extent by extent: ahead of what is written, and all of
            it while nothing is, as long as an eighth of the host's (and container's) memory and of shm_dir stays free.
        extent_nbytes: The arena is cut into extents; one extent serves one slot size. The largest chunk is one extent.
        max_chunks: Rows of the chunk table. None: one for every 64 KiB of arena. A row costs 89 bytes.
        policy: Which chunks go first when room is needed, for namespaces that do not say.
        low_water: Eviction starts when less than this share of the arena is free.
        high_water: Eviction stops when this share is free.
        shm_dir: Where arena, table and socket lie: a tmpfs, or hugetlbfs. None: anonymous memory, which ends with the
            process.
        huge_pages: Whether memory is taken in pages of 2 MiB: where they are to be had ("try"), or nowhere ("never").
            With "require", a node does not start without, and an extent that finds none is out of use.
        numa: On hosts with several memory nodes, "auto" gives each an equal part of the arena.
        ssd: The tier below memory. None: there is none.
        file: The tier below that, shared with other nodes. None: there is none.
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
    """What a node does with the chunks of one namespace, all its salts and adapters together.

    Attributes:
        policy: Which chunks go first when room is needed. None: by the node's own.
        ttl_s: Chunks expire so long after they were stored. None: never.
        tiers: Where they may lie. "ssd": memory only serves to write and read them.
        dram_quota_nbytes: The most that its slots may take in one node's memory. None: no bound but the arena.
        ssd_quota_nbytes: The same on one node's SSDs.
        chunk_tokens: Tokens in a chunk, for whoever reads this; must be what the namespace says.
        priority: Of chunks that are stored without one: -100 to 100; the higher go last.
    """

    policy: PolicyName | None = None
    ttl_s: Annotated[float, Field(gt=0, le=365 * 86_400)] | None = None
    tiers: Literal["dram", "ssd", "both"] = "both"
    dram_quota_nbytes: Annotated[Nbytes, Field(gt=0, lt=1 << 63)] | None = None
    ssd_quota_nbytes: Annotated[Nbytes, Field(gt=0, lt=1 << 63)] | None = None
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0


class NodeConfig(Model):
    """One storage node.

    Attributes:
        cluster: Name of the cluster; part of every file and actor name.
        node_id: This node's name, unique and stable in its cluster: a restarted node finds its memory by it.
        bind: Address to listen on for peers, as they reach it. Port 0 takes a free one.
        host: Identity of the host; nodes and clients with equal hosts read each other's shared memory. None: found out.
        weight: Share of the ring relative to others. None: the arena's GiB.
        heartbeat_s: How often the node tells the directory that it lives.
        announce_s: How long a commit may wait to be announced to the key's owner.
        io_timeout_s: A peer that stalls this long in the middle of a message is cut off.
        max_connections: Connections served at once; one more is refused.
        max_locations: Keys whose locations this node keeps as an owner; the oldest are forgotten beyond it.
    """

    cluster: Name = "default"
    node_id: Name
    bind: Annotated[str, Field(pattern=r"^[^:\s]+:\d{1,5}$")] = "127.0.0.1:0"
    host: str | None = None
    weight: Annotated[float, Field(gt=0)] | None = None
    storage: StorageConfig = StorageConfig()
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    announce_s: Annotated[float, Field(gt=0)] = 0.01
    io_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    max_connections: Annotated[int, Field(ge=4, le=65536)] = 1024
    max_locations: Annotated[int, Field(ge=1024)] = 1 << 22

    @property
    def file_prefix(self) -> Path | None:
        """All files of this node in shared memory begin with this path; None for anonymous memory."""
        if self.storage.shm_dir is None:
            return None
        return self.storage.shm_dir / f"raykv-{self.cluster}-{self.node_id}"

    @property
    def local_address(self) -> str:
        """Where processes of this host reach the node. Without files, the name lives in the kernel alone."""
        if self.file_prefix is None:
            return f"unix:@raykv-{self.cluster}-{self.node_id}-{os.getpid()}"
        return f"unix:{self.file_prefix}.sock"


class ClientConfig(Model):
    """One client.

    Attributes:
        address: Any node: "unix:/path" for the one on this host, "host:port" for one elsewhere.
        secret: The cluster's secret, as hexadecimal text; needed only for "host:port".
        timeout_s: A `get` or `match` that takes longer gives the rest up as a miss.
        breaker_s: A peer that failed is left alone this long.
        connections_per_peer: Idle connections kept to one peer.
        streams_per_peer: Connections that a large read from one peer is shared among. None: by the number of cores.
        copy_threads: Threads that copy a large batch from or into this host's memory. None: half the cores, at most 4.
        verify: Check checksums of bytes that crossed a network ("remote"), of all bytes ("always"), or of none.
    """

    address: str | None = None
    secret: SecretStr | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    breaker_s: Annotated[float, Field(ge=0)] = 2.0
    connections_per_peer: Annotated[int, Field(ge=1, le=64)] = 4
    streams_per_peer: Annotated[int, Field(ge=1, le=16)] | None = None
    copy_threads: Annotated[int, Field(ge=1, le=64)] | None = None
    verify: Literal["remote", "always", "never"] = "remote"

    @classmethod
    def from_environment(cls, **explicit: Any) -> Self:
        """Build the config from RAYKV_ADDRESS and RAYKV_SECRET where the call leaves a field open."""
        fields = {key: value for key, value in explicit.items() if value is not None}
        for field, variable in (("address", "RAYKV_ADDRESS"), ("secret", "RAYKV_SECRET")):
            if field not in fields and os.environ.get(variable):
                fields[field] = os.environ[variable]
        return cls.load(fields)


def environment_of_child() -> dict[str, str]:
    """For a child of this process that is to fork, and to find the same modules.

    Numpy's algebra, which nobody uses, must start no threads there.
    """
    found = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": found, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def native_wanted() -> bool:
    """Whether compiled loops may be used: yes, unless RAYKV_NATIVE is 0."""
    return os.environ.get("RAYKV_NATIVE", "1") != "0"


class ClusterConfig(Model):
    """A whole cluster, as `raykv.cluster.start` and `raykv up` take it.

    Attributes:
        name: Name of the cluster.
        storage: Memory of each node.
        arena_share: In place of storage.arena_nbytes: the arena of each node is this share of the size of its shm_dir,
            so that large hosts give more than small ones.
        member_timeout_s: A node that was silent this long leaves the view.
        separate_hosts: Treat every Ray node as a host of its own, even if several run on one machine: no shared memory
            between them. For tests and demonstrations of what crosses a network.
    """

    name: Name = "default"
    storage: StorageConfig = StorageConfig()
    arena_share: Annotated[float, Field(gt=0.0, le=0.95)] | None = None
    member_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    separate_hosts: bool = False
