"""Peers that hang or dribble. Each call ends at its deadline. Its peer is left alone, then probed by single calls."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from raykv.errors import PeerUnavailable, RayKVError
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import encode
from raykv.protocol.placement import Member
from raykv.transport.bulk_read import ReadProgress, ReadRun
from raykv.transport.data_path import LinkPath, PathEnvironment
from raykv.transport.handshake import greet_client
from raykv.transport.pool import ConnectionPool
from raykv.transport.stream import Stream
from tests.support.nodes import wait_until
from tests.support.transports import SECRET, soon

TIMEOUT_S = 0.2
OVERRUN_S = 0.05
CHUNK_NBYTES = 1 << 20
READING = messages.Reading(np.array([CHUNK_NBYTES], "<u4").tobytes(), bytes(8))

Behaviour = Callable[[Stream], None]


def greet(stream: Stream) -> None:
    greet_client(stream, [SECRET], lambda secret: None, soon())


def says_nothing(stream: Stream) -> None:
    while True:  # until the client closes the connection
        stream.exactly(1, soon(60.0))


def hangs_after_the_handshake(stream: Stream) -> None:
    greet(stream)
    says_nothing(stream)


def dribble(stream: Stream, content: bytes) -> None:
    """Send one byte every 20 ms: each `recv` of the client makes progress."""
    for number in range(len(content)):
        stream.socket.sendall(content[number : number + 1])
        time.sleep(0.02)


def dribbles_its_greeting(stream: Stream) -> None:
    dribble(stream, b"raykv" + bytes(60))


def dribbles_an_answer(stream: Stream) -> None:
    greet(stream)
    _, header = stream.message(soon())
    message = encode(READING, 0, header.request_id)
    assert stream.seal is not None
    dribble(stream, message + stream.seal.tag(message))


def dribbles_chunk_bytes(stream: Stream) -> None:
    greet(stream)
    _, header = stream.message(soon())
    stream.send(encode(READING, 0, header.request_id), soon())
    dribble(stream, bytes(CHUNK_NBYTES))


class Peer:
    """A listener that serves each connection in a thread of its own."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.accepted = behaviour, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, RayKVError):
            self.behaviour(Stream(connection, tick_s=0.01))

    def close(self) -> None:
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10.0)


@contextlib.contextmanager
def peer(behaviour: Behaviour) -> Iterator[Peer]:
    made = Peer(behaviour)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def blackhole() -> Iterator[str]:
    """An address that answers no packet: the queue of the listener is full, so the kernel drops further connections."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def pool():
    made = ConnectionPool(SECRET, breaker_s=60.0, max_idle=2)
    yield made
    made.close()


def read(pool: ConnectionPool, address: str, *, timeout_s: float = TIMEOUT_S) -> ReadRun:
    """Read one chunk from an address. Raises what the data path raises."""
    progress = ReadProgress(chunk_keys.from_bytes(b"k" * 16), [[memoryview(bytearray(CHUNK_NBYTES))]], [CHUNK_NBYTES])
    run = ReadRun(progress, "n", [0])
    path = LinkPath(PathEnvironment(pool, "here", verify="never"))
    path.read(Member("n", "there", {"tcp": address}, 1.0, 1), run, deadline_s=soon(timeout_s))
    return run


def overrun_s(work: Callable[[], object]) -> float:
    """Return by how much a call overruns its deadline: the best of three, because the machine may be busy."""
    overruns = []
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable):
            work()
        overruns.append(time.monotonic() - began_s - TIMEOUT_S)
    return min(overruns)


@pytest.mark.parametrize(
    "behaviour",
    [says_nothing, hangs_after_the_handshake, dribbles_its_greeting, dribbles_an_answer, dribbles_chunk_bytes],
)
def test_a_call_ends_at_its_deadline(behaviour):
    with peer(behaviour) as hanging:
        pool = ConnectionPool(SECRET, breaker_s=0.0, max_idle=2)
        assert overrun_s(lambda: read(pool, hanging.address)) < OVERRUN_S
        assert pool.failures == 3
        pool.close()


def test_a_call_into_a_blackhole_ends_at_its_deadline():
    with blackhole() as address:
        pool = ConnectionPool(SECRET, breaker_s=0.0, max_idle=2)
        assert overrun_s(lambda: read(pool, address)) < OVERRUN_S
        pool.close()


@pytest.mark.parametrize("behaviour", [says_nothing, dribbles_chunk_bytes])
def test_a_peer_that_hangs_is_left_alone_and_shown(pool, behaviour):
    with peer(behaviour) as hanging:
        assert pool.tripped() == {}
        with pytest.raises(PeerUnavailable):
            read(pool, hanging.address)
        (tripped,) = pool.tripped().items()
        assert tripped[0] == hanging.address
        assert 40.0 < tripped[1] <= 60.0
        with pytest.raises(PeerUnavailable, match="left alone"):
            read(pool, hanging.address)
        assert hanging.accepted == 1


def test_after_the_pause_one_request_probes_while_others_are_refused():
    """Twenty threads find the pause over. One of them reaches the peer; then all do, because the peer is well again."""
    well = threading.Event()

    def behaviour(stream: Stream) -> None:
        if not well.is_set():
            says_nothing(stream)
        greet(stream)
        while True:
            _, header = stream.message(soon(60.0))
            stream.send(encode(messages.Done(), 0, header.request_id), soon())

    def ask(timeout_s: float) -> bool:
        until_s = soon(timeout_s)
        try:
            pool.ask(hung.address, lambda link: link.call(messages.GetView(), deadline_s=until_s), deadline_s=until_s)
            return True
        except PeerUnavailable:
            return False

    pool = ConnectionPool(SECRET, breaker_s=0.2, max_idle=32)
    with peer(behaviour) as hung:
        assert not ask(0.1)
        wait_until(lambda: pool.available(hung.address))
        threads = [threading.Thread(target=ask, args=(0.3,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hung.accepted == 2, "more than one request has probed"
        well.set()
        wait_until(lambda: ask(1.0))
        assert pool.tripped() == {}
        assert all(ask(1.0) for _ in range(20))
        pool.close()


def sends_chunks(pause_s: float) -> Behaviour:
    """Answer each read with a chunk. Its second half follows after `pause_s` seconds."""

    def behaviour(stream: Stream) -> None:
        greet(stream)
        while True:
            _, header = stream.message(soon(60.0))
            stream.send(encode(READING, 0, header.request_id), soon())
            half = bytes(CHUNK_NBYTES // 2)
            stream.socket.sendall(half)
            time.sleep(pause_s)
            stream.socket.sendall(half)

    return behaviour


def test_a_peer_that_is_far_slower_than_others_is_left_alone(pool):
    with peer(sends_chunks(0.0)) as fast, peer(sends_chunks(0.0)) as other, peer(sends_chunks(0.55)) as slow:
        for _ in range(4):
            for address in (fast.address, other.address):
                assert read(pool, address, timeout_s=5.0).arrived == [0]
        for _ in range(3):
            assert read(pool, slow.address, timeout_s=5.0).arrived == [0]
        with pytest.raises(PeerUnavailable, match="left alone"):
            read(pool, slow.address, timeout_s=5.0)
        assert list(pool.tripped()) == [slow.address]
        assert read(pool, fast.address, timeout_s=5.0).arrived == [0]
