"""Run the demo, and then more conversations. During each of these conversations, one process is killed with SIGKILL.

`make soak` kills each of five kinds of process, `make test` two of them.

Each request must get exactly the tokens of an engine without a cache, which computes every prompt in full (float32,
greedy).
"""

import io
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")
openai = pytest.importorskip("openai")

from deployments import demo  # noqa: E402
from deployments.local_ray import SETTINGS  # noqa: E402
from raykv import cluster  # noqa: E402
from tests.support.deployed import free_port, traces  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = [
    "pump",
    "valve",
    "river",
    "gate",
    "level",
    "alarm",
    "night",
    "shift",
    "water",
    "report",
    "engine",
    "flood",
    "north",
    "south",
    "crew",
    "spare",
]
QUESTIONS = ("Say in one sentence what this is.", "Which word is the first?", "And which is the last?")
RESTART_S = 120.0


@dataclass
class Conversation:
    """The messages of each request, the answers, and the killed process's id before and after its restart."""

    messages: list[demo.Messages] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    killed: int = 0
    revived: int = 0


def node_actor(address: str) -> Callable[[], int]:
    def pid() -> int:
        nodes = cluster.status(demo.POOL)["nodes"].values()
        return next(node["pid"] for node in nodes if node.get("member") and node["address"].startswith(address))

    return pid


def directory_actor() -> int:
    pid: int = cluster.status(demo.POOL)["directory"]["pid"]
    return pid


def replica(kind: str) -> Callable[[], int]:
    """Return a function that finds the process id of a replica among this process's descendants."""

    def pid() -> int:
        children = psutil.Process().children(recursive=True)
        return next(child.pid for child in children if f"ServeReplica:pd:{kind}" in " ".join(child.cmdline()))

    return pid


VICTIMS: dict[str, tuple[Callable[[], int], int]] = {
    # Process to kill, and when: after this many tokens of the second answer. 0: during the prefill of this answer.
    "prefill's node actor": (node_actor("127.0.0.2"), 0),
    "decode's node actor": (node_actor("127.0.0.3"), 0),
    "directory actor": (directory_actor, 3),
    "decode replica": (replica("Decode"), 5),
    "prefill replica": (replica("Prefill"), 0),
}


ALL = tuple(VICTIMS)
SOME = ("prefill's node actor", "decode replica")
"""Victims in `make test`: a process that holds chunks, and one that is in the middle of an answer."""


def niceness() -> dict[str, list[int]]:
    """Return the niceness of this process's engines and ingresses."""
    lines = [(" ".join(child.cmdline()), child.nice()) for child in psutil.Process().children(recursive=True)]
    return {name: [nice for line, nice in lines if name in line] for name in ("VLLM::EngineCore", "ResumingIngress")}


def document(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(
        f"{number}. The {rng.choice(WORDS)} {rng.choice(WORDS)} {rng.choice(WORDS)}." for number in range(60)
    )


def ask(client: Any, messages: demo.Messages, on_token: Callable[[int], None]) -> tuple[str, list[int], str]:
    """Return the text, the tokens and the finish reason of one streamed answer."""
    text, tokens, finish = "", [], ""
    on_token(0)
    for event in client.chat.completions.create(
        model=demo.MODEL_ID,
        messages=messages,
        temperature=0,
        max_tokens=demo.ANSWER_TOKENS,
        stream=True,
        extra_body={"return_token_ids": True},
    ):
        for choice in event.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            on_token(len(tokens))
    return text, tokens, finish


def converse(client: Any, seed: int, victim: Callable[[], int], after_tokens: int) -> Conversation:
    talk = Conversation()
    messages: demo.Messages = []
    for number, question in enumerate(QUESTIONS):
        messages = [*messages, {"role": "user", "content": f"{document(seed)}\n{question}" if not number else question}]
        victim_pid = victim() if number == 1 else 0

        def kill(count: int, victim_pid: int = victim_pid) -> None:
            if victim_pid and not talk.killed and count >= after_tokens:
                talk.killed = victim_pid
                when_s = 0.1 if after_tokens == 0 else 0.0
                threading.Timer(when_s, os.kill, (victim_pid, signal.SIGKILL)).start()

        text, tokens, finish = ask(client, messages, kill)
        assert finish, "the stream ended without saying why"
        talk.messages.append(messages)
        talk.texts.append(text)
        talk.tokens.append(tokens)
        messages = [*messages, {"role": "assistant", "content": text}]
    talk.revived = wait_for_another(victim, talk.killed)
    return talk


def wait_for_another(victim: Callable[[], int], old: int) -> int:
    until_s = time.monotonic() + RESTART_S
    while time.monotonic() < until_s:
        try:
            pid = victim()
        except Exception:  # noqa: BLE001 - any error means that the victim is not back yet
            pid = 0
        if pid not in (0, old):
            return pid
        time.sleep(0.1)
    raise AssertionError(f"not back within {RESTART_S} s")


@dataclass
class Outcome:
    """What the demo and the conversations did.

    Attributes:
        code, printed: Exit code and output of the demo.
        talks: For each victim: the conversation, and an engine's answers to its requests without a cache.
        niceness: Of the engines, and of the ingress.
        left: What `traces` finds after the demo but not before it.
    """

    code: int
    printed: str
    talks: dict[str, tuple[Conversation, list[demo.Answer]]]
    niceness: dict[str, list[int]]
    left: set[object]


@pytest.fixture(
    scope="module", params=[pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.soak)]
)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """Run the demo and the other conversations in one deployment, because starting one takes most of a minute."""
    talks: dict[str, Conversation] = {}
    plain: list[demo.Answer] = []
    found: dict[str, list[int]] = {}
    demo_converses, engine_answers = demo.converse, demo.answer_without_pool

    def converse_more(port: int) -> list[demo.Turn]:
        turns = demo_converses(port)
        found.update(niceness())
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)
        talks.update({name: converse(client, seed, *VICTIMS[name]) for seed, name in enumerate(request.param)})
        return turns

    def answer_more(process: Any, requests: list[demo.Messages]) -> list[demo.Answer]:
        more = [messages for talk in talks.values() for messages in talk.messages]
        answers = engine_answers(process, [*requests, *more])
        plain.extend(answers[len(requests) :])
        return answers[: len(requests)]

    before = traces()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        for name in (*demo.DRIVER_SETTINGS, *SETTINGS):
            patch.setenv(name, "")  # the demo changes these; `patch` restores them at the end
        patch.setattr(demo, "converse", converse_more)
        patch.setattr(demo, "answer_without_pool", answer_more)
        patch.setattr(logging, "disable", lambda level: None)
        patch.setattr(sys, "argv", ["demo", "--port", str(free_port())])
        code = demo.main()
    print(printed.getvalue())
    answers = iter(plain)
    pairs = {name: (talk, [next(answers) for _ in talk.messages]) for name, talk in talks.items()}
    return Outcome(code, printed.getvalue(), pairs, found, traces() - before)


def test_the_demo_keeps_its_promises(outcome: Outcome) -> None:
    assert outcome.code == 0
    rows = re.findall(r"^(\d+|1 again) +\d{4} .* identical$", outcome.printed, re.MULTILINE)
    assert rows == ["1", "2", "3", "1 again"]
    assert outcome.printed.count("  yes  ") == 4
    assert "  NO   " not in outcome.printed


def test_every_request_is_answered_as_by_a_plain_engine(outcome: Outcome) -> None:
    for victim, (talk, plain) in outcome.talks.items():
        assert talk.killed, victim
        assert talk.texts == [answer.text for answer in plain], victim
        assert talk.tokens == [answer.tokens for answer in plain], victim


def test_a_killed_process_comes_back_by_itself(outcome: Outcome) -> None:
    for victim, (talk, _) in outcome.talks.items():
        assert talk.revived not in (0, talk.killed), victim


def test_engines_on_cpu_leave_the_cores_to_servers(outcome: Outcome) -> None:
    assert outcome.niceness == {"VLLM::EngineCore": [10, 10], "ResumingIngress": [0]}


def test_nothing_stays_behind(outcome: Outcome) -> None:
    assert outcome.left == set()
