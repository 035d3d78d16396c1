"""Which stores are measured: the worker processes to start, and the table lines that they fill."""

from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.processes import Spec
from benchmarks.workloads import ALL, KIB, MIB, QUICK, Workload

Kind = Literal["limit", "raykv", "peer"]
PhaseName = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the tables.

    Attributes:
        worker: Name of the worker that measures the line (`Spec.name`).
        face: Name of the `Face`, the way in which the worker calls its store.
        crosses: Whether a put involves another process.
    """

    label: str
    worker: str
    face: str
    kind: Kind
    crosses: bool = True


@dataclass(frozen=True, slots=True)
class Phase:
    """Workers that run at the same time and are measured in turn, and the lines that they fill."""

    name: PhaseName
    specs: tuple[Spec, ...]
    rows: tuple[Row, ...]

    def only(self, peers: set[str]) -> "Phase":
        """Return this phase with only those peers whose names are in `peers`. raykv and the limits stay."""
        specs = tuple(spec for spec in self.specs if peer_of(spec) in {"", *peers})
        names = {spec.name for spec in specs}
        return Phase(self.name, specs, tuple(row for row in self.rows if row.worker in names))


def peer_of(spec: Spec) -> str:
    """Return the name that `--peers` uses for the peer of this spec; "" for raykv and the limits."""
    return "" if spec.module in ("limits", "raykv_store") else spec.name.partition(" ")[0]


MEMCPY: Final = "memcpy"
MEMCPY_2: Final = "memcpy, two threads"
MAPPED: Final = "memcpy, mapped memory"
DICT: Final = "dict + memmove"
MAPPED_DICT: Final = "dict, mapped memory"
SOCKETS: Final = "bare sockets"
RAYKV: Final = "raykv"
RAYKV_2: Final = "raykv, two copy threads"
RAYKV_GENERAL: Final = "raykv, get()/put() of one"
RAYKV_POSTED: Final = "raykv, put posted"
RAYKV_MATCHED: Final = "raykv, matched before"

LOCAL: Final = Phase(
    "local",
    (
        Spec("limits", "limits"),
        Spec("raykv", "raykv_store"),
        Spec("mooncake embedded", "mooncake", "mooncake", {"mode": "embedded"}),
        Spec("mooncake process", "mooncake", "mooncake", {"mode": "process"}),
        Spec("lmcache", "lmcache", "lmcache"),
        Spec("redis", "redis", "debian"),
        Spec("memcached", "memcached", "debian"),
        Spec("ray", "ray_objects"),
    ),
    (
        Row(MEMCPY, "limits", "memcpy", "limit"),
        Row(MEMCPY_2, "limits", "memcpy 2", "limit"),
        Row(MAPPED, "limits", "mapped memcpy", "limit"),
        Row(DICT, "limits", "dict", "limit"),
        Row(MAPPED_DICT, "limits", "mapped dict", "limit"),
        Row(RAYKV, "raykv", "", "raykv"),
        Row(RAYKV_2, "raykv", "two", "raykv"),
        Row(RAYKV_GENERAL, "raykv", "general", "raykv"),
        Row(RAYKV_POSTED, "raykv", "posted", "raykv"),
        Row("Mooncake, embedded", "mooncake embedded", "", "peer"),
        Row("Mooncake, own process", "mooncake process", "", "peer"),
        Row("LMCache L1, in process", "lmcache", "", "peer", crosses=False),
        Row("Redis, Unix socket", "redis", "", "peer"),
        Row("memcached, Unix socket", "memcached", "", "peer"),
        Row("Ray object store", "ray", "", "peer"),
    ),
)
REMOTE: Final = Phase(
    "remote",
    (
        Spec("limits", "limits", "", {"remote": True}),
        Spec("raykv", "raykv_store", "", {"remote": True}),
        Spec("mooncake tcp", "mooncake", "mooncake", {"mode": "tcp"}),
        Spec("mooncake tcp pooled", "mooncake", "mooncake", {"mode": "tcp", "pool": True}),
        Spec("redis", "redis", "debian", {"tcp": True}),
        Spec("memcached", "memcached", "debian", {"tcp": True}),
    ),
    (
        Row(SOCKETS, "limits", "sockets", "limit"),
        Row(RAYKV_MATCHED, "raykv", "matched", "raykv"),
        Row(RAYKV, "raykv", "", "raykv"),
        Row(RAYKV_GENERAL, "raykv", "general", "raykv"),
        Row("Mooncake, TCP", "mooncake tcp", "", "peer"),
        Row("Mooncake, TCP, pooled", "mooncake tcp pooled", "", "peer"),
        Row("Redis, TCP", "redis", "", "peer"),
        Row("memcached, TCP", "memcached", "", "peer"),
    ),
)
MIXED: Final = (
    ("raykv", Spec("raykv", "raykv_store")),
    ("Mooncake, own process", Spec("mooncake process", "mooncake", "mooncake", {"mode": "process"})),
    ("LMCache L1, in process", Spec("lmcache", "lmcache", "lmcache")),
    ("Redis, Unix socket", Spec("redis", "redis", "debian")),
    ("memcached, Unix socket", Spec("memcached", "memcached", "debian")),
)
LOOKUPS: Final = (
    (RAYKV, Spec("raykv", "raykv_store", "", {"idle": True})),
    ("Mooncake, embedded", Spec("mooncake embedded", "mooncake", "mooncake", {"mode": "embedded"})),
    ("Mooncake, own process", Spec("mooncake process", "mooncake", "mooncake", {"mode": "process"})),
    ("LMCache L1, in process", Spec("lmcache", "lmcache", "lmcache", {"small": True})),
    ("Redis, Unix socket", Spec("redis", "redis", "debian", {"small": True})),
    ("memcached, Unix socket", Spec("memcached", "memcached", "debian", {"small": True})),
)
"""Lines and workers of the lookups among very many keys."""
PEERS: Final = ("mooncake", "lmcache", "redis", "memcached", "ray")
QUICK_PEERS: Final = ("mooncake", "lmcache", "redis", "memcached")


def workloads(phase: PhaseName, *, quick: bool) -> tuple[Workload, ...]:
    """Return the workloads that are measured in a phase."""
    if not quick:
        return ALL
    if phase == "local":
        return QUICK
    wanted = {(64 * KIB, 1), (16 * KIB, 32), (MIB, 32), (4 * MIB, 32)}
    return tuple(each for each in QUICK if each.operation == "get" and (each.nbytes, each.batch) in wanted)
