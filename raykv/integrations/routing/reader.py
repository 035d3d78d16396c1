"""Finds the tokens of prompts without blocking the event loop, and within a time limit."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from raykv.integrations.routing.prompts import Naming, PrefixEnd, Prefixes, Prompt
from raykv.integrations.routing.segments import Segment

INLINE_CHARS: Final = 8192
"""Shorter new text is tokenized on the event loop. This takes 1.6 ms at most. A change to a thread and back takes 6 ms
at the 99th percentile on a busy host."""
MAX_JOBS: Final = 16
"""At most this many prompts wait for their tokens. Further ones are routed without."""
MAX_NEW_SEGMENTS: Final = 128
"""At most this many new segments of a prompt are tokenized for one request, about 60 000 tokens."""
MAX_RECENT: Final = 1024
"""The tokens of this many segments are remembered until all waiting prompts have them."""

Tokenize = Callable[[Sequence[str]], Sequence[Sequence[int]]]


class Reader:
    """Reads prompts: names of chunks for what was tokenized in time, estimates for the rest.

    Attributes:
        prefixes: The known prefixes.
    """

    def __init__(self, tokenize: Tokenize, *, timeout_s: float) -> None:
        """Start the thread. `tokenize` returns the tokens of texts; it is called on any thread, one call at a time."""
        self._tokenize, self._timeout_s = tokenize, timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raykv-tokens")
        self._jobs = 0
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
        texts = [each for each in new if isinstance(each, str)]
        if len(texts) < len(new):
            self.prefixes.add(prompt, [each for each in new if not isinstance(each, str)], naming, start)
        elif not self._jobs and sum(map(len, texts)) <= INLINE_CHARS:
            self.prefixes.add(prompt, self._tokenize(texts), naming, start)
        elif self._jobs < MAX_JOBS:
            await self._read_on_thread(scope, segments, prompt, texts, partial(self._add, naming=naming, start=start))
        return prompt

    async def _read_on_thread(
        self,
        scope: bytes,
        segments: Sequence[Segment],
        prompt: Prompt,
        texts: Sequence[str],
        add: Callable[[Prompt, Sequence[Sequence[int]]], None],
    ) -> None:
        """Tokenize on the thread. What is late is added to the prefixes, for the next requests."""
        first, keys = prompt.known, prompt.keys[prompt.known : prompt.known + len(texts)]
        job = asyncio.get_running_loop().run_in_executor(self._thread, self._tokenize_new, keys, texts)
        self._jobs += 1
        job.add_done_callback(self._end)
        done, _ = await asyncio.wait([job], timeout=self._timeout_s)
        if job.cancelled():  # the reader was closed meanwhile
            return
        if done:
            add(prompt, job.result())
            return

        def add_late(ended: "asyncio.Future[list[Sequence[int]]]") -> None:
            if not ended.cancelled() and not ended.exception():
                late = self.prefixes.read(scope, segments)
                if late.known >= first:
                    add(late, ended.result()[late.known - first :])

        job.add_done_callback(add_late)

    def _add(self, prompt: Prompt, tokens: Sequence[Sequence[int]], *, naming: Naming, start: PrefixEnd) -> None:
        self.prefixes.add(prompt, tokens, naming, start)

    def _tokenize_new(self, keys: Sequence[bytes], texts: Sequence[str]) -> list[Sequence[int]]:
        """Tokenize the segments that no earlier job has tokenized: the prompts of a burst share their prefix."""
        missing = [place for place, key in enumerate(keys) if key not in self._recent]
        for place, tokens in zip(missing, self._tokenize([texts[place] for place in missing]), strict=True):
            self._recent[keys[place]] = tokens
        found = [self._recent[key] for key in keys]
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        return found

    def _end(self, job: "asyncio.Future[list[Sequence[int]]]") -> None:
        self._jobs -= 1
        if not job.cancelled():
            job.exception()  # read it; otherwise asyncio logs the exception of a job that nobody waits for
