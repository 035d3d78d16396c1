"""The routes of one deployment: chooses a replica for each request, and remembers what the replicas compute. No I/O.

A request that computes a new prefix reserves it: until the prefix is computed, the requests that follow with the same
prefix go to the same replica, whose engine finds it in its own cache. If this replica's queue is too long, they wait in
the router until raykv has the prefix, and load it elsewhere.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from statistics import fmean
from typing import Final, NamedTuple

from raykv.integrations.routing.choice import Estimate, Rates, RouterOptions, after, estimate, with_prefix
from raykv.integrations.routing.locations import Stored
from raykv.integrations.routing.prompts import Prompt
from raykv.integrations.routing.replicas import (
    DEFAULT_SECONDS_PER_TOKEN,
    EQUAL_ENGINES,
    SECONDS_PER_BYTE,
    Replica,
)
from raykv.integrations.routing.report import ReplicaReport

MAX_OPEN: Final = 16_384
"""At most this many requests are followed to their end; the oldest are forgotten first."""
MAX_OTHERS: Final = 8
"""With each request, the estimates of at most this many next best replicas are remembered: the best may be full."""
MAX_RESERVED: Final = 65_536
"""At most this many prefixes are reserved; the oldest are forgotten first."""
POLL_S: Final = 0.02
"""Between two looks for a prefix that should be stored by now."""
GRACE: Final = 0.25
"""A prefix may be computed this part later than expected, and GRACE_S. Then its reservation ends."""
GRACE_S: Final = 0.5
MIN_GAIN: Final = 1.05
"""No request waits in the router for a smaller factor between costs, because estimates are not better than that."""
CHANCE_S: Final = 1.0
"""Added to the recent work of each replica, so that little work changes little."""
MIN_SHARE: Final = 0.8
MAX_SHARE: Final = 1.25
"""Limits of `Estimate.share`."""


class Choice(NamedTuple):
    """The estimates of all replicas, best first, and why the first is best.

    Attributes:
        wait_s: Wait for this long and choose again, instead of sending the request now.
    """

    order: list[Estimate]
    reason: str
    wait_s: float = 0.0


@dataclass(slots=True)
class Reservation:
    """A prefix that a replica is computing."""

    replica_id: str
    request_id: str
    ready_s: float
    ends_s: float


@dataclass(slots=True)
class Open:
    """A request that was sent to a replica and has not ended.

    Attributes:
        others: The estimates of the next best replicas, when this one was chosen.
    """

    prompt: Prompt
    estimate: Estimate
    others: Sequence[Estimate] = ()


class Routes:
    """Chooses among the replicas of one deployment. All times are seconds on one monotonic clock."""

    def __init__(self, options: RouterOptions, rng: Random) -> None:
        self._options, self._rng = options, rng
        self.replicas: dict[str, Replica] = {}
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._reserved: OrderedDict[bytes, Reservation] = OrderedDict()
        self._rates: dict[str, Rates] = {}
        self._default_rates = Rates(DEFAULT_SECONDS_PER_TOKEN)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def update(self, reports: dict[str, ReplicaReport | None], now_s: float) -> None:
        """Use the list of running replicas, with their reports. None: this replica has sent none, or a wrong one."""
        for replica_id in set(self.replicas) - set(reports):
            self.drop(replica_id)
        for replica_id, report in reports.items():
            replica = self.replicas.setdefault(replica_id, Replica())
            if report is not None and report != replica.report:
                replica.update(report, now_s)
        self._measure()
        byte_s: dict[str, list[float]] = {}
        for kind, each_s in chain.from_iterable(replica.measured_by_kind() for replica in self.replicas.values()):
            byte_s.setdefault(kind, []).append(each_s)
        assumed = {kind: fmean(byte_s.get(kind, [default_s])) for kind, default_s in SECONDS_PER_BYTE.items()}
        for replica in self.replicas.values():
            replica.assumed = assumed

    def _measure(self) -> None:
        """Use the measured rates of all replicas. One without a measurement is expected to be like the others."""
        tokens_s = _smoothed({name: each.seconds_per_token for name, each in self.replicas.items()})
        steps_s = _smoothed({name: each.seconds_per_step for name, each in self.replicas.items()})
        token_s = fmean(tokens_s.values()) if tokens_s else DEFAULT_SECONDS_PER_TOKEN
        step_s = fmean(steps_s.values()) if steps_s else 0.0
        self._default_rates = Rates(token_s, step_s)
        self._rates = {
            name: Rates(tokens_s.get(name, token_s), steps_s.get(name, step_s)) for name in {**tokens_s, **steps_s}
        }

    def drop(self, replica_id: str) -> None:
        """Forget a replica that has died."""
        self.replicas.pop(replica_id, None)
        for key in [key for key, each in self._reserved.items() if each.replica_id == replica_id]:
            del self._reserved[key]

    # -- choosing ---------------------------------------------------------------------------------------------------

    def choose(
        self, prompt: Prompt, stored: Stored | None, candidates: Sequence[str], *, wait_left_s: float, now_s: float
    ) -> Choice:
        """Choose among the candidates.

        Args:
            stored: The chunks of the prompt in raykv. None: raykv has not answered.
            candidates: Ids of running replicas, at least one.
            wait_left_s: The request may wait in the router for this long.
        """
        known = stored or Stored()
        order = self._estimates(candidates, prompt, known, now_s)
        reserved = self._longest_reserved(prompt, now_s)
        if stored is None and not reserved and not any(each.cached_tokens for each in order):
            return Choice(self._power_of_two(order), "power of two choices")
        best = order[0]
        if reserved is not None:
            reservation = reserved[1]
            wait_s = max(reservation.ready_s - now_s, POLL_S)
            later = self._best_later(prompt, known, order, reserved, wait_s, now_s)
            gains = later is not None and MIN_GAIN * later.wait_cost_s < best.wait_cost_s
            if gains and wait_s <= wait_left_s:
                return Choice(order, "waits", wait_s)
            if best.replica_id == reservation.replica_id and best.cached_tokens:
                return Choice(order, "computing")
        return Choice(order, best.reason)

    def settled(self, prompt: Prompt, at_best: Stored, candidates: Sequence[str], *, now_s: float) -> Choice | None:
        """Choose without an answer of raykv, if none would change the choice. None: raykv must be asked.

        None would if a replica has the beginning of the prompt, loads no more of it, and costs less than all others
        with everything stored.

        Args:
            at_best: All chunks with known names, without holders. The estimates of the other replicas assume it.
        """
        if not any(self.replicas[each].cached(prompt.keys) for each in candidates if each in self.replicas):
            return None
        if self._longest_reserved(prompt, now_s) is not None:
            return None
        order = self._estimates(candidates, prompt, at_best, now_s)
        best = order[0]
        return Choice(order, best.reason) if 0 < best.cached_tokens == best.stored_tokens else None

    def begin(self, request_id: str, prompt: Prompt, order: Sequence[Estimate], now_s: float) -> None:
        """The request goes to the first replica of `order`. Reserves the segments that nobody has.

        An earlier choice for it must have been withdrawn.
        """
        chosen, *others = order
        replica = self.replicas.get(chosen.replica_id)
        if replica is None:
            return
        fills = max(prompt.tokens - chosen.cached_tokens, 0)
        work_s = chosen.load_s + chosen.compute_s
        ready_s = now_s + chosen.queue_s + work_s + chosen.step_s
        replica.begin(request_id, prompt.keys, fills=fills, work_s=work_s, now_s=now_s)
        self._open[request_id] = Open(prompt, chosen, others[:MAX_OTHERS])
        reservation = Reservation(chosen.replica_id, request_id, ready_s, ready_s + GRACE * (ready_s - now_s) + GRACE_S)
        known = prompt.tokens - chosen.compute_tokens
        for key, end in zip(prompt.keys, prompt.ends, strict=True) if self._options.role != "decode" else ():
            if end > known and not self._is_reserved(key, now_s):
                self._reserved[key] = reservation
                self._reserved.move_to_end(key)
        while len(self._reserved) > MAX_RESERVED:
            self._reserved.popitem(last=False)
        while len(self._open) > MAX_OPEN:
            oldest, found = next(iter(self._open.items()))
            self.end(oldest, found.estimate.replica_id, now_s)

    def sent(self, request_id: str, replica_id: str, now_s: float) -> tuple[str, Estimate] | None:
        """Ray Serve has sent a request to a replica.

        Returns:
            None if it is the chosen one. Otherwise why it is another one, and the estimate: the chosen one was full, or
            the prompt could not be read, so none was chosen.
        """
        found = self._open.get(request_id)
        if found is not None and found.estimate.replica_id == replica_id:
            return None
        reason, prompt = "power of two choices", Prompt([])
        estimates: Sequence[Estimate] = ()
        if found is not None:
            reason, prompt, estimates = "full", found.prompt, found.others
            self.withdraw(request_id)
        if replica_id not in self.replicas:
            return None
        estimates = [each for each in estimates if each.replica_id == replica_id] or self._estimates(
            [replica_id], prompt, Stored(), now_s
        )
        self.begin(request_id, prompt, estimates, now_s)
        return reason, estimates[0]

    def chosen(self, request_id: str) -> str | None:
        """Return the replica that was chosen for a request which has not ended."""
        found = self._open.get(request_id)
        return None if found is None else found.estimate.replica_id

    def withdraw(self, request_id: str) -> None:
        """A request was not sent to the chosen replica after all. Does nothing if none was chosen."""
        found = self._open.pop(request_id, None)
        if found is None:
            return
        replica = self.replicas.get(found.estimate.replica_id)
        if replica is not None:
            replica.undo(request_id)
        self._release(found, request_id)

    def end(self, request_id: str, replica_id: str, now_s: float) -> None:
        """A request has ended on a replica. Does nothing if another one was chosen since: this one had rejected it."""
        if self.chosen(request_id) != replica_id:
            return
        found = self._open.pop(request_id)
        replica = self.replicas.get(replica_id)
        if replica is not None:
            replica.end(request_id, now_s)
        self._release(found, request_id)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _estimates(self, candidates: Sequence[str], prompt: Prompt, stored: Stored, now_s: float) -> list[Estimate]:
        """Return the estimates of the candidates, best first.

        A second of work delays more requests on a replica that gets more of them. So it counts more on a replica to
        which this router sent more work of late. A conversation can leave it if a load elsewhere takes less than a
        quarter of the time that its turn takes to compute.
        """
        replicas = {each: self._replica(each) for each in candidates}
        recent_s = {name: each.recent_work_s(now_s) + CHANCE_S for name, each in replicas.items()}
        mean_s = fmean(recent_s.values())
        found = []
        for name, replica in replicas.items():
            rates = self._rates.get(name, self._default_rates)
            one = estimate(name, replica, prompt, stored, options=self._options, rates=rates, now_s=now_s)
            found.append(one._replace(share=min(max(recent_s[name] / mean_s, MIN_SHARE), MAX_SHARE)))
        return sorted(found, key=lambda each: (each.cost_s, self._rng.random()))

    def _replica(self, replica_id: str) -> Replica:
        found = self.replicas.get(replica_id)
        if found is None:
            found = self.replicas[replica_id] = Replica()
        return found

    def _power_of_two(self, order: list[Estimate]) -> list[Estimate]:
        """Draw two replicas, and put the one with less to do first."""
        drawn = self._rng.sample(order, min(2, len(order)))
        drawn.sort(key=lambda each: (each.queue_s + each.ongoing_s, self._rng.random()))
        return [*drawn, *(each for each in order if each not in drawn)]

    def _longest_reserved(self, prompt: Prompt, now_s: float) -> tuple[int, Reservation] | None:
        """Return the longest prefix that is being computed, as a number of segments."""
        for segments in range(len(prompt.keys), 0, -1):
            if self._is_reserved(prompt.keys[segments - 1], now_s):
                return segments, self._reserved[prompt.keys[segments - 1]]
        return None

    def _is_reserved(self, key: bytes, now_s: float) -> bool:
        found = self._reserved.get(key)
        return found is not None and now_s < found.ends_s

    def _best_later(
        self,
        prompt: Prompt,
        stored: Stored,
        order: list[Estimate],
        reserved: tuple[int, Reservation],
        wait_s: float,
        now_s: float,
    ) -> Estimate | None:
        """Return the best estimate of the request after the reserved prefix is in raykv. None: it is there already."""
        segments, reservation = reserved
        replica = self.replicas[reservation.replica_id]
        engine = replica.engine
        if engine is None or not engine.near:
            return None
        chunks = prompt.ends[segments - 1] // engine.chunk_tokens
        if chunks <= stored.chunks:
            return None
        later = with_prefix(stored, chunks, engine.near[:1], replica.digest)
        estimates = self._estimates([each.replica_id for each in order], prompt, later, now_s)
        return min((after(each, wait_s) for each in estimates), key=lambda each: each.cost_s)

    def _release(self, found: Open, request_id: str) -> None:
        for key in found.prompt.keys:
            reservation = self._reserved.get(key)
            if reservation is not None and reservation.request_id == request_id:
                del self._reserved[key]


def _smoothed(measured_s: Mapping[str, float]) -> dict[str, float]:
    """Return for each replica that has a time the mean of those that differ from it by less than EQUAL_ENGINES."""
    found = {name: own_s for name, own_s in measured_s.items() if own_s}
    return {name: _mean_of_equals(own_s, found.values()) for name, own_s in found.items()}


def _mean_of_equals(own_s: float, measured_s: Iterable[float]) -> float:
    return fmean(each_s for each_s in measured_s if own_s / EQUAL_ENGINES < each_s < own_s * EQUAL_ENGINES)
