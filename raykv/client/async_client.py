"""The async client: `Client` for code that runs in an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from raykv.client.arguments import Keys
from raykv.client.client import Client
from raykv.client.leases import Pins

P = ParamSpec("P")
T = TypeVar("T")


def _start(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
    return asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **kwargs))


async def _finished(call: "asyncio.Future[T]") -> T:
    """Wait until a call ends, and return its result. If the caller was cancelled meanwhile, raise CancelledError."""
    cancelled = False
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        call.exception()  # read the exception; otherwise asyncio logs it
        raise asyncio.CancelledError
    return call.result()


def _in_thread(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Make the async form of a method of `Client`."""

    @wraps(method)
    async def call(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _finished(_start(getattr(self.client, method.__name__), *args, **kwargs))

    return call


class AsyncClient:
    """A client for async code. Each call runs in a worker thread, so it never blocks the event loop.

    A cancelled call raises CancelledError only after its thread has finished the call, at the latest at the call's
    deadline. So no thread uses the caller's buffers afterwards. The buffers of a cancelled `get` have undefined
    content.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    match = _in_thread(Client.match)
    get = _in_thread(Client.get)
    put = _in_thread(Client.put)
    hint = _in_thread(Client.hint)
    retain = _in_thread(Client.retain)
    session_end = _in_thread(Client.session_end)
    why = _in_thread(Client.why)
    delete = _in_thread(Client.delete)
    stats = _in_thread(Client.stats)

    async def pin(self, keys: Keys, **options: Any) -> Pins:
        """See `Client.pin`. A cancelled call leaves nothing pinned."""
        call = _start(self.client.pin, keys, **options)
        try:
            return await _finished(call)
        except asyncio.CancelledError:
            if not call.exception():
                await _finished(_start(call.result().release))
            raise
