"""A socket delivers chunks in any pieces. Chunks are copied and hashed, and count only when they are complete."""

import random
import signal
import socket
import struct
import threading
import time
import tracemalloc
from itertools import pairwise

import pytest
import xxhash

from raykv.errors import PeerUnavailable
from raykv.memory import native
from raykv.protocol import messages
from raykv.protocol.codec import HEADER, MAX_MESSAGE_NBYTES, VERSION, Header, encode
from raykv.transport import stream as stream_module
from raykv.transport.base import ChunkRun
from raykv.transport.stream import Stream
from tests.support.transports import soon

SIZES = [1, 240, 241, 305, 1023, 1024, 1025, 1088, 2048, 4096, 5000, 70_000, 256 << 10, (256 << 10) + 1, 600_000]


@pytest.fixture(params=["plain", "tls"])
def ends(request):
    """A stream, and the other end of its socket."""
    here, there = socket.socketpair()
    if request.param == "tls":
        tls = request.getfixturevalue("tls")
        here, there = tls.wrap(here), tls.wrap(there, server=True)
    with here, there:
        stream = Stream(here, tick_s=0.01)
        if request.param == "tls":
            thread = threading.Thread(target=there.do_handshake)
            thread.start()
            stream.secure(soon())
            thread.join()
        yield stream, there


plain = pytest.mark.parametrize("ends", ["plain"], indirect=True)


def cut(raw: bytearray, rng) -> list[memoryview]:
    """Cut a buffer into views, some of them empty."""
    edges = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice([0, 0, 1, 5])))
    return [memoryview(raw)[start:stop] for start, stop in pairwise([0, *edges, len(raw)])]


def run_of(targets: list[bytearray], rng=None, *, hashed: bool = True) -> ChunkRun:
    chunks = [cut(each, rng) if rng else [memoryview(each)] for each in targets]
    return ChunkRun(chunks, list(map(len, targets)), hashed=hashed)


def sums_of(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(value)) for value in values)


def dribble(there: socket.socket, raw: bytes, rng) -> None:
    """Send in parts, with pauses between some of them."""
    place = 0
    while place < len(raw):
        step = rng.choice([1, 7, 64, 1000, 5000, 64 << 10, 1 << 20])
        there.sendall(raw[place : place + step])
        place += step
        if rng.random() < 0.05:
            time.sleep(0.002)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
def test_chunks_arrive_whole_and_hashed_with_any_cuts(loops, ends, rng, hashed, tiny):
    stream, there = ends
    sizes = SIZES if tiny else [size for size in SIZES if size > 240]
    for _ in range(15):
        values = [rng.randbytes(rng.choice(sizes)) for _ in range(rng.randrange(12))]
        # The stream may receive chunk bytes together with the message before them. Bytes of the next message stay out
        # of the chunks.
        front, behind = encode(messages.Count(1), 3, 8), encode(messages.Count(2), 4, 9)
        sent = front + b"".join(values) + behind
        sender = threading.Thread(target=dribble, args=(there, sent, rng))
        sender.start()
        assert stream.message(soon()) == (messages.Count(1), Header(3, len(front) - HEADER.size, 8))
        targets = [bytearray(len(value)) for value in values]
        run = run_of(targets, rng, hashed=hashed)
        stream.fill(run, soon())
        assert targets == values
        assert run.full == len(values)
        assert run.checksums == sums_of(values) * hashed
        assert stream.message(soon()) == (messages.Count(2), Header(4, len(behind) - HEADER.size, 9))
        sender.join()


@pytest.mark.parametrize("end", ["gone", "late", "reset"])
def test_what_breaks_off_counts_only_what_is_full(loops, ends, rng, end, monkeypatch):
    stream, there = ends
    values = [rng.randbytes(5000) for _ in range(4)]
    there.sendall(b"".join(values)[:12_000])
    if end == "gone":
        there.close()
    elif end == "reset":
        stream.socket.send(b"unread")
        there.close()  # a reset, because of the unread bytes: `stream` gets what arrived before, then an error
    targets = [bytearray(5000) for _ in values]
    run = run_of(targets)
    began_s = time.monotonic()
    with pytest.raises(PeerUnavailable, match="deadline" if end == "late" else "connection"):
        stream.fill(run, soon(0.2))
    assert time.monotonic() - began_s < 2.0
    assert run.full <= 2
    assert end == "reset" or run.full == 2
    assert run.checksums == sums_of(values[: run.full])
    assert targets[: run.full] == values[: run.full]
    del run  # nothing refers to the buffers any more, so they can grow
    for target in targets:
        target.append(1)


@plain
@pytest.mark.skipif(native.loops is None, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")
def test_signals_are_seen_to_while_chunks_arrive(ends):
    stream, there = ends

    class Seen(Exception):
        pass

    def handler(number, frame):
        raise Seen

    old = signal.signal(signal.SIGALRM, handler)
    try:
        there.sendall(bytes(1000))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began_s = time.monotonic()
        with pytest.raises(Seen):
            stream.fill(run_of([bytearray(5000)]), soon(20.0))
        assert time.monotonic() - began_s < 5.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@plain
@pytest.mark.skipif(native.loops is None, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")
def test_the_compiled_way_refuses_what_would_not_fit(ends):
    stream, there = ends
    number, good = stream.socket.fileno(), [[bytearray(300)]]
    there.sendall(bytes(1000))
    for chunks, sums, error in [
        ([[bytearray(240)]], None, ValueError),
        ([[]], None, ValueError),
        ([[bytes(300)]], None, BufferError),
        ([[bytearray(300), 5]], None, TypeError),
        (good, bytearray(7), ValueError),
        (good, bytes(8), BufferError),
    ]:
        with pytest.raises(error):
            native.loops.receive(number, b"", chunks, sums, soon())
    assert native.loops.receive(number, b"", [], None, soon())[:2] == (0, 0)
    assert native.loops.receive(number, b"x" * 1000, good, None, soon())[:2] == (0, 1)
    assert good == [[bytearray(b"x" * 300)]]
    end, full = native.loops.receive(stream.socket.fileno() + 1000, b"", good, None, soon())[:2]
    assert (end < 0, full) == (True, 0)
    sums = bytearray(8)
    assert native.loops.receive(number, b"y" * 299, good, sums, soon())[:2] == (0, 1)
    assert struct.unpack("=Q", sums)[0] == xxhash.xxh3_64_intdigest(b"y" * 299 + b"\0")


def test_views_that_are_filled_bit_by_bit(ends, rng):
    receiver, there = ends
    sent = rng.randbytes(400_000)
    thread = threading.Thread(target=dribble, args=(there, sent, random.Random(rng.random())))
    thread.start()
    got, start = bytearray(len(sent)), 0
    while start < len(sent):
        run = []
        for _ in range(rng.randrange(1, 5)):
            step = min(rng.choice([0, 1, 7, 3000, 50_000]), len(sent) - start)
            run.append(memoryview(got)[start : start + step])
            start += step
        receiver.fill(run, soon())
    thread.join()
    assert got == sent


def test_bytes_that_do_not_arrive(ends):
    receiver, there = ends
    for _ in range(3):
        there.sendall(b"abc")
        began_s = time.monotonic()
        with pytest.raises(PeerUnavailable, match="deadline"):
            receiver.fill([memoryview(bytearray(2)), memoryview(bytearray(2))], began_s + 0.05)
        assert 0.05 <= time.monotonic() - began_s < 1.0
    there.sendall(b"abc")
    there.close()
    with pytest.raises(PeerUnavailable, match="closed"):
        receiver.fill([memoryview(bytearray(2)), memoryview(bytearray(2))], soon())
    with pytest.raises(PeerUnavailable, match="closed"):
        receiver.fill([memoryview(bytearray(1))], soon())


def test_messages_that_arrive_soon_or_late(ends):
    receiver, there = ends
    for pause_s in (0, 0, 0.002, 0, 0.02, 0, 0, 0):
        timer = threading.Timer(pause_s, there.sendall, [encode(messages.Count(7), 3, 1)])
        timer.start()
        assert receiver.message(soon())[0] == messages.Count(7)
        timer.join()
    there.close()
    assert not receiver.wait(10.0)


def test_a_message_is_ready_when_it_is_whole_or_its_beginning_is_here(ends):
    receiver, there = ends
    short, long = encode(messages.Count(7), 3, 1), encode(messages.Stats(bytes(100_000)), 3, 2)
    for raw, enough in ((short, len(short)), (long, stream_module.READ_AHEAD_NBYTES)):
        there.sendall(raw[: enough - 1])
        assert not receiver.wait_ready(0.0)
        assert not receiver.wait_ready(0.01)
        timer = threading.Timer(0.02, there.sendall, [raw[enough - 1 :]])
        timer.start()
        assert receiver.wait_ready(10.0)
        assert receiver.message(soon())[1].epoch == 3
        timer.join()  # two threads must not use one SSLSocket
    there.close()
    assert receiver.wait_ready(10.0)


def test_waiting_takes_no_time_of_the_processor(ends):
    receiver, there = ends
    before_s = time.thread_time()
    with pytest.raises(PeerUnavailable, match="deadline"):
        receiver.message(soon(0.3))
    with pytest.raises(PeerUnavailable, match="deadline"):
        receiver.fill(run_of([bytearray(5000)]), soon(0.3))
    assert time.thread_time() - before_s < 0.3
    there.close()


def test_a_length_that_is_only_announced_takes_no_memory(ends):
    """A member that announces the longest message and ends must not leave 32 MiB in the heap of each thread."""
    stream, there = ends
    there.sendall(HEADER.pack(b"RK", VERSION, 0, 0, 1, MAX_MESSAGE_NBYTES) + bytes(100_000))
    there.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    try:
        with pytest.raises(PeerUnavailable):
            stream.message(soon())
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_long_message_arrives_whole(ends, rng: random.Random):
    stream, there = ends
    whole = messages.Adopt(rng.randbytes(5_000_001))
    sender = threading.Thread(target=there.sendall, args=(encode(whole, 0, 1),))
    sender.start()
    assert stream.message(soon())[0] == whole
    sender.join()
