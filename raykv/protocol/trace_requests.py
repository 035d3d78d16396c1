"""Recorded requests of a live cluster, with the chunks of each request.

Clients read shared memory without a message to the node. So while a node records a trace, the clients on its host
report their requests to the node. A flag in the chunk table turns recording on. Each call of `match` is one request.
"""

import json
from typing import Annotated

import msgspec

from raykv.protocol.chunk_keys import KEY_NBYTES


class TracedRequest(msgspec.Struct, array_like=True):
    """One request: its time in seconds since 1970, tokens per chunk, and the keys of its chunks, 16 bytes each."""

    at_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e12)]
    chunk_tokens: int
    keys: bytes

    def line(self) -> str:
        """Return the request as one line of JSON, the input format of the planner."""
        names = [self.keys[at : at + KEY_NBYTES].hex() for at in range(0, len(self.keys), KEY_NBYTES)]
        fields = {
            "at_s": round(self.at_s, 6),
            "tokens": len(names) * self.chunk_tokens,
            "chunk_tokens": self.chunk_tokens,
            "keys": names,
        }
        return json.dumps(fields, separators=(",", ":"))
