"""Several models behind one OpenAI server of Ray Serve. All share one raykv pool; other weights have other namespaces.

    serve run deployments/multi.yaml

Each model has its own workers and its own router. LoRA adapters of a model share its workers; their KV is kept apart.
"""

from typing import Annotated

from pydantic import Field, model_validator
from ray.serve import Application

from deployments.pd import INGRESS, llm_config, model_id, prepare
from deployments.replicas import ReplicaArgs
from raykv.config import Model, Name, Nbytes


class MultiArgs(Model):
    """The arguments of the Ray Serve app (`args` in multi.yaml).

    Attributes:
        models: The arguments of each model, without `pool` and `pool_nbytes`.
        pool, pool_nbytes: As in `EngineArgs`, for all models.
    """

    models: Annotated[list[ReplicaArgs], Field(min_length=1)]
    pool: Name = "default"
    pool_nbytes: Nbytes | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> "MultiArgs":
        names = [model_id(each) for each in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"field 'models': {', '.join(names)} are not different; set model_id")
        if any({"pool", "pool_nbytes"} & each.model_fields_set for each in self.models):
            raise ValueError("field 'models': set pool and pool_nbytes once, beside 'models'")
        return self


def build(args: MultiArgs) -> Application:
    """Build the app. The calling process must have joined Ray.

    Raises:
        ConfigError: The raykv cluster runs already, with another size; or a field of `Targets` is wrong.
    """
    from ray.serve.llm import build_openai_app  # imports vLLM, which takes seconds

    pool = {"pool": args.pool, "pool_nbytes": args.pool_nbytes}
    models = [each.model_copy(update=pool) for each in args.models]
    configs = [llm_config(each, each.replicas, each.resources, autoscaling=each.autoscaling) for each in models]
    prepare(models[0])
    return build_openai_app({"llm_configs": configs, **INGRESS})
