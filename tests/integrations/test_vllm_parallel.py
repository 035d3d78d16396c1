"""Two tensor ranks on one host: each in a process of its own, with the vLLM engine's scheduler in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch

import raykv
from tests.support.engines import BLOCK, Engine, prompt, write_mla, write_model
from tests.support.nodes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS = 500
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def no_file_of_vllm_stays() -> Iterator[None]:
    """VLLM leaves the shared memory through which its ranks exchange tensors."""
    folder = Path("/dev/shm")
    before = set(folder.glob("vllm_dist_*"))
    yield
    for path in set(folder.glob("vllm_dist_*")) - before:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("write", "chunks", "arguments"),
    [
        # Each rank stores its half of the heads.
        (lambda folder: write_model(folder, seed=0), 2 * (TOKENS // BLOCK), {"dtype": "float32"}),
        # Latents are equal on both ranks, so together they store each chunk once.
        (write_mla, TOKENS // 16, {"dtype": "bfloat16", "block_size": 16}),
    ],
    ids=["heads", "latents"],
)
def test_two_ranks_reuse_what_they_stored(
    write: Callable[[Path], Path], chunks: int, arguments: dict[str, Any], tmp_path: Path
):
    model, document = write(tmp_path / "toy"), prompt(1, TOKENS)
    with raykv.embedded(nodes=1, arena_nbytes="64 MiB", extent_nbytes="1 MiB") as cluster:

        def stored() -> int:
            return int(cluster.client(raykv.Namespace(model="any")).stats()["nodes"]["node-0"]["chunks"])

        publishing = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        with Engine(model, cluster.address(0), **TWO_RANKS, **arguments, kv_events_config=publishing) as engine:
            scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
            batches: list[KVEventBatch] = []
            scheduler.kv_event_publisher.publish = batches.append
            expected = engine.answer([document])
            while scheduler.has_requests():
                engine.llm.llm_engine.step()
            wait_until(lambda: stored() >= chunks)
            assert stored() == chunks
            events = [event for batch in batches for event in batch.events if event.medium == "CPU"]
            tokens = [token for event in events for token in event.token_ids]
            size = arguments.get("block_size", BLOCK)
            assert tokens == document[: TOKENS // size * size], "each block goes out once, when both ranks have it"
        with Engine(model, cluster.address(0), **TWO_RANKS, **arguments) as engine:
            assert engine.answer([document]) == expected
            assert engine.reused_tokens() >= TOKENS // BLOCK * BLOCK
            assert engine.counted("errors") == 0
        if write is write_mla:
            with Engine(model, cluster.address(0), **arguments) as engine:
                engine.answer([document])
                assert engine.reused_tokens() >= TOKENS // BLOCK * BLOCK, "an engine with one rank shares latents"
        assert stored() == chunks
