"""vLLM: a KV connector that stores what an engine computes, and loads what any engine has stored.

    --kv-transfer-config '{"kv_connector": "RayKVConnector",
                           "kv_connector_module_path": "raykv.integrations.vllm",
                           "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"address": "unix:/dev/shm/raykv-default-node0.sock"}}'

`docs/vllm.md` says which file does what.
"""

import importlib
from typing import Any

CONNECTOR = "RayKVConnector"
_MODULE = f"{__name__}.connector"


def register() -> None:
    """Register `RayKVConnector` by its name alone; calling this again does nothing.

    vLLM looks a connector up by name, without its module path, inside `MultiConnector` and when it logs the statistics
    of such a child, where an unknown name stops the engine. Importing the connector registers it in that process; the
    entry point in vLLM's group `vllm.general_plugins` does so in every process of an engine.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)
    except ValueError:
        pass  # registered already


def __getattr__(name: str) -> Any:
    """`RayKVConnector`, imported at first use: this module needs no vLLM, and the connector imports this module."""
    if name == CONNECTOR:
        return getattr(importlib.import_module(_MODULE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
