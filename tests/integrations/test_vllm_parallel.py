"""Two tensor ranks on one host, each in its own process. The scheduler of the vLLM engine runs in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch

import raykv
from tests.support.engines import BLOCK, LATENT_BLOCK, Engine, prompt, write_mla, write_model
from tests.support.nodes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS = 500
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def no_file_of_vllm_stays() -> Iterator[None]:
    """Remove the shared memory through which ranks exchange tensors, because vLLM does not remove it."""
    folder = Path("/dev/shm")
    before = set(folder.glob("vllm_dist_*"))
    yield
    for path in set(folder.glob("vllm_dist_*")) - before:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("write", "copies", "arguments"),
    [
        # Each rank stores its half of the heads.
        (lambda folder: write_model(folder, seed=0), 2, {"dtype": "float32"}),
        # Latents are equal on both ranks, so the two ranks together store each chunk once.
        (write_mla, 1, {"dtype": "bfloat16", "block_size": LATENT_BLOCK}),
    ],
    ids=["heads", "latents"],
)
def test_engines_with_one_and_two_ranks_share_what_they_store(
    write: Callable[[Path], Path],
    copies: int,
    arguments: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two ranks store a prompt. One rank loads it, and stores another under two ranks. Then two ranks load both."""
    monkeypatch.setattr("raykv.integrations.vllm.lookups.HAND_OFF_WAIT_S", 5.0)  # long, for a busy machine
    model, first, second = write(tmp_path / "toy"), prompt(1, TOKENS), prompt(2, TOKENS)
    size = arguments.get("block_size", BLOCK)
    tokens = TOKENS // size * size
    chunks = copies * (TOKENS // size)
    with raykv.embedded(nodes=1, arena_nbytes="64 MiB", extent_nbytes="1 MiB") as cluster:

        def stored() -> int:
            return int(cluster.client(raykv.Namespace(model="any")).stats()["nodes"]["node-0"]["chunks"])

        publishing = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        with Engine(model, cluster.address(0), **TWO_RANKS, **arguments, kv_events_config=publishing) as engine:
            take = events_of(engine)
            expected = engine.answer([first])
            assert take() == first[:tokens], "each block goes out once, when both ranks have it"
            wait_until(lambda: stored() >= chunks)
            assert stored() == chunks
        wider = {"extra": {"store_tp_size": 2}, **arguments}
        with Engine(model, cluster.address(0), **wider, kv_events_config=publishing) as engine:
            take = events_of(engine)
            loaded = engine.answer([first])
            assert engine.counted("reused_tokens") == tokens
            if copies > 1:  # not with bfloat16, where one rank and two ranks may give different answers
                assert loaded == engine.answer([first], salt="computed")
            take()
            engine.answer([second], count=1, params={"do_remote_decode": True})
            assert take() == second[:tokens], "each block goes out once, when it is stored under both ranks"
            ticket = engine.outputs[0].kv_transfer_params
            assert len(ticket["raykv"]) == copies
            assert engine.counted("errors") == 0
        with Engine(model, cluster.address(0), **TWO_RANKS, **arguments) as engine:
            before = stored()
            assert engine.answer([first]) == expected
            loaded = engine.answer([second], params=ticket)
            assert engine.counted("reused_tokens") == 2 * tokens
            assert engine.counted("lookups", "ticket") == 1
            assert engine.counted("errors") == 0
            assert stored() == before
            if copies > 1:
                assert loaded == engine.answer([second], salt="computed")


def events_of(engine: Engine) -> Callable[[], list[int]]:
    """Return a function that runs the engine until it is idle, and returns the tokens of raykv's new KV events."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    batches: list[KVEventBatch] = []
    scheduler.kv_event_publisher.publish = batches.append

    def take() -> list[int]:
        while scheduler.has_requests():
            engine.llm.llm_engine.step()
        events = [event for batch in batches for event in batch.events if event.medium == "CPU"]
        batches.clear()
        return [token for event in events for token in event.token_ids]

    return take
