"""A node killed at random moments, again and again, while it is read, written, evicting and demoting."""

import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

import raykv
from raykv.memory import native
from raykv.memory.reader import ShmReader
from raykv.protocol import chunk_keys
from tests.node.test_node_process import SPACE, NodeProcess

NBYTES = 20_000
KEPT = 20
"""Chunks that are read all the time, so that no policy lets them go."""


@lru_cache(4096)
def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(NBYTES)


class BulkRead:
    """Threads that read and write through clients of their own, and note what they saw."""

    def __init__(self, node: NodeProcess, seed: int) -> None:
        self.node = node
        self.rng = random.Random(seed)
        self.stop, self.writing, self.idle = threading.Event(), threading.Event(), threading.Event()
        self.writing.set()
        self.problems: list[str] = []
        self.gaps: list[str] = []
        self.reads = self.hits = 0
        self.named: dict[str, None] = {}  # all names that were ever handed in
        self.unfinished: list[str] = []
        tasks = (self._hold, self._write)
        self.connected = threading.Barrier(len(tasks) + 1)
        self.threads = [threading.Thread(target=self._guard, args=(task,)) for task in tasks]

    def __enter__(self) -> "BulkRead":
        with self.node.client() as client:
            assert client.put(kept(), [content(name) for name in kept()], chained=False).stored == KEPT
            client.flush()
        for thread in self.threads:
            thread.start()
        self.connected.wait(60.0)  # a client cannot be made while there is no node
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.writing.set()
        for thread in self.threads:
            thread.join(60.0)

    def _guard(self, task) -> None:
        try:
            with self.node.client(timeout_s=2.0) as client:
                self.connected.wait(60.0)
                while not self.stop.is_set():
                    task(client)
        except BaseException as error:
            self.problems.append(repr(error))
            raise

    def _hold(self, client: raykv.Client) -> None:
        """Read what must be there at every moment."""
        into = bytearray(NBYTES)
        for name in kept():
            self.reads += 1
            if not client.get_one(client.key(name), memoryview(into)):
                self.gaps.append(name)
            elif into != content(name):
                self.problems.append(f"wrong bytes of {name}")
        time.sleep(0.001)

    def _write(self, client: raykv.Client) -> None:
        """Put new chunks, read old ones so that they are worth keeping, and leave some unfinished."""
        if not self.writing.is_set():
            self.idle.set()
            self.writing.wait()
            self.idle.clear()
            return
        # However late the other thread comes, what is read before each put is not what goes for it.
        client.get(kept(), [bytearray(NBYTES) for _ in range(KEPT)])
        fresh = [f"n{len(self.named) + number}" for number in range(4)]
        self.named.update(dict.fromkeys(fresh))
        client.put(fresh, [content(name) for name in fresh], chained=self.rng.random() < 0.5)
        known = list(self.named)
        for name in self.rng.sample(known[-300:], min(6, len(known))):
            into = bytearray(NBYTES)
            if client.get([name], [into]).hits[0]:
                self.hits += 1
                if into != content(name):
                    self.problems.append(f"wrong bytes of {name}")
        if self.rng.random() < 0.1:
            name = f"half-{len(self.unfinished)}"
            try:
                room = client.reserve([name], NBYTES)
            except raykv.RayKVError:
                return
            for view in room.views:
                view[:100] = bytes(100)
            self.unfinished.append(name)
        time.sleep(0.002)


def kept() -> list[str]:
    return [f"kept-{number}" for number in range(KEPT)]


def resident(node: NodeProcess) -> np.ndarray:
    """Keys that can be read in the dead node's memory."""
    prefix = node.local_address.removeprefix("unix:").removesuffix(".sock")
    reader = ShmReader(prefix + ".table", prefix + ".arena", writable=False)
    rows = reader.table.ready_rows()
    columns = reader.table.columns
    return np.stack([columns.key_hi[rows], columns.key_lo[rows]], axis=1)


def check(node: NodeProcess, load: BulkRead, before: np.ndarray) -> int:
    """Everything that was there is there, with its bytes, and nothing unfinished."""
    names = {key: name for name in [*load.named, *kept()] for key in [chunk_keys.to_bytes(named([name]))]}
    raw = chunk_keys.to_bytes(before)
    there = [raw[at : at + 16] for at in range(0, len(raw), 16)]
    assert set(there) <= set(names), "a chunk that nobody stored"
    with node.client() as client:
        into = [bytearray(NBYTES) for _ in there]
        found = client.get(before, into).hits if there else ()
        for key, hit, value in zip(there, found, into, strict=True):
            assert hit, f"{names[key]} was there before"
            assert value == content(names[key])
        if load.unfinished:
            assert not client.exists(load.unfinished).any(), "a chunk that was never committed"
    return len(there)


def named(names: list[str]) -> np.ndarray:
    return chunk_keys.named(SPACE.digest, names)


@pytest.fixture
def node(shm_dir: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    class Small(NodeProcess):
        def start(self) -> None:
            self.fields["storage"] |= {
                "arena_nbytes": 8 << 20,
                "low_water": 0.0,
                "high_water": 0.001,
                "extent_nbytes": 256 << 10,
                "ssd": {
                    "paths": [str(tmp_path / "ssd")],
                    "capacity_nbytes": 16 << 20,
                    "segment_nbytes": 1 << 20,
                },
            }
            super().start()

    made = Small(shm_dir)
    yield made
    if made.process.poll() is None:
        made.process.communicate(timeout=30)
        assert not list(shm_dir.iterdir()), "files stay behind"
    shutil.rmtree(tmp_path / "ssd", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(not native.available, reason="readers without compiled loops are slower than this test's patience")
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.timeout(900))], ids=["few", "many"])
def test_killed_at_random_moments_nothing_committed_is_lost_and_reads_never_stop(node, kills):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    chunks = below = 0
    with BulkRead(node, seed) as load:
        for _ in range(kills):
            time.sleep(rng.random() * 0.15)
            node.kill()
            load.writing.clear()
            assert load.idle.wait(30.0), "a writer hangs"
            before = resident(node)
            node.start()
            chunks += check(node, load, before)
            below += node.stats()["tiers"]["ssd"]["chunks"]
            load.idle.clear()
            load.writing.set()
    assert not load.problems, load.problems[:5]
    assert not load.gaps, f"{len(load.gaps)} gaps in {load.reads} reads"
    print(f"{kills} kills, {load.reads} reads without a gap, {load.hits} others, {len(load.named)} puts")
    print(f"{chunks / kills:.0f} chunks in memory and {below / kills:.0f} below it on average when it was killed")
    assert os.path.exists(node.local_address.removeprefix("unix:"))
