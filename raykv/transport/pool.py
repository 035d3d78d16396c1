"""A pool of reusable links to nodes. A circuit breaker pauses requests to a node that fails or is far too slow."""

import random
import threading
import time
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Final, TypeVar

from raykv.errors import PeerUnavailable, RayKVError, TransientError
from raykv.transport.breaker import Breaker, Rates, Verdict
from raykv.transport.forking import drop_after_fork
from raykv.transport.handshake import WrongSecret
from raykv.transport.link import Link

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

T = TypeVar("T")

FAIR_S: Final = 0.05
"""A call that misses its deadline counts against the peer only if it began at least this long before the deadline."""


class ConnectionPool:
    """Reusable links to nodes. Thread-safe: concurrent callers get separate links. A forked child starts without links.

    Attributes:
        secret: The cluster's secret, for new links.
        epoch: The greatest epoch in any answer so far. An epoch is the version of the sender's list of members.
        learn_secret: Returns the secret that the cluster uses now; it gets the deadline. The pool calls it if a peer
            does not know `secret`, which may have been rotated. None: nobody can be asked.
        failures: Number of requests that failed, or were refused because a breaker was open.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        breaker_s: float,
        max_idle: int,
        tls: "Tls | None" = None,
        rng: random.Random | None = None,
    ) -> None:
        """Make a pool without links.

        Args:
            secret: The cluster's secret.
            breaker_s: How long a breaker pauses requests when it opens first. With 0, breakers never open.
            max_idle: Limit of idle links to one address.
            tls: The certificates for TLS, if the cluster uses TLS.
            rng: Chooses the length of the pauses.
        """
        self._breaker_s, self._max_idle, self._tls = breaker_s, max_idle, tls
        self._rng = rng or random.Random()
        self.learn_secret: Callable[[float], bytes] | None = None
        self.secret, self.epoch, self.failures = secret, 0, 0
        drop_after_fork(self)
        self.after_fork()

    def available(self, address: str) -> bool:
        """Return False while the breaker pauses requests to this address."""
        breaker = self._breakers.get(address)
        return breaker is None or breaker.admits(time.monotonic())

    def tripped(self) -> dict[str, float]:
        """Return the addresses whose breakers are open, and the seconds until the next request may go to each."""
        now_s = time.monotonic()
        pauses = {address: breaker.pause_s(now_s) for address, breaker in list(self._breakers.items())}
        return {address: round(pause_s, 3) for address, pause_s in pauses.items() if pause_s is not None}

    def ask(
        self,
        address: str,
        request: Callable[[Link], T],
        *,
        deadline_s: float,
        arrived_nbytes: Callable[[], int] = lambda: 0,
    ) -> T:
        """Run `request` on a link to `address`. The request must be idempotent, because it may run twice.

        An idle link may be dead because the node has restarted. In that case `request` runs again on a new link.

        Args:
            address: The address of the node.
            request: The request. It must end by the deadline.
            deadline_s: Time of the monotonic clock.
            arrived_nbytes: Returns the number of chunk bytes that have arrived. It distinguishes a peer that hangs from
                a read that is too large for its deadline.

        Raises:
            PeerUnavailable: The node does not answer in time, or its breaker is open.
            RayKVError: `request` raised this error.
        """
        began_s = time.monotonic()
        with self._lock:
            breaker = self._breakers.get(address) or Breaker(self._breaker_s, self._rng)
            self._breakers[address] = breaker
            began = breaker.begin(began_s)
        if began is None:
            self.failures += 1
            raise PeerUnavailable(f"{address} did not answer a moment ago, or too slowly; it is left alone for a while")
        verdict = Verdict.NONE
        try:
            result = self._ask(address, request, deadline_s)
            verdict = self._judge(address, arrived_nbytes(), began_s, late=False)
            return result
        except TransientError:
            if time.monotonic() < deadline_s:
                verdict = Verdict.FAILED
            elif deadline_s - began_s >= FAIR_S:
                verdict = self._judge(address, arrived_nbytes(), began_s, late=True)
            self.failures += verdict is Verdict.FAILED
            raise
        except RayKVError:
            verdict = Verdict.ALIVE  # it answers, though it refuses the request
            raise
        finally:
            with self._lock:
                breaker.end(began, verdict, time.monotonic())

    def _judge(self, address: str, nbytes: int, began_s: float, *, late: bool) -> Verdict:
        with self._lock:
            return self._rates.judge(address, nbytes, time.monotonic() - began_s, late=late)

    def _ask(self, address: str, request: Callable[[Link], T], deadline_s: float) -> T:
        with self._lock:
            idle = self._idle.get(address)
            link = idle.pop() if idle else None
        if link is not None:
            try:
                return self._run(address, link, request)
            except PeerUnavailable:
                if time.monotonic() >= deadline_s:  # on a dead connection the request would have failed at once
                    raise
                self.close_idle(address)
        return self._run(address, self._connect(address, deadline_s), request)

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

    def close_idle(self, address: str) -> None:
        """Close the idle links to an address."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for link in idle:
            link.close()

    def retain(self, addresses: Container[str]) -> None:
        """Close the idle links and reset the breakers of all addresses that are not in `addresses`."""
        with self._lock:
            gone = [address for address in {*self._idle, *self._breakers} if address not in addresses]
            for address in gone:
                self._breakers.pop(address, None)
                self._rates.remove(address)
        for address in gone:
            self.close_idle(address)

    def close(self) -> None:
        """Close all idle links."""
        self.retain(())

    def after_fork(self) -> None:
        """Start without links and breakers in the child. The inherited links are closed by their own `after_fork`."""
        self._lock, self._rates = threading.Lock(), Rates()
        self._idle: dict[str, list[Link]] = {}
        self._breakers: dict[str, Breaker] = {}
