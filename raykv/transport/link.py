"""The client end of a connection over TCP or a Unix socket."""

import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from raykv.errors import ConfigError, PeerUnavailable, ProtocolError, RayKVError
from raykv.protocol.codec import encode, raise_failure
from raykv.protocol.messages import Answer, Failure, Message
from raykv.transport.addresses import parse_address, tune
from raykv.transport.base import MAX_POSTED, Runs, Targets, remaining
from raykv.transport.forking import abandon, drop_after_fork
from raykv.transport.handshake import greet_server, require_same_user
from raykv.transport.stream import Stream

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

TICK_S: Final = 0.01
"""A call over a link may overrun its deadline by at most this many seconds."""
MAX_REQUEST_ID: Final = 0xFFFFFFFF
_LAST_DATA_RECV: Final = struct.Struct("52xI")
"""Where `struct tcp_info` has the milliseconds since data arrived last."""
_DISCARD: Final = struct.pack("ii", 1, 0)  # linger for 0 seconds: closing resets the connection


class Link:
    """The client end of one connection. Not thread-safe. A forked child closes its copy and sends nothing to the peer.

    Deadlines are times of the monotonic clock.

    Attributes:
        epoch: The greatest epoch in any answer so far. An epoch is the version of the peer's list of members.
        closed: Whether the link is closed. A closed link cannot be used again.
        at_close: Functions to call when the link is closed. A forked child does not call them.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._posted: deque[int] = deque()  # numbers of the requests whose answers are not collected yet, oldest first
        self._next_id = 1
        self.epoch = 0
        self.closed = False
        self.at_close: list[Callable[[], None]] = []
        drop_after_fork(self)

    @classmethod
    def connect(
        cls, address: str, secret: bytes, *, deadline_s: float, tls: "Tls | None" = None, source: str = ""
    ) -> "Link":
        """Connect and do the handshake.

        Args:
            address: "host:port", "unix:/path", or "unix:@name" for an abstract Unix socket.
            secret: The cluster's secret; not used over Unix sockets.
            deadline_s: When to give up.
            tls: The certificates for TLS, which the server must have too. Not used over Unix sockets.
            source: The IPv4 address of this host to connect from. Empty: the routing table chooses it.

        Raises:
            WrongSecret: The peer does not know the secret. This is a PeerUnavailable.
            PeerUnavailable: Nothing listens at the address, it is impossible, the deadline has passed, or the user
                differs.
            ProtocolError: The peer speaks another protocol or version, or one end refuses the other's certificate.
        """
        try:
            family, where = parse_address(address)
        except ConfigError as error:  # the address comes from a member, whose mistake is not the caller's
            raise PeerUnavailable(str(error)) from error
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no file descriptor is free
            raise PeerUnavailable(f"{address}: cannot make a socket: {error.strerror or error}") from error
        try:
            connection.settimeout(remaining(deadline_s))
            if source:
                connection.bind((source, 0))
            connection.connect(where)
            if family == socket.AF_UNIX:
                require_same_user(connection)
                secret = b""
            else:
                tune(connection)
                if tls is not None:
                    connection = tls.wrap(connection)
            stream = Stream(connection, tick_s=TICK_S)
            greet_server(stream, secret, deadline_s)
        except (OSError, OverflowError, UnicodeError, RayKVError) as error:  # Overflow, Unicode: invalid port or name
            connection.close()
            if isinstance(error, RayKVError):
                raise
            raise PeerUnavailable(f"{address}: {getattr(error, 'strerror', None) or error}") from error
        return cls(stream)

    def call(self, request: Message, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        """Post a request and collect its answer; see `collect`. The caller must have collected all earlier answers."""
        assert not self._posted
        self.post(request, deadline_s=deadline_s)
        return self.collect(place, deadline_s=deadline_s)

    def push(
        self,
        request: Message,
        pick: Callable[[Answer], Runs],
        closing: Callable[[], Message] | None = None,
        *,
        opening: Callable[[Answer], Message] | None = None,
        deadline_s: float,
    ) -> Answer:
        """Send a Write, and its payload after the first answer. Returns the second answer.

        Raises the errors of `collect`. The caller must have collected all earlier answers.

        Args:
            pick: Computes the payload from the first answer.
            closing: Makes the message that follows the payload. It is called after the payload was sent. None: no
                message follows.
            opening: Makes the message before the payload from the first answer. It is called before `pick`. None: no
                message precedes the payload.
            deadline_s: When to give up.
        """
        request_id = self._next_id
        first = self.call(request, deadline_s=deadline_s)
        try:
            if opening is not None:
                self._stream.send(encode(opening(first), self.epoch, request_id), deadline_s)
            self._stream.send_runs(pick(first), deadline_s)
            if closing is not None:
                self._stream.send(encode(closing(), self.epoch, request_id), deadline_s)
            answer = self._receive(request_id, deadline_s)
        except BaseException:
            self._abort()
            raise
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer

    def post(self, request: Message, *, deadline_s: float) -> None:
        """Send a request without waiting for its answer. The caller must call `collect` for each posted request.

        The request must not be a Write (see `push`). At most MAX_POSTED requests may be in flight.

        Raises:
            PeerUnavailable: The connection broke, or the peer did not accept the request in time. The link is closed.
        """
        self._require_open()
        assert len(self._posted) < MAX_POSTED
        request_id = self._next_id
        message = encode(request, self.epoch, request_id)
        try:
            remaining(deadline_s)
            self._stream.send(message, deadline_s)
        except BaseException:
            self._abort()
            raise
        self._next_id = request_id % MAX_REQUEST_ID + 1  # never 0, because 0 means "no request"
        self._posted.append(request_id)

    def collect(self, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        """Wait for the next answer. The answers come in the order of the posted requests.

        Args:
            place: For a read, a function that takes the answer and returns the buffers to fill with the payload. The
                buffers must have the total length of the payload. After an error, a buffer may be partly filled. When
                `collect` has returned or raised, nothing writes to the buffers any more.

        Raises:
            PeerUnavailable: No answer arrived by the deadline, or the connection broke. The link is closed.
            ProtocolError: The peer sent something other than the expected answer. The link is closed.
            RayKVError: The node refused the request. The link can still be used.
        """
        self._require_open()
        assert self._posted
        try:
            answer = self._receive(self._posted[0], deadline_s)
            self._posted.popleft()
            if place is not None and not isinstance(answer, Failure):
                for run in place(answer):
                    self._stream.fill(run, deadline_s)
        except BaseException:
            self._abort()  # the link cannot be used any more, because its position in the byte stream is unknown
            raise
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer

    def _receive(self, request_id: int, deadline_s: float) -> Answer:
        """Receive the answer to a request. Raises ProtocolError if the answer to another request arrives instead."""
        answer, header = self._stream.message(deadline_s)
        self.epoch = max(self.epoch, header.epoch)
        if header.request_id != request_id:
            if header.request_id == 0 and isinstance(answer, Failure):  # the peer could not read our request
                raise_failure(answer)
            raise ProtocolError(f"an answer to request {header.request_id}, where one to {request_id} was due")
        return answer  # type: ignore[return-value]  # callers check the type of the answer

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until `collect` would not block. Returns False after a time-out, or if no answer is due.

        Also returns True if the connection is broken or closed: in this case `collect` raises an error at once.
        """
        return self.closed or (bool(self._posted) and self._stream.wait_ready(timeout_s))

    def silent_s(self) -> float:
        """Return the seconds since data arrived last. Any thread may call this. 0 if the connection has ended."""
        try:
            info = self._stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
        except OSError:
            return 0.0
        milliseconds: int = _LAST_DATA_RECV.unpack(info)[0]
        return milliseconds / 1000

    def cut(self) -> None:
        """Shut the connection down: the thread that waits for it gets an error. Any thread may call this."""
        try:
            # Not the method of SSLSocket: it turns TLS off, and the thread would go on in plain text.
            socket.socket.shutdown(self._stream.socket, socket.SHUT_RDWR)
        except OSError:
            pass  # the connection has ended already

    def _require_open(self) -> None:
        if self.closed:
            raise PeerUnavailable("the connection is closed")

    def _abort(self) -> None:
        """Close the connection, and discard what the peer has not received yet.

        Otherwise the kernel would still send a request that nobody waits for. A peer that was out of reach would then
        serve it after newer requests.
        """
        try:
            self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
        except OSError:
            pass  # the connection is closed already
        self.close()

    def close(self) -> None:
        """Close the connection. The server then ends the connection's leases."""
        self.closed = True
        self._posted.clear()
        self._stream.socket.close()
        while self.at_close:
            self.at_close.pop()()

    def after_fork(self) -> None:
        """Close the child's descriptor without a shutdown. The parent's connection stays open."""
        if self.at_close:
            abandon(self.at_close)
        self.at_close = []
        self.close()
