"""AsyncClient: a cancelled call ends only after its thread is done, so nothing writes to the buffers later."""

import asyncio
import random
import threading

import pytest

import raykv
from tests.support.clients import remote_client
from tests.support.nodes import NBYTES, SPACE, cluster, content, names, put, wait_until


@pytest.mark.slow
def test_after_a_cancelled_get_nobody_writes_to_the_buffers(rng: random.Random):
    async def cancelled(client: raykv.AsyncClient, after_s: float) -> list[bytearray]:
        into = [bytearray(NBYTES) for _ in range(150)]
        call = asyncio.create_task(client.get(names(150), into))
        await asyncio.sleep(after_s)
        call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            return into
        return []

    async def use(client: raykv.AsyncClient) -> list[bool]:
        seen = []
        while len(seen) < 40:
            into = await cancelled(client, rng.uniform(0.0, 0.003))
            if into:
                seen.append((into, [bytes(chunk) for chunk in into]))
        await asyncio.sleep(0.2)
        return [[bytes(chunk) for chunk in into] != then for into, then in seen]

    with cluster(1, arena_nbytes="16 MiB") as running, remote_client(running) as client:
        put(client, names(150))
        running.settle()
        changed = asyncio.run(use(raykv.AsyncClient(client)))
        assert sum(changed) == 0, f"{sum(changed)} of 40 cancelled calls changed their buffers later"


def test_a_cancelled_call_ends_when_its_thread_does():
    async def use(client: raykv.AsyncClient, entered: threading.Event, leave: threading.Event) -> list[str]:
        call = asyncio.create_task(client.get(["a"], [bytearray(1)]))
        await asyncio.to_thread(entered.wait, 5.0)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0)
        order = ["cancelled", "done" if call.done() else "running"]
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        return order

    with cluster(1) as running:
        client = running.client(SPACE)
        entered, leave = threading.Event(), threading.Event()

        def slow_get(keys: list[str], into: list[bytearray]) -> None:
            entered.set()
            assert leave.wait(5.0)

        client.get = slow_get
        assert asyncio.run(use(raykv.AsyncClient(client), entered, leave)) == ["cancelled", "running"]


def test_a_cancelled_pin_is_released():
    async def use(client: raykv.AsyncClient, pinned: threading.Event, leave: threading.Event) -> None:
        call = asyncio.create_task(client.pin(["a"]))
        await asyncio.to_thread(pinned.wait, 5.0)
        call.cancel()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    with cluster(1) as running:
        client = running.client(SPACE)
        client.put(["a"], [content("a")])
        pinned, leave = threading.Event(), threading.Event()
        pin = client.pin

        def late(keys: list[str]) -> raykv.Pins:
            pins = pin(keys)
            pinned.set()
            assert leave.wait(5.0)
            return pins

        client.pin = late
        asyncio.run(use(raykv.AsyncClient(client), pinned, leave))
        wait_until(lambda: not running.nodes[0].store.table.columns.pins.any())
