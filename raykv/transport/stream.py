"""Sends and receives messages and their payloads on one connected socket, with deadlines.

The system calls are in `raykv.transport.channel`. Each ends after a tick, so that the methods can check the deadline.

A short message is received into a buffer of READ_AHEAD_NBYTES. The same system call may also receive the first bytes of
the payload. These bytes are copied to their target later. All other payload bytes are received directly into their
target.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Final

from raykv.errors import PeerUnavailable, TransientError
from raykv.memory.copying import TINY_NBYTES, checksums_of
from raykv.protocol.codec import HEADER, Header, decode, decode_header
from raykv.protocol.messages import Answer, Request
from raykv.transport.base import ChunkRun, Runs
from raykv.transport.channel import LATE, STEP_PIECES, Channel, PlainChannel
from raykv.transport.seal import TAG_NBYTES, Seal

READ_AHEAD_NBYTES: Final = 4096
STEP_NBYTES: Final = 1 << 20
"""A server passes at most this many payload bytes to one `sendmsg`. If a peer does not accept these bytes within a time
limit, the server ends the connection."""

_HEADER_NBYTES: Final = HEADER.size


class Stream:
    """Both directions of one connection. Not thread-safe.

    Methods raise PeerUnavailable when the deadline has passed or the connection is lost. After this error the stream
    may be in the middle of a message, so the caller must close the socket.

    Attributes:
        seal: Adds a tag to each message, and checks the tags of received messages. None: messages have no tag. The
            handshake sets it.
    """

    def __init__(self, connection: socket.socket, *, tick_s: float) -> None:
        """Use a connected socket, or an `ssl.SSLSocket` before its TLS handshake. `tick_s`: see `set_tick`."""
        self.socket = connection
        self._channel = _channel_of(connection)
        self.set_tick(tick_s)
        self._ahead = memoryview(bytearray(READ_AHEAD_NBYTES))
        self._start = self._end = 0  # range of the bytes in `_ahead` that are not used yet
        self._header = b""  # of the message whose body comes next
        self.seal: Seal | None = None

    def set_tick(self, tick_s: float) -> None:
        """Let each system call wait for at most `tick_s` seconds. A method may overrun its deadline by this long."""
        self._channel.set_tick(tick_s)

    @property
    def has_tls(self) -> bool:
        return not isinstance(self._channel, PlainChannel)

    def secure(self, deadline_s: float) -> None:
        """Do the TLS handshake if the connection has TLS. Raises ProtocolError if the peer's certificate is refused."""
        while not self._channel.begin():
            _require_time(deadline_s)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send one message."""
        self._send_some([memoryview(self._sealed(message))], deadline_s)

    def send_with(self, message: bytes, pieces: Sequence[memoryview], *, stall_s: float) -> None:
        """Send a message and its payload. Each step of STEP_NBYTES may take at most `stall_s` seconds."""
        for step in _steps(memoryview(self._sealed(message)), pieces):
            self._send_some(step, time.monotonic() + stall_s)

    def send_runs(self, runs: Runs, deadline_s: float) -> None:
        """Send runs of buffers. The next run is taken from the iterator only after the previous one is sent."""
        for run in runs:
            for first in range(0, len(run), STEP_PIECES):
                self._send_some(list(run[first : first + STEP_PIECES]), deadline_s)

    def _sealed(self, message: bytes) -> bytes:
        return message if self.seal is None else message + self.seal.tag(message)

    def _send_some(self, pieces: list[memoryview], deadline_s: float) -> None:
        """Send at most STEP_PIECES pieces. Even if the deadline has passed, there is one attempt."""
        while pieces:
            pieces = _after(pieces, self._channel.send(pieces))
            if pieces:
                _require_time(deadline_s)

    # -- receiving messages -----------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        """Wait until bytes arrive. Returns False after `timeout_s` seconds, or if the connection has ended."""
        until_s = time.monotonic() + timeout_s
        try:
            while self._start == self._end:
                if not self._read_ahead() and time.monotonic() >= until_s:
                    return False
        except PeerUnavailable:
            return False
        return True

    def message(self, deadline_s: float) -> tuple[Request | Answer, Header]:
        """Receive the next message. Raises ProtocolError if it is not a message of this protocol."""
        header = self.header(deadline_s)
        return self.body(header, deadline_s), header

    def header(self, deadline_s: float) -> Header:
        """Receive the header of the next message. The caller must call `body` next. Raises the errors of `message`."""
        while self._end - self._start < _HEADER_NBYTES:
            if not self._read_ahead():
                _require_time(deadline_s)
        start, self._start = self._start, self._start + _HEADER_NBYTES
        self._header = bytes(self._ahead[start : self._start])
        return decode_header(self._header)

    def body(self, header: Header, deadline_s: float) -> Request | Answer:
        """Receive the message that follows a header. Raises the errors of `message`."""
        nbytes, start = header.length + self._tag_nbytes, self._start
        raw: memoryview | bytes
        if start + nbytes <= self._end:
            raw, self._start = self._ahead[start : start + nbytes], start + nbytes
        else:
            raw = self.exactly(nbytes, deadline_s)
        if self.seal is None:
            return decode(raw)
        body = raw[: header.length]
        self.seal.check(self._header, body, raw[header.length :])
        return decode(body)

    @property
    def _tag_nbytes(self) -> int:
        return 0 if self.seal is None else TAG_NBYTES

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a message has arrived, or the first READ_AHEAD_NBYTES of a long message.

        Returns False after a time-out. Also returns True if the connection is broken: in this case `message` raises an
        error at once.
        """
        until_s = time.monotonic() + timeout_s
        try:
            while not self._begun():
                if self._read_ahead(wait=False):
                    continue
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._channel.poll(left_s)
        except TransientError:
            pass
        return True

    def _begun(self) -> bool:
        """Return whether the buffer holds a whole message, or is full with the start of a long message."""
        here = self._ahead[self._start : self._end]
        if len(here) < _HEADER_NBYTES:
            return False
        length: int = HEADER.unpack_from(here)[-1]
        return len(here) >= min(_HEADER_NBYTES + length + self._tag_nbytes, READ_AHEAD_NBYTES)

    def _read_ahead(self, *, wait: bool = True) -> int:
        """Read bytes into the buffer. Returns their number. Waits for up to a tick if `wait` is True."""
        if self._start:
            left = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(left)] = left
            self._start, self._end = 0, len(left)
        got = self._channel.receive([self._ahead[self._end :]], wait=wait)
        self._end += got
        return got

    # -- receiving payloads -----------------------------------------------------------------------------------------

    def exactly(self, nbytes: int, deadline_s: float) -> bytes:
        """Receive exactly `nbytes` bytes. Takes memory step by step: a peer may announce more than it sends."""
        parts = []
        for first in range(0, nbytes, STEP_NBYTES):
            parts.append(bytearray(min(STEP_NBYTES, nbytes - first)))
            self.fill([memoryview(parts[-1])], deadline_s)
        return b"".join(parts)

    def fill(self, run: Sequence[memoryview] | ChunkRun, deadline_s: float) -> None:
        """Fill views in order. The chunks of a ChunkRun are hashed on the way, by compiled code if possible."""
        if not isinstance(run, ChunkRun):
            self._fill_views(run, deadline_s)
            return
        ahead = self._ahead[self._start : self._end]
        if run.sizes and min(run.sizes) > TINY_NBYTES and self._channel.fill_chunks(ahead, run, deadline_s):
            self._start += min(len(ahead), sum(run.sizes))
            return
        for chunk in run.chunks:
            self._fill_views(chunk, deadline_s)
            run.full += 1
            if run.hashed:
                run.checksums += checksums_of([chunk])  # now, while its bytes are in the CPU cache

    def _fill_views(self, views: Sequence[memoryview], deadline_s: float) -> None:
        pieces = [piece for piece in self._use_read_ahead(views) if len(piece)]
        while pieces:
            _require_time(deadline_s)
            pieces = _after(pieces, self._channel.receive(pieces[:STEP_PIECES], fill=True))

    def _use_read_ahead(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Fill views with the bytes that were read ahead. Returns the views that are not full yet."""
        left = list(views)
        while left and self._start < self._end:
            piece = left[0]
            step = min(len(piece), self._end - self._start)
            piece[:step] = self._ahead[self._start : self._start + step]
            self._start += step
            if step < len(piece):
                left[0] = piece[step:]
            else:
                del left[0]
        return left


def _channel_of(connection: socket.socket) -> Channel:
    if type(connection) is socket.socket:
        return PlainChannel(connection)
    from raykv.transport.tls import TlsChannel  # imported late: few processes need ssl, whose import takes 10 ms

    return TlsChannel(connection)


def _steps(message: memoryview, pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split a message and its payload into lists. Each list is small enough for one `sendmsg`."""
    step, room = [message], STEP_NBYTES
    for piece in pieces:
        rest = piece
        while len(rest) > room or len(step) == STEP_PIECES:
            if room and len(step) < STEP_PIECES:
                step.append(rest[:room])
                rest = rest[room:]
            yield step
            step, room = [], STEP_NBYTES
        step.append(rest)
        room -= len(rest)
    yield step


def _after(pieces: list[memoryview], moved: int) -> list[memoryview]:
    """Return the pieces without their first `moved` bytes."""
    for number, piece in enumerate(pieces):
        if moved < len(piece):
            return [piece[moved:], *pieces[number + 1 :]]
        moved -= len(piece)
    return []


def _require_time(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise PeerUnavailable(LATE)
