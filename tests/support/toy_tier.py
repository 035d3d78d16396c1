"""A tier in a dictionary. A thread runs reads and writes. With `manual`, a call of `go_on` runs them."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from raykv.protocol import chunk_keys
from raykv.tier.base import Arrived, Chunk, Environment, Found, Tier, Written, is_same
from raykv.tier.segments.format import key_array, raw_keys
from raykv.tier.segments.io_threads import Callbacks
from raykv.types import Bits, KeyArray


class ToyTier(Tier):
    """A toy tier. Options: `manual` (no thread), `takes` (how many chunks the tier accepts in all)."""

    name = "toy"

    def __init__(self, options: dict[str, Any], environment: Environment) -> None:
        self.view = environment.arena
        self.chunks: dict[bytes, tuple[Found, bytes]] = {}
        self.queue: list[Callable[[], Callable[[], None]]] = []
        self.coming: dict[bytes, int] = {}
        self.takes = options.get("takes", 1 << 30)
        self.accepts_reads, self.closed = True, False
        self._changes: list[bytes] = []
        self._lock = threading.RLock()
        self._thread = None if options.get("manual") else Callbacks("raykv-toy")

    def go_on(self) -> int:
        """Run all queued operations, and call back. Returns their number."""
        with self._lock:
            work, self.queue = self.queue, []
            calls = [each() for each in work]
        for call in calls:
            call()
        return len(work)

    def _enqueue(self, work: Callable[[], Callable[[], None]]) -> None:
        self.queue.append(work)
        if self._thread is not None:
            self._thread.put(self.go_on)

    def has(self, keys: KeyArray) -> Bits:
        return np.array([found is not None for found in self.find(keys)], np.bool_)

    def find(self, keys: KeyArray) -> list[Found | None]:
        with self._lock:
            found = [self.chunks[key][0] if key in self.chunks else None for key in raw_keys(keys)]
        return [None if each is None or 0 < each.expires_s <= time.time() else each for each in found]

    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        with self._lock:
            taken = [] if self.closed else list(chunks[: self.takes])
            self.takes -= len(taken)
            self.coming |= {chunk.key: chunk.group for chunk in taken}

            def work() -> Callable[[], None]:
                written = [chunk.key in self.chunks or self._write(chunk) for chunk in taken]
                return lambda: done(taken, written)

            if taken:
                self._enqueue(work)
        return len(taken)

    def _write(self, chunk: Chunk) -> bool:
        if self.closed or chunk.key not in self.coming:  # the tier was closed or the chunk deleted meanwhile
            return False
        del self.coming[chunk.key]
        found = Found(chunk.nbytes, chunk.checksum, *chunk[4:])
        self.chunks[chunk.key] = found, bytes(self.view[chunk.offset : chunk.offset + chunk.nbytes])
        self._changes.append(chunk.key)
        return True

    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        def work() -> Callable[[], None]:
            arrived = [
                not self.closed and self._read(*each) for each in zip(raw_keys(keys), found, offsets, strict=True)
            ]
            return lambda: done(arrived)

        with self._lock:
            if self.closed or not self.accepts_reads:
                return False
            self._enqueue(work)
        return True

    def _read(self, key: bytes, found: Found | None, offset: int) -> bool:
        known, content = self.chunks.get(key, (None, b""))
        if known is None or not is_same(found, known.nbytes, known.checksum):
            return False
        if xxhash.xxh3_64_intdigest(content) != known.checksum:
            self._remove([key])
            return False
        self.view[offset : offset + len(content)] = content
        return True

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._changes += keys
        return sum(self.chunks.pop(key, None) is not None for key in keys)

    def delete(self, keys: KeyArray) -> int:
        with self._lock:
            for key in raw_keys(keys):
                self.coming.pop(key, None)
            return self._remove(raw_keys(keys))

    def drop(self, group: int) -> int:
        with self._lock:
            self.coming = {key: number for key, number in self.coming.items() if number != group}
            return self._remove([key for key, (found, _) in self.chunks.items() if found.group == group])

    def keys(self) -> KeyArray:
        return key_array(list(self.chunks)) if self.chunks else chunk_keys.empty()

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        with self._lock:
            changes, self._changes = list(dict.fromkeys(self._changes)), []
            added = [key for key in changes if key in self.chunks]
        return key_array(added), key_array([key for key in changes if key not in added])

    def used_nbytes(self, group: int | None = None) -> int:
        return sum(found.nbytes for found, _ in self.chunks.values() if group in (None, found.group))

    def stats(self) -> dict[str, Any]:
        return {"state": "off" if self.closed else "on", "chunks": len(self.chunks)}

    def close(self) -> None:
        with self._lock:
            self.closed = True
        self.go_on()
        if self._thread is not None:
            self._thread.close([], 5.0)
