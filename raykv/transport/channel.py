"""The system calls of one connection: `Stream` moves messages and payloads through a `Channel`.

`PlainChannel` is for sockets without TLS, `raykv.transport.tls.TlsChannel` for sockets with TLS. All methods wait for
at most one tick, so that the caller can check a deadline.
"""

import math
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Final, Protocol

from raykv.errors import PeerUnavailable
from raykv.memory import native
from raykv.transport.base import ChunkRun

STEP_PIECES: Final = 1024
"""One `sendmsg` or `recvmsg_into` gets at most this many views, because Linux refuses more (IOV_MAX)."""
CLOSED: Final = "the peer closed the connection"
LATE: Final = "the deadline has passed"

_LATE_END: Final = 1  # `receive` in native/ returns this after the deadline


class Channel(Protocol):
    """The bytes of one connection. Methods raise PeerUnavailable when the connection is lost."""

    def set_tick(self, tick_s: float) -> None:
        """Let `begin`, `send` and `receive` wait for at most `tick_s` seconds."""
        ...

    def begin(self) -> bool:
        """Do one step of the TLS handshake. Returns whether it is done; without TLS always True."""
        ...

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Send some of the bytes of at most STEP_PIECES pieces. Returns their number; 0 if none left within a tick."""
        ...

    def receive(self, views: Sequence[memoryview], *, fill: bool = False, wait: bool = True) -> int:
        """Receive into at most STEP_PIECES views. Returns the number of bytes; 0 if none arrived within a tick.

        Args:
            views: At least one of them is not empty.
            fill: Whether to return only when the views are full or a tick has passed. Fewer bytes are no error.
            wait: Whether to wait for the first byte.
        """
        ...

    def poll(self, timeout_s: float) -> None:
        """Wait until `receive` would return something. The caller has just seen `receive` return 0."""
        ...

    def fill_chunks(self, ahead: memoryview, run: ChunkRun, deadline_s: float) -> bool:
        """Fill and hash the chunks of a run by compiled code, first with the bytes in `ahead`.

        Returns False, without an effect, if there is no compiled code for this channel. Sets `run.full` and
        `run.checksums`, also if it raises PeerUnavailable because the deadline has passed.
        """
        ...


class PlainChannel:
    """A socket without TLS. The socket is blocking; the kernel ends each wait after a tick (SO_RCVTIMEO, SO_SNDTIMEO).

    Python's own time-outs would need a `poll` before each system call.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(None)

    def set_tick(self, tick_s: float) -> None:
        tick = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1e6) + 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def begin(self) -> bool:
        return True

    def send(self, pieces: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(error) from error

    def receive(self, views: Sequence[memoryview], *, fill: bool = False, wait: bool = True) -> int:
        flags = (socket.MSG_WAITALL if fill else 0) | (0 if wait else socket.MSG_DONTWAIT)
        try:
            got = self._socket.recvmsg_into(views, 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(error) from error
        if not got:
            raise PeerUnavailable(CLOSED)
        return got

    def poll(self, timeout_s: float) -> None:
        wait_for(self._socket, select.POLLIN, timeout_s)

    def fill_chunks(self, ahead: memoryview, run: ChunkRun, deadline_s: float) -> bool:
        if native.loops is None:
            return False
        checksums = bytearray(8 * len(run.sizes)) if run.hashed else None
        end, run.full = native.loops.receive(self._socket.fileno(), ahead, run.chunks, checksums, deadline_s)
        if checksums is not None:
            run.checksums = bytes(checksums[: 8 * run.full])
        if end < 0:
            error = OSError(-end, os.strerror(-end))
            raise lost(error) from error
        if end:
            raise PeerUnavailable(LATE if end == _LATE_END else CLOSED)
        return True


def wait_for(connection: socket.socket, event: int, timeout_s: float) -> None:
    """Wait for a poll event of a socket."""
    poll = select.poll()
    poll.register(connection.fileno(), event)
    poll.poll(math.ceil(min(timeout_s, 1e6) * 1e3))


def lost(error: OSError) -> PeerUnavailable:
    return PeerUnavailable(f"connection lost: {error.strerror or error}")
