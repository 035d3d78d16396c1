"""A client process: it reads and writes as an engine's connector does, and checks every byte and every deadline.

A second client in the same process answers the test's own questions (`write`, `read`).
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

import raykv
from tests.chaos.children import fields_of_child, serve

T = TypeVar("T")

SPACE = raykv.Namespace(model="chaos")
TIMEOUTS_S = (0.1, 0.5, 2.0)
RETRY_S = 0.2
CHUNKS = 4
"""Chunks of one prompt."""
PAUSE_S = 0.03
MOST_PROBLEMS = 20
LATE_S = 0.05
"""An operation may end this long after its deadline."""


def content(name: str, nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the bytes of a chunk. Each word differs from all others of the chunk, and from those of other chunks."""
    seed = np.uint64(xxhash.xxh3_64_intdigest(name.encode()) | 1)
    return (np.arange(1, nbytes // 8 + 1, dtype=np.uint64) * seed).view(np.uint8)


def waits_ns() -> dict[int, int]:
    """Return how long each thread of this process was ready to run while other threads had the processors."""
    waits: dict[int, int] = {}
    for path in Path("/proc/self/task").iterdir():
        try:
            waits[int(path.name)] = int((path / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            pass  # the thread has ended
    return waits


def _waited_s(before: dict[int, int]) -> float:
    """Return how long this thread has waited for a processor since `before`, plus the longest wait of another thread.

    An operation that uses helper threads waits for its own turn and for theirs.
    """
    me = threading.get_native_id()
    waits = {thread: wait - before.get(thread, 0) for thread, wait in waits_ns().items()}
    return 1e-9 * (waits.pop(me, 0) + max(waits.values(), default=0))


class Load:
    """Operations one after the other, until `stop` is set.

    Attributes:
        counts: Operations by name; chunks "hit", "missed", "stored", "skipped"; gets by data path, such as "over tcp".
        problems: Wrong bytes, exceptions, and operations that ended too late.
        overruns_s: How long after its deadline the latest operation ended: by the clock, and without the time in which
            other processes had the processors.
    """

    def __init__(
        self, connect: Callable[[], raykv.Client], *, name: str, seed: str, nbytes: int, prompts: int, fresh: float
    ) -> None:
        """Use `prompts` prompts again and again. `fresh`: share of prompts that nobody has asked for before."""
        self._connect, self._name, self._nbytes, self._prompts, self._share = connect, name, nbytes, prompts, fresh
        self._rng = random.Random(seed)
        self._buffers = [np.empty(nbytes, np.uint8) for _ in range(CHUNKS)]
        self._fresh = 0
        self.stop = threading.Event()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.overruns_s = [0.0, 0.0]

    def run(self) -> None:
        """Connect, with retries as the connector makes them, and work."""
        client = None
        while client is None and not self.stop.is_set():
            try:
                client = self._connect()
            except raykv.TransientError:
                self.stop.wait(RETRY_S)
        if client is None:
            return
        with client:
            while not self.stop.is_set():
                try:
                    self._turn(client)
                except Exception as error:  # noqa: BLE001 - the bar is that nothing is raised
                    self._add_problem(f"{type(error).__name__}: {error}")
                self.stop.wait(self._rng.uniform(0.0, 2 * PAUSE_S))

    def _add_problem(self, text: str) -> None:
        self.counts["problems"] += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{self._name} at {time.monotonic():.3f}: {text}")

    def _timed(self, name: str, timeout_s: float, call: Callable[[], T]) -> T | None:
        """Run one operation. Returns None if it raises."""
        before, began_s = waits_ns(), time.monotonic()
        result = None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - see `run`
            self._add_problem(f"{name}: {type(error).__name__}: {error}")
        over_s = time.monotonic() - began_s - timeout_s
        self.counts[name] += 1
        if over_s > 0:
            ours_s = over_s - _waited_s(before)
            self.overruns_s = [max(pair) for pair in zip(self.overruns_s, (over_s, ours_s), strict=True)]
            if ours_s > LATE_S:
                self._add_problem(f"{name} overran {timeout_s} s by {over_s:.3f} s, {ours_s:.3f} s of it on its own")
        return result

    def _turn(self, client: raykv.Client) -> None:
        """One prompt: match, get the stored prefix, put the rest."""
        rng, timeout_s = self._rng, self._rng.choice(TIMEOUTS_S)
        prompt = f"shared-{min(rng.randrange(self._prompts), rng.randrange(self._prompts))}"
        if rng.random() < self._share:
            self._fresh += 1
            prompt = f"{self._name}-{self._fresh}"
        names = names_of(prompt)
        keys = client.keys(names)
        if rng.random() < 0.2:
            self._timed("locate", 0.0, lambda: client.locate(keys, timeout_s=0.0))
        if rng.random() < 0.1:
            self._timed("exists", timeout_s, lambda: client.exists(keys, timeout_s=timeout_s))
        match = self._timed("match", timeout_s, lambda: client.match(keys, timeout_s=timeout_s))
        got = 0
        if match is not None and match.count:
            got = self._get(client, keys[: match.count], names, match, timeout_s)
        self.counts["hit"] += got
        self.counts["missed"] += CHUNKS - got
        if got < CHUNKS:
            self._put(client, keys, names, got, timeout_s)

    def _get(self, client: raykv.Client, keys: Any, names: Sequence[str], match: raykv.Match, timeout_s: float) -> int:
        into = self._buffers[: len(keys)]
        for buffer in into:
            buffer[:] = 0
        result = self._timed("get", timeout_s, lambda: client.get(keys, into, match=match, timeout_s=timeout_s))
        if result is None:
            return 0
        self.counts.update(f"over {path}" for path in result.nbytes_by_path)
        for hit, buffer, name in zip(result.hits, into, names, strict=False):
            if hit and not np.array_equal(buffer, content(name, self._nbytes)):
                self._add_problem(f"WRONG BYTES of {name}")
        return result.prefix

    def _put(self, client: raykv.Client, keys: Any, names: Sequence[str], first: int, timeout_s: float) -> None:
        values = [content(name, self._nbytes) for name in names[first:]]
        parent, wait = (keys[first - 1 : first] if first else None), self._rng.random() < 0.5
        options: dict[str, Any] = {"parent": parent, "depth": first, "wait": wait, "timeout_s": timeout_s}
        result = self._timed("put", timeout_s, lambda: client.put(keys[first:], values, **options))
        if result is not None and not wait:
            result = self._timed("flush", 0.05, lambda: client.flush(timeout_s=0.05))
        if result is not None:
            self.counts["stored"] += result.stored
            self.counts["skipped"] += result.skipped

    def report(self) -> dict[str, Any]:
        """Return the results since the last report."""
        counts, self.counts = self.counts, Counter()
        problems, self.problems = self.problems, []
        overruns_s, self.overruns_s = self.overruns_s, [0.0, 0.0]
        return {"counts": counts, "problems": problems, "overruns_s": overruns_s}


def names_of(prompt: str) -> list[str]:
    return [f"{prompt}/{number}" for number in range(CHUNKS)]


class Probe:
    """Answers the test's questions with a client of its own."""

    def __init__(self, connect: Callable[[], raykv.Client], address: str, nbytes: int, prompts: int) -> None:
        """Use the client that `connect` returns. It is connected to the node at `address`."""
        self._connect, self._address, self._nbytes = connect, address, nbytes
        self._client: raykv.Client | None = None
        self._shared = [name for number in range(prompts) for name in names_of(f"shared-{number}")]

    def _connected(self, space: str = "") -> raykv.Client:
        """Return the client, for the namespace of the load or another one."""
        if self._client is None:
            self._client = self._connect()
        return self._client.using(raykv.Namespace(model=space)) if space else self._client

    def write(self, names: list[str], space: str = "") -> bool:
        """Store chunks. Returns whether all are stored."""
        try:
            values = [content(name, self._nbytes) for name in names]
            done = self._connected(space).put(names, values, chained=False, timeout_s=0.5)
        except raykv.TransientError:
            return False
        return done.stored + done.existed == len(names)

    def read(self, names: list[str], space: str = "") -> list[bool]:
        """Read chunks. Returns which arrived with the right bytes."""
        into = [np.empty(self._nbytes, np.uint8) for _ in names]
        try:
            hits = self._connected(space).get(names, into, timeout_s=0.5).hits
        except raykv.TransientError:
            return [False] * len(names)
        pairs = zip(hits, names, into, strict=True)
        return [hit and np.array_equal(buffer, content(name, self._nbytes)) for hit, name, buffer in pairs]

    def read_by_path(self, names: list[str]) -> dict[str, int]:
        """Read chunks. Returns the bytes that arrived over each data path. Wrong bytes raise AssertionError."""
        into = [np.empty(self._nbytes, np.uint8) for _ in names]
        result = self._connected().get(names, into, timeout_s=5.0)
        for hit, name, buffer in zip(result.hits, names, into, strict=True):
            assert not hit or np.array_equal(buffer, content(name, self._nbytes)), name
        return result.nbytes_by_path

    def drop(self, space: str) -> int:
        """Drop a namespace. Returns the number of copies that were dropped."""
        return self._connected(space).drop_namespace()

    def owners(self, names: list[str]) -> list[str]:
        """Return the owner of each chunk in the view of this host."""
        client = self._connected()
        ring = client.view().ring
        return [ring.nodes[owner] for owner in ring.owners(client.keys(names))]

    def stats(self) -> dict[str, Any]:
        """Return the counters of the node that this client is connected to."""
        router = self._connected().router
        found = router.stats(router.deadline(0.5)).values()
        return next((node for node in found if node.get("local_address") == self._address), {"epoch": "no answer"})

    def here(self) -> list[int]:
        """Return which chunks of the shared prompts are in this host's memory."""
        return self._held(0.0)

    def found(self) -> list[int]:
        """Return which chunks of the shared prompts this host finds in the cluster."""
        return self._held(0.5)

    def _held(self, timeout_s: float) -> list[int]:
        try:
            return np.flatnonzero(self._connected().exists(self._shared, timeout_s=timeout_s)).tolist()
        except raykv.TransientError:
            return []


def main() -> None:
    fields = fields_of_child()

    def connect() -> raykv.Client:
        return raykv.connect(SPACE, address=fields["address"], secret=fields["secret"])

    load = Load(connect, **{name: fields[name] for name in ("name", "seed", "nbytes", "prompts", "fresh")})
    probe = Probe(connect, fields["address"], fields["nbytes"], fields["prompts"])
    thread = threading.Thread(target=load.run)

    def start() -> bool:
        thread.start()
        return True

    questions = (probe.write, probe.read, probe.read_by_path, probe.drop, probe.owners, probe.stats)
    questions += (probe.here, probe.found)
    serve({"start": start, "report": load.report, **{question.__name__: question for question in questions}})
    load.stop.set()
    if thread.ident is not None:
        thread.join(10.0)
    os._exit(0)


if __name__ == "__main__":
    main()
