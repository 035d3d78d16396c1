"""Recorded requests of a live cluster: which chunks each one asked for.

Reads of shared memory send no message, so clients report them to the node of their host while a trace is recorded. A
flag in the chunk table says so; while it is off, recording costs one look at it. A `match` is a request; its keys are
those of the whole prompt.
"""

import json
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from raykv.errors import UsageError
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.types import KeyArray

FETCHED_KEYS: Final = 1 << 19
"""Most keys in one message, unless a single request has more."""
_ENTRY: Final = struct.Struct("<dII")


class TracedRequest(NamedTuple):
    """One request: its time in seconds since 1970, and its chunks, first to last."""

    at_s: float
    chunk_tokens: int
    keys: KeyArray

    def line(self, since_s: float = 0.0) -> str:
        """Write it as the planner reads it; times count from `since_s`."""
        raw = chunk_keys.to_bytes(self.keys)
        names = [raw[at : at + KEY_NBYTES].hex() for at in range(0, len(raw), KEY_NBYTES)]
        fields = {
            "at_s": round(self.at_s - since_s, 6),
            "tokens": len(names) * self.chunk_tokens,
            "chunk_tokens": self.chunk_tokens,
            "keys": names,
        }
        return json.dumps(fields, separators=(",", ":"))


def pack(requests: list[TracedRequest]) -> bytes:
    """Write requests as bytes."""
    parts: list[bytes] = []
    for each in requests:
        parts += [_ENTRY.pack(each.at_s, each.chunk_tokens, len(each.keys)), chunk_keys.to_bytes(each.keys)]
    return b"".join(parts)


def unpack(raw: bytes) -> Iterator[TracedRequest]:
    """Read what `pack` wrote. UsageError if the bytes end within a request, or a time is impossible."""
    at = 0
    while at < len(raw):
        if len(raw) - at < _ENTRY.size:
            raise UsageError("recorded requests that end in the middle")
        at_s, chunk_tokens, count = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        end = at + KEY_NBYTES * count
        if end > len(raw) or not 0.0 <= at_s < 1e12:
            raise UsageError("recorded requests that end in the middle")
        yield TracedRequest(at_s, chunk_tokens, chunk_keys.from_bytes(raw[at:end]))
        at = end
