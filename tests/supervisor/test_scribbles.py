"""Another process of the user writes random bytes over a node's chunk table, under load. The node must serve on."""

import random
import threading
import time
from pathlib import Path

import pytest

from raykv.errors import RayKVError
from raykv.memory.layout import HEADER, Layout
from tests.supervisor.test_handle import Supervised
from tests.support.nodes import content

ROWS, EXTENTS, NBYTES = 4096, 32, 5000
SOUND_S = 5.0
ROUNDS = 64


def scribble(table: Path, rng: random.Random) -> str:
    """Overwrite up to 64 bytes of the table. Returns what was overwritten."""
    layout = Layout(ROWS, EXTENTS)
    name = rng.choice(sorted(layout.columns))
    begin, length = {
        "header": (0, HEADER.itemsize),
        "namespaces": (layout.namespaces, 2000),
        "extents": (layout.extent_slots, 4 * EXTENTS),
        "index": (rng.choice(layout.indexes), 4 * layout.index_size),
        "records": (layout.records, 64 * 200),
        name: (layout.columns[name], 400),
    }[kind := rng.choice(["header", "header", "namespaces", "extents", "index", "records", "records", name])]
    at, some = begin + rng.randrange(length), rng.randbytes(rng.choice([1, 4, 16, 64]))
    with open(table, "r+b") as file:
        file.seek(at)
        file.write(some)
    return f"{kind}, {len(some)} bytes at {at}"


class Load:
    """Stores and reads chunks all the time. Readers compare checksums, since a damaged row may name other bytes."""

    def __init__(self, made: Supervised) -> None:
        self._made, self._stop = made, threading.Event()
        self.wrong: list[str] = []
        self.reads = self.hits = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rng, number = random.Random(1), 0
        while not self._stop.is_set():
            try:
                with self._made.client(verify="always", timeout_s=0.5) as client:
                    while not self._stop.is_set():
                        client.put([f"load-{number}"], [content(f"load-{number}", NBYTES)])
                        number += 1
                        self.read(client, [f"load-{rng.randrange(number)}" for _ in range(8)])
            except RayKVError:
                time.sleep(0.02)  # the node restarts

    def read(self, client, keys: list[str]) -> bool:
        """Read chunks, and record those with wrong bytes. Returns whether all were hits."""
        into = [bytearray(NBYTES) for _ in keys]
        hits = client.get(keys, into).hits
        self.reads, self.hits = self.reads + len(keys), self.hits + sum(hits)
        self.wrong += [
            key for key, hit, got in zip(keys, hits, into, strict=True) if hit and got != content(key, NBYTES)
        ]
        return all(hits)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def serves(made: Supervised, load: Load, name: str) -> bool:
    """Whether the node stores new chunks and gives them back."""
    try:
        with made.client(verify="always", timeout_s=1.0) as client:
            keys = [f"{name}-{number}" for number in range(5)]
            return client.put(keys, [content(key, NBYTES) for key in keys]).stored == 5 and load.read(client, keys)
    except RayKVError:
        return False


@pytest.mark.slow
def test_a_node_is_sound_again_soon_after_every_scribble(shm_dir, rng: random.Random):
    made = Supervised(shm_dir, max_chunks=ROWS)
    load = Load(made)
    try:
        longest_s = 0.0
        for number in range(ROUNDS):
            what, began_s, tries = scribble(shm_dir / "raykv-p-n.table", rng), time.monotonic(), 0
            while not serves(made, load, f"{number}-{tries}"):
                tries += 1
                assert time.monotonic() - began_s < SOUND_S, f"round {number}: {what}"
                time.sleep(0.02)
            longest_s = max(longest_s, time.monotonic() - began_s)
        print(f"longest {longest_s:.2f} s, {made.node.starts} starts, {load.hits} hits of {load.reads} reads")
    finally:
        load.stop()
        made.node.stop(unlink=True)
    assert load.wrong == []
    assert load.hits > 100
