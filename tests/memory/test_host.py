"""Whether the host, the container and the file system have memory to spare."""

import os
import resource
from pathlib import Path

import pytest

from raykv.memory import host
from raykv.memory.host import has_to_spare

GIB = 1 << 30


def say(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\nHugePages_Total: 0\nOdd:"


@pytest.mark.parametrize(
    ("available", "limit", "used", "free", "enough"),
    [
        (9 * GIB, "max", 60 * GIB, 9 * GIB, True),
        (7 * GIB, "max", 60 * GIB, 9 * GIB, False),
        (9 * GIB, str(32 * GIB), 27 * GIB, 9 * GIB, True),
        (9 * GIB, str(32 * GIB), 29 * GIB, 9 * GIB, False),
        (9 * GIB, "max", 60 * GIB, 3 * GIB, False),
    ],
)
def test_an_eighth_is_left_of_host_container_and_file_system(
    tmp_path, monkeypatch, available, limit, used, free, enough
):
    say(
        tmp_path,
        {
            "proc/meminfo": meminfo(64 * GIB, available),
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": limit,
            "sys/fs/cgroup/memory.current": str(used),
        },
    )
    stat = os.statvfs_result((4096, 4096, 32 * GIB // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(host.os, "statvfs", lambda _: stat)
    assert has_to_spare(Path("/dev/shm"), tmp_path) == enough
    assert has_to_spare(None, tmp_path) == (enough or free < 4 * GIB)


def test_where_the_host_does_not_say_nothing_is_spared(tmp_path):
    assert not has_to_spare(None, tmp_path)
    say(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 32 * GIB)})
    assert has_to_spare(None, tmp_path)
    assert not has_to_spare(tmp_path / "missing", tmp_path)
    say(tmp_path, {"proc/meminfo": "MemTotal: 5 kB"})
    assert not has_to_spare(None, tmp_path)
    say(tmp_path, {"proc/meminfo": "MemTotal: much"})
    assert not has_to_spare(None, tmp_path)


def test_without_descriptors_nothing_is_spared_and_nothing_fails():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert not has_to_spare(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
