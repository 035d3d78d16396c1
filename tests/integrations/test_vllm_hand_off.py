"""A decode engine loads the chunks of a prompt while a prefill engine computes them.

Both engines have vLLM's scheduler, the real connector and a toy model, which checks every slot that it reads.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import raykv
from raykv.integrations.vllm import hand_off as hand_off_module
from raykv.integrations.vllm import worker as worker_module
from raykv.integrations.vllm.hand_off import NOTES, id_of
from raykv.integrations.vllm.metadata import Load
from raykv.integrations.vllm.worker import WorkerSide
from raykv.protocol.ticket import HAND_OFF
from tests.integrations.test_vllm_scheduling import (  # noqa: F401
    BLOCK_TOKENS,
    Engine,
    cluster,
    expected,
    model,
    one_rank,
)

pytestmark = pytest.mark.vllm

PROMPT = list(range(93))
STEP_TOKENS = 24  # max_num_batched_tokens of the toy engines
OUTPUT = 5
LOADABLE = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
LONG_S = 30.0
STEPS_PER_S = 100  # of an engine that waits; in steps of 2 ms there would be hundreds

Pair = tuple[Engine, Engine]
MakePair = Callable[..., Pair]


@pytest.fixture
def pair(model: Path, cluster: raykv.EmbeddedCluster) -> Iterator[MakePair]:  # noqa: F811
    """Make a prefill engine at node 0, and a decode engine at `node`."""
    made: list[Engine] = []

    def make(node: int = 1, **options: Any) -> Pair:
        options = {"load_timeout_s": LONG_S, **options}
        addresses = cluster.address(0), cluster.address(node)
        made.extend(Engine(model, address, random.Random(1), threads=True, **options) for address in addresses)
        return made[0], made[1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose loads began while a prefill engine still computed."""
    names: list[str] = []
    follow = WorkerSide._follow

    def spy(side: WorkerSide, clients: Any, load: Load) -> Any:
        names.append(load.request_id)
        return follow(side, clients, load)

    monkeypatch.setattr(WorkerSide, "_follow", spy)
    return names


def begin(
    prefill: Engine | None, decode: Engine, name: str = "one", prompt: list[int] = PROMPT, *, salt: str = ""
) -> None:
    if prefill is not None:
        params = {"do_remote_decode": True, HAND_OFF: name}
        prefill.add(f"{name} prefill", prompt, max_tokens=1, salt=salt, params=params)
    params = {"do_remote_prefill": True, HAND_OFF: name}
    decode.add(f"{name} decode", prompt, max_tokens=OUTPUT, salt=salt, params=params)


def run_until(engine: Engine, condition: Callable[[], Any]) -> None:
    until_s = time.monotonic() + LONG_S
    while not condition():
        engine.step()
        assert time.monotonic() < until_s, "it never happens"


def filled(engine: Engine) -> int:
    """Return how many blocks hold anything."""
    return int((engine.slots[0, :, 0, 0, 0] >= 0).sum())


def finish(decode: Engine, name: str = "one") -> float:
    began_s = time.monotonic()
    run_until(decode, lambda: f"{name} decode" not in decode.scheduler.requests)
    assert decode.outputs[f"{name} decode"] == expected(PROMPT, OUTPUT)
    return time.monotonic() - began_s


@pytest.mark.parametrize("node", [0, 1])
def test_chunks_arrive_while_others_are_computed(pair: MakePair, followed: list[str], node: int):
    prefill, decode = pair(node)
    begin(prefill, decode)
    for _ in range(5):
        decode.step()
    assert not decode.loads, "nothing is stored yet, so no block is taken"
    for computed in range(STEP_TOKENS, len(PROMPT), STEP_TOKENS):
        before = prefill.scheduler.requests["one prefill"].num_computed_tokens
        run_until(prefill, lambda before=before: _computed(prefill) > before)
        assert prefill.scheduler.requests, "the prefill engine has more to do"
        run_until(decode, lambda computed=computed: filled(decode) >= computed // BLOCK_TOKENS)
        assert "one decode" in decode.loads, "the load goes on"
    prefill.run()
    finish(decode)
    assert decode.loaded_tokens == LOADABLE
    assert len(followed) == 1
    assert decode.counted["loads|whole"] == 1


def _computed(engine: Engine) -> int:
    request = engine.scheduler.requests.get("one prefill")
    return len(PROMPT) if request is None else request.num_computed_tokens


def test_a_prompt_that_is_stored_already_is_loaded_at_once(pair: MakePair):
    prefill, decode = pair()
    begin(prefill, decode)
    prefill.run()
    finish(decode)
    begin(None, decode, "two", PROMPT)  # no prefill engine works on it
    assert decode.scheduler.reset_prefix_cache()
    finish(decode, "two")
    assert decode.loaded_tokens == 2 * LOADABLE


def test_a_prefill_engine_that_stores_nothing_leaves_a_note(pair: MakePair, monkeypatch: pytest.MonkeyPatch):
    prefill, decode = pair()
    monkeypatch.setattr(worker_module, "MAX_SAVING_STEPS", 0)
    begin(prefill, decode)
    prefill.run()
    assert finish(decode) < LONG_S / 3
    assert decode.loaded_tokens == 0


def test_the_prompts_of_one_call_are_handed_over_each_for_itself(pair: MakePair):
    """A call for completions with several prompts makes several requests with the same id of a hand-off."""
    prefill, decode = pair()
    prompts = {"short": [500 + token for token in range(STEP_TOKENS)], "long": PROMPT}
    for name, prompt in prompts.items():
        params = {"do_remote_prefill": True, HAND_OFF: "one call"}
        decode.add(f"{name} decode", prompt, max_tokens=OUTPUT, salt="", params=params)
    for name, prompt in prompts.items():
        params = {"do_remote_decode": True, HAND_OFF: "one call"}
        prefill.add(f"{name} prefill", prompt, max_tokens=1, salt="", params=params)
        prefill.run()
        until_s = time.monotonic() + 10 * hand_off_module.NOTE_POLL_S
        while time.monotonic() < until_s:
            decode.step()
    finish(decode, "long")
    assert decode.loaded_tokens == LOADABLE + (STEP_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("ends", ["aborted", "skips the rest", "is killed"])
def test_the_chunks_before_the_end_of_a_prefill_engine_are_used(
    pair: MakePair, ends: str, monkeypatch: pytest.MonkeyPatch
):
    prefill, decode = pair(hand_off_timeout_s=1.0 if ends == "is killed" else LONG_S)
    begin(prefill, decode)
    run_until(prefill, lambda: _computed(prefill) >= 2 * STEP_TOKENS)
    run_until(decode, lambda: filled(decode) >= STEP_TOKENS // BLOCK_TOKENS)
    if ends == "aborted":
        prefill.abort("one prefill")
    elif ends == "skips the rest":
        monkeypatch.setattr(worker_module, "MAX_SAVING_STEPS", 0)
        prefill.run()
    assert finish(decode) < LONG_S / 3
    assert decode.counted["loads|partial"] == 1
    assert STEP_TOKENS <= decode.loaded_tokens < LOADABLE


def test_without_a_prefill_engine_the_wait_ends(pair: MakePair):
    _, decode = pair(hand_off_timeout_s=0.5)
    begin(None, decode)
    assert 0.5 <= finish(decode) < LONG_S / 3
    assert decode.loaded_tokens == 0


def test_a_decode_request_can_be_aborted_at_any_time(pair: MakePair):
    prefill, decode = pair(hand_off_timeout_s=0.5)
    begin(None, decode, "waits")
    decode.step()
    decode.abort("waits decode")
    begin(prefill, decode, "loads")
    run_until(prefill, lambda: prefill.scheduler.requests["loads prefill"].num_computed_tokens)
    run_until(decode, lambda: decode.loads)
    decode.abort("loads decode")
    run_until(decode, lambda: not decode.loads)
    run_until(decode, lambda: not decode.scheduler.requests)
    assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == decode.blocks - 1


@pytest.mark.parametrize("kinds", ["fww", "fs"])
def test_an_engine_that_needs_all_chunks_waits_for_the_note(pair: MakePair, followed: list[str], kinds: str):
    prefill, decode = pair(kinds=kinds)
    begin(prefill, decode)
    run_until(prefill, lambda: _computed(prefill) >= 2 * STEP_TOKENS)
    for _ in range(5):
        decode.step()
    assert not decode.loads
    prefill.run()
    finish(decode)
    assert decode.loaded_tokens > 0
    assert len(followed) == 0


def test_an_invalid_id_is_ignored(pair: MakePair):
    _, decode = pair()
    for number, forged in enumerate([7, "x" * 1000, ["x"], None, {}]):
        decode.add(f"{number} decode", PROMPT, max_tokens=OUTPUT, salt="", params={HAND_OFF: forged})
        assert finish(decode, str(number)) < LONG_S / 3


def test_a_forged_note_is_a_miss(pair: MakePair, cluster: raykv.EmbeddedCluster):  # noqa: F811
    _, decode = pair(store_decode=False)
    client = cluster.client(NOTES)
    notes = [b"", b"{", b"7", b'["x"]', b'[{"runs": 3}]', b"[[[[", bytes(range(256))]
    for number, note in enumerate(notes):
        assert decode.scheduler.reset_prefix_cache(reset_connector=True), "it must not find its own chunks"
        begin(None, decode, str(number))
        name = id_of(decode.scheduler.requests[f"{number} decode"], BLOCK_TOKENS)
        client.put([name.encode()], [note.ljust(4096)], chained=False)
        assert finish(decode, str(number)) < LONG_S / 3
    assert decode.loaded_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_many_requests(pair: MakePair, followed: list[str], seed: int):
    """Requests begin at random, and prefill requests are aborted at random. No slot may be wrong, and all must end."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefill, decode = pair(hand_off_timeout_s=1.0, overlap=seed == 1)
    prompts: dict[str, list[int]] = {}
    for turn in range(400):
        if turn < 300 and rng.random() < 0.15:
            name = f"r{turn}"
            prompts[name] = [rng.randrange(3) * 30 + token for token in range(rng.randint(1, 60))]
            begin(prefill, decode, name, prompts[name], salt=rng.choice(["", "s"]))
        if prefill.scheduler.requests and rng.random() < 0.02:
            prefill.abort(rng.choice(list(prefill.scheduler.requests)))
        for engine in rng.sample([prefill, decode], 2):
            engine.step()
    for engine in (prefill, decode):
        run_until(engine, lambda engine=engine: not engine.scheduler.requests and not engine.in_flight)
    for name, prompt in prompts.items():
        assert decode.outputs[f"{name} decode"] == expected(prompt, OUTPUT), name
    assert len(followed) > 0
    assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == decode.blocks - 1


def test_an_engine_that_only_waits_for_a_prefill_makes_few_steps(pair: MakePair):
    """Each step of a waiting engine takes time from a prefill engine on the same processors."""
    prefill, decode = pair()
    begin(prefill, decode)
    assert _steps_within(decode, 1.0) < STEPS_PER_S, "it waits for the first chunk"
    run_until(prefill, lambda: _computed(prefill) >= STEP_TOKENS)
    run_until(decode, lambda: filled(decode) >= STEP_TOKENS // BLOCK_TOKENS)
    assert _steps_within(decode, 1.0) < STEPS_PER_S, "it waits for further chunks"
    prefill.run()
    finish(decode)
    assert decode.loaded_tokens == LOADABLE


def test_a_request_that_comes_while_others_wait_for_a_prefill_is_not_kept_waiting(pair: MakePair):
    """Its lookup ends in a few steps, because the steps are short while such a lookup runs."""
    _, decode = pair()
    begin(None, decode)
    _steps_within(decode, 1.0)
    decode.add("new", PROMPT[:20], max_tokens=OUTPUT, salt="")
    began_s = time.monotonic()
    run_until(decode, lambda: "new" not in decode.scheduler.requests)
    assert decode.outputs["new"] == expected(PROMPT[:20], OUTPUT)
    assert time.monotonic() - began_s < LONG_S / 3
    decode.abort("one decode")


def test_engines_that_step_together_do_not_wait(pair: MakePair):
    """With data parallelism, the experts of one engine compute for the others: a step that waits delays all of them."""
    _, decode = pair(hand_off_timeout_s=1.0, data_parallel_size=2)
    begin(None, decode)
    assert _steps_within(decode, 0.5) > STEPS_PER_S, "each step ends at once"
    finish(decode)


def _steps_within(engine: Engine, seconds: float) -> int:
    until_s, steps = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        engine.step()
        steps += 1
    return steps
