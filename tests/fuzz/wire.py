"""Targets: what arrives on a socket."""

import socket
import time
from collections.abc import Iterable

from raykv.errors import PeerUnavailable, ProtocolError, UsageError
from raykv.protocol import codec
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.transport import handshake
from raykv.transport.base import ChunkRun
from raykv.transport.seal import Seal
from raykv.transport.stream import Stream
from tests.fuzz.base import fuzzed
from tests.support.hostile import Source
from tests.support.protocol import EXAMPLES

SECRET = b"s" * 32


def frames() -> list[bytes]:
    return [codec.encode(example, 3, 7) for example in EXAMPLES]


@fuzzed(frames, ProtocolError)
def message(data: bytes) -> None:
    """A header and a body. What is decoded can be encoded, and means the same."""
    if len(data) < codec.HEADER.size:
        return
    header = codec.decode_header(data[: codec.HEADER.size])
    assert 0 <= header.length <= codec.MAX_MESSAGE_NBYTES
    found = codec.decode(data[codec.HEADER.size :])
    again = codec.encode(found, header.epoch, header.request_id)
    assert codec.encode(codec.decode(again[codec.HEADER.size :]), header.epoch, header.request_id) == again


def arrays() -> Iterable[bytes]:
    return [bytes([which, count]) + bytes(range(64)) for which in range(6) for count in (0, 1, 4, 16, 64)]


@fuzzed(arrays, ProtocolError, UsageError)
def values(data: bytes) -> None:
    """The fields of bytes in messages. The first byte chooses the function, the second the number of entries."""
    which, count, raw = data[:1] or b"\0", int.from_bytes(data[1:2]), data[2:]
    match which[0] % 6:
        case 0:
            assert codec.keys_in(raw).shape == (len(raw) // KEY_NBYTES, 2)
        case 1:
            parent = codec.parent_in(raw)
            assert parent is None or parent.shape == (1, 2)
        case 2:
            assert len(codec.numbers_in(raw, "<i4")) * 4 == len(raw)
        case 3:
            assert len(codec.array(raw, "<u8", count)) == count
        case 4:
            bits = codec.unpack_bits(raw, count)
            assert len(bits) == count
            assert codec.unpack_bits(codec.pack_bits(bits), count).tolist() == bits.tolist()
        case _:
            assert isinstance(codec.fields(raw), dict)


class Wire:
    """Both ends of a socket. One has sent `data`, and sends no more."""

    def __init__(self, data: bytes) -> None:
        self.theirs, ours = socket.socketpair()
        self.stream = Stream(ours, tick_s=1.0)
        self.theirs.sendall(data[: 1 << 16])
        self.theirs.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Stream:
        return self.stream

    def __exit__(self, *_: object) -> None:
        self.theirs.close()
        self.stream.socket.close()


def greetings() -> list[bytes]:
    hello = handshake.greeting(b"n" * 32) + handshake.key_id(SECRET)
    right = handshake.proof(SECRET, "asking", b"n" * 32, b"m" * 32)
    other = handshake.GREETING.pack(handshake.GREETING_MAGIC, 99, b"n" * 32)
    return [b"c" + hello, b"c" + hello + right, b"s" + hello + right + b"\1", b"c" + hello[:9], b"s" + other]


@fuzzed(greetings, ProtocolError, PeerUnavailable)
def greeting(data: bytes) -> None:
    """The handshake of a server or a client with somebody who does not know the secret. It never succeeds."""
    with Wire(data[1:]) as stream:
        if data[:1] == b"s":
            handshake.greet_server(stream, SECRET, time.monotonic() + 1.0)
        else:
            handshake.greet_client(stream, [SECRET], _never, time.monotonic() + 1.0)
    raise AssertionError("somebody without the secret passed the handshake")


def _never(secret: bytes) -> None:
    raise AssertionError("somebody without the secret is admitted")


def conversations() -> list[bytes]:
    some = frames()
    return [b"\0" + b"".join(some[:8]), b"\1" + some[3], b"\2" + some[9] + bytes(5000), b"\0" + some[1][:-1]]


@fuzzed(conversations, ProtocolError, PeerUnavailable)
def stream(data: bytes) -> None:
    """Messages and payloads one after another, until an error. A sealed stream accepts no message without its tag."""
    mode, until_s = data[:1], time.monotonic() + 1.0
    with Wire(data[1:]) as received:
        if mode == b"\1":
            received.seal = Seal.of_server(SECRET, b"n" * 64)
        assert received.wait_ready(1.0)
        while True:
            received.message(until_s)
            assert received.seal is None, "a message without a tag is accepted"
            if mode == b"\2":
                sizes = [100, 2000]
                run = ChunkRun([[memoryview(bytearray(size))] for size in sizes], sizes)
                received.fill(run, until_s)


def tags() -> list[bytes]:
    return [b"\0" * 16 + b"body", b"\1" + bytes(40)]


@fuzzed(tags, ProtocolError)
def seal(data: bytes) -> None:
    """A tag that was not made with the key is refused."""
    source = Source(data)
    tag = source.raw(16)
    Seal.of_server(SECRET, b"n" * 64).check(source.raw(codec.HEADER.size), source.raw(1 << 10), tag)
    raise AssertionError("a forged tag is accepted")
