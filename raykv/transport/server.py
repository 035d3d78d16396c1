"""The server end of connections over TCP and Unix sockets.

The server has blocking sockets, and a thread for each connection. Most of the work is system calls, which release the
GIL. A slow client delays only the thread of its connection. Bytes are sent from the arena and received into the arena
without an intermediate copy.
"""

import logging
import math
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from raykv.errors import PeerUnavailable, ProtocolError, RayKVError
from raykv.memory.host import give_way
from raykv.protocol.codec import encode, failure
from raykv.protocol.messages import Message
from raykv.transport.addresses import listen, tune
from raykv.transport.base import Service, Session
from raykv.transport.forking import drop_after_fork
from raykv.transport.handshake import greet_client, require_same_user
from raykv.transport.stream import Stream

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

log = logging.getLogger(__name__)

TICK_S: Final = 0.01
HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_HANDSHAKES: Final = 64
"""At most this many handshakes run at once. A new connection beyond this limit ends the oldest handshake."""
END_S: Final = 1.0
"""A client whose secret is not accepted any more gets answers to its requests for at most this long."""
MAX_LOG_LINES: Final = 5
LOG_EVERY_S: Final = 60.0
"""`LogLimit` writes at most MAX_LOG_LINES lines in LOG_EVERY_S seconds, so that a peer that repeats a failing request
does not fill the log."""


class LogLimit:
    """Logs at most MAX_LOG_LINES lines in LOG_EVERY_S seconds. Thread-safe.

    The next line that is logged reports how many lines were left out before it.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._lock = log, threading.Lock()
        self._began_s = -LOG_EVERY_S
        self._lines = self._left_out = 0

    def write(self, level: int, text: str, *arguments: object, trace: bool = False) -> None:
        """Log a line, or count the line as left out. `trace`: whether to add the stack of the current exception."""
        if not self._log.isEnabledFor(level):
            return
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._began_s >= LOG_EVERY_S:
                self._began_s, self._lines = now_s, 0
            if self._lines >= MAX_LOG_LINES:
                self._left_out += 1
                return
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text += f" ({left_out} similar lines were left out)"
        self._log.log(level, text, *arguments, exc_info=trace)


class SocketServer:
    """Listens on one address, and serves each connection in a thread of its own.

    Connections in the handshake have a limit of their own, so that strangers cannot use up the cluster's connections.

    Attributes:
        address: The address that the server listens on, with the actual port.
        refused: Number of connections that failed the handshake, or exceeded a limit.
        bugs: Number of connections that ended by an unexpected exception. The log has the stacks.
    """

    def __init__(
        self,
        service: Service,
        address: str,
        secret: bytes,
        *,
        io_timeout_s: float,
        max_connections: int,
        tls: "Tls | None" = None,
    ) -> None:
        """Start to listen. Clients that connect before `serve` is called have to wait.

        Args:
            service: Handles the requests.
            address: "host:port", "unix:/path", or "unix:@name" for an abstract Unix socket.
            secret: The cluster's secret; not used over Unix sockets. See `accept_secrets`.
            io_timeout_s: If a peer stalls for this long within a message or payload, the connection is ended.
            max_connections: Limit of connections after the handshake. Further connections are refused.
            tls: The certificates for TLS, which all clients must use then. Not used over Unix sockets.

        Raises:
            ConfigError: The server cannot listen on the address.
        """
        self._service, self._io_timeout_s, self._max_connections = service, io_timeout_s, max_connections
        self._listener, self.address = listen(address)
        self._local = self._listener.family == socket.AF_UNIX
        self._tls = None if self._local else tls
        self._accepted: tuple[bytes, ...] = (b"" if self._local else secret,)
        self._shaking: dict[socket.socket, threading.Thread] = {}  # in the handshake, oldest first
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._secrets: dict[socket.socket, bytes] = {}  # the secret that the client of each connection has proved
        self._end_at_s: dict[socket.socket, float] = {}  # connections whose secret is not accepted any more
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._log = LogLimit(log)
        self.refused = self.bugs = 0
        self._thread = threading.Thread(target=self._accept, name=f"raykv-accept-{self.address}", daemon=True)
        drop_after_fork(self)

    def serve(self) -> None:
        """Start to accept connections."""
        self._thread.start()

    def accept_secrets(self, accepted: tuple[bytes, ...]) -> None:
        """Let clients use any of these secrets, and no other. Over Unix sockets this has no effect.

        Connections with another secret end. Before that, requests that have arrived are answered, but not for longer
        than END_S.
        """
        if self._local:
            return
        with self._lock:
            self._accepted = accepted
            ended = [connection for connection, secret in self._secrets.items() if secret not in accepted]
            for connection in ended:
                self._end_at_s.setdefault(connection, time.monotonic() + END_S)
        for connection in ended:
            _cut(connection, socket.SHUT_RD)  # its thread still gets what has arrived

    def close(self) -> None:
        """Stop listening, end all connections, and wait for their threads, at most HANDSHAKE_TIMEOUT_S for each."""
        self._closed.set()
        with self._lock:
            connections = {**self._shaking, **self._connections}
        for each in (self._listener, *connections):
            _cut(each)
        self._listener.close()
        for thread in (self._thread, *connections.values()):
            if thread.ident is not None:
                thread.join(HANDSHAKE_TIMEOUT_S)

    def after_fork(self) -> None:
        """Close the child's descriptors without a shutdown. The child serves nothing; the parent still serves."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._closed.set()
        for each in (self._listener, *self._shaking, *self._connections):
            each.close()
        self._shaking, self._connections = {}, {}

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # probably no file descriptor is free, so wait until a connection ends
                continue
            try:
                connection = connection if self._tls is None else self._tls.wrap(connection, server=True)
                started = self._start_thread(connection, peer)
            except OSError:  # the connection has ended already
                started = False
            if not started:
                self.refused += 1
                connection.close()

    def _start_thread(self, connection: socket.socket, peer: object) -> bool:
        """Start the thread of a connection. Returns False if the connection cannot be served."""
        thread = threading.Thread(target=self._serve, args=(connection, peer), name="raykv-serve", daemon=True)
        with self._lock:
            if self._closed.is_set():
                return False
            if len(self._shaking) >= MAX_HANDSHAKES:
                _cut(next(iter(self._shaking)))
            try:
                thread.start()
            except RuntimeError:
                return False  # the process has reached its limit of threads
            self._shaking[connection] = thread
        return True

    def _admit(self, connection: socket.socket, secret: bytes) -> None:
        """Record that a connection passed the handshake with this secret.

        Raises PeerUnavailable if too many connections are open, or if the secret is not accepted any more.
        """
        with self._lock:
            if secret not in self._accepted:
                raise PeerUnavailable("the secret was replaced during the handshake")
            if self._closed.is_set() or len(self._connections) >= self._max_connections:
                raise PeerUnavailable(f"{self._max_connections} connections already")
            self._connections[connection] = self._shaking.pop(connection)
            self._secrets[connection] = secret

    def _serve(self, connection: socket.socket, peer: object) -> None:
        session: Session | None = None
        try:
            stream = self._shake_hands(connection)
            session = self._service.session(local=self._local)
            while stream.wait(session.patience_s) and time.monotonic() < self._end_at_s.get(connection, math.inf):
                self._serve_one(stream, session)
        except (OSError, RayKVError) as error:
            if not self._closed.is_set():
                level = logging.WARNING if isinstance(error, ProtocolError) else logging.DEBUG
                self._log.write(level, "connection of %s ended: %s", _name_of(peer), error)
                self.refused += session is None
        except Exception:  # noqa: BLE001  a bug in the service ends this connection, not the server
            self.bugs += 1
            self._log.write(logging.ERROR, "connection ended by a bug", trace=True)
        finally:
            if session is not None:
                session.close()
            with self._lock:
                self._connections.pop(connection, None)
                self._shaking.pop(connection, None)
                self._secrets.pop(connection, None)
                self._end_at_s.pop(connection, None)
            connection.close()

    def _shake_hands(self, connection: socket.socket) -> Stream:
        """Do the handshake. Raises RayKVError if the handshake fails, or if too many connections are open."""
        if self._local:
            give_way()
            require_same_user(connection)
        else:
            tune(connection)
        stream = Stream(connection, tick_s=TICK_S)
        admit = partial(self._admit, connection)
        greet_client(stream, self._accepted, admit, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        stream.set_tick(self._io_timeout_s)
        return stream

    def _request(self, stream: Stream) -> tuple[Message, int]:
        """Receive a request and its number. If the request cannot be decoded, send Failure and raise ProtocolError."""
        stall_s, request_id = self._io_timeout_s, 0
        try:
            header = stream.header(time.monotonic() + stall_s)
            request_id = header.request_id
            return stream.body(header, time.monotonic() + stall_s), request_id
        except ProtocolError as error:
            stream.send(encode(failure(error), self._service.epoch, request_id), time.monotonic() + stall_s)
            raise

    def _serve_one(self, stream: Stream, session: Session) -> None:
        stall_s = self._io_timeout_s
        request, request_id = self._request(stream)
        reply = self._service.answer(request, session)
        complete = False
        try:
            message = encode(reply.answer, self._service.epoch, request_id)
            stream.send_with(message, reply.outgoing, stall_s=stall_s)
            if reply.opening is not None:
                reply.opening(stream.message(time.monotonic() + stall_s)[0])
            for run in reply.incoming:
                stream.fill(run, time.monotonic() + stall_s)
            if reply.closing is not None:
                reply.closing(stream.message(time.monotonic() + stall_s)[0])
            complete = True
        finally:
            second = reply.finish(complete)
        if second is not None:
            stream.send(encode(second, self._service.epoch, request_id), time.monotonic() + stall_s)


def _name_of(peer: object) -> str:
    """Return the address of a peer, for logs. Peers on Unix sockets have none."""
    return "{}:{}".format(*peer[:2]) if isinstance(peer, tuple) else "a process of this host"


def _cut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut down a connection. The thread that serves the connection wakes up and closes it."""
    try:
        # Not the method of SSLSocket: it turns TLS off, and the thread would go on in plain text.
        socket.socket.shutdown(connection, how)
    except OSError:
        pass
