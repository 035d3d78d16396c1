"""Measures the free memory of the host, and sets the scheduling class of background threads.

Functions take the root of the file system, so that tests can pass files of another host.
"""

import os
from pathlib import Path
from typing import Final

from raykv.memory.cgroup import lines_of, memory_limit

SPARED_SHARE: Final = 8
"""An idle node populates its whole arena while at least 1/SPARED_SHARE of memory is free; see `has_to_spare`."""


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
        limit = memory_limit(root)
        if limit is not None and limit.free_nbytes < limit.nbytes // SPARED_SHARE:
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
