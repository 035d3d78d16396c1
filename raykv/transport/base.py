"""What a transport is: the asking end (`Link`) and the answering end (`Service`).

A transport moves a request one way and an answer back. A request may read: then chunk bytes follow the answer, from
the answering side's arena to buffers of the asking side. Or it may write: then chunk bytes follow the answer the
other way. Bytes are never gathered in between.

Requests may be sent ahead: `post` sends one and does not wait, `collect` takes the answers, in the order of the
requests. So a big read is asked for in parts: the holder prepares the next part while this one is on its way.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

from raykv.errors import PeerUnavailable
from raykv.protocol.messages import Answer, Message
from raykv.types import Path

MAX_POSTED: Final = 64
"""Requests on one link whose answers were not collected yet. A peer answers into the sockets' buffers until then."""

RUN_NBYTES: Final = 128 << 10
"""Small chunks are moved together, about so many bytes in a system call, and checked before they leave the cache."""

Runs: TypeAlias = Iterable[Sequence[memoryview]]
"""Bytes in order, as runs of views. Whoever moves them asks for the next run only when the one before has moved: a
generator sees each run when it is full (or gone), and can check it while it is in the processor's cache."""


class ChunkRun:
    """A run of whole chunks to be filled, one after another. Whoever fills it may hash them as they come.

    So a long run is filled in one call, and each chunk is hashed while the cache has it.

    Attributes:
        chunks: The views of each; to go through the run itself is to go through all of these.
        sizes: Their lengths in bytes.
        hashed: Whether checksums are wanted.
        full: So many chunks, from the first on, are known to be full. It holds also when filling was broken off; when
            filling ended well, all of them are.
        checksums: Of as many chunks, from the first on, as were hashed: u64 each. Not more than are full.
    """

    __slots__ = ("checksums", "chunks", "full", "hashed", "sizes")

    def __init__(self, chunks: list[list[memoryview]], sizes: Sequence[int], *, hashed: bool = True) -> None:
        self.chunks, self.sizes, self.hashed = chunks, sizes, hashed
        self.full = 0
        self.checksums = b""

    def __iter__(self) -> Iterator[memoryview]:
        return (piece for chunk in self.chunks for piece in chunk)


Targets: TypeAlias = Iterable[Sequence[memoryview] | ChunkRun]
"""The same for bytes that come: what they fill."""


def nothing_more(complete: bool) -> Answer | None:
    """For replies that end with the answer."""
    return None


class Reply:
    """An answer and the chunk bytes that go with it.

    Attributes:
        answer: Sent first.
        outgoing: Sent after it, in order; the memory must stay as it is until `finish`.
        incoming: Filled after it, in order, from what the asking side sends.
        finish: Called exactly once when the bytes have moved (True) or cannot any more (False). What it returns is sent
            as a second answer.
    """

    __slots__ = ("answer", "finish", "incoming", "outgoing")

    def __init__(
        self,
        answer: Answer,
        *,
        outgoing: Sequence[memoryview] = (),
        incoming: Targets = (),
        finish: Callable[[bool], Answer | None] = nothing_more,
    ) -> None:
        self.answer, self.outgoing, self.incoming, self.finish = answer, outgoing, incoming, finish


class Session(Protocol):
    """One connection at the answering end; leases hang on it."""

    def close(self) -> None:
        """The connection is gone: its leases end."""
        ...


class Service(Protocol):
    """The answering end, whatever the transport.

    Attributes:
        joined: Kinds of requests of which several are answered together where they have arrived together. No bytes go
            with them, either way.
    """

    joined: frozenset[type[Message]]

    @property
    def epoch(self) -> int:
        """Epoch of its view."""
        ...

    def session(self, *, local: bool) -> Session:
        """A connection came up; `local` when the kernel vouches that it is the same user on the same host."""
        ...

    def answer(self, request: Message, session: Session) -> Reply:
        """Serve one request. Errors are answers too: this raises nothing but bugs."""
        ...

    def answer_joined(self, requests: Sequence[Message], session: Session) -> Sequence[Answer]:
        """Serve requests of kinds that are `joined`, in order, and answer each as `answer` would."""
        ...


class Link(Protocol):
    """The asking end: one connection. Not thread-safe.

    `call`, `fetch` and `push` need all posted requests to be collected before.

    Attributes:
        path: What `GetResult` calls bytes that come this way.
        epoch: The greatest epoch that the other end told of.
    """

    path: Path
    epoch: int

    def call(self, request: Message, *, deadline_s: float) -> Answer:
        """Ask, and wait for the answer.

        Args:
            deadline_s: By the monotonic clock.

        Raises:
            PeerUnavailable: No answer by the deadline, or the connection broke. The link is of no more use.
            ProtocolError: The other end speaks something else. Likewise.
            RayKVError: The request failed at the other end, which told why. The link is fine.
        """
        ...

    def fetch(self, request: Message, place: Callable[[Answer], Targets], *, deadline_s: float) -> Answer:
        """Ask for bytes. `place` sees the answer and gives the buffers that the payload fills exactly, in order.

        What it yielded and was not asked to follow up may still be half filled when this raises; nobody writes to it
        afterwards.
        """
        ...

    def push(self, request: Message, pick: Callable[[Answer], Runs], *, deadline_s: float) -> Answer:
        """Offer bytes. `pick` sees the first answer and gives what to send; returns the second answer."""
        ...

    def post(self, request: Message, *, deadline_s: float) -> None:
        """Send a request that is neither a read nor a write of chunks, or a read; its answer is for `collect`.

        At most MAX_POSTED may be under way.

        Raises:
            PeerUnavailable: The connection broke, or takes nothing more by the deadline. The link is of no more use.
        """
        ...

    def collect(self, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        """The answer to the oldest posted request that was not collected yet.

        Args:
            place: As for `fetch`, if that request was a read.

        Raises:
            RayKVError: As for `call`.
        """
        ...

    def ready(self) -> bool:
        """Whether `collect` would not have to wait. False when nothing was posted."""
        ...

    def close(self) -> None:
        """Let go; leases of this connection end at the other side."""
        ...


def no_payload(answer: Answer) -> Targets:
    """For answers that no chunk bytes follow."""
    return ()


def remaining(deadline_s: float) -> float:
    """Seconds until a deadline.

    Raises:
        PeerUnavailable: It has passed.
    """
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise PeerUnavailable("the deadline has passed")
    return left
