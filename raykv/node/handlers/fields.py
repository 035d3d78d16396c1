"""Values in requests, checked."""

from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.errors import UsageError
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.messages import MAX_KEYS
from raykv.types import KeyArray

LOCKED_KEYS = 4096
"""Keys that are looked up at once under the node's lock: writers wait for it."""


def keys_in(raw: bytes) -> KeyArray:
    """Read keys.

    Raises:
        UsageError: Not a whole number of keys, or more than MAX_KEYS.
    """
    if len(raw) > MAX_KEYS * KEY_NBYTES:
        raise UsageError(f"{len(raw) // KEY_NBYTES:,} keys in one request; at most {MAX_KEYS:,}: ask in parts")
    return chunk_keys.from_bytes(raw)


def parent_in(raw: bytes) -> KeyArray | None:
    """Read the key of a parent, shape [1, 2]; None for no parent.

    Raises:
        UsageError: It does not have the length of a key.
    """
    if raw and len(raw) != KEY_NBYTES:
        raise UsageError(f"field 'parent': {len(raw)} bytes; a key has {KEY_NBYTES}, and no parent has none")
    return chunk_keys.from_bytes(raw) if raw else None


def numbers_in(raw: bytes, kind: str) -> npt.NDArray[Any]:
    """Read an array of this element type.

    Raises:
        UsageError: Not a whole number of elements.
    """
    if len(raw) % np.dtype(kind).itemsize:
        raise UsageError(f"{len(raw)} bytes are not a whole number of {kind}")
    return np.frombuffer(raw, kind)
