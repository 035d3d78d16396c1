"""A process that sends hostile frames to a node: strangers at the handshake, and members with broken messages."""

import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from raykv.errors import RayKVError
from raykv.protocol import codec, messages
from raykv.transport import handshake
from raykv.transport.stream import Stream
from tests.support import hostile
from tests.support.nodes import NBYTES, SPACE, keys_of, run
from tests.support.transports import is_closed, member_stream, raw_socket

MOST_AT_ONCE: Final = 16
"""Frames that a member sends before it reads the answers. They fit into the socket's buffers."""
WITHOUT: Final = (messages.Lend, messages.Write, messages.Drain, messages.FetchTrace)
"""Requests that may take half of the arena, end the node's stores or start a recording, as any member may."""

PROGRAM = "from tests.support.attack import main; main()"


class Attacker:
    """Sends frames to one node.

    Attributes:
        sent: Number of frames by kind.
    """

    def __init__(self, address: str, secret: bytes, rng: random.Random) -> None:
        self._address, self._secret, self._rng = address, secret, rng
        self._sealed = not address.startswith("unix:")
        self._recorded = self._record()
        self.sent: Counter[str] = Counter()

    def run(self, frames: int) -> None:
        while self.sent.total() < frames:
            kind = self._rng.choice([self._stranger, self._member, self._member])
            with suppress(OSError, RayKVError):
                kind()

    def _record(self) -> bytes:
        """Return the bytes of a client in a whole handshake."""
        nonce = b"n" * 32
        with raw_socket(self._address) as connection:
            secret = self._secret if self._sealed else b""
            hello = handshake.greeting(nonce) + handshake.key_id(secret)
            connection.sendall(hello)
            theirs = handshake.read_greeting(connection.recv(handshake.GREETING.size, socket.MSG_WAITALL))
            proof = handshake.proof(secret, "asking", nonce, theirs)
            connection.recv(handshake.PROOF_NBYTES, socket.MSG_WAITALL)
            connection.sendall(proof)
            assert connection.recv(1) == b"\1"
        return hello + proof

    def _stranger(self) -> None:
        rng, key_id = self._rng, handshake.key_id(self._secret)
        hello = handshake.greeting(rng.randbytes(32)) + rng.choice([key_id, rng.randbytes(len(key_id))])
        kinds = {
            "garbage": rng.randbytes(rng.choice([1, 39, 200, 5000])),
            "half handshake": hello[: rng.randrange(len(hello))],
            "no proof": hello,
            "wrong proof": hello + rng.randbytes(handshake.PROOF_NBYTES),
            "replayed handshake": self._recorded + self._frame(),
            "changed handshake": flipped(rng, self._recorded),
            "no handshake": self._frame(),
        }
        name = rng.choice([*kinds])
        self.sent[name] += 1
        with raw_socket(self._address) as connection:
            assert is_closed(connection, after=kinds[name])

    def _frame(self) -> bytes:
        """Return an honest frame, as a member sends it."""
        request: messages.Message = self._rng.choice(
            [
                messages.Read(keys_of(self._rng.sample(hostile.CHUNKS, 2))),
                messages.Lend(4096, 1, group=SPACE.group.digest),
                messages.GetView(),
                messages.Announce("n", keys_of(["a"]), nbytes=bytes(4)),
                messages.Hint(keys_of(["a"]), ttl_s=3.0),
                messages.OpenNamespace(SPACE.model_dump_json().encode()),
                messages.Report({"evicted": 1}, (1, 2), (3,), group=SPACE.group.digest),
            ]
        )
        return codec.encode(request, self._rng.getrandbits(32), self._rng.getrandbits(32))

    def _hostile(self) -> bytes:
        while True:
            source = hostile.Source(self._rng.randbytes(100))
            frame = codec.encode(hostile.message(source, without=WITHOUT), 0, self._rng.getrandbits(32))
            if len(frame) < NBYTES:
                return frame

    def _member(self) -> None:
        """Send frames that can be decoded, and then a broken one, after which the node ends the connection."""
        rng, stream = self._rng, member_stream(self._address, self._secret)
        with stream.socket:
            good = [rng.choice([self._frame, self._hostile])() for _ in range(rng.randrange(MOST_AT_ONCE))]
            self.sent["decodable"] += len(good)
            name = rng.choice([*BREAKS])
            self.sent[name] += 1
            raw = b"".join(map(stream._sealed, good)) + self._broken(name, stream)
            assert is_closed(stream.socket, after=raw)

    def _broken(self, name: str, stream: Stream) -> bytes:
        frame = self._frame()
        whole = stream._sealed(BREAKS[name](self._rng, frame))
        if name == "truncated":
            return whole[: self._rng.randrange(len(whole))]
        if name == "wrong tag":
            return flipped(self._rng, whole)
        return whole * 2 if name == "repeated" else whole


def flipped(rng: random.Random, raw: bytes) -> bytes:
    """Return the bytes with 1 to 8 bits flipped."""
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def with_header(rng: random.Random, frame: bytes, place: int, values: list[int]) -> bytes:
    fields = list(codec.HEADER.unpack_from(frame))
    fields[place] = rng.choice(values)
    return codec.HEADER.pack(*fields) + frame[codec.HEADER.size :]


BREAKS: Final[dict[str, Callable[[random.Random, bytes], bytes]]] = {
    "flipped bits": flipped,
    "flipped body": lambda rng, frame: frame[: codec.HEADER.size] + flipped(rng, frame[codec.HEADER.size :]),
    "random body": lambda rng, frame: frame[: codec.HEADER.size] + rng.randbytes(len(frame) - codec.HEADER.size),
    "wrong length": lambda rng, frame: with_header(rng, frame, 5, [0, 1, len(frame), 5000, 1 << 20]),
    "huge length": lambda rng, frame: with_header(rng, frame, 5, [32 << 20, (32 << 20) + 1, 1 << 31, (1 << 32) - 1]),
    "wrong version": lambda rng, frame: with_header(rng, frame, 1, [0, 4, 6, 255]),
    "random frame": lambda rng, frame: rng.randbytes(rng.choice([1, 15, 16, 100, 4096, 10_000])),
    "answer": lambda rng, frame: codec.encode(hostile.answer(hostile.Source(rng.randbytes(50))), 0, 0),
    "truncated": lambda rng, frame: frame,
    "wrong tag": lambda rng, frame: frame,
    "repeated": lambda rng, frame: frame,
}


def attack(addresses: list[str], secret: str, *, seed: int, frames: int) -> "subprocess.Popen[str]":
    """Start a process that sends `frames` frames. At its end it prints the number of frames by kind, as JSON."""
    return run(PROGRAM, json.dumps([addresses, secret, seed, frames]))


def main() -> None:
    addresses, secret, seed, frames = json.loads(sys.argv[1])
    began_s, sent = time.monotonic(), Counter[str]()
    for number, address in enumerate(addresses):
        attacker = Attacker(address, bytes.fromhex(secret), random.Random(f"{seed} {number}"))
        attacker.run(frames // len(addresses))
        sent += attacker.sent
    print(json.dumps({"seconds": round(time.monotonic() - began_s, 1), **sent}))
