"""What the scheduler's side knows of one request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raykv.integrations.vllm.metadata import Rank, Scope
from raykv.types import Match

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Lookup:
    """What was found beyond the engine's own hit of `computed` tokens: `count` chunks from `first` on, by rank."""

    computed: int
    first: int
    count: int
    matches: dict[Rank, Match]
    at_s: float


@dataclass(slots=True)
class Tracked:
    """A request since it was last admitted.

    Attributes:
        request: The engine's.
        scope: The scope of its keys.
        admission: How often it had been preempted by then. A new admission resets everything but the scope.
        lookup: The last lookup.
        ordered: A load was ordered. There is no second one: a load that brings nothing would repeat for ever.
        started: It was scheduled, so the fields below are known.
        cached: Leading chunks that the engine found in its own cache.
        loaded: Chunks after those that the load brought.
        offered: Leading chunks that are loaded, or handed to the worker to be stored.
    """

    request: "Request"
    scope: Scope
    admission: int = 0
    lookup: Lookup | None = None
    ordered: bool = False
    started: bool = False
    cached: int = 0
    loaded: range = range(0)
    offered: int = 0

    def start(self, computed: int) -> None:
        """Record how many chunks the engine has when it starts to compute: fewer than ordered, if the load failed."""
        self.started = True
        self.loaded = range(self.loaded.start, max(self.loaded.start, min(self.loaded.stop, computed)))
        self.cached = self.loaded.start if self.loaded else computed
