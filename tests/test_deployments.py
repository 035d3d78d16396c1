"""Ray, Ray Serve and raykv's command line accept the files in deployments/."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("ray")

from deployments.pd import EngineArgs, PDArgs, llm_config
from deployments.reuse import Reuse
from raykv.errors import ConfigError
from raykv.tools.cli import parser

pytestmark = pytest.mark.ray
DEPLOYMENTS = Path(__file__).parents[1] / "deployments"


def read(name: str) -> dict[str, Any]:
    import yaml  # PyYAML is installed with Ray

    return yaml.safe_load((DEPLOYMENTS / name).read_text())


def pd_args() -> dict[str, Any]:
    (application,) = read("pd.yaml")["applications"]
    return application["args"]


def test_ray_accepts_the_cluster():
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read("cluster.yaml")))


def test_the_cluster_starts_raykv_by_a_command_that_exists():
    commands = read("cluster.yaml")["head_start_ray_commands"]
    (up,) = [command for command in commands if "raykv" in command]
    words = shlex.split(up)
    assert parser().parse_args(words[words.index("raykv") + 1 :]).arena == "48 GiB"


def test_serve_accepts_the_app():
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.model_validate(read("pd.yaml")).applications
    assert import_attr(application.import_path).__annotations__["args"] is PDArgs
    assert PDArgs.model_validate(application.args).pool_nbytes == 1 << 30


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefil_replicas", 2), ("prefill_replicas", 0), ("device", "tpu"), ("kv_cache_nbytes", "2 GB"), ("pool", "a b")],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any):
    with pytest.raises(ValidationError, match=field):
        PDArgs.model_validate({**pd_args(), field: value})


def test_a_field_reaches_its_worker():
    args = PDArgs(
        model="some/model", dtype="bfloat16", block_tokens=128, engine={"tensor_parallel_size": 4}, pool="other"
    )
    config = llm_config(args, 3, {"prefill": 1.0})
    engine = config["engine_kwargs"]
    assert config["model_loading_config"] == {"model_id": "model", "model_source": "some/model"}
    assert config["deployment_config"]["num_replicas"] == 3
    assert config["placement_group_config"] == {"bundle_per_worker": {"GPU": 1, "prefill": 1.0}}
    assert (engine["dtype"], engine["block_size"], engine["tensor_parallel_size"]) == ("bfloat16", 128, 4)
    assert engine["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"
    assert engine["kv_transfer_config"]["kv_connector_extra_config"] == {"cluster": "other", "store_timeout_s": 0.1}
    assert "max_model_len" not in engine


@pytest.mark.slow
@pytest.mark.vllm
def test_the_router_is_chosen_by_a_path_that_ray_serve_can_import():
    pytest.importorskip("vllm")
    from ray.serve.config import RequestRouterConfig

    from deployments.replicas import ReplicaArgs
    from raykv.integrations.routing.choice import RouterOptions
    from raykv.integrations.serve.router import RayKVRouter

    (application,) = read("replicas.yaml")["applications"]
    args = ReplicaArgs.model_validate(application["args"])
    config = RequestRouterConfig(**llm_config(args, args.replicas, {})["deployment_config"]["request_router_config"])
    assert config.get_request_router_class() is RayKVRouter
    assert RouterOptions.load(config.request_router_kwargs).role == "both"
    decode = llm_config(PDArgs.model_validate(pd_args()), 1, {}, role="decode")["deployment_config"]
    assert RouterOptions.load(decode["request_router_config"]["request_router_kwargs"]).role == "decode"
    plain = llm_config(PDArgs(model="some/model"), 1, {})
    assert "request_router_config" not in plain["deployment_config"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_ray_serve_accepts_the_workers(device: str, tmp_path: Path):
    llm = pytest.importorskip("ray.serve.llm")
    args = PDArgs.model_validate({**pd_args(), "model": str(tmp_path), "device": device})
    config = llm.LLMConfig.model_validate(llm_config(args, 2, {"prefill": 1.0}))
    wanted = {"prefill": 1.0, device.upper(): 1}
    assert config.get_engine_config().placement_bundles == [wanted]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_numbers_of_prefill_and_decode_workers_scale_apart():
    llm = pytest.importorskip("ray.serve.llm")
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2}
    fields = {"prefill_autoscaling": scaling, "decode_autoscaling": None, "decode_replicas": 2}
    args = PDArgs.model_validate({**pd_args(), **fields})
    prefill = llm_config(args, 1, {}, role="prefill", autoscaling=args.prefill_autoscaling)
    decode = llm_config(args, args.decode_replicas, {}, role="decode", autoscaling=args.decode_autoscaling)
    assert "num_replicas" not in prefill["deployment_config"]
    assert llm.LLMConfig.model_validate(prefill).deployment_config["autoscaling_config"]["max_replicas"] == 3
    assert llm.LLMConfig.model_validate(decode).deployment_config["num_replicas"] == 2
    with pytest.raises(ValidationError, match="max_replicas"):
        llm.LLMConfig.model_validate(llm_config(args, 1, {}, autoscaling={**scaling, "max_replicas": 0}))


@pytest.mark.slow
@pytest.mark.vllm
def test_workers_scale_by_their_engines_load():
    llm = pytest.importorskip("ray.serve.llm")
    from ray.serve.config import AutoscalingConfig

    from deployments.pd import build

    args = PDArgs.model_validate(
        {
            **pd_args(),
            "pool_nbytes": None,
            "router": None,
            "prefill_autoscaling": {"max_replicas": 4, "target_queue_s": 2.0, "upscale_delay_s": 5},
            "decode_autoscaling": {"max_replicas": 2, "target_slots": 0.8},
        }
    )
    config = llm_config(args, 1, {}, autoscaling=args.prefill_autoscaling)
    assert llm.LLMConfig.model_validate(config).server_cls.__name__ == "RayKVServer"
    assert "ReportingEngine" in config["runtime_env"]["env_vars"]["RAYLLM_VLLM_ENGINE_CLS"] or args.device == "cpu"
    names, scalings = set(), []
    for deployment in deployments(build(args)):
        names.add(deployment.name.partition(":")[0])
        scaling = deployment._deployment_config.autoscaling_config
        if scaling is not None and not scaling.policy.is_default_policy_function():
            assert isinstance(scaling, AutoscalingConfig)
            assert hasattr(deployment.func_or_class, "record_autoscaling_stats")
            scalings.append((scaling.max_replicas, scaling.upscale_delay_s, scaling.policy.policy_kwargs))
    assert {"Prefill", "Decode"} < names
    assert sorted(scalings, key=str) == [(2, 30.0, {"target_slots": 0.8}), (4, 5.0, {"target_queue_s": 2.0})]


def deployments(app: Any) -> list[Any]:
    """Return the deployments of an app that is not deployed."""
    from ray.serve._private.build_app import build_app

    return build_app(app, name="app").deployments


@pytest.mark.parametrize(
    ("scaling", "why"),
    [
        ({"target_queue_s": 0}, "target_queue_s"),
        ({"target_slots": "many"}, "target_slots"),
        ({"target_slots": 0.5, "policy": {"policy_function": "own:policy"}}, "policy"),
    ],
)
def test_wrong_targets_are_refused_by_name(scaling: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        llm_config(PDArgs.model_validate(pd_args()), 1, {}, autoscaling={"max_replicas": 2, **scaling})


def test_data_parallel_engines_do_not_scale_by_load():
    from deployments.pd import build

    with pytest.raises(ConfigError, match="data_parallel_size"):
        build(PDArgs.model_validate({**pd_args(), "engine": {"data_parallel_size": 2}}))
    with pytest.raises(ConfigError, match="data_parallel_size"):
        llm_config(EngineArgs(model="m", engine={"data_parallel_size": 2}), 1, {}, autoscaling={"target_slots": 0.5})


def multi_args() -> dict[str, Any]:
    (application,) = read("multi.yaml")["applications"]
    return application["args"]


@pytest.mark.slow
@pytest.mark.vllm
def test_ray_serve_accepts_several_models():
    llm = pytest.importorskip("ray.serve.llm")
    from deployments.multi import MultiArgs

    args = MultiArgs.model_validate(multi_args())
    adapters = {"dynamic_lora_loading_path": "s3://bucket/adapters", "max_num_adapters_per_replica": 8}
    models = [each.model_copy(update={"lora": adapters}) for each in args.models]
    configs = [llm.LLMConfig.model_validate(llm_config(each, 1, {}, autoscaling=each.autoscaling)) for each in models]
    assert [config.model_loading_config.model_id for config in configs] == ["small", "large"]
    assert configs[1].lora_config.max_num_adapters_per_replica == 8
    assert configs[1].engine_kwargs["enable_lora"]
    assert "request_router_config" in configs[0].deployment_config


@pytest.mark.parametrize(
    ("change", "why"),
    [({"model_id": "large"}, "not different"), ({"pool": "other"}, "once"), ({"replica": 1}, "replica")],
)
def test_wrong_models_are_refused_by_name(change: dict[str, Any], why: str):
    from deployments.multi import MultiArgs

    args = multi_args()
    args["models"][0] |= change
    with pytest.raises(ValidationError, match=why):
        MultiArgs.model_validate(args)


def test_differences_of_figures_are_what_came_since():
    earlier, later = Reuse(answers=1), Reuse(answers=3)
    earlier.tokens["here", "there", "tcp"] = 64
    later.tokens.update({("here", "there", "tcp"): 128, ("here", "here", "shm"): 64})
    later.nbytes["tcp"] = 5
    since = later - earlier
    assert dict(since.tokens) == {("here", "there", "tcp"): 64, ("here", "here", "shm"): 64}
    assert (since.nbytes["tcp"], since.answers) == (5, 2)
