"""Strangers, liars and sleepers on a node's socket: they are turned away, and everybody else is served."""

import errno
import random
import socket
import struct
import threading
import time

import pytest
from raykv.transport.tcp import SocketLink, SocketServer, parse_address

import raykv
from raykv.config import NodeConfig
from raykv.embedded import InProcessDirectory
from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, RayKVError, TransientError
from raykv.node.node import Node
from raykv.protocol import messages
from raykv.transport import stream, tcp
from raykv.transport.pool import Peers
from raykv.transport.stream import Stream

SECRET = b"k" * 32


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def node(request):
    fields = {
        "node_id": "n",
        "cluster": f"sockets-{time.monotonic_ns()}",
        "storage": {"arena_nbytes": "1 MiB", "extent_nbytes": "64 KiB", "shm_dir": None},
        "heartbeat_s": 0.05,
        "io_timeout_s": 0.3,
        "max_connections": 8,
    }
    made = Node(NodeConfig.load(fields), secret=SECRET, directory=InProcessDirectory(member_timeout_s=5.0))
    made.start()
    yield made
    made.stop()
    assert made.failure is None


def raw(node: Node) -> socket.socket:
    family, where = parse_address(node.member.address)
    stream = socket.socket(family, socket.SOCK_STREAM)
    stream.settimeout(5.0)
    stream.connect(where)
    return stream


def on(connection: socket.socket) -> Stream:
    return Stream(connection, tick_s=5.0)


def serves(node: Node) -> bool:
    link = SocketLink.connect(node.member.address, SECRET, deadline_s=soon())
    try:
        return isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)
    finally:
        link.close()


def test_who_connects_while_the_node_starts_waits_until_it_can_answer(monkeypatch):
    config = NodeConfig.load({
        "node_id": "n",
        "cluster": f"sockets-{time.monotonic_ns()}",
        "storage": {"arena_nbytes": "1 MiB", "extent_nbytes": "64 KiB", "shm_dir": None},
    })  # fmt: skip
    answers: list[object] = []

    def ask() -> None:
        link = SocketLink.connect(config.local_address, b"", deadline_s=soon())
        try:
            answers.append(link.call(messages.Attach(), deadline_s=soon()))
        except RayKVError as error:
            answers.append(error)
        finally:
            link.close()

    asking = threading.Thread(target=ask)

    def slow() -> str:
        asking.start()
        asking.join(0.3)
        return "here"

    monkeypatch.setattr("raykv.node.node.host_identity", slow)
    made = Node(config, secret=SECRET, directory=InProcessDirectory(member_timeout_s=5.0))
    made.start()
    asking.join(5.0)
    try:
        assert [type(answer) for answer in answers] == [messages.Attached]
        assert answers[0].host == "here"
        assert not made.stats()["errors"]
    finally:
        made.stop()


def shaken(node: Node, secret: bytes = SECRET) -> socket.socket:
    """A socket past the handshake, to say over it what one likes."""
    stream = raw(node)
    tcp._shake_hands_asking(on(stream), secret, soon())
    return stream


def ended(stream: socket.socket, after: bytes | None = None) -> bool:
    """Whether the other end closes, whatever it says before; `after` is all that we say."""
    try:
        if after is not None:
            stream.sendall(after)
            stream.shutdown(socket.SHUT_WR)
        while stream.recv(1 << 16):
            pass
    except OSError as error:
        return error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
    return True


def test_garbage_before_the_handshake(node, rng):
    for length in (0, 1, 10, 39, 40, 71, 200, 100_000):
        with raw(node) as stream:
            assert ended(stream, after=rng.randbytes(length))
        assert serves(node)
    assert node.stats()["refused_connections"] == 8


def test_garbage_after_the_handshake(node, rng):
    for body in (
        b"GET / HTTP/1.1\r\n\r\n",
        messages.HEADER.pack(b"RK", messages.VERSION, 0, 0, 5) + b"\xff" * 5,
        messages.HEADER.pack(b"RK", messages.VERSION, 0, 0, 1 << 31),
        messages.HEADER.pack(b"RK", messages.VERSION + 1, 0, 0, 0),
        messages.HEADER.pack(b"RK", messages.VERSION, 0, 0, 100_000) + b"\x91" * 100_000,
        *(rng.randbytes(1000) for _ in range(20)),
    ):
        with shaken(node) as stream:
            assert ended(stream, after=body)
    assert serves(node)


def test_what_was_wrong_is_told(node):
    with shaken(node) as stream:
        stream.sendall(messages.HEADER.pack(b"RK", messages.VERSION + 1, 0, 0, 0))
        answer, _ = on(stream).message(soon())
        assert isinstance(answer, messages.Failure)
        assert f"version {messages.VERSION + 1}" in answer.text


def test_requests_with_impossible_fields_are_refused_one_by_one(node, rng):
    huge = (1 << 64) - 1
    link = SocketLink.connect(node.member.local_address, b"", deadline_s=soon())
    digest = raykv.Namespace(model="m").group.digest
    link.call(messages.OpenNamespace(b'{"model": "m"}'), deadline_s=soon())
    free = node.stats()["used_nbytes"]
    for request in (
        messages.Reserve(digest, b"x" * 15, 4096),
        messages.Reserve(digest, b"x" * 16, huge),
        messages.Reserve(digest, b"x" * 16, -1),
        messages.Reserve(digest, b"x" * 16, 4096, depth=huge),
        messages.Reserve(digest, b"x" * 16, 4096, depth=-1),
        messages.Reserve(digest, b"x" * 16, 4096, parent=b"y"),
        messages.Reserve(b"?", b"x" * 16, 4096),
        messages.Commit(struct.pack("<i", 0), b""),
        messages.Commit(struct.pack("<i", 1 << 20), bytes(8)),
        messages.Commit(struct.pack("<i", -1), bytes(8)),
        messages.Abort(struct.pack("<2i", 3, 3)),
        messages.Unpin(struct.pack("<i", 0)),
        messages.Unpin(b"abc"),
        messages.Write(digest, b"x" * 15, 4096),
        messages.OpenNamespace(b"[]"),
        messages.OpenNamespace(b'{"model": "m", "color": 1}'),
        messages.OpenNamespace(b'{"model": "m"}', capacity_nbytes=-1),
        messages.OpenNamespace(b'{"model": "' + b"m" * 3000 + b'"}'),
        messages.Announce("n", b"odd"),
        messages.Read(b"odd"),
        messages.Locate(b"odd"),
        messages.Done(),
    ):
        with pytest.raises(raykv.RayKVError) as caught:
            link.call(request, deadline_s=soon())
        assert "internal error" not in str(caught.value), request
    assert node.stats()["used_nbytes"] == free
    assert isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)
    link.close()


def test_a_wrong_secret(node):
    with pytest.raises(PeerUnavailable, match="another cluster"):
        SocketLink.connect(node.member.address, b"wrong", deadline_s=soon())
    with raw(node) as stream:  # one who does not care what the node proves
        stream.sendall(messages.greeting(b"n" * 32))
        theirs = messages.read_greeting(on(stream).exactly(messages.GREETING.size, soon()))
        on(stream).exactly(messages.PROOF_NBYTES, soon())
        stream.sendall(messages.proof(b"wrong", "asking", b"n" * 32, theirs))
        assert stream.recv(1) == b""
    with raw(node) as stream:  # one who plays the node's own proof back to it
        stream.sendall(messages.greeting(b"n" * 32))
        on(stream).exactly(messages.GREETING.size, soon())
        stream.sendall(on(stream).exactly(messages.PROOF_NBYTES, soon()))
        assert stream.recv(1) == b""
    assert serves(node)


def test_a_node_of_another_version_says_so():
    asking, answering = socket.socketpair()
    with asking, answering:
        answering.sendall(messages.GREETING.pack(messages.GREETING_MAGIC, 99, b"n" * 32))
        with pytest.raises(ProtocolError, match=f"version 99, we speak {messages.VERSION}: upgrade"):
            tcp._shake_hands_asking(on(asking), SECRET, soon())


def test_a_client_of_another_version_learns_ours(node):
    with raw(node) as stream:
        stream.sendall(messages.GREETING.pack(messages.GREETING_MAGIC, 99, b"n" * 32))
        magic, version, _ = messages.GREETING.unpack(on(stream).exactly(messages.GREETING.size, soon()))
        assert (magic, version) == (messages.GREETING_MAGIC, messages.VERSION)
        assert stream.recv(1) == b""


def test_something_else_behind_the_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        waiting = socket.create_connection(listener.getsockname())
        stream, _ = listener.accept()
        stream.sendall(b"220 mail.example.org ESMTP\r\n" + b" " * 60)
        with waiting, stream, pytest.raises(ProtocolError, match="does not speak raykv"):
            tcp._shake_hands_asking(on(waiting), SECRET, soon())
        with pytest.raises(PeerUnavailable):
            SocketLink.connect(address, SECRET, deadline_s=soon(0.2))  # it listens, and says nothing


def test_one_who_stops_in_the_middle_is_cut_off_and_others_are_served(node):
    with shaken(node) as stalled:
        stalled.sendall(messages.HEADER.pack(b"RK", messages.VERSION, 0, 0, 100) + b"half")
        assert serves(node)
        assert ended(stalled)  # by io_timeout_s


def test_a_reader_that_does_not_read_is_cut_off_and_its_pins_end(node):
    client = raykv.Client(
        raykv.Namespace(model="m"), raykv.client.router.Router(raykv.ClientConfig(address=node.member.local_address))
    )
    keys = client.keys(["big"])
    assert client.put(keys, [bytes(64 << 10)]).stored == 1
    with raw(node) as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tcp._shake_hands_asking(on(sleeper), SECRET, soon())
        sleeper.sendall(messages.encode(messages.Read(keys.tobytes() * 400), 0))  # 25 MiB that nobody takes
        until_s = soon()
        while not node.store.table.columns.pins.any() and time.monotonic() < until_s:
            time.sleep(0.01)
        assert client.delete(keys) == 0
        while client.delete(keys) == 0:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    client.close()
    assert serves(node)


def test_more_connections_than_allowed(node):
    links = [SocketLink.connect(node.member.address, SECRET, deadline_s=soon()) for _ in range(8)]
    with pytest.raises(TransientError):
        SocketLink.connect(node.member.address, SECRET, deadline_s=soon())
    for link in links:
        assert isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)
    links.pop().close()
    until_s = soon()
    while True:
        try:
            assert serves(node)
            break
        except TransientError:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    for link in links:
        link.close()


def test_strangers_that_dawdle_do_not_take_the_places_of_members(node):
    strangers = [raw(node) for _ in range(20)]  # of 8 connections that the node allows
    links = [SocketLink.connect(node.member.address, SECRET, deadline_s=soon()) for _ in range(8)]
    for link in links:
        assert isinstance(link.call(messages.GetView(), deadline_s=soon()), messages.ViewIs)
        link.close()
    for stranger in strangers:
        stranger.close()


def test_of_too_many_that_shake_hands_the_oldest_goes(node, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_HANDSHAKES", 4)
    strangers = [raw(node) for _ in range(4)]
    assert serves(node)
    assert ended(strangers[0])
    strangers[3].settimeout(0.05)
    with pytest.raises(TimeoutError):
        strangers[3].recv(1)
    for stranger in strangers:
        stranger.close()


def test_requests_that_were_sent_ahead_die_with_the_node(node):
    link = SocketLink.connect(node.member.address, SECRET, deadline_s=soon())
    link.call(messages.GetView(), deadline_s=soon())
    with node._lock:
        for _ in range(3):
            link.post(messages.GetStats(), deadline_s=soon())
        assert not link.ready()
        for server in node._servers:
            for connection in server._connections:
                tcp._cut(connection)
        with pytest.raises(PeerUnavailable):
            link.collect(deadline_s=soon())
    assert not link.ready() or link._outstanding


def test_a_vanished_host_is_noticed(node):
    with SocketLink.connect(node.member.address, SECRET, deadline_s=soon())._stream.socket as stream:
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


def test_addresses_that_are_none():
    for address in ("", "host", "host:", ":1", "host:port", "http://host:1x"):
        with pytest.raises(ConfigError, match="address"):
            parse_address(address)


def test_an_address_that_is_taken(node):
    with pytest.raises(ConfigError, match="bind"):
        SocketServer(node, node.member.address, SECRET, io_timeout_s=1.0, max_connections=4)


# -- peers ------------------------------------------------------------------------------------------------------------


def test_a_node_that_hangs_is_left_alone_for_a_while(node):
    """Stopped, not gone: its kernel still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        peers = Peers(SocketLink.connect, SECRET, breaker_s=60.0, max_idle=1)
        with pytest.raises(PeerUnavailable):
            peers.ask(address, lambda link: None, deadline_s=soon(0.1))
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable, match="a moment ago"):
            peers.ask(address, lambda link: None, deadline_s=soon(5.0))
        assert time.monotonic() - began_s < 0.1
        assert peers.available(node.member.address)


def test_an_idle_link_that_hangs_shuts_the_breaker_too(node):
    peers = Peers(SocketLink.connect, SECRET, breaker_s=60.0, max_idle=1)
    ask = lambda link: link.call(messages.GetStats(), deadline_s=soon(0.2))  # noqa: E731
    peers.ask(node.member.address, ask, deadline_s=soon())
    with node._lock:  # from now on nobody is answered
        with pytest.raises(PeerUnavailable):
            peers.ask(node.member.address, ask, deadline_s=soon(0.2))
        assert not peers.available(node.member.address)
    peers.close()


def test_a_call_that_came_late_does_not_shut_out_its_peer(node):
    peers = Peers(SocketLink.connect, SECRET, breaker_s=60.0, max_idle=1)
    peers.ask(node.member.address, lambda link: None, deadline_s=soon())
    with node._lock:
        for _ in range(2):  # over the idle link, and over a fresh one
            deadline_s = soon(0.01)
            with pytest.raises(PeerUnavailable):
                peers.ask(
                    node.member.address,
                    lambda link, until_s=deadline_s: link.call(messages.GetStats(), deadline_s=until_s),
                    deadline_s=deadline_s,
                )
            assert peers.available(node.member.address)
            assert peers.failures == 0
    peers.close()


def test_a_restarted_peer_is_reached_at_once_over_a_fresh_link():
    directory = InProcessDirectory(member_timeout_s=5.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    fields = {"node_id": "n", "cluster": "again", "bind": bind, "storage": {"arena_nbytes": "32 MiB", "shm_dir": None}}
    peers = Peers(SocketLink.connect, SECRET, breaker_s=60.0, max_idle=2)
    for _ in range(3):
        node = Node(NodeConfig.load(fields), secret=SECRET, directory=directory)
        node.start()
        answer = peers.ask(bind, lambda link: link.call(messages.GetView(), deadline_s=soon()), deadline_s=soon())
        assert isinstance(answer, messages.ViewIs)
        node.stop()
    peers.close()


def test_random_requests_never_stop_a_node(node, rng: random.Random):
    link = SocketLink.connect(node.member.address, SECRET, deadline_s=soon())
    for _ in range(300):
        body = bytearray(
            messages.encode(messages.Reserve(b"d" * 16, rng.randbytes(32), 4096, parent=rng.randbytes(16)), 0)
        )
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(messages.HEADER.size, len(body))] = rng.randrange(256)
        link._stream.send(bytes(body), soon())
        answer, _ = link._stream.message(soon())
        assert isinstance(answer, messages.Failure)
        assert "internal error" not in answer.text
        if answer.kind == "ProtocolError":  # it was no message at all, and the node hung up
            link.close()
            link = SocketLink.connect(node.member.address, SECRET, deadline_s=soon())
    link.close()
    assert serves(node)


# -- watching and sleeping --------------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 1], ids=["asleep", "watching"])
def pair(request, monkeypatch):
    """A stream that may watch its socket, or may not, and the other end."""
    monkeypatch.setattr(stream, "_seats", [None] * request.param)
    near, far = socket.socketpair()
    with near, far:
        made = Stream(near, tick_s=0.01)
        made._bytes._naps = made._messages._naps = 0
        yield made, far
    assert len(stream._seats) == request.param


def test_bytes_that_come_bit_by_bit_get_where_they_belong(pair, rng):
    receiver, far = pair
    sent = rng.randbytes(400_000)

    def send() -> None:
        start = 0
        while start < len(sent):
            step = rng.choice([1, 100, 5000, 60_000])
            far.sendall(sent[start : start + step])
            start += step
            time.sleep(rng.choice([0, 0, 0.0005]))

    thread = threading.Thread(target=send)
    thread.start()
    got, dice = bytearray(len(sent)), random.Random(1)
    start = 0
    while start < len(sent):
        run = []
        for _ in range(dice.randrange(1, 5)):
            step = min(dice.choice([0, 1, 7, 3000, 50_000]), len(sent) - start)
            run.append(memoryview(got)[start : start + step])
            start += step
        receiver.fill(run, soon())
    thread.join()
    assert got == sent


def test_bytes_that_do_not_come_are_given_up_on(pair):
    receiver, far = pair
    for _ in range(3):
        far.sendall(b"abc")
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable, match="deadline"):
            receiver.fill([memoryview(bytearray(2)), memoryview(bytearray(2))], began_s + 0.05)
        assert 0.05 <= time.monotonic() - began_s < 1.0
    far.sendall(b"abc")
    far.close()
    with pytest.raises(PeerUnavailable, match="closed"):
        receiver.fill([memoryview(bytearray(2)), memoryview(bytearray(2))], soon())
    with pytest.raises(PeerUnavailable, match="closed"):
        receiver.fill([memoryview(bytearray(1))], soon())


def test_messages_that_come_soon_or_late(pair):
    receiver, far = pair
    for pause_s in (0, 0, 0.002, 0, 0.02, 0, 0, 0):
        timer = threading.Timer(pause_s, far.sendall, [messages.encode(messages.Count(7), 3)])
        timer.start()
        assert receiver.message(soon()) == (messages.Count(7), 3)
        timer.join()
    far.close()
    assert not receiver.wait()


@pytest.mark.parametrize(("own", "left"), [("127.0.0.1", b"reno"), ("127.0.0.2", b"bbr")], ids=["within", "across"])
def test_nothing_is_paced_within_a_host(own, left):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking = socket.socket()
        try:
            asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            asking.close()
            pytest.skip("this kernel has no BBR, or not for everybody")
        asking.bind((own, 0))
        asking.connect(listener.getsockname())
        answering = listener.accept()[0]
    with asking, answering:
        answering.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        for end in (asking, answering):
            tcp._tune(end)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == left
