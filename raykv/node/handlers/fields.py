"""Decodes and checks values in requests."""

from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.errors import UsageError
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.messages import MAX_KEYS
from raykv.types import KeyArray

LOCKED_KEYS = 4096
"""The most keys that are looked up while the node's lock is held once, since writers wait for the lock."""


def keys_in(raw: bytes) -> KeyArray:
    """Decode keys. Raises UsageError if the last key is incomplete, or there are more than MAX_KEYS keys."""
    if len(raw) > MAX_KEYS * KEY_NBYTES:
        raise UsageError(f"{len(raw) // KEY_NBYTES:,} keys in one request; at most {MAX_KEYS:,}: ask in parts")
    return chunk_keys.from_bytes(raw)


def parent_in(raw: bytes) -> KeyArray | None:
    """Decode a parent's key, shape [1, 2]; None if `raw` is empty. Raises UsageError if the length is wrong."""
    if raw and len(raw) != KEY_NBYTES:
        raise UsageError(f"field 'parent': {len(raw)} bytes; a key has {KEY_NBYTES}, and no parent has none")
    return chunk_keys.from_bytes(raw) if raw else None


def numbers_in(raw: bytes, kind: str) -> npt.NDArray[Any]:
    """Decode an array of element type `kind`. Raises UsageError if the last element is incomplete."""
    if len(raw) % np.dtype(kind).itemsize:
        raise UsageError(f"{len(raw)} bytes are not a whole number of {kind}")
    return np.frombuffer(raw, kind)
