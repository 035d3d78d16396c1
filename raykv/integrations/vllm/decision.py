"""Decides for each request whether its hit is loaded or computed, and orders probes of paths that were too slow."""

import time
from collections import Counter
from collections.abc import Mapping

from raykv.integrations.routing.report import path_name
from raykv.integrations.vllm.costs import Costs
from raykv.integrations.vllm.groups import Groups
from raykv.integrations.vllm.lookups import Found
from raykv.integrations.vllm.metadata import Load, LoadedChunks, WorkerReport
from raykv.integrations.vllm.tracked import Lookup, Tracked
from raykv.types import Holder


class LoadDecision:
    """Makes the load decisions of one engine, from times that were measured in this engine.

    Attributes:
        costs: The measurements.
    """

    def __init__(self, load_policy: str, groups: Groups, chunk_nbytes: Mapping[int, int]) -> None:
        """Start without measurements.

        Args:
            load_policy: `ConnectorConfig.load_policy`.
            chunk_nbytes: Bytes of one chunk of a worker, by index of the KV cache group.
        """
        self._always = load_policy == "always"
        self._groups, self._chunk_nbytes = groups, chunk_nbytes
        self.costs = Costs()

    def is_load_sooner(self, lookup: Lookup, queued_tokens: int) -> bool:
        """Return True if the policy is "always", or if loading the hit is expected to end sooner than computing it.

        Args:
            queued_tokens: Number of tokens that the engine computes before this request.
        """
        path, nbytes = self._source(lookup.found)
        tokens = lookup.found.hit.tokens - lookup.computed
        return self._always or self.costs.is_load_sooner(
            path, nbytes, tokens, queued_tokens=queued_tokens, now_s=time.monotonic()
        )

    def probe(self, tracked: Tracked, lookup: Lookup) -> list[Load]:
        """Return a list with a load that probes the path to the holder of a hit. Empty if no probe is due."""
        held, now_s = lookup.found.held, time.monotonic()
        path, _ = self._source(lookup.found)
        if not self.costs.is_probe_due(path, now_s):
            return []
        group, end = next(
            (group, end)
            for group in self._groups.each
            for end in lookup.found.hit.ends[group.index]
            if _path_of(next(iter(held.values()))[group.index, end]) == path
        )
        part = LoadedChunks(
            group=group.index,
            names=[self._groups.name(group, tracked.request.block_hashes, end)],
            blocks=[[None] * group.chunk_blocks],
            holders={rank: [each[group.index, end].node_id] for rank, each in held.items()},
        )
        load = Load(f"raykv-probe/{path}", tracked.scope, [part], is_probe=True)
        self.costs.begin_load(load.request_id, path, self._chunk_nbytes[group.index], now_s)
        return [load]

    def begin(self, load: Load, lookup: Lookup) -> None:
        """Record that a load is ordered now."""
        self.costs.begin_load(load.request_id, *self._source(lookup.found), time.monotonic())

    def add_step(self, tokens: int) -> None:
        """Record that a step with this number of tokens begins now."""
        self.costs.add_step(tokens, time.monotonic())

    def add_report(self, report: WorkerReport) -> None:
        """Record the ended loads and probes. Their times are converted from the worker's clock to the scheduler's."""
        lag_s = time.monotonic() - report.now_s
        for request_id, ended in report.loads.items():
            self.costs.end_load(request_id, ended.shifted(lag_s))

    def _source(self, found: Found) -> tuple[str, int]:
        """Return the path of most of the chunks to load, and the number of bytes that one worker loads."""
        held = next(iter(found.held.values()))
        chunks = [(index, end) for index, ends in found.hit.ends.items() for end in ends]
        ((path, _),) = Counter(_path_of(held[chunk]) for chunk in chunks).most_common(1)
        return path, sum(self._chunk_nbytes[index] for index, _ in chunks)


def _path_of(holder: Holder) -> str:
    return path_name(holder.node_id, below=holder.below_memory)
