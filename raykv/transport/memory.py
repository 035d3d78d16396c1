"""A transport within one process, for embedded clusters and tests: the same services, no socket.

Chance and death are parameters, so that a test can replay what it saw.
"""

import random
import time
from collections import deque
from collections.abc import Callable

from raykv.errors import PeerUnavailable, ProtocolError
from raykv.memory.copying import copy
from raykv.protocol.messages import HEADER, Answer, Failure, Message, decode, decode_header, encode, raise_failure
from raykv.transport.base import MAX_POSTED, Link, Reply, Runs, Service, Targets, no_payload, remaining
from raykv.types import Path


class Network:
    """Services by address, and what can go wrong between them.

    Attributes:
        loss: Chance that a request is lost on its way, or its answer on its way back.
        delay_s: How long a request takes at least.
        dead: Addresses that nobody answers at.
    """

    def __init__(self, rng: random.Random | None = None, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        self.services: dict[str, Service] = {}
        self.dead: set[str] = set()
        self.loss, self.delay_s = loss, delay_s
        self._rng = rng or random.Random(0)

    def connect(self, address: str, secret: bytes, *, deadline_s: float) -> "MemoryLink":
        """A connection to the service at that address.

        Raises:
            PeerUnavailable: There is none, or it is dead.
        """
        self.trouble(address, deadline_s)
        return MemoryLink(self, address, self.services[address])

    def trouble(self, address: str, deadline_s: float) -> None:
        """Let happen what may happen to one message.

        Raises:
            PeerUnavailable: It did.
        """
        if address in self.dead or address not in self.services:
            raise PeerUnavailable(f"{address} does not answer")
        if self.delay_s:
            time.sleep(min(self.delay_s, remaining(deadline_s)))
        remaining(deadline_s)
        if self.loss and self._rng.random() < self.loss:
            raise PeerUnavailable(f"a message to or from {address} was lost")


class MemoryLink(Link):
    """The asking end. Messages are encoded and decoded all the same, so that their limits hold.

    A posted request is answered at once; its answer, its bytes and what befell them wait for `collect`.
    """

    path: Path = "memory"

    def __init__(self, network: Network, address: str, service: Service) -> None:
        self._network, self._address, self._service = network, address, service
        self._session = service.session(local=True)
        self._posted: deque[Reply] = deque()
        self._closed = False
        self.epoch = 0

    def call(self, request: Message, *, deadline_s: float) -> Answer:
        return self.fetch(request, no_payload, deadline_s=deadline_s)

    def fetch(self, request: Message, place: Callable[[Answer], Targets], *, deadline_s: float) -> Answer:
        assert not self._posted
        self.post(request, deadline_s=deadline_s)
        return self.collect(place, deadline_s=deadline_s)

    def push(self, request: Message, pick: Callable[[Answer], Runs], *, deadline_s: float) -> Answer:
        assert not self._posted
        self.post(request, deadline_s=deadline_s)
        return self._finish(lambda reply: _move(pick(reply.answer), reply.incoming), deadline_s)

    def post(self, request: Message, *, deadline_s: float) -> None:
        assert len(self._posted) < MAX_POSTED
        if self._closed:
            raise PeerUnavailable("the connection is closed")
        try:
            self._network.trouble(self._address, deadline_s)
            raw = encode(request, self.epoch)
            decode_header(raw[: HEADER.size])
            self._posted.append(self._service.answer(decode(raw[HEADER.size :]), self._session))
        except BaseException:
            self.close()
            raise

    def collect(self, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        placed = place or no_payload
        return self._finish(lambda reply: _move([reply.outgoing], placed(reply.answer)), deadline_s)

    def ready(self) -> bool:
        return bool(self._posted)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            while self._posted:
                self._posted.popleft().finish(False)
            self._session.close()

    def _finish(self, move: Callable[[Reply], None], deadline_s: float) -> Answer:
        if self._closed:
            raise PeerUnavailable("the connection is closed")
        assert self._posted
        reply = self._posted.popleft()
        try:
            complete = False
            try:
                self._network.trouble(self._address, deadline_s)
                if not isinstance(reply.answer, Failure):
                    move(reply)
                complete = True
            finally:
                second = reply.finish(complete)
        except BaseException:
            self.close()
            raise
        self.epoch = max(self.epoch, self._service.epoch)
        answer = second or reply.answer
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer


def _move(sources: Runs, targets: Targets) -> None:
    """Copy a stream of runs into another; both are as long as each other, and each is asked for as the other needs."""
    pieces = (piece for run in targets for piece in run if len(piece))
    target = next(pieces, None)
    for run in sources:
        for source in run:
            rest = source
            while len(rest):
                if target is None:
                    raise ProtocolError("the peer sent more bytes than it said")
                step = min(len(rest), len(target))
                copy(target[:step], rest[:step])
                rest, target = rest[step:], target[step:]
                if not len(target):
                    target = next(pieces, None)
    if target is not None:
        raise ProtocolError("the peer sent fewer bytes than it said")
