"""Kinds of models: what is stored survives restarts of engine and node, and the answers stay those of a plain engine.

For each model one engine stores documents. Then the engine is closed, its node is killed and started again, and a new
engine gets 50 requests at once that begin with parts of these documents. Some are aborted, and the KV cache is so small
that requests are preempted. In float32 the answers must be equal. In bfloat16 the rounding depends on the batch, so an
answer may differ where the plain engine had two tokens of nearly equal probability; and a request that runs alone must
equal the engine's own prefix hit bit for bit.
"""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


import raykv
from tests.support.engines import Engine, prompt, write_gemma, write_mla, write_model, write_next
from tests.support.nodes import NODE, SECRET, run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SEED = 7
TOKENS = 8
NEARLY_EQUAL = 0.15
"""Two log probabilities may change places by the rounding of bfloat16 if they differ by less than this."""
MIB = 1 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of model, and how its engines are made. `memory`: bytes of the KV cache."""

    write: Callable[[Path], Path]
    memory: int
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "sliding window": Kind(write_gemma, 4 * MIB, arguments={"block_size": 128}),
    "states": Kind(write_next, 16 * MIB, "bfloat16", {"block_size": 16}),
    "latents": Kind(write_mla, 4 * MIB, "bfloat16", {"block_size": 16}),
    "drafter": Kind(lambda folder: write_model(folder, seed=0), 4 * MIB),
}


@contextmanager
def engine(kind: Kind, model: Path, address: str | None, **more: Any) -> Iterator[Engine]:
    arguments = {"kv_cache_memory_bytes": kind.memory, "max_num_batched_tokens": 256, **kind.arguments, **more}
    if kind is KINDS["drafter"]:
        draft = model.parent / "draft"
        if not draft.exists():
            write_model(draft, seed=0)
        arguments["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with Engine(model, address, dtype=kind.dtype, **arguments) as made:
        yield made


@contextmanager
def node(shm_dir: Path) -> Iterator[Callable[[], None]]:
    """Run a node in another process. The result kills it, and starts it again over the same memory."""
    fields = {"node_id": "n", "cluster": "t", "storage": {"arena_nbytes": "256 MiB", "shm_dir": str(shm_dir)}}

    @contextmanager
    def started() -> Iterator[Any]:
        with run(NODE, json.dumps(fields), SECRET) as process:
            assert process.stdout is not None
            assert process.stdout.readline(), "the node did not start"
            yield process

    current: list[Any] = []

    def restart() -> None:
        manager, process = current.pop()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        manager.__exit__(None, None, None)
        start()

    def start() -> None:
        manager = started()
        current.append((manager, manager.__enter__()))

    start()
    try:
        yield restart
    finally:
        current[0][0].__exit__(None, None, None)


def requests(documents: list[list[int]], count: int) -> list[list[int]]:
    """Draw requests: a document, or a part of it, and a question."""
    rng = random.Random(SEED)
    made = []
    for number in range(count):
        document = rng.choice(documents)
        length = len(document) if rng.random() < 0.5 else rng.randint(1, len(document))
        made.append(prompt(1000 + number, rng.randint(1, 40), after=document[:length]))
    return made


def check_same(got: Engine, plain: Engine, exact: bool) -> None:
    """Compare the last answers of both engines."""
    for mine, theirs in zip(got.outputs, plain.outputs, strict=True):
        answer, expected = list(mine.outputs[0].token_ids), list(theirs.outputs[0].token_ids)
        if answer == expected:
            continue
        place = next(n for n, (one, other) in enumerate(zip(answer, expected, strict=True)) if one != other)
        best = sorted((each.logprob for each in theirs.outputs[0].logprobs[place].values()), reverse=True)
        assert not exact, f"{answer} instead of {expected}"
        assert best[0] - best[1] < NEARLY_EQUAL, f"{answer} instead of {expected}, {best} at {place}"


@pytest.mark.parametrize("name", KINDS)
def test_a_model_is_reused_after_restarts_with_the_same_answers(name: str, tmp_path: Path, shm_dir: Path):
    kind = KINDS[name]
    model = kind.write(tmp_path / "toy")
    documents = [prompt(number, random.Random(number).randint(300, 900)) for number in range(6)]
    asked = requests(documents, 50)
    with engine(kind, model, None) as plain:
        plain.answer(documents, count=TOKENS)
        plain.answer(asked, count=TOKENS, logprobs=2)
        own = plain.reused_tokens()
    with node(shm_dir) as restart:
        address = f"unix:{shm_dir}/raykv-t-n.sock"
        with engine(kind, model, address) as first:
            first.answer(documents, count=TOKENS)
            assert first.counted("stored_chunks", "stored") > 0
        restart()
        with engine(kind, model, address) as second:
            second.abort_some(prompt(5000 + number, 30, after=documents[number]) for number in range(4))
            second.answer(asked, count=TOKENS, logprobs=2)
            print(f"{name}: reused {second.reused_tokens()} tokens, a plain engine {own}; seed {SEED}")
            check_same(second, plain, exact=kind.dtype == "float32")
            assert second.counted("errors") == 0
            assert second.counted("reused_tokens") > 0
            assert second.reused_tokens() >= 0.9 * own


@pytest.mark.parametrize("name", KINDS)
def test_a_load_equals_the_engines_own_prefix_hit_bit_for_bit(name: str, tmp_path: Path):
    """On CPU vLLM has no prefix cache for latents, so there the first engine's hit is a load too."""
    kind = KINDS[name]
    model = kind.write(tmp_path / "toy")
    document = prompt(1, 800)
    with raykv.embedded(nodes=1, arena_nbytes="128 MiB", extent_nbytes="1 MiB") as cluster:
        with engine(kind, model, cluster.address(0)) as first:
            first.answer([document], count=TOKENS)
            first.answer([document], count=TOKENS)
            own, expected = first.reused_tokens(), first.logprobs()
        with engine(kind, model, cluster.address(0)) as second:
            second.answer([document], count=TOKENS)
            assert second.counted("reused_tokens") == second.reused_tokens() == own > 0
            assert second.logprobs() == expected
