"""What the scheduler's side knows of the requests."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from vllm.v1.request import RequestStatus

from raykv.integrations.vllm.epochs import Epochs, Statement
from raykv.integrations.vllm.hand_off import MAX_PAUSE_S, pause_s
from raykv.integrations.vllm.hints import NO_HINTS, RequestHints
from raykv.integrations.vllm.lookups import Found
from raykv.integrations.vllm.metadata import LoadTimes, Scope

if TYPE_CHECKING:
    from vllm.v1.request import Request

LOOKUP_WAIT_S: Final = 0.001
"""A step without computation waits at most this long for a lookup. Without this wait the engine's thread would spin and
hold the GIL, which the lookup needs."""


@dataclass(slots=True)
class Lookup:
    """The result of a lookup. The engine had `computed` tokens already. `at_s`: the time at which the lookup ended."""

    computed: int
    found: Found
    at_s: float


@dataclass(slots=True)
class Asking:
    """A running lookup.

    Attributes:
        computed: Number of tokens that the engine had already, as `Lookup.computed`.
        future: The future result.
        follows_s: Since when it waits for a prefill engine, on the monotonic clock. 0: it does not.
    """

    computed: int
    future: Future[Found]
    follows_s: float = 0.0

    @property
    def pause_s(self) -> float:
        """How long an idle step may wait for this lookup."""
        return pause_s(time.monotonic() - self.follows_s) if self.follows_s else LOOKUP_WAIT_S


@dataclass(slots=True)
class Tracked:
    """The state of a request since its start or its last preemption.

    Attributes:
        admission: Number of preemptions so far. A preemption resets all fields except the scope and the hints.
        asking: The running lookup.
        cached_lookup: The lookup of chunks that are in the engine's own cache. It is made only if a decode engine
            continues the request.
        ordered: Whether a load was ordered or declined. Then no other load is ordered, because a load that always fails
            would repeat for ever.
        started: Whether the request was scheduled. From then on `cached` and `loaded` are known.
        cached: Number of leading tokens that the engine found in its own cache.
        loaded: End of the loaded tokens, as a number of tokens. 0: nothing was loaded.
        offered: For each group, by index, the number of leading chunks that were considered for a save.
        hints: The valid hints of the request.
        load_times: The ended load. None: there was none, or it has not ended.
        mixed: Whether the request may have KV of weights before the last reset. If so, the request neither loads nor
            stores.
    """

    request: "Request"
    scope: Scope
    admission: int = 0
    lookup: Lookup | None = None
    asking: Asking | None = None
    cached_lookup: Future[Found] | None = None
    ordered: bool = False
    started: bool = False
    cached: int = 0
    loaded: int = 0
    offered: dict[int, int] = field(default_factory=dict)
    hints: RequestHints = NO_HINTS
    load_times: LoadTimes | None = None
    mixed: bool = False

    def found(self, deadline_s: float) -> list[Found]:
        """Return the results of the lookups, of which the last one may end until the deadline."""
        found = [] if self.lookup is None else [self.lookup.found]
        cached = self.cached_lookup
        if cached is not None:
            wait([cached], max(0.0, deadline_s - time.monotonic()))
        return [*found, cached.result()] if cached is not None and cached.done() and not cached.exception() else found

    @property
    def has_kv(self) -> bool:
        """Whether the request has KV, or a load of KV was ordered."""
        return self.loaded > 0 or self.request.num_computed_tokens > 0

    def start(self, computed: int) -> None:
        """Set `cached` and `loaded` when the request is first scheduled.

        Args:
            computed: Number of tokens that the engine has at this time. Lower than planned if a load has failed.
        """
        self.started = True
        self.loaded = min(self.loaded, computed)
        self.cached = min(self.lookup.computed, computed) if self.loaded and self.lookup else computed


def hands_over(request: "Request") -> bool:
    """Return whether a decode engine continues this request."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


class TrackedRequests(dict[str, Tracked]):
    """Every request between `SchedulerSide.add` and `finish`, by its id.

    Attributes:
        epochs: Knows the epoch of all new loads and saves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs = Epochs()

    def add(self, request: "Request", scope: Scope, hints: RequestHints) -> Tracked:
        """Track a request from now on, in the present epoch."""
        scope = replace(scope, epoch=self.epochs.current)
        tracked = self[request.request_id] = Tracked(request, scope, request.num_preemptions, hints=hints)
        return tracked

    def current(self, request: "Request") -> Tracked:
        """Return the state of a request. After a preemption, make a new state."""
        tracked = self[request.request_id]
        if tracked.admission == request.num_preemptions:
            return tracked
        return self.add(request, tracked.scope, tracked.hints)

    def await_lookups(self) -> float:
        """In an idle step, wait a little until a lookup ends. Return how long workers may wait after that for loads.

        If a request waits for a load, only the workers wait.
        """
        asking = [tracked.asking for tracked in self.values() if tracked.asking]
        limit_s = min((each.pause_s for each in asking), default=MAX_PAUSE_S)
        if not asking or any(each.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for each in self.values()):
            return limit_s
        wait([each.future for each in asking], limit_s, FIRST_COMPLETED)
        return 0.0

    def tokens_before(self, tracked: Tracked | None) -> int:
        """Return how many tokens the engine has to compute for the requests before this one. None: for all requests."""
        queued = 0
        for other in self.values():
            if other is tracked:
                break
            if other.started or not other.loaded:
                queued += other.request.num_tokens - other.request.num_computed_tokens
        return queued

    def add_loads(self, ended: Mapping[str, LoadTimes]) -> None:
        """Remember the ended loads. Probes belong to no request."""
        for request_id in ended.keys() & self.keys():
            self[request_id].load_times = ended[request_id]

    def reset(self) -> None:
        """Begin a private epoch. Requests that have KV count as `mixed` until they are preempted."""
        self.epochs.reset()
        for tracked in self._enter_epoch():
            tracked.mixed = True

    def accept(self, statements: Sequence[Statement]) -> bool:
        """End the private epoch, if the statements allow it. Return whether it has ended.

        KV that was computed since the last reset is stored once more, so that other engines can share it.
        """
        if not self.epochs.accept(statements):
            return False
        for tracked in self._enter_epoch():
            tracked.scope, tracked.offered = replace(tracked.scope, epoch=self.epochs.current), {}
            if tracked.started:
                tracked.cached, tracked.loaded = max(tracked.cached, tracked.loaded), 0
        return True

    def _enter_epoch(self) -> list[Tracked]:
        """Move the requests without KV to the present epoch. Return the requests that have KV."""
        current = [self.current(tracked.request) for tracked in list(self.values())]
        for tracked in current:
            if not tracked.has_kv:
                self.add(tracked.request, tracked.scope, tracked.hints)
        return [tracked for tracked in current if tracked.has_kv]
