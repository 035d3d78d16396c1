"""The chunks of a `why` call: an array of keys, names, or a prompt. Keys are derived in parts."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raykv.client.arguments import Tokens, key_array, named_keys, token_ids
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.namespace import Namespace
from raykv.types import KeyArray


class KeySource(Protocol):
    """The chunks that one `why` call asks about, in order."""

    def __len__(self) -> int: ...

    def keys(self, start: int, stop: int) -> KeyArray:
        """Return the keys of chunks `start` to `stop` under the caller's namespace.

        Raises:
            UsageError: A name or token is not valid.
        """
        ...

    def keys_under(self, other: Namespace, places: Sequence[int]) -> list[bytes | None]:
        """Return the 16-byte keys of chunks under another namespace. `places` must rise. None: the key is unknown."""
        ...


class ArrayKeys:
    """An array of keys. Their keys under other namespaces are unknown."""

    def __init__(self, keys: KeyArray) -> None:
        self._keys = key_array("keys", keys)

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, start: int, stop: int) -> KeyArray:
        return self._keys[start:stop]

    def keys_under(self, other: Namespace, places: Sequence[int]) -> list[bytes | None]:
        return [None] * len(places)


class NamedKeys:
    def __init__(self, namespace: Namespace, names: Sequence[bytes | str]) -> None:
        self._digest, self._names = namespace.digest, names

    def __len__(self) -> int:
        return len(self._names)

    def keys(self, start: int, stop: int) -> KeyArray:
        return named_keys(self._digest, self._names[start:stop])

    def keys_under(self, other: Namespace, places: Sequence[int]) -> list[bytes | None]:
        return [*split(named_keys(other.digest, [self._names[place] for place in places]))]


class TokenKeys:
    """The full chunks of a prompt.

    Under another chunk size, the matching chunk is the first one that covers this chunk's last token.
    """

    def __init__(self, namespace: Namespace, tokens: Tokens) -> None:
        self._tokens, self._mine = token_ids(tokens), namespace.chunk_tokens
        self._chain = _Chain(namespace, self._tokens)
        self._others: dict[bytes, _Chain] = {}

    def __len__(self) -> int:
        return len(self._tokens) // self._mine

    def keys(self, start: int, stop: int) -> KeyArray:
        return chunk_keys.from_bytes(b"".join(self._chain.upto(stop)[start:stop]))

    def keys_under(self, other: Namespace, places: Sequence[int]) -> list[bytes | None]:
        chain = self._others.setdefault(other.digest, _Chain(other, self._tokens))
        theirs = [-(-(place + 1) * self._mine // other.chunk_tokens) - 1 for place in places]
        raw = chain.upto(theirs[-1] + 1)
        return [raw[place] if place < len(raw) else None for place in theirs]


class _Chain:
    """Keys of a prompt under one namespace, derived on demand."""

    def __init__(self, namespace: Namespace, tokens: npt.NDArray[np.integer]) -> None:
        self._digest, self._step, self._tokens = namespace.digest, namespace.chunk_tokens, tokens
        self._raw: list[bytes] = []

    def upto(self, count: int) -> list[bytes]:
        done = len(self._raw)
        if count > done:
            tokens = self._tokens[done * self._step : count * self._step]
            parent = self._raw[-1] if self._raw else b""
            self._raw += split(chunk_keys.chain(self._digest, tokens, self._step, parent=parent))
        return self._raw


def split(keys: KeyArray) -> list[bytes]:
    """Return each key as 16 bytes."""
    raw = chunk_keys.to_bytes(keys)
    return [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]
