"""A node of this host gone wrong: it lends slots and pins chunks that its memory does not have."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig
from raykv.errors import ProtocolError
from raykv.protocol import messages
from raykv.protocol.placement import Member, View
from raykv.transport.base import Reply
from raykv.transport.server import SocketServer
from tests.support.nodes import SPACE
from tests.support.stores import Bench
from tests.support.transports import WarehouseSession

PAGE = 4096
ARENA_NBYTES = 1 << 20


def raw(kind: str, *numbers: int) -> bytes:
    return np.array(numbers, kind).tobytes()


class Lender:
    """A node that answers Lend and Pin with what the test chose."""

    epoch = 1

    def __init__(self, bench: Bench) -> None:
        store = bench.store
        self._attached = messages.Attached("n", "h", str(store.table.memory.path), str(store.arena.path), b"s")
        self.lent, self.held = messages.Lent(), messages.Held(b"", b"", b"", b"")
        self.commits: list[messages.Commit] = []

    def session(self, *, local: bool) -> WarehouseSession:
        return WarehouseSession(local)

    def answer(self, request: messages.Message, session: object) -> Reply:
        match request:
            case messages.Attach():
                return Reply(self._attached)
            case messages.GetView():
                return Reply(messages.ViewIs(View(1, (Member("n", "h", {}, 1.0, 1),))))
            case messages.Lend():
                return Reply(self.lent)
            case messages.Pin():
                return Reply(self.held)
            case messages.Commit():
                self.commits.append(request)
                return Reply(messages.Committed(tuple(messages.CommittedRun() for _ in request.runs)))
        return Reply(messages.Done())


@pytest.fixture
def lender() -> Iterator[tuple[Lender, raykv.Client]]:
    bench = Bench.open(None, now_s=time.monotonic() - 1.0)
    node, address = Lender(bench), f"unix:@raykv-test-{time.monotonic_ns()}"
    server = SocketServer(node, address, b"", io_timeout_s=1.0, max_connections=8)
    server.serve()
    with raykv.Client(SPACE, Router(ClientConfig.load({"address": address, "timeout_s": 2.0}))) as client:
        yield node, client
    server.close()
    bench.store.close()


@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        (b"12345", raw("<u8", 0)),
        (raw("<i4", 1), b""),
        (raw("<i4", 1), raw("<u8", ARENA_NBYTES)),
        (raw("<i4", 1), raw("<u8", ARENA_NBYTES - PAGE + 1)),
        (raw("<i4", 1, 2), raw("<u8", 0, (1 << 64) - 1)),
    ],
    ids=range(5),
)
def test_slots_outside_the_memory_are_not_written_to(lender, rows: bytes, offsets: bytes):
    node, client = lender
    node.lent = messages.Lent(raw("<i4", 1), raw("<u8", ARENA_NBYTES - PAGE))
    assert client.put(["a"], [bytes(PAGE)]).stored == 1
    node.lent = messages.Lent(rows, offsets)
    result = client.put(["b"], [bytes(PAGE)])
    assert (result.stored, result.skipped) == (0, 1)
    assert len(node.commits) == 1


@pytest.mark.parametrize(
    "held",
    [
        (b"12345", raw("<u8", 0), raw("<u4", 9), raw("<u8", 0)),
        (raw("<i4", 1, 2), raw("<u8", 0, 0), raw("<u4", 9, 9), raw("<u8", 0, 0)),
        (raw("<i4", 1), b"", raw("<u4", 9), raw("<u8", 0)),
        (raw("<i4", 1), raw("<u8", 0), b"", raw("<u8", 0)),
        (raw("<i4", 1 << 30), raw("<u8", 0), raw("<u4", 9), raw("<u8", 0)),
        (raw("<i4", 1), raw("<u8", ARENA_NBYTES - 8), raw("<u4", 9), raw("<u8", 0)),
    ],
    ids=range(6),
)
def test_pins_outside_the_memory_are_refused(lender, held: tuple[bytes, ...]):
    node, client = lender
    node.held = messages.Held(raw("<i4", -1), raw("<u8", 1 << 63), raw("<u4", 9), raw("<u8", 0))
    assert client.pin(["a"]).views == [None]
    node.held = messages.Held(*held)
    with pytest.raises(ProtocolError):
        client.pin(["a"])
