"""Links and servers over stream sockets: TCP between hosts, Unix sockets within one.

Bytes go from the arena to the socket and from the socket to the reader's buffer; we make no copy of our own. The
server has a thread per connection and blocking sockets: the bulk of the work is system calls that run without the
interpreter lock, and a slow reader holds up its own thread alone.

Left out after trying, over loopback on two cores (GB/s of 1 MiB and 16 KiB chunks): `send` from the mapped arena moves
3.3 and 3.3, MSG_ZEROCOPY 1.5 and 2.2 (loopback copies all the same, and says so each time), `sendfile` 2.1 and 3.2. And
bytes that the kernel only refers to would have to stay pinned until the reader has them.

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
from collections.abc import Callable
from functools import partial
from typing import Final

from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, RayKVError
from raykv.memory.host import give_way
from raykv.protocol.messages import (
    GREETING,
    PROOF_NBYTES,
    Answer,
    Failure,
    Message,
    encode,
    failure,
    greeting,
    proof,
    raise_failure,
    read_greeting,
)
from raykv.transport.base import MAX_POSTED, Link, Runs, Service, Session, Targets, remaining
from raykv.transport.stream import Stream
from raykv.types import Path

log = logging.getLogger(__name__)

TICK_S: Final = 0.01
"""How much later than its deadline a call over a link may end."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_HANDSHAKES: Final = 64
"""Connections that are shaking hands at once; with one more, the one that has been at it for longest is cut off."""
BACKLOG: Final = 128
PACED: Final = b"bbr"
"""Congestion control that paces: "bbr", "bbr2", "bbr3"."""
UNPACED: Final = b"reno"
"""One that does not, every kernel has, and everybody may choose."""
_ACCEPTED: Final = b"\x01"


class SocketLink(Link):
    """The asking end of one connection."""

    path: Path = "tcp"

    def __init__(self, stream: Stream, *, epoch: int = 0) -> None:
        self._stream = stream
        self._outstanding = 0
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
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # out of descriptors
            raise PeerUnavailable(f"{address}: no socket to be had: {error.strerror or error}") from error
        try:
            connection.settimeout(remaining(deadline_s))
            connection.connect(where)
            if family == socket.AF_UNIX:
                _require_same_user(connection)
                secret = b""
            else:
                _tune(connection)
            stream = Stream(connection, tick_s=TICK_S)
            _shake_hands_asking(stream, secret, deadline_s)
        except (OSError, OverflowError, UnicodeError, RayKVError) as error:  # (a port or a name that is none)
            connection.close()
            if isinstance(error, RayKVError):
                raise
            raise PeerUnavailable(f"{address}: {getattr(error, 'strerror', None) or error}") from error
        return cls(stream)

    def call(self, request: Message, *, deadline_s: float) -> Answer:
        assert not self._outstanding
        self.post(request, deadline_s=deadline_s)
        return self.collect(deadline_s=deadline_s)

    def fetch(self, request: Message, place: Callable[[Answer], Targets], *, deadline_s: float) -> Answer:
        assert not self._outstanding
        self.post(request, deadline_s=deadline_s)
        return self.collect(place, deadline_s=deadline_s)

    def post(self, request: Message, *, deadline_s: float) -> None:
        assert self._outstanding < MAX_POSTED
        message = encode(request, self.epoch)
        try:
            if time.monotonic() >= deadline_s:
                raise PeerUnavailable("the deadline has passed")
            self._stream.send(message, deadline_s)
        except BaseException:
            self.close()
            raise
        self._outstanding += 1

    def collect(self, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        assert self._outstanding
        try:
            answer = self._receive(deadline_s)
            self._outstanding -= 1
            if place is not None and not isinstance(answer, Failure):
                for run in place(answer):
                    self._stream.fill(run, deadline_s)
        except BaseException:
            self.close()  # what is left in the socket belongs to nobody now
            raise
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer

    def push(self, request: Message, pick: Callable[[Answer], Runs], *, deadline_s: float) -> Answer:
        granted = self.call(request, deadline_s=deadline_s)
        try:
            self._stream.send_runs(pick(granted), deadline_s)
            answer = self._receive(deadline_s)
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer

    def ready(self) -> bool:
        return self._outstanding > 0 and self._stream.ready()

    def _receive(self, deadline_s: float) -> Answer:
        message, epoch = self._stream.message(deadline_s)
        if epoch > self.epoch:
            self.epoch = epoch
        return message  # type: ignore[return-value]  # a request here is answered as what it is: not what was asked for

    def close(self) -> None:
        self._stream.socket.close()


class SocketServer:
    """The answering end: listens, and from `serve` on serves each connection in a thread of its own.

    Connections that are still shaking hands are counted apart: strangers do not take the places of members.

    Attributes:
        address: Where it listens, with the port that was free.
        refused: Connections that did not get past the handshake, or were one too many.
    """

    def __init__(
        self, service: Service, address: str, secret: bytes, *, io_timeout_s: float, max_connections: int
    ) -> None:
        """Listen. Who connects before `serve` waits.

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
        self._shaking: dict[socket.socket, threading.Thread] = {}  # oldest first
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._accept, name=f"raykv-accept-{self.address}", daemon=True)

    def serve(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut all connections. After it nobody is being served any more."""
        self._closed.set()
        with self._lock:
            connections = {**self._shaking, **self._connections}
        for each in (self._listener, *connections):
            _cut(each)
        self._listener.close()
        for thread in (self._thread, *connections.values()):
            if thread.ident is not None:
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
        """False when it cannot be served."""
        thread = threading.Thread(target=self._serve, args=(connection,), name="raykv-serve", daemon=True)
        with self._lock:
            if self._closed.is_set():
                return False
            if len(self._shaking) >= MAX_HANDSHAKES:
                _cut(next(iter(self._shaking)))
            try:
                thread.start()
            except RuntimeError:
                return False  # the process may have no more threads
            self._shaking[connection] = thread
        return True

    def _admit(self, connection: socket.socket) -> None:
        """Count a connection among the members'.

        Raises:
            PeerUnavailable: There are too many already.
        """
        with self._lock:
            if self._closed.is_set() or len(self._connections) >= self._max_connections:
                raise PeerUnavailable(f"{self._max_connections} connections already")
            self._connections[connection] = self._shaking.pop(connection)

    def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            local = self._family == socket.AF_UNIX
            if local:
                give_way()
                _require_same_user(connection)
            else:
                _tune(connection)
            stream = Stream(connection, tick_s=TICK_S, watch=not local)
            admit = partial(self._admit, connection)
            _shake_hands_answering(stream, self._secret, admit, time.monotonic() + HANDSHAKE_TIMEOUT_S)
            stream.set_tick(self._io_timeout_s)
            session = self._service.session(local=local)
            while stream.wait():
                self._serve_arrived(stream, session)
        except (OSError, RayKVError) as error:
            if not self._closed.is_set():
                self.refused += session is None
                log.debug("connection ended: %s", str(error))
        finally:
            if session is not None:
                session.close()
            with self._lock:
                self._connections.pop(connection, None)
                self._shaking.pop(connection, None)
            connection.close()

    def _serve_arrived(self, stream: Stream, session: Session) -> None:
        """Serve the next request, or as many as have arrived of those that are answered together."""
        run: list[Message] = []
        request: Message | None = self._request(stream)
        while request is not None and type(request) in self._service.joined:
            run.append(request)
            request = self._request(stream) if len(run) < MAX_POSTED and stream.has_message() else None
        if len(run) > 1:
            answers = self._service.answer_joined(run, session)
            message = b"".join([encode(answer, self._service.epoch) for answer in answers])
            stream.send(message, time.monotonic() + self._io_timeout_s)
        elif run:
            self._serve_one(stream, session, run[0])
        if request is not None:
            self._serve_one(stream, session, request)

    def _request(self, stream: Stream) -> Message:
        stall_s = self._io_timeout_s
        try:
            return stream.message(time.monotonic() + stall_s)[0]
        except ProtocolError as error:
            stream.send(encode(failure(error), self._service.epoch), time.monotonic() + stall_s)
            raise

    def _serve_one(self, stream: Stream, session: Session, request: Message) -> None:
        """Serve one request."""
        stall_s = self._io_timeout_s
        reply = self._service.answer(request, session)
        complete = False
        try:
            message = encode(reply.answer, self._service.epoch)
            if reply.outgoing:
                stream.send_with(message, reply.outgoing, stall_s=stall_s)
            else:
                stream.send(message, time.monotonic() + stall_s)
            for run in reply.incoming:
                stream.fill(run, time.monotonic() + stall_s)
            complete = True
        finally:
            second = reply.finish(complete)
        if second is not None:
            stream.send(encode(second, self._service.epoch), time.monotonic() + stall_s)


# -- addresses --------------------------------------------------------------------------------------------------------


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


# -- handshake --------------------------------------------------------------------------------------------------------


def _shake_hands_asking(stream: Stream, secret: bytes, deadline_s: float) -> None:
    mine = secrets.token_bytes(32)
    stream.send(greeting(mine), deadline_s)
    theirs = read_greeting(stream.exactly(GREETING.size, deadline_s))
    said = stream.exactly(PROOF_NBYTES, deadline_s)
    if not secrets.compare_digest(said, proof(secret, "answering", mine, theirs)):
        raise PeerUnavailable("the peer does not know this cluster's secret: it belongs to another cluster")
    stream.send(proof(secret, "asking", mine, theirs), deadline_s)
    if stream.exactly(1, deadline_s) != _ACCEPTED:
        raise PeerUnavailable("the peer refused the connection")


def _shake_hands_answering(stream: Stream, secret: bytes, admit: Callable[[], None], deadline_s: float) -> None:
    """Find out that the other end is a member; then `admit` may still refuse it."""
    mine = secrets.token_bytes(32)
    hello = stream.exactly(GREETING.size, deadline_s)
    stream.send(greeting(mine), deadline_s)  # even to strangers: it tells them our version
    theirs = read_greeting(hello)
    stream.send(proof(secret, "answering", theirs, mine), deadline_s)
    said = stream.exactly(PROOF_NBYTES, deadline_s)
    if not secrets.compare_digest(said, proof(secret, "asking", theirs, mine)):
        raise ProtocolError("the peer does not know this cluster's secret")
    admit()
    stream.send(_ACCEPTED, deadline_s)


def _tune(connection: socket.socket) -> None:
    """Send at once; and notice within a minute when the other host is gone, since leases hang on the connection."""
    _end_pacing_within_host(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _end_pacing_within_host(connection: socket.socket) -> None:
    """BBR sends by timers: a quarter of a sender's time, for nothing where no network lies between.

    Across hosts the system's choice stands, which `sysctl` and, for one network, `ip route ... congctl` make.
    """
    try:
        if connection.getsockname()[0] != connection.getpeername()[0]:
            return
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if name.startswith(PACED):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
    except OSError:
        pass  # a kernel without that choice, or a peer that has gone again, which the handshake will tell


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


def _cut(connection: socket.socket) -> None:
    """End a connection that another thread may be waiting on; that thread closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
