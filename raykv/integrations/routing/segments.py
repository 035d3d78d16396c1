"""Cuts prompts into segments whose tokens do not depend on each other, and names each prefix of segments.

Two prompts with the same beginning have the same segments there. So a router makes tokens only of new segments. The
cuts depend on the text before them alone:

* before a special token of the tokenizer, such as the one at the start of a message, if MIN_SEGMENT_CHARS have gone by
  since the last such cut;
* in between, after SEGMENT_CHARS characters, before the next space between two letters. There, tokenizers begin a new
  word.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

SEGMENT_CHARS: Final = 1984
"""Below 2048 bytes. From there on `hashlib` releases the GIL, and in a busy process it may take ms to get it back."""
MIN_SEGMENT_CHARS: Final = 32
"""Templates put up to five special tokens between two messages. A segment for each would only cost time."""
SEGMENT_TOKENS: Final = 512
"""Prompts that are given as tokens are cut after this many tokens."""
MAX_SEGMENTS: Final = 2048
"""A prompt has at most this many segments. Its rest is not looked at."""
KEY_NBYTES: Final = 16
_BETWEEN_WORDS: Final = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")

Segment = str | tuple[int, ...]


class Cutter:
    """Cuts texts into segments, for one tokenizer."""

    def __init__(self, specials: Sequence[str], *, cuts: bool = True) -> None:
        """Use the tokenizer's special tokens.

        Args:
            cuts: Whether the tokenizer gives the parts of a cut text the same tokens as the whole text. If not, a text
                is one segment.
        """
        self._cuts = cuts
        words = sorted(map(re.escape, specials), key=len, reverse=True)
        self._special = re.compile("|".join(words)) if words else None

    def cut(self, text: str) -> list[str]:
        """Return the segments of a text, at most MAX_SEGMENTS."""
        if not self._cuts:
            return [text] if text else []
        starts, last = [], 0
        for found in () if self._special is None else self._special.finditer(text):
            if found.start() >= last + MIN_SEGMENT_CHARS:
                last = found.start()
                starts.append(last)
        segments: list[str] = []
        for start, stop in zip([0, *starts], [*starts, len(text)], strict=True):
            segments += self._parts(text, start, stop)
            if len(segments) >= MAX_SEGMENTS:
                return segments[:MAX_SEGMENTS]
        return segments

    @staticmethod
    def _parts(text: str, start: int, stop: int) -> Iterable[str]:
        while stop - start > SEGMENT_CHARS:
            found = _BETWEEN_WORDS.search(text, start + SEGMENT_CHARS, stop)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        if stop > start:
            yield text[start:stop]


def cut_tokens(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the segments of a prompt that is given as tokens."""
    starts = range(0, min(len(tokens), MAX_SEGMENTS * SEGMENT_TOKENS), SEGMENT_TOKENS)
    return [tuple(tokens[start : start + SEGMENT_TOKENS]) for start in starts]


def prefix_keys(scope: bytes, segments: Sequence[Segment]) -> list[bytes]:
    """Return a key for each prefix of segments. It depends on the scope and on all segments of the prefix.

    Raises:
        OverflowError: A token is no number of 32 bits.
    """
    key, keys = hashlib.blake2b(scope, digest_size=KEY_NBYTES).digest(), []
    for segment in segments:
        raw = (
            segment.encode("utf-8", "surrogatepass") if isinstance(segment, str) else np.array(segment, "<u4").tobytes()
        )
        key = hashlib.blake2b(raw, digest_size=KEY_NBYTES, key=key).digest()
        keys.append(key)
    return keys
