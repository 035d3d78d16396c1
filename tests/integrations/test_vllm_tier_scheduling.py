"""vLLM's real scheduler and OffloadingConnector with raykv as a secondary tier. Only the GPU is a toy.

A block of the toy GPU holds a hash of all tokens up to the block's end. Before a step computes anything, the test
checks the contents of the blocks that the step reads.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

import raykv  # noqa: E402
from tests.integrations.test_vllm_secondary_tier import (  # noqa: E402
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    ROW_NBYTES,
    documented,
    engine_config,
    model,
    unlink_memory,
)

__all__ = ["model"]
pytestmark = pytest.mark.vllm


def content(tokens: list[int]) -> bytes:
    return hashlib.shake_128(repr(tokens).encode()).digest(ROW_NBYTES)


def cache() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    names = [f"layer.{layer}" for layer in range(LAYERS)]
    size = BLOCKS * spec.page_size_bytes * LAYERS
    tensors = [KVCacheTensor(size, [name], 0, spec.page_size_bytes) for name in names]
    return KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(names, spec)], hash_block_size=BLOCK_TOKENS)


class Engine:
    """A scheduler over a toy GPU. `computed`: number of tokens computed so far."""

    def __init__(self, folder: Path, address: str) -> None:
        config = engine_config(folder, documented(address))
        config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache(),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        manager = self.scheduler.connector.connector_scheduler.manager
        unlink_memory(manager)
        self.memory = manager.primary_tier.get_kv_memoryview().cast("B")
        self.gpu: dict[int, bytes] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed = self.served = 0

    def serve(self, prompts: list[list[int]]) -> int:
        """Serve requests with these prompts, all at once. Returns the number of computed tokens."""
        before = self.computed
        for prompt in prompts:
            self.served += 1
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            self.scheduler.add_request(Request(f"r{self.served}", prompt, params, None, block_hasher=self.hasher))
        while self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.scheduler.update_from_output(step, self.execute(step))
        return self.computed - before

    def execute(self, step: Any) -> ModelRunnerOutput:
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            known = [] if name in cached.resumed_req_ids else self.tables[name]
            self.tables[name] = known + list(ids[0] if ids else ())
        sampled = [self.compute(name, count) for name, count in step.num_scheduled_tokens.items()]
        output, done = KVConnectorOutput(), OffloadingWorkerMetadata()
        orders = step.kv_connector_metadata
        for job_id, job in orders.store_jobs.items():
            for block, row in zip(job.src_spec.block_ids.tolist(), job.dst_spec.chunk_ids.tolist(), strict=True):
                self.memory[row * ROW_NBYTES : (row + 1) * ROW_NBYTES] = self.gpu[block]
            done.mark_completed(job_id)
        for job_id, job in orders.load_jobs.items():
            for row, block in zip(job.src_spec.chunk_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True):
                self.gpu[block] = bytes(self.memory[row * ROW_NBYTES : (row + 1) * ROW_NBYTES])
            done.mark_completed(job_id)
        output.finished_recving = {job.req_id for job in orders.load_jobs.values()}
        output.kv_connector_worker_meta = done
        names = list(step.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled_token_ids=sampled, kv_connector_output=output)

    def compute(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens  # vLLM has already added the tokens of this step
        tokens, table = list(request.all_token_ids), self.tables[name]
        for begin, end in pairwise(range(0, stop + 1, BLOCK_TOKENS)):
            block, right = table[begin // BLOCK_TOKENS], content(tokens[:end])
            if end <= stop - count:
                assert self.gpu[block] == right, f"{name}: a block does not hold its prefix"
            self.gpu[block] = right
        self.computed += count
        return [1] if stop >= request.num_tokens else []

    def close(self) -> None:
        self.memory.release()
        self.scheduler.shutdown()


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, arena_nbytes="4 MiB", extent_nbytes="256 KiB") as made:
        yield made


@pytest.fixture
def engines(model: Path, cluster: raykv.EmbeddedCluster) -> Iterator[list[Engine]]:
    made = [Engine(model, cluster.address(node)) for node in (0, 1)]
    yield made
    for engine in made:
        engine.close()


def test_an_engine_loads_what_another_one_has_computed(engines: list[Engine], cluster: raykv.EmbeddedCluster):
    first, second = engines
    prompt = [random.Random(0).randrange(100) for _ in range(5 * BLOCK_TOKENS + 3)]
    assert first.serve([prompt]) == len(prompt)
    cluster.settle()
    assert second.serve([prompt]) == 3


@pytest.mark.parametrize("dies", [False, True])
def test_prompts_that_share_prefixes_always_get_the_right_blocks(
    engines: list[Engine], cluster: raykv.EmbeddedCluster, dies: bool
):
    """Host memory and GPU hold so few blocks that many prefixes come from raykv. In one case a node dies halfway."""
    draw = random.Random(1)
    starts = [[draw.randrange(100) for _ in range(4 * BLOCK_TOKENS)] for _ in range(6)]
    total = computed = 0
    for turn in range(60):
        if dies and turn == 30:
            cluster.kill(1)
        prompts = [
            draw.choice(starts)[: draw.randrange(20, 64)] + [draw.randrange(100) for _ in range(9)] for _ in "ab"
        ]
        total += sum(map(len, prompts))
        computed += engines[turn % 2].serve(prompts)
    assert dies or computed < 0.6 * total
