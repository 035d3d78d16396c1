"""The trail of a request: sentences for people about where it was routed, and what was loaded for it."""

from typing import Annotated, Final

import msgspec

from raykv.protocol.chunk_keys import KEY_NBYTES

MAX_ENTRIES: Final = 256
"""A message has at most this many entries."""
MAX_TEXT: Final = 1024
MIN_ASKED: Final = 4
"""A request is asked for by at least this many characters of its id."""

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
AskedId = Annotated[str, msgspec.Meta(min_length=MIN_ASKED, max_length=256)]


class TrailEntry(msgspec.Struct, array_like=True):
    """One sentence about a request.

    Attributes:
        request_id: The request's id in the process that made the entry. An engine adds text of its own to the id that
            the user knows.
        at_s: When the entry was made, in seconds since 1970.
        text: The sentence.
        absent: Key of the first chunk that was looked up and not found; empty if there is none.
    """

    request_id: RequestId
    at_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e12)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    absent: Annotated[bytes, msgspec.Meta(max_length=KEY_NBYTES)] = b""


Entries = Annotated[list[TrailEntry], msgspec.Meta(max_length=MAX_ENTRIES)]
