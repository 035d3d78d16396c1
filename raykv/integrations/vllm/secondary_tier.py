"""raykv below vLLM's own host memory: a secondary tier of vLLM's OffloadingConnector.

vLLM copies KV from the GPU into its primary tier, a region of host memory. `RayKVTier` stores chunks of this region in
raykv, and loads chunks into it. A chunk is one row of the region, with some blocks of one KV cache group, for all ranks
on this host.

vLLM calls the tier on its scheduler's thread. Only `drain_jobs` and `shutdown` wait. Lookups, loads and stores run on
other threads, and vLLM asks for their results in later steps.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import (
    JobId,
    JobResult,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)

import raykv
from raykv import Put
from raykv.errors import ConfigError, RayKVError
from raykv.integrations.vllm.checks import check_cache, check_offloading
from raykv.integrations.vllm.config import ConnectorConfig, TierConfig
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.metadata import Scope
from raykv.integrations.vllm.namespace import digest_of, namespace_of
from raykv.protocol.namespace import Namespace
from raykv.types import Match, NodeId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from raykv import Client

logger = init_logger("vllm.raykv.tier")

CONNECT_TIMEOUT_S: Final = 1.0
LOG_INTERVAL_S: Final = 30.0
_OF_THE_ENGINE: Final = ("engine_id", "extra_config", "enable_kv_cache_events")
_OF_THE_PROCESS: Final = ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local")
"""Fields of vLLM's OffloadingConfig and OffloadingParallelConfig that do not change the bytes of a chunk."""


class RayKVOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, for use with `RayKVTier`.

    vLLM gives a tier only a part of the engine's configuration, but the namespace needs the whole configuration. So
    this class makes the whole configuration available while vLLM creates the tier.
    """

    def __init__(self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig") -> None:
        """Check that this engine is supported, and create vLLM's connector.

        Raises:
            ConfigError: The engine is not supported. The message names the field and the remedy.
        """
        check_offloading(vllm_config)
        check_cache(vllm_config, kv_cache_config, ConnectorConfig())
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)


def tier_namespace(vllm_config: "VllmConfig", offloading: "OffloadingConfig", config: TierConfig) -> Namespace:
    """Make the namespace of a tier's chunks. A chunk holds the bytes of all ranks.

    Tokens, salt and media are not in the namespace. vLLM's block hashes cover them, and the names of chunks contain
    these hashes.

    Raises:
        ConfigError: The revision of the weights is unknown, or the engine's block hash is not reproducible.
    """
    blocks_per_chunk = offloading.cache.blocks_per_chunk
    fields = {name: value for name, value in asdict(offloading).items() if name not in _OF_THE_ENGINE}
    fields["model"] = offloading.model.dtype  # without the name, which may be a path on this host
    fields["parallel"] = {name: value for name, value in fields["parallel"].items() if name not in _OF_THE_PROCESS}
    fields["use_v2_model_runner"] = vllm_config.use_v2_model_runner
    return namespace_of(
        vllm_config,
        ConnectorConfig(revision=config.revision, chunk_blocks=blocks_per_chunk),
        rank=(0, 0),
        tensor_ranks=vllm_config.parallel_config.tensor_parallel_size,
        block_tokens=[group.tokens_per_block for group in offloading.groups],
        layout=f"offloaded/{offloading.kv_cache_layout}/{digest_of(fields)}",
        # The workers choose their kernels by the attention configuration and the device.
        attention=f"{current_platform.get_device_name()}/{vllm_config.attention_config.compute_hash()}",
    )


@dataclass(slots=True)
class _Known:
    """What the tier knows about one request.

    Attributes:
        holders: Maps each found chunk to a node that holds it.
        chain: All chunks of the request's store jobs, by (KV cache group, number of the chunk in the prompt).
    """

    holders: dict[OffloadKey, NodeId] = field(default_factory=dict)
    chain: dict[tuple[int, int], OffloadKey] = field(default_factory=dict)


class _Lookups(AsyncLookupManager):
    """Looks up chunks on a thread of vLLM's base class, in one batch for each request and step."""

    def __init__(self, tier_type: str, client: "Callable[[], Client | None]", timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        client = self._client()
        try:
            holders = [None] * len(keys) if client is None else self._ask(client, keys)
        except RayKVError as error:
            logger.debug("raykv, lookup: %s", error)
            holders = [None] * len(keys)
        known = req_context.get_state(_Known)
        if known is not None:
            known.holders.update((key, holder) for key, holder in zip(keys, holders, strict=True) if holder)
        return [holder is not None for holder in holders]

    def _ask(self, client: "Client", keys: list[OffloadKey]) -> list[NodeId | None]:
        return [each and each.node_id for each in client.locate(keys, timeout_s=self._timeout_s, promote=True)]


@dataclass(frozen=True, slots=True)
class _Moved:
    """The result of a load or a store: the chunks that arrived, and why others did not."""

    keys: Sequence[OffloadKey]
    reason: str = ""
    seconds: float = 0.0


class RayKVTier(SecondaryTierManager):
    """Stores the chunks of vLLM's primary tier in raykv, and loads them from there. Every failure is a miss."""

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        **fields: Any,
    ) -> None:
        """Connect to the node, and start the threads. If the node is unreachable, connect later.

        Args:
            primary_kv_view: vLLM's primary tier, shape [chunks, bytes of a chunk].
            fields: Fields of `TierConfig`.

        Raises:
            ConfigError: A field is wrong, or the engine is not supported. The message names the field.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:
            raise ConfigError(
                f"RayKVTier needs the engine's whole configuration: set kv_connector to "
                f"{RayKVOffloadingConnector.__name__!r}, and kv_connector_module_path to {__name__!r}"
            )
        self._config = TierConfig.load(fields)
        self._namespace = tier_namespace(vllm_config, offloading_spec.config, self._config)
        logger.info("raykv tier: %r, %r", self._config, self._namespace)
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._rows = primary_kv_view.cast("B")
        self._scope = Scope()
        self._connection = Connection(
            partial(raykv.connect, self._namespace, address=self._config.address, timeout_s=CONNECT_TIMEOUT_S)
        )
        self._lookups = _Lookups(tier_type, self._client, self._config.lookup_timeout_s)
        self._loader = ThreadPoolExecutor(self._config.load_threads, thread_name_prefix="raykv-tier-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="raykv-tier-save")
        self._jobs: dict[JobId, tuple[TransferJob, Future[_Moved]]] = {}
        self._logged_s = -LOG_INTERVAL_S

    # -- lookups --------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_context.set_state(_Known())
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._saver, job_metadata, self._store, self._config.store_timeout_s)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loader, job_metadata, self._load, self._config.load_timeout_s)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the jobs that have ended since the last call. Never waits.

        Chunks that a load did not find count as misses from now on. Otherwise vLLM would order the same load again.
        """
        ended = [job_id for job_id, (_, future) in self._jobs.items() if future.done()]
        return [self._result(*self._jobs.pop(job_id)) for job_id in ended]

    def drain_jobs(self) -> None:
        """Cancel queued jobs, and wait for the running ones. Then begin to use a new, random salt.

        vLLM calls this when it resets its cache, for example after an update of the weights. The tier does not know the
        new weights. So from now on the tier finds only chunks that it stores after this call. No other engine finds
        these chunks.

        This method must wait, because vLLM afterwards gives the rows of running jobs to other chunks. The method waits
        at most until the timeouts of these jobs.
        """
        wait([future for _, future in self._jobs.values() if not future.cancel()])
        self._scope = Scope(salt=f"after a reset: {secrets.token_hex(16)}")

    def shutdown(self) -> None:
        """Cancel queued jobs, wait for the running ones, and disconnect. After this call, vLLM unmaps the rows."""
        self._lookups.shutdown()
        self._loader.shutdown(cancel_futures=True)
        self._saver.shutdown(cancel_futures=True)
        self._connection.close()
        self._rows.release()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _client(self) -> "Client | None":
        return self._connection.client(self._namespace, self._scope)

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        job: TransferJob,
        move: "Callable[[Client, TransferJob, float], _Moved]",
        timeout_s: float,
    ) -> None:
        client = self._client()  # now, not when the job runs, because a reset changes the scope
        self._jobs[job.job_id] = job, threads.submit(self._move, client, job, move, job.submit_time + timeout_s)

    @staticmethod
    def _move(
        client: "Client | None",
        job: TransferJob,
        move: "Callable[[Client, TransferJob, float], _Moved]",
        deadline_s: float,
    ) -> _Moved:
        start_s = time.monotonic()
        if client is None:
            return _Moved((), "the node is not there yet")
        if start_s >= deadline_s:
            return _Moved((), "earlier jobs took too long")
        moved = move(client, job, deadline_s - start_s)
        return _Moved(moved.keys, moved.reason, time.monotonic() - start_s)

    def _load(self, client: "Client", job: TransferJob, timeout_s: float) -> _Moved:
        keys, known = list(job.keys), job.req_context.get_state(_Known)
        holders = [known.holders[key] for key in keys if key in known.holders] if known else []
        match = Match(len(keys), tuple(holders)) if len(holders) == len(keys) else None
        targets = [self._row(chunk) for chunk in job.chunk_ids.tolist()]
        got = client.get(keys, targets, match=match, timeout_s=timeout_s)
        return _Moved([key for key, hit in zip(keys, got.hits, strict=True) if hit])

    def _store(self, client: "Client", job: TransferJob, timeout_s: float) -> _Moved:
        result = client.put_many(self._puts(client, job), wait=True, timeout_s=timeout_s)
        whole = not (result.skipped or result.posted)
        return _Moved(list(job.keys) if whole else (), result.reason)

    def _puts(self, client: "Client", job: TransferJob) -> list[Put]:
        """Divide the chunks of a job into runs of consecutive chunks of one prompt and KV cache group."""
        known = job.req_context.get_state(_Known) or _Known()
        runs: list[list[tuple[OffloadKey, int]]] = []
        starts: list[tuple[int, int] | None] = []
        following: tuple[int, int] | None = None
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            place = self._place(key, job.req_context)
            if place is None or place != following:
                runs.append([])
                starts.append(place)
            runs[-1].append((key, chunk))
            following = None
            if place is not None:
                known.chain[place] = key
                following = place[0], place[1] + 1
        return [self._put(client, run, start, known) for run, start in zip(runs, starts, strict=True)]

    def _put(
        self, client: "Client", run: Sequence[tuple[OffloadKey, int]], start: tuple[int, int] | None, known: _Known
    ) -> Put:
        keys, values = client.keys([key for key, _ in run]), [self._row(chunk) for _, chunk in run]
        if start is None:
            return Put(keys, values, chained=False)
        parent = known.chain.get((start[0], start[1] - 1))
        return Put(keys, values, parent=None if parent is None else client.keys([parent]), depth=start[1])

    def _place(self, key: OffloadKey, req_context: ReqContext) -> tuple[int, int] | None:
        """Return the group of a chunk, and how many chunks of the group precede it. None: its position is unknown."""
        group, end = get_offload_group_idx(key), req_context.get_offload_key_position(key)
        return None if end is None else (group, -(-end // self._chunk_tokens[group]) - 1)

    def _row(self, chunk: int) -> memoryview:
        return self._rows[chunk * self.block_size_bytes : (chunk + 1) * self.block_size_bytes]

    def _result(self, job: TransferJob, future: "Future[_Moved]") -> JobResult:
        error = None if future.cancelled() else future.exception()
        moved = _Moved((), str(error or "")) if error or future.cancelled() else future.result()
        if error is not None and not isinstance(error, RayKVError):
            logger.error("a job failed because of a defect in raykv", exc_info=error)
        self._log_rarely(moved.reason)
        arrived = set(moved.keys)
        if job.is_promotion:
            self._lookups.mark_miss([key for key in job.keys if key not in arrived])
        return JobResult(
            job.job_id,
            success=len(arrived) == len(job.keys),
            successful_keys=moved.keys,
            transfer_time=moved.seconds,
            transfer_bytes=len(arrived) * self.block_size_bytes,
        )

    def _log_rarely(self, reason: str) -> None:
        now_s = time.monotonic()
        if reason and now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning("raykv, tier: %s; the engine goes on without", reason)
