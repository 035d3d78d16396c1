"""A trace of a live cluster: which chunks each request asked for, as its clients tell the node of their host.

Reads of shared memory leave no message, so who reads tells: a flag in the chunk table says when somebody wants to know,
and costs a look at it while nobody does. A `match` is a request: its keys are those of the whole prompt.
"""

import json
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from raykv.errors import UsageError
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.types import KeyArray

SEND_S: Final = 0.2
SEND_KEYS: Final = 1 << 14
"""A client tells its node after so long, or of so many keys at once, whichever is sooner."""
MAX_TAPE_KEYS: Final = 1 << 21
"""Keys of requests that nobody has fetched from a node yet; beyond that requests are left out, and counted."""
TAKEN_KEYS: Final = 1 << 19
"""Keys that travel in one message at most, but for one request that has more."""
_ENTRY: Final = struct.Struct("<dII")


class Asked(NamedTuple):
    """One request.

    Attributes:
        at_s: When, in seconds since 1970.
        chunk_tokens: Of the namespace.
        keys: Of its chunks, first to last.
    """

    at_s: float
    chunk_tokens: int
    keys: KeyArray

    def line(self, since_s: float = 0.0) -> str:
        """As the planner reads it; times count from `since_s`."""
        raw = chunk_keys.to_bytes(self.keys)
        names = [raw[at : at + KEY_NBYTES].hex() for at in range(0, len(raw), KEY_NBYTES)]
        fields = {
            "at_s": round(self.at_s - since_s, 6),
            "tokens": len(names) * self.chunk_tokens,
            "chunk_tokens": self.chunk_tokens,
            "keys": names,
        }
        return json.dumps(fields, separators=(",", ":"))


def pack(requests: list[Asked]) -> bytes:
    """Requests as bytes; `unpack` reads them."""
    parts: list[bytes] = []
    for each in requests:
        parts += [_ENTRY.pack(each.at_s, each.chunk_tokens, len(each.keys)), chunk_keys.to_bytes(each.keys)]
    return b"".join(parts)


def unpack(raw: bytes) -> Iterator[Asked]:
    """The requests in some bytes.

    Raises:
        UsageError: They are none.
    """
    at = 0
    while at < len(raw):
        if len(raw) - at < _ENTRY.size:
            raise UsageError("a record of requests that ends in the middle")
        at_s, chunk_tokens, count = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        end = at + KEY_NBYTES * count
        if end > len(raw) or not 0.0 <= at_s < 1e12:
            raise UsageError("a record of requests that ends in the middle")
        yield Asked(at_s, chunk_tokens, chunk_keys.from_bytes(raw[at:end]))
        at = end


class Recorder:
    """A client's part: gathers a few requests, and sends them. Thread-safe."""

    def __init__(self, send: Callable[[bytes], None], chunk_tokens: int) -> None:
        """Args: send: Tells the node; its errors are its own."""
        self._send, self._chunk_tokens = send, chunk_tokens
        self._waiting: list[Asked] = []
        self._keys = 0
        self._sent_s = -SEND_S
        self._lock = threading.Lock()

    def note(self, keys: KeyArray, *, today_s: float, now_s: float) -> None:
        """A request asked for these."""
        with self._lock:
            self._waiting.append(Asked(today_s, self._chunk_tokens, np.array(keys)))
            self._keys += len(keys)
            if self._keys < SEND_KEYS and now_s < self._sent_s + SEND_S:
                return
            requests, self._waiting, self._keys, self._sent_s = self._waiting, [], 0, now_s
        self._send(pack(requests))


class Tape:
    """A node's part: what clients told, until somebody fetches it. Thread-safe.

    Attributes:
        left_out: Requests that there was no room for.
    """

    def __init__(self) -> None:
        self._requests: deque[Asked] = deque()
        self._keys = self.left_out = 0
        self._lock = threading.Lock()

    def add(self, raw: bytes) -> None:
        """What a client told.

        Raises:
            UsageError: It is damaged. What comes before the damage is kept.
        """
        for each in unpack(raw):
            with self._lock:
                weight = max(1, len(each.keys))
                if self._keys + weight > MAX_TAPE_KEYS:
                    self.left_out += 1
                    continue
                self._requests.append(each)
                self._keys += weight

    def take(self, most_keys: int = MAX_TAPE_KEYS) -> tuple[list[Asked], int]:
        """All of it, or as much as has so many keys, and how many were left out since the last time."""
        requests: list[Asked] = []
        with self._lock:
            taken, left_out = 0, self.left_out
            while self._requests and (not taken or taken + max(1, len(self._requests[0].keys)) <= most_keys):
                each = self._requests.popleft()
                requests.append(each)
                taken += max(1, len(each.keys))
            self._keys -= taken
            self.left_out = 0
        return requests, left_out

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._requests)
