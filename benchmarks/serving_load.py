"""A multi-turn load on an OpenAI server, and what came of it: time to the first token, and reuse against the ideal.

Each session asks, waits for the answer, thinks, and asks again with all that was said before. Sessions share a few
system prompts. All texts and pauses follow from seeds: systems with the same pauses are asked at the same times.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

WORDS: Final = (
    "pump", "valve", "river", "gate", "level", "alarm", "night", "shift",
    "water", "report", "engine", "flood", "sensor", "bridge", "canal", "storm",
)  # fmt: skip
BLOCK_TOKENS: Final = 32
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Load:
    """What the sessions do.

    Attributes:
        sessions, turns: Numbers of sessions, and of requests of each.
        systems: Number of system prompts. Each session has one of them.
        system_words, first_words, turn_words: Lengths of a system prompt, of the first question and of the later ones.
        answer_tokens: Tokens of each answer.
        think_s: Mean of the pauses before a request, which are exponential.
    """

    sessions: int = 8
    turns: int = 5
    systems: int = 2
    system_words: int = 400
    first_words: int = 300
    turn_words: int = 60
    answer_tokens: int = 16
    think_s: float = 6.0

    @property
    def requests(self) -> int:
        return self.sessions * self.turns


@dataclass
class Asked:
    """One answered request.

    Attributes:
        began_s: When it was sent, on the monotonic clock.
        ttft_s: Time to the first token.
        cached: Tokens of the prompt that the engine did not compute, by its own account.
        prompt: The prompt's tokens, as the engine made them.
        tokens: The answer's tokens.
        request_id: Ray Serve's id.
    """

    began_s: float
    ttft_s: float
    cached: int
    prompt: list[int]
    tokens: list[int]
    text: str
    request_id: str


@dataclass
class Outcome:
    """All requests of one system in one round.

    Attributes:
        wall_s, cpu_s: Duration, and the time for which the machine's cores were busy.
        failed: What failed requests said.
    """

    asked: list[Asked] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    failed: list[str] = field(default_factory=list)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def ask(client: Any, model: str, messages: Messages, tokens: int) -> Asked:
    """Send one request, and read its answer as a stream. Raises openai.OpenAIError if it fails."""
    began_s, ttft_s, text, usage = time.monotonic(), 0.0, "", None
    prompt: list[int] = []
    answer: list[int] = []
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    for event in raw.parse():
        prompt = event.model_extra.get("prompt_token_ids") or prompt
        usage = event.usage or usage
        for choice in event.choices:
            answer += choice.model_extra.get("token_ids") or []
            ttft_s = ttft_s or (time.monotonic() - began_s if answer else 0.0)
            text += choice.delta.content or ""
    assert usage is not None, "the server sent no usage"
    assert len(prompt) == usage.prompt_tokens, f"{len(prompt)} tokens of the prompt, {usage.prompt_tokens} in usage"
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return Asked(began_s, ttft_s, cached, prompt, answer, text, raw.headers["x-request-id"])


def drive(
    client: Any,
    model: str,
    load: Load,
    seed: int,
    *,
    pauses: int | None = None,
    on_answer: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Play all sessions, and wait for their ends. The texts follow from `seed`, the pauses from `pauses` or `seed`.

    `on_answer` is called with the number of answers after each answer.
    """
    import openai
    import psutil

    outcome, lock = Outcome(), threading.Lock()
    systems = [words(random.Random(seed + 7919 * number), load.system_words) for number in range(load.systems)]

    def session(number: int) -> None:
        rng = random.Random(seed * 1009 + number)
        clock = random.Random((seed if pauses is None else pauses) * 1013 + number)
        messages: Messages = [{"role": "system", "content": systems[number % load.systems]}]
        for turn in range(load.turns):
            time.sleep(clock.expovariate(1 / load.think_s))
            messages.append({"role": "user", "content": words(rng, load.turn_words if turn else load.first_words)})
            try:
                asked = ask(client, model, messages, load.answer_tokens)
            except openai.OpenAIError as error:
                with lock:
                    outcome.failed.append(f"{type(error).__name__}: {error}")
                return
            with lock:
                outcome.asked.append(asked)
                on_answer(len(outcome.asked))
            messages.append({"role": "assistant", "content": asked.text})

    began_s, busy_s = time.monotonic(), _busy(psutil.cpu_times())
    with ThreadPoolExecutor(load.sessions) as threads:
        list(threads.map(session, range(load.sessions)))
    outcome.wall_s = time.monotonic() - began_s
    outcome.cpu_s = _busy(psutil.cpu_times()) - busy_s
    return outcome


def _busy(times: Any) -> float:
    return float(sum(times) - times.idle - times.iowait - getattr(times, "guest", 0.0))


def reusable(asked: Sequence[Asked], block_tokens: int = BLOCK_TOKENS) -> int:
    """Return how many tokens of prompts an engine that holds everything would not compute."""
    return sum(reusable_by_request(asked, block_tokens))


def reusable_by_request(asked: Sequence[Asked], block_tokens: int = BLOCK_TOKENS) -> list[int]:
    """Return how many tokens of each prompt an engine that holds everything would not compute.

    That is the longest common prefix with an earlier prompt and its answer, in whole blocks, without the last token of
    the prompt, which is always computed. Earlier means sent before: who waits for another one's prefix reuses it, too.
    """
    found = []
    for each in asked:
        earlier = [one.prompt + one.tokens[:-1] for one in asked if one.began_s < each.began_s]
        longest = max((_common(each.prompt, one) for one in earlier), default=0)
        found.append(min(longest, len(each.prompt) - 1) // block_tokens * block_tokens)
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    same = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        same += 1
    return same
