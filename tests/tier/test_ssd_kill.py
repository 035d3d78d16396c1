"""After kills at random moments, chunks reported as written are there, and chunks reported as deleted are not.

A child writes, reads, deletes and drops chunks, and reports each step through a pipe. The parent kills it, and starts
the next child on the same files. From time to time, the parent checks all chunks.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.soak import soak
from tests.support.tiers import SEGMENT, Arena, SsdDriver, all_keys, content_of, keys_for, wait_for

SIZES = [1000, 9000, 30_000, 100_000]
SMALL, LARGE = 10, 4000
"""Number of segments on each of two paths. With SMALL, segments are reclaimed all the time; with LARGE, never."""

ZYGOTE = """
import os, sys
from tests.tier.test_ssd_kill import child
from pathlib import Path
for line in sys.stdin:
    path, segments, seed = line.split()
    pid = os.fork()
    if not pid:
        child(Path(path), int(segments), int(seed))
        os._exit(0)
    os.write(1, b"pid %d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"end\\n")
"""


def size_of(key: bytes) -> int:
    return SIZES[key[0] % len(SIZES)]


def driven_at(path: Path, segments: int, arena: Arena | None = None) -> SsdDriver:
    paths = [path / "a", path / "b"]
    return SsdDriver(paths, arena, capacity_nbytes=segments * SEGMENT, max_chunks=200_000, depth=3)


def child(path: Path, segments: int, seed: int) -> None:
    """Write, read, delete and drop chunks until killed."""
    rng = random.Random(seed)
    say = lambda what, keys: os.write(1, b"".join(b"%s %s\n" % (what, key.hex().encode()) for key in keys))  # noqa: E731
    driven = driven_at(path, segments).started()
    say(b"started", [b""])
    mine = keys_for(3000, seed)
    written, tried = list[bytes](), set[bytes]()
    under_way = threading.Semaphore(8)

    def done(chunks, good):
        ready = [chunk.key for chunk, is_there in zip(chunks, good, strict=True) if is_there]
        say(b"written", ready)
        written.extend(ready)
        under_way.release()

    while True:
        action = rng.random()
        if action < 0.7 and mine:
            some = [mine.pop() for _ in range(min(len(mine), rng.randrange(1, 12)))]
            say(b"writing", some)
            tried.update(some)
            under_way.acquire()
            if not driven.tier.write([driven.chunk(key, size_of(key), group=key[1] % 3) for key in some], done):
                under_way.release()
                mine += some
        elif action < 0.9 and written:
            some = rng.sample(written, min(len(written), 5))
            for key in some:
                got = driven.read([key], size_of(key))[0]
                if got not in (None, content_of(key, size_of(key))):
                    say(b"wrong", [key])
        elif action < 0.99 and written:
            some = rng.sample(written, min(len(written), 3))
            say(b"deleting", some)
            driven.delete(some)
            if driven.flush(10.0):
                say(b"deleted", some)
        elif written:
            here = [key for key in all_keys(driven.tier) | tried if key[1] % 3 == 2]
            say(b"deleting", here)
            driven.tier.drop(2)
            if driven.flush(10.0):
                say(b"deleted", here)


class Zygote:
    """A process that forks children. They start quickly, because this process has already imported all modules."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdout is not None
        self._out = os.fdopen(os.dup(self.process.stdout.fileno()), "rb", buffering=1 << 20)

    def run(self, path: Path, segments: int, seed: int, after_s: float) -> list[str]:
        """Start a child, and kill it after `after_s` seconds. Returns the lines that the child has written."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path} {segments} {seed}\n".encode())
        lines, pid = [], 0
        while (line := self._out.readline().decode().strip()) != "end":
            assert line, "the child's parent died"
            if line.startswith("pid"):
                pid = int(line.split()[1])
                threading.Timer(after_s, kill, [pid]).start()
            else:
                lines.append(line)
        return lines

    def close(self) -> None:
        self._out.close()
        self.process.kill()
        self.process.communicate()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Model:
    """Knows which chunks must be there, and which must not."""

    def __init__(self) -> None:
        self.state: dict[bytes, str] = {}
        self.order: list[bytes] = []

    def take_in(self, lines: list[str]) -> None:
        for line in lines:
            what, _, text = line.partition(" ")
            key = bytes.fromhex(text)
            assert what != "wrong", text
            if what == "written":
                self.order.append(key)
            if what == "deleting" and self.state.get(key) == "deleted":
                continue
            if what == "written" and self.state.get(key) in ("deleting", "deleted"):
                continue  # a late report: the deletion had already begun
            if what != "started":
                self.state[key] = what

    def check(self, driven: SsdDriver, *, must_be_there: set[bytes]) -> int:
        here = all_keys(driven.tier)
        state = self.state
        assert not {key for key in here if state.get(key) == "deleted"}, "deleted, and back again"
        assert here <= state.keys()
        assert not {key for key in must_be_there if state[key] == "written"} - here, "written, and gone"
        for size in SIZES:
            keys = [key for key in here if size_of(key) == size]
            for first in range(0, len(keys), 50):
                some = keys[first : first + 50]
                for key, got in zip(some, driven.read(some, size), strict=True):
                    assert got == content_of(key, size) or (got is None and not driven.has([key])[0])  # was reclaimed
        assert driven.tier.stats()["errors"] == driven.tier.stats()["corrupt"] == 0
        return len(here)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [pytest.param(30, id="quick"), pytest.param(0, id="soak", marks=pytest.mark.soak)])
@pytest.mark.parametrize("segments", [SMALL, LARGE])
def test_killed_at_random_moments(tmp_path: Path, rng: random.Random, segments: int, rounds: int):
    rounds = (rounds or soak("kills", 200)) // 2  # SMALL and LARGE share the rounds
    zygote, model, arena = Zygote(), Model(), Arena(64 << 20)
    deleted = seen = 0
    scale = 1.0
    try:
        for number in range(rounds):
            life_s = rng.choice([0.02, 0.05, 0.1, 0.2, 0.3]) * rng.random() + 0.01
            lines = zygote.run(tmp_path, segments, rng.randrange(1 << 30), scale * life_s)
            model.take_in(lines)
            deleted += sum(line.startswith("deleted") for line in lines)
            if number >= rounds // 3 and not deleted:
                scale *= 2  # a machine on which no child gets as far as a deletion
            if number % 3 and number != rounds - 1:
                continue  # the next child starts on the files that this child left
            with driven_at(tmp_path, segments, arena).started() as driven:
                wait_for(lambda: driven.tier.stats()["state"] == "on")
                # With SMALL, the oldest segments are reclaimed all the time. So only the newest chunks must be there.
                newest = model.order if segments == LARGE else model.order[-10:]
                seen += model.check(driven, must_be_there=set(newest))
                if segments == SMALL:
                    model.order = []  # the parent's tier may reclaim chunks, and does not report which
    finally:
        zygote.close()
    print(f"{seen} chunks seen, {deleted} deletions told, {len(model.state)} keys, lives times {scale:g}")
    assert seen
    assert deleted
