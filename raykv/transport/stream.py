"""Messages and runs of bytes on one connected socket, with deadlines.

The socket blocks, and the kernel ends each wait after a tick (SO_RCVTIMEO and SO_SNDTIMEO, set once). So a system call
that moves all it was asked to costs nothing more, and the clock is read when one comes back short. Python's own
time-outs would put a `poll` before each call.

A message and what follows it are read in one call. What was read too far, at most READ_AHEAD_NBYTES, is copied once
more to where it belongs; all else goes from the socket to its place.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from raykv.errors import PeerUnavailable
from raykv.memory import native
from raykv.memory.copying import CHECKSUM, HASH_NBYTES, TINY_NBYTES, checksums_of
from raykv.protocol.messages import HEADER, Answer, Request, decode, decode_header
from raykv.transport.base import RUN_NBYTES, ChunkRun, Runs

READ_AHEAD_NBYTES: Final = 4096
STEP_NBYTES: Final = 1 << 20
"""Most bytes of one `sendmsg`; a peer that takes less than this in a stall time-out is cut off."""
FIRST_NBYTES: Final = 32 << 10
"""Of the first one, if more follow: the reader copies these while we copy the rest."""
WATCH_S: Final = 200e-6
"""Where bytes come quickly, a socket is watched so long before the thread goes to sleep: to be woken costs a good part
of it on a virtual machine, here and at the peer. The processor is offered to others meanwhile, who may not get it
before the watch is over if their session is another one."""
NAPS: Final = 16
"""When watching was in vain, short waits are slept through before it is tried again: one, then two, at most so many."""
STEP_PIECES: Final = 1024
"""Most views of one `sendmsg` or `recvmsg_into`: the kernel's limit."""

_seats: Final = [None] * max(1, len(os.sched_getaffinity(0)) // 2)
"""Who watches takes one: the watchers of a process leave half of the cores, and the interpreter's lock, to others."""

_HEADER_NBYTES: Final = HEADER.size
_WAITALL: Final = socket.MSG_WAITALL
_DONTWAIT: Final = socket.MSG_DONTWAIT
_GONE: Final = "the peer closed the connection"
_LATE: Final = "the deadline has passed"
_LATE_END: Final = 1
"""How `native.receive` says that."""


class _Watch:
    """Whether to watch for the next bytes, or to sleep until they come: what paid goes on."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._naps = self._next = 1

    def begin(self) -> bool:
        """Whether to watch now; then `end` must follow."""
        if self._naps or not self._allowed:
            return False
        try:
            _seats.pop()
        except IndexError:
            return False
        return True

    def end(self, *, paid: bool) -> None:
        """The bytes came meanwhile, or did not."""
        _seats.append(None)
        if paid:
            self._next = 1
        else:
            self._naps, self._next = self._next, min(2 * self._next, NAPS)

    def slept(self, seconds: float) -> None:
        """The bytes came after so long a sleep."""
        if self._naps and seconds < 2 * WATCH_S:
            self._naps -= 1


class Stream:
    """Both directions of one connection. Not thread-safe.

    Whatever raises PeerUnavailable (the deadline has passed, the peer is gone) leaves the stream in the middle of
    something: it is of no more use.
    """

    def __init__(self, connection: socket.socket, *, tick_s: float, watch: bool = True) -> None:
        """Take over a connected socket. See `set_tick`.

        Args:
            watch: For a moment before sleeping, where that pays. Not for who serves its own host: whoever writes there
                waits for no answer, and uses the same cores.
        """
        self.socket = connection
        connection.settimeout(None)
        self.set_tick(tick_s)
        self._receive, self._send, self._send_pieces = connection.recv_into, connection.send, connection.sendmsg
        self._ahead = memoryview(bytearray(READ_AHEAD_NBYTES))
        self._messages, self._bytes = _Watch(allowed=watch), _Watch(allowed=watch)
        self._start = self._end = 0  # what was read ahead, and nobody took yet

    def set_tick(self, tick_s: float) -> None:
        """How long one wait lasts before the clock is read: a call may end so much later than its deadline."""
        tick = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1e6) + 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send one message."""
        try:
            sent = self._send(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise _lost(error) from error
        if sent < len(message):
            self._send_all([memoryview(message)[sent:]], deadline_s)

    def send_with(self, message: bytes, pieces: Sequence[memoryview], *, stall_s: float) -> None:
        """Send a message and the bytes that go with it; each STEP_NBYTES may take `stall_s` seconds."""
        nbytes = len(message) + sum(map(len, pieces))
        if nbytes <= 2 * FIRST_NBYTES and len(pieces) < STEP_PIECES:
            try:
                sent = self._send_pieces((message, *pieces))
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise _lost(error) from error
            if sent < nbytes:
                self._send_all(_after([memoryview(message), *pieces], sent), time.monotonic() + stall_s)
            return
        for step in _steps(memoryview(message), pieces):
            self._send_all(step, time.monotonic() + stall_s)

    def send_runs(self, runs: Runs, deadline_s: float) -> None:
        """Send runs of bytes, each before the next is asked for."""
        for run in runs:
            for first in range(0, len(run), STEP_PIECES):
                self._send_all(list(run[first : first + STEP_PIECES]), deadline_s)

    def _send_all(self, pieces: list[memoryview], deadline_s: float) -> None:
        """Send at most STEP_PIECES pieces."""
        while pieces:
            _require_time(deadline_s)
            try:
                sent = self._send(pieces[0]) if len(pieces) == 1 else self._send_pieces(pieces)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost(error) from error
            pieces = _after(pieces, sent)

    # -- receiving --------------------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Wait, however long, until something arrives. False when the peer has left instead."""
        while self._start == self._end:
            try:
                self._start, self._end = 0, self._receive_soon(self._ahead)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost(error) from error
            if not self._end:
                return False
        return True

    def message(self, deadline_s: float) -> tuple[Request | Answer, int]:
        """The next message, and its sender's epoch.

        Raises:
            ProtocolError: It is none of ours.
        """
        if self._end - self._start < _HEADER_NBYTES:
            self._read_ahead(_HEADER_NBYTES, deadline_s)
        start = self._start + _HEADER_NBYTES
        epoch, length = decode_header(self._ahead[self._start : start])
        self._start = end = start + length
        if end <= self._end:
            return decode(self._ahead[start:end]), epoch
        self._start = start
        body = memoryview(bytearray(length))
        self.fill([body], deadline_s)
        return decode(body), epoch

    def has_message(self) -> bool:
        """Whether a whole message was read ahead: `message` returns at once."""
        here = self._ahead[self._start : self._end]
        return len(here) >= _HEADER_NBYTES and len(here) >= _HEADER_NBYTES + HEADER.unpack_from(here)[-1]

    def ready(self) -> bool:
        """Whether `message` would not wait (or not for long: the message has begun, and is a long one)."""
        while True:
            here = self._ahead[self._start : self._end]
            if len(here) >= _HEADER_NBYTES:
                length = HEADER.unpack_from(here)[-1]
                if len(here) >= min(_HEADER_NBYTES + length, READ_AHEAD_NBYTES):
                    return True
            self._make_room()
            try:
                got = self._receive(self._ahead[self._end :], 0, _DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True  # `message` will tell
            if not got:
                return True
            self._end += got

    def fill(self, run: Sequence[memoryview] | ChunkRun, deadline_s: float) -> None:
        """Fill views one after another; chunks that come as a ChunkRun are hashed on the way."""
        if isinstance(run, ChunkRun):
            self._fill_chunks(run, deadline_s)
        else:
            self._fill_views(run, deadline_s)

    def _fill_chunks(self, run: ChunkRun, deadline_s: float) -> None:
        sizes = run.sizes
        if native.receive is None or not sizes or min(sizes) <= TINY_NBYTES:
            self._fill_chunks_by_steps(run, deadline_s)
            return
        ahead = self._ahead[self._start : self._end]
        checksums = bytearray(8 * len(sizes)) if run.hashed else None
        watch, began_s = self._bytes.begin(), time.monotonic()
        end, full, slept = _LATE_END, 0, True
        try:
            end, full, slept = native.receive(
                self.socket.fileno(), ahead, run.chunks, checksums, deadline_s, WATCH_S if watch else 0.0
            )
        finally:
            if watch:
                self._bytes.end(paid=not slept)
        self._start += min(len(ahead), sum(sizes))
        run.full = full
        if checksums is not None:
            run.checksums = bytes(checksums[: 8 * full])
        if end < 0:
            error = OSError(-end, os.strerror(-end))
            raise _lost(error) from error
        if end:
            raise PeerUnavailable(_LATE if end == _LATE_END else _GONE)
        if not watch:
            self._bytes.slept(time.monotonic() - began_s)

    def _fill_chunks_by_steps(self, run: ChunkRun, deadline_s: float) -> None:
        """The same without the compiled loops: small chunks by several, and large ones in parts."""
        first = nbytes = 0
        for place, size in enumerate(run.sizes):
            nbytes += size
            if size > HASH_NBYTES:
                self._fill_small(run, first, place, deadline_s)
                state = xxhash.xxh3_64()
                for part in _parts(run.chunks[place]):
                    self._fill_views((part,), deadline_s)
                    if run.hashed:
                        state.update(part)
                if run.hashed:
                    run.checksums += CHECKSUM.pack(state.intdigest())
                run.full += 1
            elif nbytes < RUN_NBYTES and place + 1 < len(run.sizes):
                continue
            else:
                self._fill_small(run, first, place + 1, deadline_s)
            first, nbytes = place + 1, 0

    def _fill_small(self, run: ChunkRun, first: int, end: int, deadline_s: float) -> None:
        """Fill these chunks of a run at once."""
        chunks = run.chunks[first:end]
        self._fill_views([piece for chunk in chunks for piece in chunk], deadline_s)
        if run.hashed:
            run.checksums += checksums_of(chunks)
        run.full += len(chunks)

    def _fill_views(self, run: Sequence[memoryview], deadline_s: float) -> None:
        if self._start < self._end:
            run = self._take_ahead(run)
        _require_time(deadline_s)
        if len(run) == 1:
            view, got = run[0], 0
            try:
                got = self._receive(view, 0, _DONTWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise _lost(error) from error
            else:
                if got == len(view):
                    return
                if not got:
                    raise PeerUnavailable(_GONE)
            run = (view[got:],)
        pieces = [piece for piece in run if len(piece)]
        if pieces:
            self._fill_all(pieces, deadline_s)

    def exactly(self, nbytes: int, deadline_s: float) -> bytes:
        """The next few bytes."""
        raw = bytearray(nbytes)
        self.fill([memoryview(raw)], deadline_s)
        return bytes(raw)

    def _fill_all(self, pieces: list[memoryview], deadline_s: float) -> None:
        began_s = time.monotonic()
        if self._bytes.begin():
            try:
                pieces = self._watch_for(pieces, deadline_s)
            finally:
                self._bytes.end(paid=not pieces)
            if not pieces:
                return
        while pieces:
            try:
                got = self.socket.recvmsg_into(pieces[:STEP_PIECES], 0, _WAITALL)[0]
            except BlockingIOError:
                got = None
            except OSError as error:
                raise _lost(error) from error
            if got == 0:
                raise PeerUnavailable(_GONE)
            pieces = _after(pieces, got or 0)
            if pieces:
                _require_time(deadline_s)
        self._bytes.slept(time.monotonic() - began_s)

    def _watch_for(self, pieces: list[memoryview], deadline_s: float) -> list[memoryview]:
        """Fill views for as long as bytes keep coming. Returns what is left to fill."""
        until_s = time.monotonic() + WATCH_S
        while pieces:
            try:
                if len(pieces) == 1:
                    got = self._receive(pieces[0], 0, _DONTWAIT)
                else:
                    got = self.socket.recvmsg_into(pieces[:STEP_PIECES], 0, _DONTWAIT)[0]
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    break
                os.sched_yield()
                continue
            except OSError as error:
                raise _lost(error) from error
            if not got:
                raise PeerUnavailable(_GONE)
            pieces = _after(pieces, got)
            if pieces:
                _require_time(deadline_s)
                until_s = time.monotonic() + WATCH_S
        return pieces

    def _receive_soon(self, view: memoryview) -> int:
        """`recv_into`, for what may come at once: watches for a moment before it sleeps, if that may pay."""
        began_s = time.monotonic()
        if self._messages.begin():
            paid = False
            try:
                while time.monotonic() - began_s < WATCH_S:
                    try:
                        got = self._receive(view, 0, _DONTWAIT)
                    except BlockingIOError:
                        os.sched_yield()
                    else:
                        paid = True
                        return got
            finally:
                self._messages.end(paid=paid)
        got = self._receive(view)
        self._messages.slept(time.monotonic() - began_s)
        return got

    def _read_ahead(self, nbytes: int, deadline_s: float) -> None:
        """Have at least so much read ahead."""
        self._make_room()
        while self._end < nbytes:
            try:
                got = self._receive_soon(self._ahead[self._end :] if self._end else self._ahead)
            except BlockingIOError:
                _require_time(deadline_s)
                continue
            except OSError as error:
                raise _lost(error) from error
            if not got:
                raise PeerUnavailable(_GONE)
            self._end += got

    def _make_room(self) -> None:
        """Move what was read ahead to the beginning."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            left = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(left)] = left
            self._start, self._end = 0, len(left)

    def _take_ahead(self, run: Sequence[memoryview]) -> list[memoryview]:
        """Fill views from what was read ahead. Returns what is left to fill."""
        left = list(run)
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
    """The message and the pieces in lists that one `sendmsg` takes."""
    step, room = [message], FIRST_NBYTES
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
    if step:
        yield step


def _parts(chunk: Sequence[memoryview]) -> Iterator[memoryview]:
    """A chunk in parts that the processor's cache holds."""
    for piece in chunk:
        for first in range(0, len(piece), HASH_NBYTES):
            yield piece[first : first + HASH_NBYTES]


def _after(pieces: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of pieces when so many bytes have moved."""
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
