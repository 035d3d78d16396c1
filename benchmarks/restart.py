"""Measures how long a killed node with a large table is unavailable: from the kill to the first hit.

Run by hand: `python -m benchmarks.restart`

A supervised node (`raykv.supervisor.handle`, as Ray's actors run it) is killed with signal 9 again and again. A client
that does not map the node's memory requests a chunk until the bytes arrive. For comparison, each round also measures
how long a new Python process takes to import the modules of a node: the first part of a restart without a supervisor.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from raykv.config import MIB, NodeConfig
from raykv.embedded import InProcessMembership
from raykv.errors import RayKVError
from raykv.memory.copying import checksum_of
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import expect
from raykv.protocol.namespace import Namespace
from raykv.storage.store import Store, Written
from raykv.supervisor.handle import NodeHandle
from raykv.transport.link import Link
from raykv.types import Batch, KeyArray

NBYTES = 4096
STEP = 4096
PAUSE_S = 2.0
ASK_S = 30.0
SECRET = bytes(32)


def main() -> None:
    """Fill the table, kill the node repeatedly, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
    try:
        _run(home, arguments.rows, arguments.kills)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _run(home: Path, rows: int, kills: int) -> None:
    storage = {
        "arena_nbytes": (rows * NBYTES // (32 * MIB) + 4) * 32 * MIB,
        "max_chunks": rows + rows // 8,
        "shm_dir": str(home),
        "low_water": 0.0,
        "high_water": 0.001,
    }
    config = NodeConfig.load({"cluster": "bench", "node_id": "n", "storage": storage})
    value = os.urandom(NBYTES)
    asked = _fill(config, rows, value)
    node = NodeHandle(config, secret=SECRET, membership=InProcessMembership(member_timeout_s=60.0))
    try:
        recovered, imports = node.stats()["recovered"], []
        print(f"{recovered:,} rows; {kills} kills; milliseconds: median, and the worst")
        away = []
        for turn in range(kills + 1):
            time.sleep(PAUSE_S)
            imports.append(_import_ms())
            starts, killed_ns = node.starts, time.monotonic_ns()
            os.kill(node.pid, signal.SIGKILL)
            hit_ns = _until_hit(config, asked[turn % len(asked)], value)
            while node.starts == starts:
                time.sleep(0.001)
            if turn:  # the first kill warms up
                away.append((hit_ns - killed_ns) / 1e6)
            assert node.stats()["recovered"] == recovered
        for what, times in (
            ("from the kill to the first hit", away),
            ("for comparison: a new Python process that imports raykv.node.node", imports),
        ):
            print(f"{what:64} {statistics.median(times):7.0f} {max(times):7.0f}")
    finally:
        node.stop(unlink=True)


def _fill(config: NodeConfig, rows: int, value: bytes) -> list[KeyArray]:
    """Store chains of STEP chunks. Only the first chunk of a chain gets bytes. Returns the first chunks' keys."""
    assert config.file_prefix is not None
    store = Store.open(config.storage, config.file_prefix, now_s=time.monotonic())
    group, rng, first = store.groups.open(Namespace(model="m")), np.random.default_rng(1), []
    for _ in range(0, rows, STEP):
        while store.populator.due:
            store.populator.step(nullcontext(), quiet=False)
        keys = rng.integers(0, 1 << 63, (STEP, 2), dtype=np.uint64)
        loan = store.lend(group, NBYTES, STEP, now_s=time.monotonic())
        start = int(loan.offsets[0])
        store.arena.view[start : start + NBYTES] = value
        checksums = np.zeros(len(loan.rows), np.uint64)
        checksums[0] = checksum_of((memoryview(value),))
        positions = np.arange(len(loan.rows), dtype=np.int32)
        written = Written(positions, loan.rows, checksums)
        store.commit(group, Batch(keys, NBYTES), written, now_s=time.monotonic())
        first.append(keys[:1])
    store.close()
    return first


def _until_hit(config: NodeConfig, key: KeyArray, value: bytes) -> int:
    """Request a chunk from the node until its bytes arrive. Returns when they arrived, in monotonic nanoseconds."""
    target = memoryview(bytearray(NBYTES))
    until_s = time.monotonic() + ASK_S
    while time.monotonic() < until_s:
        try:
            link = Link.connect(config.local_address, SECRET, deadline_s=until_s)
            try:
                link.call(
                    messages.Read(chunk_keys.to_bytes(key)),
                    lambda answer: [[target]] if any(expect(messages.Reading, answer).nbytes) else [],
                    deadline_s=until_s,
                )
                hit_ns = time.monotonic_ns()
            finally:
                link.close()
        except (RayKVError, OSError):
            time.sleep(0.0003)
            continue
        assert bytes(target) == value, "wrong bytes"
        return hit_ns
    raise TimeoutError("no hit")


def _import_ms() -> float:
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import raykv.node.node"], check=True)
    return (time.monotonic() - began_s) * 1e3


if __name__ == "__main__":
    main()
