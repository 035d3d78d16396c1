"""An in-memory network with a virtual clock. All chance comes from one seeded generator.

A run with the same seed is the same run. Nothing waits: `Network.run` carries out one event after the other, and sets
the clock to the time of each event.
"""

import heapq
from collections.abc import Callable, Iterable
from random import Random
from typing import Final, TypeVar

T = TypeVar("T")

LATENCY_S: Final = 0.0002
"""Mean latency of one message. The latency of a message is between a half and one and a half of it."""
TIMEOUT_S: Final = 1.0
"""A call without an answer fails after this time."""


class Network:
    """Carries messages between named processes. It loses, delays and cuts off messages as a test asks.

    Attributes:
        now_s: The virtual time.
        rng: The source of all chance.
        loss: Share of the messages that are lost.
        delay_s: Mean of an additional delay of each message, which is distributed exponentially.
        down: Names of the processes that do not run. A call to one of them fails at once.
        sent: Number of messages sent so far.
    """

    def __init__(self, seed: int, *, latency_s: float = LATENCY_S) -> None:
        self.now_s, self.rng = 0.0, Random(seed)
        self.loss = self.delay_s = 0.0
        self.down: set[str] = set()
        self.sent = 0
        self._latency_s = latency_s
        self._cuts: list[tuple[frozenset[str], frozenset[str]]] = []
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        """Carry out an action at a time. Actions of one time are carried out in the order of these calls."""
        self._count += 1
        heapq.heappush(self._events, (max(when_s, self.now_s), self._count, action))

    def run(self, until_s: float) -> None:
        """Carry out all events up to a time."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(events)
            action()
        self.now_s = max(self.now_s, until_s)

    # -- faults -----------------------------------------------------------------------------------------------------

    def cut(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Drop all messages from `sources` to `targets`. For a partition of both directions, call it twice."""
        self._cuts.append((frozenset(sources), frozenset(targets)))

    def heal(self) -> None:
        """End all cuts, losses and delays. Processes that are down stay down."""
        self._cuts.clear()
        self.loss = self.delay_s = 0.0

    def _arrives(self, source: str, target: str) -> bool:
        self.sent += 1
        if self._cuts and any(source in some and target in others for some, others in self._cuts):
            return False
        return not self.loss or self.rng.random() >= self.loss

    # -- messages ---------------------------------------------------------------------------------------------------

    def latency_s(self) -> float:
        """Draw the latency of a message."""
        drawn = self._latency_s * (0.5 + self.rng.random())
        return drawn + self.rng.expovariate(1 / self.delay_s) if self.delay_s else drawn

    def call(self, source: str, target: str, serve: Callable[[], T], done: Callable[[T | None], object]) -> None:
        """Send a request. `serve` runs when it arrives, and `done` when the answer arrives.

        If one of the two messages is lost, `done` gets None after TIMEOUT_S. `serve` may have run. If the target is
        down, `done` gets None after the latency of the request.
        """
        fails_s, on_way_s = self.now_s + TIMEOUT_S, self.latency_s()

        def arrive() -> None:
            up = target not in self.down
            answer = serve() if up else None
            if on_way_s >= TIMEOUT_S:
                return  # the caller has given up
            back_s = self.now_s + self.latency_s() if up else self.now_s
            arrives = not up or (back_s < fails_s and self._arrives(target, source))
            self.at(back_s if arrives else fails_s, lambda: done(answer if arrives else None))

        arrives = self._arrives(source, target)
        if arrives:
            self.at(self.now_s + on_way_s, arrive)
        if not arrives or on_way_s >= TIMEOUT_S:
            self.at(fails_s, lambda: done(None))

    def ask(self, source: str, target: str, serve: Callable[[], T]) -> T | None:
        """Send a request and return the answer, both at the present time; None if one of the two is lost.

        This is for requests whose duration changes nothing. It saves two events.
        """
        if source == target:
            return serve()
        if not self._arrives(source, target) or target in self.down:
            return None
        answer = serve()
        return answer if self._arrives(target, source) else None
