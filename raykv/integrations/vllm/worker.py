"""The worker's side: carries out the orders, copying between the KV cache and raykv.

Saves happen on the engine's thread when a step's forward pass is over, because the blocks may be another request's in
the next step. Loads happen on threads of their own: the engine leaves a loading request's blocks alone, even if it is
aborted meanwhile, until the load is reported finished, so every load is reported exactly once, whatever becomes of it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from raykv.errors import RayKVError
from raykv.integrations.kv_layout import Layout
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.metadata import Load, Rank, Save, StepOrders
from raykv.integrations.vllm.stats import RayKVStats
from raykv.protocol.namespace import Namespace
from raykv.types import Match, NodeId, Path

if TYPE_CHECKING:
    from raykv import Client

logger = init_logger("vllm.raykv.worker")

IDLE_WAIT_S = 0.005
"""A step that computes nothing waits this long for a load, instead of being spun through: an engine that runs in one
process with its loads would starve them of the interpreter. A new request waits no longer than this."""

REST_PER_HANG = 10.0
"""After a save that ran into its timeout, none is tried for this many times as long: a node that hangs, which is worse
than one that is gone, costs the engine a tenth of its time at most."""


@dataclass(slots=True)
class _Arrived:
    """What became of one load.

    Attributes:
        chunks: Leading chunks that are in the KV cache.
        nbytes: Bytes that came, by path.
        sources: Chunks that came, by holder and path.
        seconds: From order to end.
        error: What went wrong, by name; empty where nothing did, or only chunks were missing.
    """

    chunks: int = 0
    nbytes: dict[Path, int] = field(default_factory=dict)
    sources: dict[tuple[NodeId, Path], int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


class WorkerSide:
    """One worker's copies."""

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
        """Start the loading threads.

        Args:
            config: The connector's.
            stats: Counts what is moved. Touched on the engine's thread only.
            layout: Of the KV cache.
            namespace: Of the chunks in it.
            rank: Whose they are. Tokens are counted by the first rank alone, as all ranks have a share of the same.
            connection: To the node.
            clock: Monotonic seconds.
        """
        self._config, self._stats, self._clock = config, stats, clock
        self._layout, self._namespace, self._rank, self._connection = layout, namespace, rank, connection
        self._counts_tokens = rank == (0, 0)
        self._threads = ThreadPoolExecutor(config.load_threads, thread_name_prefix="raykv-load")
        self._loading: dict[str, tuple[Load, Future[_Arrived]]] = {}
        self._failed_blocks: set[int] = set()
        self._saves_again_s = 0.0

    # -- loads ----------------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        """Start the loads among the orders, in the background. A second call for the same orders does nothing."""
        for load in orders.loads:
            client = self._connection.client(self._namespace, load.scope)
            future = self._threads.submit(self._load, client, load, self._clock())
            self._loading[load.request_id] = (load, future)
        orders.loads = []

    def await_load(self) -> None:
        """Wait a moment for the next load to end, if any is in flight."""
        if self._loading:
            wait([future for _, future in self._loading.values()], IDLE_WAIT_S, FIRST_COMPLETED)

    def take_finished(self) -> set[str]:
        """Say whose loads have ended, well or not; blocks that did not arrive are in `take_failed_blocks` by then."""
        finished = {request_id for request_id, (_, future) in self._loading.items() if future.done()}
        for request_id in finished:
            load, future = self._loading.pop(request_id)
            self._settle(load, future.result())
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Say which blocks hold nothing that could be used, of the loads that ended."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _settle(self, load: Load, arrived: _Arrived) -> None:
        count, wanted = self._stats.count, len(load.names)
        lost = {block for blocks in load.blocks[arrived.chunks :] for block in blocks if block is not None}
        self._failed_blocks |= lost
        count("loads", 1, "whole" if arrived.chunks == wanted else "partial" if arrived.chunks else "lost")
        count("load_seconds", arrived.seconds)
        if arrived.error:
            count("errors", 1, "load", arrived.error)
        for path, nbytes in arrived.nbytes.items():
            count("loaded_bytes", nbytes, path)
        if self._counts_tokens:
            chunk_tokens, block_tokens = self._namespace.chunk_tokens, self._block_tokens
            written = sum(block is not None for blocks in load.blocks[: arrived.chunks] for block in blocks)
            count("reused_tokens", written * block_tokens)
            count("lost_tokens", len(lost) * block_tokens)
            for source, chunks in arrived.sources.items():
                count("loaded_tokens", chunks * chunk_tokens, *source)

    @property
    def _block_tokens(self) -> int:
        return self._namespace.chunk_tokens // self._config.chunk_blocks

    def _load(self, client: "Client | None", load: Load, ordered_s: float) -> _Arrived:
        """Bring one request's chunks, batch by batch, until one is missing. Runs on a loading thread; never raises."""
        arrived = _Arrived()
        try:
            for start, stop in self._batches(len(load.names)):
                left_s = ordered_s + self._config.load_timeout_s - self._clock()
                if client is None or left_s <= 0:
                    break
                if not self._load_batch(client, load, range(start, stop), left_s, arrived):
                    break
        except RayKVError as error:
            arrived.error = type(error).__name__
        except Exception as error:
            # A defect. The engine must hear of this load all the same, or its request would wait for ever.
            logger.exception("a load failed in a way it should not; its request is recomputed")
            arrived.error = type(error).__name__
        arrived.seconds = self._clock() - ordered_s
        return arrived

    def _batches(self, chunks: int) -> Iterator[tuple[int, int]]:
        size = self._layout.batch_chunks or max(1, chunks)
        return ((start, min(start + size, chunks)) for start in range(0, chunks, size))

    def _load_batch(self, client: "Client", load: Load, chunks: range, timeout_s: float, arrived: _Arrived) -> bool:
        """Bring some of a load's chunks, add them to `arrived`, and say whether all came."""
        part = slice(chunks.start, chunks.stop)
        blocks, holders = load.blocks[part], load.matches[self._rank].holders[part]
        landings = [self._layout.landing(one) for one in blocks]
        keys, match = client.keys(load.names[part]), Match(len(holders), holders)
        result = client.get(keys, landings, match=match, timeout_s=timeout_s)
        self._layout.landed(list(zip(blocks, landings, strict=True))[: result.prefix])
        arrived.chunks += result.prefix
        for path, nbytes in result.nbytes_by_path.items():
            arrived.nbytes[path] = arrived.nbytes.get(path, 0) + nbytes
        for source, count in result.chunks_by_source.items():
            arrived.sources[source] = arrived.sources.get(source, 0) + count
        return result.prefix == len(chunks)

    # -- saves ----------------------------------------------------------------------------------------------------

    def save(self, saves: Sequence[Save]) -> str:
        """Store chunks that are computed. Those that are stored already cost a look.

        Returns:
            Why some were skipped: no room, or no node. Empty when none was.

        Raises:
            RayKVError: Something is wrong; the rest was not stored.
        """
        now_s = self._clock()
        if now_s < self._saves_again_s:
            self._stats.count("stored_chunks", sum(len(save.names) for save in saves), "skipped")
            return "the node hung a moment ago"
        reason = next(filter(None, [self._save(save) for save in saves]), "")
        took_s = self._clock() - now_s
        if reason and took_s >= self._config.store_timeout_s:
            self._saves_again_s = self._clock() + REST_PER_HANG * took_s
        return reason

    def _save(self, save: Save) -> str:
        client = self._connection.client(self._namespace, save.scope)
        if client is None:
            self._stats.count("stored_chunks", len(save.names), "skipped")
            return "the node is not there yet"
        timeout_s = self._config.store_timeout_s
        keys = client.keys(save.names)
        parent = None if save.parent is None else client.keys([save.parent])
        held = client.match(keys, timeout_s=timeout_s, record=False).count if save.cached else 0
        if held == len(keys):
            return ""
        if held:
            parent, keys = keys[held - 1 : held], keys[held:]
        reservation = client.reserve(
            keys, self._layout.chunk_nbytes, parent=parent, depth=save.depth + held, timeout_s=timeout_s
        )
        try:
            for index, view in zip(reservation.index.tolist(), reservation.views, strict=True):
                if not reservation.valid(timeout_s=timeout_s):
                    reservation.abort(timeout_s=timeout_s)
                    self._stats.count("stored_chunks", len(reservation.views), "skipped")
                    return "the node does not answer, or was restarted"
                self._layout.read(save.blocks[held + index], view)
        except BaseException:
            reservation.abort(timeout_s=timeout_s)
            raise
        result = reservation.commit(timeout_s=timeout_s)
        self._stats.count("stored_bytes", result.stored * self._layout.chunk_nbytes)
        for outcome, chunks in (("stored", result.stored), ("existed", result.existed), ("skipped", result.skipped)):
            if chunks:
                self._stats.count("stored_chunks", chunks, outcome)
        return result.reason

    def close(self) -> None:
        """End the loads: those that run are waited for, within their timeout, as they write into the KV cache."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._connection.close()
