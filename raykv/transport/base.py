"""The types that both ends of a connection use: `raykv.transport.link.Link` and `Service`.

A client sends a request, and the server sends an answer. For a read, the server then sends chunk bytes from its arena
to the client's buffers. For a write, the client sends chunk bytes after the answer. No intermediate buffer is used.

Requests can be pipelined: `Link.post` sends a request without waiting, and `Link.collect` receives the answers in the
order of the requests. Each request of a link has a number, and its answer carries the same number.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from raykv.errors import PeerUnavailable
from raykv.protocol.messages import Answer, Message

MAX_POSTED: Final = 64
"""The most requests in flight on one link. Answers that are not collected fill the sockets' buffers."""

Runs: TypeAlias = Iterable[Sequence[memoryview]]
"""Runs of views. A transport requests the next run after it has filled or sent the run before. So a generator can check
a full run while its bytes are in the CPU cache."""


@dataclass(slots=True)
class ChunkRun:
    """Chunks that one call fills in order. Compiled code hashes each chunk while its bytes are in the CPU cache.

    Attributes:
        chunks: The views of each chunk. Iterating over the run yields all these views.
        sizes: Lengths of the chunks in bytes.
        hashed: Whether to compute checksums.
        full: Number of full chunks, counted from the first chunk. It is valid after errors too.
        checksums: Checksums (u64) of all full chunks, or of none. The receiver hashes the other chunks itself.
    """

    chunks: list[list[memoryview]]
    sizes: Sequence[int]
    hashed: bool = True
    full: int = 0
    checksums: bytes = b""

    def __iter__(self) -> Iterator[memoryview]:
        return (piece for chunk in self.chunks for piece in chunk)


Targets: TypeAlias = Iterable[Sequence[memoryview] | ChunkRun]
"""Buffers to be filled in order. A transport requests them one by one, like `Runs`."""


@dataclass(slots=True)
class Reply:
    """An answer, and the chunk bytes to send or receive after it.

    Attributes:
        answer: Sent first.
        outgoing: Sent after the answer. This memory must not change until `finish` is called.
        incoming: Buffers for the bytes that the client sends after the answer.
        finish: The transport calls it exactly once: with True after all bytes were transferred, with False after a
            failure. If it returns an answer, the transport sends this second answer.
    """

    answer: Answer
    outgoing: Sequence[memoryview] = ()
    incoming: Targets = ()
    finish: Callable[[bool], Answer | None] = lambda complete: None


class Session(Protocol):
    """The server's state of one connection. Leases belong to a session."""

    def close(self) -> None:
        """End the session's leases. The server calls it when the connection is closed."""
        ...


class Service(Protocol):
    """The server end, independent of the transport."""

    @property
    def epoch(self) -> int:
        """Epoch of the service's view."""
        ...

    def session(self, *, local: bool) -> Session:
        """Accept a connection. `local`: the kernel has confirmed that the peer is the same user on this host."""
        ...

    def answer(self, request: Message, session: Session) -> Reply:
        """Serve one request. Errors are returned as answers. Only a bug raises an exception."""
        ...


def remaining(deadline_s: float) -> float:
    """Return the seconds until a deadline. Raises PeerUnavailable if the deadline has passed."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise PeerUnavailable("the deadline has passed")
    return left
