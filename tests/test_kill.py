"""A node is killed at random moments, again and again. Meanwhile it serves reads and writes, evicts and demotes."""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raykv.memory import native
from raykv.memory.reader import ShmReader
from raykv.protocol import chunk_keys
from tests.support.load import NBYTES, PINNED, Load, content
from tests.support.nodes import SPACE, NodeProcess
from tests.support.soak import soak

pytestmark = pytest.mark.skipif(
    native.loops is None, reason="readers without compiled loops are slower than this test's patience"
)


def resident(node: NodeProcess) -> np.ndarray:
    """Return the keys of all readable chunks in the dead node's memory."""
    prefix = node.local_address.removeprefix("unix:").removesuffix(".sock")
    reader = ShmReader(prefix + ".table", prefix + ".arena", writable=False)
    rows = reader.table.ready_rows()
    columns = reader.table.columns
    return np.stack([columns.key_hi[rows], columns.key_lo[rows]], axis=1)


def check(node: NodeProcess, load: Load, before: np.ndarray) -> int:
    """Check that all keys in `before` are hits with right bytes, and all unfinished chunks are misses.

    Returns:
        The number of keys in `before`.
    """
    names = {chunk_keys.to_bytes(chunk_keys.named(SPACE.digest, [name])): name for name in [*load.names, *PINNED]}
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


@pytest.fixture
def node(shm_dir: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    class Small(NodeProcess):
        def start(self) -> None:
            ssd = {"paths": [str(tmp_path / "ssd")], "capacity_nbytes": 16 << 20, "segment_nbytes": 1 << 20}
            memory = {"arena_nbytes": 8 << 20, "extent_nbytes": 256 << 10, "low_water": 0.0, "high_water": 0.001}
            self.fields["storage"] |= {**memory, "ssd": ssd}
            super().start()

    made = Small(shm_dir)
    yield made
    if made.process.poll() is None:
        made.process.communicate(timeout=30)
        assert not list(shm_dir.iterdir()), "files stay behind"
    shutil.rmtree(tmp_path / "ssd", ignore_errors=True)


def kill_again_and_again(node: NodeProcess, kills: int, seed: int) -> None:
    """Kill the node `kills` times. Check that nothing committed is lost, and that reads never stop."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    chunks = below = 0
    with Load(node, seed) as load:
        for _ in range(kills):
            time.sleep(rng.random() * 0.15)  # the next kill is at a random moment
            node.kill()
            load.pause_writes()
            before = resident(node)
            node.start()
            chunks += check(node, load, before)
            below += node.stats()["tiers"]["ssd"]["chunks"]
            load.resume_writes()
    load.assert_no_gaps()
    print(f"{kills} kills, {load.reads} reads without a gap, {load.hits} others, {len(load.names)} puts")
    print(f"{chunks / kills:.0f} chunks in memory and {below / kills:.0f} below it on average when it was killed")
    assert os.path.exists(node.local_address.removeprefix("unix:"))


@pytest.mark.slow
def test_killed_at_random_moments_nothing_committed_is_lost_and_reads_never_stop(node, seed):
    kill_again_and_again(node, 2, seed)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_killed_many_times_nothing_committed_is_lost_and_reads_never_stop(node):
    kill_again_and_again(node, soak("kills", 200), soak("seed", random.randrange(1 << 30)))
