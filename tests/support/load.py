"""Threads that read and write while a node is killed. They record misses and wrong bytes."""

import hashlib
import random
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import raykv

NBYTES = 20_000
PINNED = [f"pinned-{number}" for number in range(20)]
"""Chunks that are read all the time, so no policy evicts them."""


class Killable(Protocol):
    """A node that a test may kill."""

    def client(self, **config: object) -> raykv.Client: ...


@lru_cache(4096)
def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(NBYTES)


class Load:
    """Reads and writes until the end of the `with` block. The attributes record the results.

    Attributes:
        problems: Wrong bytes, and exceptions of the threads.
        gaps: Names of chunks of PINNED that were missed.
        reads: Number of reads of chunks of PINNED.
        hits: Number of hits on other chunks.
        names: Names of all other chunks that were ever put.
        unfinished: Names of chunks that were reserved but never committed.
    """

    def __init__(self, node: Killable, seed: int) -> None:
        self.node = node
        self.rng = random.Random(seed)
        self.problems: list[str] = []
        self.gaps: list[str] = []
        self.reads = self.hits = 0
        self.names: dict[str, None] = {}
        self.unfinished: list[str] = []
        self._stop, self._writing, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._writing.set()
        tasks = (self._read, self._write)
        self._connected = threading.Barrier(len(tasks) + 1)
        self._threads = [threading.Thread(target=self._run, args=(task,)) for task in tasks]

    def __enter__(self) -> "Load":
        with self.node.client() as client:
            assert client.put(PINNED, [content(name) for name in PINNED], chained=False).stored == len(PINNED)
            client.flush()
        for thread in self._threads:
            thread.start()
        self._connected.wait(60.0)  # both clients must connect before a test kills the node
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._writing.set()
        for thread in self._threads:
            thread.join(60.0)

    def pause_writes(self) -> None:
        """Stop the writer, and wait until its current operations have ended."""
        self._idle.clear()
        self._writing.clear()
        assert self._idle.wait(30.0), "a writer hangs"

    def resume_writes(self) -> None:
        self._writing.set()

    def _run(self, task: Callable[[raykv.Client], None]) -> None:
        try:
            with self.node.client(timeout_s=2.0) as client:
                self._connected.wait(60.0)
                while not self._stop.is_set():
                    task(client)
        except BaseException as error:
            self.problems.append(repr(error))
            raise

    def _read(self, client: raykv.Client) -> None:
        into = bytearray(NBYTES)
        for name in PINNED:
            self.reads += 1
            if not client.get_one(client.key(name), memoryview(into)):
                self.gaps.append(name)
            elif into != content(name):
                self.problems.append(f"wrong bytes of {name}")
        time.sleep(0.001)

    def _write(self, client: raykv.Client) -> None:
        """Put new chunks, read old ones so that policies value them, and leave some reservations unfinished."""
        if not self._writing.is_set():
            self._idle.set()
            self._writing.wait()
            return
        # The reading thread may be late. So read the pinned chunks here, before a put that should evict other chunks.
        client.get(PINNED, [bytearray(NBYTES) for _ in PINNED])
        fresh = [f"n{len(self.names) + number}" for number in range(4)]
        self.names.update(dict.fromkeys(fresh))
        client.put(fresh, [content(name) for name in fresh], chained=self.rng.random() < 0.5)
        known = list(self.names)
        for name in self.rng.sample(known[-300:], min(6, len(known))):
            into = bytearray(NBYTES)
            if client.get([name], [into]).hits[0]:
                self.hits += 1
                if into != content(name):
                    self.problems.append(f"wrong bytes of {name}")
        if self.rng.random() < 0.1:
            name = f"half-{len(self.unfinished)}"
            try:
                reservation = client.reserve([name], NBYTES)
            except raykv.RayKVError:
                return
            for view in reservation.views:
                view[:100] = bytes(100)
            self.unfinished.append(name)
        time.sleep(0.002)

    def assert_no_gaps(self) -> None:
        assert not self.problems, self.problems[:5]
        assert not self.gaps, f"{len(self.gaps)} gaps in {self.reads} reads"
