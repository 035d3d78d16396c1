"""Messages and runs of bytes on one connected socket, with deadlines.

The socket blocks, and the kernel ends each wait after a tick (SO_RCVTIMEO and SO_SNDTIMEO, set once). So a system call
that moves all its bytes needs no other one, and the clock is read only when a call returns early. Python's own
time-outs would need a `poll` before each call.

A message and the beginning of what follows it are read in one call. At most READ_AHEAD_NBYTES are read too far, and
copied to their place later; all other bytes go from the socket to their place.
"""

import math
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from raykv.errors import PeerUnavailable
from raykv.memory import native
from raykv.memory.copying import CHECKSUM, HASH_NBYTES, TINY_NBYTES
from raykv.protocol.codec import HEADER, Header, decode, decode_header
from raykv.protocol.messages import Answer, Request
from raykv.transport.base import ChunkRun, Runs

READ_AHEAD_NBYTES: Final = 4096
STEP_NBYTES: Final = 1 << 20
"""Most bytes of one `sendmsg`; a peer that accepts less than this within a stall time-out is disconnected."""
STEP_PIECES: Final = 1024
"""Most views of one `sendmsg` or `recvmsg_into`: the kernel's limit."""

_HEADER_NBYTES: Final = HEADER.size
_WAITALL: Final = socket.MSG_WAITALL
_DONTWAIT: Final = socket.MSG_DONTWAIT
_CLOSED: Final = "the peer closed the connection"
_LATE: Final = "the deadline has passed"
_LATE_END: Final = 1  # the result of `native.receive` for a deadline that has passed


class Stream:
    """Both directions of one connection. Not thread-safe.

    After PeerUnavailable (the deadline has passed, the peer is gone) the stream may be in the middle of a message: it
    is of no more use.
    """

    def __init__(self, connection: socket.socket, *, tick_s: float, spin_s: float = 0.0) -> None:
        """Use a connected socket.

        Args:
            tick_s: See `set_tick`.
            spin_s: Poll the socket for this long before sleeping. It saves the time to wake a thread, and uses a core
                meanwhile. 0: sleep at once.
        """
        self.socket = connection
        connection.settimeout(None)
        self.set_tick(tick_s)
        self._spin_s = spin_s
        self._ahead = memoryview(bytearray(READ_AHEAD_NBYTES))
        self._start = self._end = 0  # bytes that were read ahead and not used yet

    def set_tick(self, tick_s: float) -> None:
        """Set how long one wait lasts before the clock is read: a call may end this much later than its deadline."""
        tick = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1e6) + 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send one message."""
        self._send_some([memoryview(message)], deadline_s)

    def send_with(self, message: bytes, pieces: Sequence[memoryview], *, stall_s: float) -> None:
        """Send a message and the bytes that follow it; each STEP_NBYTES may take `stall_s` seconds."""
        for step in _steps(memoryview(message), pieces):
            self._send_some(step, time.monotonic() + stall_s)

    def send_runs(self, runs: Runs, deadline_s: float) -> None:
        """Send runs of bytes, each before the next is requested."""
        for run in runs:
            for first in range(0, len(run), STEP_PIECES):
                self._send_some(list(run[first : first + STEP_PIECES]), deadline_s)

    def _send_some(self, pieces: list[memoryview], deadline_s: float) -> None:
        """Send at most STEP_PIECES pieces. The first attempt is made also when the deadline has passed."""
        while pieces:
            try:
                sent = self.socket.sendmsg(pieces)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise _lost(error) from error
            pieces = _after(pieces, sent)
            if pieces:
                _require_time(deadline_s)

    # -- receiving messages -----------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Wait without a deadline until something arrives. False when the connection has ended instead."""
        try:
            while self._start == self._end:
                self._read_ahead()
        except PeerUnavailable:
            return False
        return True

    def message(self, deadline_s: float) -> tuple[Request | Answer, Header]:
        """Receive the next message.

        Raises:
            ProtocolError: It is not one of this protocol.
        """
        header = self.header(deadline_s)
        return self.body(header, deadline_s), header

    def header(self, deadline_s: float) -> Header:
        """Receive the header of the next message; `body` must follow. Raises as `message` does."""
        while self._end - self._start < _HEADER_NBYTES:
            if not self._read_ahead():
                _require_time(deadline_s)
        start, self._start = self._start, self._start + _HEADER_NBYTES
        return decode_header(self._ahead[start : self._start])

    def body(self, header: Header, deadline_s: float) -> Request | Answer:
        """Receive the message behind a header. Raises as `message` does."""
        start, end = self._start, self._start + header.length
        if end <= self._end:
            self._start = end
            return decode(self._ahead[start:end])
        return decode(self.exactly(header.length, deadline_s))

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until `message` would return at once, or nearly: of a long message the beginning is here.

        A broken connection counts as ready: `message` raises the error.
        """
        until_s = time.monotonic() + timeout_s
        try:
            while not self._begun():
                if self._read_ahead(_DONTWAIT):
                    continue
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                poll = select.poll()
                poll.register(self.socket.fileno(), select.POLLIN)
                poll.poll(math.ceil(min(left_s, 1e6) * 1e3))
        except PeerUnavailable:
            pass
        return True

    def _begun(self) -> bool:
        """Whether a message was read ahead, or as much of it as fits."""
        here = self._ahead[self._start : self._end]
        if len(here) < _HEADER_NBYTES:
            return False
        length: int = HEADER.unpack_from(here)[-1]
        return len(here) >= min(_HEADER_NBYTES + length, READ_AHEAD_NBYTES)

    def _read_ahead(self, flags: int = 0) -> int:
        """Read what has arrived. Waits for a tick, unless `flags` forbid it; before it sleeps it spins, if wanted.

        Returns:
            How many bytes; 0 when none arrived.
        """
        if self._start:
            left = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(left)] = left
            self._start, self._end = 0, len(left)
        room, got = [self._ahead[self._end :]], 0
        if self._spin_s and not flags:
            until_s = time.monotonic() + self._spin_s
            while not (got := self._receive(room, _DONTWAIT)) and time.monotonic() < until_s:
                os.sched_yield()
        got = got or self._receive(room, flags)
        self._end += got
        return got

    def _receive(self, views: list[memoryview], flags: int) -> int:
        """Receive into views. Returns how many bytes; 0 when none arrived within a tick.

        Raises:
            PeerUnavailable: The connection has ended.
        """
        try:
            got = self.socket.recvmsg_into(views, 0, flags)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _lost(error) from error
        if not got:
            raise PeerUnavailable(_CLOSED)
        return got

    # -- receiving payloads -----------------------------------------------------------------------------------------

    def exactly(self, nbytes: int, deadline_s: float) -> bytes:
        """Receive a few bytes."""
        raw = bytearray(nbytes)
        self.fill([memoryview(raw)], deadline_s)
        return bytes(raw)

    def fill(self, run: Sequence[memoryview] | ChunkRun, deadline_s: float) -> None:
        """Fill views one after another; the chunks of a ChunkRun are hashed as they arrive."""
        if not isinstance(run, ChunkRun):
            self._fill_views(run, deadline_s)
        elif native.receive is None or not run.sizes or min(run.sizes) <= TINY_NBYTES:
            self._fill_chunks(run, deadline_s)
        else:
            self._fill_chunks_compiled(run, deadline_s)

    def _fill_chunks_compiled(self, run: ChunkRun, deadline_s: float) -> None:
        assert native.receive is not None
        ahead = self._ahead[self._start : self._end]
        checksums = bytearray(8 * len(run.sizes)) if run.hashed else None
        end, run.full = native.receive(self.socket.fileno(), ahead, run.chunks, checksums, deadline_s, self._spin_s)
        self._start += min(len(ahead), sum(run.sizes))
        if checksums is not None:
            run.checksums = bytes(checksums[: 8 * run.full])
        if end < 0:
            error = OSError(-end, os.strerror(-end))
            raise _lost(error) from error
        if end:
            raise PeerUnavailable(_LATE if end == _LATE_END else _CLOSED)

    def _fill_chunks(self, run: ChunkRun, deadline_s: float) -> None:
        """The same without the compiled loops."""
        for chunk in run.chunks:
            state = xxhash.xxh3_64()
            for piece in chunk:
                for first in range(0, len(piece), HASH_NBYTES):
                    part = piece[first : first + HASH_NBYTES]
                    self._fill_views((part,), deadline_s)
                    if run.hashed:
                        state.update(part)
            if run.hashed:
                run.checksums += CHECKSUM.pack(state.intdigest())
            run.full += 1

    def _fill_views(self, views: Sequence[memoryview], deadline_s: float) -> None:
        pieces = [piece for piece in self._use_read_ahead(views) if len(piece)]
        while pieces:
            _require_time(deadline_s)
            pieces = _after(pieces, self._receive(pieces[:STEP_PIECES], _WAITALL))

    def _use_read_ahead(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Fill views with the bytes that were read ahead. Returns what is left to fill."""
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


def _steps(message: memoryview, pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The message and the pieces, in lists for one `sendmsg` each."""
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
    """The rest of the pieces after `moved` bytes."""
    for number, piece in enumerate(pieces):
        if moved < len(piece):
            return [piece[moved:], *pieces[number + 1 :]]
        moved -= len(piece)
    return []


def _require_time(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise PeerUnavailable(_LATE)


def _lost(error: OSError) -> PeerUnavailable:
    return PeerUnavailable(f"connection lost: {error.strerror or error}")
