"""The router in front of two real vLLM replicas: sessions stay with their KV, and a burst computes its prefix once."""

import os
import random
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

import ray  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from deployments.demo import DRIVER_SETTINGS  # noqa: E402
from deployments.local_ray import LocalRay  # noqa: E402
from deployments.model import MODEL_PATH, ensure_model  # noqa: E402
from raykv import cluster  # noqa: E402
from tests.support.deployed import free_port, traces  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = "routed"
BURST = 16
WORDS = ["pump", "valve", "river", "gate", "level", "alarm", "night", "shift", "water", "report", "engine", "flood"]
Messages = list[dict[str, str]]


@dataclass
class Asked:
    """One answered request: its text, and how many tokens of its prompt were computed, and by which route."""

    text: str
    tokens: int
    computed: int
    route: dict[str, Any]


class App:
    """A running deployment and its client."""

    def __init__(self, port: int, name: str) -> None:
        from ray import serve

        self._handle = serve.get_app_handle(name)
        self._client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    def close(self) -> None:
        self._client.close()

    def ask(self, messages: Messages) -> Asked:
        answer = self._client.chat.completions.with_raw_response.create(
            model=MODEL_PATH.name, messages=messages, temperature=0, max_tokens=4
        )
        completion, usage = answer.parse(), answer.parse().usage
        *_, route = self.routes(answer.headers["x-request-id"])
        details = usage.prompt_tokens_details
        computed = usage.prompt_tokens - (details.cached_tokens or 0 if details else 0)
        return Asked(completion.choices[0].message.content, usage.prompt_tokens, computed, route)

    def routes(self, request_id: str) -> list[dict[str, Any]]:
        return self._handle.routes.remote(request_id).result(timeout_s=60)

    def ask_all(self, requests: list[Messages]) -> list[Asked]:
        """Send requests at the same time."""
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(self.ask, requests))

    def wait_for_reports(self) -> None:
        """Ask until the router knows the engines. Before that, it can only draw lots."""
        for number in range(100):
            if self.ask([{"role": "user", "content": text(number, 60)}]).route["reason"] != "power of two choices":
                return
            time.sleep(0.5)
        raise AssertionError("the router has no report")


def text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


@contextmanager
def running(app: Any, args: Any) -> Iterator[App]:
    """Run an app of `deployments` on one Ray node. Nothing is left behind."""
    before, port = traces(), free_port()
    os.environ.update(DRIVER_SETTINGS)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # if it is set, each child process compiles vLLM again
    with ExitStack() as stack:
        nodes = stack.enter_context(LocalRay([{}], cpus=8))
        ray.init(address=nodes.address, log_to_driver=False)
        stack.callback(ray.shutdown)
        stack.callback(cluster.stop, POOL)
        from ray import serve

        stack.callback(serve.shutdown)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(args), name="app")
        app = App(port, "app")
        stack.callback(app.close)
        yield app
    assert traces() - before == set()


def engine_args(**fields: Any) -> dict[str, Any]:
    return {
        "model": str(ensure_model()),
        "device": "cpu",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "block_tokens": 32,
        "kv_cache_nbytes": 256 << 20,
        "pool": POOL,
        "pool_nbytes": 256 << 20,
        "router": {},
        "engine": {"enable_prompt_tokens_details": True},
        **fields,
    }


def check_sessions(app: App) -> None:
    """The first turns are spread. Later turns compute nothing twice, and most go to the engine that has their KV.

    A request that has just ended may still count as a queue. Then the other replica loads the KV from memory.
    """
    sessions: list[Messages] = [[{"role": "user", "content": text(1000 + n, 300)}] for n in range(4)]
    homes = []
    for session, asked in zip(sessions, app.ask_all(sessions), strict=True):
        homes.append(asked.route["replica"])
        session.append({"role": "assistant", "content": asked.text})
    assert len(set(homes)) == 2, homes
    at_home = 0
    for turn in range(2):
        for number, session in enumerate(sessions):
            session.append({"role": "user", "content": text(2000 + 10 * turn + number, 20)})
            asked = app.ask(session)
            at_home += asked.route["replica"] == homes[number]
            homes[number] = asked.route["replica"]
            assert asked.route["reason"] in ("cached", "stored"), str(asked.route)
            assert asked.computed < 100, "the engine has the earlier turns, or loads them"
            session.append({"role": "assistant", "content": asked.text})
    assert at_home >= 6, f"{at_home} of 8"


def burst(seed: int) -> list[Messages]:
    prefix = {"role": "system", "content": text(seed, 2000)}
    return [[prefix, {"role": "user", "content": f"Question {number}?"}] for number in range(BURST)]


def distinct_tokens(requests: list[Messages]) -> int:
    """Return the number of tokens of requests that share a prefix, with the prefix counted once."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    texts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in requests]
    tokens = [tokenizer.encode(each) for each in texts]
    common = next(place for place, column in enumerate(zip(*tokens, strict=False)) if len(set(column)) > 1)
    assert common > 2000
    return common + sum(len(each) - common for each in tokens)


def check_burst(app: App) -> None:
    requests = burst(1)
    answers = app.ask_all(requests)
    routes = [(asked.computed, asked.route["reason"], asked.route["waited_s"]) for asked in answers]
    assert sum(asked.computed for asked in answers) <= 1.2 * distinct_tokens(requests), routes


@pytest.mark.soak
def test_sessions_stay_and_a_burst_computes_its_prefix_once():
    from deployments import replicas

    with running(replicas.build, replicas.ReplicaArgs(**engine_args())) as app:
        app.wait_for_reports()
        check_sessions(app)
        check_burst(app)


def computed_tokens() -> int:
    """Return how many prompt tokens all engines have computed, by vLLM's counters."""
    total = 0
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            for line in response.read().decode().splitlines():
                if line.startswith("ray_vllm_prompt_tokens_by_source_total"):
                    total += int(float(line.rpartition(" ")[2])) if 'source="local_compute"' in line else 0
    return total


@pytest.mark.soak
def test_a_burst_is_prefilled_once():
    """With two prefill and two decode replicas: each decode replica has a router of its own for prefill."""
    from deployments import pd

    args = pd.PDArgs(**engine_args(prefill_replicas=2, decode_replicas=2))
    with running(pd.build, args) as app:
        app.wait_for_reports()
        requests, before = burst(3), computed_tokens()
        answers = app.ask_all(requests)
        time.sleep(3)  # Ray exports metrics every half second
        assert {asked.route["deployment"].partition(":")[0] for asked in answers} == {"Decode"}
        computed = computed_tokens() - before
        # Decode loads whole blocks, and computes the rest of each prompt.
        most = 1.2 * distinct_tokens(requests) + BURST * args.block_tokens
        assert 2000 < computed <= most, str([each.route for each in answers])
