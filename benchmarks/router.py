"""What the request router adds to a request: `python -m benchmarks.router`.

Fifty conversations of twenty turns, with the tokenizer of SmolLM2-135M and two raykv nodes in this process, which are
asked for every prompt. No engine and no Ray run. Prints the times of the router's three parts: reading the prompt
(template, tokens, names), looking it up in raykv, and choosing.
"""

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

import raykv
from deployments.model import ensure_model
from raykv.integrations.routing.choice import RouterOptions
from raykv.integrations.routing.report import EngineReport, ReplicaReport, TokenizerReport
from raykv.integrations.routing.routes import Routes
from raykv.integrations.serve.lookup import PromptLookup
from raykv.integrations.vllm.connection import Connection
from raykv.integrations.vllm.namespace import hash_algorithm

CONVERSATIONS, TURNS, CHUNK_TOKENS = 50, 20, 64
FIRST_WORDS, ANSWER_WORDS, QUESTION_WORDS = (50, 200, 1000), 60, 40
WORDS = ["pump", "valve", "river", "gate", "level", "alarm", "night", "shift", "water", "report", "engine", "flood"]


def main() -> None:
    namespace = raykv.Namespace(model="m", chunk_tokens=CHUNK_TOKENS, hash_algorithm=hash_algorithm("sha256"))
    with raykv.embedded(2, separate_hosts=True, arena_nbytes="64 MiB") as cluster:
        client = cluster.client(namespace, node=0)
        asyncio.run(measure(client, namespace))


async def measure(client: raykv.Client, namespace: raykv.Namespace) -> None:
    rng = random.Random(1)
    sizes = {"hash_tokens": CHUNK_TOKENS, "chunk_nbytes": 1 << 20, "cache_tokens": 1 << 20}
    engine = EngineReport(namespace=namespace, **sizes, seconds_per_token=1e-4)
    report = ReplicaReport(engine=engine, tokenizer=TokenizerReport(tokenizer=str(ensure_model())))
    lookup, routes = PromptLookup(RouterOptions()), Routes(RouterOptions(), rng)
    lookup._connection = Connection(lambda: client)
    lookup.use([report, report])
    routes.update({"a": report, "b": report}, time.monotonic())
    assert lookup._loading is not None
    await asyncio.to_thread(lookup._loading.join)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(words))

    conversations = [[message("user", text(rng.choice(FIRST_WORDS)))] for _ in range(CONVERSATIONS)]
    times: list[tuple[float, ...]] = []
    unanswered = 0
    for turn in range(TURNS):
        for number, messages in enumerate(conversations):
            marks = [time.perf_counter()]
            found = await lookup.read(SimpleNamespace(messages=messages, model="m", cache_salt=None))
            assert found is not None
            marks.append(time.perf_counter())
            stored = lookup.here(found) or await lookup.ask(found)
            marks.append(time.perf_counter())
            now_s = time.monotonic()
            choice = routes.choose(found.prompt, stored, ["a", "b"], wait_left_s=0, now_s=now_s)
            routes.begin(f"{turn} {number}", found.prompt, choice.order, now_s)
            marks.append(time.perf_counter())
            routes.end(f"{turn} {number}", choice.order[0].replica_id, time.monotonic())
            times.append((*np.diff(marks), marks[-1] - marks[0]))
            unanswered += stored is None
            messages += [message("assistant", text(ANSWER_WORDS)), message("user", text(QUESTION_WORDS))]
    print(f"{len(times)} requests, {unanswered} without raykv's answer in time")
    for name, column in zip(("read", "look up", "choose", "all"), np.array(times).T * 1e3, strict=True):
        print(f"{name:8} p50 {np.percentile(column, 50):.2f} ms, p99 {np.percentile(column, 99):.2f} ms")


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    main()
