"""Recorded requests of a live cluster, with the chunks of each request.

Reads of shared memory send no message. So clients report requests to the node on their host while a trace is recorded.
A flag in the chunk table turns recording on. One call of `match` is one request, with the keys of the whole prompt.
"""

import json
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from raykv.errors import UsageError
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.types import KeyArray

_ENTRY: Final = struct.Struct("<dII")


class TracedRequest(NamedTuple):
    """One request: its time in seconds since 1970, and the keys of its chunks in order."""

    at_s: float
    chunk_tokens: int
    keys: KeyArray

    def line(self, since_s: float = 0.0) -> str:
        """Return the JSON line that the planner reads. Its time is relative to `since_s`."""
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
    """Encode requests as bytes."""
    parts: list[bytes] = []
    for each in requests:
        parts += [_ENTRY.pack(each.at_s, each.chunk_tokens, len(each.keys)), chunk_keys.to_bytes(each.keys)]
    return b"".join(parts)


def unpack(raw: bytes) -> Iterator[TracedRequest]:
    """Decode the output of `pack`. Raises UsageError if a request is truncated or has an impossible time."""
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
