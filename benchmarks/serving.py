"""Compares request routers of Ray Serve in front of equal vLLM workers under a multi-turn load.

Run by hand: `make bench-serving`, or `python -m benchmarks.serving [--load multi-turn] [--replicas 2] [--rounds 3]`.

All systems run at the same time, each with its own workers and its own name for the model, and take turns: while one
gets its load, the others are idle. They differ in the router, or have no pool. All pools are one pool; each system and
round has texts of its own, so no system finds another one's KV. In a round, all systems have the same pauses. Where the
memory is too small for the workers of all systems, `--one-at-a-time` starts a system's workers for its turn only.

The load is a multi-turn load, or a `burst`: many requests at once with one new prefix of about 2 000 tokens, which
should be computed once.

With `--core-share 0.4`, each worker has that part of a core, however many others are busy: as on a host of its own.

With `--kill worker,node,directory`, the first system then gets the load again, once for each of these processes, which
is killed meanwhile.

For each system: time to the first token; tokens that were reused, as a share of what an engine that holds everything
would reuse; how evenly the workers computed (max/mean of computed tokens); the time that the machine was busy.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import core_share, plain_python, serving_kills
from benchmarks.machine import facts
from benchmarks.serving_load import BLOCK_TOKENS, Asked, Load, Outcome, ask, drive, reusable
from benchmarks.serving_ray import DTYPE, openai_client, ray_serve
from deployments.model import ensure_model
from deployments.reuse import LABEL, SAMPLE

POOL: Final = "serving"
SYSTEMS: Final = {
    "raykv": "RayKVRouter",
    "affinity": "Ray's PrefixCacheAffinityRouter, with the pool",
    "two-choices": "Ray's power of two choices, with the pool",
    "affinity-no-pool": "PrefixCacheAffinityRouter, vLLM's own prefix cache alone",
}
AFFINITY: Final = "ray.serve.llm.request_router:PrefixCacheAffinityRouter"
LOADS: Final = {
    "multi-turn": Load(),
    "burst": Load(sessions=16, turns=1, systems=1, system_words=1990, first_words=8, think_s=1e-3),
}
CACHE_MIB: Final = 256 if DTYPE == "float32" else 128
WARM_UP: Final = Load(sessions=4, turns=1, systems=1, system_words=50, first_words=60, think_s=0.5)
METRICS_S: Final = 6.0
"""Ray exports metrics every two seconds here, and the routers ask for reports as often."""
MIB: Final = 1 << 20


def configuration(system: str, replicas: int, cache_nbytes: int) -> dict[str, Any]:
    """Return the fields of Ray Serve's LLMConfig for one system."""
    from deployments.pd import llm_config
    from deployments.replicas import ReplicaArgs

    args = ReplicaArgs(
        model=str(ensure_model()),
        model_id=system,
        device="cpu",
        dtype=DTYPE,
        max_model_len=4096,
        block_tokens=BLOCK_TOKENS,
        kv_cache_nbytes=cache_nbytes,
        pool=POOL,
        router={} if system == "raykv" else None,
        engine={"enable_prompt_tokens_details": True},
    )
    fields = llm_config(args, replicas, {})
    if system.startswith("affinity"):
        fields["deployment_config"]["request_router_config"] = {"request_router_class": AFFINITY}
    if system.endswith("no-pool"):
        del fields["engine_kwargs"]["kv_transfer_config"]
    return fields


@contextmanager
def running(systems: Sequence["System"], share: float | None, seeds: Iterator[int]) -> Iterator[None]:
    """Run the workers of these systems, after requests that warm them up, until the end of the block."""
    with ExitStack() as stack:
        for system in systems:
            stack.enter_context(system.deployed())
        if share:
            stack.enter_context(core_share.limited(serving_kills.workers(), share))
        for system in systems:
            system.warm_up(next(seeds))
        yield


def computed_by_worker(model: str) -> Counter[str]:
    """Return how many tokens of prompts each worker of a model has computed, by vLLM's own counters."""
    import ray

    found: Counter[str] = Counter()
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
        for sample in SAMPLE.finditer(text):
            labels: dict[str, str] = dict(LABEL.findall(sample["labels"]))
            wanted = (labels.get("source"), labels.get("model_name")) == ("local_compute", model)
            if wanted and sample["name"] == "prompt_tokens_by_source_total":
                found[labels["WorkerId"]] += int(float(sample["value"]))
    return found


class System:
    """One app under the load. Its OpenAI server is at the port, under its name.

    Attributes:
        outcomes: What each round brought.
        computed: Tokens that each worker computed, in each round.
        routes: What the router decided on each request; empty if it does not tell.
        plain: What plain Python took beside each round; empty if `routes` is.
    """

    def __init__(self, name: str, port: int, replicas: int, cache_nbytes: int) -> None:
        self.name, self._replicas, self._cache_nbytes = name, replicas, cache_nbytes
        self._client = openai_client(port, name)
        self.outcomes: list[Outcome] = []
        self.computed: list[list[int]] = []
        self.routes: dict[str, dict[str, Any]] = {}
        self.plain: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Forget the figures of earlier loads."""
        self.outcomes, self.computed, self.routes, self.plain = [], [], {}, []

    @contextmanager
    def deployed(self) -> Iterator[None]:
        """Run the system's workers until the end of the block."""
        from ray import serve
        from ray.serve.llm import build_openai_app

        from deployments.pd import INGRESS

        began_s = time.monotonic()
        fields = configuration(self.name, self._replicas, self._cache_nbytes)
        app = build_openai_app({"llm_configs": [fields], **INGRESS})
        serve.run(app, name=self.name, route_prefix=f"/{self.name}")
        print(f"{self.name}: {self._replicas} workers after {time.monotonic() - began_s:.0f} s", flush=True)
        try:
            yield
        finally:
            serve.delete(self.name)

    def warm_up(self, seed: int) -> None:
        """Send a few requests to each worker, so that all have been measured by the router."""
        for number in range(3):
            if failed := drive(self._client, self.name, WARM_UP, seed + number).failed:
                raise RuntimeError(f"{self.name}: {failed[0]}")
        ask(self._client, self.name, [{"role": "user", "content": "What is the capital of France?"}], 4)

    def play(self, load: Load, seed: int, *, pauses: int) -> None:
        time.sleep(METRICS_S)
        before = computed_by_worker(self.name)
        with plain_python.beside() as plain:
            outcome = drive(self._client, self.name, load, seed, pauses=pauses)
        time.sleep(METRICS_S)
        computed = computed_by_worker(self.name) - before
        self.outcomes.append(outcome)
        self.computed.append((sorted(computed.values(), reverse=True) + [0] * self._replicas)[: self._replicas])
        if self.name == "raykv":
            self._read_routes({each.request_id for each in outcome.asked})
            self.plain.append(plain)

    def kill(self, load: Load, victims: Sequence[str], seed: int) -> list[dict[str, Any]]:
        """Play the load once for each victim, which is killed meanwhile. Returns the figures of each."""
        found = []
        for number, victim in enumerate(victims):
            played = partial(drive, self._client, self.name, load, seed + number)
            found.append(serving_kills.play(lambda each, play=played: play(on_answer=each), load, victim, POOL))
            print(f"{victim}: {found[-1]}", flush=True)
        return found

    def _read_routes(self, requests: set[str]) -> None:
        from ray import serve

        routes = serve.get_app_handle(self.name).routes.remote(None).result(timeout_s=60)
        self.routes |= {each["request_id"]: each for each in routes if each["request_id"] in requests}

    def figures(self) -> dict[str, Any]:
        """Return the figures of all rounds, each the median of the rounds; `rounds`: those of each round."""
        rounds = []
        for outcome, computed in zip(self.outcomes, self.computed, strict=True):
            ttfts = sorted(each.ttft_s for each in outcome.asked)
            cached, ideal = sum(each.cached for each in outcome.asked), reusable(outcome.asked)
            prompt = sum(len(each.prompt) for each in outcome.asked)
            rounds.append(
                {
                    "ttft_mean_s": statistics.fmean(ttfts),
                    "ttft_p50_s": _rank(ttfts, 0.5),
                    "ttft_p95_s": _rank(ttfts, 0.95),
                    "prompt_tokens": prompt,
                    "computed_tokens": sum(computed),
                    "computed_of_least": sum(computed) / max(1, prompt - ideal),
                    "reuse_of_ideal": cached / max(1, ideal),
                    "imbalance": max(computed) * len(computed) / max(1, sum(computed)),
                    "wall_s": outcome.wall_s,
                    "cpu_s": outcome.cpu_s,
                    "failed": len(outcome.failed),
                    "requests": [self._request(each) for each in sorted(outcome.asked, key=lambda one: one.began_s)],
                }
            )
        found: dict[str, Any] = {
            key: statistics.median(each[key] for each in rounds) for key in rounds[0] if key != "requests"
        }
        if self.routes:
            taken = sorted(each["took_s"] for each in self.routes.values())
            plain = sorted(each_s for each in self.plain for each_s in each["wall_s"])
            found |= {"decision_p50_s": _rank(taken, 0.5), "decision_p99_s": _rank(taken, 0.99)}
            found |= {"plain_p50_s": _rank(plain, 0.5), "plain_p99_s": _rank(plain, 0.99)}
            found["plain_loop_s"] = statistics.median(each["loop_s"] for each in self.plain)
        return {**found, "rounds": rounds, "plain": self.plain}

    def _request(self, asked: Asked) -> dict[str, Any]:
        fields = {"began_s": asked.began_s, "ttft_s": asked.ttft_s, "tokens": len(asked.prompt), "cached": asked.cached}
        return fields | {"route": self.routes.get(asked.request_id)}


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Format the figures for people, as a table in Markdown.

    The pauses differ between rounds. So the mean TTFT is also compared with the first system's round by round, and the
    median of these ratios is shown.
    """
    first = next(iter(figures))
    lines = [
        f"| | TTFT mean, p50, p95 | TTFT mean / {first}'s | reused of ideal | computed of all | computed / least "
        "| max/mean | CPU s | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in figures.items():
        rounds = zip(each["rounds"], figures[first]["rounds"], strict=True)
        cells = [
            f"{each['ttft_mean_s']:.2f}, {each['ttft_p50_s']:.2f}, {each['ttft_p95_s']:.2f}",
            f"{statistics.median(own['ttft_mean_s'] / its['ttft_mean_s'] for own, its in rounds):.3f}",
            f"{each['reuse_of_ideal']:.1%}",
            f"{each['computed_tokens']:.0f} of {each['prompt_tokens']:.0f}",
            f"{each['computed_of_least']:.2f}",
            f"{each['imbalance']:.2f}",
            f"{each['cpu_s']:.0f}",
            f"{each['failed']:.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, each in figures.items():
        if "decision_p50_s" in each:
            p50, p99 = 1e3 * each["decision_p50_s"], 1e3 * each["decision_p99_s"]
            lines.append(f"\n{name}: a decision takes {p50:.2f} ms (p50), {p99:.2f} ms (p99)")
            loop, p50, p99 = (1e3 * each[f"plain_{part}_s"] for part in ("loop", "p50", "p99"))
            lines.append(f"beside it, plain Python that takes {loop:.2f} ms in a loop: {p50:.2f} ms, {p99:.2f} ms")
    return "\n".join(lines)


Ready = Callable[[System], AbstractContextManager[None]]
"""Makes a context in which a system's workers run."""


def measure(systems: list[System], load: Load, rounds: int, seed: int, ready: Ready) -> dict[str, dict[str, Any]]:
    """Play all rounds of a load, and return the figures of each system."""
    for system in systems:
        system.begin()
    for turn in range(rounds):
        for place in range(len(systems)):
            number = (turn + place) % len(systems)
            system = systems[number]
            with ready(system):
                system.play(load, seed + 10_000 * (1 + turn) + 1000 * number, pauses=seed + turn)
            outcome = system.outcomes[-1]
            print(
                f"round {turn + 1}, {system.name}: {len(outcome.asked)} answers in {outcome.wall_s:.0f} s, "
                f"{len(outcome.failed)} failed, computed {system.computed[-1]}",
                flush=True,
            )
    return {system.name: system.figures() for system in systems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="raykv,affinity,two-choices", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--load", default="multi-turn,burst", help="one after the other (default: multi-turn,burst)")
    parser.add_argument("--replicas", type=int, default=2, help="workers of each system, 2.1 GB each (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, help="number of sessions, in place of the load's")
    parser.add_argument("--turns", type=int, help="requests of a session, in place of the load's")
    parser.add_argument("--think", type=float, help="mean pause before a request, seconds, in place of the load's")
    parser.add_argument("--cache", type=int, default=CACHE_MIB, help=f"KV of each engine, MiB (default: {CACHE_MIB})")
    parser.add_argument("--pool", type=int, default=1536, help="raykv's memory, MiB (default: 1536)")
    parser.add_argument("--one-at-a-time", action="store_true", help="start a system's workers for its turn only")
    parser.add_argument("--core-share", type=float, help="limit each worker to this share of a core; needs root")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kill", default="", help=f"of {', '.join(serving_kills.VICTIMS)}: killed under the first load"
    )
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    options = parser.parse_args()
    names, loads = options.systems.split(","), options.load.split(",")
    victims = [each for each in options.kill.split(",") if each]
    checks = (("--systems", names, SYSTEMS), ("--load", loads, LOADS), ("--kill", victims, serving_kills.VICTIMS))
    for field, given, known in checks:
        if unknown := set(given) - set(known):
            sys.exit(f"{field}: {', '.join(sorted(unknown))}: unknown; there are {', '.join(known)}")
    if options.core_share and (problem := core_share.missing()):
        sys.exit(f"--core-share: {problem}")
    changed = {"sessions": options.sessions, "turns": options.turns, "think_s": options.think}
    changed = {name: value for name, value in changed.items() if value is not None}
    found: dict[str, Any] = {}
    cpus = options.replicas * (1 if options.one_at_a_time else len(names)) + 4
    with ExitStack() as stack:
        port = stack.enter_context(ray_serve([{}], cpus=cpus, pool=POOL, pool_nbytes=options.pool * MIB))
        systems = [System(name, port, options.replicas, options.cache * MIB) for name in names]
        warm = partial(running, share=options.core_share, seeds=itertools.count(900_000, 1000))
        if not options.one_at_a_time:
            stack.enter_context(warm(systems))
        ready: Ready = (lambda system: warm([system])) if options.one_at_a_time else (lambda system: nullcontext())
        for place, name in enumerate(loads):
            load = replace(LOADS[name], **changed)
            figures = measure(systems, load, options.rounds, options.seed + 100_000 * place, ready)
            found[name] = {"load": asdict(load), "systems": figures}
            print(f"\n{name}: {options.replicas} workers each; {load}; seed {options.seed}; {options.rounds} rounds\n")
            print(table(figures), flush=True)
            if victims and not place:
                with ready(systems[0]):
                    found["kills"] = systems[0].kill(load, victims, options.seed + 800_000)
                killed = serving_kills.table(found["kills"])
                print(f"\n{names[0]}, processes killed under the load\n\n{killed}", flush=True)
            if options.out:
                about = {"machine": facts(), "dtype": DTYPE, "options": vars(options) | {"out": str(options.out)}}
                options.out.write_text(json.dumps({**about, "loads": found}, indent=1))


if __name__ == "__main__":
    main()
