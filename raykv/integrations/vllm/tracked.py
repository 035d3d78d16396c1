"""What the scheduler's side knows of one request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raykv.integrations.vllm.metadata import Rank, Scope
from raykv.types import Match

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Lookup:
    """What was found beyond the engine's own hit of `computed` tokens: chunks from `first` on, by rank."""

    computed: int
    first: int
    count: int
    matches: dict[Rank, Match]
    at_s: float


@dataclass(slots=True)
class Tracked:
    """What is known of a request since it was last admitted.

    Attributes:
        request: The engine's.
        scope: Under which keys its chunks lie.
        admission: How often it had been preempted by then; a new admission starts anew.
        lookup: What was found last.
        ordered: A load was ordered. Not a second time: one that brought nothing would be repeated for ever.
        started: It was scheduled, so what follows is known.
        cached: Leading chunks that the engine found in its own cache.
        loaded: Chunks that the load brought, after those.
        offered: Leading chunks that need no more thought: loaded, or handed to the worker to be stored.
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
        """Take up how many chunks the engine has when it begins to compute: fewer than ordered, if the load failed."""
        self.started = True
        self.loaded = range(self.loaded.start, max(self.loaded.start, min(self.loaded.stop, computed)))
        self.cached = self.loaded.start if self.loaded else computed
