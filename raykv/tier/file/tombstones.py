"""Tombstones of a shared pack directory: deleted keys and dropped quota groups. Pure; not thread-safe.

A tombstone has a sequence number, and covers the chunk, or the group's chunks, in all packs with a lower one.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from raykv.tier.segments.format import Array, raw_keys
from raykv.types import Bits

MAX_KEYS: Final = 1 << 20
"""Deleted keys that are remembered; beyond it the oldest are dropped."""


class Tombstones:
    """Those that lie in the directory, and those that this node is still to write.

    Attributes:
        latest: The highest sequence so far.
        pending_keys, pending_texts: What is to be written.
        pending_sequence: With at least this sequence.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, int] = {}
        self._texts: dict[bytes, int] = {}
        self.latest = self.pending_sequence = 0
        self.pending_keys: dict[bytes, None] = {}
        self.pending_texts: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys) + len(self._texts)

    @property
    def pending(self) -> bool:
        return bool(self.pending_keys or self.pending_texts)

    def add_pending(self, sequence: int, keys: Iterable[bytes] = (), texts: Iterable[bytes] = ()) -> None:
        self.pending_sequence = max(self.pending_sequence, sequence)
        self.pending_keys.update(dict.fromkeys(keys))
        self.pending_texts.update(dict.fromkeys(texts))
        while len(self.pending_keys) > MAX_KEYS:
            del self.pending_keys[next(iter(self.pending_keys))]

    def remove_pending(self, keys: Iterable[bytes], texts: Iterable[bytes]) -> None:
        for key in keys:
            self.pending_keys.pop(key, None)
        for text in texts:
            self.pending_texts.pop(text, None)

    def add(self, sequence: int, keys: Iterable[bytes], texts: Iterable[bytes]) -> None:
        for known, names in ((self._keys, keys), (self._texts, texts)):
            for name in names:
                known[name] = max(sequence, known.pop(name, 0))
        self.latest = max(self.latest, sequence)
        while len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def remove(self, sequence: int) -> None:
        """The file of this sequence was removed: there is nothing left that it covers."""
        self._keys = {key: latest for key, latest in self._keys.items() if latest != sequence}
        self._texts = {text: latest for text, latest in self._texts.items() if latest != sequence}

    def of(self, sequences: set[int]) -> tuple[list[bytes], list[bytes]]:
        """Keys and quota groups whose latest tombstone has one of these sequences."""
        return (
            [key for key, latest in self._keys.items() if latest in sequences],
            [text for text, latest in self._texts.items() if latest in sequences],
        )

    def covers(self, key: bytes, text: bytes, sequence: int) -> bool:
        """Whether a chunk in a pack of this sequence would count as deleted."""
        if key in self.pending_keys or text in self.pending_texts:
            return True
        return max(self._keys.get(key, 0), self._texts.get(text, 0)) > sequence

    def uncovered(self, entries: Array, texts: Sequence[bytes], sequence: int) -> Bits:
        """Which entries of a pack no tombstone covers.

        Args:
            entries: Array of `format.ENTRY`.
            texts: Quota groups; entries name them by their index here.
        """
        alive: Bits = np.array([self._texts.get(text, 0) < sequence for text in texts], np.bool_)[entries["group"]]
        if self._keys:
            alive &= np.array([self._keys.get(key, 0) < sequence for key in raw_keys(entries["key"])], np.bool_)
        return alive
