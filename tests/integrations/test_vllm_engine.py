"""Real engines with real nodes: reuse changes what is computed, but never the answers.

Everything runs in this process. The model is small, but its random weights are so large that a wrong key or value
changes the answer. In float32, an engine that loads a prefix gives the same tokens as one that computes everything. In
bfloat16, a full computation may give other tokens because of rounding, even without raykv. There, an engine that loads
a prefix gives the same tokens as one that finds the prefix in its own cache.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import raykv
from tests.support.engines import BLOCK, CHUNK_NBYTES, Engine, prompt, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_full_collections")]

SHARED = prompt(0, 300)
PROMPTS = [SHARED, prompt(1, 45, after=SHARED[:200]), prompt(2, 20), prompt(3, 257), prompt(4, 33)]
COMMON = 200 // BLOCK * BLOCK
"""Number of tokens in whole blocks that the first two prompts share. One load of these tokens serves both prompts."""
FULL = sum((len(one) - 1) // BLOCK * BLOCK for one in PROMPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("a") / "toy", seed=0)


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    """Return the answers of an engine without a cache."""
    with Engine(model, None) as engine:
        return engine.answer(PROMPTS)


@pytest.fixture
def cluster() -> Iterator[raykv.EmbeddedCluster]:
    with raykv.embedded(nodes=2, arena_nbytes="64 MiB", extent_nbytes="1 MiB") as made:
        yield made


def fill(model: Path, cluster: raykv.EmbeddedCluster, node: int = 0, **arguments: Any) -> None:
    """Let an engine on that node compute and store all prompts."""
    with Engine(model, cluster.address(node), **arguments) as engine:
        before = chunks_of(cluster)
        engine.answer(PROMPTS)
        assert engine.counted("errors") == 0
    cluster.settle()
    assert chunks_of(cluster) > before


def chunks_of(cluster: raykv.EmbeddedCluster) -> int:
    with cluster.client(raykv.Namespace(model="any")) as client:
        return sum(node["chunks"] for node in client.stats()["nodes"].values())


def test_an_engine_on_another_node_reuses_all_and_answers_the_same(
    model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]]
):
    fill(model, cluster)
    with Engine(model, cluster.address(1)) as engine:
        assert engine.answer(PROMPTS) == answers
        assert engine.reused_tokens() == FULL
        assert engine.counted("loaded_tokens", "node-0", "tcp") == engine.counted("reused_tokens") >= FULL - COMMON
        assert engine.counted("loads", "whole") == engine.counted("loads")
        assert engine.counted("errors") == 0
        assert engine.counted("stored_chunks") == 0
        assert engine.answer(PROMPTS) == answers  # from the engine's own cache
        assert engine.reused_tokens() == FULL
        assert engine.counted("reused_tokens") >= FULL - COMMON
        assert engine.counted("stored_chunks") == 0


def test_what_was_decoded_is_reused_in_the_next_turn(model: Path, cluster: raykv.EmbeddedCluster):
    with Engine(model, cluster.address(0)) as engine:
        (said,) = engine.answer([SHARED], count=100)
    cluster.settle()
    following = prompt(9, 10, after=SHARED + said)
    with Engine(model, None) as engine:
        expected = engine.answer([following])
    with Engine(model, cluster.address(1)) as engine:
        assert engine.answer([following]) == expected
        # The last generated token was never an input, so its key and value do not exist.
        assert engine.counted("reused_tokens") == (len(SHARED) + len(said) - 1) // BLOCK * BLOCK


def test_decoded_chunks_are_not_stored_where_that_is_not_wanted(model: Path, cluster: raykv.EmbeddedCluster):
    with Engine(model, cluster.address(0), extra={"store_decode": False}) as engine:
        engine.answer([SHARED], count=100)
        assert engine.counted("stored_chunks", "stored") == len(SHARED) // BLOCK


def test_in_bfloat16_a_load_equals_the_engines_own_prefix_hit_bit_for_bit(model: Path, cluster: raykv.EmbeddedCluster):
    longest = [SHARED]
    with Engine(model, cluster.address(0), dtype="bfloat16") as engine:
        engine.answer(longest)
        own = engine.answer(longest)
        own_logprobs = engine.logprobs()
    cluster.settle()
    with Engine(model, cluster.address(1), dtype="bfloat16") as engine:
        assert engine.answer(longest) == own
        assert engine.logprobs() == own_logprobs
        assert engine.counted("reused_tokens") == (len(SHARED) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("chunk_blocks", [2, 3])
def test_chunks_of_several_blocks(
    model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]], chunk_blocks: int
):
    fill(model, cluster, extra={"chunk_blocks": chunk_blocks})
    with Engine(model, cluster.address(1), extra={"chunk_blocks": chunk_blocks}) as engine:
        assert engine.answer(PROMPTS[1:2]) == answers[1:2]  # leaves part of a chunk in the engine's own cache
        assert engine.answer(PROMPTS) == answers
        assert engine.counted("reused_tokens") > 0
        assert engine.counted("loads", "whole") == engine.counted("loads")


def test_preempted_requests_answer_the_same(model: Path, cluster: raykv.EmbeddedCluster):
    """The blocks suffice for about two of eight requests. A preempted request loads what it has stored before."""
    prompts = [prompt(20 + n, 100 + 9 * n, after=SHARED[: 40 * n]) for n in range(8)]
    with Engine(model, None) as engine:
        expected = engine.answer(prompts, count=120)
    for node in (0, 1):
        with Engine(model, cluster.address(node), num_gpu_blocks_override=34) as engine:
            assert engine.answer(prompts, count=120) == expected
            preemptions = sum(one.value for one in engine.llm.get_metrics() if one.name == "vllm:num_preemptions")
            assert preemptions > 0
            assert engine.counted("reused_tokens") > 0
            assert engine.counted("errors") == 0
        cluster.settle()


def test_a_holder_that_dies_between_lookup_and_load(
    model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    fill(model, cluster)
    with Engine(model, cluster.address(1), extra={"load_timeout_s": 2.0}) as engine:
        get = raykv.Client.get

        def die_first(client: raykv.Client, *arguments: Any, **options: Any) -> raykv.GetResult:
            if not cluster.nodes[0].stopped:
                cluster.kill(0)
            return get(client, *arguments, **options)

        monkeypatch.setattr(raykv.Client, "get", die_first)
        assert engine.answer(PROMPTS) == answers
        assert engine.counted("loads", "lost") > 0
        assert engine.counted("lost_tokens") > 0
        assert engine.answer(PROMPTS) == answers


def test_the_engines_own_node_dies(model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]]):
    with Engine(model, cluster.address(0)) as engine:
        assert engine.answer(PROMPTS[:2]) == answers[:2]
        cluster.kill(0)
        assert engine.answer(PROMPTS) == answers
        assert engine.counted("stored_chunks", "skipped") > 0


def test_damaged_bytes_never_reach_a_token(model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]]):
    fill(model, cluster)
    arena = cluster.nodes[0].store.arena.view
    for place in range(3 * CHUNK_NBYTES, len(arena), 8 * CHUNK_NBYTES):  # a byte in every eighth chunk
        arena[place] ^= 0xFF
    with Engine(model, cluster.address(1)) as engine:
        assert engine.answer(PROMPTS) == answers
        assert engine.counted("lost_tokens") > 0
        assert 0 < engine.counted("reused_tokens") < FULL


def test_an_engine_starts_before_its_node_and_finds_it_later(model: Path, answers: list[list[int]]):
    address = f"unix:@raykv-late-node-0-{os.getpid()}"
    with Engine(model, address) as engine:
        assert engine.answer(PROMPTS) == answers
        assert engine.counted("stored_chunks", "skipped") > 0
        with raykv.embedded(nodes=1, name="late", arena_nbytes="64 MiB") as late:
            assert late.address() == address
            until_s = time.monotonic() + 20
            while not engine.counted("stored_chunks", "stored") and time.monotonic() < until_s:
                time.sleep(0.2)
                assert engine.answer(PROMPTS) == answers
            # Chunks computed without a node stay in the engine's own cache, and are stored when a prompt comes again.
            assert engine.counted("stored_chunks", "stored") >= FULL // BLOCK - 200 // BLOCK
            engine.close()


def test_nothing_is_shared_across_models_dtypes_and_salts(
    model: Path, cluster: raykv.EmbeddedCluster, tmp_path: Path, answers: list[list[int]]
):
    fill(model, cluster)
    other = write_model(tmp_path / "toy", seed=1)
    with Engine(other, cluster.address(0)) as engine:
        assert engine.answer(PROMPTS) != answers
        assert engine.counted("reused_tokens") == 0
    with Engine(model, cluster.address(0), dtype="bfloat16") as engine:
        engine.answer(PROMPTS)
        assert engine.counted("reused_tokens") == 0
    with Engine(model, cluster.address(0)) as engine:
        assert engine.answer(PROMPTS, salt="tenant one") == answers
        assert engine.counted("reused_tokens") == 0
        assert engine.answer(PROMPTS, salt="tenant two") == answers
        assert engine.counted("reused_tokens") == 0
        assert engine.answer(PROMPTS) == answers
        assert engine.reused_tokens() == FULL
        assert engine.counted("reused_tokens") >= FULL - COMMON


def test_a_producer_only_stores_and_a_consumer_only_loads(
    model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]]
):
    fill(model, cluster, transfer={"kv_role": "kv_producer"})
    with Engine(model, cluster.address(0), transfer={"kv_role": "kv_producer"}) as engine:
        assert engine.answer(PROMPTS) == answers
        assert engine.counted("lookups") == 0
    with Engine(model, cluster.address(1), transfer={"kv_role": "kv_consumer"}) as engine:
        assert engine.answer(PROMPTS) == answers
        assert engine.reused_tokens() == FULL
        assert engine.counted("reused_tokens") >= FULL - COMMON
        assert engine.answer([prompt(50, 100)])
        assert engine.counted("stored_chunks") == 0


def test_a_hand_off_needs_no_lookup(
    model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """As in Ray Serve, the decode request gets the kv_transfer_params that the prefill request returned."""
    monkeypatch.setattr("raykv.integrations.vllm.lookups.HAND_OFF_WAIT_S", 5.0)  # long, for a busy machine
    with Engine(model, cluster.address(0)) as prefill:
        handed = []
        for one in PROMPTS:
            prefill.answer([one], count=1, params={"do_remote_decode": True, "do_remote_prefill": False})
            handed.append(json.loads(json.dumps(prefill.outputs[0].kv_transfer_params)))
    assert all(params["do_remote_prefill"] for params in handed)
    with Engine(model, cluster.address(1)) as decode:
        match = raykv.Client.match

        def only_tickets(
            client: raykv.Client, keys: Any, *, ticket: raykv.Ticket | None = None, **_: Any
        ) -> raykv.Match:
            assert ticket is not None
            return match(client, keys, ticket=ticket)

        monkeypatch.setattr(raykv.Client, "match", only_tickets)
        for one, params, expected in zip(PROMPTS, handed, answers, strict=True):
            assert decode.answer([one], params=params) == [expected]
        assert decode.counted("lookups", "ticket") == 4
        assert decode.counted("errors") == 0
        assert decode.counted("reused_tokens") >= len(SHARED) // BLOCK * BLOCK + 256


def test_a_ticket_names_the_nodes_from_which_the_prefill_engine_has_loaded(
    model: Path, cluster: raykv.EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
):
    fill(model, cluster)
    # The second time, the owners are asked. On a busy machine they answer later than a hand-off waits.
    monkeypatch.setattr("raykv.integrations.vllm.lookups.HAND_OFF_WAIT_S", 5.0)
    # By default, an engine computes what it would load too slowly, and so might this one on a busy machine.
    with Engine(model, cluster.address(1), extra={"load_policy": "always"}) as prefill:
        for _ in range(2):  # the second time, the engine has the chunks in its own cache
            prefill.answer([SHARED], count=1, params={"do_remote_decode": True, "do_remote_prefill": False})
            ((ticket,),) = [prefill.outputs[0].kv_transfer_params["raykv"]]
            assert ticket["runs"] == [{"node_id": "node-0", "chunks": len(SHARED) // BLOCK}]
        ticket["runs"][0]["chunks"] = 1  # as if the other chunks were not committed in time
        assert prefill.llm.reset_prefix_cache()
        loaded = prefill.counted("reused_tokens")
        prefill.answer([SHARED], params={"do_remote_prefill": True, "raykv": [ticket]})
        assert prefill.counted("reused_tokens") - loaded == len(SHARED) // BLOCK * BLOCK


def test_a_forged_ticket_is_a_miss(model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]]):
    fill(model, cluster)
    foreign = {"group": {"model": "x"}, "digest": "0" * 32, "runs": []}
    with Engine(model, cluster.address(1)) as engine:
        for ticket, one, expected in zip(["text", [], ["text"], [foreign]], PROMPTS[1:], answers[1:], strict=True):
            assert engine.answer([one], params={"do_remote_prefill": True, "raykv": ticket}) == [expected]
        assert engine.counted("errors", "lookup") == 2


def test_loads_that_could_fail_a_request_are_refused_at_start(model: Path, cluster: raykv.EmbeddedCluster):
    with pytest.raises(raykv.ConfigError, match=r"kv_load_failure_policy is 'fail'.*set it to 'recompute'"):
        Engine(model, cluster.address(0), transfer={"kv_load_failure_policy": "fail"})


def test_an_unknown_field_is_refused_at_start(model: Path, cluster: raykv.EmbeddedCluster):
    with pytest.raises(raykv.ConfigError, match="unknown field 'adress'"):
        Engine(model, cluster.address(0), extra={"adress": "x"})


def multi_connector(address: str) -> dict[str, Any]:
    child = {
        "kv_connector": "RayKVConnector",
        "kv_connector_module_path": "raykv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address},
    }
    outer = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
    return {**outer, "kv_connector_extra_config": {"connectors": [child]}}


def test_the_failure_policy_of_a_multi_connector_counts(model: Path, cluster: raykv.EmbeddedCluster):
    """The inner connector has a policy of its own, but vLLM obeys the policy of the MultiConnector."""
    outer = {**multi_connector(cluster.address(0)), "kv_load_failure_policy": "fail"}
    with pytest.raises(raykv.ConfigError, match=r"kv_load_failure_policy is 'fail'.*MultiConnector"):
        Engine(model, cluster.address(0), transfer=outer)


def test_it_works_and_reports_inside_a_multi_connector(
    model: Path, cluster: raykv.EmbeddedCluster, answers: list[list[int]]
):
    """MultiConnector looks up its connectors by name alone. If raykv's name were unknown, the engine would stop."""
    fill(model, cluster)
    with Engine(model, cluster.address(0), transfer=multi_connector(cluster.address(0))) as engine:
        assert engine.answer(PROMPTS) == answers
        assert engine.reused_tokens() == FULL
        assert engine.counted("reused_tokens") >= FULL - COMMON
