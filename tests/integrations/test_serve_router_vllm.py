"""The router reads requests as vLLM does, and Ray Serve's class around it never fails a request."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

import raykv
from deployments.model import ensure_model
from raykv.integrations.routing.choice import RouterOptions
from raykv.integrations.routing.locations import Run, Stored
from raykv.integrations.routing.prompts import PrefixEnd, Prompt
from raykv.integrations.routing.report import STATS_KEY, Adapter, EngineReport, ReplicaReport, TokenizerReport
from raykv.integrations.serve.lookup import Found, PromptLookup, naming_of
from raykv.integrations.serve.reporting import ReportListener
from raykv.integrations.serve.router import RayKVRouter
from raykv.integrations.serve.texts import Texts
from raykv.integrations.vllm.namespace import hash_algorithm
from raykv.integrations.vllm.stats import RayKVStats

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

BLOCK, CHUNK = 16, 64
DEPLOYMENT = DeploymentID("d", "app")
NAMESPACE = raykv.Namespace(model="m", chunk_tokens=CHUNK, hash_algorithm=hash_algorithm("sha256"))
ENGINE = EngineReport(namespace=NAMESPACE, suffix="/0", hash_tokens=BLOCK, cache_tokens=10_000, near=("n",))


@pytest.fixture(scope="module")
def model() -> str:
    return str(ensure_model())


@pytest.fixture(scope="module")
def texts(model: str) -> Texts:
    return Texts(TokenizerReport(tokenizer=model))


# -- as vLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("salt", "adapter"), [("", False), ("tenant", False), ("", True), ("tenant", True)])
def test_chunks_have_the_names_that_the_engine_gives_them(salt: str, adapter: bool):
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    tokens = [Random(7).randrange(50_000) for _ in range(1000)]
    request = Request(
        "r",
        tokens,
        SamplingParams(),
        None,
        lora_request=LoRARequest("base:poet", 1, "/adapters/poet") if adapter else None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )
    expected = [bytes(request.block_hashes[end // BLOCK - 1]) + b"/0" for end in range(CHUNK, 1001, CHUNK)]
    lookup = PromptLookup(RouterOptions())
    lookup._naming = naming_of(ENGINE)
    known = Adapter(path="/adapters/poet", scope="poet:1") if adapter else None
    naming = lookup._naming_of("base:poet" if adapter else "base", known, salt)
    assert naming is not None
    assert naming.extend(PrefixEnd(), tokens)[1] == expected


def test_the_chunks_of_an_adapter_that_no_replica_has_reported_have_no_names():
    """Otherwise its prompts would be found as those of the base model."""
    lookup = PromptLookup(RouterOptions())
    lookup._naming = naming_of(ENGINE)
    assert lookup._naming_of("base", None, "") is not None
    assert lookup._naming_of("base:poet", None, "") is None


def test_another_seed_gives_no_names():
    other = NAMESPACE.with_fields(hash_algorithm="sha256:0000")
    assert naming_of(ENGINE.model_copy(update={"namespace": other})) is None
    unknown = NAMESPACE.with_fields(hash_algorithm="md7:0000")
    assert naming_of(ENGINE.model_copy(update={"namespace": unknown})) is None


def conversation(rng: Random) -> list[dict[str, Any]]:
    pieces = ["word ", "Two words. ", "\n\n", "<|im_end|>", "1234", "   ", "Ünïcode ", "你好", "don't ", "\t", "x=y; "]

    def text() -> str:
        return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 1500)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}]
    for _ in range(rng.randrange(1, 5)):
        messages.append(
            {"role": "user", "content": [{"type": "text", "text": text()}, {"type": "text", "text": text()}]}
        )
        messages.append({"role": "assistant", "content": text()})
    return [*messages, {"role": "user", "content": text()}]


def test_the_segments_of_a_chat_have_the_tokens_of_the_whole(model: str, texts: Texts):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for seed in range(20):
        messages = conversation(Random(seed))
        text = texts.text(ChatCompletionRequest(model="m", messages=messages))
        assert isinstance(text, str)
        segments = texts.cutter.cut(text)
        assert len(segments) > len(messages)
        found = [token for part in texts.tokens(segments) for token in part]
        plain = [{**each, "content": joined(each["content"])} for each in messages]
        expected = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        assert text == expected, seed
        assert found == tokenizer.encode(expected, add_special_tokens=False), seed


def test_the_text_of_a_plain_chat_is_the_same_without_its_template(
    model: str, texts: Texts, monkeypatch: pytest.MonkeyPatch
):
    tokenizer, rendered = AutoTokenizer.from_pretrained(model), []
    render = texts._render
    monkeypatch.setattr(texts, "_render", lambda *given, **more: rendered.append(given) or render(*given, **more))
    for seed in range(20):
        plain = [{**each, "content": joined(each["content"])} for each in conversation(Random(seed))]
        plain = [
            {**each, "refusal": None, "tool_calls": [], "reasoning": None} if each["role"] == "assistant" else each
            for each in plain
        ]
        messages = plain[seed % 2 :]  # the template begins otherwise without a system message
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert texts.text(ChatCompletionRequest(model="m", messages=messages)) == expected, seed
    assert not rendered
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for more in ({"chat_template_kwargs": {"x": 1}}, {"tools": tools}, {"add_generation_prompt": False}):
        request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], **more)
        assert texts.text(request)
    assert len(rendered) == 3


def joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(each["text"] for each in content)


@pytest.mark.parametrize(
    "request_",
    [
        None,
        {},
        {"prompt": ""},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": [1, -2]},
        {"prompt": [1 << 40]},
        {"prompt": [True, "x"]},
        {"prompt": "x" * 2_000_001},
        {"messages": []},
        {"messages": "text"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{% for a in range(99999) %}{% endfor %}"},
        {"messages": [{"role": "user", "content": "x" * 2_000_001}]},
    ],
)
def test_prompts_that_are_not_supported_have_no_text(texts: Texts, request_: dict[str, Any] | None):
    assert texts.text(None if request_ is None else SimpleNamespace(**request_)) is None


def test_completions_have_text_or_tokens(texts: Texts):
    assert texts.text(SimpleNamespace(prompt="once")) == "once"
    assert texts.text(SimpleNamespace(prompt=["once"])) == "once"
    assert texts.text(SimpleNamespace(prompt=[5, 6])) == [5, 6]
    assert texts.text(SimpleNamespace(prompt=[[5, 6]])) == [5, 6]


# -- reports ----------------------------------------------------------------------------------------------------------


def step(stats: Any, *, running: int = 1) -> Any:
    return SchedulerStats(num_running_reqs=running, kv_connector_stats=stats)


def vllm_config(*, places: int) -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=places))


def test_an_engines_load_is_its_queue_and_its_used_places():
    listener = ReportListener(vllm_config(places=4), [0])
    report = ENGINE.model_copy(update={"queued_tokens": 3000, "seconds_per_token": 1e-3})
    stats = SchedulerStats(
        num_running_reqs=2, kv_cache_usage=0.25, kv_connector_stats={"report": report.model_dump_json()}
    )
    listener.record(stats, None)
    assert listener.load() == {"raykv_queue_s": 3.0, "raykv_slots": 0.5}
    full = SchedulerStats(num_running_reqs=2, kv_cache_usage=0.875)
    waiting = SchedulerStats(num_running_reqs=4, num_waiting_reqs=1, num_skipped_waiting_reqs=3)
    for each, slots in ((full, 0.875), (waiting, 2.0)):
        listener.record(each, None)
        assert listener.load()["raykv_slots"] == slots
    listener.record(SchedulerStats(), None)
    assert listener.load() == {"raykv_queue_s": 0.0, "raykv_slots": 0.0}


def test_the_report_passes_vllms_loggers_and_reaches_the_replica():
    stats, other = RayKVStats(), RayKVStats()
    stats.count("loads", 2, "whole")
    stats.report = ENGINE.model_dump_json()
    other.count("loads", 1, "whole")
    other.aggregate(stats)
    assert other.reduce() == {"loads|whole": 3}
    listener = ReportListener(vllm_config(places=8), [0])
    assert listener.load() == {}
    listener.record(step(other.data), None)
    assert listener.engine == ENGINE
    nested = {"RayKVConnector": {"report": ENGINE.model_copy(update={"queued_tokens": 7}).model_dump_json()}}
    listener.record(step(nested), None)
    assert listener.engine is not None
    assert listener.engine.queued_tokens == 7
    assert listener.queued_tokens == 7
    listener.record(step(None, running=0), None)
    assert listener.queued_tokens == 0, "it ended its last request, and makes no report after that"
    listener.record(None, None)
    for wrong in (None, {}, {"report": "{}"}, {"report": 3.0}, {"loads|whole": 1}):
        listener.record(step(wrong), None)
    assert listener.engine.queued_tokens == 7


# -- Ray Serve's class ------------------------------------------------------------------------------------------------


class FakeReplica:
    """What the router uses of Ray Serve's `RunningReplica`."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.multiplexed_model_ids: set[str] = set()
        self.node_id, self.availability_zone, self.max_ongoing_requests = "node", None, 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Serve:
    """A router with two replicas, in a running event loop."""

    def __init__(self, **options: Any) -> None:
        self.router = RayKVRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.UNKNOWN)
        self.router.initialize_state(**options)
        self.replicas = [FakeReplica("a"), FakeReplica("b")]
        self.router.update_replicas(self.replicas)  # type: ignore[arg-type]
        self.report(ReplicaReport(engine=ENGINE))
        self.requests = 0

    def report(self, report: ReplicaReport) -> None:
        self.router._routes.update({"a": report, "b": report}, time.monotonic())

    def request(self, *arguments: Any, adapter: str = "") -> PendingRequest:
        self.requests += 1
        name = f"r{self.requests}"
        return PendingRequest([*arguments], {}, RequestMetadata(name, f"i-{name}", multiplexed_model_id=adapter))

    async def choose(self, *arguments: Any, adapter: str = "") -> list[str]:
        """Return the names of the replicas in the order of preference."""
        ranks = await self.router.choose_replicas(self.router._replicas_list, self.request(*arguments, adapter=adapter))
        return [replica.replica_id.unique_id for rank in ranks for replica in rank]


def read_as(serve: Serve, prompt: Prompt, stored: Stored | None) -> None:
    """Let the lookup answer this."""

    async def read(request: Any) -> Found:
        return Found(prompt, None)

    async def ask(found: Found) -> Stored | None:
        return stored

    serve.router._lookup.read, serve.router._lookup.ask = read, ask  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not in time")


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.fixture
def unlogged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_requests_that_cannot_be_read_go_by_power_of_two_choices(unlogged: None, model: str):
    async def run() -> None:
        serve = Serve()
        for arguments in ((), (None,), (object(),), (Hostile(),)):  # the tokenizer is not loaded
            assert sorted(await serve.choose(*arguments)) == ["a", "b"]
        assert await serve.router.choose_replicas(serve.router._replicas_list, None)
        serve.router._lookup.use([ReplicaReport(tokenizer=TokenizerReport(tokenizer=model))])
        await until(lambda: serve.router._lookup._loaded is not None)
        for arguments in ((), (None,), (object(),), (Hostile(),), (SimpleNamespace(messages=[{"content": 5}]),)):
            assert sorted(await serve.choose(*arguments)) == ["a", "b"]
        assert serve.router.failures == 2
        assert not list(serve.router.trail)
        # Without raykv, a prompt that can be read is remembered all the same.
        chat = SimpleNamespace(messages=[{"role": "user", "content": "Is this the same text? " * 100}], model="m")
        first = (await serve.choose(chat))[0]
        assert {(await serve.choose(chat))[0] for _ in range(10)} == {first}
        reasons = [each.reason for each in serve.router.trail]
        assert reasons[0] == "power of two choices"
        assert set(reasons[1:]) == {"computing"}

    asyncio.run(run())


def test_a_tokenizer_that_cannot_be_loaded_costs_no_request(tmp_path: Any):
    async def run() -> None:
        serve = Serve()
        serve.router._lookup.use([ReplicaReport(tokenizer=TokenizerReport(tokenizer=str(tmp_path)))])
        await until(lambda: serve.router._lookup._loading is None)
        assert len(await serve.choose(SimpleNamespace(prompt="text"))) == 2

    asyncio.run(run())


def test_a_request_waits_in_the_router_but_not_too_many():
    async def run() -> None:
        serve = Serve(max_wait_s=5.0)
        no_cache = ENGINE.model_copy(update={"cache_tokens": 0, "seconds_per_token": 1e-4, "chunk_nbytes": 1})
        serve.report(ReplicaReport(engine=no_cache))
        prompt = Prompt([b"key"], [1000])
        read_as(serve, prompt, Stored())
        await serve.choose("first")
        waiting = asyncio.gather(*(serve.choose(f"follower {n}") for n in range(6)))
        await asyncio.sleep(0.01)
        assert serve.router._waiting == serve.router.max_num_routing_tasks // 2 == 2
        await waiting
        assert serve.router._waiting == 0
        waited = [each.waited_s for each in serve.router.trail]
        assert sum(each > 0.05 for each in waited) == 2

    asyncio.run(run())


def test_a_waiting_request_goes_on_soon_after_its_prefix_is_stored():
    async def run() -> None:
        serve = Serve()
        engine = ENGINE.model_copy(update={"cache_tokens": 0, "seconds_per_token": 2e-3, "chunk_nbytes": 1})
        serve.report(ReplicaReport(engine=engine))
        prompt = Prompt([b"key"], [1000])
        read_as(serve, prompt, Stored())
        await serve.choose("first")
        follower = asyncio.ensure_future(serve.choose("follower"))
        await asyncio.sleep(0.1)
        assert serve.router._waiting == 1
        read_as(serve, prompt, Stored((Run(1000 // engine.chunk_tokens, ("n",)),), engine.namespace.digest))
        began_s = time.monotonic()
        await follower
        assert time.monotonic() - began_s < 1.0, "it was expected to be stored after 2 s"
        *_, routed = serve.router.trail
        assert routed.reason == "stored"

    asyncio.run(run())


def test_a_waiting_request_finds_its_prefix_although_its_chunks_had_no_names_at_first():
    """The tokens of short new text are made while its request waits."""

    async def run() -> None:
        serve = Serve()
        engine = ENGINE.model_copy(update={"cache_tokens": 0, "seconds_per_token": 2e-3, "chunk_nbytes": 1})
        serve.report(ReplicaReport(engine=engine))
        named, chunks = False, 1000 // engine.chunk_tokens
        there = Stored((Run(chunks, ("n",)),), engine.namespace.digest)

        async def read(_: Any) -> Found:
            return Found(Prompt([b"key"], [1000], [b"name"] * chunks if named else []), None)

        async def ask(found: Found) -> Stored:
            return there if found.prompt.names else Stored()

        serve.router._lookup.read, serve.router._lookup.ask = read, ask  # type: ignore[method-assign]
        await serve.choose("first")
        follower = asyncio.ensure_future(serve.choose("follower"))
        await asyncio.sleep(0.1)
        assert serve.router._waiting == 1
        named, began_s = True, time.monotonic()
        await follower
        assert time.monotonic() - began_s < 1.0, "it was expected to be stored after 2 s"
        *_, routed = serve.router.trail
        assert routed.reason == "stored"

    asyncio.run(run())


def test_ray_serves_hooks_keep_the_routes_in_order():
    async def run() -> None:
        serve = Serve()
        read_as(serve, Prompt([b"key"], [1000]), Stored())
        pending = serve.request("text")
        (first, *_), *_ = await serve.router.choose_replicas(serve.router._replicas_list, pending)
        other = next(each for each in serve.replicas if each.replica_id != first.replica_id)
        serve.router.on_request_routed(pending, other.replica_id, None)  # type: ignore[arg-type]
        assert [each.reason for each in serve.router.trail] == ["queue", "full"]
        assert "i-r1" in serve.router._routes.replicas[other.replica_id.unique_id].ongoing
        serve.router.on_request_completed(other.replica_id, "i-r1")
        serve.router.on_request_completed(other.replica_id, "unknown")
        assert not serve.router._routes.replicas[other.replica_id.unique_id].ongoing
        assert (await serve.choose("text"))[0] == other.replica_id.unique_id
        serve.router.on_replica_actor_died(other.replica_id)
        assert await serve.choose("text") == [first.replica_id.unique_id]

    asyncio.run(run())


def test_a_request_leaves_nothing_if_its_client_goes_before_it_is_sent():
    async def run() -> None:
        serve = Serve()
        read_as(serve, Prompt([b"key"], [1000]), Stored())
        pending = serve.request("text")
        for _ in range(3):  # all replicas are full
            await serve.router.choose_replicas(serve.router._replicas_list, pending)
        lines = [each.replica for each in serve.router.trail]
        assert all(one != next_one for one, next_one in pairwise(lines)), "a line for each change"
        assert sum(len(each.ongoing) for each in serve.router._routes.replicas.values()) == 1
        pending.future.cancel()
        await asyncio.sleep(0)
        assert not serve.router._routes._open
        assert not serve.router._routes._reserved
        for replica in serve.router._routes.replicas.values():
            assert (replica.ongoing, replica.cached([b"key"]), replica.queue_s(time.monotonic())) == ({}, 0, 0.0)

    asyncio.run(run())


def test_a_replica_that_rejects_a_request_does_not_end_it_elsewhere():
    async def run() -> None:
        serve = Serve()
        read_as(serve, Prompt([b"key"], [1000]), Stored())
        pending = serve.request("text")
        (first, *_), *_ = await serve.router.choose_replicas(serve.router._replicas_list, pending)
        (second,) = [each for each in serve.replicas if each is not first]
        pending.reset_future()
        ((again, *_),) = await serve.router.choose_replicas([second], pending)  # type: ignore[list-item]
        assert again is second
        serve.router.on_request_completed(first.replica_id, "i-r1")  # the call that was rejected
        assert serve.router._routes.chosen("i-r1") == second.replica_id.unique_id
        serve.router.on_request_routed(pending, second.replica_id, None)  # type: ignore[arg-type]
        assert [each.replica for each in serve.router.trail] == [
            first.replica_id.unique_id,
            second.replica_id.unique_id,
        ]
        serve.router.on_request_completed(second.replica_id, "i-r1")
        assert not serve.router._routes._open

    asyncio.run(run())


def test_requests_for_an_adapter_go_to_replicas_that_have_loaded_it():
    async def run() -> None:
        serve = Serve()
        serve.replicas[1].multiplexed_model_ids = {"base:poet"}
        serve.router.update_replicas(serve.replicas)  # type: ignore[arg-type]
        read_as(serve, Prompt([b"key"], [1000]), Stored())
        ranks = await serve.router.choose_replicas(
            serve.router._replicas_list, serve.request("text", adapter="base:poet")
        )
        assert [[each.replica_id.unique_id for each in rank] for rank in ranks] == [["b"], ["a"]], "a if b is full"
        assert len(await serve.choose("text")) == 2

    asyncio.run(run())


def test_reports_of_another_version_are_ignored():
    async def run() -> None:
        serve = Serve()
        infos = [
            SimpleNamespace(replica_id=each.replica_id, routing_stats=stats)
            for each, stats in zip(serve.replicas, ({STATS_KEY: {"new field": 1}}, {}), strict=True)
        ]
        serve.router.create_replica_wrapper = lambda info: next(  # type: ignore[method-assign]
            each for each in serve.replicas if each.replica_id == info.replica_id
        )
        serve.router._replicas = {}
        serve.router._update_running_replicas(infos)  # type: ignore[arg-type]
        assert sorted(serve.router._routes.replicas) == ["a", "b"]
        good = ReplicaReport(engine=ENGINE).model_dump(mode="json")
        assert ReplicaReport.model_validate(json.loads(json.dumps(good))).engine == ENGINE

    asyncio.run(run())
