"""The worker's side: copies chunks between the KV cache and raykv, as ordered by the scheduler's side.

Saves run on one separate thread after a step's forward pass. Full blocks do not change, so the next steps do not wait
for saves, and a save waits for the node up to `save_timeout_s`. But if vLLM gives a block to another use, the next step
waits for the saves that read this block, and ends those that do not begin or get slots within `store_timeout_s`. Chunks
for other nodes are copied out of their blocks before they are sent, so a step never waits for the network.

Loads run on separate threads. The engine does not touch the blocks of a loading request, even after an abort, until the
load is reported as finished. Therefore every load, even a failed one, must be reported exactly once.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

from raykv.errors import RayKVError
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.epochs import EpochDropper, Statement, is_private
from raykv.integrations.vllm.events import Reporter, Stored
from raykv.integrations.vllm.groups import Group
from raykv.integrations.vllm.hand_off import Notes, PrefillChunks, pause_s
from raykv.integrations.vllm.metadata import (
    Load,
    LoadedChunks,
    LoadTimes,
    Save,
    Scope,
    StepOrders,
    WorkerNamespaces,
    WorkerReport,
)
from raykv.integrations.vllm.rank_store import RankCache, RankStore, chunks_of
from raykv.integrations.vllm.saving import RECLAIMED, Patience, Saving
from raykv.integrations.vllm.stats import RayKVStats
from raykv.types import NodeId, Path, PutResult

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.worker")

IDLE_WAIT_S: Final = 0.002
"""A step without computation waits at most this long for a load. Without this wait the engine's thread would spin and
hold the GIL, which the load threads need. A new request waits at most this long for the step to end. The wait is longer
while all loads follow prefill engines, because they take as long as the prefill: see `pause_s`."""
MAX_SAVING_STEPS: Final = 16
"""Saves of at most this many steps are in flight. Saves of further steps are skipped."""
MAX_FOLLOWED: Final = 16
"""At most this many loads wait at once for the chunks of running prefill engines."""


@dataclass(slots=True)
class _LoadResult:
    """The result of a load.

    Attributes:
        chunks: Number of chunks that arrived before the first missing chunk, over all parts of the load.
        sources: Number of arrived chunks by holder and path, in the part with the most chunks.
        nbytes: Number of arrived bytes by path, in all parts.
        began_s, ended_s: When a thread began and ended the load.
    """

    chunks: int = 0
    sources: Counter[tuple[NodeId, Path]] = field(default_factory=Counter)
    nbytes: Counter[Path] = field(default_factory=Counter)
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """The KV cache of one worker.

    Attributes:
        ranks: The parts of the cache, one for each rank under which this worker stores KV.
        groups: The groups whose chunks are stored, by index.
        replica: (Index of this worker, number of workers) among the workers that hold the same bytes. Each of these
            workers stores a share of the chunks.
        counts_tokens: Whether this worker counts the loaded tokens. Only one does, because all load the same tokens.
    """

    ranks: Sequence[RankCache]
    groups: Mapping[int, Group]
    replica: tuple[int, int] = (0, 1)
    counts_tokens: bool = True

    @property
    def is_prefix(self) -> bool:
        """Whether vLLM can use the chunks before the first missing chunk of a load, and recomputes only the rest."""
        return len(self.groups) == 1 and all(group.whole for group in self.groups.values())

    def handshake(self) -> WorkerNamespaces:
        """Return what the scheduler needs to know."""
        sizes = Counter[int]()
        for rank in self.ranks:
            sizes.update({index: layout.chunk_nbytes for index, layout in rank.layouts.items()})
        return WorkerNamespaces({rank.rank: rank.namespace for rank in self.ranks}, dict(sizes))


class WorkerSide:
    """Loads and saves the chunks of one worker.

    Attributes:
        loading: Loads in flight, by request id.
        stated: The last statement of the revision of the weights, until the next report.
        saving: One entry per step with saves in flight.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        stats: RayKVStats,
        *,
        cache: WorkerCache,
        connection: Connection,
        publishes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. Only the engine's thread writes `stats`. `publishes`: report which chunks are stored."""
        self._config, self._stats, self._clock = config, stats, clock
        self._cache, self._connection = cache, connection
        reporters = [Reporter() if publishes else None for _ in cache.ranks]
        self._reporters = [reporter for reporter in reporters if reporter is not None]
        self._stores = [
            RankStore(rank, connection, reporter=reporter, clock=clock)
            for rank, reporter in zip(cache.ranks, reporters, strict=True)
        ]
        self._threads = ThreadPoolExecutor(config.load_threads, thread_name_prefix="raykv-load")
        self._followers = ThreadPoolExecutor(MAX_FOLLOWED, thread_name_prefix="raykv-follow")
        self._closing = Event()
        self.loading: dict[str, tuple[Load, Future[_LoadResult]]] = {}
        self._ordered_s = 0.0  # when the last load was ordered
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._ended: dict[str, LoadTimes] = {}
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="raykv-save")
        self.saving: deque[Saving] = deque()
        self._epoch, self._dropper = "", EpochDropper()
        self.stated: list[Statement] = []

    def enter(self, epoch: str) -> None:
        """Enter the epoch of this step. Loads of other epochs count as lost.

        If a private epoch has ended, its chunks are dropped after the saves of earlier steps, because these saves may
        still store chunks in that epoch.
        """
        if epoch != self._epoch:
            ended, self._epoch = self._epoch, epoch
            self._saver.submit(self._drop, ended)

    def _drop(self, epoch: str) -> None:
        for store in self._stores if is_private(epoch) else ():
            client = store.client(Scope(epoch=epoch))
            if client is not None:
                self._dropper.drop(client)

    # -- loads ----------------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        """Start the ordered loads in the background."""
        for load in orders.loads:
            clients = [store.client(load.scope) for store in self._stores]
            if load.hand_off:
                future = self._followers.submit(self._follow, clients, load)
            else:
                future = self._threads.submit(self._load, clients, load, self._clock())
            self.loading[load.request_id] = (load, future)
            self._ordered_s = self._clock()

    def await_work(self, idle_s: float) -> None:
        """If a load is in flight, or a save that must be reported, wait at most `idle_s` until one of them ends."""
        running: list[Future[Any]] = [future for _, future in self.loading.values()]
        if self._reporters and self.saving:
            running.append(self.saving[0].future)
        if running:
            follows = all(load.hand_off for load, _ in self.loading.values()) and not self.saving
            limit_s = pause_s(self._clock() - self._ordered_s) if follows else IDLE_WAIT_S
            wait(running, min(idle_s, limit_s), FIRST_COMPLETED)

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
        """Return the loads and saves that have ended since the last call, and new statements. None: nothing to report.

        If the node has not answered for all saved chunks, collect its answers on the thread that saves.
        """
        (ended, self._ended), (stated, self.stated) = (self._ended, {}), (self.stated, [])
        stored: Stored = {}
        for reporter in self._reporters:
            for number, chunks in reporter.pop().items():
                stored.setdefault(number, []).extend(chunks)
        if not self.saving and any(reporter.is_waiting for reporter in self._reporters):
            self.save([])
        return WorkerReport(self._clock(), ended, stored, stated) if ended or stored or stated else None

    def pop_failed_blocks(self) -> set[int]:
        """Return the blocks that loads failed to fill since the last call. The engine recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _count_load(self, load: Load, future: Future[_LoadResult]) -> None:
        count, error = self._stats.count, future.exception()
        result = _LoadResult() if error else future.result()
        sources = tuple((node, path, chunks) for (node, path), chunks in result.sources.items())
        self._ended[load.request_id] = LoadTimes(result.began_s, result.ended_s, result.nbytes.total(), sources)
        if load.is_probe:
            return
        if load.scope.epoch != self._epoch:
            result = _LoadResult(began_s=result.began_s, ended_s=result.ended_s)
        whole = result.chunks == sum(len(part.names) for part in load.parts)
        if not whole:
            self._add_failure(load, result.chunks)
        count("loads", 1, "whole" if whole else "partial" if result.chunks else "lost")
        if not load.hand_off:
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

    def _load(self, clients: "Sequence[Client | None]", load: Load, ordered_s: float) -> _LoadResult:
        """Load one request's chunks in batches, up to the first missing chunk. `clients`: one for each rank."""
        result, longest = _LoadResult(began_s=self._clock()), _longest(load)
        deadline_s = ordered_s + self._config.load_timeout_s
        for part in load.parts:
            size = min(store.batch_chunks(part.group) for store in self._stores)
            starts = range(0, len(part.names), size)
            batches = (slice(start, min(start + size, len(part.names))) for start in starts)
            if not all(
                self._load_batch(clients, part, batch, deadline_s, result, counts=part is longest) for batch in batches
            ):
                break
        result.ended_s = self._clock()
        return result

    def _follow(self, clients: "Sequence[Client | None]", load: Load) -> _LoadResult:
        """Load the chunks of a prompt as a prefill engine stores them, up to the first that does not come in time.

        This thread waits for the chunks. The threads for loads copy them, so that few copies run at once.
        """
        result, (part,), timeout_s = _LoadResult(began_s=self._clock()), load.parts, self._config.load_timeout_s
        connected = [client for client in clients if client is not None]
        prefill = PrefillChunks(
            Notes(self._connection),
            load.hand_off,
            timeout_s=self._config.hand_off_timeout_s,  # a step of the prefill engine may take long
            closing=self._closing,
            clock=self._clock,
        )
        size, done = min(store.batch_chunks(part.group) for store in self._stores), 0
        while done < len(part.names) and len(connected) == len(clients):
            stored = prefill.wait(connected, part.names[done : done + size])
            batch, deadline_s = slice(done, done + stored), self._clock() + timeout_s
            copied = stored and self._threads.submit(
                self._load_batch, clients, part, batch, deadline_s, result, counts=True
            )
            if not copied or not copied.result():
                break
            done = batch.stop
            logger.debug("%s: %d of %d chunks are loaded", load.request_id, done, len(part.names))
        result.ended_s = self._clock()
        return result

    def _load_batch(
        self,
        clients: "Sequence[Client | None]",
        part: LoadedChunks,
        batch: slice,
        deadline_s: float,
        result: _LoadResult,
        *,
        counts: bool,
    ) -> bool:
        """Load one batch for all ranks, add it to `result`, and return whether all its chunks arrived."""
        start, stop = batch.start, batch.stop
        for store, client in zip(self._stores, clients, strict=True):
            left_s = deadline_s - self._clock()
            if client is None or left_s <= 0:
                return False
            got = store.load(client, part, slice(start, stop), left_s)
            result.nbytes.update(got.nbytes_by_path)
            if counts and store is self._stores[0]:  # all ranks load the same tokens
                result.sources.update(got.chunks_by_source)
            stop = start + got.prefix  # a chunk counts only if it arrives for all ranks
            if stop == start:
                return False
        result.chunks += stop - start
        return stop == batch.stop

    # -- saves ----------------------------------------------------------------------------------------------------

    def mine(self, saves: Sequence[Save]) -> list[Save]:
        """Return the saves for this worker. If several workers have the same bytes, each save goes to one of them."""
        number, workers = self._cache.replica
        return [save for save in saves if save.names[0][0] % workers == number]

    def prepare(self, saves: Sequence[Save]) -> None:
        """Request slots for these saves, unless the client has enough. The answer arrives while the step computes."""
        chunks = Counter(save.group for save in saves for _ in save.names)
        self._saver.submit(self._prepare, chunks, Scope(epoch=saves[0].scope.epoch))

    def save(self, saves: Sequence[Save]) -> None:
        """Begin to store computed chunks. The kernels that compute them have ended or are queued."""
        if len(self.saving) < MAX_SAVING_STEPS:
            fence = self._stores[0].fence()
            blocks = {block for save in saves for chunk in save.blocks for block in chunk}
            saving = Saving(blocks, self._chunks_of(saves), ranks=len(self._stores))
            saving.watch(self._saver.submit(self._save, saves, fence, saving))
            self.saving.append(saving)
            for reporter in self._reporters:
                reporter.watch(saves, saving.future)
        else:
            self._count_saved(PutResult(0, 0, self._chunks_of(saves)))
            for reporter in self._reporters:
                reporter.skip(saves)

    def release(self, blocks: Set[int]) -> None:
        """Wait until no save reads these blocks. End saves that do not begin or get slots within `store_timeout_s`."""
        reading = [number for number, saving in enumerate(self.saving) if not saving.blocks.isdisjoint(blocks)]
        if not reading:
            return
        until_s = self._clock() + self._config.store_timeout_s
        for number in range(reading[-1] + 1):  # one thread saves, so earlier saves must not wait either
            self.saving[number].needed.set()
        for number in reading:
            saving = self.saving[number]
            if not saving.free.is_set():
                wait([saving.future], max(0.0, until_s - self._clock()))
            saving.reclaim()

    def count_saves(self) -> str:
        """Add the ended saves to the statistics. Never waits.

        Returns:
            The last reason why chunks were not stored, for example no room or no node. Empty if there is none.
        """
        reason = ""
        while self.saving and self.saving[0].future.done():
            saving = self.saving.popleft()
            future = saving.future
            if future.cancelled():
                reason = self._count_saved(PutResult(0, 0, saving.chunks, RECLAIMED))
            elif error := future.exception():
                self._count_error("save", error)
                reason = str(error)
            else:
                for part in future.result():
                    reason = self._count_saved(part) or reason
        return reason

    def _prepare(self, chunks: Mapping[int, int], scope: Scope) -> None:
        for store in self._stores:
            store.prepare(chunks, scope, self._config.store_timeout_s)

    def _save(self, saves: Sequence[Save], fence: Any, saving: Saving) -> list[PutResult]:
        """Store chunks, and collect late answers to earlier saves. If `saves` is empty, wait a short time for them."""
        short_s, long_s = self._config.store_timeout_s, self._config.save_timeout_s
        until_s = self._clock() + long_s
        if any(store.sends(saves) for store in self._stores):
            patience = Patience(self._clock, long_s, until_s, self._closing.is_set)
            return self._on_all_ranks(saves, lambda store: store.send(saves, fence, saving, patience=patience))
        patience = Patience(self._clock, short_s, until_s, lambda: saving.needed.is_set() or self._closing.is_set())
        with saving.reading() as may_read:
            if may_read:
                return self._on_all_ranks(
                    saves, lambda store: store.save(saves, fence, patience=patience, flush_s=0.0 if saves else short_s)
                )
        for store in self._stores:
            store.skip(saves)
        return [PutResult(0, 0, saving.chunks, RECLAIMED)]

    def _on_all_ranks(self, saves: Sequence[Save], save: Callable[[RankStore], list[PutResult]]) -> list[PutResult]:
        results: list[PutResult] = []
        for number, store in enumerate(self._stores):
            try:
                results += save(store)
            except Exception:
                for other in self._stores[number + 1 :]:  # a chunk is useful only if all ranks store it
                    other.skip(saves)
                raise
        return results

    def _chunks_of(self, saves: Sequence[Save]) -> int:
        """Return the number of chunks to store, for all ranks."""
        return chunks_of(saves) * len(self._stores)

    def _count_saved(self, result: PutResult) -> str:
        """Add a result to the statistics. Return its reason for skipped chunks."""
        for outcome, chunks in (("stored", result.stored), ("existed", result.existed), ("skipped", result.skipped)):
            if chunks:
                self._stats.count("stored_chunks", chunks, outcome)
        return result.reason

    def close(self) -> None:
        """Cancel queued loads. Wait for running loads and all saves, because they use the KV cache. Disconnect.

        A private epoch ends with its engine, so its chunks are dropped.
        """
        self._closing.set()
        self._followers.shutdown(wait=True, cancel_futures=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.enter("")
        self._saver.shutdown(wait=True)
        self._dropper.close()
        self._connection.close()


def _longest(load: Load) -> LoadedChunks:
    """Return the part with the most chunks. It covers all tokens that the engine need not compute after the load."""
    return max(load.parts, key=lambda part: len(part.names))
