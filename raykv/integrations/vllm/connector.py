"""The connector that vLLM loads. It contains only the hooks that vLLM calls.

Each hook is timed and calls `SchedulerSide` or `WorkerSide`. A `RayKVError` counts as a miss. Other exceptions are
defects and are not caught.

After a failed load, vLLM recomputes only the missing blocks if the model's only KV cache group has full attention.
Otherwise vLLM recomputes the whole request.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import raykv
from raykv.errors import RayKVError, UsageError
from raykv.integrations.gpu_layout import with_gpu_copies
from raykv.integrations.kv_layout import layout_of
from raykv.integrations.vllm import register
from raykv.integrations.vllm.checks import check_cache, check_engine, check_handshakes
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.epochs import Statement
from raykv.integrations.vllm.events import StoredEvents, publishes_events
from raykv.integrations.vllm.groups import Groups
from raykv.integrations.vllm.metadata import Rank, StepOrders, WorkerNamespaces, WorkerReport
from raykv.integrations.vllm.namespace import attention_of, namespace_of
from raykv.integrations.vllm.rank_store import RankCache
from raykv.integrations.vllm.removals import Removals
from raykv.integrations.vllm.reports import Reporter, cache_tokens
from raykv.integrations.vllm.scheduler import SchedulerSide
from raykv.integrations.vllm.stats import RayKVPromMetrics, RayKVStats
from raykv.integrations.vllm.tensor_ranks import tensor_ranks
from raykv.integrations.vllm.worker import WorkerCache, WorkerSide
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.raykv.connector")
register()

CONNECT_TIMEOUT_S: Final = 1.0
LOG_INTERVAL_S: Final = 30.0
ResultT = TypeVar("ResultT")


class _TimedHooks:
    """Calls hooks, measures their time, and turns a `RayKVError` into the answer of an empty cache."""

    _stats: RayKVStats
    _logged_s: dict[str, float]

    def _run(self, hook: str, nothing: ResultT, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Make one timed call for a hook. Return `nothing` on a `RayKVError`, so that no request fails."""
        start_s = time.perf_counter()
        try:
            return call(*arguments)
        except RayKVError as error:
            self._stats.count("errors", 1, hook, type(error).__name__)
            self._log_rarely(hook, str(error))
            return nothing
        finally:
            self._stats.count("hook_seconds", time.perf_counter() - start_s, hook)

    def _log_rarely(self, hook: str, reason: str) -> None:
        now_s = time.monotonic()
        if reason and now_s - self._logged_s.get(hook, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[hook] = now_s
            logger.warning("raykv, %s: %s; the engine goes on without", hook, reason)


class RayKVConnector(KVConnectorBase_V1, SupportsHMA, _TimedHooks):
    """Stores the KV that this engine computes, and loads the KV that any engine has stored.

    vLLM makes one connector for its scheduler and one for each worker. Each gets only the calls for its own role.

    Attributes:
        scheduler_side: Set in the scheduler's role only, once vLLM has the handshakes of all workers.
        worker_side: Set in a worker's role only, by `register_kv_caches`.
    """

    scheduler_side: SchedulerSide
    worker_side: WorkerSide
    _worker_namespaces: WorkerNamespaces | None = None
    _reporter: Reporter | None = None

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Check that this engine is supported.

        Raises:
            ConfigError: The engine is not supported. The message names the field and the remedy.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._stats, self._logged_s = RayKVStats(), {}
        check_engine(vllm_config)
        self._config = ConnectorConfig.load(self._kv_transfer_config.kv_connector_extra_config)
        check_cache(vllm_config, kv_cache_config, self._config)
        self._tensor_ranks = tensor_ranks(vllm_config, kv_cache_config, self._config)
        self._groups = Groups(kv_cache_config, self._config.chunk_blocks)
        self._is_in_lockstep = vllm_config.parallel_config.data_parallel_size > 1
        """Whether other engines wait for each step of this one: those of a mixture of experts. Then no step waits."""
        self._close: Callable[[], None] = lambda: None

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, so that vLLM keeps the output of the running step when it preempts a request.

        With True, vLLM would drop this output and compute it again, so that a hand-off loses no KV. raykv does not need
        this protection, because a lost save only causes a later miss.
        """
        return False

    # -- hooks of the scheduler -----------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = check_handshakes(metadata.values())
        namespaces = {rank: each for one in workers for rank, each in one.namespaces.items()}
        logger.info("raykv connector: %r", self._config)
        self.scheduler_side = SchedulerSide(
            self._config,
            self._stats,
            transfer=self._kv_transfer_config,
            groups=self._groups,
            connection=Connection(partial(_connect, self._config, next(iter(namespaces.values())))),
            namespaces=namespaces,
            chunk_nbytes=workers[0].chunk_nbytes,
        )
        room = cache_tokens(self._vllm_config, self._kv_cache_config, self._groups)
        self._reporter = Reporter(self._groups, namespaces, workers[0].chunk_nbytes, cache_tokens=room)
        if publishes_events(self._vllm_config):
            removals = Removals(self.scheduler_side.clients)
            events = StoredEvents(self._kv_cache_config, self._groups, removals, ranks=len(namespaces))
            self.scheduler_side.events = events
            removals.start()
        if self._kv_cache_manager is not None:
            self.scheduler_side.bind(self._kv_cache_manager)
        self._close = self.scheduler_side.close

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if hasattr(self, "scheduler_side"):
            self.scheduler_side.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        self._log_rarely("hints", self.scheduler_side.add(request))

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        miss: int | None = 0
        tokens = self._run("lookup", miss, self.scheduler_side.match, request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self._reporter is not None:
            self._reporter.add_tokens(num_external_tokens)
        self._run("order_load", None, self.scheduler_side.order_load, request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        unknown = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return self._run("hit_sources", unknown, self.scheduler_side.sources, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self._reporter is not None:
            self._reporter.add_tokens(scheduler_output.total_num_scheduled_tokens)
        idle_s = 0.0
        if not scheduler_output.total_num_scheduled_tokens and not self._is_in_lockstep:
            idle_s = self.scheduler_side.requests.await_lookups()  # not timed: the engine has nothing else to do
        return self._run("orders", StepOrders(), self.scheduler_side.orders, scheduler_output, idle_s)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._run("finish", None, self.scheduler_side.finish, request)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._run("report", None, self.scheduler_side.add_report, report)

    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Save the last states of a request, unless vLLM uses their blocks again before the next step."""
        side = self.scheduler_side
        self._run("last_states", None, side.save_last_states, request, block_ids, partial_tail_offloads)
        return False

    def reset_cache(self) -> bool:
        """Begin a private epoch (see `epochs`), so that no old chunk is loaded. The result is always True."""
        self.scheduler_side.reset()
        return True

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self.scheduler_side.take_events()

    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine must make a step in which the workers report their stored chunks."""
        events = self.scheduler_side.events
        return events is not None and events.is_waiting

    # -- hooks of a worker, in the order of a step ----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        names = {
            group.index: [name for name in groups[group.index].layer_names if name in kv_caches]
            for group in self._groups.each
        }
        caches = {index: {name: kv_caches[name] for name in each} for index, each in names.items()}
        attention = "|".join(attention_of(self._vllm_config, each) for each in names.values())
        pipeline, tensor = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        ranks = self._tensor_ranks.of(tensor)
        cache = WorkerCache(
            [self._rank_cache((pipeline, rank), caches, (n, len(ranks)), attention) for n, rank in enumerate(ranks)],
            groups={group.index: group for group in self._groups.each},
            replica=self._tensor_ranks.replica(tensor),
            counts_tokens=(pipeline, tensor) == (0, 0),
        )
        self._worker_namespaces = cache.handshake()
        self.worker_side = WorkerSide(
            self._config,
            self._stats,
            cache=cache,
            connection=Connection(partial(connect_writer, self._config, cache.ranks)),
            publishes=publishes_events(self._vllm_config),
        )
        self._close = self.worker_side.close

    def _rank_cache(
        self, rank: Rank, caches: dict[int, dict[str, torch.Tensor]], part: tuple[int, int], attention: str
    ) -> RankCache:
        """Find the part of the KV cache that belongs to one of the worker's ranks.

        Args:
            caches: The layers of each KV cache group, by index.
            part: (Index of the rank, number of ranks) among the worker's ranks.
        """
        num_blocks = self._kv_cache_config.num_blocks
        layouts = {
            group.index: with_gpu_copies(
                layout_of(caches[group.index], num_blocks, group.chunk_blocks, part=part),
                num_blocks,
                group.chunk_blocks,
            )
            for group in self._groups.each
        }
        namespace = namespace_of(
            self._vllm_config,
            self._config,
            rank=rank,
            tensor_ranks=self._tensor_ranks.count,
            block_tokens=[group.block_tokens for group in self._groups.each],
            layout="|".join(layout.description for layout in layouts.values()),
            attention=attention,
        )
        logger.info("raykv namespace: %r", namespace)
        return RankCache(namespace, layouts)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker_namespaces

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for saves of blocks that this step may overwrite. Request slots for new saves. Start the ordered loads.

        vLLM calls this hook first in a step, before any computation.
        """
        assert isinstance(kv_connector_metadata, StepOrders)
        orders, worker = kv_connector_metadata, self.worker_side
        if orders.epoch is not None:
            worker.enter(orders.epoch)
        self._run("release", None, worker.release, orders.reused)
        if saves := worker.mine(orders.saves):
            self._run("prepare", None, worker.prepare, saves)
        self._run("start_loads", None, worker.start_loads, orders)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing: `handle_preemptions` has started the loads, before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Do nothing: a chunk holds all layers, so `wait_for_save` saves it after the last layer."""

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        if saves := self.worker_side.mine(orders.saves):
            self._run("save", None, self.worker_side.save, saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        if orders.idle_s:
            self.worker_side.await_work(orders.idle_s)  # not timed: the engine has nothing else to do
        nothing: tuple[set[str], set[str]] = (set(), set())
        finished, failed = self._run("finished", nothing, self.worker_side.pop_finished)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.pop_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._run("reports", None, self.worker_side.pop_report)

    # -- hooks of both roles --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._close()

    def get_kv_connector_stats(self) -> RayKVStats | None:
        if self._worker_namespaces is not None and self.worker_side.saving:
            self._log_rarely("save", self._run("count_saves", "", self.worker_side.count_saves))
        if self._reporter is not None:
            self._reporter.add_to(self._stats, self.scheduler_side)
        return self._stats.pop()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RayKVStats:
        return RayKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: "VllmConfig", metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> RayKVPromMetrics:
        return RayKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _connect(config: ConnectorConfig, namespace: Namespace) -> raykv.Client:
    return raykv.connect(namespace, address=config.address, timeout_s=CONNECT_TIMEOUT_S)


def connect_writer(config: ConnectorConfig, ranks: Sequence[RankCache]) -> raykv.Client:
    """Open the client for loads and saves, and request its first slots.

    The slots are requested now, because a request takes longer than a step may wait.

    Raises:
        RayKVError: The node is away or refuses. The client is closed.
    """
    client = _connect(config, ranks[0].namespace)
    try:
        for rank in ranks:
            for chunk_nbytes in {layout.chunk_nbytes for layout in rank.layouts.values()}:
                client.using(rank.namespace).prepare(chunk_nbytes, 1)
    except BaseException:
        client.close()
        raise
    return client


def state_revision(worker: Any, revision: str) -> None:
    """State which revision the weights have since the last reset. Example: `llm.collective_rpc(state_revision, ...)`.

    From one of the next steps on, the engine shares chunks with all engines of this revision. The other engines state
    it by the same call or by `revision` in kv_connector_extra_config. A call without an earlier reset has no effect.

    Args:
        worker: The worker in which vLLM makes this call.
        revision: Any text that changes whenever the weights do.

    Raises:
        UsageError: The revision is not a text or is empty, or the engine has no RayKVConnector.
    """
    statement = Statement.now(revision)
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    found = [each for each in getattr(group, "_connectors", [group]) if isinstance(each, RayKVConnector)]
    if not found:
        raise UsageError("this engine has no RayKVConnector; set kv_transfer_config")
    for connector in found:
        connector.worker_side.stated = [statement]
