"""A vLLM engine for Ray Serve that reports to routers: its own report, the tokenizer, and the LoRA adapters.

It reports its load to Ray Serve's autoscaling, too.
"""

import time
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from raykv.integrations.routing.report import (
    MAX_ADAPTERS,
    STATS_KEY,
    Adapter,
    EngineReport,
    ReplicaReport,
    TokenizerReport,
)
from raykv.integrations.serve.scaling import QUEUE_S, SLOTS
from raykv.integrations.vllm.namespace import Scopes
from raykv.integrations.vllm.stats import REPORT

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_TEMPLATE_CHARS: Final = 65_536
"""A longer chat template is not reported. Then routers do not read chats."""


class ReportListener(AggregateStatLoggerBase):
    """Remembers the engine's last report, which arrives with the statistics of a step.

    Attributes:
        engine: The report. None: there was none yet.
        at_s: When it arrived, on the monotonic clock.
        requests: Number of requests that the engine had after its last step, running and waiting. Without a request it
            makes no step and no report.
    """

    def __init__(self, vllm_config: "VllmConfig", engine_indexes: list[int]) -> None:
        self.engine: EngineReport | None = None
        self.at_s = 0.0
        self.requests = 0
        self._kv_usage = 0.0
        self._places = vllm_config.scheduler_config.max_num_seqs

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.requests = scheduler_stats.num_running_reqs + waiting
            self._kv_usage = scheduler_stats.kv_cache_usage
        stats = getattr(scheduler_stats, "kv_connector_stats", None)
        text = _report_in(stats) if isinstance(stats, dict) else None
        if text is None:
            return
        try:
            self.engine, self.at_s = EngineReport.model_validate_json(text), time.monotonic()
        except ValidationError:
            pass  # another version of raykv runs in the engine

    def log_engine_initialized(self) -> None:
        """Do nothing: this is no log."""

    @property
    def queued_tokens(self) -> int:
        return self.engine.queued_tokens if self.engine is not None and self.requests else 0

    def load(self) -> dict[str, float]:
        """Return the figures that `scaling` names; nothing before the engine's first report."""
        if self.engine is None:
            return {}
        queue_s = self.queued_tokens * self.engine.seconds_per_token
        return {QUEUE_S: queue_s, SLOTS: max(self.requests / self._places, self._kv_usage)}


def _report_in(stats: dict[str, Any]) -> str | None:
    """Find the report in the statistics of a connector, or of one of the connectors of a `MultiConnector`."""
    for each in (stats, *(nested for nested in stats.values() if isinstance(nested, dict))):
        if isinstance(each.get(REPORT), str):
            return str(each[REPORT])
    return None


class ReportingEngine(VLLMEngine):
    """Ray Serve's engine, which also answers Ray Serve's question for routing stats."""

    _listener: ReportListener | None = None

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: "VllmConfig", placement_group: Any
    ) -> Any:
        client = super()._start_async_llm_engine(vllm_engine_args, vllm_engine_config, placement_group)
        if client.logger_manager is not None:  # with disable_log_stats there are no statistics, so no reports
            self._listener = ReportListener(vllm_engine_config, [0])
            client.logger_manager.stat_loggers.append(self._listener)
        self._scopes = Scopes()
        return client

    def routing_stats(self) -> dict[str, Any]:
        """Return what Ray Serve passes to the routers."""
        stats: dict[str, Any] = super().routing_stats()
        listener = self._listener
        engine = listener.engine if listener else None
        if listener and engine:
            engine = engine.model_copy(update={"queued_tokens": listener.queued_tokens})
        report = ReplicaReport(
            engine=engine,
            age_s=time.monotonic() - listener.at_s if listener and engine else 0.0,
            tokenizer=self._tokenizer_report(),
            adapters=self._adapters(),
        )
        return {**stats, STATS_KEY: report.model_dump(mode="json")}

    def load(self) -> dict[str, float]:
        """Return what Ray Serve's autoscaling gets: see `scaling`."""
        return self._listener.load() if self._listener else {}

    def _tokenizer_report(self) -> TokenizerReport | None:
        if not self._running:
            return None
        args, template = self._vllm_args, getattr(self._oai_serving_chat, "chat_template", None)
        if len(template or "") > MAX_TEMPLATE_CHARS:
            return None
        return TokenizerReport(
            tokenizer=str(args.tokenizer or args.model),
            mode=str(args.tokenizer_mode),
            revision=args.tokenizer_revision,
            trust_remote_code=bool(args.trust_remote_code),
            chat_template=template,
            content_format=str(args.chat_template_content_format),
            template_kwargs=getattr(self._oai_serving_chat, "default_chat_template_kwargs", {}),
        )

    def _adapters(self) -> dict[str, Adapter]:
        known: dict[str, LoRARequest] = self._oai_models.lora_requests if self._oai_models is not None else {}
        return {
            name: Adapter(path=each.lora_path, scope=self._scopes.adapter(each))
            for name, each in list(known.items())[-MAX_ADAPTERS:]
        }
