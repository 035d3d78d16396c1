"""Ray Serve's LLM servers, which also report their engine's load for autoscaling, and the app for prefill and decode.

Ray Serve asks the class of a deployment for its load (`record_autoscaling_stats`), and its own classes have no answer.
Its builder of apps with prefill and decode uses its own classes only, so there is a builder here.
"""

from typing import Any

from ray import serve
from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults as with_defaults
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.ingress import make_fastapi_ingress
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDDecodeServer, PDPrefillServer

from raykv.integrations.serve.reporting import ReportingEngine


class _ReportsLoad:
    """What the servers here have in addition to Ray Serve's."""

    engine: Any

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures of `scaling`, for Ray Serve's controller. Other engines have none."""
        return self.engine.load() if isinstance(self.engine, ReportingEngine) else {}


class RayKVServer(_ReportsLoad, LLMServer):
    """A server whose engine computes prompts and answers."""


class RayKVPrefillServer(_ReportsLoad, PDPrefillServer):
    """A server whose engine computes prompts."""


class RayKVDecodeServer(_ReportsLoad, PDDecodeServer):
    """A server whose engine computes answers."""


def build_pd_app(fields: dict[str, Any]) -> serve.Application:
    """Build the app of Ray Serve's `build_pd_openai_app`, from the same fields, with the servers of this module."""
    args = PDServingArgs.model_validate(fields)
    prefill = build_llm_deployment(args.prefill_config, name_prefix="Prefill:", deployment_cls=RayKVPrefillServer)
    decode = build_llm_deployment(
        args.decode_config,
        name_prefix="Decode:",
        bind_kwargs={"prefill_server": prefill},
        deployment_cls=RayKVDecodeServer,
    )
    model_id, lora = args.decode_config.model_id, args.decode_config.lora_config
    ingress = args.ingress_cls_config
    defaults = ingress.ingress_cls.get_deployment_options([args.decode_config])
    options = with_defaults(defaults, args.ingress_deployment_config)
    return serve.deployment(make_fastapi_ingress(ingress.ingress_cls), **options).bind(
        llm_deployments={model_id: decode},
        model_cards={model_id: to_model_metadata(model_id, args.decode_config)},
        lora_paths={} if lora is None else {model_id: lora.dynamic_lora_loading_path},
        **ingress.ingress_extra_kwargs,
    )
