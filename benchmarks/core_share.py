"""Limits processes, each with its children, to a part of a core, by the kernel's CPU controller.

Needs cgroup v1, and root.

More workers than cores are no model of as many hosts: a router that leaves half of the workers idle then lets the other
half run twice as fast. With a limit, each worker is as fast as the others and no faster when they are idle. A worker on
a host of its own takes no core from the ingress, so a worker runs only while a core has nothing else to do
(`cpu.idle`). A small weight (`cpu.shares`) is not enough: when its turn comes, a group runs until the kernel's next
tick, 4 ms with 250 Hz.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

CONTROLLER: Final = Path("/sys/fs/cgroup/cpu")
PERIOD_US: Final = 10_000


def missing() -> str:
    """Return why processes cannot be limited here; empty if they can."""
    if not (CONTROLLER / "cgroup.procs").exists():
        return f"there is no CPU controller of cgroup v1 at {CONTROLLER}"
    return "" if os.access(CONTROLLER, os.W_OK) else f"{CONTROLLER} is not writable; run as root"


@contextmanager
def limited(pids: Iterable[int], share: float) -> Iterator[None]:
    """Give each process, with its children, at most this share of one core, until the end of the block.

    The children count because vLLM's engine is a child of the worker.
    """
    import psutil

    groups = []
    try:
        for pid in pids:
            group = CONTROLLER / f"raykv-bench-{pid}"
            group.mkdir()
            groups.append(group)
            (group / "cpu.idle").write_text("1")
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
            for each in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))):
                (group / "cgroup.procs").write_text(str(each))
        yield
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                for pid in (group / "cgroup.procs").read_text().split():
                    (CONTROLLER / "cgroup.procs").write_text(pid)
            group.rmdir()
