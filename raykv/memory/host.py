"""How much memory the host and the container have left; the scheduling class of background threads.

Functions take the root of the file system, so that tests can pass files of another host.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SPARED_SHARE: Final = 8
"""One part in this many of the host's, container's and file system's memory stays free for other programs."""
UNLIMITED: Final = 1 << 60


def give_way() -> None:
    """Put the calling background thread into SCHED_BATCH: when it wakes, it does not preempt readers or writers."""
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else an administrator has chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # not allowed here


def has_to_spare(directory: Path | None, root: Path = Path("/")) -> bool:
    """Whether an eighth of the memory is free: of the host, of the container, and of the file system of `directory`.

    False if the host does not report it. With directory None the file system is not checked.
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
    except (OSError, KeyError, ValueError):  # such as no descriptors left
        return False


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """The sizes in /proc/meminfo, in bytes. Its few counts are multiplied by 1024 too."""
    lines = [line.partition(":") for line in lines_of(root / "proc/meminfo")]
    return {name: int(rest.split()[0]) << 10 for name, _, rest in lines if rest.split()}


def cgroup_memory(root: Path) -> tuple[int | None, int]:
    """The memory limit of this process's control group or its nearest ancestor with one, and the memory used there.

    The limit is None if there is none.
    """
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for group in _groups(root, "memory"):
            limit = "".join(lines_of(group / limit_name)).strip()
            if limit.isdigit() and int(limit) < UNLIMITED:
                return int(limit), int("".join(lines_of(group / used_name)).strip() or 0)
    return None, 0


def cgroup_file(root: Path, name: str) -> str:
    """The text of a limit file of this process's control group or its nearest ancestor with a limit. "": no limit."""
    texts = ("\n".join(lines_of(group / name)) for group in _groups(root, name.partition(".")[0]))
    return next((text for text in texts if text and not text.startswith("max")), "")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Possible directories of this process's control groups for a controller, innermost first."""
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
    """Lines of a kernel file; an empty list if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
