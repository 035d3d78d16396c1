"""A pool of reusable links to nodes. A circuit breaker pauses requests to a node that fails or is far too slow."""

import math
import random
import threading
import time
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from raykv.errors import PeerUnavailable, RayKVError, TransientError
from raykv.transport.breaker import Breaker, Rates, Verdict
from raykv.transport.forking import drop_after_fork
from raykv.transport.handshake import WrongSecret
from raykv.transport.link import Link

if TYPE_CHECKING:
    from raykv.transport.tls import Tls

T = TypeVar("T")

End: TypeAlias = tuple[str, str]
"""What links are pooled by: the address that they lead to, and the address of this host from which, or ""."""
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
            max_idle: Limit of idle links to one address from one address of this host.
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
        work = partial(self.run, address, request, deadline_s=deadline_s)
        return self.guard(address, work, deadline_s=deadline_s, arrived_nbytes=arrived_nbytes)

    def guard(self, address: str, work: Callable[[], T], *, deadline_s: float, arrived_nbytes: Callable[[], int]) -> T:
        """Do some work with the node at `address`, over any links, unless the node's breaker is open; see `ask`."""
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
            result = work()
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

    def run(
        self,
        address: str,
        request: Callable[[Link], T],
        *,
        deadline_s: float,
        source: str = "",
        connect_s: float = math.inf,
    ) -> T:
        """Run `request` on a link to `address`, as `ask` does, but whatever the breaker says.

        Args:
            address, request, deadline_s: As in `ask`.
            source: The address of this host to connect from. Empty: any.
            connect_s: A new connection may take at most this long.
        """
        end = address, source
        with self._lock:
            idle = self._idle.get(end)
            link = idle.pop() if idle else None
        if link is not None:
            try:
                return self._run(end, link, request)
            except PeerUnavailable:
                if time.monotonic() >= deadline_s:  # on a dead connection the request would have failed at once
                    raise
                self._close_idle(end)
        return self._run(end, self._connect(end, min(deadline_s, time.monotonic() + connect_s)), request)

    def _connect(self, end: End, deadline_s: float) -> Link:
        secret, (address, source) = self.secret, end
        connect = partial(Link.connect, address, deadline_s=deadline_s, tls=self._tls, source=source)
        try:
            return connect(secret)
        except WrongSecret:
            if self.learn_secret is None or (learned := self.learn_secret(deadline_s)) == secret:
                raise
        self.secret = learned
        return connect(learned)

    def _run(self, end: End, link: Link, request: Callable[[Link], T]) -> T:
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
                idle = self._idle.setdefault(end, [])
                reuse = good and not link.closed and len(idle) < self._max_idle
                if reuse:
                    idle.append(link)
            if not reuse:
                link.close()

    def close_idle(self, address: str) -> None:
        """Close the idle links to an address."""
        for end in [end for end in list(self._idle) if end[0] == address]:
            self._close_idle(end)

    def _close_idle(self, end: End) -> None:
        with self._lock:
            idle = self._idle.pop(end, [])
        for link in idle:
            link.close()

    def retain(self, addresses: Container[str]) -> None:
        """Close the idle links and reset the breakers of all addresses that are not in `addresses`."""
        with self._lock:
            known = {address for address, _ in self._idle} | self._breakers.keys()
            gone = [address for address in known if address not in addresses]
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
        self._idle: dict[End, list[Link]] = {}
        self._breakers: dict[str, Breaker] = {}
