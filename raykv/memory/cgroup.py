"""Reads the limits of this process's control groups (cgroup v1 and v2). A container's limits are limits of its groups.

Functions take the root of the file system, so that tests can pass files of another host.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

UNLIMITED: Final = 1 << 60
"""Limits of at least this many bytes are no limits. cgroup v1 reports such a number for a group without a limit."""
RESERVE_NBYTES: Final = 64 << 20
RESERVE_SHARE: Final = 32
"""raykv takes memory only while RESERVE_NBYTES and 1/RESERVE_SHARE of the limit stay free. At the limit, the kernel
kills a process of the group. The fixed part is for the growth of the node's process and for an extent that another
process of the group takes at the same time; the share is for the group's other processes, such as an engine."""


class MemoryLimit(NamedTuple):
    """The memory limit of a control group.

    Attributes:
        nbytes: The limit.
        used_nbytes: The memory that the group and its descendants use, without the page cache that the kernel frees
            first (inactive_file). Pages of a tmpfs count in the group of the process that touched them first.
    """

    nbytes: int
    used_nbytes: int

    @property
    def free_nbytes(self) -> int:
        return self.nbytes - self.used_nbytes

    @property
    def room_nbytes(self) -> int:
        """The bytes that raykv may take. Negative if less than the reserve is free."""
        return self.free_nbytes - max(RESERVE_NBYTES, self.nbytes // RESERVE_SHARE)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit of the control group with the least room: this process's group, or one of its ancestors.

    Returns None if no group that is visible here has a limit.
    """
    limits = [limit for group in _groups(root, "memory") if (limit := _memory_limit(group)) is not None]
    return min(limits, key=lambda limit: limit.room_nbytes, default=None)


def _memory_limit(group: Path) -> MemoryLimit | None:
    limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    nbytes = min((limit for limit in limits if limit is not None), default=UNLIMITED)
    if nbytes >= UNLIMITED:
        return None
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split(maxsplit=1) for line in lines_of(group / "memory.stat") if " " in line)
    # In v1 the entries without "total_" leave out the group's descendants.
    return MemoryLimit(nbytes, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def cgroup_file(root: Path, name: str) -> str:
    """Return the text of a limit file of this process's control group, or of the nearest ancestor with a limit.

    An empty text means that there is no limit.
    """
    texts = ("\n".join(lines_of(group / name)) for group in _groups(root, name.partition(".")[0]))
    return next((text for text in texts if text and not text.startswith("max")), "")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield possible directories of this process's control groups for a controller, innermost first."""
    mounted = root / "sys/fs/cgroup"
    for line in lines_of(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # Next to v1, v2 is mounted at "unified".
        for base in [mounted / controllers] if controllers else [mounted, mounted / "unified"]:
            place = base / path.lstrip("/")
            yield from (each for each in (place, *place.parents) if each == base or base in each.parents)
    yield mounted


def _number(path: Path) -> int | None:
    text = "".join(lines_of(path)).strip()
    return int(text) if text.isdigit() else None


def lines_of(path: Path) -> list[str]:
    """Return the lines of a kernel file, or an empty list if the file cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
