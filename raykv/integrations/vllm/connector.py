"""The connector that vLLM loads: its hooks, by role, and nothing else.

Each hook goes to the scheduler's or the worker's side, is timed, and turns a `RayKVError` into what a cache that has
nothing would answer. Nothing else is caught: a defect should be seen.

It does not support vLLM's hybrid memory allocator. With it a model may have several groups of blocks, and then vLLM
recomputes a whole request when one block fails to load; without it there is one group, and it goes on from that block.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

import raykv
from raykv.errors import RayKVError
from raykv.integrations.kv_layout import layout_of
from raykv.integrations.vllm import register
from raykv.integrations.vllm.checks import check_cache, check_engine
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.metadata import Introduction, StepOrders
from raykv.integrations.vllm.namespace import attention_of, namespace_of
from raykv.integrations.vllm.scheduler import SchedulerSide
from raykv.integrations.vllm.stats import RayKVPromMetrics, RayKVStats
from raykv.integrations.vllm.worker import WorkerSide
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.raykv.connector")
register()

LOG_EVERY_S = 30.0
ResultT = TypeVar("ResultT")


class RayKVConnector(KVConnectorBase_V1):
    """Stores what this engine computes in raykv, and loads what any engine has stored there.

    vLLM makes one for its scheduler and one for each worker, and calls each by its role only; the other role's side
    does not exist there.
    """

    _scheduler: SchedulerSide
    _worker: WorkerSide
    _introduction: Introduction | None = None

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Check that this engine can be served.

        Raises:
            ConfigError: It cannot; names the field and the remedy.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        self._block_tokens = check_cache(kv_cache_config)
        self._config = ConnectorConfig.load(self._kv_transfer_config.kv_connector_extra_config)
        self._stats = RayKVStats()
        self._logged_s: dict[str, float] = {}
        self._close: Callable[[], None] = lambda: None
        if role == KVConnectorRole.SCHEDULER:
            logger.info("raykv connector: %r", self._config)
            self._scheduler = SchedulerSide(
                self._config,
                self._stats,
                block_tokens=self._block_tokens,
                hash_tokens=kv_cache_config.hash_block_size or self._block_tokens,
                loads=self._kv_transfer_config.is_kv_consumer,
                stores=self._kv_transfer_config.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, no more: nothing has to be recomputed for its sake."""
        return False

    # -- the scheduler's hooks ------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        namespaces = {rank: one.namespace for rank, one in metadata.items() if isinstance(one, Introduction)}
        self._scheduler.connect(self._connect(next(iter(namespaces.values()))), namespaces)
        self._close = self._scheduler.close

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._run("lookup", 0, self._scheduler.match, request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._run("order_load", None, self._scheduler.order_load, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._run("orders", StepOrders(), self._scheduler.orders, scheduler_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._run("finish", None, self._scheduler.finish, request)

    def reset_cache(self) -> bool:
        """Refuse: what is stored is other engines' too. After a change of weights, restart with another `revision`."""
        return False

    # -- the worker's hooks, in the order of a step ---------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = layout_of(kv_caches, self._kv_cache_config.num_blocks, self._config.chunk_blocks)
        rank = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        namespace = namespace_of(
            self._vllm_config,
            self._config,
            rank=rank,
            block_tokens=self._block_tokens,
            layout=layout.description,
            attention=attention_of(self._vllm_config, list(kv_caches)),
        )
        logger.info("raykv namespace: %r", namespace)
        self._introduction = Introduction(namespace)
        connection = self._connect(namespace)
        self._worker = WorkerSide(
            self._config, self._stats, layout=layout, namespace=namespace, rank=rank, connection=connection
        )
        self._close = self._worker.close

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._introduction

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start the step's loads: this is its first hook, so they run beside the forward pass, not after it."""
        self._run("start_loads", None, self._worker.start_loads, kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._run("start_loads", None, self._worker.start_loads, self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled when its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing to do yet: a chunk holds all layers and is saved when the last is computed."""

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        if orders.saves:
            self._log_seldom("save", self._run("save", "", self._worker.save, orders.saves))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        if not orders.computes:
            self._worker.await_load()  # not timed: the engine has nothing else to do
        nothing: set[str] = set()
        return None, self._run("finished", nothing, self._worker.take_finished)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    # -- both -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._close()

    def get_kv_connector_stats(self) -> RayKVStats | None:
        return self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RayKVStats:
        return RayKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: "VllmConfig", metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> RayKVPromMetrics:
        return RayKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _connect(self, namespace: Namespace) -> Connection:
        return Connection(
            lambda: raykv.connect(namespace, address=self._config.address, timeout_s=self._config.store_timeout_s)
        )

    def _run(self, hook: str, nothing: ResultT, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Make one call for a hook, timed; a `RayKVError` becomes `nothing`: a cache never fails a request."""
        start_s = time.perf_counter()
        try:
            return call(*arguments)
        except RayKVError as error:
            self._stats.count("errors", 1, hook, type(error).__name__)
            self._log_seldom(hook, str(error))
            return nothing
        finally:
            self._stats.count("hook_seconds", time.perf_counter() - start_s, hook)

    def _log_seldom(self, hook: str, reason: str) -> None:
        now_s = time.monotonic()
        if reason and now_s - self._logged_s.get(hook, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_s[hook] = now_s
            logger.warning("raykv, %s: %s; going on without", hook, reason)
