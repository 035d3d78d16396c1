"""A node on its sockets. Clients wait while it starts, and impossible requests are refused one by one."""

import contextlib
import random
import socket
import struct
import threading

import pytest

import raykv
from raykv.errors import RayKVError
from raykv.memory.copying import checksum_of
from raykv.node.node import Node
from raykv.protocol import codec, messages
from raykv.transport.link import Link
from tests.support.nodes import Peer, keys_of, make_node, running_node, wait_until
from tests.support.transports import SECRET, member_stream, soon

PAGE = 4096
DIGEST = raykv.Namespace(model="m").group.digest


@pytest.fixture
def node():
    with running_node(secret=SECRET, storage={"arena_nbytes": "1 MiB"}, io_timeout_s=0.3, max_connections=8) as made:
        yield made
        assert made.failure is None


def connect(node: Node) -> Link:
    return Link.connect(node.member.address, SECRET, deadline_s=soon())


def serves(node: Node) -> bool:
    with contextlib.closing(connect(node)) as link:
        return isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)


def test_a_client_that_connects_while_the_node_starts_waits_until_it_can_answer(monkeypatch):
    made = make_node(secret=SECRET)
    answers: list[object] = []

    def ask() -> None:
        with contextlib.closing(Link.connect(made.config.local_address, b"", deadline_s=soon())) as link:
            try:
                answers.append(link.call(messages.Attach(), deadline_s=soon()))
            except RayKVError as error:
                answers.append(error)

    asking = threading.Thread(target=ask)

    def slow() -> str:
        asking.start()
        asking.join(0.3)
        return "here"

    monkeypatch.setattr("raykv.node.node.host_identity", slow)
    try:
        made.start()
        asking.join(5.0)
        assert [type(answer) for answer in answers] == [messages.Attached]
        assert answers[0].host == "here"
        assert not made.stats()["errors"]
    finally:
        made.stop()


def test_requests_with_impossible_fields_are_refused_one_by_one(node):
    huge, row = (1 << 64) - 1, struct.pack("<i", 0)
    link = connect(node)
    link.call(messages.OpenNamespace(b'{"model": "m"}'), deadline_s=soon())
    used = node.stats()["used_nbytes"]
    for request in (
        messages.Lend(huge, 1, group=DIGEST),
        messages.Lend(-1, 1, group=DIGEST),
        messages.Lend(4096, -1, group=DIGEST),
        messages.Lend(4096, 1, keys=b"x" * 15, group=DIGEST),
        messages.Lend(4096, 1, parent=b"y", group=DIGEST),
        messages.Lend(4096, 1, group=b"?"),
        messages.GiveBack(struct.pack("<2i", 3, 3)),
        messages.Unpin(row),
        messages.Unpin(b"abc"),
        messages.Write(b"x" * 15, 4096, group=DIGEST),
        messages.OpenNamespace(b"[]"),
        messages.OpenNamespace(b"\xff"),
        messages.OpenNamespace(b'{"model": "m", "color": 1}'),
        messages.OpenNamespace(b'{"model": 5}'),
        messages.OpenNamespace(b'{"model": "' + b"m" * 3000 + b'"}'),
        messages.Configure(b"\xff", b"{}"),
        messages.Announce("n", b"odd"),
        messages.Read(b"odd"),
        messages.Locate(b"odd"),
        messages.Done(),
    ):
        with pytest.raises(RayKVError) as caught:
            link.call(request, deadline_s=soon())
        assert "internal error" not in str(caught.value), request
    sums = messages.Checksums(checksum_of([memoryview(bytes(4096))]).to_bytes(8, "little"))
    for depth in (-1, huge):  # a wrong depth is refused only after the payload has arrived
        request = messages.Write(b"x" * 16, 4096, depth=depth, group=DIGEST)
        with pytest.raises(RayKVError, match="depth"):
            link.push(request, lambda answer: [[memoryview(bytes(4096))]], lambda: sums, deadline_s=soon())
    assert node.stats()["used_nbytes"] == used
    assert isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)
    link.close()


def test_a_reader_that_does_not_read_is_disconnected_and_its_pins_end(node):
    peer = Peer(node).open()
    big = 15 * PAGE
    peer.commit(peer.filled(["big"], big))
    stream = member_stream(node.member.address)
    with stream.socket as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.send(codec.encode(messages.Read(keys_of(["big"]) * 400), 0, 1), soon())  # 25 MB that nobody reads
        wait_until(lambda: node.store.table.columns.pins.any())
        wait_until(lambda: not node.store.table.columns.pins.any())
    peer.close()
    assert serves(node)


def test_damaged_frames_never_stop_a_node(node, rng: random.Random, caplog):
    stream = member_stream(node.member.address)
    for number in range(300):
        raw = bytearray(
            codec.encode(messages.Lend(4096, 1, keys=rng.randbytes(32), parent=rng.randbytes(16), group=DIGEST), 0, 1)
        )
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(codec.HEADER.size, len(raw))] = rng.randrange(256)
        stream.send(bytes(raw), soon())
        answer, _ = stream.message(soon())
        assert isinstance(answer, messages.Failure), number
        assert "internal error" not in answer.text
        if answer.kind == "ProtocolError":  # the message was not valid, so the node has closed the connection
            stream.socket.close()
            stream = member_stream(node.member.address)
    stream.socket.close()
    assert "bug" not in caplog.text
    assert len(caplog.records) <= 10
    assert serves(node)
