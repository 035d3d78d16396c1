"""Measures the free memory of the host and the container, and sets the scheduling class of background threads.

Functions take the root of the file system, so that tests can pass files of another host.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SPARED_SHARE: Final = 8
"""An idle node populates its whole arena while at least 1/SPARED_SHARE of memory is free; see `has_to_spare`."""
UNLIMITED: Final = 1 << 60


def give_way() -> None:
    """Put the calling thread into SCHED_BATCH. When such a thread wakes, it does not preempt readers or writers."""
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # keep any other class, because an administrator has chosen it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # the kernel or the container does not allow this


def has_to_spare(directory: Path | None, root: Path = Path("/")) -> bool:
    """Whether at least 1/SPARED_SHARE of memory is free on the host, in the container and in `directory`'s file system.

    Returns False if the host does not report its memory. If `directory` is None, no file system is checked.
    """
    try:
        host = meminfo(root)
        if host["MemAvailable"] < host["MemTotal"] // SPARED_SHARE:
            return False
        limit, used = cgroup_memory(root)
        if limit is not None and limit - used < limit // SPARED_SHARE:
            return False
        if directory is None:
            return True
        stat = os.statvfs(directory)
        return stat.f_bavail >= stat.f_blocks // SPARED_SHARE
    except (OSError, KeyError, ValueError):  # for example, no file descriptor is left
        return False


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Return the entries of /proc/meminfo, converted from KiB to bytes. Counts of pages are multiplied by 1024 too."""
    lines = [line.partition(":") for line in lines_of(root / "proc/meminfo")]
    return {name: int(rest.split()[0]) << 10 for name, _, rest in lines if rest.split()}


def cgroup_memory(root: Path) -> tuple[int | None, int]:
    """Return the memory limit of this process's control group, and the memory used in that group, in bytes.

    If the group has no limit, return the numbers of the nearest ancestor with a limit. If there is no such ancestor,
    return (None, 0).
    """
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for group in _groups(root, "memory"):
            limit = "".join(lines_of(group / limit_name)).strip()
            if limit.isdigit() and int(limit) < UNLIMITED:
                return int(limit), int("".join(lines_of(group / used_name)).strip() or 0)
    return None, 0


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
        base = mounted / controllers if controllers else mounted
        place = base / path.lstrip("/")
        yield from (each for each in (place, *place.parents) if each == base or base in each.parents)
    yield mounted


def lines_of(path: Path) -> list[str]:
    """Return the lines of a kernel file, or an empty list if the file cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
