"""Hostile frames on the sockets of a node process, while honest clients work. The node goes on, and does not grow."""

import json
import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.transport.server import LOG_EVERY_S, MAX_LOG_LINES
from tests.support.attack import attack
from tests.support.nodes import SECRET, NodeProcess, content, node_process, wait_until
from tests.support.soak import soak

NBYTES = 20_000
GOOD = raykv.Namespace(model="good")
WINDOW = 100
LOGS = 4
"""Places in a node that write to its log with a `LogLimit` of their own: two servers, its handlers, the list of
namespaces."""
MOST_GROWTH_NBYTES, MOST_GROWTH_SOAK_NBYTES = 4 << 20, 14 << 20
"""The node's heap may grow by this between a fifth of the frames and all of them. In the long run the honest clients
fill the log of departures, which then takes 11 MiB."""


def heap_nbytes(pid: int) -> int:
    """Return the resident anonymous memory of a process. The arena and the table do not count, as they are files."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def held(pid: int) -> tuple[int, int]:
    """Return the numbers of threads and of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


class Worker:
    """An honest client: it writes chunks, reads them and older ones, and compares all bytes.

    Attributes:
        operations: Number of calls.
    """

    def __init__(self, client: "raykv.Client", name: str) -> None:
        self._client, self._name = client, name
        self.operations = self._round = 0

    def work(self) -> None:
        """Write two chunks, read them, and read a chunk that was written a while ago."""
        self._round += 1
        fresh = [f"{self._name}-{self._round % WINDOW}-{number}" for number in range(2)]
        self._client.delete(fresh)
        put = self._client.put(fresh, [content(name, NBYTES) for name in fresh], chained=False)
        assert put.stored == 2, put
        old = f"{self._name}-{max(1, self._round - 20) % WINDOW}-0"
        into = [bytearray(NBYTES) for _ in range(3)]
        got = self._client.get([*fresh, old], into)
        assert got.hits == (True, True, True), got
        assert into == [content(name, NBYTES) for name in [*fresh, old]], "wrong bytes"
        self.operations += 3


def under_attack(node: NodeProcess, workers: list[Worker], seed: int, frames: int) -> Counter[str]:
    """Send frames from two processes, one for each kind of socket, and let the workers work meanwhile."""
    addresses = [node.address, node.local_address]
    attackers = [
        attack([address], SECRET, seed=seed + number, frames=frames // 2) for number, address in enumerate(addresses)
    ]
    try:
        while any(each.poll() is None for each in attackers):
            for worker in workers:
                worker.work()
        assert [each.returncode for each in attackers] == [0, 0]
        return sum((Counter(json.loads(each.communicate()[0])) for each in attackers), Counter())
    finally:
        for each in attackers:
            each.kill()
            each.communicate()


def run(shm_dir: Path, log: Path, seed: int, frames: int, most_growth_nbytes: int) -> None:
    began_s = time.monotonic()
    with log.open("w") as stderr, node_process(shm_dir, stderr) as node:
        pid = node.process.pid
        with node.client() as near, node.client(local=False) as far:
            workers = [Worker(near.using(GOOD), "near"), Worker(far.using(GOOD), "far")]
            for worker in workers:
                worker.work()
            before = held(pid)
            under_attack(node, workers, seed, frames // 5)
            wait_until(lambda: np.less_equal(held(pid), before).all())
            early_nbytes, early = heap_nbytes(pid), sum(worker.operations for worker in workers)
            sent = under_attack(node, workers, seed + 100, frames - frames // 5)
            wait_until(lambda: np.less_equal(held(pid), before).all())
            late_nbytes, operations = heap_nbytes(pid), sum(worker.operations for worker in workers)
            stats = node.stats()
    lines = log.read_text().splitlines()
    seconds, took_s = sent.pop("seconds") / 2, time.monotonic() - began_s
    print(f"{frames:,} frames: {dict(sent)}; {stats['refused_connections']:,} connections refused")
    print(f"{early_nbytes:,} and {late_nbytes:,} bytes, {before} threads and descriptors, {len(lines)} lines of log")
    print(f"{operations - early:,} honest operations in {seconds:.0f} s; the test took {took_s:.0f} s")
    assert late_nbytes <= early_nbytes + most_growth_nbytes
    assert len(lines) <= MAX_LOG_LINES * LOGS * (2 + took_s / LOG_EVERY_S), lines[:20]
    assert max(map(len, lines), default=0) < 1000
    assert not [line for line in lines if re.search("bug|Traceback", line)], lines[:20]
    assert not stats["errors"].get("beat")
    assert min(sent.values()) > 0


@pytest.mark.slow
def test_hostile_frames(shm_dir, tmp_path, seed: int):
    run(shm_dir, tmp_path / "log", seed, 20_000, MOST_GROWTH_NBYTES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_hostile_frames(shm_dir, tmp_path, seed: int):
    run(shm_dir, tmp_path / "log", seed, soak("frames", 1_000_000), MOST_GROWTH_SOAK_NBYTES)
