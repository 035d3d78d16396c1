"""How much memory this host and this container still have for us, and letting other threads go first.

Functions take the root of the file system: tests pass that of another host.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SPARED_SHARE: Final = 8
"""This part of the memory of the host, of the container and of a file system is left to others."""
UNLIMITED: Final = 1 << 60


def give_way() -> None:
    """Let this thread not interrupt others when it wakes (SCHED_BATCH). For background threads.

    It waits for a free core, or for its turn: else each wake-up on the core of a reader or writer would hold it up.
    """
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else an administrator has chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # not allowed here


def has_to_spare(directory: Path | None, root: Path = Path("/")) -> bool:
    """Whether an eighth of the host's memory, of the container's and of the file system of `directory` is free.

    False where the host does not say.
    """
    try:
        lines = [line.partition(":") for line in lines_of(root / "proc/meminfo")]
        host = {name: int(rest.split()[0]) for name, _, rest in lines if rest.split()}
        if host["MemAvailable"] < host["MemTotal"] // SPARED_SHARE:
            return False
        limit, used = cgroup_memory(root)
        if limit is not None and limit - used < limit // SPARED_SHARE:
            return False
        if directory is None:
            return True
        stat = os.statvfs(directory)
        return stat.f_bavail >= stat.f_blocks // SPARED_SHARE
    except (OSError, KeyError, ValueError):  # such as no descriptors left
        return False


def cgroup_memory(root: Path) -> tuple[int | None, int]:
    """The nearest limit at or above this process's control group, and the use there. None: no limit."""
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for group in _groups(root, "memory"):
            limit = "".join(lines_of(group / limit_name)).strip()
            if limit.isdigit() and int(limit) < UNLIMITED:
                return int(limit), int("".join(lines_of(group / used_name)).strip() or 0)
    return None, 0


def cgroup_file(root: Path, name: str) -> str:
    """A file of this process's control group, or of the nearest one above that sets a limit by it; "" if none does."""
    texts = ("\n".join(lines_of(group / name)) for group in _groups(root, name.partition(".")[0]))
    return next((text for text in texts if text and not text.startswith("max")), "")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Possible directories of this process's control groups of a kind, from the nearest to the outermost."""
    mounted = root / "sys/fs/cgroup"
    for line in lines_of(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = mounted / controllers if controllers else mounted
        place = base / path.lstrip("/")
        yield from (each for each in (place, *place.parents) if each == base or base in each.parents)
    yield mounted


def lines_of(path: Path) -> list[str]:
    """Lines of a kernel file; none if it does not exist."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
