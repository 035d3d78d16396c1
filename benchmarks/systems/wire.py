"""Talks to a server whose protocol has text lines and values. Makes as few system calls as possible."""

import socket
import struct
from collections.abc import Sequence
from typing import Any

TIMEOUT_S = 20
PARTS = 512
"""Maximum number of buffers in one system call. The kernel's limit is 1024."""


class Connection:
    """A blocking socket. If no object is missing, answers are known in advance. So they are compared, not parsed."""

    def __init__(self, address: str | tuple[str, int], missing: type[Exception]) -> None:
        self._missing = missing
        self._socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self._socket.connect(address)
        if not isinstance(address, str):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel gets the timeout, because a timeout in Python would make the socket non-blocking.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", TIMEOUT_S, 0))
        self._head = memoryview(bytearray(64))

    def send(self, message: bytes) -> None:
        self._socket.sendall(message)

    def send_parts(self, parts: list[Any]) -> None:
        """Send buffers one after another."""
        for start in range(0, len(parts), PARTS):
            some = parts[start : start + PARTS]
            left = sum(map(len, some)) - self._socket.sendmsg(some)
            if left:
                self._send_rest(some, left)

    def _send_rest(self, parts: Sequence[Any], left: int) -> None:
        """Send the last `left` bytes of the buffers."""
        skip = sum(map(len, parts)) - left
        for part in parts:
            if skip < len(part):
                self._socket.sendall(memoryview(part)[skip:] if skip else part)
                skip = 0
            else:
                skip -= len(part)

    def expect(self, answer: bytes) -> None:
        """Read an answer that must be equal to `answer`.

        Raises:
            Exception: The answer differs. The type of the exception is `missing` of the constructor.
        """
        got = bytearray(len(answer))
        if self._socket.recv_into(got, len(got), socket.MSG_WAITALL) != len(got) or got != answer:
            raise self._missing(f"{bytes(got[:60])!r} in place of {answer[:60]!r}")

    def receive_value(self, head: bytes, into: memoryview, tail: bytes) -> None:
        """Read `head`, a value that fills `into`, and `tail`.

        Raises:
            Exception: The answer does not begin with `head`. The type of the exception is `missing` of the constructor.
        """
        start, end = self._head[: len(head)], memoryview(bytearray(tail))
        got = self._socket.recvmsg_into([start, into, end])[0]
        if start != head:
            raise self._missing(bytes(start))
        got -= len(head)
        if got < len(into):
            rest = into[got:]
            if self._socket.recv_into(rest, len(rest), socket.MSG_WAITALL) != len(rest):
                raise ConnectionError("the value was cut short")
            got = len(into)
        left = len(into) + len(tail) - got
        if left and self._socket.recv_into(end, left, socket.MSG_WAITALL) != left:
            raise ConnectionError("the value was cut short")

    def receive_values(self, heads: Sequence[bytes], into: Sequence[memoryview], tail: bytes) -> None:
        """Read several values, each between its head and `tail`, with one system call. No value may be missing."""
        starts = [bytearray(len(head)) for head in heads]
        end = bytearray(tail)
        parts: list[Any] = []
        for start, target in zip(starts, into, strict=True):
            parts += [start, target, end]
        wanted = sum(map(len, parts))
        got = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        if got != wanted or any(start != head for start, head in zip(starts, heads, strict=True)):
            raise self._missing(f"{got} of {wanted} bytes; the first answer is {bytes(starts[0])!r}")
