"""Two tensor ranks on one host: each in a process of its own, with the vLLM engine's scheduler in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import raykv
from tests.support.engines import BLOCK, Engine, prompt, write_mla, write_model
from tests.support.nodes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS = 500
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


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

        with Engine(model, cluster.address(0), **TWO_RANKS, **arguments) as engine:
            expected = engine.answer([document])
            wait_until(lambda: stored() >= chunks)
            assert stored() == chunks
        with Engine(model, cluster.address(0), **TWO_RANKS, **arguments) as engine:
            assert engine.answer([document]) == expected
            assert engine.reused_tokens() >= TOKENS // BLOCK * BLOCK
            assert engine.counted("errors") == 0
        if write is write_mla:
            with Engine(model, cluster.address(0), **arguments) as engine:
                engine.answer([document])
                assert engine.reused_tokens() >= TOKENS // BLOCK * BLOCK, "an engine with one rank shares latents"
        assert stored() == chunks
