"""Types that both ends of a connection use. `raykv.transport.link.Link` is the client end, `Service` the server end.

A client sends a request, and the server sends an answer. For a read, the server then sends chunk bytes from its arena
to the client's buffers. For a write, the client sends chunk bytes and a closing message after the answer. Large
payloads are not copied to an intermediate buffer.

Requests can be pipelined: `Link.post` sends a request without waiting, and `Link.collect` receives the answers in the
order of the requests. Each request of a link has a number, and its answer has the same number.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from raykv.errors import PeerUnavailable
from raykv.protocol.messages import Answer, Message

MAX_POSTED: Final = 64
"""At most this many requests are in flight on one link. Answers wait in the socket buffers until they are collected.
The answers to more requests could fill these buffers and block the server."""

Runs: TypeAlias = Iterable[Sequence[memoryview]]
"""Groups of buffers, called runs. A transport takes the next run from the iterator only after it has filled or sent the
previous one. So a generator can hash a run while its bytes are in the CPU cache."""


@dataclass(slots=True)
class ChunkRun:
    """Buffers of several chunks. One call of `Stream.fill` fills them in order, and may also hash the bytes.

    Attributes:
        chunks: The buffers of each chunk. Iterating over the run yields the buffers of all chunks.
        sizes: Lengths of the chunks in bytes.
        hashed: Whether to compute checksums.
        full: Number of leading chunks whose buffers are completely filled. This number is also valid after an error.
        checksums: Checksums (u64) of the full chunks. If this is empty, a caller that needs checksums computes them.
    """

    chunks: list[list[memoryview]]
    sizes: Sequence[int]
    hashed: bool = True
    full: int = 0
    checksums: bytes = b""

    def __iter__(self) -> Iterator[memoryview]:
        return (piece for chunk in self.chunks for piece in chunk)


Targets: TypeAlias = Iterable[Sequence[memoryview] | ChunkRun]
"""Buffers that a transport fills in order. The transport takes the next element only after the previous one is full."""


@dataclass(slots=True)
class Reply:
    """An answer, and the chunk bytes to send or receive after it.

    Attributes:
        answer: The answer. The transport sends it first.
        outgoing: Chunk bytes to send after the answer. This memory must not change until `finish` is called.
        opening: If given, the client sends a message before its bytes. The transport calls this function with it, and
            looks at `incoming` only then.
        incoming: Buffers for the bytes that the client sends after the answer.
        closing: If given, the client sends a message after the bytes. The transport calls this function with it.
        finish: The transport calls this function exactly once: with True after all bytes were transferred, with False
            after a failure. If the function returns an answer, the transport sends it as a second answer.
    """

    answer: Answer
    outgoing: Sequence[memoryview] = ()
    opening: Callable[[Message], None] | None = None
    incoming: Targets = ()
    closing: Callable[[Message], None] | None = None
    finish: Callable[[bool], Answer | None] = lambda complete: None


class Session(Protocol):
    """The server's state for one connection. A session owns the connection's leases: lent slots, and pins on chunks."""

    @property
    def patience_s(self) -> float:
        """How long the server waits for the client's next request, in seconds. Then it closes the connection."""
        ...

    def close(self) -> None:
        """End the session's leases. The server calls this method when the connection is closed."""
        ...


class Service(Protocol):
    """The request handler of a server. A service does not depend on the transport."""

    @property
    def epoch(self) -> int:
        """The version of the node's view, which is its list of the cluster's members. A greater epoch is newer."""
        ...

    def session(self, *, local: bool) -> Session:
        """Make the session of a new connection. `local`: whether the client is a process of our user on this host."""
        ...

    def answer(self, request: Message, session: Session) -> Reply:
        """Serve one request. Every error is returned as an answer; raising an exception would be a bug."""
        ...


def remaining(deadline_s: float) -> float:
    """Return the seconds until a deadline. Raises PeerUnavailable if the deadline has passed."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise PeerUnavailable("the deadline has passed")
    return left
