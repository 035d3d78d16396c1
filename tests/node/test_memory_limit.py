"""A node in a container whose memory limit is below its arena. The control group is real, so the kernel may kill."""

import json
import os
import threading
from pathlib import Path

import pytest

import raykv
from raykv.memory.cgroup import RESERVE_NBYTES
from tests.support.containers import Container, container
from tests.support.nodes import NODE, NodeProcess, content, wait_until

MIB = 1 << 20
LIMIT_NBYTES = 200 * MIB
EXTENT_NBYTES = 8 * MIB
NBYTES = 512 << 10
CAPTURED = "import logging; logging.basicConfig(level=logging.WARNING)\n"


class ContainedNode(NodeProcess):
    """A node with an arena of 1 GiB in a container."""

    def __init__(self, shm_dir: Path, group: Container) -> None:
        self._group = group
        super().__init__(shm_dir)

    def start(self) -> None:
        storage = {
            "arena_nbytes": 1 << 30,
            "extent_nbytes": EXTENT_NBYTES,
            "shm_dir": self.fields["storage"]["shm_dir"],
        }
        self.fields = {**self.fields, "storage": storage}
        self.process = self._group.run(CAPTURED + NODE, json.dumps(self.fields), "5e" * 32, str(self.quarantine_s))
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the node did not start"

    @property
    def taken_nbytes(self) -> int:
        arena = Path(self.fields["storage"]["shm_dir"]) / "raykv-p-n.arena"
        return os.stat(arena).st_blocks * 512


def write(client: "raykv.Client", names: list[str]) -> int:
    """Store chunks one by one, and read some of them back. Returns how many were stored."""
    stored = 0
    for name in names:
        stored += client.put([name], [content(name, NBYTES)], chained=False).stored
        into = bytearray(NBYTES)
        assert not client.get([name], [into]).hits[0] or into == content(name, NBYTES), "wrong bytes"
    return stored


@pytest.fixture
def contained(shm_dir):
    with container(LIMIT_NBYTES) as group:
        node = ContainedNode(shm_dir, group)
        try:
            yield node, group
        finally:
            _, log = node.process.communicate(timeout=30)
            assert node.process.returncode == 0, log
            assert log.count("the arena grows no further") == 1, log
            assert group.kills == 0
            assert not list(shm_dir.iterdir()), "files stay behind"


def test_the_arena_grows_only_as_far_as_the_limit_allows(contained):
    """Write twice what the limit allows, from two threads. Then raise the limit while chunks are being written."""
    node, group = contained
    with node.client() as client:
        rounds = [[f"{thread}-{number}" for number in range(400)] for thread in range(2)]
        threads = [threading.Thread(target=write, args=(client, names)) for names in rounds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert node.process.poll() is None
        stats = node.stats()
        assert stats["memory_limit_nbytes"] == LIMIT_NBYTES
        assert "memory limit" in stats["memory_refused"]
        assert stats["extents_failed"] > 0
        assert 0 < node.taken_nbytes <= LIMIT_NBYTES - RESERVE_NBYTES
        assert write(client, ["after"]) == 1, "chunks are stored in place of others"
        full_nbytes = node.taken_nbytes
        group.limit(2 * LIMIT_NBYTES)
        more = (f"more-{number}" for number in range(1 << 30))
        wait_until(lambda: write(client, [next(more)]) and node.taken_nbytes >= full_nbytes + LIMIT_NBYTES // 2)
        assert node.stats()["memory_limit_nbytes"] == 2 * LIMIT_NBYTES


def test_a_restarted_node_has_all_its_memory_again_under_a_full_limit(contained):
    """The new process cannot take memory. It must find the extents that its predecessor populated, used or not."""
    node, _ = contained
    with node.client() as client:
        write(client, [f"{number}" for number in range(400)])
        before = node.stats()
        client.delete([f"{number}" for number in range(400)])
        taken_nbytes = node.taken_nbytes
        node.process.kill()
        node.process.communicate()
        node.start()
        wait_until(lambda: node.process.poll() is None and write(client, ["again"]))
        assert write(client, [f"new-{number}" for number in range(400)]) > 0
        assert taken_nbytes <= node.taken_nbytes <= LIMIT_NBYTES - RESERVE_NBYTES
        after = node.stats()
        assert after["chunks"] >= before["chunks"] - EXTENT_NBYTES // NBYTES, "most of the arena is out of use"
        assert after["extents_failed"] <= before["extents_failed"]


PAGE_CACHE = """
import os, sys
from raykv.memory.cgroup import memory_limit
before = memory_limit().free_nbytes
with open(sys.argv[1], "wb") as file:
    for _ in range(120):
        file.write(bytes(1 << 20))
    file.flush()
    os.fsync(file.fileno())
print(before, memory_limit().free_nbytes)
"""


def test_page_cache_does_not_count_as_used(tmp_path):
    """An SSD tier without direct I/O leaves its writes in the page cache. The kernel frees them first."""
    with container(LIMIT_NBYTES) as group:
        process = group.run(PAGE_CACHE, str(tmp_path / "file"))
        answer, log = process.communicate(timeout=30)
        assert process.returncode == 0, log
        before, after = map(int, answer.split())
        usage = Path(group.inner / "memory.stat").read_text()
        assert int(dict(line.split() for line in usage.splitlines())["inactive_file"]) > 100 * MIB, "no page cache"
        assert after > before - 20 * MIB
