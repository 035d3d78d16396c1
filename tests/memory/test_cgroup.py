"""The memory limit of a container: of its own control group or of any group above it, in cgroup v1 and v2."""

import random
from pathlib import Path

import pytest

from raykv.memory.cgroup import RESERVE_NBYTES, RESERVE_SHARE, MemoryLimit, memory_limit
from tests.memory.test_host import say

MIB, GIB = 1 << 20, 1 << 30


def v2(limit: object, used: int, cache: int = 0, high: object = "max") -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 7"
    return {"memory.max": str(limit), "memory.high": str(high), "memory.current": str(used), "memory.stat": stat}


def v1(limit: int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"cache 9\ninactive_file 3\ntotal_inactive_file {cache}\ntotal_active_file 7"
    return {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": stat}


def build(root: Path, groups: dict[str, dict[str, str]], member: str) -> None:
    say(root, {"proc/self/cgroup": member})
    for group, files in groups.items():
        say(root, {f"sys/fs/cgroup/{group}/{name}": text for name, text in files.items()})


@pytest.mark.parametrize(
    ("groups", "member", "expected"),
    [
        ({}, "0::/", None),
        ({".": v2("max", GIB)}, "0::/", None),
        ({".": v2(8 * GIB, 5 * GIB, 2 * GIB)}, "0::/", MemoryLimit(8 * GIB, 3 * GIB)),
        ({".": v2(8 * GIB, GIB, high=2 * GIB)}, "0::/", MemoryLimit(2 * GIB, GIB)),
        ({"pod/box": v2("max", GIB), "pod": v2(8 * GIB, 5 * GIB)}, "0::/pod/box", MemoryLimit(8 * GIB, 5 * GIB)),
        ({"pod/box": v2(4 * GIB, GIB), "pod": v2(8 * GIB, 7 * GIB)}, "0::/pod/box", MemoryLimit(8 * GIB, 7 * GIB)),
        ({"pod/box": v2(4 * GIB, GIB), "pod": v2(8 * GIB, GIB)}, "0::/pod/box", MemoryLimit(4 * GIB, GIB)),
        ({"unified/pod": v2(4 * GIB, GIB)}, "4:memory:/\n0::/pod", MemoryLimit(4 * GIB, GIB)),
        ({"memory/box": v1(80 * GIB, 9 * GIB, GIB)}, "5:memory:/box\n0::/", MemoryLimit(80 * GIB, 8 * GIB)),
        ({"memory": v1(9223372036854771712, GIB)}, "5:memory:/", None),
        ({"memory": v1(GIB, 5)}, "5:memory:/docker/not/visible/here", MemoryLimit(GIB, 5)),
        (
            {"memory/a": v1(3 * GIB, 5), "memory/a/b": v1(9223372036854771712, 5)},
            "5:memory:/a/b",
            MemoryLimit(3 * GIB, 5),
        ),
    ],
)
def test_the_group_with_the_least_room_decides(tmp_path, groups, member, expected):
    build(tmp_path, groups, member)
    assert memory_limit(tmp_path) == expected


def test_of_nested_groups_the_least_room_is_found(tmp_path, rng: random.Random):
    for number in range(50):
        root, path, rooms = tmp_path / str(number), "", []
        groups = {}
        for depth in range(rng.randint(1, 5)):
            path = f"{path}/g{depth}"
            limit, used = rng.randrange(1, 64) * GIB, rng.randrange(64) * GIB
            cache = rng.randrange(used + 1)
            groups[path.lstrip("/")] = v2(limit, used, cache)
            rooms.append(limit - (used - cache) - max(RESERVE_NBYTES, limit // RESERVE_SHARE))
        build(root, groups, f"0::{path}")
        found = memory_limit(root)
        assert found is not None
        assert found.room_nbytes == min(rooms)
