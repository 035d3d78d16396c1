"""Limits processes, each with its children, to a part of a core, by the kernel's CPU controller.

Needs cgroup v1, and root.

More workers than cores are no model of as many hosts: a router that leaves half of the workers idle then lets the other
half run twice as fast. With a limit, each worker is as fast as the others and no faster when they are idle.

A worker on a host of its own takes no core from the ingress, so a worker runs only while a core has nothing else to do
(`cpu.idle`). The kernel still gives such a group a turn from time to time, which lasts until its next tick, 4 ms with
250 Hz. How often depends on the weights, so all other processes of the benchmark have the greatest one (`cpu.shares`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

CONTROLLER: Final = Path("/sys/fs/cgroup/cpu")
PERIOD_US: Final = 10_000
GREATEST_SHARES: Final = 262_144


def missing() -> str:
    """Return why processes cannot be limited here; empty if they can."""
    if not (CONTROLLER / "cgroup.procs").exists():
        return f"there is no CPU controller of cgroup v1 at {CONTROLLER}"
    return "" if os.access(CONTROLLER, os.W_OK) else f"{CONTROLLER} is not writable; run as root"


@contextmanager
def limited(pids: Iterable[int], share: float) -> Iterator[None]:
    """Give each process, with its children, at most this share of one core, until the end of the block.

    The children count because vLLM's engine is a child of the worker. All other processes that this one has started
    come before them.
    """
    rest, groups = _family(os.getpid()), []
    limit = {"cpu.idle": 1, "cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": int(PERIOD_US * share)}
    try:
        for pid in pids:
            family = _family(pid)
            rest -= family
            groups.append(CONTROLLER / f"raykv-bench-{pid}")
            _fill(groups[-1], family, limit)
        groups.append(CONTROLLER / f"raykv-bench-{os.getpid()}-rest")
        _fill(groups[-1], rest, {"cpu.shares": GREATEST_SHARES})
        yield
    finally:
        for group in groups:
            while left := (group / "cgroup.procs").read_text().split():
                _move(left, CONTROLLER)
            group.rmdir()


def _family(pid: int) -> set[int]:
    import psutil

    return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}


def _fill(group: Path, pids: Iterable[int], fields: Mapping[str, int]) -> None:
    group.mkdir()
    for name, value in fields.items():
        (group / name).write_text(str(value))
    _move(pids, group)


def _move(pids: Iterable[int | str], group: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
