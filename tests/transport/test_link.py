"""Answers arrive in the order of the requests. An answer to any other request closes the link."""

import contextlib
import socket
import time

import pytest

from raykv.errors import PeerUnavailable, ProtocolError, UsageError
from raykv.protocol import messages
from raykv.transport import link as link_module
from raykv.transport.link import Link
from raykv.transport.server import SocketServer
from raykv.transport.stream import Stream
from tests.support.transports import SECRET, LyingServer, Warehouse, soon


def stats(number: int) -> messages.Stats:
    return messages.Stats(str(number).encode())


@pytest.mark.parametrize(
    ("ids", "good"),
    [([1, 2, 3], 3), ([2, 1, 3], 0), ([1, 3, 2], 1), ([1, 1, 2], 1), ([1, 2, 0], 2), ([9, 2, 3], 0)],
    ids=["in-order", "swapped", "swapped-later", "repeated", "zero", "unknown"],
)
def test_an_answer_to_another_request_closes_the_link(ids, good):
    lying = LyingServer([(stats(number), number) for number in ids], after=3)
    link = Link.connect(lying.address, SECRET, deadline_s=soon())
    with contextlib.closing(lying), contextlib.closing(link):
        for _ in range(3):
            link.post(messages.GetStats(), deadline_s=soon())
        for number in range(good):
            assert link.collect(deadline_s=soon()) == stats(number + 1)
        if good < 3:
            with pytest.raises(ProtocolError, match="request"):
                link.collect(deadline_s=soon())
            assert link.closed
            with pytest.raises(PeerUnavailable):
                link.collect(deadline_s=soon())
            with pytest.raises(PeerUnavailable):
                link.call(messages.GetStats(), deadline_s=soon())


def test_an_answer_without_its_request_that_says_why():
    lying = LyingServer([(messages.Failure("ProtocolError", "version 9, we speak 4"), 0)], after=1)
    link = Link.connect(lying.address, SECRET, deadline_s=soon())
    with contextlib.closing(lying), contextlib.closing(link):
        with pytest.raises(ProtocolError, match="version 9"):
            link.call(messages.GetStats(), deadline_s=soon())
        assert link.closed


def test_the_second_answer_of_a_write_has_the_number_of_its_request():
    for second_id in (1, 2):
        lying = LyingServer([(messages.Accepted(b""), 1), (messages.Count(0), second_id)], after=1)
        link = Link.connect(lying.address, SECRET, deadline_s=soon())
        with contextlib.closing(lying), contextlib.closing(link):
            request = messages.Write(b"", 1)
            if second_id == 1:
                assert link.push(request, lambda answer: [], deadline_s=soon()) == messages.Count(0)
                continue
            with pytest.raises(ProtocolError, match="request 2, where one to 1"):
                link.push(request, lambda answer: [], deadline_s=soon())
            assert link.closed


def read_to_the_end(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def test_a_request_that_nobody_waits_for_is_not_delivered_later():
    """The server hangs and its buffer is full. When the client gives up, the rest of the request must not follow."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client = socket.create_connection(listener.getsockname())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        server, _ = listener.accept()
    with server:
        link = Link(Stream(client, tick_s=0.01))
        request = messages.Delete(bytes(1 << 20))
        link.post(request, deadline_s=soon())
        with pytest.raises(PeerUnavailable):
            link.collect(deadline_s=time.monotonic() + 0.02)
        with pytest.raises(ConnectionResetError):
            read_to_the_end(server)


def test_numbers_start_again_before_they_are_too_large(monkeypatch):
    monkeypatch.setattr(link_module, "MAX_REQUEST_ID", 3)
    server = SocketServer(Warehouse(), "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    server.serve()
    with contextlib.closing(Link.connect(server.address, SECRET, deadline_s=soon())) as link:
        for number in range(8):
            assert link.call(messages.Locate(b"%d" % number), deadline_s=soon()) == stats(number)
        with pytest.raises(UsageError):
            link.push(messages.Delete(b""), lambda answer: [], deadline_s=soon())
        assert link.push(messages.Write(b"", 1), lambda answer: [[memoryview(b"stock")]], deadline_s=soon())
    server.close()
