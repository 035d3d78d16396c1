"""The async face of the client: the same calls, each in a worker thread."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from raykv.client.client import Client, Keys
from raykv.client.leases import Pins
from raykv.client.why import Why
from raykv.types import GetResult, Match, PutResult, Scattered


class AsyncClient:
    """A client for async code: the same calls, each in a worker thread, so that the event loop never waits."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def match(self, keys: Keys, **options: Any) -> Match:
        """See `Client.match`."""
        return await asyncio.to_thread(self.client.match, keys, **options)

    async def get(self, keys: Keys, into: Sequence[Scattered], **options: Any) -> GetResult:
        """See `Client.get`. Cancelling does not stop it: the buffers must live until it ends."""
        return await asyncio.to_thread(self.client.get, keys, into, **options)

    async def put(self, keys: Keys, values: Sequence[Scattered], **options: Any) -> PutResult:
        """See `Client.put`."""
        return await asyncio.to_thread(self.client.put, keys, values, **options)

    async def pin(self, keys: Keys, **options: Any) -> Pins:
        """See `Client.pin`. What is pinned after it was cancelled is released again."""
        given_up, came = threading.Event(), threading.Lock()

        def pin() -> Pins:
            pins = self.client.pin(keys, **options)
            with came:
                if given_up.is_set():
                    pins.release()
                else:
                    kept.append(pins)
            return pins

        kept: list[Pins] = []
        try:
            return await asyncio.to_thread(pin)
        except asyncio.CancelledError:
            with came:
                given_up.set()
            if kept:  # it came, and nobody will see it
                await asyncio.shield(asyncio.to_thread(kept[0].release))
            raise

    async def hint(self, keys: Keys, **options: Any) -> int:
        """See `Client.hint`."""
        return await asyncio.to_thread(self.client.hint, keys, **options)

    async def session_end(self, keys: Keys, **options: Any) -> int:
        """See `Client.session_end`."""
        return await asyncio.to_thread(self.client.session_end, keys, **options)

    async def why(self, keys: Keys | None = None, **options: Any) -> list[Why]:
        """See `Client.why`."""
        return await asyncio.to_thread(self.client.why, keys, **options)

    async def delete(self, keys: Keys, **options: Any) -> int:
        """See `Client.delete`."""
        return await asyncio.to_thread(self.client.delete, keys, **options)

    async def stats(self, **options: Any) -> dict[str, Any]:
        """See `Client.stats`."""
        return await asyncio.to_thread(self.client.stats, **options)
