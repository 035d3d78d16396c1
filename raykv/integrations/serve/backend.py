"""Connects each replica of `ray.serve.llm` to the raykv node on the replica's Ray node, before the engine starts.

The replica's process finds the address of the raykv node, because this process can use Ray. The engine's processes
cannot use Ray, so they read the address from the connector's configuration.
"""

import time
from typing import TYPE_CHECKING, Any, Final

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from raykv.cluster import find_address
from raykv.errors import ConfigError, PeerUnavailable
from raykv.integrations.serve.reporting import ReportingEngine
from raykv.protocol.ticket import HAND_OFF, MAX_HAND_OFF

if TYPE_CHECKING:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import RequestType
    from vllm.config import VllmConfig

CONNECTOR: Final = "RayKVConnector"
FIND_NODE_S: Final = 60.0
"""`setup` waits at most this long for the raykv node, which starts a few seconds after its Ray node."""
POLL_S: Final = 0.5


def register() -> None:
    """Register the backend for all replicas of this Ray cluster. Safe to call again."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, f"{__name__}:{RayKVBackend.__name__}")


class RayKVBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """Sets up `RayKVConnector` in a replica.

    By default, the prefill engine answers with a ticket, which names the holders of the prompt's chunks. Ray Serve
    passes this ticket to the decode engine in `kv_transfer_params`. With "concurrent_hand_off", both engines get the
    request at once, with the same id of a hand-off, and the decode engine loads while the prefill engine computes.

    Attributes:
        concurrent_handoff: Whether both engines get a request at once. Ray Serve reads it.
    """

    concurrent_handoff: bool = False

    def setup(self) -> None:
        """Configure the address of the raykv node on this Ray node, unless an address is configured already.

        Raises:
            ConfigError: A field of `kv_connector_extra_config` is wrong.
            PeerUnavailable: No raykv node runs on this Ray node; start one with `raykv up`.
        """
        extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        cluster, concurrent = extra.pop("cluster", "default"), extra.pop("concurrent_hand_off", False)
        if not isinstance(concurrent, bool):
            raise ConfigError(
                f"field 'concurrent_hand_off' of kv_connector_extra_config: {concurrent!r}; give true or false"
            )
        self.concurrent_handoff = concurrent
        if extra.get("address") is None:
            extra["address"] = _wait_for_address(cluster)

    def prepare_prefill_request(self, *, request: "RequestType", peer: dict[str, Any] | None) -> "RequestType":
        """Return the request for the prefill engine."""
        prepared = super().prepare_prefill_request(request=request, peer=peer)
        if self.concurrent_handoff:
            prepared.kv_transfer_params[HAND_OFF] = request.request_id[:MAX_HAND_OFF]
        return prepared

    def prepare_decode_request(
        self, *, request: "RequestType", peer: dict[str, Any] | None, prefill_response: Any
    ) -> "RequestType":
        """Return the request for the decode engine."""
        prepared = super().prepare_decode_request(request=request, peer=peer, prefill_response=prefill_response)
        if self.concurrent_handoff:
            prepared.kv_transfer_params = {"do_remote_prefill": True, HAND_OFF: request.request_id[:MAX_HAND_OFF]}
        return prepared


class LocalModel(CallbackBase):
    """Skips the download of a model that is already in a folder on every node."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class OneProcessEngine(ReportingEngine):
    """An engine on CPU whose only worker runs in the engine's own process.

    By default Ray Serve uses vLLM's multi-process executor on CPU. That executor needs one more process, and its
    queues stay in /dev/shm when Ray kills the replica.
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
            return find_address(cluster)
        except PeerUnavailable:
            if time.monotonic() > until_s:
                raise
        time.sleep(POLL_S)
