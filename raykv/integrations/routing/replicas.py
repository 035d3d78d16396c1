"""What a router knows of one replica: its engine's cache, its queue, and its measured rates. No I/O."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from raykv.integrations.routing.report import DISK, EngineReport, ReplicaReport, path_name
from raykv.types import NodeId

DEFAULT_CACHE_TOKENS: Final = 65_536
"""Assumed size of an engine's own cache before its first report."""
MAX_CACHED_PREFIXES: Final = 32_768
"""A router remembers at most this many prefixes of a replica's cache."""
EQUAL_ENGINES: Final = 3.0
"""Measured times of a token, and of a byte from an engine's own host, that differ by a smaller factor differ by chance.
Their mean counts for all these engines. Otherwise requests would leave an engine that has their KV because of chance,
and an engine whose first load was slow would get no more loads, and so never a better measurement."""
DEFAULT_SECONDS_PER_TOKEN: Final = 1e-4
"""Assumed before any engine of the deployment has measured its steps."""
HALVED_S: Final = 60.0
"""Work counts half as recent after this time."""
ARRIVAL_S: Final = 1.0
"""A report may not count a request that was sent this long before it: the request was on its way to the engine, or Ray
Serve has passed the report on so late."""
SECONDS_PER_BYTE: Final = {"near": 1 / 4e9, "far": 1 / 1e9, "disk": 1 / 0.5e9}
"""Assumed for kinds of paths that no engine has measured: memory of its host, other hosts, and SSD or file."""


@dataclass(slots=True)
class Ongoing:
    """A request that was sent to the replica and has not ended.

    Attributes:
        new: The prefixes that the replica did not have.
        fills: Number of tokens that it computes or loads. work_s: expected time for them.
        begun_s: When it was sent. ready_s: when the replica was expected to have computed it.
    """

    new: Sequence[bytes]
    fills: int
    work_s: float
    begun_s: float
    ready_s: float


class Replica:
    """One replica, as one router sees it.

    The engine's cache is not asked. The router remembers which prefixes it sent to the replica. It forgets a prefix
    when the engine has filled its whole cache since. The engine reports how much it fills, so requests of other routers
    count.

    Attributes:
        report: The replica's last report.
        digest: Digest of its engine's namespace. A digest takes long, and each report has a namespace of its own.
        ongoing: The requests that this router has sent there and that have not ended.
        assumed: Seconds per byte of paths that the engine has not measured, by kind.
    """

    def __init__(self) -> None:
        self.report, self.digest = ReplicaReport(), b""
        self.ongoing: dict[str, Ongoing] = {}
        self.assumed: Mapping[str, float] = SECONDS_PER_BYTE
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._filled, self._busy_until_s, self._reported_s = 0, 0.0, -ARRIVAL_S
        self._recent_s, self._recent_at_s = 0.0, 0.0

    @property
    def engine(self) -> EngineReport | None:
        return self.report.engine

    def update(self, report: ReplicaReport, now_s: float) -> None:
        """Use a new report. If the engine has other weights or was reset, its cache is empty."""
        before, engine = self.engine, report.engine
        if engine is None:
            self.report = report
            return
        if before is None or before.namespace != engine.namespace:
            self.digest = engine.namespace.digest
        if before is not None and before.namespace != engine.namespace:
            self._cached.clear()
        if before is None:  # until now the count began at 0
            shift = engine.filled_tokens - self._filled
            self._cached = OrderedDict((key, at + shift) for key, at in self._cached.items())
        self._filled = engine.filled_tokens if before is None else max(self._filled, engine.filled_tokens)
        self._use_queue(now_s - report.age_s, engine.queued_tokens * engine.seconds_per_token)
        self.report = report

    # -- the engine's cache -----------------------------------------------------------------------------------------

    def cached(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading segments the engine has, or is computing."""
        size = DEFAULT_CACHE_TOKENS if self.engine is None else self.engine.cache_tokens
        if not size:
            return 0
        low, high = 0, len(keys)
        while low < high:  # a prefix is there if a longer one is
            middle = (low + high + 1) // 2
            at = self._cached.get(keys[middle - 1])
            if at is not None and self._filled - at <= size:
                low = middle
            else:
                high = middle - 1
        return low

    def _add_prefixes(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the engine evicts the end of a prefix before its beginning
            self._cached[key] = self._filled
            self._cached.move_to_end(key)
        while len(self._cached) > MAX_CACHED_PREFIXES:
            self._cached.popitem(last=False)

    # -- the queue --------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, keys: Sequence[bytes], *, fills: int, work_s: float, now_s: float) -> None:
        """A request is sent to the replica.

        Args:
            keys: The prefixes of its prompt.
            fills: Number of tokens that it computes or loads.
            work_s: Expected time for them.
        """
        new = keys[self.cached(keys) :]
        self._filled += fills
        self._add_prefixes(keys)
        self._busy_until_s = max(self._busy_until_s, now_s) + work_s
        self._recent_s, self._recent_at_s = self.recent_work_s(now_s) + work_s, now_s
        self.ongoing[request_id] = Ongoing(new, fills, work_s, now_s, self._busy_until_s)

    def end(self, request_id: str, now_s: float) -> None:
        """A request has ended. The queue loses its share; requests of other routers may be in the rest."""
        ended = self.ongoing.pop(request_id, None)
        if ended is not None:
            rest_s = self._busy_until_s - self._share_s(ended)
            self._busy_until_s = max(rest_s, min(self._busy_until_s, now_s))

    def undo(self, request_id: str) -> None:
        """A request was not sent to the replica after all."""
        undone = self.ongoing.pop(request_id, None)
        if undone is not None:
            self._busy_until_s -= self._share_s(undone)
            self._recent_s -= undone.work_s * _faded(self._recent_at_s - undone.begun_s)
            self._filled = max(self._filled - undone.fills, 0 if self.engine is None else self.engine.filled_tokens)
            for key in undone.new:
                self._cached.pop(key, None)

    def queue_s(self, now_s: float) -> float:
        """Return the expected time until the replica has computed the requests before a new one."""
        return max(self._busy_until_s - now_s, 0.0)

    def answering(self, now_s: float) -> int:
        """Return how many requests are not in the queue any more, and have not ended."""
        return sum(each.ready_s <= now_s for each in self.ongoing.values())

    def _use_queue(self, reported_s: float, queue_s: float) -> None:
        """The engine had a queue of `queue_s` at `reported_s`. What was sent since then is added."""
        busy_s, sent_s = reported_s + queue_s, 0.0
        for each in self.ongoing.values():
            if each.begun_s > reported_s:
                busy_s = max(busy_s, each.begun_s) + each.work_s
            if each.begun_s > reported_s - ARRIVAL_S:
                sent_s = max(sent_s, each.begun_s) + each.work_s
        self._busy_until_s, self._reported_s = max(busy_s, sent_s), reported_s

    def _share_s(self, request: Ongoing) -> float:
        """Return the part of the queue that a request makes: its work that was not done at the last report."""
        return min(request.work_s, max(request.ready_s - self._reported_s, 0.0))

    def recent_work_s(self, now_s: float) -> float:
        """Return the time for the work that this router has sent there, of which old work counts less."""
        return self._recent_s * _faded(now_s - self._recent_at_s)

    # -- rates ------------------------------------------------------------------------------------------------------

    @property
    def seconds_per_token(self) -> float:
        """The measured time of a token; 0 before the first measurement."""
        return 0.0 if self.engine is None else self.engine.seconds_per_token

    @property
    def seconds_per_step(self) -> float:
        """The measured time of a step that only continues answers; 0 before the first measurement."""
        return 0.0 if self.engine is None else self.engine.seconds_per_step

    def is_near(self, holder: NodeId) -> bool:
        return self.engine is not None and holder in self.engine.near

    def seconds_per_byte(self, holders: Sequence[NodeId], *, below: bool) -> float:
        """Return the time of the fastest path to one of the holders; measured if possible. No holders: of all paths."""
        if not holders:
            measured = {} if self.engine is None else self.engine.seconds_per_byte
            return min([*measured.values(), *self.assumed.values()])
        return min(self._path_s(holder, below=below) for holder in holders)

    def _path_s(self, holder: NodeId, *, below: bool) -> float:
        measured = {} if self.engine is None else self.engine.seconds_per_byte
        own_s, kind = measured.get(path_name(holder, below=below)), self._kind(holder, below=below)
        mean_s = self.assumed[kind]
        if own_s and not (kind == "near" and mean_s / EQUAL_ENGINES < own_s < mean_s * EQUAL_ENGINES):
            return own_s
        return mean_s

    def measured_by_kind(self) -> list[tuple[str, float]]:
        """Return the measured times of a byte, each with the kind of its path."""
        measured = {} if self.engine is None else self.engine.seconds_per_byte
        return [
            (self._kind(path.removesuffix(DISK), below=path.endswith(DISK)), byte_s)
            for path, byte_s in measured.items()
        ]

    def _kind(self, holder: NodeId, *, below: bool) -> str:
        return "disk" if below else "near" if self.is_near(holder) else "far"


def _faded(age_s: float) -> float:
    """Return how much work counts after this time."""
    return float(0.5 ** (age_s / HALVED_S))
