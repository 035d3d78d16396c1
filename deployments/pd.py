"""Prefill and decode workers behind Ray Serve's OpenAI server. They share KV through raykv.

    serve run deployments/pd.yaml

Every replica uses the raykv node of its own Ray node. A prefill worker computes a prompt and stores its KV. A decode
worker gets a ticket for this KV, loads the KV, and decodes.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from ray.serve import Application

from raykv.config import Model, Name, Nbytes
from raykv.errors import ConfigError

CPU_ENVIRONMENT = {
    # One thread per engine, on any core. By default vLLM would bind all engines of a host to the same core.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAYLLM_VLLM_ENGINE_CLS": "raykv.integrations.serve.backend.OneProcessEngine",
}
REPORTS = {"RAYLLM_VLLM_ENGINE_CLS": "raykv.integrations.serve.reporting.ReportingEngine"}
"""The engine that reports to routers. `OneProcessEngine` reports too."""
INGRESS = {
    "ingress_cls_config": {"ingress_cls": "raykv.integrations.serve.ingress:ResumingIngress"},
    "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
}
STATS_PERIOD_S = 2
"""How often Ray Serve asks the workers for their reports."""
HEALTH_CHECK_PERIOD_S = 2
HEALTH_CHECK_TIMEOUT_S = 60
"""The timeout is long, because a worker answers late while it computes a long prompt on a busy CPU."""


class EngineArgs(Model):
    """What all workers of an app share.

    Attributes:
        model: Path of the model's folder, which is the same on every Ray node; or the model's name on the hub.
        model_id: Name of the model for clients. None: the last part of `model`.
        device: Device of the engines.
        dtype: Type of weights and KV: "auto", "bfloat16", "float16", "float32".
        max_model_len: Maximum number of tokens in a prompt and its answer together.
        block_tokens: Number of tokens in an engine's block, and in a chunk of the pool.
        kv_cache_nbytes: Memory for the KV of running requests, in each engine. None: vLLM decides.
        engine_prefix_caching: Whether each engine uses its own prefix cache in addition to the pool.
        pool: Name of the raykv cluster.
        pool_nbytes: Start the raykv cluster with this much memory on each Ray node. None: it runs already (`raykv up`).
        router: Send each request to the worker that can answer it first: fields of
            `raykv.integrations.routing.choice.RouterOptions`. None: to any worker, by power of two choices.
        lora: Serve LoRA adapters: the fields of Ray Serve's `LoraConfig`. None: no adapters.
        connector: Further fields of raykv's connector, such as load_timeout_s. Also `concurrent_hand_off`: whether a
            decode worker loads KV while a prefill worker computes it.
        engine: Further arguments of vLLM, such as tensor_parallel_size.
    """

    model: Annotated[str, Field(min_length=1)]
    model_id: str | None = None
    device: Literal["cpu", "gpu"] = "gpu"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    block_tokens: Annotated[int, Field(ge=16)] = 64
    kv_cache_nbytes: Nbytes | None = None
    engine_prefix_caching: bool = True
    pool: Name = "default"
    pool_nbytes: Nbytes | None = None
    router: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None
    connector: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)


class Targets(Model):
    """The load that autoscaling aims at. Without these fields, Ray Serve counts requests (`target_ongoing_requests`).

    Attributes:
        target_queue_s: Mean time that a worker needs for the tokens of its queue. It suits prefill.
        target_slots: Mean part of a worker's places for requests (`max_num_seqs`), or of its KV cache if that is more,
            that is in use. It suits decode.
    """

    target_queue_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    target_slots: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class PDArgs(EngineArgs):
    """The arguments of the Ray Serve app (`args` in pd.yaml).

    Attributes:
        prefill_replicas, decode_replicas: Number of workers of each kind.
        prefill_autoscaling, decode_autoscaling: Let Ray Serve change the number of workers of a kind: the fields of its
            `AutoscalingConfig`, and those of `Targets`. The two kinds scale apart. None: the number is fixed.
        prefill_resources, decode_resources: Custom Ray resources that each worker needs. They decide on which Ray nodes
            it may run.
    """

    prefill_replicas: Annotated[int, Field(ge=1)] = 1
    decode_replicas: Annotated[int, Field(ge=1)] = 1
    prefill_autoscaling: dict[str, Any] | None = None
    decode_autoscaling: dict[str, Any] | None = None
    prefill_resources: dict[str, float] = Field(default_factory=dict)
    decode_resources: dict[str, float] = Field(default_factory=dict)


def build(args: PDArgs) -> Application:
    """Build the app. The calling process must have joined Ray.

    Raises:
        ConfigError: The raykv cluster runs already, with another size; or a field of `Targets` is wrong.
    """
    by_load = any(map(scales_by_load, (args.prefill_autoscaling, args.decode_autoscaling)))
    from ray.serve.llm import build_pd_openai_app  # imports vLLM, which takes seconds

    prefill = llm_config(
        args, args.prefill_replicas, args.prefill_resources, role="prefill", autoscaling=args.prefill_autoscaling
    )
    decode = llm_config(
        args, args.decode_replicas, args.decode_resources, role="decode", autoscaling=args.decode_autoscaling
    )
    prepare(args)
    fields = {"prefill_config": prefill, "decode_config": decode, **INGRESS}
    if not by_load:
        return build_pd_openai_app(fields)
    from raykv.integrations.serve.servers import build_pd_app

    return build_pd_app(fields)


def prepare(args: EngineArgs) -> None:
    """Start the raykv cluster if the app has one of its own, and register raykv with Ray Serve."""
    from raykv import cluster
    from raykv.integrations.serve import backend

    if args.pool_nbytes is not None:
        cluster.start(name=args.pool, storage={"arena_nbytes": args.pool_nbytes})
    backend.register()


def model_id(args: EngineArgs) -> str:
    """Return the model's name for clients."""
    return args.model_id or Path(args.model).name


def llm_config(
    args: EngineArgs,
    replicas: int,
    resources: dict[str, float],
    *,
    role: str = "both",
    autoscaling: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of Ray Serve's LLMConfig for one kind of worker.

    Args:
        role: See `RouterOptions`.
        autoscaling: In place of `replicas`: see `PDArgs`.

    Raises:
        ConfigError: A field of `autoscaling` is wrong.
    """
    local = Path(args.model).is_dir()
    model = str(Path(args.model).resolve()) if local else args.model
    environment = {"HF_HUB_OFFLINE": "1"} if local else {}
    by_load = scales_by_load(autoscaling)
    if by_load and args.engine.get("data_parallel_size", 1) > 1:
        raise ConfigError(
            "field 'data_parallel_size': such engines scale by target_ongoing_requests; leave out target_queue_s and "
            "target_slots"
        )
    environment |= REPORTS if by_load or args.router is not None else {}
    if args.device == "cpu":
        environment |= CPU_ENVIRONMENT
    engine = {
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "block_size": args.block_tokens,
        "kv_cache_memory_bytes": args.kv_cache_nbytes,
        "enable_prefix_caching": args.engine_prefix_caching,
        **({"enforce_eager": True} if args.device == "cpu" else {}),
        **({"enable_lora": True} if args.lora is not None else {}),
        **args.engine,
    }
    return {
        "model_loading_config": {"model_id": model_id(args), "model_source": model},
        "accelerator_config": {"kind": args.device},
        "placement_group_config": {"bundle_per_worker": {args.device.upper(): 1, **resources}},
        "deployment_config": {
            **({"num_replicas": replicas} if autoscaling is None else {"autoscaling_config": scaling(autoscaling)}),
            "ray_actor_options": {"num_cpus": 0},
            "health_check_period_s": HEALTH_CHECK_PERIOD_S,
            "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
            **router_config(args, role),
        },
        "runtime_env": {"env_vars": environment},
        "callback_config": {"callback_class": "raykv.integrations.serve.backend.LocalModel"} if local else {},
        **({"lora_config": args.lora} if args.lora is not None else {}),
        **({"server_cls": "raykv.integrations.serve.servers:RayKVServer"} if by_load else {}),
        "experimental_configs": {"stream_batching_interval_ms": 0},  # each token is sent at once
        "engine_kwargs": {
            **{name: value for name, value in engine.items() if value is not None},
            "kv_transfer_config": {
                "kv_connector": "RayKVConnector",
                "kv_connector_module_path": "raykv.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # A node on a busy CPU may answer late. A save may wait long, because an engine step takes seconds.
                "kv_connector_extra_config": {"cluster": args.pool, "store_timeout_s": 0.1, **args.connector},
            },
        },
    }


def scales_by_load(autoscaling: dict[str, Any] | None) -> bool:
    """Return whether the number of workers follows `Targets`, so that their engines must report their load."""
    return any(name in (autoscaling or {}) for name in Targets.model_fields)


def scaling(autoscaling: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Ray Serve's AutoscalingConfig.

    Raises:
        ConfigError: A field of `Targets` is wrong, or there is a policy besides.
    """
    if not scales_by_load(autoscaling):
        return autoscaling
    targets = Targets.load({name: autoscaling[name] for name in Targets.model_fields if name in autoscaling})
    rest = {name: value for name, value in autoscaling.items() if name not in Targets.model_fields}
    if "policy" in rest:
        raise ConfigError("field 'policy': give a policy, or target_queue_s and target_slots")
    policy = "raykv.integrations.serve.scaling:EngineLoad"
    return {**rest, "policy": {"policy_function": policy, "policy_kwargs": targets.model_dump(exclude_none=True)}}


def router_config(args: EngineArgs, role: str) -> dict[str, Any]:
    """Return the field of Ray Serve's deployment config that chooses the router; nothing if Ray Serve's own is used."""
    if args.router is None:
        return {}
    return {
        "request_router_config": {
            "request_router_class": "raykv.integrations.serve.router:RayKVRouter",
            "request_routing_stats_period_s": STATS_PERIOD_S,
            "request_router_kwargs": {"cluster": args.pool, "role": role, **args.router},
        }
    }
