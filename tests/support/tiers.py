"""Support for tests of tiers: an arena, names of quota groups, and calls that wait for their callback."""

import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from raykv.config import FileTierConfig, SsdConfig
from raykv.tier.base import Chunk, Environment, Tier
from raykv.tier.file.tier import FileTier
from raykv.tier.segments.format import key_array
from raykv.tier.ssd.tier import SsdTier

BLOCK = 4096
SEGMENT = PACK = 1 << 20
WAIT_S = 60.0
"""Timeout of waits and of disk operations. On a busy machine, a disk can stall for seconds."""
PATIENT = {"io_timeout_s": WAIT_S}


class Names:
    """Four quota groups. `texts[number]` is the namespace of a group as JSON."""

    def __init__(self) -> None:
        self.texts: list[bytes] = [b'{"model":"m%d"}' % number for number in range(4)]

    def text(self, group: int) -> bytes:
        return self.texts[group]

    def number(self, text: bytes) -> int | None:
        return self.texts.index(text) if text in self.texts else None


class Arena:
    """Page-aligned memory, handed out slot by slot."""

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self.map)
        self._next, self._lock = 0, threading.Lock()

    def slot(self, nbytes: int) -> int:
        """Offset of the next slot. After the end of the arena, slots are reused from the beginning."""
        size = -(-max(1, nbytes) // BLOCK) * BLOCK
        with self._lock:
            if self._next + size > len(self.view):
                self._next = 0
            self._next += size
            return self._next - size

    def put(self, content: bytes) -> int:
        offset = self.slot(len(content))
        self.view[offset : offset + len(content)] = content
        return offset


def content_of(key: bytes, nbytes: int) -> bytes:
    """The content of a chunk: random bytes with the key as seed."""
    return random.Random(key).randbytes(nbytes)


class Driver:
    """A tier, with calls that wait for their callback. Each callback must come exactly once."""

    def __init__(self, tier: Tier, arena: Arena) -> None:
        self.tier, self.arena = tier, arena

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    @property
    def state(self) -> str:
        return str(self.tier.stats()["state"])

    def started(self, timeout_s: float = WAIT_S) -> Self:
        wait_for(lambda: self.state != "starting", timeout_s)
        return self

    def chunk(self, key: bytes, nbytes: int, **fields: Any) -> Chunk:
        content = content_of(key, nbytes)
        fields = {"group": 0, **fields}
        return Chunk(key, self.arena.put(content), nbytes, xxhash.xxh3_64_intdigest(content), **fields)

    def write(self, chunks: Sequence[Chunk], timeout_s: float = WAIT_S) -> list[bool]:
        """Write chunks. While the queue is full, wait. Returns for each chunk whether it was written."""
        written: list[bool] = []
        while len(written) < len(chunks):
            event, results = threading.Event(), []

            def done(taken: Sequence[Chunk], good: Sequence[bool], event=event, results=results) -> None:
                results.extend(good)
                event.set()

            rest = chunks[len(written) :]
            taken = [0]

            def some(rest=rest, taken=taken, done=done) -> bool:
                taken[0] = self.tier.write(rest, done)
                return taken[0] > 0

            wait_for(some, timeout_s)
            assert event.wait(timeout_s)
            assert len(results) == taken[0]
            written += results
        return written

    def put(self, keys: Sequence[bytes], nbytes: int, **fields: Any) -> None:
        for first in range(0, len(keys), 16):
            assert all(self.write([self.chunk(key, nbytes, **fields) for key in keys[first : first + 16]]))

    def read(self, keys: Sequence[bytes], nbytes: int, timeout_s: float = WAIT_S) -> list[bytes | None]:
        """Read chunks. Returns the bytes of each chunk, or None if it was not read."""
        offsets = [self.arena.slot(nbytes) for _ in keys]
        event, results = threading.Event(), []

        def done(arrived: Sequence[bool]) -> None:
            results.extend(arrived)
            event.set()

        assert self.tier.read(key_array(keys), self.tier.find(key_array(keys)), offsets, done)
        assert event.wait(timeout_s)
        return [
            bytes(self.arena.view[offset : offset + nbytes]) if good else None
            for offset, good in zip(offsets, results, strict=True)
        ]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.has(key_array(keys)).tolist()

    def delete(self, keys: Sequence[bytes]) -> int:
        return self.tier.delete(key_array(keys))


class SsdDriver(Driver):
    """An SSD tier of 16 segments."""

    tier: SsdTier

    def __init__(self, path: Path | Sequence[Path], arena: Arena | None = None, **fields: Any) -> None:
        paths = (path,) if isinstance(path, Path) else tuple(path)
        config = {"paths": paths, "capacity_nbytes": 16 * SEGMENT, "segment_nbytes": SEGMENT, **PATIENT, **fields}
        arena = arena or Arena()
        super().__init__(SsdTier(SsdConfig.load(config), environment(arena)), arena)

    def flush(self, timeout_s: float) -> bool:
        """Wait until no tombstone is pending. Returns False at a timeout, or if only drives that are off have any."""
        shared, until_s = self.tier._shared, time.monotonic() + timeout_s
        while True:
            with shared.lock:
                pending = [drive for drive in shared.drives if drive.has_pending_tombstones]
                if not pending or time.monotonic() > until_s or not any(drive.on for drive in pending):
                    return not pending
            time.sleep(0.002)


class FileDriver(Driver):
    """A file tier of 64 packs that scans its directory often."""

    tier: FileTier

    def __init__(self, path: Path, writer: str = "a", arena: Arena | None = None, **fields: Any) -> None:
        config = {"path": path, "capacity_nbytes": 64 * PACK, "pack_nbytes": PACK, "scan_s": 0.03, "seal_s": 0.1}
        arena = arena or Arena(16 << 20)
        super().__init__(
            FileTier(FileTierConfig.load({**config, **PATIENT, **fields}), environment(arena, writer)), arena
        )
        self.folder = path / "raykv"

    def on(self) -> Self:
        wait_for(lambda: self.state == "on")
        return self

    def sees(self, keys: list[bytes], *, here: bool = True) -> None:
        wait_for(lambda: self.has(keys) == [here] * len(keys))

    def packs(self) -> list[Path]:
        return sorted(self.folder.glob("*.pack"))

    def right(self, keys: list[bytes], nbytes: int) -> list[bool]:
        """Read chunks, and check their bytes. Returns for each chunk whether it was read."""
        right: list[bool] = []
        step = max(1, (4 << 20) // nbytes)  # few enough that all fit into the arena
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            for key, content in zip(some, self.read(some, nbytes), strict=True):
                assert content is None or content == content_of(key, nbytes)
                right.append(content is not None)
        return right


def environment(arena: Arena, node: str = "raykv-test-n0") -> Environment:
    return environment_of(arena.view, node)


def environment_of(view: memoryview, node: str = "raykv-test-n0") -> Environment:
    return Environment(view, node, Names())


def keys_for(count: int, salt: int = 0) -> list[bytes]:
    return [xxhash.xxh3_128_digest(b"%d %d" % (salt, number)) for number in range(count)]


def wait_for(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds."""
    event = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        event.wait(0.005)
    raise AssertionError(f"not within {timeout_s} s")


def all_keys(tier: Tier) -> set[bytes]:
    return {row.tobytes() for row in np.ascontiguousarray(tier.keys())}
