"""Runs the cases of `test_mooncake_store_hma_e2e` through RayKVConnector.

The cases save blocks of a hybrid model, delete some of them, and look up prompts. The classes in this file have those
methods of Mooncake's classes that the cases use. RayKVConnector decides which blocks are saved, under which names,
which blocks a hit needs, and how long the hit is.
"""

import dataclasses
import math
import queue
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
from vllm_conformance.stand_in import PATIENCE_S, StandIn

from raykv.integrations.vllm.metadata import Save

BLOCKS = 16


def _coordinator(config: KVCacheConfig, hash_tokens: int) -> Any:
    """Make vLLM's coordinator, as the scheduler does."""
    return get_kv_cache_coordinator(
        config,
        max_model_len=4096,
        max_in_flight_tokens=8192,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*(group.kv_cache_spec.block_size for group in config.kv_cache_groups)),
        hash_block_size=hash_tokens,
    )


def request_of(name: str, hashes: list[bytes], tokens: int) -> Any:
    params = SamplingParams(max_tokens=1)
    request = Request(name, prompt_token_ids=[0] * max(1, tokens), sampling_params=params, pooling_params=None)
    request.block_hashes = hashes  # type: ignore[assignment]
    return request


class Names:
    """In place of `ChunkedTokenDatabase`: the names of one group's chunks."""

    def __init__(self, metadata: Any = None, *, block_size: int = 0, hash_block_size: int = 0, group: int = 0) -> None:
        self.group = group if metadata is None else metadata.group_id
        self.block_size, self.hash_block_size = block_size, hash_block_size
        self.base, self.nbytes = 0, 0

    def set_kv_caches_base_addr(self, bases: list[int]) -> None:
        (self.base,) = bases

    def set_block_len(self, nbytes: list[int]) -> None:
        (self.nbytes,) = nbytes

    def key_for(self, block_hash: bytes) -> str:
        return f"@group:{self.group}@{block_hash.hex()}"


class StoredKeys(MutableMapping[str, bytes]):
    """In place of the data of `_DictStore`: the saved keys whose chunks the node still holds."""

    def __init__(self) -> None:
        self.names: dict[str, bytes] = {}
        self.client: Any = None

    def __getitem__(self, key: str) -> bytes:
        if key in self.names and (self.client is None or self.client.exists([self.names[key]])[0]):
            return b""
        raise KeyError(key)

    def __setitem__(self, key: str, value: bytes) -> None:
        self.names[key] = value

    def __delitem__(self, key: str) -> None:
        name = [self.names.pop(key)]
        self.client.delete(name)
        until_s = time.monotonic() + PATIENCE_S
        while self.client.exists(name)[0]:  # the chunk's location is removed a little later
            assert time.monotonic() < until_s, f"{key} is still found"
            time.sleep(0.001)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Worker:
    """In place of `MooncakeStoreWorker`: both sides of one RayKVConnector, with vLLM's coordinator."""

    block_size, tp_rank, kv_role = 16, 0, "kv_both"
    _group_tp_replication_factors = (1,)

    def __init__(self, vllm_config: Any, config: KVCacheConfig, hash_tokens: int, store: Any) -> None:
        config = dataclasses.replace(config, num_blocks=BLOCKS, hash_block_size=hash_tokens)
        self.connector = StandIn(vllm_config, KVConnectorRole.SCHEDULER, config)
        coordinator = _coordinator(config, hash_tokens)
        pool = coordinator.block_pool
        self.connector.bind_kv_cache_manager(SimpleNamespace(coordinator=coordinator, block_pool=pool))
        self.pool, self.side = pool, self.connector.scheduler_side
        self.groups = self.connector._groups
        self.coord = SimpleNamespace(enable_partial_hash_hits=self.groups.has_fine_hits, worker=self)
        self.token_dbs = [
            Names(block_size=group.block_tokens, hash_block_size=hash_tokens, group=group.index)
            for group in self.groups.each
        ]
        store._data.client = self.client = next(iter(self.side._lookups.clients(self._scope()).values()))
        self._lookups = 0

    def _scope(self) -> Any:
        request = request_of("scope", [], 0)
        self.side.add(request)
        return self.side.requests.pop("scope").scope

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Do nothing: the stand-in has registered caches of the same shapes."""

    def lookup(self, num_tokens: int, block_hashes: list[bytes]) -> Any:
        self._lookups += 1
        request = request_of(f"lookup {self._lookups}", block_hashes, num_tokens)
        self.side.add(request)
        tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
        return SimpleNamespace(hit_length=tokens)

    def save(
        self, request: Any, tables: tuple[list[int], ...], states: list[tuple[int, int, int]], tokens: int
    ) -> list[Save]:
        """Run one step that computes `tokens` tokens and hands over `states`. Make and return its saves."""
        places = dict(zip((group.index for group in self.groups.each), tables, strict=False))
        full = [places.get(index, []) for index in range(max(places) + 1)]
        for group in self.groups.each if tokens else ():
            for end in self.groups.ends(group, request.block_hashes, 0, tokens):
                block = self.pool.blocks[places[group.index][end // group.block_tokens - 1]]
                if block.block_hash is None:  # vLLM hashes a block when it is full
                    name = request.block_hashes[end // self.groups.hash_tokens - 1]
                    block.set_block_hash(make_block_hash_with_group_id(name, group.index), end)
        self.side.add(request)
        if states:
            self.side.save_last_states(request, full, states)
        orders = self.side.orders(
            SimpleNamespace(
                total_num_scheduled_tokens=tokens,
                num_scheduled_tokens={request.request_id: tokens} if tokens else {},
                kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: full, boundary_state_offloads={}),
            )
        )
        worker = self.connector.worker.worker_side
        worker.save(orders.saves)
        wait([saving.future for saving in worker.saving])
        worker.count_saves()
        return orders.saves


class Sender:
    """In place of `KVCacheStoreSendingThread`."""

    def __init__(self, *, store: Any, token_databases: list[Names], coord: Any, **_: Any) -> None:
        self.store, self.token_databases, self.worker = store, token_databases, coord.worker
        self.request_queue: queue.Queue[Any] = queue.Queue()

    def add_request(self, request: Any) -> None:
        self.request_queue.put(request)

    def _handle_request(self, meta: Any) -> None:
        request = request_of(meta.req_id, meta.block_hashes, meta.token_len_chunk)
        self._record(self.worker.save(request, meta.block_ids, [], meta.token_len_chunk))

    def _maybe_offload_boundary_states(self, meta: Any) -> None:
        request = request_of(meta.req_id, meta.block_hashes, meta.num_prompt_tokens)
        self._record(self.worker.save(request, meta.block_ids, meta.boundary_puts, 0))

    def _record(self, saves: list[Save]) -> None:
        for save in saves:
            names = self.token_databases[[each.group for each in self.token_databases].index(save.group)]
            suffix = self.worker.groups.each[self.token_databases.index(names)].suffix
            for name, blocks in zip(save.names, save.blocks, strict=True):
                key = names.key_for(name.removesuffix(suffix))
                self.store._data[key] = name
                self.store.batch_put_from_multi_buffers(
                    [key], [[names.base + block * names.nbytes for block in blocks]], [[names.nbytes]]
                )


class Receiver:
    """In place of `KVCacheStoreRecvingThread`: requests the chunks of a load as if all chunks were stored."""

    def __init__(self, *, store: Any, token_databases: list[Names], coord: Any, **_: Any) -> None:
        self.store, self.token_databases, self.groups = store, token_databases, coord.worker.groups
        self.request_queue: queue.Queue[Any] = queue.Queue()

    def _handle_request(self, meta: Any) -> None:
        hashes, groups, tokens = meta.block_hashes, self.groups, meta.load_spec.token_len
        everything = {group.index: range(1, 1 << 20) for group in groups.each}
        hit = groups.longest(hashes, meta.load_spec.vllm_cached_tokens, tokens, everything)
        assert hit.tokens == tokens
        for names in self.token_databases:
            keys = [names.key_for(hashes[end // groups.hash_tokens - 1]) for end in hit.ends[names.group]]
            self.store.batch_get_into_multi_buffers(keys, [], [])


def replacements(make_config: Any, dict_store: type) -> dict[str, Any]:
    """Return the replacements for names of `test_mooncake_store_hma_e2e`."""

    class Store(dict_store):
        def __init__(self) -> None:
            self._data = StoredKeys()

        def batch_put_from_multi_buffers(self, keys: Any, addrs: Any, sizes: Any, *_: Any, **__: Any) -> list[int]:
            return [0] * len(keys)  # RayKVConnector has stored them

    def worker(vllm_config: Any, config: KVCacheConfig, store: Any) -> Worker:
        hash_tokens = vllm_config.cache_config.prefix_match_unit or vllm_config.cache_config.block_size
        return Worker(make_config(), config, hash_tokens, store)

    def coordinator(groups: Any, *, scheduler_block_size: int, hash_block_size: int, **_: Any) -> Any:
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        return Worker(make_config(), config, hash_block_size, Store()).coord

    return {
        "_DictStore": Store,
        "_build_worker_with_dict_store": worker,
        "_resolve_partial_tail": lambda _, meta: meta,
        "MooncakeStoreCoordinator": coordinator,
        "ChunkedTokenDatabase": Names,
        "KVCacheStoreSendingThread": Sender,
        "KVCacheStoreRecvingThread": Receiver,
    }
