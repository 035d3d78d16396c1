"""The worker's side: copies chunks between the KV cache and raykv, as ordered by the scheduler's side.

Saves run on one separate thread after a step's forward pass. Full blocks do not change, so the next steps do not wait.
The exception is a block that vLLM has given to another use. The next step then waits for the saves that read this
block, and cancels saves that do not begin within `store_timeout_s`.

Loads run on separate threads. The engine does not touch the blocks of a loading request, even after an abort, until the
load is reported as finished. Therefore every load, also a failed one, must be reported exactly once.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.logger import init_logger

from raykv import Put
from raykv.errors import RayKVError
from raykv.integrations.kv_layout import Layout
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.epochs import EpochDropper, Statement, is_private
from raykv.integrations.vllm.events import Reporter
from raykv.integrations.vllm.groups import Group
from raykv.integrations.vllm.metadata import Load, LoadedChunks, LoadTimes, Rank, Save, Scope, StepOrders, WorkerReport
from raykv.integrations.vllm.stats import RayKVStats
from raykv.protocol.namespace import Namespace
from raykv.types import NO_HINTS, Hints, KeyArray, Match, NodeId, Path, PutResult, Scattered

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.worker")

IDLE_WAIT_S: Final = 0.005
"""A step without computation waits at most this long for a load. Without this wait the engine's thread would spin and
hold the GIL, which the load threads need. The wait delays a new request by at most this time."""
MAX_SAVING_STEPS: Final = 16
"""Saves of at most this many steps are in flight. Saves of further steps are skipped."""


class _Run(NamedTuple):
    """Consecutive chunks of save `number` to store. `depth` chunks precede them; `parent` is the last one's key."""

    keys: KeyArray
    blocks: Sequence[Sequence[int]]
    parent: KeyArray | None
    depth: int
    hints: Hints
    number: int

    def part(self, start: int, stop: int) -> "_Run":
        parent = self.keys[start - 1 : start] if start else self.parent
        part = self._replace(keys=self.keys[start:stop], blocks=self.blocks[start:stop])
        return part._replace(parent=parent, depth=self.depth + start)

    def put(self, values: Sequence[Scattered]) -> Put:
        ttl_s, priority = self.hints
        return Put(self.keys, values, self.parent, self.depth, ttl_s=ttl_s or None, priority=priority)


@dataclass(slots=True)
class _LoadResult:
    """The result of a load.

    Attributes:
        chunks: Number of chunks that arrived before the first missing chunk, over all parts of the load.
        sources: Number of arrived chunks by holder and path, in the part with the most chunks.
        nbytes: Number of arrived bytes by path, in all parts.
        began_s, ended_s: When a thread began the load, and when it ended.
    """

    chunks: int = 0
    sources: Counter[tuple[NodeId, Path]] = field(default_factory=Counter)
    nbytes: Counter[Path] = field(default_factory=Counter)
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankCache:
    """The KV cache of one worker.

    Attributes:
        namespace: Of the first rank that holds the same bytes.
        groups: The groups whose chunks are stored, by index.
        layouts: The layout of each group, by index.
        replica: (Number of this rank, number of ranks) among the tensor ranks that hold the same bytes. Each of these
            ranks stores a share of the chunks.
        counts_tokens: Whether this rank counts the loaded tokens. All ranks load the same tokens.
    """

    namespace: Namespace
    groups: Mapping[int, Group]
    layouts: Mapping[int, Layout]
    replica: tuple[int, int] = (0, 1)
    counts_tokens: bool = True

    @property
    def is_prefix(self) -> bool:
        """Whether leading chunks are of use without the others. Then vLLM recomputes only the others."""
        return len(self.groups) == 1 and all(group.whole for group in self.groups.values())

    @property
    def rank(self) -> Rank:
        return self.namespace.pp_rank, self.namespace.tp_rank


class WorkerSide:
    """Loads and saves the chunks of one worker.

    Attributes:
        loading: Loads in flight, by request id.
        stated: The last statement of the revision of the weights, until the next report.
        saving: One entry per step with saves in flight: the blocks they read, their number of chunks, and the result.
        reporter: Reports which chunks are stored. None: the engine publishes no KV events.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        stats: RayKVStats,
        *,
        cache: RankCache,
        connection: Connection,
        reporter: Reporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. Only the engine's thread writes `stats`."""
        self._config, self._stats, self._clock = config, stats, clock
        self._cache, self._layouts, self._connection = cache, cache.layouts, connection
        self._threads = ThreadPoolExecutor(config.load_threads, thread_name_prefix="raykv-load")
        self.loading: dict[str, tuple[Load, Future[_LoadResult]]] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._ended: dict[str, LoadTimes] = {}
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="raykv-save")
        self.saving: deque[tuple[set[int], int, Future[list[PutResult]]]] = deque()
        self.reporter = reporter
        self._epoch, self._dropper = "", EpochDropper()
        self.stated: list[Statement] = []

    def enter(self, epoch: str) -> None:
        """Enter the epoch of this step. Loads of other epochs count as lost. A private epoch that has ended is dropped.

        It is dropped after the saves of earlier steps, which may store chunks in it.
        """
        if epoch != self._epoch:
            ended, self._epoch = self._epoch, epoch
            self._saver.submit(self._drop, ended)

    def _drop(self, epoch: str) -> None:
        client = self._connection.client(self._cache.namespace, Scope(epoch=epoch))
        if is_private(epoch) and client is not None:
            self._dropper.drop(client)

    # -- loads ----------------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        """Start the ordered loads in the background."""
        for load in orders.loads:
            client = self._connection.client(self._cache.namespace, load.scope)
            future = self._threads.submit(self._load, client, load, self._clock())
            self.loading[load.request_id] = (load, future)

    def await_work(self) -> None:
        """Wait up to IDLE_WAIT_S for the end of a load, or of a save that must be reported, if any is in flight."""
        running: list[Future[Any]] = [future for _, future in self.loading.values()]
        if self.reporter is not None and self.saving:
            running.append(self.saving[0][2])
        if running:
            wait(running, IDLE_WAIT_S, FIRST_COMPLETED)

    def pop_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load has ended since the last call, and those of them that must be recomputed.

        If the engine has one group of full attention, it recomputes single blocks instead: see `pop_failed_blocks`.
        """
        ended = [load for load, future in self.loading.values() if future.done()]
        for load in ended:
            self._count_load(*self.loading.pop(load.request_id))
        finished = {load.request_id for load in ended if not load.is_probe}
        failed, self._failed_requests = self._failed_requests, set()
        return finished, failed

    def pop_report(self) -> WorkerReport | None:
        """Return the loads and saves that ended, and statements, since the last call; None if there are none.

        If the node has not answered for all saved chunks, collect its answers on the thread that saves.
        """
        (ended, self._ended), (stated, self.stated) = (self._ended, {}), (self.stated, [])
        stored = {} if self.reporter is None else self.reporter.pop()
        if self.reporter is not None and self.reporter.is_waiting and not self.saving:
            self.save([])
        return WorkerReport(self._clock(), ended, stored, stated) if ended or stored or stated else None

    def pop_failed_blocks(self) -> set[int]:
        """Return the blocks that loads failed to fill since the last call. The engine recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _count_load(self, load: Load, future: Future[_LoadResult]) -> None:
        count, error = self._stats.count, future.exception()
        result = _LoadResult() if error else future.result()
        self._ended[load.request_id] = LoadTimes(result.began_s, result.ended_s, result.nbytes.total())
        if load.is_probe:
            return
        if load.scope.epoch != self._epoch:
            result = _LoadResult(began_s=result.began_s, ended_s=result.ended_s)
        whole = result.chunks == sum(len(part.names) for part in load.parts)
        if not whole:
            self._add_failure(load, result.chunks)
        count("loads", 1, "whole" if whole else "partial" if result.chunks else "lost")
        count("load_seconds", result.ended_s - result.began_s)
        if error:
            self._count_error("load", error)
        for path, nbytes in result.nbytes.items():
            count("loaded_bytes", nbytes, path)
        if self._cache.counts_tokens:
            part = _longest(load)
            group, usable = self._cache.groups[part.group], result.chunks if whole or self._cache.is_prefix else 0
            blocks = [[block is not None for block in chunk] for chunk in part.blocks]
            count("reused_tokens", sum(map(sum, blocks[:usable])) * group.block_tokens)
            count("lost_tokens", sum(map(sum, blocks[usable:])) * group.block_tokens)
            for source, chunks in result.sources.items():
                count("loaded_tokens", chunks * group.chunk_tokens, *source)

    def _add_failure(self, load: Load, chunks: int) -> None:
        """Have the engine recompute what is missing after the first `chunks` chunks of a load."""
        if not self._cache.is_prefix:
            self._failed_requests.add(load.request_id)
            return
        for part in load.parts:
            self._failed_blocks |= {block for blocks in part.blocks[chunks:] for block in blocks if block is not None}

    def _count_error(self, hook: str, error: BaseException) -> None:
        """Count an error of a load or a save. After a failed load, the engine recomputes. A failed save is ignored."""
        self._stats.count("errors", 1, hook, type(error).__name__)
        if not isinstance(error, RayKVError):
            logger.error("a %s failed because of a defect in raykv", hook, exc_info=error)

    def _load(self, client: "Client | None", load: Load, ordered_s: float) -> _LoadResult:
        """Load one request's chunks in batches, up to the first missing chunk."""
        result, longest = _LoadResult(began_s=self._clock()), _longest(load)
        batches = [
            (part, slice(start, start + self._layouts[part.group].batch_chunks))
            for part in load.parts
            for start in range(0, len(part.names), self._layouts[part.group].batch_chunks)
        ]
        for part, batch in batches:
            left_s = ordered_s + self._config.load_timeout_s - self._clock()
            if client is None or left_s <= 0:
                break
            if not self._load_batch(client, part, batch, left_s, result, counts=part is longest):
                break
        result.ended_s = self._clock()
        return result

    def _load_batch(
        self, client: "Client", part: LoadedChunks, batch: slice, timeout_s: float, result: _LoadResult, *, counts: bool
    ) -> bool:
        """Load one batch, add it to `result`, and return whether all its chunks arrived."""
        layout, blocks, holders = self._layouts[part.group], part.blocks[batch], part.holders[self._cache.rank][batch]
        targets = [layout.targets(each) for each in blocks]
        keys, match = client.keys(part.names[batch]), Match(len(holders), tuple(holders))
        got = client.get(keys, targets, match=match, timeout_s=timeout_s)
        layout.load(list(zip(blocks, targets, strict=True))[: got.prefix])
        result.chunks += got.prefix
        result.nbytes.update(got.nbytes_by_path)
        if counts:
            result.sources.update(got.chunks_by_source)
        return got.prefix == len(blocks)

    # -- saves ----------------------------------------------------------------------------------------------------

    def mine(self, saves: Sequence[Save]) -> list[Save]:
        """Return the saves of this rank. Ranks that hold the same bytes share the work by the names of the chunks."""
        number, ranks = self._cache.replica
        return [save for save in saves if save.names[0][0] % ranks == number]

    def prepare(self, saves: Sequence[Save]) -> None:
        """Request slots for these saves, unless the client has enough. The answer arrives while the step computes."""
        chunks = Counter(save.group for save in saves for _ in save.names)
        self._saver.submit(self._prepare, chunks, Scope(epoch=saves[0].scope.epoch))

    def save(self, saves: Sequence[Save]) -> None:
        """Begin to store computed chunks. The kernels that compute them have ended or are queued."""
        if len(self.saving) < MAX_SAVING_STEPS:
            fence = next(iter(self._layouts.values())).fence()
            blocks = {block for save in saves for chunk in save.blocks for block in chunk}
            future = self._saver.submit(self._save, saves, fence)
            self.saving.append((blocks, _chunks_of(saves), future))
            if self.reporter is not None:
                self.reporter.watch(saves, future)
        else:
            self._count_saved(_skipped(_chunks_of(saves), ""))
            if self.reporter is not None:
                self.reporter.skip(saves)

    def release(self, blocks: Set[int]) -> None:
        """Wait until no save reads these blocks. Cancel saves that do not begin within `store_timeout_s`."""
        until_s = self._clock() + self._config.store_timeout_s
        for saved, _, future in self.saving:
            if not saved.isdisjoint(blocks):
                wait([future], max(0.0, until_s - self._clock()))
                if not future.cancel():
                    wait([future])

    def count_saves(self) -> str:
        """Add the ended saves to the statistics. Never waits.

        Returns:
            Why chunks were not stored, for example no room or no node: the last such reason, or "".
        """
        reason = ""
        while self.saving and self.saving[0][2].done():
            _, chunks, future = self.saving.popleft()
            if future.cancelled():
                reason = self._count_saved(_skipped(chunks, "the engine reused their blocks before the save began"))
            elif error := future.exception():
                self._count_error("save", error)
                reason = str(error)
            else:
                for part in future.result():
                    reason = self._count_saved(part) or reason
        return reason

    def _prepare(self, chunks: Mapping[int, int], scope: Scope) -> None:
        client = self._connection.client(self._cache.namespace, scope)
        for group, count in chunks.items():
            if client is not None:
                # Nobody reads the result of this call. If it fails, `_save` fails too, and reports the error.
                client.prepare(self._layouts[group].chunk_nbytes, count, timeout_s=self._config.store_timeout_s)

    def _save(self, saves: Sequence[Save], fence: Any) -> list[PutResult]:
        """Store chunks, and collect late answers to earlier saves. Without saves, wait a short time for these answers.

        Waits at most `store_timeout_s` for slots, and not at all if the client has enough.
        """
        deadline_s = self._clock() + self._config.store_timeout_s
        # All saves of a step are of one epoch, and so of one quota group.
        scope = Scope(epoch=saves[0].scope.epoch if saves else "")
        client = self._connection.client(self._cache.namespace, scope)
        if client is None:
            if self.reporter is not None:
                self.reporter.skip(saves)
            return [_skipped(_chunks_of(saves), "the node is not there yet")]
        is_answered = False
        try:
            results = self._put(client, saves, fence, deadline_s)
            late = client.flush(timeout_s=0.0 if saves else self._config.store_timeout_s)
            is_answered = not late.posted
        finally:
            if self.reporter is not None:
                self.reporter.settle(client, saves, is_answered=is_answered)
        return [*results, late]

    def _put(self, client: "Client", saves: Sequence[Save], fence: Any, deadline_s: float) -> list[PutResult]:
        """Copy chunks in batches into the node's memory. Commit each batch with one message."""
        results: list[PutResult] = []
        for index, layout in self._layouts.items():
            runs = [self._run(save, deadline_s, results) for save in saves if save.group == index]
            for batch in _batches(runs, layout.batch_chunks):
                values = iter(layout.read([blocks for run in batch for blocks in run.blocks], fence))
                puts = [run.put(list(islice(values, len(run.blocks)))) for run in batch]
                result = client.put_many(puts, wait=True, timeout_s=max(0.0, deadline_s - self._clock()))
                results.append(result)
                if self.reporter is not None:
                    is_stored = not result.skipped and not result.posted
                    for run in batch:
                        self.reporter.add(run.number, run.keys, run.depth, is_stored=is_stored)
        return results

    def _run(self, save: Save, deadline_s: float, results: list[PutResult]) -> _Run:
        """Return the chunks to store. Of `cached` chunks, skip those that nodes hold, or all if the lookup is slow."""
        client = self._connection.client(self._cache.namespace, save.scope)
        assert client is not None, "clients of all scopes are made from one"
        above = [] if save.parent is None else [save.parent]
        keys, start = client.keys([*above, *save.names]), len(above)
        above_key, hints = keys[:start] if above else None, save.hints or NO_HINTS
        run = _Run(keys[start:], save.blocks, above_key, save.depth, hints, save.number)
        if not save.cached:
            return run
        held = client.match(run.keys, timeout_s=max(0.0, deadline_s - self._clock()), record=False).count
        if self._clock() >= deadline_s and held < len(run.keys):
            results.append(_skipped(len(run.keys), ""))  # no answer in time
            held = len(run.keys)
        return run.part(held, len(run.keys))

    def _count_saved(self, result: PutResult) -> str:
        """Add a result to the statistics. Return its reason for skipped chunks."""
        for outcome, chunks in (("stored", result.stored), ("existed", result.existed), ("skipped", result.skipped)):
            if chunks:
                self._stats.count("stored_chunks", chunks, outcome)
        return result.reason

    def close(self) -> None:
        """Cancel queued loads, wait for running loads and all saves, since they use the KV cache. Disconnect.

        A private epoch ends with its engine.
        """
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.enter("")
        self._saver.shutdown(wait=True)
        self._dropper.close()
        self._connection.close()


def _batches(runs: Sequence[_Run], size: int) -> Iterator[list[_Run]]:
    """Split the chunks into batches of at most `size` chunks."""
    chunks = [(number, place) for number, run in enumerate(runs) for place in range(len(run.blocks))]
    for start in range(0, len(chunks), size):
        batch = []
        for number, group in groupby(chunks[start : start + size], itemgetter(0)):
            places = [place for _, place in group]
            batch.append(runs[number].part(places[0], places[-1] + 1))
        yield batch


def _longest(load: Load) -> LoadedChunks:
    """Return the part with the most chunks. Its tokens are those that the load saves the engine from computing."""
    return max(load.parts, key=lambda part: len(part.names))


def _chunks_of(saves: Sequence[Save]) -> int:
    return sum(len(save.names) for save in saves)


def _skipped(chunks: int, reason: str) -> PutResult:
    return PutResult(0, 0, chunks, reason)
