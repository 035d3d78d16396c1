"""The worker's side: copies chunks between the KV cache and raykv, as ordered by the scheduler's side.

Saves run on one separate thread after a step's forward pass. Full blocks do not change, so the next steps do not wait.
The exception is a request that ended or was preempted: vLLM may give its blocks to another request. The next step then
waits for the saves of that request, and cancels saves that do not begin within `store_timeout_s`.

Loads run on separate threads. The engine does not touch the blocks of a loading request, even after an abort, until the
load is reported as finished. Therefore every load, also a failed one, must be reported exactly once.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
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
from raykv.integrations.vllm.metadata import Load, Rank, Save, Scope, StepOrders
from raykv.integrations.vllm.stats import RayKVStats
from raykv.protocol.namespace import Namespace
from raykv.types import KeyArray, Match, NodeId, Path, PutResult

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.worker")

IDLE_WAIT_S: Final = 0.005
"""A step without computation waits at most this long for a load. Without this wait the engine's thread would spin and
hold the GIL, which the load threads need. The wait delays a new request by at most this time."""
MAX_SAVING_STEPS: Final = 16
"""Saves of at most this many steps are in flight. Saves of further steps are skipped."""


class _Run(NamedTuple):
    """Consecutive chunks to store. `depth` chunks come before them; the last of those has the key `parent`."""

    keys: KeyArray
    blocks: Sequence[Sequence[int]]
    parent: KeyArray | None
    depth: int

    def part(self, start: int, stop: int) -> "_Run":
        parent = self.keys[start - 1 : start] if start else self.parent
        return _Run(self.keys[start:stop], self.blocks[start:stop], parent, self.depth + start)


@dataclass(slots=True)
class _LoadResult:
    """The result of a load: the first `chunks` chunks arrived. `sources` counts arrived chunks by holder and path."""

    chunks: int = 0
    sources: Counter[tuple[NodeId, Path]] = field(default_factory=Counter)
    seconds: float = 0.0


class WorkerSide:
    """Loads and saves the chunks of one worker.

    Attributes:
        loading: Loads in flight, by request id.
        saving: One entry per step with saves in flight: its requests, its number of chunks, and the result.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        stats: RayKVStats,
        *,
        layout: Layout,
        namespace: Namespace,
        rank: Rank,
        connection: Connection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. Only the engine's thread writes `stats`."""
        self._config, self._stats, self._clock = config, stats, clock
        self._layout, self._namespace, self._rank, self._connection = layout, namespace, rank, connection
        self._counts_tokens = rank == (0, 0)  # all ranks load the same tokens, so only one counts them
        self._threads = ThreadPoolExecutor(config.load_threads, thread_name_prefix="raykv-load")
        self.loading: dict[str, tuple[Load, Future[_LoadResult]]] = {}
        self._failed_blocks: set[int] = set()
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="raykv-save")
        self.saving: deque[tuple[set[str], int, Future[list[PutResult]]]] = deque()

    # -- loads ----------------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        """Start the ordered loads in the background."""
        for load in orders.loads:
            client = self._connection.client(self._namespace, load.scope)
            future = self._threads.submit(self._load, client, load, self._clock())
            self.loading[load.request_id] = (load, future)

    def await_load(self) -> None:
        """Wait up to IDLE_WAIT_S for the next load to end, if any is in flight."""
        if self.loading:
            wait([future for _, future in self.loading.values()], IDLE_WAIT_S, FIRST_COMPLETED)

    def pop_finished(self) -> set[str]:
        """Return the requests whose load has ended or failed since the last call. See also `pop_failed_blocks`."""
        finished = {request_id for request_id, (_, future) in self.loading.items() if future.done()}
        for request_id in finished:
            self._count_load(*self.loading.pop(request_id))
        return finished

    def pop_failed_blocks(self) -> set[int]:
        """Return the blocks that loads failed to fill since the last call. The engine recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _count_load(self, load: Load, future: Future[_LoadResult]) -> None:
        count, error = self._stats.count, future.exception()
        result = _LoadResult() if error else future.result()
        lost = {block for blocks in load.blocks[result.chunks :] for block in blocks if block is not None}
        self._failed_blocks |= lost
        whole = result.chunks == len(load.names)
        count("loads", 1, "whole" if whole else "partial" if result.chunks else "lost")
        count("load_seconds", result.seconds)
        if error:
            self._count_error("load", error)
        for (_, path), chunks in result.sources.items():
            count("loaded_bytes", chunks * self._layout.chunk_nbytes, path)
        if self._counts_tokens:
            chunk_tokens = self._namespace.chunk_tokens
            block_tokens = chunk_tokens // self._config.chunk_blocks
            written = sum(block is not None for blocks in load.blocks[: result.chunks] for block in blocks)
            count("reused_tokens", written * block_tokens)
            count("lost_tokens", len(lost) * block_tokens)
            for source, chunks in result.sources.items():
                count("loaded_tokens", chunks * chunk_tokens, *source)

    def _count_error(self, hook: str, error: BaseException) -> None:
        """Count an error of a load or a save. After a failed load, the engine recomputes. A failed save is ignored."""
        self._stats.count("errors", 1, hook, type(error).__name__)
        if not isinstance(error, RayKVError):
            logger.error("a %s failed because of a defect in raykv", hook, exc_info=error)

    def _load(self, client: "Client | None", load: Load, ordered_s: float) -> _LoadResult:
        """Load one request's chunks in batches, up to the first missing chunk."""
        result, size = _LoadResult(), self._layout.batch_chunks
        for start in range(0, len(load.names), size):
            left_s = ordered_s + self._config.load_timeout_s - self._clock()
            if client is None or left_s <= 0:
                break
            if not self._load_batch(client, load, slice(start, start + size), left_s, result):
                break
        result.seconds = self._clock() - ordered_s
        return result

    def _load_batch(self, client: "Client", load: Load, part: slice, timeout_s: float, result: _LoadResult) -> bool:
        """Load one batch, add it to `result`, and return whether all its chunks arrived."""
        blocks, holders = load.blocks[part], load.matches[self._rank].holders[part]
        targets = [self._layout.targets(each) for each in blocks]
        keys, match = client.keys(load.names[part]), Match(len(holders), holders)
        got = client.get(keys, targets, match=match, timeout_s=timeout_s)
        self._layout.load(list(zip(blocks, targets, strict=True))[: got.prefix])
        result.chunks += got.prefix
        result.sources.update(got.chunks_by_source)
        return got.prefix == len(blocks)

    # -- saves ----------------------------------------------------------------------------------------------------

    def prepare(self, saves: Sequence[Save]) -> None:
        """Request slots for these saves, unless the client has enough. The answer arrives while the step computes."""
        self._saver.submit(self._prepare, _chunks_of(saves))

    def save(self, saves: Sequence[Save]) -> None:
        """Begin to store computed chunks. The kernels that compute them have ended or are queued."""
        if len(self.saving) < MAX_SAVING_STEPS:
            future = self._saver.submit(self._save, saves, self._layout.fence())
            self.saving.append(({save.request_id for save in saves}, _chunks_of(saves), future))
        else:
            self._count_saved(_skipped(_chunks_of(saves), ""))

    def release(self, request_ids: Set[str]) -> None:
        """Wait until no save reads these requests' blocks. Cancel saves that do not begin within `store_timeout_s`."""
        until_s = self._clock() + self._config.store_timeout_s
        for saved_ids, _, future in self.saving:
            if not saved_ids.isdisjoint(request_ids):
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
                reason = self._count_saved(_skipped(chunks, "the request ended before the save began"))
            elif error := future.exception():
                self._count_error("save", error)
                reason = str(error)
            else:
                for part in future.result():
                    reason = self._count_saved(part) or reason
        return reason

    def _prepare(self, chunks: int) -> None:
        client = self._connection.client(self._namespace, Scope())
        if client is not None:
            # Nobody reads the result of this call. If it fails, `_save` fails too, and reports the error.
            client.prepare(self._layout.chunk_nbytes, chunks, timeout_s=self._config.store_timeout_s)

    def _save(self, saves: Sequence[Save], fence: Any) -> list[PutResult]:
        """Copy chunks in batches into the node's memory. Commit each batch with one message.

        Waits at most `store_timeout_s` for slots, and not at all if the client has enough.
        """
        deadline_s = self._clock() + self._config.store_timeout_s
        client = self._connection.client(self._namespace, Scope())
        if client is None:
            return [_skipped(_chunks_of(saves), "the node is not there yet")]
        results: list[PutResult] = []
        runs = [self._run(save, deadline_s, results) for save in saves]
        for batch in self._batches(runs):
            values = iter(self._layout.read([blocks for run in batch for blocks in run.blocks], fence))
            puts = [Put(run.keys, list(islice(values, len(run.blocks))), run.parent, run.depth) for run in batch]
            results.append(client.put_many(puts, wait=True, timeout_s=max(0.0, deadline_s - self._clock())))
        return [*results, client.flush(timeout_s=0.0)]  # `flush` returns late answers to earlier saves

    def _run(self, save: Save, deadline_s: float, results: list[PutResult]) -> _Run:
        """Return the chunks to store. Of `cached` chunks, skip those that nodes hold, or all if the lookup is slow."""
        client = self._connection.client(self._namespace, save.scope)
        assert client is not None, "clients of all scopes are made from one"
        above = [] if save.parent is None else [save.parent]
        keys, start = client.keys([*above, *save.names]), len(above)
        run = _Run(keys[start:], save.blocks, keys[:start] if above else None, save.depth)
        if not save.cached:
            return run
        held = client.match(run.keys, timeout_s=max(0.0, deadline_s - self._clock()), record=False).count
        if self._clock() >= deadline_s and held < len(run.keys):
            results.append(_skipped(len(run.keys), ""))  # no answer in time
            held = len(run.keys)
        return run.part(held, len(run.keys))

    def _batches(self, runs: Sequence[_Run]) -> Iterator[list[_Run]]:
        """Split the chunks into batches of at most `Layout.batch_chunks`."""
        size = self._layout.batch_chunks
        chunks = [(number, place) for number, run in enumerate(runs) for place in range(len(run.blocks))]
        for start in range(0, len(chunks), size):
            batch = []
            for number, group in groupby(chunks[start : start + size], itemgetter(0)):
                places = [place for _, place in group]
                batch.append(runs[number].part(places[0], places[-1] + 1))
            yield batch

    def _count_saved(self, result: PutResult) -> str:
        """Add a result to the statistics. Return its reason for skipped chunks."""
        for outcome, chunks in (("stored", result.stored), ("existed", result.existed), ("skipped", result.skipped)):
            if chunks:
                self._stats.count("stored_chunks", chunks, outcome)
        return result.reason

    def close(self) -> None:
        """Cancel queued loads, wait for running loads and all saves, since they use the KV cache. Disconnect."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._saver.shutdown(wait=True)
        self._connection.close()


def _chunks_of(saves: Sequence[Save]) -> int:
    return sum(len(save.names) for save in saves)


def _skipped(chunks: int, reason: str) -> PutResult:
    return PutResult(0, 0, chunks, reason)
