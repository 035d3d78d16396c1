"""The KV connector for vLLM. It stores the KV that an engine computes, and loads the KV that any engine has stored.

    --kv-transfer-config '{"kv_connector": "RayKVConnector",
                           "kv_connector_module_path": "raykv.integrations.vllm",
                           "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"address": "unix:/dev/shm/raykv-default-node0.sock"}}'

`docs/vllm.md` describes the files of this package.
"""

import importlib
from typing import Any

CONNECTOR = "RayKVConnector"
_MODULE = f"{__name__}.connector"


def register() -> None:
    """Register `RayKVConnector` with vLLM by name. Safe to call again.

    `MultiConnector` looks up its connectors by name alone, and an unknown name stops the engine. This function has
    two callers: vLLM in every process of an engine, through the entry point `vllm.general_plugins`, and the connector's
    module when it is imported.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)
    except ValueError:
        pass  # registered already


def __getattr__(name: str) -> Any:
    """Import `RayKVConnector` or `state_revision` at first use. An earlier import would be circular and need vLLM."""
    if name in (CONNECTOR, "state_revision"):
        return getattr(importlib.import_module(_MODULE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
