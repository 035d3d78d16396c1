"""Links to many nodes, reused; a node that does not answer is left alone for a while (a circuit breaker)."""

import threading
import time
from collections.abc import Callable, Container
from typing import Final, Protocol, TypeVar

from raykv.errors import PeerUnavailable, RayKVError, TransientError
from raykv.transport.base import Link, remaining
from raykv.transport.forking import drop_after_fork

T = TypeVar("T")

FAIR_S: Final = 0.05
"""A call with less time left than this does not trip the breaker."""


class Connect(Protocol):
    """Makes a link: `SocketLink.connect` or `Network.connect`."""

    def __call__(self, address: str, secret: bytes, *, deadline_s: float) -> Link: ...


class ConnectionPool:
    """Links by address. Thread-safe: parallel callers get parallel links. A forked child starts without links.

    Attributes:
        secret: The cluster's secret, for new links.
        epoch: The greatest epoch in an answer so far.
        failures: How often a node did not answer, or was not asked because its breaker had tripped.
    """

    def __init__(self, connect: Connect, secret: bytes, *, breaker_s: float, max_idle: int) -> None:
        """Args: breaker_s: After a failure, an address is not asked for this long. max_idle: Of one address."""
        self._connect, self._breaker_s, self._max_idle = connect, breaker_s, max_idle
        self.secret, self.epoch, self.failures = secret, 0, 0
        self._idle: dict[str, list[Link]] = {}
        self._tripped_until_s: dict[str, float] = {}
        self._lock = threading.Lock()
        drop_after_fork(self)

    def available(self, address: str) -> bool:
        """Whether the breaker of an address has not tripped."""
        return time.monotonic() >= self._tripped_until_s.get(address, 0.0)

    def ask(self, address: str, request: Callable[[Link], T], *, deadline_s: float) -> T:
        """Run `request` on a link to `address`. It may run twice: it must not matter if it does.

        An idle link may be dead because the node has restarted: then a new link is tried, once.

        Raises:
            PeerUnavailable: The node does not answer, or its breaker has tripped.
            RayKVError: What `request` raised.
        """
        if not self.available(address):
            self.failures += 1
            raise PeerUnavailable(
                f"{address} did not answer a moment ago; it is not asked again for {self._breaker_s} s"
            )
        short = remaining(deadline_s) < FAIR_S
        with self._lock:
            idle = self._idle.get(address)
            link = idle.pop() if idle else None
        if link is not None:
            try:
                return self._run(address, link, request)
            except PeerUnavailable:
                late = time.monotonic() >= deadline_s
                if short and late:
                    raise
                self.close_idle(address)
                if late:  # the node hangs; a dead one would have failed at once
                    self._trip(address)
                    raise
        try:
            return self._run(address, self._connect(address, self.secret, deadline_s=deadline_s), request)
        except TransientError:
            if not (short and time.monotonic() >= deadline_s):
                self._trip(address)
            raise

    def _run(self, address: str, link: Link, request: Callable[[Link], T]) -> T:
        good = False
        try:
            result = request(link)
            good = True
            return result
        except RayKVError as error:
            good = not isinstance(error, TransientError)  # the node refused the request: the link is fine
            raise
        finally:
            self.epoch = max(self.epoch, link.epoch)
            with self._lock:
                idle = self._idle.setdefault(address, [])
                reuse = good and not link.closed and len(idle) < self._max_idle
                if reuse:
                    idle.append(link)
            if not reuse:
                link.close()

    def _trip(self, address: str) -> None:
        self.failures += 1
        self._tripped_until_s[address] = time.monotonic() + self._breaker_s

    def close_idle(self, address: str) -> None:
        """Close the idle links to an address."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for link in idle:
            link.close()

    def retain(self, addresses: Container[str]) -> None:
        """Close the idle links to all other addresses: nodes that have left the cluster."""
        for address in {*self._idle, *self._tripped_until_s}:
            if address not in addresses:
                self.close_idle(address)
                self._tripped_until_s.pop(address, None)

    def close(self) -> None:
        """Close all idle links."""
        self.retain(())

    def after_fork(self) -> None:
        """The links close themselves."""
        self._lock, self._idle = threading.Lock(), {}
