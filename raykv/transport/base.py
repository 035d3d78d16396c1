"""What a transport is: the asking end (`Link`) and the answering end (`Service`).

A transport moves a request one way and an answer back. A request may read: then chunk bytes follow the answer, from
the answering side's arena to buffers of the asking side. Or it may write: then chunk bytes follow the answer the
other way. Bytes are never gathered in between.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raykv.errors import PeerUnavailable
from raykv.types import Path
from raykv.wire import Answer, Message


def nothing_more(complete: bool) -> Answer | None:
    """For replies that end with the answer."""
    return None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and the chunk bytes that go with it.

    Attributes:
        answer: Sent first.
        outgoing: Sent after it, in order; the memory must stay as it is until `finish`.
        incoming: Filled after it, in order, from what the asking side sends.
        finish: Called exactly once when the bytes have moved (True) or cannot any more (False). What it returns is sent
            as a second answer.
    """

    answer: Answer
    outgoing: Sequence[memoryview] = ()
    incoming: Sequence[memoryview] = ()
    finish: Callable[[bool], Answer | None] = nothing_more


class Session(Protocol):
    """One connection at the answering end; leases hang on it."""

    def close(self) -> None:
        """The connection is gone: its leases end."""
        ...


class Service(Protocol):
    """The answering end, whatever the transport."""

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


class Link(Protocol):
    """The asking end: one connection. One request at a time; not thread-safe.

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

    def fetch(self, request: Message, place: Callable[[Answer], Sequence[memoryview]], *, deadline_s: float) -> Answer:
        """Ask for bytes. `place` sees the answer and gives the buffers that the payload fills exactly, in order."""
        ...

    def push(self, request: Message, pick: Callable[[Answer], Sequence[memoryview]], *, deadline_s: float) -> Answer:
        """Offer bytes. `pick` sees the first answer and gives what to send; returns the second answer."""
        ...

    def close(self) -> None:
        """Let go; leases of this connection end at the other side."""
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
