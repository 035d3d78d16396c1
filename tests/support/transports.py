"""Services for tests of transports, and peers that break the protocol."""

import contextlib
import socket
import threading
import time

import numpy as np

from raykv.errors import PeerUnavailable
from raykv.memory.copying import checksum_of
from raykv.protocol import messages
from raykv.protocol.codec import encode
from raykv.transport.addresses import parse_address
from raykv.transport.base import Reply
from raykv.transport.handshake import greet_client, greet_server
from raykv.transport.stream import Stream
from raykv.transport.tls import Tls

SECRET = b"s" * 32


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


class Warehouse:
    """Sends the bytes in `stock`, and receives bytes into `received`. A test that clears `hold` makes answers wait."""

    epoch = 7

    def __init__(self, stock: bytes = b"stock") -> None:
        self.stock = stock
        self.received = bytearray(len(stock))
        self.finished: list[bool] = []
        self.sessions: list[WarehouseSession] = []
        self.hold = threading.Event()
        self.hold.set()

    def session(self, *, local: bool) -> "WarehouseSession":
        self.sessions.append(WarehouseSession(local))
        return self.sessions[-1]

    def answer(self, request: messages.Message, session: object) -> Reply:
        self.hold.wait(10.0)
        match request:
            case messages.Read():
                view = memoryview(self.stock)
                pieces = [view[:1], view[1:1], view[1:]]
                return Reply(
                    messages.Reading(b"n", b"c"), outgoing=pieces, finish=lambda whole: self.finished.append(whole)
                )
            case messages.Write():
                return Reply(messages.Accepted(b""), incoming=[self._shelves()], finish=self._stored)
            case messages.Delete():
                return Reply(messages.Failure("UsageError", "not for deletion"))
            case messages.Commit():
                return Reply(messages.Failure("CapacityError", "full"))
            case messages.Locate():  # answers with the request's keys, so that tests can tell answers apart
                return Reply(messages.Stats(request.keys))
            case messages.Why():
                raise RuntimeError("a bug")
        return Reply(messages.Stats(type(request).__name__.encode()))

    def _shelves(self) -> list[memoryview]:
        view = memoryview(self.received)
        third = len(view) // 3
        return [view[:third], view[third:]]

    def _stored(self, whole: bool) -> messages.Answer | None:
        self.finished.append(whole)
        return messages.Count(len(self.received)) if whole else None


class WarehouseSession:
    patience_s = float("inf")

    def __init__(self, local: bool) -> None:
        self.local = local
        self.closed = threading.Event()

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


def raw_socket(address: str, tls: Tls | None = None) -> socket.socket:
    """A connection to a server, before the handshake of raykv but behind that of TLS."""
    family, where = parse_address(address)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(5.0)
    connection.connect(where)
    if tls is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise a handshake takes 40 ms
        connection = tls.wrap(connection)
        connection.do_handshake()
    return connection


def member_socket(address: str, tls: Tls | None = None) -> socket.socket:
    """A connection after the handshake, over which a test can send any bytes."""
    return member_stream(address, tls=tls).socket


def member_stream(address: str, secret: bytes = SECRET, *, tls: Tls | None = None) -> Stream:
    """A connection after the handshake, over which a test can send any message. The stream adds its tag."""
    stream = stream_on(raw_socket(address, tls))
    greet_server(stream, b"" if address.startswith("unix:") else secret, soon())
    return stream


def stream_on(connection: socket.socket) -> Stream:
    return Stream(connection, tick_s=5.0)


def is_closed(connection: socket.socket, after: bytes | None = None) -> bool:
    """Whether the other end closes the connection. If `after` is given, first send `after` and end our side."""
    connection.settimeout(5.0)
    try:
        if after is not None:
            connection.sendall(after)
            connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset, because the other end closed before it had read everything
        pass
    return True


class LyingServer:
    """A server that accepts one connection and sends the answers that the test chose.

    Attributes:
        address: Address on which the server listens.
    """

    def __init__(self, sends: list[tuple[messages.Answer, int]], *, after: int) -> None:
        """Send these (answer, request id) pairs when `after` requests have arrived."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._sends, self._after = sends, after
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            stream = stream_on(connection)
            greet_client(stream, [SECRET], lambda secret: None, soon())
            for _ in range(self._after):
                stream.message(soon())
            with contextlib.suppress(PeerUnavailable):  # the client may have closed the link already
                for answer, request_id in self._sends:
                    stream.send(encode(answer, 0, request_id), soon())
            is_closed(connection)

    def close(self) -> None:
        self._thread.join(10.0)
        self._listener.close()


class Holder:
    """A node that holds chunks and, as an owner, names the holders of other keys. It answers only Read and Suspect.

    Attributes:
        chunks: Bytes by 16-byte key.
        sums: By key, a wrong checksum to send.
        holders: By key, the nodes to name as holders.
        reads: Keys of each Read so far.
        groups: Quota groups of all Reads so far.
        suspects: Keys of all Suspects so far.
        cut_after: Only this many bytes of each payload are sent. None: all bytes.
    """

    epoch = 3

    def __init__(self, chunks: dict[bytes, bytes]) -> None:
        self.chunks = chunks
        self.sums: dict[bytes, int] = {}
        self.holders: dict[bytes, tuple[str, ...]] = {}
        self.reads: list[list[bytes]] = []
        self.groups: set[bytes] = set()
        self.suspects: list[bytes] = []
        self.cut_after: int | None = None

    def session(self, *, local: bool) -> WarehouseSession:
        return WarehouseSession(local)

    def answer(self, request: messages.Message, session: object) -> Reply:
        assert isinstance(request, messages.Read | messages.Suspect)
        keys = [request.keys[at : at + 16] for at in range(0, len(request.keys), 16)]
        if isinstance(request, messages.Suspect):
            self.suspects += keys
            return Reply(messages.Count(len(keys)))
        self.reads.append(keys)
        self.groups.add(request.group)
        values = [self.chunks.get(key, b"") for key in keys]
        sums = [self.sums.get(k, checksum_of([memoryview(v)])) for k, v in zip(keys, values, strict=True)]
        answer = messages.Reading(
            np.array([len(value) for value in values], "<u4").tobytes(), np.array(sums, "<u8").tobytes()
        )
        if request.locate:
            named = [self.holders.get(key, ()) for key in keys if key not in self.chunks]
            answer.choices, answer.places = tuple(named), np.arange(len(named), dtype="<i4").tobytes()
        payload = memoryview(b"".join(values))
        return Reply(answer, outgoing=[payload[: self.cut_after]])
