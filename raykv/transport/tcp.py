"""Messages and chunk bytes over stream sockets: TCP between hosts, Unix sockets within one.

Bytes go from the arena to the socket and from the socket to the reader's buffer; we make no copy of our own. The
server has a thread per connection and blocking sockets: the bulk of the work is system calls that run without the
interpreter lock, and a slow reader holds up its own thread alone.

Who may connect: over TCP both ends prove the cluster's secret (HMAC over fresh nonces of both); over a Unix socket the
kernel says who the other end is, and only the same user is let in.
"""

import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, RayKVError
from raykv.transport.base import Link, Service, Session, remaining
from raykv.types import Path
from raykv.wire import (
    GREETING,
    HEADER,
    PROOF_NBYTES,
    Answer,
    Failure,
    Message,
    decode,
    decode_header,
    encode,
    failure,
    greeting,
    proof,
    raise_failure,
    read_greeting,
)

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
BACKLOG = 128
_IOV_MAX = 1024
_ACCEPTED = b"\x01"


class SocketLink(Link):
    """The asking end of one connection."""

    path: Path = "tcp"

    def __init__(self, connection: socket.socket, *, epoch: int = 0) -> None:
        self._socket = connection
        self.epoch = epoch

    @classmethod
    def connect(cls, address: str, secret: bytes, *, deadline_s: float) -> "SocketLink":
        """Connect and shake hands.

        Args:
            address: "host:port", "unix:/path", or "unix:@name" for a name without a file.
            secret: The cluster's secret; not used over Unix sockets.

        Raises:
            PeerUnavailable: Nobody there, or not in time, or the secret differs.
            ProtocolError: Somebody else is there, or another version.
        """
        family, where = parse_address(address)
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(remaining(deadline_s))
            connection.connect(where)
            if family == socket.AF_UNIX:
                _require_same_user(connection)
                secret = b""
            else:
                _tune(connection)
            _shake_hands_asking(connection, secret, deadline_s)
        except (OSError, RayKVError) as error:
            connection.close()
            if isinstance(error, RayKVError):
                raise
            raise PeerUnavailable(f"{address}: {error.strerror or error}") from error
        return cls(connection)

    def call(self, request: Message, *, deadline_s: float) -> Answer:
        return self._exchange(request, deadline_s, lambda answer: None)

    def fetch(self, request: Message, place: Callable[[Answer], Sequence[memoryview]], *, deadline_s: float) -> Answer:
        return self._exchange(request, deadline_s, lambda answer: receive_into(self._socket, place(answer), deadline_s))

    def push(self, request: Message, pick: Callable[[Answer], Sequence[memoryview]], *, deadline_s: float) -> Answer:
        def send_and_wait(answer: Answer) -> Answer:
            send_all(self._socket, pick(answer), deadline_s)
            return self._receive(deadline_s)

        return self._exchange(request, deadline_s, send_and_wait)

    def _exchange(self, request: Message, deadline_s: float, then: Callable[[Answer], Answer | None]) -> Answer:
        message = encode(request, self.epoch)
        try:
            send_all(self._socket, [memoryview(message)], deadline_s)
            answer = self._receive(deadline_s)
            if not isinstance(answer, Failure):
                answer = then(answer) or answer
        except OSError as error:
            self.close()
            raise PeerUnavailable(f"connection lost: {error.strerror or error}") from error
        except BaseException:
            self.close()  # what is left in the socket belongs to nobody now
            raise
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer

    def _receive(self, deadline_s: float) -> Answer:
        message, epoch = receive_message(self._socket, deadline_s)
        self.epoch = max(self.epoch, epoch)
        return message  # type: ignore[return-value]  # a request here is answered as what it is: not what was asked for

    def close(self) -> None:
        self._socket.close()


class SocketServer:
    """The answering end: listens, and serves each connection in a thread of its own.

    Attributes:
        address: Where it listens, with the port that was free.
    """

    def __init__(
        self, service: Service, address: str, secret: bytes, *, io_timeout_s: float, max_connections: int
    ) -> None:
        """Listen.

        Raises:
            ConfigError: The address is not to be had here.
        """
        self._service, self._io_timeout_s, self._max_connections = service, io_timeout_s, max_connections
        self._family, where = parse_address(address)
        self._secret = secret if self._family != socket.AF_UNIX else b""
        self._listener = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            if self._family == socket.AF_UNIX:
                _listen_unix(self._listener, where)
                self.address = address
            else:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._listener.bind(where)
                self.address = "{}:{}".format(*self._listener.getsockname()[:2])
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"field 'bind': cannot listen on {address}: {error.strerror}") from error
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._accept, name=f"raykv-accept-{self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut all connections. After it nobody is being served any more."""
        self._closed.set()
        with self._lock:
            connections = dict(self._connections)
        for each in (self._listener, *connections):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._listener.close()
        for thread in (self._thread, *connections.values()):
            thread.join(HANDSHAKE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of descriptors, most likely; they come back as connections end
                continue
            if not self._start_serving(connection):
                self.refused += 1
                connection.close()

    def _start_serving(self, connection: socket.socket) -> bool:
        """False when there are too many connections already."""
        thread = threading.Thread(target=self._serve, args=(connection,), name="raykv-serve", daemon=True)
        with self._lock:
            if self._closed.is_set() or len(self._connections) >= self._max_connections:
                return False
            try:
                thread.start()
            except RuntimeError:
                return False  # the process may have no more threads
            self._connections[connection] = thread
        return True

    def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            local = self._family == socket.AF_UNIX
            if local:
                _require_same_user(connection)
            else:
                _tune(connection)
            _shake_hands_answering(connection, self._secret, time.monotonic() + HANDSHAKE_TIMEOUT_S)
            session = self._service.session(local=local)
            while self._serve_one(connection, session):
                pass
        except (OSError, RayKVError) as error:
            if not self._closed.is_set():
                self.refused += session is None
                log.debug("connection ended: %s", str(error))
        finally:
            if session is not None:
                session.close()
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _serve_one(self, connection: socket.socket, session: Session) -> bool:
        """Serve one request; False when the other end has left."""
        connection.settimeout(None)  # an idle connection may wait for ever
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        try:
            request, _ = receive_message(connection, time.monotonic() + self._io_timeout_s)
        except ProtocolError as error:
            self._send(connection, failure(error))
            raise
        reply = self._service.answer(request, session)
        complete = False
        try:
            self._send(connection, reply.answer)
            # A stalled peer is cut off by the time-out of each single step, however long the whole takes.
            for piece in reply.outgoing:
                send_all(connection, [piece], time.monotonic() + self._io_timeout_s)
            for piece in reply.incoming:
                receive_into(connection, [piece], time.monotonic() + self._io_timeout_s)
            complete = True
        finally:
            second = reply.finish(complete)
        if second is not None:
            self._send(connection, second)
        return True

    def _send(self, connection: socket.socket, answer: Message) -> None:
        message = encode(answer, self._service.epoch)
        send_all(connection, [memoryview(message)], time.monotonic() + self._io_timeout_s)


# -- bytes on a socket ------------------------------------------------------------------------------------------------


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Family and address for the socket calls.

    Raises:
        ConfigError: It is neither "host:port" nor "unix:...".
    """
    if address.startswith("unix:"):
        name = address.removeprefix("unix:")
        return socket.AF_UNIX, "\0" + name[1:] if name.startswith("@") else name
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"field 'address': {address!r} is neither 'host:port' nor 'unix:/path'")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))


def send_all(connection: socket.socket, pieces: Sequence[memoryview], deadline_s: float) -> None:
    """Send pieces one after another, without joining them."""
    waiting = [piece for piece in pieces if len(piece)]
    first = 0
    while first < len(waiting):
        connection.settimeout(remaining(deadline_s))
        sent = connection.sendmsg(waiting[first : first + _IOV_MAX])
        while first < len(waiting) and sent >= len(waiting[first]):
            sent -= len(waiting[first])
            first += 1
        if sent:
            waiting[first] = waiting[first][sent:]


def receive_into(connection: socket.socket, buffers: Sequence[memoryview], deadline_s: float) -> None:
    """Fill buffers one after another.

    Raises:
        PeerUnavailable: The peer left before they were full.
    """
    waiting = [buffer for buffer in buffers if len(buffer)]
    first = 0
    while first < len(waiting):
        connection.settimeout(remaining(deadline_s))
        got = connection.recvmsg_into(waiting[first : first + _IOV_MAX])[0]
        if not got:
            raise PeerUnavailable("the peer closed the connection")
        while first < len(waiting) and got >= len(waiting[first]):
            got -= len(waiting[first])
            first += 1
        if got:
            waiting[first] = waiting[first][got:]


def receive_exactly(connection: socket.socket, nbytes: int, deadline_s: float) -> bytearray:
    """The next `nbytes` bytes."""
    raw = bytearray(nbytes)
    receive_into(connection, [memoryview(raw)], deadline_s)
    return raw


def receive_message(connection: socket.socket, deadline_s: float) -> tuple[Message, int]:
    """The next message and its sender's epoch."""
    epoch, length = decode_header(receive_exactly(connection, HEADER.size, deadline_s))
    return decode(receive_exactly(connection, length, deadline_s)), epoch


# -- handshake --------------------------------------------------------------------------------------------------------


def _shake_hands_asking(connection: socket.socket, secret: bytes, deadline_s: float) -> None:
    mine = secrets.token_bytes(32)
    send_all(connection, [memoryview(greeting(mine))], deadline_s)
    theirs = read_greeting(receive_exactly(connection, GREETING.size, deadline_s))
    said = receive_exactly(connection, PROOF_NBYTES, deadline_s)
    if not secrets.compare_digest(said, proof(secret, "answering", mine, theirs)):
        raise PeerUnavailable("the peer does not know this cluster's secret: it belongs to another cluster")
    send_all(connection, [memoryview(proof(secret, "asking", mine, theirs))], deadline_s)
    if receive_exactly(connection, 1, deadline_s) != _ACCEPTED:
        raise PeerUnavailable("the peer refused the connection")


def _shake_hands_answering(connection: socket.socket, secret: bytes, deadline_s: float) -> None:
    mine = secrets.token_bytes(32)
    hello = receive_exactly(connection, GREETING.size, deadline_s)
    send_all(connection, [memoryview(greeting(mine))], deadline_s)  # even to strangers: it tells them our version
    theirs = read_greeting(hello)
    send_all(connection, [memoryview(proof(secret, "answering", theirs, mine))], deadline_s)
    said = receive_exactly(connection, PROOF_NBYTES, deadline_s)
    if not secrets.compare_digest(said, proof(secret, "asking", theirs, mine)):
        raise ProtocolError("the peer does not know this cluster's secret")
    send_all(connection, [memoryview(_ACCEPTED)], deadline_s)


def _tune(connection: socket.socket) -> None:
    """Send at once; and notice within a minute when the other host is gone, since leases hang on the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _require_same_user(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user = struct.unpack("3i", raw)[1]
    if user != os.getuid():
        raise PeerUnavailable(f"the other end of this Unix socket is user {user}, we are {os.getuid()}")


def _listen_unix(listener: socket.socket, where: str | tuple[str, int]) -> None:
    assert isinstance(where, str)
    if not where.startswith("\0"):
        if os.path.exists(where):
            os.unlink(where)  # left by a process that was killed; a node's name is its own
        old = os.umask(0o177)
        try:
            listener.bind(where)
        finally:
            os.umask(old)
    else:
        listener.bind(where)
