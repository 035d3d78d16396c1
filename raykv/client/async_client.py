"""The async client."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from raykv.client.arguments import Keys
from raykv.client.client import Client
from raykv.client.leases import Pins
from raykv.client.why import Why
from raykv.types import GetResult, Match, PutResult, Scattered

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient:
    """A client for async code. Each call runs in a worker thread, so it never blocks the event loop.

    A cancelled call raises CancelledError only after its thread is done, at the latest at the call's deadline. So no
    thread uses the caller's buffers afterwards.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    async def match(self, keys: Keys, **options: Any) -> Match:
        return await _in_thread(self.client.match, keys, **options)

    async def get(self, keys: Keys, into: Sequence[Scattered], **options: Any) -> GetResult:
        """See `Client.get`. A cancelled call leaves undefined content in the buffers."""
        return await _in_thread(self.client.get, keys, into, **options)

    async def put(self, keys: Keys, values: Sequence[Scattered], **options: Any) -> PutResult:
        return await _in_thread(self.client.put, keys, values, **options)

    async def pin(self, keys: Keys, **options: Any) -> Pins:
        """See `Client.pin`. A cancelled call leaves nothing pinned."""
        call = _start(self.client.pin, keys, **options)
        try:
            return await _finished(call)
        except asyncio.CancelledError:
            if not call.exception():
                await _finished(_start(call.result().release))
            raise

    async def hint(self, keys: Keys, **options: Any) -> int:
        return await _in_thread(self.client.hint, keys, **options)

    async def session_end(self, keys: Keys, **options: Any) -> int:
        return await _in_thread(self.client.session_end, keys, **options)

    async def why(self, keys: Keys | None = None, **options: Any) -> list[Why]:
        return await _in_thread(self.client.why, keys, **options)

    async def delete(self, keys: Keys, **options: Any) -> int:
        return await _in_thread(self.client.delete, keys, **options)

    async def stats(self, **options: Any) -> dict[str, Any]:
        return await _in_thread(self.client.stats, **options)


def _start(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
    return asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **kwargs))


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await _finished(_start(call, *args, **kwargs))


async def _finished(call: "asyncio.Future[T]") -> T:
    """Wait for a call to end, even if the caller is cancelled. Then raise CancelledError."""
    cancelled = False
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        call.exception()  # reading the exception keeps asyncio from logging it
        raise asyncio.CancelledError
    return call.result()
