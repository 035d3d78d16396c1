"""Autoscaling by the load of engines: the policy, and the names of the figures that replicas report for it.

Ray Serve's own policy counts requests. There a prompt of 100 000 tokens counts as much as one of 100, and it does not
see that an engine's KV cache is full.

Ray Serve copies this module into its controller, so the module imports nothing of raykv and no engine.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUE_S: Final = "raykv_queue_s"
"""The time that the engine needs for the tokens that it still has to compute."""
SLOTS: Final = "raykv_slots"
"""The used part of the engine: of its places for requests, or of its KV cache if that is more. Requests that wait for a
place count, so it may be more than 1."""


class EngineLoad:
    """An autoscaling policy: as many replicas as make the mean load of an engine the wanted one.

    Ray Serve applies the limits, delays and factors of the deployment's `AutoscalingConfig` to the answer.
    """

    def __init__(self, *, target_queue_s: float | None = None, target_slots: float | None = None) -> None:
        """Set the wanted means. With None a figure does not count. With both, the higher number of replicas wins."""
        self._targets = {
            name: target for name, target in ((QUEUE_S, target_queue_s), (SLOTS, target_slots)) if target is not None
        }

    def __call__(self, ctx: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas: the present one until a replica has reported. It has no state."""
        reported = ctx.aggregated_metrics or {}
        wanted = [sum(reported[name].values()) / target for name, target in self._targets.items() if name in reported]
        return (max(wanted) if wanted else float(ctx.target_num_replicas)), {}
