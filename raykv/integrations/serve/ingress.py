"""An OpenAI server for Ray Serve. When a worker dies, the server sends the worker's requests again.

Without this module such a request fails. Before the first token, the client gets status 500. Later, the client gets a
stream that ends early.

A repeated request is cheap, because raykv holds the prompt's KV. A started stream is continued only if the request is
deterministic (temperature 0, or a seed).
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.serve.llm.ingress import OpenAiIngress
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError

from raykv.integrations.routing import trail
from raykv.integrations.serve.resume import PREFIX, AnswerDiffers, Resumption

log = logging.getLogger("ray.serve")

GIVE_UP_S: Final = 120.0
"""A request is sent again only within this time after its first worker died. The last attempt may take longer,
because it may wait in a queue for a worker."""
PAUSE_S: Final = 0.5
ENGINE_DEAD: Final = str(EngineDeadError())
"""vLLM sends this message in a started stream when the engine is dead."""


class ResumingIngress(OpenAiIngress):
    """Extends Ray Serve's OpenAI server: sends the requests of a dead worker again, and shows their routes."""

    async def routes(self, request_id: str | None = None) -> list[dict[str, Any]]:
        """Return what the routers of this replica decided for a request, or for the last ones: see `trail.Routed`.

        Call it by a handle: `serve.get_app_handle(APP).routes.remote(REQUEST_ID)`.
        """
        return [asdict(each) for each in trail.find(request_id)]

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        sent: list[str] = []
        give_up_s = None
        while True:
            answer = super()._get_response(body=body, call_method=call_method, raw_request=raw_request)
            try:
                resumption = Resumption(sent) if sent else None
                async for response in answer:
                    if not isinstance(response, list):  # no stream was requested, so this response is the whole answer
                        yield response
                        continue
                    for event in response:
                        _raise_if_dead(event)
                        new = resumption.rest(event) if resumption else event
                        if new is not None:
                            sent.append(new)
                            yield [new]
                return
            except (RayActorError, EngineDeadError) as error:
                log.warning("a worker was lost while it answered (%s)", type(error).__name__)
                if sent and not _repeatable(body):
                    yield [_failure("the worker died; the rest of a sampled answer cannot be repeated")]
                    return
                give_up_s = give_up_s or time.monotonic() + GIVE_UP_S
                if time.monotonic() > give_up_s:
                    if not sent:
                        raise
                    yield [_failure("the workers keep dying")]
                    return
            except AnswerDiffers:
                yield [_failure("the worker died, and the second answer differs from the first")]
                return
            await asyncio.sleep(PAUSE_S)


def _raise_if_dead(event: Any) -> None:
    """Raise EngineDeadError if the event reports a dead engine."""
    if isinstance(event, str) and event.startswith(f'{PREFIX}{{"error"') and ENGINE_DEAD in event:
        raise EngineDeadError


def _repeatable(body: Any) -> bool:
    return getattr(body, "temperature", None) == 0 or getattr(body, "seed", None) is not None


def _failure(message: str) -> str:
    """Make an error event, which OpenAI's client raises as an APIError.

    Without this event, the client would take a cut answer for a complete one.
    """
    return f"{PREFIX}{json.dumps({'error': {'message': message, 'type': 'WorkerLost', 'code': 503}})}\n\n"
