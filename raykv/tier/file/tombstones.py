"""What was told to be gone from a directory of packs. Pure; not thread-safe."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from raykv.tier.segments.format import flat
from raykv.types import Bits

MAX_KEYS: Final = 1 << 20
"""Deleted keys that are remembered; those that were told first are forgotten beyond it."""


class Told:
    """Keys and quota groups that are gone from all packs begun before a certain one.

    Attributes:
        latest: The highest sequence so far.
        pending_keys, pending_texts: What is to be written down yet.
        pending_sequence: Under which sequence.
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
        """Whether anything is to be written down."""
        return bool(self.pending_keys or self.pending_texts)

    def add(self, sequence: int, keys: Iterable[bytes] = (), texts: Iterable[bytes] = ()) -> None:
        """These are to be told of: they are gone from what was begun before."""
        self.pending_sequence = max(self.pending_sequence, sequence)
        self.pending_keys.update(dict.fromkeys(keys))
        self.pending_texts.update(dict.fromkeys(texts))
        while len(self.pending_keys) > MAX_KEYS:
            del self.pending_keys[next(iter(self.pending_keys))]

    def written(self, keys: Iterable[bytes], texts: Iterable[bytes]) -> None:
        """These were."""
        for key in keys:
            self.pending_keys.pop(key, None)
        for text in texts:
            self.pending_texts.pop(text, None)

    def note(self, sequence: int, keys: Iterable[bytes], texts: Iterable[bytes]) -> None:
        """These are gone from all packs with a lower sequence."""
        for known, names in ((self._keys, keys), (self._texts, texts)):
            for name in names:
                known[name] = max(sequence, known.pop(name, 0))
        self.latest = max(self.latest, sequence)
        while len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def forget(self, sequence: int) -> None:
        """Nothing is left that was told of under this sequence."""
        self._keys = {key: told for key, told in self._keys.items() if told != sequence}
        self._texts = {text: told for text, told in self._texts.items() if told != sequence}

    def of(self, sequences: set[int]) -> tuple[list[bytes], list[bytes]]:
        """Keys and quota groups that were told of under these sequences, and not again since."""
        return (
            [key for key, told in self._keys.items() if told in sequences],
            [text for text, told in self._texts.items() if told in sequences],
        )

    def speaks_against(self, key: bytes, text: bytes, sequence: int) -> bool:
        """Whether a chunk, stored now, would be thought gone in a pack of this sequence."""
        if key in self.pending_keys or text in self.pending_texts:
            return True
        return max(self._keys.get(key, 0), self._texts.get(text, 0)) > sequence

    def living(self, entries: Any, texts: Sequence[bytes], sequence: int) -> Bits:
        """Which entries of a pack nothing speaks against.

        Args:
            entries: Array of `segment.ENTRY`.
            texts: What they name their quota groups by.
        """
        alive: Bits = np.array([self._texts.get(text, 0) < sequence for text in texts], np.bool_)[entries["group"]]
        if self._keys:
            told = self._keys
            alive &= np.array([told.get(key, 0) < sequence for key in flat(entries["key"]).tolist()], np.bool_)
        return alive
