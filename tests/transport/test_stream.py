"""Chunks that arrive on a socket: filled and hashed, however they are cut, and never counted before they are there."""

import signal
import socket
import struct
import threading
import time
from itertools import pairwise

import pytest
import xxhash

from raykv.errors import PeerUnavailable
from raykv.memory import native
from raykv.protocol import messages
from raykv.transport import stream as stream_module
from raykv.transport.base import ChunkRun
from raykv.transport.stream import Stream

SIZES = [1, 240, 241, 305, 1023, 1024, 1025, 1088, 2048, 4096, 5000, 70_000, 256 << 10, (256 << 10) + 1, 600_000]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def ends():
    """A stream, and the other end of its socket."""
    here, there = socket.socketpair()
    with here, there:
        yield Stream(here, tick_s=0.01), there


def cut(raw: bytearray, rng) -> list[memoryview]:
    """Several views of it, some of them empty."""
    edges = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice([0, 0, 1, 5])))
    return [memoryview(raw)[start:stop] for start, stop in pairwise([0, *edges, len(raw)])]


def run_of(targets: list[bytearray], rng=None, *, hashed: bool = True) -> ChunkRun:
    chunks = [cut(each, rng) if rng else [memoryview(each)] for each in targets]
    return ChunkRun(chunks, list(map(len, targets)), hashed=hashed)


def sums_of(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(value)) for value in values)


def dribble(there: socket.socket, raw: bytes, rng) -> None:
    """Send in parts, with pauses between some."""
    place = 0
    while place < len(raw):
        step = rng.choice([1, 7, 64, 1000, 5000, 64 << 10, 1 << 20])
        there.sendall(raw[place : place + step])
        place += step
        if rng.random() < 0.05:
            time.sleep(0.002)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("hashed", [False, True])
def test_chunks_arrive_whole_and_hashed_however_they_are_cut(loops, ends, rng, hashed, tiny):
    stream, there = ends
    sizes = SIZES if tiny else [size for size in SIZES if size > 240]
    for _ in range(15):
        values = [rng.randbytes(rng.choice(sizes)) for _ in range(rng.randrange(12))]
        # A message in front: what is read ahead with it belongs to the chunks. And one behind, which does not.
        front, behind = messages.encode(messages.Count(1), 3), messages.encode(messages.Count(2), 4)
        sent = front + b"".join(values) + behind
        sender = threading.Thread(target=dribble, args=(there, sent, rng))
        sender.start()
        assert stream.message(soon()) == (messages.Count(1), 3)
        targets = [bytearray(len(value)) for value in values]
        run = run_of(targets, rng, hashed=hashed)
        stream.fill(run, soon())
        assert targets == values
        assert run.full == len(values)
        assert run.checksums == sums_of(values) * hashed
        assert stream.message(soon()) == (messages.Count(2), 4)
        sender.join()


@pytest.mark.parametrize("end", ["gone", "late", "reset"])
def test_what_breaks_off_counts_only_what_is_full(loops, ends, rng, end, monkeypatch):
    monkeypatch.setattr(stream_module, "RUN_NBYTES", 1)
    stream, there = ends
    values = [rng.randbytes(5000) for _ in range(4)]
    there.sendall(b"".join(values)[:12_000])
    if end == "gone":
        there.close()
    elif end == "reset":
        stream.socket.send(b"unread")
        there.close()  # with bytes unread: the other end's next read fails, once it has read what had come
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
    del run  # nobody holds on to the buffers
    for target in targets:
        target.append(1)


@pytest.mark.skipif(native.receive is None, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")
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


@pytest.mark.skipif(native.receive is None, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")
def test_the_compiled_way_refuses_what_would_not_fit(ends):
    stream, there = ends
    number, good = stream.socket.fileno(), [[bytearray(300)]]
    there.sendall(bytes(1000))
    for chunks, sums, error in [
        ([[bytearray(240)]], None, ValueError),
        ([[]], None, ValueError),
        ([[bytes(300)]], None, BufferError),
        ([[bytearray(300), 5]], None, TypeError),
        ((bytearray(300),), None, TypeError),
        (good, bytearray(7), ValueError),
        (good, bytes(8), BufferError),
    ]:
        with pytest.raises(error):
            native.receive(number, b"", chunks, sums, soon(), 0.0)
    assert native.receive(number, b"", [], None, soon(), 0.0) == (0, 0, False)
    assert native.receive(number, b"x" * 1000, good, None, soon(), 0.0) == (0, 1, False)
    assert good == [[bytearray(b"x" * 300)]]
    end, full, _ = native.receive(stream.socket.fileno() + 1000, b"", good, None, soon(), 0.0)
    assert (end < 0, full) == (True, 0)
    sums = bytearray(8)
    assert native.receive(number, b"y" * 299, good, sums, soon(), 1e-4)[:2] == (0, 1)
    assert struct.unpack("=Q", sums)[0] == xxhash.xxh3_64_intdigest(b"y" * 299 + b"\0")
