"""Kinds of models: chunks survive restarts of engine and node, and the answers are those of an engine without raykv.

For each model, one engine stores documents. Then this engine is closed, and its node is killed and started again. A new
engine gets up to 50 requests at once, which begin with parts of the documents. Its KV cache is large, so it must reuse
as much as an engine without raykv finds in its own cache. The next engine has such a small KV cache that requests are
preempted. Some of its requests are aborted, for example during a load.

In float32, all answers must equal those of the engine without raykv. In bfloat16, rounding depends on the batch. So an
answer may differ where that engine gave the two likeliest tokens nearly equal probabilities. But a request that runs
alone must give the same bits after a load as after a hit in the engine's own cache.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


import raykv
from deployments.model import ensure_model
from tests.support.engines import BLOCK, LATENT_BLOCK, Engine, prompt, write_gemma, write_mla, write_model, write_next
from tests.support.nodes import NODE, SECRET, run
from tests.support.soak import soak

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.usefixtures("no_full_collections")]

SEED = 7
TOKENS = 8
MOST_S = 2.0
"""A slowed load waits at most this many seconds for steps of the engine, because an idle engine may make none."""
ABORTED = 12
NEARLY_EQUAL = 0.15
"""If two log probabilities differ by less than this, the rounding of bfloat16 may change their order."""
MIB = 1 << 20
LARGE = 256 * MIB


@dataclass(frozen=True)
class Kind:
    """A kind of model, and how its engines are made.

    Attributes:
        small: Bytes of a KV cache that is so small that requests are preempted.
        lengths: (Least, greatest) number of tokens of a document.
        count: Number of requests to the engine with the large KV cache.
        pressed: Number of requests to the engine with the small KV cache.
        long: Number of tokens in each answer of the engine with the small KV cache. It exceeds a block, because a
            request can be preempted only when it needs a new block.
    """

    write: Callable[[Path], Path]
    small: int
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (300, 900)
    count: int = 50
    pressed: int = 20
    long: int = 40


KINDS = {
    "SmolLM2": Kind(
        lambda _: ensure_model(),
        32 * MIB,
        arguments={"max_model_len": 512},
        lengths=(100, 300),
        count=16,
        pressed=12,
        long=24,
    ),
    "sliding window": Kind(write_gemma, 4 * MIB, arguments={"block_size": 128}, lengths=(300, 800), long=100),
    "states": Kind(write_next, 16 * MIB, "bfloat16", {"block_size": 16}, lengths=(300, 800), long=100),
    "latents": Kind(write_mla, 3 * MIB, "bfloat16", {"block_size": LATENT_BLOCK}, lengths=(300, 800), long=100),
    "drafter": Kind(lambda folder: write_model(folder, seed=0), 3 * MIB, lengths=(200, 500), long=100),
}


@contextmanager
def engine(kind: Kind, model: Path, address: str | None, **more: Any) -> Iterator[Engine]:
    arguments = {"kv_cache_memory_bytes": LARGE, "max_num_batched_tokens": 256, **kind.arguments, **more}
    if kind is KINDS["drafter"]:
        draft = model.parent / "draft"
        if not draft.exists():
            write_model(draft, seed=0)
        arguments["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with Engine(model, address, dtype=kind.dtype, **arguments) as made:
        yield made


@contextmanager
def node(shm_dir: Path) -> Iterator[Callable[[], None]]:
    """Run a node in another process. Yields a function that kills it, and restarts it with the same shared memory."""
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


def requests(documents: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """Draw requests. Each is a document or a part of one, followed by a question."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        document = rng.choice(documents)
        length = len(document) if rng.random() < 0.5 else rng.randint(1, len(document))
        made.append(prompt(1000 + number, rng.randint(1, 40), after=document[:length]))
    return made


def check_same(got: list[Any], plain: list[Any], exact: bool) -> None:
    """Check that two engines gave the same answers. Unless `exact`, tokens of nearly equal probability may differ."""
    for mine, theirs in zip(got, plain, strict=True):
        answer, expected = list(mine.outputs[0].token_ids), list(theirs.outputs[0].token_ids)
        if answer == expected:
            continue
        place = next(n for n, (one, other) in enumerate(zip(answer, expected, strict=True)) if one != other)
        best = sorted((each.logprob for each in theirs.outputs[0].logprobs[place].values()), reverse=True)
        assert not exact, f"{answer} instead of {expected}"
        assert best[0] - best[1] < NEARLY_EQUAL, f"{answer} instead of {expected}, {best} at {place}"


def slow_loads(patch: pytest.MonkeyPatch, engine: Engine, seed: int) -> None:
    """Let each load take two to four steps, so that requests are aborted and preempted while loads run."""
    get, rng = raykv.Client.get, random.Random(seed)

    def slow(client: raykv.Client, *arguments: Any, **options: Any) -> raykv.GetResult:
        last, until_s = engine.steps + rng.randint(2, 4), time.monotonic() + MOST_S
        while engine.steps < last and time.monotonic() < until_s:
            time.sleep(0.001)
        return get(client, *arguments, **options)

    patch.setattr(raykv.Client, "get", slow)


@dataclass(frozen=True)
class Ladder:
    """The documents, the requests, and the answers of an engine without raykv.

    Attributes:
        reusable: Number of tokens of the requests that the engine without raykv found in its own cache. For models with
            latents: how many tokens are in whole blocks of the documents, because vLLM does not cache latents on CPU.
        answers: Answers to all requests.
        long_answers: Longer answers to the first `kind.pressed` requests.
    """

    kind: Kind
    model: Path
    documents: list[list[int]]
    asked: list[list[int]]
    reusable: int
    answers: list[Any]
    long_answers: list[Any]


def plain_answers(kind: Kind, model: Path, seed: int) -> Ladder:
    print(f"seed {seed}")
    draws = [random.Random(seed + number) for number in range(6)]
    documents = [prompt(seed + number, draw.randint(*kind.lengths)) for number, draw in enumerate(draws)]
    asked = requests(documents, kind.count, seed)
    with engine(kind, model, None) as plain:
        plain.answer(documents, count=TOKENS)
        plain.answer(asked, count=TOKENS, logprobs=2)
        answers, own = plain.outputs, plain.reused_tokens()
        plain.answer(asked[: kind.pressed], count=kind.long, logprobs=2)
        most = own or whole_blocks(documents, asked, kind.arguments.get("block_size", BLOCK))
        return Ladder(kind, model, documents, asked, most, answers, plain.outputs)


def whole_blocks(documents: list[list[int]], asked: list[list[int]], block: int) -> int:
    """Return how many tokens of the requests are in whole blocks of the documents."""

    def common(one: list[int], document: list[int]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], document, strict=False)))

    return sum(max(common(one, document) for document in documents) // block * block for one in asked)


def ask_all(ladder: Ladder, address: str) -> None:
    """Send all requests to an engine with a large KV cache, and check how much it reuses."""
    with engine(ladder.kind, ladder.model, address) as asking:
        asking.answer(ladder.asked, count=TOKENS, logprobs=2)
        check_same(asking.outputs, ladder.answers, exact=ladder.kind.dtype == "float32")
        print(f"{asking.reused_tokens()} tokens reused, {ladder.reusable} by an engine without raykv")
        assert asking.counted("reused_tokens") > 0
        assert asking.reused_tokens() >= 0.9 * ladder.reusable
        assert asking.counted("errors") == 0


def ask_under_pressure(ladder: Ladder, address: str, seed: int) -> None:
    """Send requests to an engine with a small KV cache, together with requests that are aborted."""
    kind = ladder.kind
    aborted = [prompt(5000 + number, 30, after=ladder.documents[number % 6]) for number in range(ABORTED)]
    with engine(kind, ladder.model, address, kv_cache_memory_bytes=kind.small) as small:
        with pytest.MonkeyPatch.context() as patch:
            slow_loads(patch, small, seed)
            states, preempted = small.answer_among(ladder.asked[: kind.pressed], aborted, count=kind.long, logprobs=2)
        check_same(small.outputs, ladder.long_answers, exact=kind.dtype == "float32")
        print(f"{small.preemptions()} preemptions of {preempted} answered requests, aborted: {dict(states)}")
        assert small.preemptions() >= preempted > 0
        assert states["loading"] > 0
        assert states["decoding"] > 0
        assert small.counted("reused_tokens") > 0
        assert small.counted("errors") == 0
        small.answer([[5, 6, 7]], count=1)  # a further step, to report loads of aborted requests
        assert small.is_idle()


def climb(kind: Kind, folder: Path, shm_dir: Path, seed: int) -> None:
    """Store documents, restart the engine and the node, and send the requests."""
    ladder = plain_answers(kind, kind.write(folder / "toy"), seed)
    with node(shm_dir) as restart:
        address = f"unix:{shm_dir}/raykv-t-n.sock"
        with engine(kind, ladder.model, address) as first:
            first.answer(ladder.documents, count=TOKENS)
            assert first.counted("stored_chunks", "stored") > 0
        restart()
        ask_all(ladder, address)
        ask_under_pressure(ladder, address, seed)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_is_reused_after_restarts_with_the_same_answers(name: str, tmp_path: Path, shm_dir: Path):
    climb(KINDS[name], tmp_path, shm_dir, SEED)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", KINDS)
def test_all_requests_are_answered_the_same_under_pressure(name: str, tmp_path: Path, shm_dir: Path):
    kind = replace(KINDS[name], lengths=(300, 800), count=50, pressed=50)
    if name == "SmolLM2":
        kind = replace(kind, small=64 * MIB, arguments={"kv_cache_memory_bytes": 512 * MIB})
    climb(kind, tmp_path, shm_dir, soak("seed", SEED))


@pytest.mark.parametrize("name", KINDS)
def test_a_load_equals_the_engines_own_prefix_hit_bit_for_bit(name: str, tmp_path: Path):
    """For models with latents, the test compares two loads, because vLLM does not cache latents on CPU."""
    kind = KINDS[name]
    model = kind.write(tmp_path / "toy")
    document = prompt(1, kind.lengths[1])
    with raykv.embedded(nodes=1, arena_nbytes="128 MiB", extent_nbytes="2 MiB") as cluster:
        with engine(kind, model, cluster.address(0)) as first:
            first.answer([document], count=TOKENS)
            first.answer([document], count=TOKENS)
            own, expected = first.reused_tokens(), first.logprobs()
        with engine(kind, model, cluster.address(0)) as second:
            second.answer([document], count=TOKENS)
            assert second.counted("reused_tokens") == second.reused_tokens() == own > 0
            assert second.logprobs() == expected
