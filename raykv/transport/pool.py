"""Connections to many nodes: kept, reused, and given up on for a while when a node does not answer."""

import threading
import time
from collections.abc import Callable, Container
from typing import Final, Protocol, TypeVar

from raykv.errors import PeerUnavailable, TransientError
from raykv.transport.base import Link, remaining

T = TypeVar("T")

FAIR_S: Final = 0.05
"""Who does not answer a call that had less time left than this has done nothing wrong."""


class Connect(Protocol):
    """How a link is made; `SocketLink.connect` or `Network.connect`."""

    def __call__(self, address: str, secret: bytes, *, deadline_s: float) -> Link: ...


class Peers:
    """Links by address. Thread-safe; a link serves one caller at a time, so parallel callers get parallel links.

    Attributes:
        epoch: The greatest epoch that any answer told of.
        failures: How often somebody did not answer, or was left alone because of it.
    """

    def __init__(self, connect: Connect, secret: bytes, *, breaker_s: float, max_idle: int) -> None:
        """Start without connections.

        Args:
            breaker_s: An address that failed is not asked again for this long.
            max_idle: Connections kept for one address.
        """
        self._connect, self._breaker_s, self._max_idle = connect, breaker_s, max_idle
        self.secret = secret
        self._idle: dict[str, list[Link]] = {}
        self._shut_until_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self.epoch = 0
        self.failures = 0

    def available(self, address: str) -> bool:
        """Whether the address may be asked now."""
        return time.monotonic() >= self._shut_until_s.get(address, 0.0)

    def ask(self, address: str, request: Callable[[Link], T], *, deadline_s: float) -> T:
        """Run `request` on a link to `address`. It must be harmless to run twice.

        A link that had been idle may turn out dead because the node was restarted; then a fresh one is tried once.

        Raises:
            PeerUnavailable: The node does not answer, or did not a moment ago.
            RayKVError: What `request` raised.
        """
        if self._shut_until_s and not self.available(address):
            self.failures += 1
            raise PeerUnavailable(f"{address} did not answer a moment ago; left alone for {self._breaker_s} s")
        hurried = remaining(deadline_s) < FAIR_S  # our own lateness is no fault of the peer
        with self._lock:
            idle = self._idle.get(address)
            link = idle.pop() if idle else None
        if link is not None:
            try:
                return self._run(address, link, request)
            except PeerUnavailable:
                if hurried and time.monotonic() >= deadline_s:
                    raise
                self.forget(address)
                if time.monotonic() >= deadline_s:  # it hangs, rather than being gone
                    self._give_up(address)
                    raise
        try:
            return self._run(address, self._connect(address, self.secret, deadline_s=deadline_s), request)
        except TransientError:
            if not (hurried and time.monotonic() >= deadline_s):
                self._give_up(address)
            raise

    def _give_up(self, address: str) -> None:
        self.failures += 1
        self._shut_until_s[address] = time.monotonic() + self._breaker_s

    def forget(self, address: str) -> None:
        """Close what is idle to this address."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for link in idle:
            link.close()

    def retain(self, addresses: Container[str]) -> None:
        """Forget all others: who has left the cluster."""
        for address in {*self._idle, *self._shut_until_s}:
            if address not in addresses:
                self.forget(address)
                self._shut_until_s.pop(address, None)

    def close(self) -> None:
        """Close all idle connections."""
        self.retain(())

    def _run(self, address: str, link: Link, request: Callable[[Link], T]) -> T:
        keep = False
        try:
            result = request(link)
            keep = True
            return result
        except TransientError:
            raise
        except Exception:
            keep = True  # the other end refused this request; the connection itself is fine
            raise
        finally:
            if link.epoch > self.epoch:
                self.epoch = link.epoch
            with self._lock:
                idle = self._idle.setdefault(address, [])
                keep = keep and len(idle) < self._max_idle
                if keep:
                    idle.append(link)
            if not keep:
                link.close()
