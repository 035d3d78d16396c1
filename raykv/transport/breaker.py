"""Decides when to leave a peer alone. The classes have no clock and no lock: callers pass the time and hold a lock."""

import random
from enum import Enum
from statistics import median
from typing import Final

MAX_GROWTH: Final = 4
"""Each failed probe doubles the pause, up to MAX_GROWTH times the first pause. So a peer that is back is asked again
within that time."""
JITTER: Final = 0.25
"""A pause is shorter by a random part of up to this share. Otherwise all clients would probe a node at once."""
SLOW_CALLS: Final = 3
"""This many slow calls in a row open the breaker. A single one may have met a retransmission or a busy moment."""
SLOW_SHARE: Final = 20
SLOW_S: Final = 0.5
"""A read is slow if its rate is below 1/SLOW_SHARE of the other peers' median, and it takes SLOW_S or misses its
deadline. The share is so small because one read may have the network for itself, while others share it."""
RATED_NBYTES: Final = 1 << 20
"""Smaller reads have no rate, because their time is mostly latency."""
EWMA_WEIGHT: Final = 0.25


class Verdict(Enum):
    """What a call says about its peer."""

    NONE = "none"
    """Nothing, for example because the call had too little time."""
    ALIVE = "alive"
    """It answers. The call moved too few bytes to say how fast."""
    FAST = "fast"
    """It answers, and chunks arrive in time."""
    SLOW = "slow"
    FAILED = "failed"


class Breaker:
    """The circuit breaker of one peer.

    Closed: all requests may go to the peer. A failed call, or SLOW_CALLS slow calls in a row, open the breaker. Open:
    no request may go for a pause. Half-open: after the pause one request at a time may go, as a probe. A good probe
    closes the breaker, a bad one opens it for a longer pause. If the peer was slow, a probe that is too small to show a
    rate closes the breaker too, but the next slow call opens it again, for a longer pause.
    """

    def __init__(self, pause_s: float, rng: random.Random) -> None:
        """`pause_s`: the first pause. With 0, the breaker never opens."""
        self._pause_s, self._rng = pause_s, rng
        self._opened_until_s: float | None = None
        self._round = self._trips = self._slow = 0
        self._probing = False

    def admits(self, now_s: float) -> bool:
        """Whether a request may go to the peer now."""
        return self._opened_until_s is None or (now_s >= self._opened_until_s and not self._probing)

    def pause_s(self, now_s: float) -> float | None:
        """Return the time until the next probe may go; 0 if one may go or is under way. None: the breaker is closed."""
        return None if self._opened_until_s is None else max(0.0, self._opened_until_s - now_s)

    def begin(self, now_s: float) -> int | None:
        """Begin a call. Returns None if it is refused, else a number to pass to `end`, which must be called once."""
        if not self.admits(now_s):
            return None
        self._probing = self._opened_until_s is not None
        return self._round

    def end(self, began: int, verdict: Verdict, now_s: float) -> None:
        """End a call. Calls that began before the breaker opened last have no effect any more."""
        if began != self._round:
            return
        half_open, self._probing = self._opened_until_s is not None, False
        if verdict is Verdict.FAST or (verdict is Verdict.ALIVE and not self._slow):
            self._opened_until_s, self._trips, self._slow = None, 0, 0
        elif verdict is Verdict.ALIVE and half_open:
            self._opened_until_s, self._slow = None, SLOW_CALLS - 1
        elif verdict is Verdict.SLOW:
            self._slow += 1
            if half_open or self._slow >= SLOW_CALLS:
                self._open(now_s)
        elif verdict is Verdict.FAILED:
            self._slow = 0
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        if self._pause_s:
            pause_s = self._pause_s * min(MAX_GROWTH, 2**self._trips) * (1 - JITTER * self._rng.random())
            self._opened_until_s = now_s + pause_s
            self._round += 1
            self._trips += 1


class Rates:
    """The rates of reads from each peer, in bytes a second: exponentially weighted moving averages."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def judge(self, address: str, nbytes: int, seconds: float, *, late: bool) -> Verdict:
        """Judge a call that was answered, or missed its deadline (`late`), and add its rate.

        Args:
            address: The peer.
            nbytes: Number of chunk bytes that have arrived.
            seconds: Duration of the call.
            late: If bytes arrived as fast as from others, such a call has asked for too much.
        """
        if nbytes < RATED_NBYTES and not (late and nbytes):
            return Verdict.FAILED if late else Verdict.ALIVE
        others = [rate for other, rate in self._rates.items() if other != address]
        rate = nbytes / max(seconds, 1e-9)
        self._rates[address] = (1 - EWMA_WEIGHT) * self._rates.get(address, rate) + EWMA_WEIGHT * rate
        slow = (late or seconds >= SLOW_S) and rate * SLOW_SHARE < median(others) if others else late
        return Verdict.SLOW if slow else Verdict.NONE if late else Verdict.FAST

    def remove(self, address: str) -> None:
        self._rates.pop(address, None)
