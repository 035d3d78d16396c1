"""Measures what a join, a restart (kill -9) and a drain of a node cost a cluster under steady load.

Run by hand: `python -m benchmarks.scaling`. Takes a minute for each run.

Four supervised nodes, which count as separate hosts, get chunks of 256 KiB from two writers. One runs on a node's host
and stores there. The other has no node on its host: its chunks go to the owner of the first key. A reader on the first
host, a process of its own, reads single random chunks of the first four nodes at a steady rate. A fifth node joins
empty, is killed and started again, and is drained.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

import raykv
from raykv.client.router import Router
from raykv.config import MIB, ClientConfig, NodeConfig
from raykv.embedded import InProcessMembership
from raykv.protocol import chunk_keys
from raykv.protocol.placement import View
from raykv.supervisor.handle import NodeHandle
from raykv.types import KeyArray

SPACE: Final = raykv.Namespace(model="m")
SECRET: Final = bytes(32)
NBYTES: Final = 256 << 10
NODES, NEW = 4, "node-4"
NEAR, FAR = "writer with a node", "writer without a node"
CHAIN: Final = 2
"""Chunks in one put."""
PRELOADED: Final = 150
"""Puts to each of the first four nodes, before the load begins."""
PUTS_PER_S, READS_PER_S = 16.0, 150.0
PHASE_S: Final = 8.0
"""Length of each phase. The drain takes its own time, and a second more."""
DRAIN_NBYTES_PER_S: Final = 100 * MIB
CHECKED: Final = 400
"""Number of chunks that are read for a hit ratio."""


class Read(NamedTuple):
    at_s: float
    ms: float
    hit: bool


class Cluster:
    """Supervised nodes, and a steady load. `keys`: all stored chunks. `written`: number of stored chunks by writer."""

    def __init__(self, home: Path) -> None:
        self._home, self._stop = home, threading.Event()
        self._threads: list[threading.Thread] = []
        self.directory = InProcessMembership(member_timeout_s=5.0)
        self.nodes = {name: self.start(name) for name in (f"node-{number}" for number in range(NODES))}
        self.wait(lambda: len(self.view.members) == NODES)
        self.keys, self.written = list[KeyArray](), Counter[str]()

    def start(self, name: str) -> NodeHandle:
        storage = {"arena_nbytes": 704 * MIB, "extent_nbytes": 4 * MIB, "shm_dir": str(self._home)}
        config = {"cluster": "s", "node_id": name, "host": name, "storage": storage, "heartbeat_s": 0.25}
        return NodeHandle(NodeConfig.load(config), secret=SECRET, membership=self.directory)

    @property
    def view(self) -> View:
        return self.directory.logic.view

    def client(self, name: str, *, local: bool = True) -> raykv.Client:
        member = self.view.member(name)
        assert member is not None
        return _client(member.local_address if local else member.address)

    def put(self, client: raykv.Client, rng: random.Random, writer: str) -> None:
        keys = chunk_keys.from_bytes(rng.randbytes(16 * CHAIN))
        if client.put(keys, [os.urandom(NBYTES)] * CHAIN).stored == CHAIN:
            self.keys += [keys[place : place + 1] for place in range(CHAIN)]
            self.written[writer] += CHAIN

    def begin_load(self, rng: random.Random) -> None:
        for writer, local in ((NEAR, True), (FAR, False)):
            step = partial(self.put, self.client("node-1", local=local), random.Random(rng.random()), writer)
            self._threads.append(threading.Thread(target=_repeat, args=(step, PUTS_PER_S, self._stop.wait)))
            self._threads[-1].start()
        context, (self._results, theirs) = get_context("spawn"), get_context("spawn").Pipe()
        member = self.view.member("node-0")
        assert member is not None
        arguments = member.local_address, np.concatenate(self.keys), rng.random(), theirs
        self._reader = context.Process(target=_read_steadily, args=arguments, daemon=True)
        self._reader.start()
        self._results.recv()

    def end_load(self) -> list[Read]:
        """Stop the load, and return all reads."""
        self._stop.set()
        self._results.send(None)
        reads: list[Read] = self._results.recv()
        self._reader.join()
        return reads

    def count(self, field: str) -> int:
        return sum(int(node.stats()[field]) for node in self.nodes.values())

    def hit_ratio(self, rng: random.Random) -> float:
        """Read random chunks, but none of the last second: their owners may not know the holder yet."""
        into, keys = bytearray(NBYTES), rng.sample(self.keys[: -round(2 * PUTS_PER_S * CHAIN)], CHECKED)
        with self.client("node-0") as client:
            return sum(client.get(key, [into]).hits[0] for key in keys) / CHECKED

    def wait(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError("the cluster did not become ready")
            time.sleep(0.01)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for node in self.nodes.values():
            node.stop(unlink=True)


def _client(address: str) -> raykv.Client:
    fields = {"address": address, "secret": SECRET.hex(), "timeout_s": 2.0, "breaker_s": 0.25}
    return raykv.Client(SPACE, Router(ClientConfig.load(fields)))


def _repeat(step: Callable[[], object], per_s: float, stopped: Callable[[float], object]) -> None:
    """Call `step` at a steady rate until `stopped` returns true. It waits for as many seconds as it is given."""
    due_s = time.monotonic()
    while not stopped(max(0.0, due_s - time.monotonic())):
        due_s = max(due_s, time.monotonic() - 1.0) + 1 / per_s
        step()


def _read_steadily(address: str, keys: KeyArray, seed: float, results: Connection) -> None:
    """Read single random chunks until a message arrives. Then send all reads."""
    reads, into, rng = list[Read](), bytearray(NBYTES), random.Random(seed)

    def read() -> None:
        place, began_s = rng.randrange(len(keys)), time.monotonic()
        hit = client.get(keys[place : place + 1], [into]).hits[0]
        reads.append(Read(began_s, 1e3 * (time.monotonic() - began_s), hit))

    with _client(address) as client:
        results.send(None)
        _repeat(read, READS_PER_S, results.poll)
    results.send(reads)


@contextmanager
def cluster() -> Iterator[Cluster]:
    home = Path(tempfile.mkdtemp(prefix="rks-", dir="/dev/shm"))
    made = Cluster(home)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(home, ignore_errors=True)


def run(seed: int) -> dict[str, float]:
    figures, rng = dict[str, float](), random.Random(seed)
    with cluster() as made:
        for name in made.nodes:
            with made.client(name) as client:
                for _ in range(PRELOADED):
                    made.put(client, rng, name)
        made.begin_load(rng)
        time.sleep(2.0)
        phases = {"before": _phase()}
        announced, written = made.count("announced") - made.count("committed"), made.written.copy()
        four, keys = made.view, np.concatenate(made.keys)
        made.nodes[NEW] = made.start(NEW)
        phases["join"] = _phase()
        stored, new = made.nodes[NEW].stats()["committed"], made.written - written
        figures["chunks on the new node, of all new ones"] = stored / new.total()
        figures["... of those of the writer without a node"] = stored / new[FAR]
        five = made.view
        figures["keys of the new node, by the ring"] = (five.ring.owners(keys) == five.ring.nodes.index(NEW)).mean()
        figures["keys with another owner, 4 -> 5"] = _moved(keys, four, five)
        again = made.count("announced") - made.count("committed") - announced
        figures["keys announced again, 4 -> 5"] = again / len(keys)
        os.kill(made.nodes[NEW].pid, signal.SIGKILL)
        phases["kill -9"] = _phase()
        figures["hit ratio, 5 nodes"] = made.hit_ratio(rng)
        phases["drain"] = _phase(partial(_drain, made, figures))
        figures["keys with another owner, 5 -> 4"] = _moved(keys, five, made.view)
        figures["hit ratio, after the drain"] = made.hit_ratio(rng)
        assert not made.count("evicted"), "the arenas must hold all chunks"
        return figures | _times(phases, made.end_load())


def _phase(action: Callable[[], None] = lambda: time.sleep(PHASE_S)) -> tuple[float, float]:
    """Return when `action` began and when it ended."""
    began_s = time.monotonic()
    action()
    return began_s, time.monotonic()


def _drain(made: Cluster, figures: dict[str, float]) -> None:
    node = made.nodes[NEW]
    node.drain(DRAIN_NBYTES_PER_S)
    made.wait(lambda: node.stats()["drain"]["state"] == "done")
    progress = node.stats()["drain"]
    figures["chunks that the drain moved"], figures["chunks that it left"] = progress["moved"], progress["left"]
    made.nodes.pop(NEW).stop(unlink=True)
    time.sleep(1.0)


def _moved(keys: KeyArray, old: View, new: View) -> float:
    """Return the share of keys that another node owns."""
    before, after = (np.array(view.ring.nodes)[view.ring.owners(keys)] for view in (old, new))
    return float((before != after).mean())


def _times(phases: dict[str, tuple[float, float]], reads: list[Read]) -> dict[str, float]:
    figures = dict[str, float]()
    for name, (began_s, ended_s) in phases.items():
        some = [read for read in reads if began_s <= read.at_s < ended_s]
        for part in (50, 99):
            figures[f"read p{part}, {name}, ms"] = found = float(np.percentile([read.ms for read in some], part))
            if name != "before":
                figures[f"read p{part}, {name} / before"] = found / figures[f"read p{part}, before, ms"]
        figures[f"misses, {name}"] = sum(not read.hit for read in some) / len(some)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    runs = [run(arguments.seed + number) for number in range(arguments.runs)]
    print(f"{'':44}", *(f"{f'run {number + 1}':>8}" for number in range(len(runs))), "  median")
    for name in runs[0]:
        values = [figures[name] for figures in runs]
        print(f"{name:44}", *(f"{value:8.3f}" for value in [*values, statistics.median(values)]))


if __name__ == "__main__":
    main()
