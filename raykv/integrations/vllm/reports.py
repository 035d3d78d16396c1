"""The engine's report for routers (`raykv.integrations.routing`). It travels in the statistics of vLLM's steps."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from raykv.errors import RayKVError
from raykv.integrations.routing.report import MAX_PATHS, EngineReport
from raykv.integrations.vllm.groups import Groups
from raykv.integrations.vllm.metadata import Rank, Scope
from raykv.integrations.vllm.stats import RayKVStats
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from raykv.integrations.vllm.scheduler import SchedulerSide

REPORT_S: Final = 0.5
"""An engine that works makes a report this often."""


def cache_tokens(vllm_config: "VllmConfig", cache: "KVCacheConfig", groups: Groups) -> int:
    """Return how many tokens the engine's own prefix cache has room for. 0: it is off."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return 0
    return cache.num_blocks // len(groups.each) * groups.each[0].block_tokens  # the groups share the blocks


class Reporter:
    """Makes the reports of one engine."""

    def __init__(
        self,
        groups: Groups,
        namespaces: Mapping[Rank, Namespace],
        chunk_nbytes: Mapping[int, int],
        *,
        cache_tokens: int,
    ) -> None:
        """Use the fields of the workers' handshakes. `cache_tokens`: see `EngineReport`."""
        whole = [group for group in groups.each if group.whole]
        self._group = whole[0] if whole else None
        self._namespace = namespaces[min(namespaces)]
        self._hash_tokens, self._cache_tokens = groups.hash_tokens, cache_tokens
        self._chunk_nbytes = sum(chunk_nbytes.values())
        self._filled, self._due_s, self._epoch = 0, 0.0, ""

    def add_tokens(self, tokens: int) -> None:
        """Count tokens that are computed or loaded."""
        self._filled += tokens

    def add_to(self, stats: RayKVStats, side: "SchedulerSide") -> None:
        """Add a report to the statistics, if one is due. A new epoch is reported at once."""
        now_s, epoch = time.monotonic(), side.requests.epochs.current
        if self._group is None or (now_s < self._due_s and epoch == self._epoch):
            return
        self._due_s, self._epoch = now_s + REPORT_S, epoch
        namespace = self._namespace.with_fields(
            revision=epoch or self._namespace.revision, chunk_tokens=self._group.chunk_tokens
        )
        report = EngineReport(
            namespace=namespace,
            suffix=self._group.suffix.decode(),
            hash_tokens=self._hash_tokens,
            chunk_nbytes=self._chunk_nbytes,
            near=self._near(side),
            cache_tokens=self._cache_tokens,
            filled_tokens=self._filled,
            queued_tokens=side.requests.tokens_before(None),
            seconds_per_token=side.costs.seconds_per_token,
            seconds_per_step=side.costs.seconds_per_step,
            seconds_per_byte=dict(list(side.costs.seconds_per_byte().items())[-MAX_PATHS:]),
        )
        stats.report = report.model_dump_json()

    @staticmethod
    def _near(side: "SchedulerSide") -> tuple[str, ...]:
        try:
            client = next(iter(side.clients(Scope()).values()), None)
            return () if client is None else tuple(sorted(client.nodes_on_this_host()))
        except RayKVError:
            return ()
