"""What the scheduler's side knows of a request."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.integrations.vllm.hints import NO_HINTS, RequestHints
from raykv.integrations.vllm.lookups import Found
from raykv.integrations.vllm.metadata import Scope

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Lookup:
    """The result of a lookup when the engine had `computed` tokens."""

    computed: int
    found: Found
    at_s: float


@dataclass(slots=True)
class Tracked:
    """The state of a request since its start or its last preemption.

    Attributes:
        admission: Number of preemptions so far. A preemption resets all fields except the scope and the hints.
        asking: The running lookup: (number of tokens that the engine had computed when it began, future result).
        ordered: Whether a load was ordered or declined. There is no second load, since a failing load could repeat for
            ever.
        started: Whether the request was scheduled. From then on `cached` and `loaded` are known.
        cached: Number of leading tokens that the engine found in its own cache.
        loaded: The loaded tokens end before this token.
        offered: For each group, by index, the number of leading chunks that were considered for a save.
        hints: How long to keep the request's chunks.
    """

    request: "Request"
    scope: Scope
    admission: int = 0
    lookup: Lookup | None = None
    asking: tuple[int, Future[Found]] | None = None
    ordered: bool = False
    started: bool = False
    cached: int = 0
    loaded: int = 0
    offered: dict[int, int] = field(default_factory=dict)
    hints: RequestHints = NO_HINTS

    def start(self, computed: int) -> None:
        """Set `cached` and `loaded` when the request is first scheduled with `computed` tokens.

        If a load has failed, this number is lower than planned.
        """
        self.started = True
        self.loaded = min(self.loaded, computed)
        self.cached = min(self.lookup.computed, computed) if self.loaded and self.lookup else computed
