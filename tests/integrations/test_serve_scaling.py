"""Autoscaling by the load of engines: the policy inside of Ray Serve's, and a deployment that grows by its queue."""

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from raykv.integrations.serve.scaling import QUEUE_S, SLOTS

pytestmark = pytest.mark.ray
PREFILL = DeploymentID(name="Prefill:model", app_name="app")


class Deployment:
    """What Ray Serve's controller knows of one deployment. `decide` is one round of its autoscaling."""

    def __init__(self, config: dict[str, Any], **targets: float) -> None:
        policy = {"policy_function": "raykv.integrations.serve.scaling:EngineLoad", "policy_kwargs": targets}
        self.config = AutoscalingConfig(**{"upscale_delay_s": 0, "downscale_delay_s": 0, **config, "policy": policy})
        assert isinstance(self.config.policy, AutoscalingPolicy)
        self._policy = _apply_autoscaling_config(self.config.policy.get_policy()(**self.config.policy.policy_kwargs))
        self._state: dict[str, Any] = {}

    def decide(self, replicas: int, **reported: list[float]) -> int:
        ids = [ReplicaID(unique_id=str(number), deployment_id=PREFILL) for number in range(replicas)]
        context = AutoscalingContext(
            deployment_id=PREFILL,
            deployment_name=PREFILL.name,
            app_name=PREFILL.app_name,
            current_num_replicas=replicas,
            target_num_replicas=replicas,
            running_replicas=ids,
            total_num_requests=50,
            total_queued_requests=0,
            aggregated_metrics={name: dict(zip(ids, each, strict=False)) for name, each in reported.items()},
            raw_metrics=None,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=time.time(),
            config=self.config,
        )
        wanted, self._state = self._policy(context)
        return wanted


def test_the_queue_decides_the_number_of_prefill_replicas():
    prefill = Deployment({"max_replicas": 8}, target_queue_s=2.0)
    assert prefill.decide(2, **{QUEUE_S: [5.0, 2.5]}) == 4
    assert prefill.decide(4, **{QUEUE_S: [2.0, 2.0, 2.0, 2.0]}) == 4
    assert prefill.decide(4, **{QUEUE_S: [1.0, 0.5, 0.2, 0.1]}) == 1
    assert prefill.decide(2, **{QUEUE_S: [3.9], SLOTS: [1.0, 1.0]}) == 2, "a new replica has not reported yet"


def test_used_places_decide_the_number_of_decode_replicas():
    decode = Deployment({"max_replicas": 8}, target_slots=0.5)
    assert decode.decide(2, **{SLOTS: [1.0, 0.5]}) == 3
    assert decode.decide(3, **{SLOTS: [0.5, 0.5, 0.5], QUEUE_S: [60.0, 60.0, 60.0]}) == 3
    both = Deployment({"max_replicas": 8}, target_slots=0.5, target_queue_s=1.0)
    assert both.decide(2, **{SLOTS: [0.5, 0.5], QUEUE_S: [3.0, 2.0]}) == 5


def test_without_reports_the_number_stays():
    prefill = Deployment({"max_replicas": 8}, target_queue_s=2.0)
    assert prefill.decide(3) == 3
    assert prefill.decide(3, ongoing=[9.0, 9.0, 9.0]) == 3


def test_ray_serves_delays_and_factors_hold():
    prefill = Deployment({"max_replicas": 8, "upscale_delay_s": 60, "downscaling_factor": 0.5}, target_queue_s=1.0)
    assert prefill.decide(2, **{QUEUE_S: [9.0, 9.0]}) == 2, "not for a minute"
    assert prefill.decide(4, **{QUEUE_S: [1.0, 0.5, 0.5, 0.0]}) == 3, "half of the way down to two"


@pytest.mark.soak
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_queue_of_long_prompts_brings_a_second_prefill_worker_and_no_second_decode_worker():
    pytest.importorskip("vllm")
    from deployments import pd
    from tests.integrations.test_serve_router_cluster import engine_args, running, text

    fast = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 2,
        "downscale_delay_s": 10,
        "look_back_period_s": 4,
    }
    args = pd.PDArgs(
        **engine_args(
            prefill_autoscaling={**fast, "target_queue_s": 2.0}, decode_autoscaling={**fast, "target_slots": 0.8}
        )
    )
    with running(pd.build, args) as app:
        before = replicas()
        assert set(before.values()) == {1}, before

        async def flood() -> dict[str, int]:
            """Keep twelve long prompts in the queue until there is a second prefill worker."""
            until_s, number, most = time.monotonic() + 300, 0, before
            pending: set[asyncio.Future[Any]] = set()
            while time.monotonic() < until_s and max(most.values()) == 1:
                while len(pending) < 12:
                    number += 1
                    messages = [{"role": "user", "content": text(number, 2000)}]
                    pending.add(asyncio.ensure_future(asyncio.to_thread(app.ask, messages)))
                done, pending = await asyncio.wait(pending, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
                most = await asyncio.to_thread(replicas)
            for each in await asyncio.gather(*pending):
                assert each.tokens > 2000
            return most

        grown = asyncio.run(flood())
        assert {name.partition(":")[0]: number for name, number in grown.items()} == {"Prefill": 2, "Decode": 1}
        until_s = time.monotonic() + 120
        while max(replicas().values()) > 1:
            assert time.monotonic() < until_s, "without requests, the second prefill worker ends"
            time.sleep(1)


def replicas() -> dict[str, int]:
    """Return the number of running workers of each kind."""
    from ray import serve

    (app,) = serve.status().applications.values()
    return {
        name: each.replica_states.get("RUNNING", 0)
        for name, each in app.deployments.items()
        if name.startswith(("Prefill", "Decode"))
    }
