"""A pool of reusable links to nodes. A circuit breaker pauses requests to a node that does not answer."""

import threading
import time
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Final, TypeVar

from raykv.errors import PeerUnavailable, RayKVError, TransientError
from raykv.transport.base import remaining
from raykv.transport.forking import drop_after_fork
from raykv.transport.handshake import WrongSecret
from raykv.transport.link import Link

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

T = TypeVar("T")

FAIR_S: Final = 0.05
"""A call that misses its deadline trips the breaker only if it began at least this many seconds before the deadline."""


class ConnectionPool:
    """Reusable links to nodes. Thread-safe: concurrent callers get separate links. A forked child starts without links.

    Attributes:
        secret: The cluster's secret, for new links.
        epoch: The greatest epoch in any answer so far. An epoch is the version of the sender's list of members.
        learn_secret: Returns the secret that the cluster uses now; it gets the deadline. The pool calls it if a peer
            does not know `secret`, which may have been rotated. None: nobody can be asked.
        failures: Number of requests that tripped a breaker, or were refused because a breaker had tripped.
    """

    def __init__(self, secret: bytes, *, breaker_s: float, max_idle: int, tls: "Tls | None" = None) -> None:
        """Make a pool without links.

        Args:
            secret: The cluster's secret.
            breaker_s: How long a tripped breaker pauses requests.
            max_idle: Limit of idle links to one address.
            tls: The certificates for TLS, if the cluster uses TLS.
        """
        self._breaker_s, self._max_idle, self._tls = breaker_s, max_idle, tls
        self.learn_secret: Callable[[float], bytes] | None = None
        self.secret, self.epoch, self.failures = secret, 0, 0
        self._idle: dict[str, list[Link]] = {}
        self._tripped_until_s: dict[str, float] = {}
        self._lock = threading.Lock()
        drop_after_fork(self)

    def available(self, address: str) -> bool:
        """Return False while the breaker pauses requests to this address."""
        return time.monotonic() >= self._tripped_until_s.get(address, 0.0)

    def ask(self, address: str, request: Callable[[Link], T], *, deadline_s: float) -> T:
        """Run `request` on a link to `address`. The request must be idempotent, because it may run twice.

        An idle link may be dead because the node has restarted. In that case `request` runs again on a new link.

        Raises:
            PeerUnavailable: The node does not answer in time, or its breaker has tripped.
            RayKVError: `request` raised this error.
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
                if late:  # the node hangs: on a dead connection the request would have failed at once
                    self._trip(address)
                    raise
        try:
            return self._run(address, self._connect(address, deadline_s), request)
        except TransientError:
            if not (short and time.monotonic() >= deadline_s):
                self._trip(address)
            raise

    def _connect(self, address: str, deadline_s: float) -> Link:
        secret = self.secret
        try:
            return Link.connect(address, secret, deadline_s=deadline_s, tls=self._tls)
        except WrongSecret:
            if self.learn_secret is None or (learned := self.learn_secret(deadline_s)) == secret:
                raise
        self.secret = learned
        return Link.connect(address, learned, deadline_s=deadline_s, tls=self._tls)

    def _run(self, address: str, link: Link, request: Callable[[Link], T]) -> T:
        good = False
        try:
            result = request(link)
            good = True
            return result
        except RayKVError as error:
            good = not isinstance(error, TransientError)  # if the node refused the request, the link still works
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
        """Close the idle links and reset the breakers of all addresses that are not in `addresses`."""
        for address in {*self._idle, *self._tripped_until_s}:
            if address not in addresses:
                self.close_idle(address)
                self._tripped_until_s.pop(address, None)

    def close(self) -> None:
        """Close all idle links."""
        self.retain(())

    def after_fork(self) -> None:
        """Start without links in the child. The inherited links are closed by their own `after_fork`."""
        self._lock, self._idle = threading.Lock(), {}
