"""A transport within one process, for embedded clusters and tests: the same services, no socket.

Chance and death are parameters, so that a test can replay what it saw.
"""

import random
import time
from collections.abc import Callable, Sequence

from raykv.errors import PeerUnavailable
from raykv.memory.copying import copy
from raykv.transport.base import Link, Reply, Service, remaining
from raykv.types import Path
from raykv.wire import HEADER, Answer, Failure, Message, decode, decode_header, encode, raise_failure


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
    """The asking end. Messages are encoded and decoded all the same, so that their limits hold."""

    path: Path = "memory"

    def __init__(self, network: Network, address: str, service: Service) -> None:
        self._network, self._address, self._service = network, address, service
        self._session = service.session(local=True)
        self._closed = False
        self.epoch = 0

    def call(self, request: Message, *, deadline_s: float) -> Answer:
        return self._exchange(request, deadline_s, lambda reply: None)

    def fetch(self, request: Message, place: Callable[[Answer], Sequence[memoryview]], *, deadline_s: float) -> Answer:
        return self._exchange(request, deadline_s, lambda reply: _move(reply.outgoing, place(reply.answer)))

    def push(self, request: Message, pick: Callable[[Answer], Sequence[memoryview]], *, deadline_s: float) -> Answer:
        return self._exchange(request, deadline_s, lambda reply: _move(pick(reply.answer), reply.incoming))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._session.close()

    def _exchange(self, request: Message, deadline_s: float, then: Callable[[Reply], None]) -> Answer:
        if self._closed:
            raise PeerUnavailable("the connection is closed")
        try:
            self._network.trouble(self._address, deadline_s)
            raw = encode(request, self.epoch)
            decode_header(raw[: HEADER.size])
            reply = self._service.answer(decode(raw[HEADER.size :]), self._session)
            complete = False
            try:
                self._network.trouble(self._address, deadline_s)
                if not isinstance(reply.answer, Failure):
                    then(reply)
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


def _move(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy a stream of pieces into another; both are as long as each other."""
    rest = [piece for piece in targets if len(piece)]
    for source in sources:
        while len(source):
            step = min(len(source), len(rest[0]))
            copy(rest[0][:step], source[:step])
            source = source[step:]
            rest[0] = rest[0][step:]
            if not len(rest[0]):
                rest.pop(0)
