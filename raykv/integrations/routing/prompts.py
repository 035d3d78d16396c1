"""The tokens and chunk names of prompts, remembered by prefix, so that the next turn of a conversation costs little."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from raykv.integrations.routing.segments import Segment, prefix_keys

CHARS_PER_TOKEN: Final = 4.0
"""Estimate for text whose tokens are not known yet, until a prompt with known tokens has been read."""
MIN_CHARS_PER_TOKEN: Final = 1.0
MAX_CHARS_PER_TOKEN: Final = 8.0
"""Limits of the measured figure, which spaces or a strange script would move far away."""
MAX_PREFIXES: Final = 32_768
"""At most this many prefixes are remembered, the least recently used go first."""
MAX_NAMES: Final = 262_144
"""The remembered prefixes name at most this many chunks: about 25 MB."""

HashFunction = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Naming:
    """How an engine names the chunks of a request: vLLM's hashes of blocks.

    Attributes:
        function: The engine's hash function, and `seed`, which takes the place of the hash before the first block.
        hash_tokens, chunk_tokens: Number of tokens in a hashed block, and in a chunk.
        suffix: End of each name.
        always, first: Extra keys of all blocks, and further ones of the first block.
    """

    function: HashFunction
    seed: bytes
    hash_tokens: int
    chunk_tokens: int
    suffix: bytes = b""
    always: tuple[Any, ...] = ()
    first: tuple[Any, ...] = ()

    def extend(self, end: "PrefixEnd", tokens: Sequence[int]) -> tuple["PrefixEnd", list[bytes]]:
        """Return the new end, and the names of the chunks that are complete after these further tokens."""
        rest, size, names = [*end.rest, *tokens], self.hash_tokens, []
        last, hashed = end.last or self.seed, end.hashed
        for start in range(0, len(rest) - size + 1, size):
            extra = self.always if hashed else (*self.always, *self.first)
            last = self.function((last, tuple(rest[start : start + size]), extra or None))
            hashed += size
            if hashed % self.chunk_tokens == 0:
                names.append(last + self.suffix)
        return PrefixEnd(last, hashed, tuple(rest[len(rest) // size * size :])), names


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """The end of a prefix: the last block's hash, the number of hashed tokens, and the tokens after them."""

    last: bytes = b""
    hashed: int = 0
    rest: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.hashed + len(self.rest)


@dataclass(slots=True)
class Prompt:
    """What the router knows of a prompt.

    Attributes:
        keys: A key for each prefix of segments.
        ends: Number of tokens before the end of each segment. Estimated for segments without known tokens.
        names: Names of the leading chunks.
        known: Number of leading segments whose tokens are known.
    """

    keys: list[bytes]
    ends: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    known: int = 0

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0


class Prefixes:
    """Remembers tokens and chunk names by prefix. Bounded."""

    def __init__(self, *, max_prefixes: int = MAX_PREFIXES, max_names: int = MAX_NAMES) -> None:
        self._max_prefixes, self._max_names = max_prefixes, max_names
        self._entries: OrderedDict[bytes, tuple[PrefixEnd, list[bytes]]] = OrderedDict()
        self._names, self._chars_per_token = 0, CHARS_PER_TOKEN

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, scope: bytes, segments: Sequence[Segment]) -> Prompt:
        """Return what is known of a prompt. `scope`: what the names depend on in addition to the tokens."""
        prompt = Prompt(prefix_keys(scope, segments))
        for key in prompt.keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            end, names = entry
            prompt.names += names
            prompt.ends.append(end.tokens)
            prompt.known += 1
        for key in reversed(prompt.keys[: prompt.known]):  # the end of a prefix goes before its beginning
            self._entries.move_to_end(key)
        self._estimate(prompt, segments)
        return prompt

    def add(self, prompt: Prompt, tokens: Sequence[Sequence[int]], naming: Naming, start: PrefixEnd) -> None:
        """Add the tokens of the prompt's next segments.

        Args:
            start: The end of the prefix before the first segment. It may have tokens that precede every prompt.
        """
        entry = self._entries.get(prompt.keys[prompt.known - 1]) if prompt.known else None
        if prompt.known and entry is None:
            return  # forgotten meanwhile
        end = entry[0] if entry else start
        estimates, prompt.ends = prompt.ends[prompt.known :], prompt.ends[: prompt.known]
        estimated = end.tokens
        for each in tokens[: len(prompt.keys) - prompt.known]:
            estimated = estimates.pop(0) if estimates else estimated
            end, names = naming.extend(end, each)
            self._keep(prompt.keys[prompt.known], end, names)
            prompt.names += names
            prompt.ends.append(end.tokens)
            prompt.known += 1
        prompt.ends += [end.tokens + each - estimated for each in estimates]

    def _keep(self, key: bytes, end: PrefixEnd, names: list[bytes]) -> None:
        if key in self._entries:
            self._names -= len(self._entries.pop(key)[1])
        self._entries[key] = end, names
        self._names += len(names)
        while len(self._entries) > self._max_prefixes or self._names > self._max_names:
            _, (_, gone) = self._entries.popitem(last=False)
            self._names -= len(gone)

    def _estimate(self, prompt: Prompt, segments: Sequence[Segment]) -> None:
        end = float(prompt.tokens)
        chars = sum(len(segment) for segment in segments[: prompt.known] if isinstance(segment, str))
        if chars and end:
            self._chars_per_token = min(max(chars / end, MIN_CHARS_PER_TOKEN), MAX_CHARS_PER_TOKEN)
        for segment in segments[prompt.known :]:
            end += len(segment) / self._chars_per_token if isinstance(segment, str) else len(segment)
            prompt.ends.append(round(end))
