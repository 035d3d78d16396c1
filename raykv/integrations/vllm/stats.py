"""The connector's metrics, which workers and scheduler send to vLLM's loggers.

Every metric is a counter, so values can be summed over ranks, steps and log intervals. The engine's report for routers
travels with them, because vLLM passes them to the process of the Ray Serve replica.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lookups": ("Lookups of requests, by outcome: hit, miss, ticket, or expected from a prefill engine.", ("outcome",)),
    "loads": ("Loads by how they ended: whole, partial or lost.", ("outcome",)),
    "reused_tokens": ("Prompt tokens loaded instead of computed.", ()),
    "lost_tokens": ("Prompt tokens found stored that did not arrive and were recomputed.", ()),
    "loaded_tokens": ("Tokens that arrived, by holder and path.", ("holder", "path")),
    "loaded_bytes": ("Bytes that arrived, by path.", ("path",)),
    "load_seconds": ("Seconds from the order of a load to its end; its request waits.", ()),
    "stored_chunks": ("Chunks offered, by outcome: stored, existed or skipped.", ("outcome",)),
    "hints": ("Hints of requests, by outcome: used or ignored.", ("outcome",)),
    "hook_seconds": ("Seconds that the engine spent inside the connector.", ("hook",)),
    "errors": ("Errors that became misses, by hook and error.", ("hook", "error")),
}
"""Maps the name of each metric to its meaning and its labels."""

SEPARATOR = "|"
REPORT = "report"
"""Key of the engine's report for routers, which is a text and no counter."""


class RayKVStats(KVConnectorStats):
    """Counters since the last `pop`. `data` maps a metric and its labels, joined by SEPARATOR, to a value."""

    @property
    def report(self) -> str:
        """The engine's report for routers as JSON; empty if there is none."""
        return str(self.data.get(REPORT, ""))

    @report.setter
    def report(self, report: str) -> None:
        self.data[REPORT] = report

    def count(self, metric: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter of `METRICS`."""
        key = SEPARATOR.join((metric, *labels))
        self.data[key] = self.data.get(key, 0) + amount

    def pop(self) -> "RayKVStats | None":
        """Return the counters since the last call, and reset them. None means that nothing was counted."""
        popped = RayKVStats(self.data)
        self.reset()
        return None if popped.is_empty() else popped

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, amount in other.data.items():
            if key == REPORT:
                self.report = amount
            else:
                self.count(key, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {key: round(amount, 4) for key, amount in sorted(self.data.items()) if key != REPORT}


class RayKVPromMetrics(KVConnectorPromMetrics):
    """Exports the counters to Prometheus, or to Ray's metrics if vLLM is configured for Ray's metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            metric: self._counter_cls(
                name=f"vllm:raykv_{metric}", documentation=meaning, labelnames=[*labelnames, *labels]
            )
            for metric, (meaning, labels) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data.items():
            if key == REPORT:
                continue
            metric, *labels = key.split(SEPARATOR)
            self._counters[metric].labels(*self.per_engine_labelvalues[engine_idx], *labels).inc(amount)
