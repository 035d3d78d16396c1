"""Classes that put RayKVConnector in place of the connectors and mocks of vLLM's tests."""

import copy
import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import raykv
from raykv.integrations.vllm import connector as connector_module
from raykv.integrations.vllm.connector import RayKVConnector
from raykv.integrations.vllm.metadata import StepOrders
from raykv.protocol.namespace import Namespace

UNSET = object()
PATIENCE_S = 10.0
LOOKUP = "get_num_new_matched_tokens"


class StandIn(RayKVConnector):
    """RayKVConnector, made from a configuration for another connector, with a node for the tests.

    vLLM registers KV caches and passes the workers' handshake to the scheduler before the first request. Most tests
    leave this out, so a stand-in does both when it is made.

    Attributes:
        address: The node's address. Set by the fixture `stand_ins`, as the other attributes are.
        revision: The name of the running test, so that tests share no chunks.
        made: All stand-ins that the running test has made.
    """

    address: ClassVar[str] = ""
    revision: ClassVar[str] = ""
    made: ClassVar[list["StandIn"]] = []

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        cache = _with_groups(kv_cache_config, vllm_config)
        config = copy.copy(vllm_config)
        config.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config = {
            "address": self.address,
            "revision": self.revision,
            "load_policy": "always",
            "lookup_timeout_s": 5.0,
            "store_timeout_s": 5.0,
        }
        super().__init__(config, role, cache)
        StandIn.made.append(self)
        self.worker: RayKVConnector = self
        if role is KVConnectorRole.SCHEDULER:
            self.worker = RayKVConnector(config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches(_tensors(cache))
        if role is KVConnectorRole.SCHEDULER:
            handshake = self.worker.get_handshake_metadata()
            assert handshake is not None
            self.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})

    @property
    def namespace(self) -> Namespace:
        handshake = self.worker.get_handshake_metadata()
        assert handshake is not None
        return handshake.namespace  # type: ignore[attr-defined]

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the hash block size from the scheduler, because the KV cache configuration of the tests lacks it."""
        self._groups.hash_tokens = kv_cache_manager.block_pool.hash_block_size
        super().bind_kv_cache_manager(kv_cache_manager)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Accept the metadata of another connector as a step without orders."""
        is_ours = isinstance(connector_metadata, StepOrders)
        super().bind_connector_metadata(connector_metadata if is_ours else StepOrders())

    def __setattr__(self, name: str, value: Any) -> None:
        """If a test patches the lookup, install a `MatchHook`, which stores what the patch reports as found."""
        super().__setattr__(name, MatchHook(self, value) if name == LOOKUP else value)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up chunks. For a remote prefill, first store the chunks that the other engine would have computed."""
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self.store(request, num_computed_tokens, request.num_tokens)
        return self.look_up(request, num_computed_tokens)

    def look_up(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Ask until the lookup has ended. vLLM asks once in each step, but most tests expect the answer at once."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            answer = super().get_num_new_matched_tokens(request, computed)
            if answer[0] is not None:
                return answer
            time.sleep(0.001)
        raise TimeoutError(f"no answer to a lookup after {PATIENCE_S} s")

    def store(self, request: Any, start: int, stop: int) -> None:
        """Store a request's chunks from token `start` to token `stop`, filled with zeros."""
        side, worker = self.scheduler_side, self.worker.worker_side
        (client,) = side._lookups.clients(side.requests[request.request_id].scope).values()
        for group in self._groups.each:
            ends = self._groups.ends(group, request.block_hashes, start, stop)
            keys = client.keys([self._groups.name(group, request.block_hashes, end) for end in ends])
            nbytes = worker._cache.ranks[0].layouts[group.index].chunk_nbytes
            assert client.put(keys, [bytes(nbytes)] * len(ends), chained=False).skipped == 0

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Call the worker's hook. One test calls it on the scheduler's connector."""
        RayKVConnector.handle_preemptions(self.worker, kv_connector_metadata)

    def shutdown(self) -> None:
        if self.worker is not self:
            self.worker.shutdown()
        super().shutdown()


def _with_groups(config: KVCacheConfig, vllm_config: Any) -> KVCacheConfig:
    """Add a small group if the test gives none, because the connector refuses an engine without a KV cache."""
    if config.kv_cache_groups:
        return config
    block = vllm_config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return dataclasses.replace(config, num_blocks=8, kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def _tensors(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(config.num_blocks, group.kv_cache_spec.page_size_bytes, dtype=torch.uint8)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }


class Hook:
    """Replaces a mock of one of the connector's methods, and counts its calls.

    The test sets an answer as on a mock. The caller gets RayKVConnector's answer, which must equal the test's.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.call_count = 0
        self.return_value: Any = UNSET
        self.side_effect: Any = UNSET

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.call_count += 1
        answer = self._call(*arguments, **options)
        if self.return_value is not UNSET:
            given = tuple(answer) if isinstance(answer, list) else answer  # tests write tuples
            assert given == self.return_value, f"RayKVConnector answers {answer}, the test expects {self.return_value}"
        return answer


class MatchHook(Hook):
    """`get_num_new_matched_tokens`: stores the chunks that the test's answer reports as found, and looks them up."""

    def __init__(self, connector: StandIn, script: Any = None) -> None:
        super().__init__(connector.look_up)
        self._connector, self._script = connector, script

    def __call__(self, request: Any, computed: int) -> Any:
        if self._script is None:
            self._script = Mock(side_effect=self.side_effect)
        wanted, is_async = self._script(request, computed)
        if wanted is None:  # in this test, the lookup has not ended
            return None, False
        # A stored prefix ends at a whole chunk, and before the last token.
        size = self._connector._groups.each[0].chunk_tokens
        tokens = max(0, min(wanted, (request.num_tokens - 1 - computed) // size * size))
        self._connector.store(request, computed, computed + tokens)
        answer = super().__call__(request, computed)
        assert answer == (tokens, bool(tokens) and is_async), f"RayKVConnector finds {answer}, not {(tokens, is_async)}"
        return answer


class ScriptedConnector:
    """Takes the place of a mock connector. Every hook reaches the stand-in that the scheduler made last."""

    def __init__(self) -> None:
        self._connector = StandIn.made[-1]
        self.get_num_new_matched_tokens = MatchHook(self._connector)

    @property
    def __class__(self) -> type:
        return type(self._connector)  # for `isinstance`

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._connector, name)
        if callable(value):
            value = self.__dict__[name] = Hook(value)
        return value


@pytest.fixture(scope="session")
def raykv_node() -> Iterator[str]:
    with raykv.embedded(1, arena_nbytes="256 MiB", extent_nbytes="16 MiB") as cluster:
        yield cluster.address(0)


@pytest.fixture
def stand_ins(
    raykv_node: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[StandIn]]:
    """Prepare for stand-ins. Yields the list of those that the test makes, and closes them at the end."""
    alone = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(connector_module, "get_tp_group", lambda: alone)
    monkeypatch.setattr(connector_module, "get_pp_group", lambda: alone)
    StandIn.address, StandIn.revision, StandIn.made = raykv_node, request.node.nodeid, []
    yield StandIn.made
    for made in StandIn.made:
        made.shutdown()
