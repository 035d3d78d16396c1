"""Finds the tokens of prompts without blocking the event loop, and within a time limit."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from raykv.integrations.routing.prompts import Naming, PrefixEnd, Prefixes, Prompt
from raykv.integrations.routing.segments import Segment

LATER_CHARS: Final = 8192
"""New text up to this length, about 2 000 tokens, hardly changes the choice, so its tokens are estimated. It is
tokenized after LATER_S for the next turn, when the request is on its way to a replica. Its tokens would take 1.6 ms, on
slow cores 4 ms."""
LATER_S: Final = 0.05
MAX_LATER: Final = 1024
"""At most this many prompts are to be read later. The tokens of further ones are not needed before their next turn."""
MAX_JOBS: Final = 16
"""At most this many prompts wait for their tokens. Further ones are routed without."""
MAX_NEW_SEGMENTS: Final = 128
"""At most this many new segments of a prompt are tokenized for one request, about 60 000 tokens."""
MAX_RECENT: Final = 1024
"""The tokens of this many segments are remembered until all waiting prompts have them."""

Tokenize = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class Reader:
    """Reads prompts: names of chunks for what is known or was tokenized in time, estimates for the rest.

    Attributes:
        prefixes: The known prefixes.
    """

    def __init__(self, tokenize: Tokenize, *, timeout_s: float) -> None:
        """Start the thread. `tokenize` returns the tokens of texts; it is called on one thread."""
        self._tokenize, self._timeout_s = tokenize, timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-tokens")
        self._jobs = self._later = 0
        self._recent: OrderedDict[bytes, Sequence[int]] = OrderedDict()
        self.prefixes = Prefixes()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, scope: bytes, segments: Sequence[Segment], naming: Naming | None, start: PrefixEnd) -> Prompt:
        """Return a prompt.

        Args:
            scope: What the names depend on in addition to the text.
            naming: How the engine names chunks. None: not known yet, so no chunk gets a name.
            start: Tokens that precede the prompt.
        """
        prompt = self.prefixes.read(scope, segments)
        new = segments[prompt.known : prompt.known + MAX_NEW_SEGMENTS]
        if not new or naming is None:
            return prompt
        given = [each for each in new if not isinstance(each, str)]
        if given:
            self.prefixes.add(prompt, given, naming, start)
        elif sum(map(len, segments[prompt.known :])) <= LATER_CHARS:
            if self._later < MAX_LATER:
                self._later += 1
                asyncio.get_running_loop().call_later(LATER_S, self._catch_up, scope, segments, naming, start)
        elif self._jobs < MAX_JOBS:
            job = self._begin(scope, segments, prompt, naming, start)
            done, _ = await asyncio.wait([job], timeout=self._timeout_s)
            if done:
                return self.prefixes.read(scope, segments)
        return prompt

    def _catch_up(self, scope: bytes, segments: Sequence[Segment], naming: Naming, start: PrefixEnd) -> None:
        """Tokenize the short text whose tokens were estimated, unless another prompt with the same text was sooner."""
        self._later -= 1
        prompt = self.prefixes.read(scope, segments)
        if prompt.known < len(segments) and self._jobs < MAX_JOBS:
            with suppress(RuntimeError):  # it is closed
                self._begin(scope, segments, prompt, naming, start)

    def _begin(
        self, scope: bytes, segments: Sequence[Segment], prompt: Prompt, naming: Naming, start: PrefixEnd
    ) -> "asyncio.Future[list[Sequence[int]]]":
        """Tokenize a prompt's next segments on the thread. The prefixes have the tokens when the future is done."""
        first, stop = prompt.known, prompt.known + MAX_NEW_SEGMENTS
        texts = [each for each in segments[first:stop] if isinstance(each, str)]

        def end(job: "asyncio.Future[list[Sequence[int]]]") -> None:
            self._jobs -= 1
            if not job.cancelled() and not job.exception():  # a tokenizer refuses some texts
                known = self.prefixes.read(scope, segments)
                if known.known >= first:
                    self.prefixes.add(known, job.result()[known.known - first :], naming, start)

        job = asyncio.get_running_loop().run_in_executor(
            self._thread, self._tokenize_new, prompt.keys[first : first + len(texts)], texts
        )
        self._jobs += 1
        job.add_done_callback(end)
        return job

    def _tokenize_new(self, keys: Sequence[bytes], texts: Sequence[str]) -> list[Sequence[int]]:
        """Tokenize the segments that no earlier job has tokenized: the prompts of a burst share their prefix."""
        missing = [place for place, key in enumerate(keys) if key not in self._recent]
        for place, tokens in zip(missing, self._tokenize([texts[place] for place in missing]), strict=True):
            self._recent[keys[place]] = tokens
        found = [self._recent[key] for key in keys]
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        return found
