"""vLLM: a KV connector that stores what an engine computes and loads what any engine has stored.

    --kv-transfer-config '{"kv_connector": "RayKVConnector",
                           "kv_connector_module_path": "raykv.integrations.vllm",
                           "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"address": "unix:/dev/shm/raykv-default-node0.sock"}}'

Files, in the order of a request's life: `connector` (vLLM's hooks, by role), `scheduler` (what to load and to save;
`tracked` is what it knows of a request), `metadata` (those orders), `worker` (carries them out), `layout` (where a
block's bytes lie); `config`, `checks`, `namespace`, `revision` and `connection` at start; `stats` all along.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.integrations.vllm.connector import RayKVConnector

__all__ = ["RayKVConnector", "register"]


def register() -> None:
    """Make `RayKVConnector` known to vLLM by its name alone; calling it again does nothing.

    vLLM looks a connector up by name, without its module path, in two places: inside `MultiConnector`, and when the
    statistics of such a child are logged, where an unknown name stops the engine. Importing the connector registers it
    in that process; an entry point in vLLM's group `vllm.general_plugins` would in every process of an engine.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("RayKVConnector", "raykv.integrations.vllm.connector", "RayKVConnector")
    except ValueError:
        pass  # it is known already


def __getattr__(name: str) -> Any:
    if name == "RayKVConnector":
        from raykv.integrations.vllm.connector import RayKVConnector

        return RayKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
