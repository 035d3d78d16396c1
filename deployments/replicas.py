"""Several equal workers behind Ray Serve's OpenAI server. They share KV through raykv, which also routes the requests.

serve run deployments/replicas.yaml
"""

from typing import Annotated, Any

from pydantic import Field
from ray.serve import Application

from deployments.pd import INGRESS, EngineArgs, llm_config, prepare


class ReplicaArgs(EngineArgs):
    """The arguments of the Ray Serve app (`args` in replicas.yaml).

    Attributes:
        replicas: Number of workers.
        autoscaling: As `decode_autoscaling` in `PDArgs`, in place of `replicas`.
        resources: Custom Ray resources that each worker needs. They decide on which Ray nodes it may run.
    """

    router: dict[str, Any] | None = Field(default_factory=dict)
    replicas: Annotated[int, Field(ge=1)] = 2
    autoscaling: dict[str, Any] | None = None
    resources: dict[str, float] = Field(default_factory=dict)


def build(args: ReplicaArgs) -> Application:
    """Build the app. The calling process must have joined Ray.

    Raises:
        ConfigError: The raykv cluster runs already, with another size; or a field of `Targets` is wrong.
    """
    from ray.serve.llm import build_openai_app  # imports vLLM, which takes seconds

    config = llm_config(args, args.replicas, args.resources, autoscaling=args.autoscaling)
    prepare(args)
    return build_openai_app({"llm_configs": [config], **INGRESS})
