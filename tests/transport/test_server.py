"""Clients that fail the handshake, send wrong bytes or stall are disconnected. All other clients are served."""

import contextlib
import logging
import random
import socket
import threading
import time

import pytest

from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, RayKVError, TransientError
from raykv.protocol import codec, messages
from raykv.protocol.keyring import key_id
from raykv.transport import handshake, server
from raykv.transport.addresses import parse_address
from raykv.transport.link import Link
from raykv.transport.server import SocketServer
from raykv.transport.stream import Stream
from tests.support.nodes import wait_until
from tests.support.transports import (
    SECRET,
    Warehouse,
    is_closed,
    member_socket,
    member_stream,
    raw_socket,
    soon,
    stream_on,
)

VERSION = codec.VERSION


@pytest.fixture
def service():
    return Warehouse(bytes(30 << 20))


@pytest.fixture(params=["tcp", "tls", "unix"])
def served(request, service):
    address = f"unix:@raykv-test-{time.monotonic_ns()}" if request.param == "unix" else "127.0.0.1:0"
    tls = request.getfixturevalue("tls") if request.param == "tls" else None
    made = SocketServer(service, address, SECRET, io_timeout_s=0.3, max_connections=8, tls=tls)
    made.serve()
    yield made
    made.close()
    assert made.bugs == 0
    assert all(session.closed.wait(5.0) for session in service.sessions)


def connect(served: SocketServer, seconds: float = 5.0) -> Link:
    return Link.connect(served.address, SECRET, deadline_s=soon(seconds), tls=served._tls)


def serves(served: SocketServer) -> bool:
    with contextlib.closing(connect(served)) as link:
        return link.call(messages.GetView(), deadline_s=soon()) == messages.Stats(b"GetView")


def header(length: int, version: int = VERSION, request_id: int = 1) -> bytes:
    return codec.HEADER.pack(codec.MAGIC, version, 0, 0, request_id, length)


def test_garbage_before_the_handshake(served, rng):
    for length in (0, 1, 10, 38, 39, 40, 71, 200, 100_000):
        with raw_socket(served.address, served._tls) as stream:
            assert is_closed(stream, after=rng.randbytes(length))
        assert serves(served)
    assert served.refused == 9


def test_garbage_after_the_handshake(served, rng):
    for body in (
        b"GET / HTTP/1.1\r\n\r\n",
        header(5) + b"\xff" * 5,
        header(1 << 31),
        header(0, version=VERSION + 1),
        header(100_000) + b"\x91" * 100_000,
        *(rng.randbytes(1000) for _ in range(20)),
    ):
        with member_socket(served.address, served._tls) as plain:
            assert is_closed(plain, after=body)
        stream = member_stream(served.address, tls=served._tls)
        with stream.socket:
            stream.send(body, soon())
            assert is_closed(stream.socket, after=b"")
    assert serves(served)


def test_random_frames_never_stop_a_server(served, rng, recwarn):
    """Valid messages with a few changed bytes. Each gets an answer or an error, and causes no unexpected exception."""
    group, keys = b"g" * 16, b"k" * 32
    run = messages.Run(keys, 4096, bytes(8), bytes(16), parent=keys[:16], depth=3, ttl_s=1.5)
    samples = [
        messages.Commit((run, run), group=group),
        messages.Lend(4096, 2, keys=keys, group=group),
        messages.Configure('{"model": "ä"}'.encode(), fields=b'{"a": [1, {"b": 2}]}'),
        messages.OpenNamespace('{"model": "ä"}'.encode()),
        messages.Announce("nöde", keys, keys),
        messages.Report({"gone": 3, "ä": 4}, gets=(1, 2)),
    ]
    connection = None
    for number in range(600):
        body = bytearray(codec.encode(rng.choice(samples), 1, number + 1))
        for _ in range(rng.randrange(1, 5)):
            body[rng.randrange(codec.HEADER.size, len(body))] = rng.choice([0x80, 0xC3, 0xFF, rng.randrange(256)])
        if rng.random() < 0.2:  # replace the body by as many random bytes
            body = body[: codec.HEADER.size] + rng.randbytes(len(body) - codec.HEADER.size)
        if connection is None:
            connection = member_stream(served.address, tls=served._tls)
        connection.send(bytes(body), soon())
        answer, head = connection.message(soon())
        assert head.request_id == number + 1
        if isinstance(answer, messages.Failure) and answer.kind == "ProtocolError":
            assert is_closed(connection.socket)
            connection.socket.close()
            connection = None
    if connection is not None:
        connection.socket.close()
    assert serves(served)


def test_text_that_is_not_utf8_is_a_protocol_error(served):
    whole = codec.encode(messages.Leave("node-0"), 0, 5)
    for wrong in (b"\xff", b"\xc3", b"\x80"):
        stream = member_stream(served.address, tls=served._tls)
        with stream.socket:
            stream.send(whole.replace(b"n", wrong, 1), soon())
            answer, head = stream.message(soon())
            assert (type(answer), head.request_id) == (messages.Failure, 5)
            assert answer.kind == "ProtocolError"
            assert is_closed(stream.socket)


def test_the_log_says_little_about_a_thousand_bad_frames(served, caplog):
    caplog.set_level(logging.DEBUG)
    for number in range(1000):
        stream = member_stream(served.address, tls=served._tls)
        with stream.socket:
            stream.send(header(5) + b"\xff" * 5 if number % 2 else header(9, version=99), soon())
            assert is_closed(stream.socket)
    assert 1 <= len(caplog.records) <= server.MAX_LOG_LINES
    assert max(len(record.getMessage()) for record in caplog.records) < 500
    assert serves(served)


@pytest.mark.parametrize("served", ["tcp"], indirect=True)
def test_a_stranger_is_logged_with_its_address_and_a_probe_is_not(served, caplog):
    """A wrong secret is a mistake that operators must see. A health check that connects and ends is none."""
    with raw_socket(served.address) as probe:
        assert is_closed(probe, after=b"")
    assert serves(served)
    assert not caplog.records
    for number in range(2 * server.MAX_LOG_LINES):
        with raw_socket(served.address) as stream:
            hello = (
                handshake.greeting(b"n" * 32) + bytes(8)
                if number % 2
                else b"GET / HTTP/1.1\r\nHost: node\r\n\r\n".ljust(80)
            )
            own = "{}:{}".format(*stream.getsockname())
            assert is_closed(stream, after=hello + bytes(handshake.PROOF_NBYTES))
            if number == 0:
                assert f"connection of {own} ended: the peer does not speak raykv" in caplog.text
    assert 1 <= len(caplog.records) <= server.MAX_LOG_LINES
    assert "does not know this cluster's secret" in caplog.text


def test_the_log_counts_what_it_left_out(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(server, "MAX_LOG_LINES", 2)
    monkeypatch.setattr(server, "LOG_EVERY_S", 0.05)
    limit = server.LogLimit(logging.getLogger("x"))
    for number in range(5):
        limit.write(logging.WARNING, "line %d", number)
    assert [record.getMessage() for record in caplog.records] == ["line 0", "line 1"]
    until_s = soon()
    while len(caplog.records) < 3 and time.monotonic() < until_s:
        limit.write(logging.WARNING, "line %d", 9)
    assert caplog.records[2].getMessage().startswith("line 9 (")
    assert "left out" in caplog.records[2].getMessage()


def test_the_peer_learns_what_was_wrong(served):
    stream = member_stream(served.address, tls=served._tls)
    with stream.socket:
        stream.send(header(0, version=VERSION + 1), soon())
        answer, head = stream.message(soon())
        assert isinstance(answer, messages.Failure)
        assert head.request_id == 0
        assert f"version {VERSION + 1}" in answer.text


def test_one_that_stalls_in_a_message_is_disconnected_and_others_are_served(served):
    with member_socket(served.address, served._tls) as stalled:
        stalled.sendall(header(100) + b"half")
        assert serves(served)
        assert is_closed(stalled)  # disconnected after io_timeout_s


def test_one_that_does_not_read_is_disconnected(served, service):
    with raw_socket(served.address, served._tls) as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        secret = b"" if served.address.startswith("unix:") else SECRET
        stream = stream_on(sleeper)
        handshake.greet_server(stream, secret, soon())
        stream.send(codec.encode(messages.Read(b""), 0, 1), soon())  # 30 MiB that nobody reads
        assert serves(served)
        until_s = soon()
        while not service.finished:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert service.finished == [False]


def test_more_connections_than_allowed(served):
    links = [connect(served) for _ in range(8)]
    with pytest.raises(TransientError):
        connect(served)
    for link in links:
        assert link.call(messages.GetView(), deadline_s=soon()) == messages.Stats(b"GetView")
    links.pop().close()
    until_s = soon()
    while True:
        try:
            assert serves(served)
            break
        except TransientError:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    for link in links:
        link.close()


def test_strangers_that_dawdle_do_not_use_up_the_connections_of_members(served):
    strangers = [
        raw_socket(served.address, served._tls) for _ in range(20)
    ]  # more than the 8 connections that are allowed
    links = [connect(served) for _ in range(8)]
    for link in links:
        assert link.call(messages.GetView(), deadline_s=soon()) == messages.Stats(b"GetView")
        link.close()
    for stranger in strangers:
        stranger.close()


def test_of_too_many_handshakes_the_oldest_is_ended(served, monkeypatch):
    monkeypatch.setattr(server, "MAX_HANDSHAKES", 4)
    strangers = [raw_socket(served.address, served._tls) for _ in range(4)]
    assert serves(served)
    assert is_closed(strangers[0])
    strangers[3].settimeout(0.05)
    with pytest.raises(TimeoutError):
        strangers[3].recv(1)
    for stranger in strangers:
        stranger.close()


def test_requests_in_flight_end_with_the_server(service):
    made = SocketServer(service, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    made.serve()
    link = connect(made)
    link.call(messages.GetView(), deadline_s=soon())
    service.hold.clear()
    for _ in range(3):
        link.post(messages.GetStats(), deadline_s=soon())
    assert not link.wait_ready(0.0)
    closing = threading.Thread(target=made.close)
    closing.start()
    with pytest.raises(PeerUnavailable):
        link.collect(deadline_s=soon())
    service.hold.set()
    closing.join()


def test_a_vanished_host_is_noticed(service):
    made = SocketServer(service, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    made.serve()
    with member_socket(made.address) as plain, contextlib.closing(connect(made)) as link:
        assert not plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        ours = link._stream.socket
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
    made.close()


def test_the_congestion_control_is_the_systems_choice(service):
    made = SocketServer(service, "127.0.0.1:0", SECRET, io_timeout_s=5.0, max_connections=8)
    with contextlib.closing(socket.socket()) as plain:
        chosen = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    made.serve()
    with contextlib.closing(connect(made)) as link:
        assert link._stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) == chosen
    made.close()


def test_addresses_that_are_none():
    for address in ("", "host", "host:", ":1", "host:port", "http://host:1x", "h:\u00b9", "a\0b:1", "h:" + "9" * 5000):
        with pytest.raises(ConfigError, match="address"):
            parse_address(address)


def test_an_address_in_use(served, service):
    with pytest.raises(ConfigError, match="bind"):
        SocketServer(service, served.address, SECRET, io_timeout_s=1.0, max_connections=4)


# -- handshake --------------------------------------------------------------------------------------------------------


over_tcp = pytest.mark.parametrize("served", ["tcp", "tls"], indirect=True)
NONCE = b"n" * 32


def refused_once(served: SocketServer, caplog, text: str) -> bool:
    """Whether the server has refused one more connection, and has logged one warning with this text."""
    wait_until(lambda: served.refused)
    (record,) = caplog.records
    caplog.clear()
    refused, served.refused = served.refused, 0
    assert record.getMessage().startswith("connection of 127.0.0.1:")
    return refused == 1 and record.levelno == logging.WARNING and text in record.getMessage()


def hello_of(secret: bytes) -> bytes:
    return handshake.greeting(NONCE) + key_id(secret)


def begin(served: SocketServer, secret: bytes) -> tuple[Stream, bytes, bytes]:
    """Greet the server. Returns the stream, the server's nonce and the server's proof."""
    stream = stream_on(raw_socket(served.address, served._tls))
    stream.send(hello_of(secret), soon())
    theirs = handshake.read_greeting(stream.exactly(handshake.GREETING.size, soon()))
    return stream, theirs, stream.exactly(handshake.PROOF_NBYTES, soon())


@over_tcp
def test_a_wrong_secret(served, caplog):
    with pytest.raises(PeerUnavailable, match="another cluster"):
        Link.connect(served.address, b"wrong", deadline_s=soon(), tls=served._tls)
    wait_until(lambda: served.refused == 1)
    served.refused = 0
    caplog.clear()
    for secret in (b"wrong", SECRET):  # a client that ignores the server's proof
        stream, theirs, _ = begin(served, secret)
        with stream.socket:
            stream.send(handshake.proof(b"wrong", "asking", NONCE, theirs), soon())
            assert is_closed(stream.socket)
        assert refused_once(served, caplog, "does not know this cluster's secret")
    stream, _, proof = begin(served, SECRET)
    with stream.socket:  # a client that sends the server's own proof back
        stream.send(proof, soon())
        assert is_closed(stream.socket)
    assert refused_once(served, caplog, "does not know this cluster's secret")
    assert serves(served)


@over_tcp
def test_no_secret(served, caplog):
    """A message in place of the handshake, and a client with the empty secret of Unix sockets."""
    with raw_socket(served.address, served._tls) as stream:
        assert is_closed(stream, after=codec.encode(messages.GetStats(), 0, 1) + bytes(100))
    assert refused_once(served, caplog, "does not speak raykv")
    with pytest.raises(PeerUnavailable, match="another cluster"):
        Link.connect(served.address, b"", deadline_s=soon(), tls=served._tls)
    wait_until(lambda: served.refused == 1)


@over_tcp
def test_a_replayed_handshake(served, caplog, service):
    """What a member has sent in one handshake is refused in the next one."""
    stream, theirs, _ = begin(served, SECRET)
    with stream.socket:
        sent = [hello_of(SECRET), handshake.proof(SECRET, "asking", NONCE, theirs)]
        stream.send(sent[1], soon())
        assert stream.exactly(1, soon()) == b"\x01"
    wait_until(lambda: service.sessions and service.sessions[0].closed.is_set())
    caplog.clear()
    with raw_socket(served.address, served._tls) as replay:
        assert is_closed(replay, after=b"".join(sent))
    assert refused_once(served, caplog, "does not know this cluster's secret")
    assert len(service.sessions) == 1


@over_tcp
@pytest.mark.parametrize("part", ["greeting", "key id", "proof"])
def test_a_truncated_handshake(served, part):
    stream, theirs, _ = begin(served, SECRET)
    with stream.socket:
        if part == "proof":
            assert is_closed(stream.socket, after=handshake.proof(SECRET, "asking", NONCE, theirs)[:-1])
    with raw_socket(served.address, served._tls) as raw:
        cut = {"greeting": handshake.GREETING.size - 1, "key id": len(hello_of(SECRET)) - 1}.get(part)
        assert is_closed(raw, after=hello_of(SECRET)[:cut])
    wait_until(lambda: served.refused == 2)
    assert serves(served)


@over_tcp
@pytest.mark.parametrize("left", [1, codec.HEADER.size - 1, codec.HEADER.size, codec.HEADER.size + 3])
def test_a_truncated_frame(served, left, service):
    stream = member_stream(served.address, tls=served._tls)
    whole = stream._sealed(codec.encode(messages.Delete(bytes(16)), 0, 1))
    with stream.socket:
        assert is_closed(stream.socket, after=whole[:left])
    wait_until(lambda: service.sessions[0].closed.is_set())
    assert service.finished == []
    assert serves(served)


@over_tcp
def test_an_oversized_frame(served, caplog):
    stream = member_stream(served.address, tls=served._tls)
    with stream.socket:
        stream.send(header(codec.MAX_MESSAGE_NBYTES + 1), soon())
        answer, _ = stream.message(soon())
        assert isinstance(answer, messages.Failure)
        assert is_closed(stream.socket)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert serves(served)


# -- several secrets --------------------------------------------------------------------------------------------------

NEW = b"n" * 31 + b"w"


def link_with(served: SocketServer, secret: bytes) -> Link:
    return Link.connect(served.address, secret, deadline_s=soon(), tls=served._tls)


@over_tcp
def test_a_server_accepts_all_its_secrets_and_no_other(served):
    for accepted in [(SECRET,), (NEW, SECRET), (SECRET, NEW), (NEW,)]:
        served.accept_secrets(accepted)
        for secret in (SECRET, NEW, b"wrong", b""):
            if secret in accepted:
                with contextlib.closing(link_with(served, secret)) as link:
                    assert link.call(messages.GetView(), deadline_s=soon()) == messages.Stats(b"GetView")
            else:
                with pytest.raises(handshake.WrongSecret):
                    link_with(served, secret)


def ask_without_a_pause(link: Link, seconds: float = 10.0) -> None:
    """Send requests so that the server always has another one."""
    until_s = soon(seconds)
    link.post(messages.GetStats(), deadline_s=soon())
    while time.monotonic() < until_s:
        link.post(messages.GetStats(), deadline_s=soon())
        link.collect(deadline_s=soon())


@over_tcp
def test_connections_end_with_the_secret_that_they_use(served, service):
    """A request that has arrived is answered first. Connections with another secret go on."""
    served.accept_secrets((NEW, SECRET))
    links = {secret: [link_with(served, secret) for _ in range(2)] for secret in (SECRET, NEW)}
    for link in (*links[SECRET], *links[NEW]):
        link.call(messages.GetView(), deadline_s=soon())
    idle, busy = links[SECRET]
    service.hold.clear()
    for _ in range(2):
        busy.post(messages.GetStats(), deadline_s=soon())
    wait_until(lambda: served._connections)
    served.accept_secrets((NEW,))
    assert is_closed(idle._stream.socket)
    service.hold.set()
    assert busy.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
    assert busy.collect(deadline_s=soon()) == messages.Stats(b"GetStats")
    with pytest.raises(PeerUnavailable):
        ask_without_a_pause(busy)
    for link in links[NEW]:
        assert link.call(messages.GetView(), deadline_s=soon()) == messages.Stats(b"GetView")
    wait_until(lambda: len(served._connections) == len(served._secrets) == 2)
    for link in (idle, busy, *links[NEW]):
        link.close()


@over_tcp
def test_a_secret_that_is_dropped_during_the_handshake_is_refused(served):
    stream, theirs, _ = begin(served, SECRET)
    with stream.socket:
        served.accept_secrets((NEW,))
        stream.send(handshake.proof(SECRET, "asking", NONCE, theirs), soon())
        assert is_closed(stream.socket)
    wait_until(lambda: served.refused == 1)


@over_tcp
def test_a_changed_key_id_leads_to_no_other_secret(served):
    """Somebody between the ends cannot make them use the former secret: the client accepts proofs by its own only."""
    served.accept_secrets((NEW, SECRET))
    stream = stream_on(raw_socket(served.address, served._tls))
    with stream.socket:
        stream.send(handshake.greeting(NONCE) + key_id(SECRET), soon())  # the client has sent key_id(NEW)
        theirs = handshake.read_greeting(stream.exactly(handshake.GREETING.size, soon()))
        proof = stream.exactly(handshake.PROOF_NBYTES, soon())
        assert proof == handshake.proof(SECRET, "answering", NONCE, theirs)
        assert proof != handshake.proof(NEW, "answering", NONCE, theirs)  # what the client requires
        stream.send(handshake.proof(NEW, "asking", NONCE, theirs), soon())
        assert is_closed(stream.socket)
    wait_until(lambda: served.refused == 1)


def test_a_unix_socket_has_no_secrets(service):
    made = SocketServer(service, f"unix:@raykv-{time.monotonic_ns()}", SECRET, io_timeout_s=1.0, max_connections=8)
    made.serve()
    made.accept_secrets((NEW,))
    assert serves(made)
    made.close()


def test_a_server_of_another_version_says_so():
    asking, answering = socket.socketpair()
    with asking, answering:
        answering.sendall(handshake.GREETING.pack(handshake.GREETING_MAGIC, 99, b"n" * 32))
        with pytest.raises(ProtocolError, match=f"version 99, we speak {VERSION}: upgrade"):
            handshake.greet_server(stream_on(asking), SECRET, soon())


def test_a_client_of_another_version_learns_ours(served):
    with raw_socket(served.address, served._tls) as stream:
        stream.sendall(handshake.GREETING.pack(handshake.GREETING_MAGIC, 99, b"n" * 32))
        raw = stream_on(stream).exactly(handshake.GREETING.size, soon())
        assert handshake.GREETING.unpack(raw)[:2] == (handshake.GREETING_MAGIC, VERSION)
        assert is_closed(stream)


def test_something_else_behind_the_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        waiting = socket.create_connection(listener.getsockname())
        stream, _ = listener.accept()
        stream.sendall(b"220 mail.example.org ESMTP\r\n" + b" " * 60)
        with waiting, stream, pytest.raises(ProtocolError, match="does not speak raykv"):
            handshake.greet_server(stream_on(waiting), SECRET, soon())
        with pytest.raises(PeerUnavailable):
            Link.connect(address, SECRET, deadline_s=soon(0.2))  # the listener never answers


def test_a_handshake_of_random_bytes(served, rng: random.Random):
    """Wrong bytes in any step of the handshake do not stop the server."""
    for _ in range(50):
        with raw_socket(served.address, served._tls) as stream, contextlib.suppress(OSError, RayKVError):
            hello = bytearray(handshake.greeting(rng.randbytes(32)) + key_id(SECRET))
            if rng.random() < 0.5:
                hello[rng.randrange(len(hello))] ^= rng.randrange(1, 256)
            stream.sendall(hello + rng.randbytes(rng.choice([0, 5, 32, 64])))
            stream.shutdown(socket.SHUT_WR)
            assert is_closed(stream)
    assert serves(served)
