"""Measures what the vLLM connector costs the engine's thread: time in its hooks, and waits for other processes.

Run by hand: `python -m benchmarks.vllm_hooks`

SmolLM2 runs on CPU with one thread, in this process, and a raykv node in another process. Every round prefills one cold
prompt in several steps. The output has a line for each hook: its time in a prefill, the ratio of this time to the
prefill's CPU time, and how often the engine's thread waited for another process in this hook. Then the node is stopped
with SIGSTOP, and the longest wait in a hook is printed.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final

THREADS: Final = "1"
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=THREADS,
    VLLM_LOGGING_LEVEL="WARNING",
)

import torch  # noqa: E402  (it reads the environment set above)

torch.set_num_threads(int(THREADS))

from vllm import LLM, SamplingParams  # noqa: E402

from benchmarks.system import die_with_parent  # noqa: E402
from deployments.model import ensure_model  # noqa: E402
from raykv.integrations.vllm.connector import RayKVConnector  # noqa: E402
from raykv.transport.link import Link  # noqa: E402

NODE: Final = Path(__file__).parent / "systems" / "raykv_node.py"
HOOKS: Final = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("handle_preemptions", "start_load_kv", "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors"),
    *("get_kv_connector_stats", "request_finished_all_groups"),
)
VOCABULARY: Final = range(1000, 40000)
BAR_SHARE: Final = 0.002
BAR_STOPPED_S: Final = 0.005


@dataclass
class Hooks:
    """Times and waits inside the hooks since the last `reset`.

    Attributes:
        wall_s, cpu_s: Seconds on the engine's thread, by hook.
        longest_s: By hook: (wall seconds of the longest call, most seconds that one call was off the CPU).
        waits: Number of times that the engine's thread waited for an answer, by hook.
        current: Name of the hook that runs now; empty outside the hooks.
    """

    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    longest_s: dict[str, tuple[float, float]] = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    waits: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    current: str = ""

    def reset(self) -> None:
        for values in (self.wall_s, self.cpu_s, self.longest_s, self.waits):
            values.clear()

    def watch(self) -> None:
        """From now on, time every hook, and count how often this thread waits in a hook for the answer of a `Link`."""
        thread = threading.get_ident()
        for name in HOOKS:
            setattr(RayKVConnector, name, self._timed(name, getattr(RayKVConnector, name)))
        collect, wait_ready = Link.collect, Link.wait_ready

        def count(link: Link) -> None:
            if self.current and threading.get_ident() == thread and not wait_ready(link, 0.0):
                self.waits[self.current] += 1

        def counted_collect(link: Link, *arguments: Any, **options: Any) -> Any:
            count(link)
            return collect(link, *arguments, **options)

        def counted_wait_ready(link: Link, timeout_s: float) -> bool:
            if timeout_s > 0:
                count(link)
            return wait_ready(link, timeout_s)

        setattr(Link, "collect", counted_collect)  # noqa: B010 - type checkers refuse to assign to a method
        setattr(Link, "wait_ready", counted_wait_ready)  # noqa: B010

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def timed(*arguments: Any, **options: Any) -> Any:
            self.current, wall_s, cpu_s = name, time.perf_counter(), time.thread_time()
            try:
                return hook(*arguments, **options)
            finally:
                took_s, used_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
                self.wall_s[name] += took_s
                self.cpu_s[name] += used_s
                longest_s, waited_s = self.longest_s[name]
                self.longest_s[name] = max(longest_s, took_s), max(waited_s, took_s - used_s)
                self.current = ""

        return timed


@contextmanager
def node_process(arena: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a node in another process. Yields the node's address and the process."""
    home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
    fields = {"node_id": "n", "cluster": "hooks", "storage": {"arena_nbytes": arena, "shm_dir": str(home)}}
    command = [sys.executable, "-P", str(NODE), json.dumps(fields), secrets.token_hex(32)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the node did not start")
        yield f"unix:{home}/raykv-hooks-n.sock", process
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        process.wait(20.0)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def make_engine(model: Path, address: str, options: argparse.Namespace) -> LLM:
    """Make an engine. It has no connector if `address` is empty."""
    connector = {
        "kv_connector": "RayKVConnector",
        "kv_connector_module_path": "raykv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address},
    }
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=options.block,
        max_model_len=options.tokens + 128,
        max_num_batched_tokens=options.step,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=256 << 20,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config=connector if address else None,
    )


def stored(engine: LLM) -> dict[str, int]:
    """Return the number of chunks that the engine has tried to store, by outcome (stored, existed, skipped)."""
    metrics = [metric for metric in engine.get_metrics() if metric.name == "vllm:raykv_stored_chunks"]
    return {metric.labels["outcome"]: int(metric.value) for metric in metrics if metric.value}


def prefill(engine: LLM, tokens: int, rng: random.Random) -> float:
    """Prefill one cold prompt. Returns the CPU seconds of this thread."""
    prompt = {"prompt_token_ids": rng.choices(VOCABULARY, k=tokens)}
    began_s = time.thread_time()
    engine.generate([prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return time.thread_time() - began_s


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--stopped-rounds", type=int, default=3, help="prefills while the node is stopped")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--step", type=int, default=512, help="tokens in a step")
    parser.add_argument("--block", type=int, default=128, help="tokens in a block")
    parser.add_argument("--arena", default="2 GiB")
    parser.add_argument("--model", type=Path, help="folder (default: the demo's model)")
    options = parser.parse_args()
    hooks, rng = Hooks(), random.Random(0)
    hooks.watch()
    with node_process(options.arena) as (address, node):
        engine = make_engine(options.model or ensure_model(), address, options)
        try:
            prefill(engine, options.tokens, rng)  # warms up, and lets the client's slot pool grow
            prefills, walls, cpus, waits = [], defaultdict(list), defaultdict(list), defaultdict(int)
            for _ in range(options.rounds):
                hooks.reset()
                prefills.append(prefill(engine, options.tokens, rng))
                for name in HOOKS:
                    walls[name].append(hooks.wall_s[name])
                    cpus[name].append(hooks.cpu_s[name])
                    waits[name] += hooks.waits[name]
            show(prefills, walls, cpus, waits)
            print(f"chunks: {stored(engine)}")
            node.send_signal(signal.SIGSTOP)
            hooks.reset()
            for _ in range(options.stopped_rounds):
                prefill(engine, options.tokens, rng)
            name, (longest_s, waited_s) = max(hooks.longest_s.items(), key=lambda item: item[1][1])
            print(f"node stopped: the longest wait in a hook: {waited_s * 1e3:.2f} ms of {longest_s * 1e3:.2f}, {name}")
            print(f"node stopped: bar {BAR_STOPPED_S * 1e3:.0f} ms")
            node.send_signal(signal.SIGCONT)
        finally:
            engine.llm_engine.engine_core.shutdown()


def show(prefills: list[float], walls: dict[str, list[float]], cpus: dict[str, list[float]], waits: Any) -> None:
    """Print medians over the rounds."""
    prefill_s = statistics.median(prefills)
    print(f"{len(prefills)} cold prefills, CPU time {prefill_s:.2f} s (median)")
    print(f"{'hook':32} {'wall ms':>8} {'CPU ms':>8} {'share':>8} {'waits':>6}")
    for name in sorted(HOOKS, key=lambda name: -statistics.median(walls[name])):
        wall_s, cpu_s = statistics.median(walls[name]), statistics.median(cpus[name])
        print(f"{name:32} {wall_s * 1e3:8.3f} {cpu_s * 1e3:8.3f} {wall_s / prefill_s:8.3%} {waits[name]:6}")
    totals = [statistics.median(map(sum, zip(*times.values(), strict=True))) for times in (walls, cpus)]
    share = totals[0] / prefill_s
    met = "met" if share <= BAR_SHARE else "NOT MET"
    print(f"{'all':32} {totals[0] * 1e3:8.3f} {totals[1] * 1e3:8.3f} {share:8.3%}  (bar {BAR_SHARE:.1%}: {met})")
    print(f"share of the CPU time in hooks, without preemption by other processes: {totals[1] / prefill_s:.3%}")


if __name__ == "__main__":
    main()
