"""Keys of 128 bits, hashed from tokens or names.

A key depends on its namespace. The chunks of a prompt form a chain: a key also depends on every token before its chunk.
The hash is keyed BLAKE2b, because tokens come from users: a user who finds a collision could read the KV of another
user's prompt. Chunk checksums and the ring of owners use xxhash, because an attacker gains nothing from a collision
there.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from raykv.errors import UsageError
from raykv.types import KeyArray

KEY_NBYTES = 16


def empty() -> KeyArray:
    """Return an array without keys."""
    return np.empty((0, 2), np.uint64)


def from_bytes(raw: bytes | bytearray | memoryview) -> KeyArray:
    """Decode the output of `to_bytes`. Raises UsageError if the length is not a multiple of 16."""
    if len(raw) % KEY_NBYTES:
        raise UsageError(f"{len(raw)} bytes are not a whole number of {KEY_NBYTES}-byte keys")
    return np.frombuffer(raw, "<u8").reshape(-1, 2)


def to_bytes(keys: KeyArray) -> bytes:
    """Encode keys as 16 bytes each: the high half, then the low half, both little-endian."""
    return np.ascontiguousarray(keys, "<u8").tobytes()


def unique(keys: KeyArray) -> KeyArray:
    """Return the keys without duplicates. `np.unique(keys, axis=0)` would hold the GIL, so other threads would wait."""
    whole = np.ascontiguousarray(keys).view("V16").ravel()
    return keys[np.unique(whole, return_index=True)[1]]


def named(digest: bytes, names: Iterable[bytes | str]) -> KeyArray:
    """Return the keys of objects that have names instead of tokens. Text is encoded as UTF-8.

    `digest` is the digest of the namespace.
    """
    return from_bytes(b"".join([named_one(digest, name) for name in names]))


def named_one(digest: bytes, name: bytes | str) -> bytes:
    """Return the key (16 bytes) of one object that has a name."""
    raw = name.encode() if isinstance(name, str) else name
    return hashlib.blake2b(raw, digest_size=KEY_NBYTES, key=digest, person=b"raykv-name").digest()


def chain(
    digest: bytes, tokens: Sequence[int] | npt.NDArray[np.integer], chunk_tokens: int, *, parent: bytes = b""
) -> KeyArray:
    """Return the keys of the full chunks of a prompt. Each key depends on its chunk and on all tokens before the chunk.

    Args:
        digest: Digest of the namespace.
        tokens: Token ids, each in 0 .. 2**32 - 1.
        chunk_tokens: Tokens in a chunk. Tokens at the end that do not fill a chunk get no key.
        parent: Key (16 bytes) of the chunk before `tokens`; empty if `tokens` are the start of the prompt.

    Raises:
        UsageError: A token id is out of range, `chunk_tokens` is below 1, or `parent` is not a key.
    """
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    if len(parent) not in (0, KEY_NBYTES):
        raise UsageError(f"field 'parent': {len(parent)} bytes; a key has {KEY_NBYTES}, and no parent has none")
    wide = np.asarray(tokens, np.int64)
    if wide.ndim != 1:
        raise UsageError(f"tokens must be a flat list of ids, not of shape {list(wide.shape)}")
    if wide.size and (wide.min() < 0 or wide.max() >= 1 << 32):
        raise UsageError("token ids must lie in 0 .. 2**32 - 1")
    raw = memoryview(wide.astype("<u4").tobytes())
    step = 4 * chunk_tokens
    keys = []
    for start in range(0, len(raw) - step + 1, step):
        chunk = hashlib.blake2b(raw[start : start + step], digest_size=KEY_NBYTES, key=digest, person=b"raykv-chain")
        chunk.update(parent)
        parent = chunk.digest()
        keys.append(parent)
    return from_bytes(b"".join(keys))
