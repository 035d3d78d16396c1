"""Targets: members gone wrong, with messages of valid types and hostile values."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig
from raykv.errors import RayKVError
from raykv.membership.membership import InProcessMembership, Membership
from raykv.membership.proxy import MembershipProxyServer
from raykv.protocol import codec, messages
from raykv.protocol.chunk_keys import from_bytes
from raykv.protocol.placement import Member, View
from raykv.transport.base import Reply
from raykv.transport.server import SocketServer
from tests.fuzz.base import fuzzed
from tests.support import hostile, stores
from tests.support.crowd import Crowd, check_store
from tests.support.hostile import Source
from tests.support.nodes import SPACE, keys_of, make_node
from tests.support.transports import SECRET, WarehouseSession

STORAGE = {"arena_nbytes": "128 KiB", "extent_nbytes": "64 KiB", "max_chunks": 64}
MEMBER = Member("n", "h", {"tcp": "127.0.0.1:1"}, 1.0, 1)


def random_seeds() -> list[bytes]:
    return [bytes((17 * at + number) % 251 for at in range(200)) for number in range(40)] + [b"\0" * 50]


@fuzzed(random_seeds)
def membership(data: bytes) -> None:
    """Heartbeats and changes at the directory. Its answers can be sent, and its view can be used by every node."""
    source, directory = Source(data), InProcessMembership(member_timeout_s=5.0)
    server = MembershipProxyServer(directory, "n")
    session = server.session(local=False)
    kinds = [messages.Heartbeat, messages.Heartbeat, messages.Configure, messages.Leave]
    while source:
        request = hostile.structure(source.pick(kinds), source)
        with suppress(RayKVError):  # the message is refused when it is decoded
            raw = codec.encode(request, 0, 0)
            request = codec.decode(raw[codec.HEADER.size :])
            server.answer(request, session)
        check_directory(directory.logic)


def check_directory(logic: Membership) -> None:
    """An honest node joins, and gets a view with which it can work."""
    answer = logic.beat(messages.Heartbeat(MEMBER, 0), now_s=time.monotonic())
    decoded = codec.decode(codec.encode(answer, 0, 0)[codec.HEADER.size :])
    assert isinstance(decoded, messages.HeartbeatAnswer)
    assert decoded.view is not None
    keys = from_bytes(keys_of(hostile.CHUNKS))
    assert sum(map(len, decoded.view.ring.shares(keys).values())) == len(keys)
    assert all(0 <= known.incarnation < 1 << 63 for known in decoded.view.members)


# -- a client whose nodes lie -----------------------------------------------------------------------------------------


@cache
def memory() -> stores.Bench:
    """The memory that a lying node gives to clients on its host. It stays mapped until this process ends."""
    return stores.Bench.open(None, now_s=time.monotonic() - 1.0, arena_nbytes="128 KiB", max_chunks=64)


def files() -> tuple[str, str]:
    store = memory().store
    return str(store.table.memory.path), str(store.arena.path)


class Liar:
    """A node that answers every request with hostile values, drawn from `source`. Without a source, it is honest.

    Attributes:
        member: The node's entry in the view.
    """

    epoch = 1
    member: Member

    def __init__(self) -> None:
        self.source: Source | None = None
        self._lock = threading.Lock()

    def session(self, *, local: bool) -> WarehouseSession:
        return WarehouseSession(local)

    def answer(self, request: messages.Message, session: object) -> Reply:
        with self._lock:
            source = self.source
            if isinstance(request, messages.Attach) and (source is None or source.below(8)):
                return Reply(messages.Attached("n", "elsewhere", *files(), SECRET, True))
            if source is None or (isinstance(request, messages.GetView) and source.below(8)):
                return Reply(messages.ViewIs(View(1, (self.member,))))
            answer = self._answer_to(request, source)
            payload = source.raw(source.pick([0, 0, 1, 4096, 9000])) if isinstance(answer, messages.Reading) else b""
        if not isinstance(request, messages.Write):
            return Reply(answer, outgoing=[memoryview(payload)])
        return Reply(answer, incoming=[[memoryview(bytearray(source.pick([0, 1, 4096])))]], finish=self._second)

    def _answer_to(self, request: messages.Message, source: Source) -> Any:
        kinds: dict[type, type] = {
            messages.Read: messages.Reading,
            messages.Locate: messages.Located,
            messages.Why: messages.Histories,
            messages.Write: messages.Accepted,
            messages.Configure: messages.Configured,
            messages.GetView: messages.ViewIs,
            messages.GetStats: messages.Stats,
            messages.Lend: messages.Lent,
            messages.Commit: messages.Committed,
            messages.Pin: messages.Held,
            messages.GiveBack: messages.Done,
            messages.Unpin: messages.Done,
            messages.OpenNamespace: messages.Done,
        }
        kind = kinds.get(type(request), messages.Count)
        made = hostile.structure(kind, source) if source.below(8) else hostile.answer(source)
        if not source.below(3):
            _fit(made, len(getattr(request, "keys", b"")) // 16)
        try:  # a message that nobody can decode is the subject of another target
            return codec.decode(codec.encode(made, 0, 0)[codec.HEADER.size :])
        except RayKVError:
            return messages.Done()

    def _second(self, complete: bool) -> messages.Message:
        source = self.source
        return messages.Count(1) if source is None else messages.Count(source.pick([0, 1, -1, 1 << 40]))


WIDTHS = {"nbytes": 4, "checksums": 8, "places": 4, "ages_s": 4}
"""Width of the entries of arrays in answers. It is 1 for all others."""


def _fit(answer: Any, keys: int) -> None:
    """Give the arrays in an answer the length that the request asks for, so that the client looks at their values."""
    for name in answer.__struct_fields__:
        value = getattr(answer, name)
        if isinstance(value, bytes) and name not in ("group", "registry", "stats", "secret"):
            width = 1 if isinstance(answer, messages.Histories) and name == "places" else WIDTHS.get(name, 1)
            setattr(answer, name, (value + bytes(width * keys))[: width * keys])


@contextmanager
def lied_to(address: str) -> Iterator[tuple[Liar, "raykv.Client"]]:
    """A client that has joined while its node was honest. It trips no breaker, and waits for little."""
    service = Liar()
    server = SocketServer(service, address, SECRET, io_timeout_s=0.05, max_connections=64)
    service.member = Member("n", "elsewhere", {"tcp": server.address}, 1.0, 1)
    server.serve()
    fields = {"address": server.address, "secret": SECRET.hex(), "breaker_s": 0.0, "timeout_s": 0.1, "verify": "always"}
    client = raykv.Client(SPACE, Router(ClientConfig.load(fields)))
    try:
        yield service, client
    finally:
        service.source = None
        client.close()
        server.close()
    assert not server.bugs


def calls_of(client: "raykv.Client") -> list[Callable[[], object]]:
    names = hostile.CHUNKS[:3]
    keys, into = client.keys(names), [bytearray(4096) for _ in names]
    values = [bytes(4096) for _ in names]
    return [
        lambda: client.match(names),
        lambda: client.get(names, into),
        lambda: client.get(names, into, match=client.match(names)),
        lambda: client.put(names, values, chained=True),
        lambda: client.put(names, values, wait=False),
        lambda: client.flush(),
        lambda: client.exists(names),
        lambda: client.why(names),
        lambda: client.delete(names),
        lambda: client.session_end(keys),
        lambda: client.retain(keys, ttl_s=3.0, priority=3),
        lambda: client.configure(ttl_s=3.0),
        lambda: client.drop_namespace(),
        lambda: client.namespaces(),
        lambda: client.stats(),
        lambda: client.get_one(client.key(names[0]), into[0]),
        lambda: client.put_one(client.key(names[0]), values[0]),
        lambda: client.exists_one(client.key(names[0])),
        lambda: client.prepare(4096, 4),
        lambda: client.pin(names).release(),
        lambda: _use(client.pin(names)),
        lambda: client.reserve(names, 4096).commit(),
        lambda: client.reserve(names, 4096).abort(),
    ]


def _use(pins: "raykv.Pins") -> None:
    with pins:
        pins.valid()
        assert all(view is None or isinstance(view, memoryview) for view in pins.views)


@fuzzed(random_seeds)
def answers(data: bytes) -> None:
    """Answers of a node to a client on another host. Calls give results or RayKVError."""
    call_some("127.0.0.1:0", data)


@fuzzed(random_seeds)
def local_answers(data: bytes) -> None:
    """Answers of a node to a client on its host, about slots and pins. Calls give results or RayKVError."""
    call_some(f"unix:@raykv-fuzz-{os.getpid()}", data)


def call_some(address: str, data: bytes) -> None:
    with lied_to(address) as (service, client):
        source = service.source = Source(data)
        calls = calls_of(client)
        for _ in range(6):
            with suppress(RayKVError):
                source.pick(calls)()


# -- a node -----------------------------------------------------------------------------------------------------------


@fuzzed(random_seeds)
def requests(data: bytes) -> None:
    """Requests to a node's handlers, on two connections. No answer reports a bug, and the store stays sound."""
    source = Source(data)
    node = make_node(storage=STORAGE)
    try:
        crowd = Crowd(node)
        while source:
            peer, what = crowd.peer(source.below(2)), source.below(8)
            if what == 0:
                with suppress(RayKVError):
                    peer.commit(peer.filled(hostile.CHUNKS[: 1 + source.below(4)], 4096))
            else:
                without = (messages.Drain,) if peer.session.local else ()
                request = hostile.message(source, without=without)
                crowd.send(peer, request, whole=what > 1, source=source)
        crowd.close()
        assert not crowd.bugs, crowd.bugs
        check_store(node)
    finally:
        node.stop()
