"""What a client gets from the ingress when workers die."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from ray.exceptions import ActorDiedError
from vllm.v1.engine.exceptions import EngineDeadError

from raykv.integrations.serve import ingress
from tests.support.streams import WORDS, chat, parsed, text

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

Attempt = list[Any]


class Workers:
    """A deployment handle with scripted answers. Each attempt is a list of responses and of exceptions to raise."""

    def __init__(self, *attempts: Attempt) -> None:
        self.attempts = list(attempts)
        self.chat = SimpleNamespace(remote=self._answer)

    def options(self, **options: Any) -> "Workers":
        return self

    async def _answer(self, *arguments: Any) -> AsyncIterator[Any]:
        for response in self.attempts.pop(0):
            if isinstance(response, BaseException):
                raise response
            yield response


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    monkeypatch.setattr(ingress, "PAUSE_S", 0.0)

    def run(workers: Workers, **fields: Any) -> list[Any]:
        body = SimpleNamespace(**{"model": "m", "temperature": 0.0, "seed": None, **fields})

        async def collect() -> list[Any]:
            front = ingress.ResumingIngress({"m": workers}, {"m": None})
            return [response async for response in front._get_response(body=body, call_method="chat")]

        return asyncio.run(collect())

    return run


def in_batches(events: list[str], size: int) -> list[list[str]]:
    return [events[start : start + size] for start in range(0, len(events), size)]


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
@pytest.mark.parametrize("death", [ActorDiedError(), EngineDeadError()])
def test_a_stream_outlives_its_worker(answers: Callable[..., list[Any]], cut: int, death: Exception):
    whole = chat(WORDS)
    workers = Workers([*in_batches(whole[:cut], 2), death], in_batches(chat(WORDS, name="again"), 3))
    seen = [event for batch in answers(workers) for event in batch]
    assert text(seen) == "".join(WORDS)
    assert seen[-1] == "data: [DONE]\n\n"


def test_an_event_about_a_dead_engine_counts_as_its_death(answers: Callable[..., list[Any]]):
    error = f"data: {json.dumps({'error': {'message': str(EngineDeadError()), 'code': 500}})}\n\n"
    workers = Workers([[*chat(WORDS)[:3], error]], [chat(WORDS)])
    assert text([event for batch in answers(workers) for event in batch]) == "".join(WORDS)


def test_a_whole_answer_is_asked_for_again(answers: Callable[..., list[Any]]):
    assert answers(Workers([ActorDiedError()], [ActorDiedError()], ["whole"]), temperature=1.0) == ["whole"]


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"temperature": None}])
def test_a_sampled_stream_ends_with_an_error_that_clients_see(
    answers: Callable[..., list[Any]], fields: dict[str, Any]
):
    workers = Workers([chat(WORDS)[:3], ActorDiedError()])
    last = answers(workers, **fields)[-1]
    assert parsed(last)[0]["error"]["type"] == "WorkerLost"


def test_a_different_second_answer_ends_with_an_error(answers: Callable[..., list[Any]]):
    workers = Workers([chat(WORDS)[:3], ActorDiedError()], [chat(WORDS[::-1])])
    assert parsed(answers(workers)[-1])[0]["error"]["type"] == "WorkerLost"


def test_it_gives_up(answers: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ingress, "GIVE_UP_S", -1.0)
    with pytest.raises(ActorDiedError):
        answers(Workers([ActorDiedError()]))
    seen = answers(Workers([chat(WORDS)[:3], ActorDiedError()]))
    assert "keep dying" in parsed(seen[-1])[0]["error"]["message"]


def test_other_errors_pass_through(answers: Callable[..., list[Any]]):
    with pytest.raises(KeyError):
        answers(Workers([KeyError("a bug")]))
