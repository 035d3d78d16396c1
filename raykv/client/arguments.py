"""Checks of callers' arguments. A wrong argument raises a UsageError that names the field and the remedy."""

import math
import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from raykv.config import HIGHEST_PRIORITY
from raykv.errors import UsageError
from raykv.memory.copying import all_byte_views
from raykv.memory.layout import MAX_DEPTH
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.hints import MAX_TTL_S
from raykv.types import Hints, KeyArray

T = TypeVar("T")
Keys: TypeAlias = KeyArray | Sequence[bytes | str]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

MAX_TIMEOUT_S: Final = 1e6


def number_in(field: str, value: Any, least: float, most: float) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise UsageError(f"field '{field}': {value!r} is not a number in {least:,.0f} .. {most:,.0f}")
    return number


def integer_in(field: str, value: Any, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"field '{field}': {value!r} is not an integer in {least:,} .. {most:,}") from None
    if not least <= number <= most:
        raise UsageError(f"field '{field}': {number} is not in {least:,} .. {most:,}")
    return number


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"field '{field}': {value!r} is neither True nor False")
    return bool(value)


def instance(field: str, value: Any, kind: type[T] | tuple[type[T], ...], remedy: str) -> T:
    if not isinstance(value, kind):
        raise UsageError(f"field '{field}': {type(value).__name__}; {remedy}")
    return value


def deadline_after(timeout_s: Any) -> float:
    """Return the deadline of a call that begins now, by the monotonic clock."""
    return time.monotonic() + number_in("timeout_s", timeout_s, 0.0, MAX_TIMEOUT_S)


def list_of_names(names: Any) -> Sequence[Any]:
    """Turn an iterable of names into a list or tuple. This function does not check the names."""
    if isinstance(names, list | tuple):
        return names
    if isinstance(names, str | bytes | bytearray | memoryview) or not isinstance(names, Iterable):
        raise UsageError(f"field 'keys': {type(names).__name__}; give an array that keys() made, or a list of names")
    return list(names)


def named_keys(digest: bytes, names: Any) -> KeyArray:
    listed = list_of_names(names)
    try:
        return chunk_keys.named(digest, listed)
    except UnicodeEncodeError as error:
        raise UsageError(f"field 'keys': a name that is not valid text ({error}); pass it as bytes") from None
    except (TypeError, BufferError):
        wrong = next((place for place, name in enumerate(listed) if not isinstance(name, str | bytes)), 0)
        kind = type(listed[wrong]).__name__
        raise UsageError(f"field 'keys[{wrong}]': {kind} instead of a name; a name is str or bytes") from None


def key_array(field: str, keys: Any) -> KeyArray:
    """Check an array of keys: shape [n, 2], type uint64."""
    if not isinstance(keys, np.ndarray) or keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint64:
        raise UsageError(
            f"field '{field}': {_shown(keys)}; give an array that keys() or chain() made, of shape [n, 2] and type "
            "uint64, or a list of names"
        )
    return keys


def parent_key(parent: Any) -> KeyArray | None:
    key = None if parent is None else key_array("parent", parent)
    if key is not None and len(key) != 1:
        raise UsageError(f"field 'parent': {len(key)} keys; give one key as keys[i : i + 1]")
    return key


def one_key(key: Any) -> bytes:
    if not isinstance(key, bytes | bytearray | memoryview) or len(raw := bytes(key)) != KEY_NBYTES:
        raise UsageError(f"field 'key': {_shown(key)}; give the {KEY_NBYTES} bytes that key() returns")
    return raw


def token_ids(tokens: Any) -> npt.NDArray[np.int64]:
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError):
        ids = np.empty(0, object)
    empty = not ids.size and ids.dtype != object  # numpy turns an empty list into an array of floats
    if ids.ndim != 1 or not (empty or ids.dtype.kind in "iu"):
        raise UsageError(f"field 'tokens': {_shown(tokens)} is not a flat list of token ids in 0 .. 2**32 - 1")
    return ids.astype(np.int64, copy=False)


def buffers(field: str, many: Any, count: int, *, writable: bool) -> tuple[list[list[memoryview]], list[int]]:
    """Check that `many` has one entry per key. Return each entry's byte views, and each entry's length in bytes."""
    if not isinstance(many, Sequence | np.ndarray) or isinstance(many, str):
        raise UsageError(f"field '{field}': {type(many).__name__}; give a list with one entry a key")
    if len(many) != count:
        raise UsageError(f"field '{field}': {len(many)} entries for {count} keys; give one entry a key")
    try:
        return all_byte_views(list(many), field, writable=writable)
    except UsageError:
        raise
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"field '{field}': {error}; pass arrays of plain numbers, or their bytes") from None


def hints_of(ttl_s: Any, priority: Any) -> Hints:
    """Make the hints of a put. `ttl_s` None: the namespace's config decides."""
    if ttl_s is not None and not number_in("ttl_s", ttl_s, 0.0, MAX_TTL_S):
        raise UsageError("field 'ttl_s': 0 would expire at once; leave it out for no expiry")
    return Hints(float(ttl_s or 0.0), priority_of(priority))


def priority_of(priority: Any) -> int:
    return integer_in("priority", priority, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)


def depth_of(depth: Any) -> int:
    return integer_in("depth", depth, 0, MAX_DEPTH - 1)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)} and type {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
