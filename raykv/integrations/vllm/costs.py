"""Decides whether a stored prefix is loaded or computed: whichever is expected to end sooner.

Both times are estimated from measurements of this engine: the tokens per second of its steps, and the bytes per second
of the loads from each holder (a node that holds chunks). The loads from one holder form a path. A new load waits for
earlier loads on the same path. A new computation waits for the tokens of earlier requests. So a slow link gets only as
many loads as it can finish in time, and the engine computes the other prefixes.

A path that was too slow may become fast. So the engine probes such a path from time to time: it loads one chunk into
scratch memory while it computes the request. No request waits for a probe.
"""

from dataclasses import dataclass
from typing import Final

from raykv.integrations.vllm.metadata import LoadTimes
from raykv.types import NodeId

HALVED_TOKENS: Final = 4096
"""After this many tokens, earlier steps count half in the time of a token."""
WINDOW_S: Final = 4.0
LEAST_TOKENS: Final = 32
"""Steps with fewer tokens do not count in the time of a token, because their time hardly depends on the number."""
NEW_STEP: Final = 0.125
"""How much a new measurement counts in the time of a step that only continues answers."""
LONGEST_STEP_S: Final = 30.0
"""A longer time between two steps is not counted, because the engine was idle or stopped."""
PROBE_S: Final = 30.0
"""A path that was too slow is probed after this time without a load."""


@dataclass(slots=True)
class Path:
    """The loads from one holder.

    Attributes:
        nbytes, busy_s: Bytes that arrived, and seconds in which at least one load ran. Both are halved when `busy_s`
            exceeds WINDOW_S, so older loads count less.
        waiting_nbytes: Bytes of the loads that have not ended.
        free_at_s: Time at which the last load ended.
    """

    nbytes: float = 0.0
    busy_s: float = 0.0
    waiting_nbytes: int = 0
    free_at_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return the expected time until these bytes have arrived; 0 before the first measurement."""
        return (self.waiting_nbytes + nbytes) * self.busy_s / max(self.nbytes, 1.0)

    def add(self, nbytes: int, began_s: float, ended_s: float) -> None:
        """Record a load that has ended. `nbytes`: the bytes that arrived."""
        took_s = ended_s - began_s
        if nbytes * self.busy_s > 2 * self.nbytes * took_s:  # the rate has more than doubled: the path has changed
            self.nbytes, self.busy_s = 0.0, 0.0
        self.nbytes += nbytes
        self.busy_s += max(ended_s - max(began_s, self.free_at_s), 0.0)
        self.free_at_s = max(ended_s, self.free_at_s)
        while self.busy_s > WINDOW_S:
            self.nbytes, self.busy_s = self.nbytes / 2, self.busy_s / 2


class Costs:
    """Estimates the times of loads and computations of one engine. All times are seconds on one monotonic clock.

    Attributes:
        seconds_per_token: Time of the last steps, divided by their number of tokens. 0 before the first measurement.
        seconds_per_step: Time of the last steps that only continued answers. 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.seconds_per_token = self.seconds_per_step = 0.0
        self._tokens, self._tokens_s = 0.0, 0.0
        self._paths: dict[NodeId, Path] = {}
        self._loads: dict[str, tuple[NodeId, int, float]] = {}
        self._step: tuple[int, float, bool] | None = None  # tokens, when it began, whether it follows one of few tokens

    def add_step(self, tokens: int, now_s: float) -> None:
        """Record that a step with this number of tokens begins now, and that the previous step has ended."""
        follows_few = False
        if self._step is not None:
            before, began_s, was_after_few = self._step
            took_s, follows_few = now_s - began_s, before < LEAST_TOKENS
            if took_s >= LONGEST_STEP_S:
                pass
            elif before >= LEAST_TOKENS:
                # Weighted by tokens: else many small steps, which take longer for each token, would hide large ones.
                older = 0.5 ** (before / HALVED_TOKENS)
                self._tokens = older * self._tokens + before
                self._tokens_s = older * self._tokens_s + took_s
                self.seconds_per_token = self._tokens_s / self._tokens
            elif was_after_few:  # else it may have been scheduled while a prefill still ran
                new = NEW_STEP if self.seconds_per_step else 1.0
                self.seconds_per_step += new * (took_s - self.seconds_per_step)
        self._step = (tokens, now_s, follows_few) if tokens else None

    def is_load_sooner(self, holder: NodeId, nbytes: int, tokens: int, *, queued_tokens: int, now_s: float) -> bool:
        """Return whether a load is expected to end sooner than the computation of the same tokens.

        A request that is being loaded may have to wait for the computation. This delay is added to the computation's
        time.
        Before the first measurement of a step the answer is True.

        Args:
            nbytes: Size of the load.
            tokens: Number of tokens that the load saves.
            queued_tokens: Number of tokens that the engine computes before this request.
        """
        path = self._paths.setdefault(holder, Path())
        begins_s = now_s + queued_tokens * self.seconds_per_token
        ends_s = begins_s + tokens * self.seconds_per_token
        # A request whose load ends during the computation must wait until the computation ends.
        delays_s = sum(max(0.0, ends_s - max(loaded_s, begins_s)) for _, _, loaded_s in self._loads.values())
        return not self.seconds_per_token or now_s + path.seconds(nbytes) <= ends_s + delays_s

    def is_probe_due(self, holder: NodeId, now_s: float) -> bool:
        """Return whether a path should be probed because nothing was loaded from it for PROBE_S."""
        path = self._paths.setdefault(holder, Path())
        return not path.waiting_nbytes and now_s >= path.free_at_s + PROBE_S

    def seconds_per_byte(self) -> dict[NodeId, float]:
        """Return the measured time of a byte for each path that was used, the last used path last."""
        used = sorted((path for path in self._paths.items() if path[1].nbytes), key=lambda each: each[1].free_at_s)
        return {name: path.busy_s / path.nbytes for name, path in used}

    @property
    def loads_in_flight(self) -> int:
        return len(self._loads)

    def begin_load(self, request_id: str, holder: NodeId, nbytes: int, now_s: float) -> None:
        """Record a load or a probe that is ordered now."""
        path = self._paths.setdefault(holder, Path())
        self._loads[request_id] = holder, nbytes, now_s + path.seconds(nbytes)
        path.waiting_nbytes += nbytes

    def end_load(self, request_id: str, ended: LoadTimes) -> None:
        """Record a load or a probe that has ended. Does nothing without an earlier `begin_load`."""
        holder, nbytes, _ = self._loads.pop(request_id, ("", 0, 0.0))
        if nbytes:
            path = self._paths[holder]
            path.waiting_nbytes -= nbytes
            path.add(ended.nbytes, ended.began_s, ended.ended_s)
