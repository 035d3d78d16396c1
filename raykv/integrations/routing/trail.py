"""The last decisions of the routers of this process, for `raykv why --request ID`."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final
from weakref import WeakSet

MAX_TRAIL: Final = 4096
"""A router remembers its last decisions, at most this many."""


@dataclass(frozen=True, slots=True)
class Routed:
    """One decision.

    Attributes:
        request_id: Ray Serve's id of the request.
        deployment, replica: Names of the deployment, and of the replica that was chosen.
        reason: "cached": the replica's engine has the longest known prefix. "computing": an earlier request computes it
            there. "stored": its KV is loaded. "queue": nobody has the prompt's KV, and this replica is free first.
            "power of two choices": the router knows nothing of the prompt's KV. "full": the chosen replica was full, so
            Ray Serve took another one.
        tokens: Tokens of the prompt, estimated if not all were counted in time.
        cached_tokens, load_nbytes, compute_tokens: What the engine has, loads and computes.
        queue_s: Expected wait for earlier requests.
        cost_s: Expected time to the first token. `others_s`: that of the next best replicas.
        waited_s: How long the router waited until another replica had stored the prompt's prefix.
        took_s: Duration of the decision, without `waited_s`.
        at_s: When it was made, in seconds since 1970.
    """

    request_id: str
    deployment: str
    replica: str
    reason: str
    tokens: int = 0
    cached_tokens: int = 0
    load_nbytes: int = 0
    compute_tokens: int = 0
    queue_s: float = 0.0
    cost_s: float = 0.0
    others_s: tuple[tuple[str, float], ...] = ()
    waited_s: float = 0.0
    took_s: float = 0.0
    at_s: float = 0.0

    def __str__(self) -> str:
        """Return the line of the log."""
        what = f"compute {self.compute_tokens} tokens, load {self.load_nbytes} bytes, queue {self.queue_s:.3f} s"
        waited = f", waited {self.waited_s:.3f} s" if self.waited_s else ""
        where = f"{self.replica} of {self.deployment}"
        return f"routed {self.request_id} to {where} because {self.reason} ({what}{waited})"


class Trail:
    """The last decisions of one router."""

    def __init__(self) -> None:
        self._ring: deque[Routed] = deque(maxlen=MAX_TRAIL)
        _TRAILS.add(self)

    def add(self, routed: Routed) -> None:
        self._ring.append(routed)

    def __iter__(self) -> Iterator[Routed]:
        return iter(tuple(self._ring))


_TRAILS: WeakSet[Trail] = WeakSet()


def find(request_id: str | None = None) -> list[Routed]:
    """Return what the routers of this process decided for a request, in order of time. None: for all requests."""
    found = (each for each in chain(*_TRAILS) if request_id in (None, each.request_id))
    return sorted(found, key=lambda each: each.at_s)
