"""Spreads batches of chunks over the NICs of a host. Logic without clock, lock and threads: callers pass the time.

A rail is one NIC port. Each has a measured rate, the bytes under way, and a circuit breaker. A small batch goes to the
nearest rail. A large one is spread so that all rails would end at the same time.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from raykv.errors import UsageError
from raykv.transport.breaker import Breaker, Verdict

STRIPED_NBYTES: Final = 4 << 20
"""A smaller batch goes to the nearest rail. At 400 Gbit/s it takes 84 us there, and more rails would save little."""
RATED_NBYTES: Final = 1 << 20
"""The time of a smaller share is mostly latency, so it says nothing about the rate."""
WINDOW_S: Final = 0.5
"""Measurements fade by 1/e in this time. Two seconds after a rail fell to a quarter of its rate, its weight is right
within 5 %."""
PRIOR_S: Final = 1e-6
"""The nominal rate counts as much as a measurement of this length, so measurements prevail while a rail is in use. One
that was slow, and got nothing since, is tried again when they have faded: after about seven seconds."""


@dataclass(slots=True)
class Share:
    """The part of a batch that goes over one rail. Pass it to `Rails.done` or `Rails.fail` once.

    Attributes:
        rail: The number of the rail.
        indices: Which elements of the batch, in ascending order.
        nbytes: Their size.
        began: The number of the breaker's round.
    """

    rail: int
    indices: list[int]
    nbytes: int
    began: int


@dataclass(slots=True)
class _Rail:
    nominal: float
    breaker: Breaker
    outstanding: int = 0
    rated: int = 0
    """Shares under way that are large enough to be rated."""
    measured_nbytes: float = 0.0
    measured_s: float = 0.0
    since_s: float = -math.inf
    """Until when the rail's time is measured."""

    def rate(self, now_s: float) -> float:
        """Return the rate in bytes a second."""
        fade = math.exp((self.since_s - now_s) / WINDOW_S)
        return (self.measured_nbytes * fade + self.nominal * PRIOR_S) / (self.measured_s * fade + PRIOR_S)

    def measure(self, nbytes: int, now_s: float, *, busy: bool) -> None:
        """Add bytes that arrived, and the time since the last call if the rail was `busy`."""
        elapsed_s = max(0.0, now_s - self.since_s)
        fade = math.exp(-elapsed_s / WINDOW_S)
        self.measured_nbytes = self.measured_nbytes * fade + nbytes
        self.measured_s = self.measured_s * fade + (elapsed_s if busy else 0.0)
        self.since_s = now_s


@dataclass(slots=True)
class _Plan:
    rail: int
    indices: list[int] = field(default_factory=list)
    nbytes: int = 0


class Rails:
    """The rails of a host, nearest first. A rail is named by its number in that order.

    The rate of a rail is the bytes that arrived over it by the time that it was busy. So it is right also if several
    batches share the rail.
    """

    def __init__(self, rates: Sequence[float], *, pause_s: float, rng: random.Random) -> None:
        """Make rails that all work.

        Args:
            rates: For each rail its nominal rate in bytes a second: the weight until there are measurements.
            pause_s: How long a rail that failed is left alone, the first time; with 0, for no time.
            rng: Makes the pauses of different hosts differ.

        Raises:
            UsageError: There is no rail, or one without a rate.
        """
        if not rates or min(rates) <= 0:
            raise UsageError("each rail needs a nominal rate above 0")
        self._rails = [_Rail(rate, Breaker(pause_s, rng)) for rate in rates]

    def assign(self, sizes: Sequence[int], now_s: float, *, near: int = 0) -> list[Share]:
        """Spread a batch over the rails.

        Rails that are taken out get nothing. After its pause, such a rail gets the last element of a batch, as a probe,
        while other rails carry the rest. If no other rail works, the probe is the whole batch.

        Args:
            sizes: The size of each element in bytes. A chunk that is large against the batch may be several elements.
            now_s: Monotonic time in seconds.
            near: The rail nearest to this batch's memory.

        Returns:
            The shares: each element is in exactly one. Empty if no rail works now: use another path, such as TCP.
        """
        order = [near, *(number for number in range(len(self._rails)) if number != near)]
        working = [number for number in order if self._rails[number].breaker.pause_s(now_s) is None]
        ready = [number for number in order if number not in working and self._rails[number].breaker.admits(now_s)]
        if not (working or ready) or not sizes:
            return []
        elements = range(len(sizes))
        plans = []
        if not working:
            working = ready[:1]
        elif ready and len(sizes) > 1:
            plans = [_Plan(ready[0], [len(sizes) - 1], sizes[-1])]
            elements = range(len(sizes) - 1)
        nbytes = sum(sizes[index] for index in elements)
        used = working if nbytes >= STRIPED_NBYTES else working[:1]
        plans += self._stripe(sizes, elements, used, now_s)
        return [self._begin(plan, now_s) for plan in plans if plan.indices]

    def _stripe(self, sizes: Sequence[int], elements: range, used: list[int], now_s: float) -> list[_Plan]:
        """Give each element, largest first, to the rail that would end first with it."""
        plans = [_Plan(number) for number in used]
        rates = [self._rails[number].rate(now_s) for number in used]
        ends_s = [self._rails[number].outstanding / rate for number, rate in zip(used, rates, strict=True)]
        for index in sorted(elements, key=lambda index: -sizes[index]):
            with_it = [end_s + sizes[index] / rate for end_s, rate in zip(ends_s, rates, strict=True)]
            best = min(range(len(used)), key=with_it.__getitem__)
            ends_s[best] = with_it[best]
            plans[best].indices.append(index)
            plans[best].nbytes += sizes[index]
        for plan in plans:
            plan.indices.sort()
        return plans

    def _begin(self, plan: _Plan, now_s: float) -> Share:
        rail = self._rails[plan.rail]
        began = rail.breaker.begin(now_s)
        assert began is not None, "assign uses only rails that the breaker admits"
        if plan.nbytes >= RATED_NBYTES:
            if not rail.rated:
                rail.measure(0, now_s, busy=False)
            rail.rated += 1
        rail.outstanding += plan.nbytes
        return Share(plan.rail, plan.indices, plan.nbytes, began)

    def done(self, share: Share, now_s: float, *, nbytes: int | None = None) -> None:
        """A share was transferred. A rail that was taken out is used again, if the share was its probe.

        `nbytes`: how many bytes there were to transfer; None: all of the share.
        """
        rail = self._rails[share.rail]
        if rail.rated:
            rail.measure(share.nbytes if nbytes is None else nbytes, now_s, busy=True)
        self._end(share, Verdict.ALIVE, now_s)

    def fail(self, share: Share, now_s: float) -> None:
        """A share failed: take the rail out. Assign what was not transferred again: it goes to other rails."""
        rail = self._rails[share.rail]
        if rail.rated:
            rail.measure(0, now_s, busy=False)
        self._end(share, Verdict.FAILED, now_s)

    def cancel(self, share: Share, now_s: float) -> None:
        """A share ended for a reason that is not the rail's, such as a peer that died or the deadline."""
        rail = self._rails[share.rail]
        if rail.rated:
            rail.measure(0, now_s, busy=False)
        self._end(share, Verdict.NONE, now_s)

    def take_out(self, rail: int, now_s: float) -> None:
        """Take a rail out without a failed share, for example because its port is down. It is probed after a pause."""
        breaker = self._rails[rail].breaker
        if breaker.pause_s(now_s) is None and (began := breaker.begin(now_s)) is not None:
            breaker.end(began, Verdict.FAILED, now_s)

    def works(self, rail: int, now_s: float) -> bool:
        """Whether a rail is in use, which means that it was not taken out."""
        return self._rails[rail].breaker.pause_s(now_s) is None

    def admits(self, rail: int, now_s: float) -> bool:
        """Whether `assign` may use a rail now: it works, or a probe of it is due."""
        return self._rails[rail].breaker.admits(now_s)

    def rate(self, rail: int, now_s: float) -> float:
        """Return the rate of a rail in bytes a second."""
        return self._rails[rail].rate(now_s)

    def outstanding(self, rail: int) -> int:
        """Return the bytes under way on a rail."""
        return self._rails[rail].outstanding

    def _end(self, share: Share, verdict: Verdict, now_s: float) -> None:
        rail = self._rails[share.rail]
        rail.outstanding -= share.nbytes
        rail.rated -= share.nbytes >= RATED_NBYTES
        rail.breaker.end(share.began, verdict, now_s)
