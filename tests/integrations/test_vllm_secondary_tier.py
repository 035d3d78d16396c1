"""raykv as a secondary tier of vLLM's offloading: vLLM's own connector, manager and host memory use a real cluster.

Only the copies between the GPU and host memory are missing: a test fills the rows of vLLM's host memory itself.
"""

import dataclasses
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager  # noqa: E402

import raykv  # noqa: E402
from raykv.errors import ConfigError  # noqa: E402
from raykv.integrations.vllm.config import TierConfig  # noqa: E402
from raykv.integrations.vllm.secondary_tier import RayKVTier, tier_namespace  # noqa: E402
from tests.support.nodes import stop_process, wait_until  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCK_TOKENS, BLOCKS, LAYERS = 16, 16, 2
ROWS = 8
"""Number of chunks that fit into vLLM's host memory."""
ROW_NBYTES = 8192
WAIT_S = 20.0
LONGEST_S = 0.1
"""Limit for a call of vLLM's manager. A call that waited for a node would take a whole timeout: 0.5 s or more."""
NO_STEP = ScheduleEndContext((), ())
DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"


def documented(address: str, **tier: Any) -> dict[str, Any]:
    """Return the configuration in docs/vllm.md with a small host memory, this address, and these fields of the tier."""
    (text,) = [each for each in re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL) if "RayKVTier" in each]
    fields = json.loads(text)
    extra = fields["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = ROWS * ROW_NBYTES
    patient = {"lookup_timeout_s": 5.0, "store_timeout_s": 5.0}  # so that a busy machine skips nothing
    extra["secondary_tiers"][0] |= {"address": address, **patient, **tier}
    return fields


def cache() -> KVCacheConfig:
    """Make a KV cache with a group of full attention and a group with a sliding window."""
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=32)]
    page = specs[0].page_size_bytes
    groups = [
        KVCacheGroupSpec([f"group.{place}.layer.{layer}" for layer in range(LAYERS)], spec)
        for place, spec in enumerate(specs)
    ]
    tensors = [
        KVCacheTensor(BLOCKS * page * LAYERS, [group.layer_names[layer] for group in groups], 0, page)
        for layer in range(LAYERS)
    ]
    return KVCacheConfig(BLOCKS, tensors, groups, hash_block_size=BLOCK_TOKENS)


def engine_config(model: Path, transfer: dict[str, Any], **changes: Any) -> Any:
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        max_model_len=128,
        distributed_executor_backend="uni",
        load_format="dummy",
        kv_transfer_config=transfer,
        **changes,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


def keys_of(numbers: range, *, group: int = 0) -> list[bytes]:
    return [make_offload_key(hashlib.sha256(b"chunk %d" % number).digest(), group) for number in numbers]


def content(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(ROW_NBYTES)


def unlink_memory(manager: TieringOffloadingManager) -> None:
    """Unlink the file of vLLM's host memory in /dev/shm now, so that it does not remain if the test is killed."""
    region = manager.primary_tier._mmap_region
    Path(region.mmap_path).unlink()
    region._creator = False


class Engine:
    """The scheduler's side of an engine with vLLM's offloading.

    Attributes:
        longest_s: Duration of the longest call of vLLM's manager so far.
    """

    def __init__(self, model: Path, transfer: dict[str, Any]) -> None:
        config = engine_config(model, transfer)
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache())
        self.manager = self.connector.connector_scheduler.manager
        assert isinstance(self.manager, TieringOffloadingManager)
        unlink_memory(self.manager)
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, RayKVTier)
        self.memory = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self.longest_s = 0.0
        self._names = count()
        self.request = self.new_request()

    def new_request(self) -> ReqContext:
        """Begin a request, to which the chunks of later calls belong."""
        self.request = ReqContext(f"request-{next(self._names)}")
        self.manager.on_new_request(self.request)
        return self.request

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        start_s = time.perf_counter()
        result = method(*arguments)
        self.longest_s = max(self.longest_s, time.perf_counter() - start_s)
        return result

    def step(self) -> None:
        self.call(self.manager.on_schedule_end, NO_STEP)
        time.sleep(0.001)

    def finish(self) -> None:
        """Step until all transfers have ended, and end the request."""
        until_s = time.monotonic() + WAIT_S
        while self.manager.has_pending_work():
            assert time.monotonic() < until_s
            self.step()
        self.manager.on_request_finished(self.request)
        self.new_request()

    def offload(self, keys: list[bytes], *, tokens: int = BLOCK_TOKENS) -> None:
        """Put chunks of one prompt into host memory, as if they came from the GPU. vLLM then stores them in raykv."""
        for number, key in enumerate(keys):
            self.request.set_offload_key_position(key, (number + 1) * tokens)
        prepared = self.call(self.manager.prepare_store, keys, self.request)
        assert prepared is not None, "vLLM's host memory is full of chunks that cannot be evicted"
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
            self.memory[row * ROW_NBYTES : (row + 1) * ROW_NBYTES] = content(key)
        self.call(self.manager.complete_store, prepared.keys_to_store, self.request)

    def store(self, keys: list[bytes]) -> None:
        self.offload(keys)
        self.finish()

    def evict(self) -> None:
        """Fill host memory with other chunks."""
        first = next(self._names) * ROWS + 1000
        self.store(keys_of(range(first, first + ROWS)))

    def find(self, keys: list[bytes]) -> list[LookupResult]:
        """Look up chunks as vLLM's scheduler does, until the answers are final."""
        until_s = time.monotonic() + WAIT_S
        while True:
            found = [self.call(self.manager.lookup, key, self.request) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return found
            assert time.monotonic() < until_s
            self.step()

    def read(self, keys: list[bytes]) -> list[bool]:
        """Load chunks, and check their bytes. Returns for each chunk whether it was found."""
        hits = [found is LookupResult.HIT for found in self.find(keys)]
        loaded = [key for key, hit in zip(keys, hits, strict=True) if hit]
        rows = self.manager.prepare_load(loaded, self.request).chunk_ids.tolist()
        for key, row in zip(loaded, rows, strict=True):
            assert self.memory[row * ROW_NBYTES : (row + 1) * ROW_NBYTES] == content(key), "wrong bytes"
        self.manager.complete_load(loaded, self.request)
        self.finish()
        return hits

    def close(self) -> None:
        self.memory.release()
        self.connector.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    sizes = {"intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps({**fields, **sizes, "max_position_embeddings": 256}))
    return folder


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=3, arena_nbytes="1 MiB", extent_nbytes="64 KiB") as made:
        yield made


Start = Callable[..., Engine]


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Return a function that starts an engine. Its arguments are a node's address and fields of the tier."""
    started: list[Engine] = []

    def start(address: str, **tier: Any) -> Engine:
        started.append(Engine(model, documented(address, **tier)))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def test_chunks_that_host_memory_has_evicted_come_back(start: Start, cluster: raykv.EmbeddedCluster):
    engine = start(cluster.address())
    engine.store(keys_of(range(6)))
    engine.evict()
    assert all(
        engine.manager.primary_tier.lookup(key, engine.request) is LookupResult.MISS for key in keys_of(range(6))
    )
    assert engine.read(keys_of(range(8))) == [True] * 6 + [False] * 2


@pytest.mark.parametrize("node", [0, 1])
def test_another_engine_finds_them_on_any_host(start: Start, cluster: raykv.EmbeddedCluster, node: int):
    start(cluster.address()).store(keys_of(range(6)))
    cluster.settle()
    assert start(cluster.address(node)).read(keys_of(range(6))) == [True] * 6


def test_groups_share_no_chunks(start: Start, cluster: raykv.EmbeddedCluster):
    engine = start(cluster.address())
    engine.store(keys_of(range(2), group=0))
    engine.evict()
    assert engine.read([*keys_of(range(2), group=1), *keys_of(range(2), group=0)]) == [False, False, True, True]
    engine.store(keys_of(range(2), group=1))
    engine.evict()
    assert engine.read([*keys_of(range(2), group=0), *keys_of(range(2), group=1)]) == [True] * 4


def test_a_holder_that_dies_before_the_load_is_a_miss(start: Start, cluster: raykv.EmbeddedCluster):
    start(cluster.address(1)).store(keys_of(range(4)))
    engine = start(cluster.address(0), load_timeout_s=2.0)
    engine.store(keys_of(range(4, 6)))
    engine.evict()
    cluster.settle()
    while LookupResult.RETRY in [engine.call(engine.manager.lookup, key, engine.request) for key in keys_of(range(6))]:
        engine.step()
    cluster.kill(1)  # the chunks were found, and their load begins with the next step
    assert engine.find(keys_of(range(6))) == [LookupResult.MISS] * 4 + [LookupResult.HIT] * 2
    engine.finish()
    engine.store(keys_of(range(4)))
    engine.evict()
    wait_until(lambda: engine.read(keys_of(range(6))) == [True] * 6)


def test_without_its_node_the_engine_goes_on(start: Start, cluster: raykv.EmbeddedCluster):
    engine = start(cluster.address())
    engine.store(keys_of(range(4)))
    cluster.kill(0)
    engine.evict()
    engine.store(keys_of(range(10, 14)))
    engine.evict()
    assert engine.longest_s < LONGEST_S
    assert not any(engine.read(keys_of(range(10, 14))))


def test_a_full_arena_skips_stores(start: Start, cluster: raykv.EmbeddedCluster, model: Path):
    engine = start(cluster.address())
    others = [cluster.client(raykv.Namespace(model="other")) for _ in range(8)]  # each pins a part of the arena
    stored = 0
    pins = []
    while True:
        names = [f"{stored} {number}" for number in range(8)]
        other = others[stored % len(others)]
        if other.put(names, [bytes(ROW_NBYTES)] * 8).skipped:
            break
        pins.append(other.pin(names).__enter__())
        stored += 1
    engine.store(keys_of(range(4)))
    assert engine.read(keys_of(range(4))) == [True] * 4, "vLLM's host memory has them"
    engine.evict()
    assert not any(engine.read(keys_of(range(4))))
    for each in pins:
        each.__exit__(None, None, None)
    engine.store(keys_of(range(4)))
    engine.evict()
    assert engine.read(keys_of(range(4))) == [True] * 4


def test_no_call_waits_for_a_stopped_node(start: Start, node: tuple[str, int]):
    address, pid = node
    engine = start(address, lookup_timeout_s=0.5, store_timeout_s=0.5, load_timeout_s=0.5)
    wait_until(lambda: engine.tier._client() is not None)
    engine.store(keys_of(range(4)))
    engine.evict()
    stop_process(pid)
    engine.longest_s = 0.0
    for first in range(10, 40, 10):
        engine.store(keys_of(range(first, first + 4)))
        assert engine.read(keys_of(range(6))) == [True] * 4 + [False] * 2, "this host's memory is read without the node"
        engine.evict()
    assert engine.longest_s < LONGEST_S
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: stored_again(engine))


def stored_again(engine: Engine) -> bool:
    engine.store(keys_of(range(50, 54)))
    engine.evict()
    return all(engine.read(keys_of(range(50, 54))))


def test_a_node_that_comes_later_is_used_from_then_on(
    start: Start, cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
):
    connect = raykv.connect
    absent = True

    def connect_later(*arguments: Any, **fields: Any) -> raykv.Client:
        if absent:
            raise raykv.PeerUnavailable("no node")
        return connect(*arguments, **fields)

    monkeypatch.setattr(raykv, "connect", connect_later)
    engine = start(cluster.address())
    engine.store(keys_of(range(2)))
    engine.evict()
    assert not any(engine.read(keys_of(range(2))))
    absent = False
    wait_until(lambda: engine.tier._client() is not None)
    engine.store(keys_of(range(2)))
    engine.evict()
    assert engine.read(keys_of(range(2))) == [True] * 2


def test_after_a_reset_nothing_older_is_found_and_nothing_newer_is_shared(start: Start, cluster: raykv.EmbeddedCluster):
    engine, other = start(cluster.address()), start(cluster.address())
    engine.store(keys_of(range(4)))
    engine.find(keys_of(range(20, 22)))
    engine.offload(keys_of(range(4, 6)))  # the transfer of these chunks runs during the reset
    assert engine.connector.reset_cache() is not False
    engine.new_request()
    assert not any(engine.read(keys_of(range(6))))
    engine.store(keys_of(range(10, 14)))
    engine.evict()
    assert engine.read(keys_of(range(10, 14))) == [True] * 4
    assert not any(other.read(keys_of(range(10, 14))))
    assert other.read(keys_of(range(4))) == [True] * 4


def test_a_reset_waits_for_running_jobs_and_cancels_queued_ones(start: Start, cluster: raykv.EmbeddedCluster):
    """Right after the reset, vLLM gives the rows of all jobs to other chunks."""
    engine = start(cluster.address())
    store, may_end = engine.tier._store, threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def store_slowly(client: raykv.Client, job: Any, timeout_s: float) -> Any:
        begun.append(job.job_id)
        may_end.wait(WAIT_S)
        result = store(client, job, timeout_s)
        ended.append(job.job_id)
        return result

    engine.tier._store = store_slowly
    for number in range(3):
        engine.offload(keys_of(range(number, number + 1)))
    wait_until(lambda: begun)
    timer = threading.Timer(0.2, may_end.set)
    timer.start()
    assert engine.connector.reset_cache() is not False
    assert len(begun) == len(ended) == 1
    timer.join()
    engine.new_request()
    assert stored_again(engine)


def test_an_engine_may_stop_while_chunks_are_on_their_way(start: Start, cluster: raykv.EmbeddedCluster):
    engine = start(cluster.address())
    engine.store(keys_of(range(6)))
    engine.evict()
    while LookupResult.RETRY in [engine.call(engine.manager.lookup, key, engine.request) for key in keys_of(range(4))]:
        engine.step()
    engine.step()
    engine.offload(keys_of(range(10, 14)))  # at the end of the test, the fixture `start` closes the engine


def test_a_prompt_is_stored_as_a_chain(start: Start, cluster: raykv.EmbeddedCluster):
    """Eviction takes a chain from its end. Here, several jobs store the prompt, each with chunks of two groups."""
    engine = start(cluster.address())
    for group in (0, 1):
        for number, key in enumerate(keys_of(range(4), group=group)):
            engine.request.set_offload_key_position(key, (number + 1) * BLOCK_TOKENS)
    for first in (0, 2):
        keys = [*keys_of(range(first, first + 2)), *keys_of(range(first, first + 2), group=1)]
        prepared = engine.manager.prepare_store(keys, engine.request)
        engine.manager.complete_store(prepared.keys_to_store, engine.request)
    engine.finish()
    store, client = cluster.nodes[0].store, engine.tier._client()
    for group in (0, 1):
        rows = store.table.find(client.keys(keys_of(range(4), group=group)))
        assert store.table.columns.depth[rows].tolist() == [0, 1, 2, 3]
        assert store.table.columns.parent[rows].tolist() == [-1, *rows[:3].tolist()]


# -- which engines are refused, and which share chunks ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}, "RayKVOffloadingConnector"),
        ({"kv_load_failure_policy": "fail"}, "recompute"),
    ],
)
def test_engines_that_are_refused(model: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        Engine(model, {**documented("unix:/dev/shm/raykv-nowhere.sock"), **changes})


def test_a_wrong_field_is_named(start: Start):
    with pytest.raises(ConfigError, match="'load_thread'"):
        start("unix:/dev/shm/raykv-nowhere.sock", load_thread=1)


def test_adapters_are_refused(model: Path):
    transfer = documented("unix:/dev/shm/raykv-nowhere.sock")
    config = engine_config(model, transfer, enable_lora=True)
    with pytest.raises(ConfigError, match="enable_lora"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache())


def test_every_condition_counts(start: Start, cluster: raykv.EmbeddedCluster, model: Path):
    config = engine_config(model, documented(cluster.address()))
    offloading = start(cluster.address()).tier._offloading_spec.config
    (group, window), parallel = offloading.groups, offloading.parallel

    def namespace(revision: str | None = None, **changes: Any) -> raykv.Namespace:
        return tier_namespace(config, dataclasses.replace(offloading, **changes), TierConfig(revision=revision))

    first, replace = namespace(), dataclasses.replace
    alike: list[dict[str, Any]] = [
        {"engine_id": "another"},
        {"extra_config": {}},
        {"parallel": replace(parallel, data_parallel_index=1, data_parallel_size=2)},
        {"model": replace(offloading.model, name="/elsewhere/toy")},
    ]
    assert {namespace(**changes).digest for changes in alike} == {first.digest}
    others: list[dict[str, Any]] = [
        {"revision": "2"},
        {"groups": (group,)},
        {"groups": (window, group)},
        {"groups": (replace(group, layer_names=("other",)), window)},
        {"worker_kv_bytes_per_block": 1},
        {"model": replace(offloading.model, dtype="fp8")},
        {"cache": replace(offloading.cache, blocks_per_chunk=2)},
        {"parallel": replace(parallel, world_size=2, tp_size=2)},
        {"parallel": replace(parallel, world_size=2, pp_size=2)},
        {"replicated_layout": True},
        {"canonical_layout": True},
        {"kv_cache_layout": "LBHNC"},
    ]
    digests = {namespace(**changes).digest for changes in others}
    assert len(digests | {first.digest}) == len(others) + 1
