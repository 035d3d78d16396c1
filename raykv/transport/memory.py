"""A transport within one process, for embedded clusters and tests. It uses the same services, without sockets.

Message loss, delays and dead nodes are parameters, so that tests are repeatable.
"""

import random
import time
from collections import deque
from collections.abc import Callable

from raykv.errors import PeerUnavailable, ProtocolError
from raykv.memory.copying import copy
from raykv.protocol.codec import HEADER, decode, decode_header, encode, raise_failure
from raykv.protocol.messages import Answer, Failure, Message
from raykv.transport.base import MAX_POSTED, Link, Reply, Runs, Service, Targets, remaining
from raykv.transport.forking import drop_after_fork
from raykv.types import Path


class Network:
    """Services by address, with simulated faults.

    Attributes:
        services: Services by address.
        dead: Addresses that do not answer.
        loss: Probability that one message (a request or an answer) is lost.
        delay_s: Delay of each message.
    """

    def __init__(self, rng: random.Random | None = None, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        self.services: dict[str, Service] = {}
        self.dead: set[str] = set()
        self.loss, self.delay_s = loss, delay_s
        self._rng = rng or random.Random(0)

    def connect(self, address: str, secret: bytes, *, deadline_s: float) -> "MemoryLink":
        """Connect to the service at an address. Raises PeerUnavailable if there is no service, or it is dead."""
        self.send(address, deadline_s)
        return MemoryLink(self, address, self.services[address])

    def send(self, address: str, deadline_s: float) -> None:
        """Simulate one message to or from an address. Raises PeerUnavailable if the message is lost or late."""
        if address in self.dead or address not in self.services:
            raise PeerUnavailable(f"{address} does not answer")
        if self.delay_s:
            time.sleep(min(self.delay_s, remaining(deadline_s)))
        remaining(deadline_s)
        if self.loss and self._rng.random() < self.loss:
            raise PeerUnavailable(f"a message to or from {address} was lost")


class MemoryLink(Link):
    """The client end. `post` runs the service's handler at once; `collect` returns the answer and transfers its bytes.

    Requests are encoded and decoded, so that the size limits of messages apply.
    """

    path: Path = "memory"

    def __init__(self, network: Network, address: str, service: Service) -> None:
        self._network, self._address, self._service = network, address, service
        self._session = service.session(local=True)
        self._posted: deque[tuple[int, Reply]] = deque()
        self._next_id = self._due_id = 1
        self.closed = False
        self.epoch = 0
        drop_after_fork(self)

    def push(self, request: Message, pick: Callable[[Answer], Runs], *, deadline_s: float) -> Answer:
        assert not self._posted
        self.post(request, deadline_s=deadline_s)
        return self._finish(lambda reply: _move(pick(reply.answer), reply.incoming), deadline_s)

    def post(self, request: Message, *, deadline_s: float) -> None:
        assert len(self._posted) < MAX_POSTED
        if self.closed:
            raise PeerUnavailable("the connection is closed")
        raw = encode(request, self.epoch, self._next_id)
        try:
            self._network.send(self._address, deadline_s)
            if self._network.services.get(self._address) is not self._service:
                raise PeerUnavailable(f"{self._address} was restarted")
            request_id = decode_header(raw[: HEADER.size]).request_id
            self._posted.append((request_id, self._service.answer(decode(raw[HEADER.size :]), self._session)))
        except BaseException:
            self.close()
            raise
        self._next_id += 1

    def collect(self, place: Callable[[Answer], Targets] | None = None, *, deadline_s: float) -> Answer:
        return self._finish(
            lambda reply: _move([reply.outgoing], place(reply.answer) if place is not None else ()), deadline_s
        )

    def wait_ready(self, timeout_s: float) -> bool:
        return self.closed or bool(self._posted)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            while self._posted:
                self._posted.popleft()[1].finish(False)
            self._session.close()

    def after_fork(self) -> None:
        """Forget the session without closing it: the session belongs to the parent."""
        self.closed = True
        self._posted.clear()

    def _finish(self, move: Callable[[Reply], None], deadline_s: float) -> Answer:
        """Transfer the bytes of the oldest posted request, and return its last answer."""
        if self.closed:
            raise PeerUnavailable("the connection is closed")
        assert self._posted
        request_id, reply = self._posted.popleft()
        try:
            complete = False
            try:
                self._network.send(self._address, deadline_s)
                if request_id != self._due_id:
                    raise ProtocolError(f"an answer to request {request_id}, where one to {self._due_id} was due")
                if not isinstance(reply.answer, Failure):
                    move(reply)
                complete = True
            finally:
                second = reply.finish(complete)
        except BaseException:
            self.close()
            raise
        self._due_id += 1
        self.epoch = max(self.epoch, self._service.epoch)
        answer = second or reply.answer
        if isinstance(answer, Failure):
            raise_failure(answer)
        return answer


def _move(sources: Runs, targets: Targets) -> None:
    """Copy runs of bytes into buffers of the same total length. Runs and buffers are requested one by one."""
    pieces = (piece for run in targets for piece in run if len(piece))
    target = next(pieces, None)
    for run in sources:
        for source in run:
            rest = source
            while len(rest):
                if target is None:
                    raise ProtocolError("the peer sent more bytes than it announced")
                step = min(len(rest), len(target))
                copy(target[:step], rest[:step])
                rest, target = rest[step:], target[step:]
                if not len(target):
                    target = next(pieces, None)
    if target is not None:
        raise ProtocolError("the peer sent fewer bytes than it announced")
