"""The contract of a transport: `Link` is the asking end of a connection, `Service` the answering end.

A transport carries a request one way and an answer back. For a read, chunk bytes follow the answer, from the node's
arena to the buffers of the asking end. For a write, chunk bytes follow the answer the other way. Bytes are never
gathered in between.

Requests may be sent ahead: `post` sends one without waiting, `collect` receives the answers, in the order of the
requests. So a large read is split into requests: the node prepares the next part while the network carries this one.
Each request of a link has a number, and its answer carries the same number.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from raykv.errors import PeerUnavailable
from raykv.protocol.messages import Answer, Message
from raykv.types import Path

MAX_POSTED: Final = 64
"""Most requests on one link whose answers were not collected. Until then the answers wait in the sockets' buffers."""

Runs: TypeAlias = Iterable[Sequence[memoryview]]
"""Bytes in order, as runs of views. The next run is requested when the one before has been moved: a generator sees each
run when it is full (or sent), and can check it while it is in the processor's cache."""


@dataclass(slots=True)
class ChunkRun:
    """Whole chunks to be filled one after another, in one call; each is hashed while it is in the processor's cache.

    Attributes:
        chunks: The views of each chunk. Iterating over the run gives all of them.
        sizes: Their lengths in bytes.
        hashed: Whether checksums are wanted.
        full: This many chunks, from the first one on, are full. It is right also when filling was broken off.
        checksums: u64 each, of at most `full` chunks, from the first one on.
    """

    chunks: list[list[memoryview]]
    sizes: Sequence[int]
    hashed: bool = True
    full: int = 0
    checksums: bytes = b""

    def __iter__(self) -> Iterator[memoryview]:
        return (piece for chunk in self.chunks for piece in chunk)


Targets: TypeAlias = Iterable[Sequence[memoryview] | ChunkRun]
"""Buffers that are filled in order; requested one by one, as `Runs` are."""


@dataclass(slots=True)
class Reply:
    """An answer and the chunk bytes that go with it.

    Attributes:
        answer: Sent first.
        outgoing: Sent after it, in order; the memory must not change until `finish`.
        incoming: Filled after it, in order, with what the asking end sends.
        finish: Called exactly once, when the bytes have moved (True) or never will (False). What it returns is sent as
            a second answer.
    """

    answer: Answer
    outgoing: Sequence[memoryview] = ()
    incoming: Targets = ()
    finish: Callable[[bool], Answer | None] = lambda complete: None


class Session(Protocol):
    """One connection, at the answering end. Leases belong to it."""

    def close(self) -> None:
        """End the leases: the connection is closed."""
        ...


class Service(Protocol):
    """The answering end, independent of the transport."""

    @property
    def epoch(self) -> int:
        """Epoch of its view."""
        ...

    def session(self, *, local: bool) -> Session:
        """Accept a connection; `local`: the kernel says that the peer is on this host, with the same user."""
        ...

    def answer(self, request: Message, session: Session) -> Reply:
        """Serve one request. Errors are answers too: only a bug raises."""
        ...


class Link(Protocol):
    """The asking end of one connection. Not thread-safe.

    Attributes:
        path: How `GetResult` names bytes that arrive this way.
        epoch: The greatest epoch in an answer so far.
        closed: Whether the link is of no more use.
    """

    path: Path
    epoch: int
    closed: bool
    _posted: Sized

    def post(self, request: Message, *, deadline_s: float) -> None:
        """Send a request, but no Write, and leave its answer for `collect`. At most MAX_POSTED may be in flight.

        Args:
            deadline_s: By the monotonic clock.

        Raises:
            PeerUnavailable: The connection broke, or the peer accepts nothing by the deadline. The link is closed.
        """
        ...

    def collect(self, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        """Wait for the answer to the oldest posted request that was not collected yet.

        Args:
            place: For a read: gets the answer, and returns the buffers that the payload fills exactly, in order. When
                this raises, a buffer may be half filled; nobody writes to it afterwards.

        Raises:
            PeerUnavailable: No answer by the deadline, or the connection broke. The link is closed.
            ProtocolError: The peer sent something else than this answer. Likewise.
            RayKVError: The node refused the request. The link is still good.
        """
        ...

    def call(self, request: Message, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        """Post a request and collect its answer. All posted requests must have been collected before."""
        assert not self._posted
        self.post(request, deadline_s=deadline_s)
        return self.collect(place, deadline_s=deadline_s)

    def push(self, request: Message, pick: Callable[[Answer], Runs], *, deadline_s: float) -> Answer:
        """Write bytes. `pick` gets the first answer, and returns what to send. Returns the second answer.

        Raises as `collect` does. All posted requests must have been collected before.
        """
        ...

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until `collect` would not have to wait; 0 only looks. False when the time is over or nothing was posted.

        The link stays good in any case. True also for a broken or closed connection: `collect` raises the error.
        """
        ...

    def ready(self) -> bool:
        """Whether `collect` would not have to wait."""
        return self.wait_ready(0.0)

    def close(self) -> None:
        """Close the connection; its leases end at the other side."""
        ...


def remaining(deadline_s: float) -> float:
    """Seconds until a deadline.

    Raises:
        PeerUnavailable: It has passed.
    """
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise PeerUnavailable("the deadline has passed")
    return left
