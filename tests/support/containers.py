"""Real control groups with a memory limit, of cgroup v1 or v2. To the kernel, a container is such a group."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.nodes import wait_until


class Container:
    """A control group, and a group within it that has no limit of its own. Processes run in the inner group."""

    def __init__(self, group: Path, *, v2: bool) -> None:
        self.group, self.inner = group, group / "inner"
        self._limit = group / ("memory.max" if v2 else "memory.limit_in_bytes")
        self._events, self._kills = (group / "memory.events" if v2 else self.inner / "memory.oom_control"), "oom_kill "

    def limit(self, nbytes: int) -> None:
        self._limit.write_text(str(nbytes))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        lines = self._events.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(self._kills))

    def run(self, program: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start Python in the inner group."""
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        command = ["sh", "-c", enter, str(self.inner), sys.executable, "-W", "error", "-c", program, *arguments]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def parent_group() -> tuple[Path, bool] | None:
    """Return the group of this process under which groups with a memory limit can be made, and whether it is v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path(f"/sys/fs/cgroup/memory{path}"), False
    root = Path(
        "/sys/fs/cgroup"
    )  # in v2 a group with processes has no groups with controllers below it, except the root
    enabled = root / "cgroup.subtree_control"
    return (root, True) if enabled.exists() and "memory" in enabled.read_text().split() else None


@contextmanager
def container(limit_nbytes: int) -> Iterator[Container]:
    """A control group with a memory limit. The processes in it must have ended at the end."""
    found = parent_group()
    if found is None:
        pytest.skip("no memory controller is usable here")
    parent, v2 = found
    made = Container(parent / f"raykv-test-{os.getpid()}-{time.monotonic_ns()}", v2=v2)
    try:
        made.inner.mkdir(parents=True)
        if v2:
            (made.group / "cgroup.subtree_control").write_text("+memory")
        made.limit(limit_nbytes)
    except OSError as error:
        _remove(made)
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield made
    finally:
        _remove(made)


def _remove(made: Container) -> None:
    for group in (made.inner, made.group):
        if group.exists():
            wait_until(lambda group=group: _removed(group))


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False  # a process in it has not quite ended
    return True
