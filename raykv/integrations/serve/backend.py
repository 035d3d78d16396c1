"""Gives each replica of `ray.serve.llm` the raykv node of its own Ray node, before its engine starts.

Ray Serve looks up the backend of a connector in the replica's process, which can use Ray. The engine runs in child
processes, which cannot: they get the address in the connector's configuration.
"""

import time
from typing import TYPE_CHECKING, Any, Final

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

from raykv.cluster import find_address
from raykv.errors import PeerUnavailable

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR: Final = "RayKVConnector"
FIND_NODE_S: Final = 60.0
"""A Ray node that has just joined has its raykv node within seconds."""
POLL_S: Final = 0.5


def register() -> None:
    """Register the backend for all replicas of this Ray cluster; calling it again does nothing."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, f"{__name__}:{RayKVBackend.__name__}")


class RayKVBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """Sets `RayKVConnector` up in a replica.

    Ray Serve does the hand-off: the prefill engine's ticket becomes the decode engine's `kv_transfer_params`.
    """

    def setup(self) -> None:
        """Set the connector's address, unless it has one, from the name of the raykv cluster.

        Raises:
            PeerUnavailable: No raykv node runs on this Ray node; start one with `raykv up`.
        """
        extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        cluster = extra.pop("cluster", "default")
        if extra.get("address") is None:
            extra["address"] = _wait_for_address(cluster)


class LocalModel(CallbackBase):
    """For a model in a folder on every node: nothing is downloaded, so no worker starts for that."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class OneProcessEngine(VLLMEngine):
    """An engine on CPU whose only worker runs in the engine's own process.

    Ray Serve's default on CPU is vLLM's multi-process executor: one more process with all its imports, and queues in
    /dev/shm that stay there when Ray ends the replica.
    """

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: "VllmConfig", placement_group: Any
    ) -> Any:
        parallel = vllm_engine_config.parallel_config
        if parallel.world_size == 1:
            parallel.distributed_executor_backend = "raykv.integrations.serve.one_process.OneProcessExecutor"
        return super()._start_async_llm_engine(vllm_engine_args, vllm_engine_config, placement_group)


def _wait_for_address(cluster: str) -> str:
    until_s = time.monotonic() + FIND_NODE_S
    while True:
        try:
            return find_address(cluster)["address"]
        except PeerUnavailable:
            if time.monotonic() > until_s:
                raise
        time.sleep(POLL_S)
