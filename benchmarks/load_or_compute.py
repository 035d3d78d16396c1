"""Compares rules that decide whether a stored prefix is loaded or computed, over links of several rates.

Run by hand, as root: `python -m benchmarks.load_or_compute`

SmolLM2 runs on CPU with one thread. A raykv node stores the prefixes. It runs in its own network namespace, and traffic
control limits the rate of the link to the node. The output has a line for each combination of rate, prompt length and
number of concurrent requests. The line gives the time to the first token under four rules: compute always; load always;
the published fixed rule (load at least 1 024 tokens, with at most 8 loads at once); and raykv's estimate.

The rules take turns, so that changes of the machine's speed affect all of them. raykv's rule learns the rate of the
link from its own rounds only. After each change of the rate, it first gets enough rounds to probe the link.
"""

import argparse
import itertools
import json
import math
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import torch

torch.set_num_threads(1)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402

from benchmarks.system import die_with_parent  # noqa: E402
from deployments.model import ensure_model  # noqa: E402
from raykv.integrations.vllm import costs  # noqa: E402
from raykv.integrations.vllm.costs import Costs  # noqa: E402

NODE: Final = Path(__file__).parent / "systems" / "raykv_node.py"
VOCABULARY: Final = range(1000, 40000)
BLOCK, SUFFIX = 128, 16
FIXED_TOKENS, FIXED_LOADS = 1024, 8

Decide = Callable[..., bool]


def fixed(known: Costs, _holder: str, _nbytes: int, tokens: int, **_: Any) -> bool:
    return tokens >= FIXED_TOKENS and known.loads_in_flight < FIXED_LOADS


RULES: Final[dict[str, Decide]] = {
    "compute": lambda *_, **__: False,
    "load": lambda *_, **__: True,
    "fixed rule": fixed,
    "raykv": Costs.is_load_sooner,
}


@contextmanager
def rule_of(name: str) -> Iterator[None]:
    """Decide by one of the `RULES`. Only raykv's rule measures and probes the path."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Costs, "is_load_sooner", RULES[name]))
        if name != "raykv":
            stack.enter_context(patch.object(costs.Path, "add", lambda *_: None))
            stack.enter_context(patch.object(Costs, "is_probe_due", lambda *_: False))
        yield


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class Link:
    """A network namespace, and a pair of devices that connects it with the namespace of this process."""

    def __init__(self) -> None:
        number = os.getpid() % 1000
        self.space, self._near, self._far = f"rkb{number}", f"rkb{number}n", f"rkb{number}f"
        self.address = f"10.231.{number % 250}.2"

    def __enter__(self) -> "Link":
        run("ip", "netns", "add", self.space)
        run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.space)
        run("ip", "addr", "add", self.address[:-1] + "1/24", "dev", self._near)
        run("ip", "link", "set", self._near, "up")
        for command in (
            ["addr", "add", f"{self.address}/24", "dev", self._far],
            ["link", "set", self._far, "up"],
            ["link", "set", "lo", "up"],
        ):
            run("ip", "-n", self.space, *command)
        return self

    def limit(self, mbit_per_s: int) -> None:
        """Limit the rate of data that leaves the namespace."""
        shape = ["rate", f"{mbit_per_s}mbit", "burst", f"{max(64, mbit_per_s // 8)}kb", "latency", "50ms"]
        run("tc", "-n", self.space, "qdisc", "replace", "dev", self._far, "root", "tbf", *shape)

    def __exit__(self, *_: object) -> None:
        run("ip", "netns", "del", self.space)


@contextmanager
def remote_node(link: Link, secret: str) -> Iterator[str]:
    """Run a node in the namespace of the link. Yields the node's address."""
    home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
    storage = {"arena_nbytes": "2 GiB", "shm_dir": str(home)}
    fields = {"node_id": "n", "cluster": "far", "bind": f"{link.address}:0", "host": "far", "storage": storage}
    command = ["ip", "netns", "exec", link.space, sys.executable, "-P", str(NODE), json.dumps(fields), secret]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
        process.stdin.close()
        process.wait(20.0)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def make_engine(model: Path, address: str, tokens: int) -> LLM:
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=tokens + 128,
        max_num_batched_tokens=512,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=512 << 20,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "RayKVConnector",
            "kv_connector_module_path": "raykv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "address": address,
                "store_timeout_s": 10.0,
                "lookup_timeout_s": 1.0,
                "load_timeout_s": 60.0,
            },
        },
    )


class Measured:
    """An engine, and the times of its requests."""

    def __init__(self, engine: LLM) -> None:
        self._engine, self._rng, self._number = engine, random.Random(1), 0

    def round(self, prefixes: list[list[int]]) -> float:
        """Empty the engine's cache, and send one request for each prefix, all at once. Returns their mean seconds."""
        llm = self._engine.llm_engine
        self._wait_for_saves()
        assert llm.reset_prefix_cache()
        began_s, times = time.monotonic(), []
        for prefix in prefixes:
            self._number += 1
            tokens = [*prefix, *self._rng.choices(VOCABULARY, k=SUFFIX)]
            llm.add_request(
                str(self._number), {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, detokenize=False)
            )
        while llm.has_unfinished_requests():
            ended = [output for output in llm.step() if output.finished]
            times += [time.monotonic() - began_s] * len(ended)
        return statistics.mean(times)

    def learn(self, prefixes: list[list[int]]) -> None:
        """Run rounds under raykv's rule for PROBE_S, so that a path that was too slow is probed. Then run two more."""
        until_s = time.monotonic() + costs.PROBE_S
        with rule_of("raykv"):
            while time.monotonic() < until_s:
                self.round(prefixes)
            for _ in range(2):
                self.round(prefixes)

    def compare(self, prefixes: list[list[int]], rounds: int) -> dict[str, float]:
        """Return for each rule the median seconds of its rounds."""
        times: dict[str, list[float]] = {name: [] for name in RULES}
        for _ in range(rounds):
            for name, measured in times.items():
                with rule_of(name):
                    measured.append(self.round(prefixes))
        return {name: statistics.median(measured) for name, measured in times.items()}

    def _wait_for_saves(self) -> None:
        for saving in get_kv_transfer_group().worker_side.saving:
            saving.future.result()


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 200, 1000, 10000], help="Mbit/s")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rng, secret = random.Random(0), secrets.token_hex(32)
    os.environ["RAYKV_SECRET"] = secret
    prefixes = {
        count: [rng.choices(VOCABULARY, k=count) for _ in range(max(options.concurrency))] for count in options.tokens
    }
    with Link() as link, remote_node(link, secret) as address:
        engine = make_engine(ensure_model(), address, max(options.tokens))
        try:
            measured, rows = Measured(engine), []
            with rule_of("compute"):
                for each in prefixes.values():
                    measured.round(each)  # stores the prefixes
            print(
                f"{'Mbit/s':>7} {'tokens':>7} {'at once':>8} " + " ".join(f"{name:>11}" for name in RULES), flush=True
            )
            for rate in options.rates:
                link.limit(rate)
                measured.learn(prefixes[options.tokens[0]][:1])
                for tokens, count in itertools.product(options.tokens, options.concurrency):
                    times = measured.compare(prefixes[tokens][:count], options.rounds)
                    rows.append(times)
                    figures = " ".join(f"{times[name]:9.3f} s" for name in RULES)
                    print(f"{rate:7} {tokens:7} {count:8} {figures}", flush=True)
            show(rows)
        finally:
            engine.llm_engine.engine_core.shutdown()


def show(rows: list[dict[str, float]]) -> None:
    """Print the ratio of raykv's time to that of each other rule: the worst ratio, and the geometric mean."""
    for name in RULES:
        if name != "raykv":
            ratios = [row["raykv"] / row[name] for row in rows]
            mean = math.exp(statistics.mean(map(math.log, ratios)))
            print(f"raykv / {name}: worst {max(ratios):.2f}, geometric mean {mean:.2f}")


if __name__ == "__main__":
    main()
