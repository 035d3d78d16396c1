"""Faults of connections that tests cause: lost messages, delays, and nodes that do not answer."""

import random
import time
from weakref import WeakKeyDictionary

import pytest

from raykv.errors import PeerUnavailable
from raykv.node.node import Node
from raykv.protocol.messages import Answer, Message
from raykv.transport.base import remaining
from raykv.transport.link import Link
from raykv.transport.tls import Tls


class Faults:
    """Faults of all links of this process.

    Attributes:
        loss: Probability that one message (a connection, a request or an answer) is lost.
        delay_s: Delay of each message.
    """

    def __init__(self, patch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.loss = self.delay_s = 0.0
        self._rng = rng
        self._silent: set[str] = set()
        self._hanging: set[str] = set()
        self._addresses: WeakKeyDictionary[Link, str] = WeakKeyDictionary()
        self._connect, self._post, self._receive = Link.connect, Link.post, Link._receive
        patch.setattr(Link, "connect", self._connect_or_fail)
        patch.setattr(Link, "post", lambda link, *given, **more: self._post_or_fail(link, *given, **more))
        patch.setattr(Link, "_receive", lambda link, *given: self._receive_or_fail(link, *given))

    def silence(self, node: Node) -> None:
        """From now on, no message to or from this node arrives."""
        self._silent.update(node.member.endpoints.values())

    def hang(self, node: Node) -> None:
        """From now on, each message to or from this node takes until its deadline, and is lost."""
        self._hanging.update(node.member.endpoints.values())

    def restore(self, node: Node) -> None:
        self._silent.difference_update(node.member.endpoints.values())
        self._hanging.difference_update(node.member.endpoints.values())

    def _connect_or_fail(
        self, address: str, secret: bytes, *, deadline_s: float, tls: Tls | None = None, source: str = ""
    ) -> Link:
        self._send(address, deadline_s)
        link = self._connect(address, secret, deadline_s=deadline_s, tls=tls, source=source)
        self._addresses[link] = address
        return link

    def _post_or_fail(self, link: Link, request: Message, *, deadline_s: float) -> None:
        try:
            self._send(self._addresses[link], deadline_s)
        except PeerUnavailable:
            link.close()
            raise
        self._post(link, request, deadline_s=deadline_s)

    def _receive_or_fail(self, link: Link, request_id: int, deadline_s: float) -> Answer:
        self._send(self._addresses[link], deadline_s)
        return self._receive(link, request_id, deadline_s)

    def _send(self, address: str, deadline_s: float) -> None:
        if address in self._silent:
            raise PeerUnavailable(f"{address} does not answer")
        if address in self._hanging:
            time.sleep(remaining(deadline_s))
            raise PeerUnavailable("the deadline has passed")
        if self.delay_s:
            time.sleep(min(self.delay_s, remaining(deadline_s)))
            remaining(deadline_s)
        if self.loss and self._rng.random() < self.loss:
            raise PeerUnavailable(f"a message to or from {address} was lost")
