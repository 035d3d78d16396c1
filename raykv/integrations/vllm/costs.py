"""Decides whether a stored prefix is loaded or computed: whichever is expected to end sooner.

Both times are estimated from what this engine has measured: the tokens per second of its steps, and for each holder the
bytes per second of loads. A load waits for the loads before it on the same path. A computation waits for the tokens of
the requests before it. So a slow link gets as many loads as it can carry, and the engine computes the rest.
"""

from dataclasses import dataclass
from typing import Final

from raykv.types import NodeId

OLDER: Final = 0.8
"""Weight of the older measurements of the engine's steps."""
WINDOW_S: Final = 4.0
LEAST_TOKENS: Final = 32
"""Steps with fewer tokens do not count, because their time hardly depends on the number of tokens."""
LONGEST_STEP_S: Final = 30.0
"""A longer time between two steps is no step: the engine was idle or stopped."""
FIRST_TRIAL_S: Final = 10.0
LAST_TRIAL_S: Final = 300.0
"""A path that was too slow is tried again after FIRST_TRIAL_S, then after twice this time, up to LAST_TRIAL_S."""


@dataclass(slots=True)
class Path:
    """The loads from one holder.

    Attributes:
        nbytes, busy_s: Bytes of the loads, and seconds in which at least one of them ran. Both are halved when the
            seconds exceed WINDOW_S, so older loads count less.
        waiting_nbytes: Bytes of the loads that have not ended.
        free_at_s: When the last load ended.
        trial_at_s: From this time on, a load is tried even if the estimate is against it.
        trial_s: Time between two trials.
    """

    nbytes: float = 0.0
    busy_s: float = 0.0
    waiting_nbytes: int = 0
    free_at_s: float = 0.0
    trial_at_s: float = 0.0
    trial_s: float = FIRST_TRIAL_S

    def seconds(self, nbytes: int) -> float:
        """Return the expected time until these bytes have arrived; 0 before the first measurement."""
        return (self.waiting_nbytes + nbytes) * self.busy_s / self.nbytes if self.nbytes else 0.0

    def add(self, nbytes: int, began_s: float, ended_s: float) -> None:
        """Record a load that has ended."""
        took_s = ended_s - began_s
        if nbytes * self.busy_s > 2 * self.nbytes * took_s:  # more than twice as fast: the path has changed
            self.nbytes, self.busy_s, self.trial_at_s, self.trial_s = 0.0, 0.0, 0.0, FIRST_TRIAL_S
        self.nbytes += nbytes
        self.busy_s += max(ended_s - max(began_s, self.free_at_s), 0.0)
        self.free_at_s = max(ended_s, self.free_at_s)
        while self.busy_s > WINDOW_S:
            self.nbytes, self.busy_s = self.nbytes / 2, self.busy_s / 2


class Costs:
    """Estimates the times of loads and computations of one engine. All times are those of one monotonic clock.

    Attributes:
        seconds_per_token: Average time of a step for each of its tokens, 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._paths: dict[NodeId, Path] = {}
        self._loads: dict[str, tuple[NodeId, int, float]] = {}
        self._step: tuple[int, float] | None = None

    def add_step(self, tokens: int, now_s: float) -> None:
        """Record that a step with this number of tokens begins now. So the step before it has ended."""
        if self._step is not None:
            before, began_s = self._step
            if before >= LEAST_TOKENS and now_s - began_s < LONGEST_STEP_S:
                measured = (now_s - began_s) / before
                self.seconds_per_token = (
                    OLDER * self.seconds_per_token + (1 - OLDER) * measured if self.seconds_per_token else measured
                )
        self._step = (tokens, now_s) if tokens else None

    def is_load_sooner(self, holder: NodeId, nbytes: int, tokens: int, *, queued_tokens: int, now_s: float) -> bool:
        """Return whether a load is expected to end sooner than the computation of the same tokens.

        The delay that a computation means for requests that are loaded at the same time counts as its time, too.
        Without measurements, and from time to time, the answer is True, so that a path that has become fast is found.

        Args:
            nbytes: Size of the load.
            tokens: Number of tokens that the load saves.
            queued_tokens: Number of tokens that the engine computes before this request.
        """
        path = self._paths.setdefault(holder, Path())
        begins_s = now_s + queued_tokens * self.seconds_per_token
        ends_s = begins_s + tokens * self.seconds_per_token
        # Requests that are loaded meanwhile wait for the engine until the computation has ended.
        delays_s = sum(max(0.0, ends_s - max(loaded_s, begins_s)) for _, _, loaded_s in self._loads.values())
        if now_s + path.seconds(nbytes) <= ends_s + delays_s:
            path.trial_s = FIRST_TRIAL_S
            return True
        if not self.seconds_per_token:
            return True
        if path.waiting_nbytes or now_s < path.trial_at_s:
            return False
        path.trial_at_s = now_s + path.trial_s
        path.trial_s = min(2 * path.trial_s, LAST_TRIAL_S)
        return True

    @property
    def loads_in_flight(self) -> int:
        return len(self._loads)

    def begin_load(self, request_id: str, holder: NodeId, nbytes: int, now_s: float) -> None:
        path = self._paths.setdefault(holder, Path())
        self._loads[request_id] = holder, nbytes, now_s + path.seconds(nbytes)
        path.waiting_nbytes += nbytes

    def end_load(self, request_id: str, began_s: float, ended_s: float) -> None:
        """Record a load that has ended. Loads that were not begun here are ignored."""
        holder, nbytes, _ = self._loads.pop(request_id, ("", 0, 0.0))
        if nbytes:
            path = self._paths[holder]
            path.waiting_nbytes -= nbytes
            path.add(nbytes, began_s, ended_s)
