"""Measures what the vLLM connector costs when nothing is ever reused: the time of prompts with and without it.

Run by hand: `python -m benchmarks.zero_reuse`

Two engines with SmolLM2 run in separate processes. Only one has the connector and a raykv node. The engines prefill new
prompts in turn, so that a change of the machine's speed affects both. In each round, the time with the
connector is divided by the time without it. The output is the median and the quartiles of these ratios.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from vllm import SamplingParams

from benchmarks.system import die_with_parent
from benchmarks.vllm_hooks import VOCABULARY, make_engine, node_process
from deployments.model import ensure_model

BAR: Final = 1.01


def serve(address: str, options: argparse.Namespace) -> None:
    """Prefill `options.prompts` prompts for each line of standard input, and print how many seconds they took."""
    engine = make_engine(ensure_model(), address, options)
    rng = random.Random()
    params = SamplingParams(max_tokens=1, detokenize=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        prompts = [{"prompt_token_ids": rng.choices(VOCABULARY, k=options.tokens)} for _ in range(options.prompts)]
        began_s = time.monotonic()
        engine.generate(prompts, params, use_tqdm=False)
        print(f"took {time.monotonic() - began_s}", flush=True)
    engine.llm_engine.engine_core.shutdown()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def wait_for(self, word: str) -> str:
        """Skip vLLM's log lines until a line of output begins with `word`. Returns the rest of this line."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError("the engine has ended")

    def turn(self) -> float:
        """Let the engine prefill `options.prompts` prompts. Returns how many seconds they took."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self.wait_for("took "))


@contextmanager
def started(address: str, arguments: list[str]) -> Iterator[Engine]:
    """Run an engine during the `with` block. If the address is empty, the engine has no connector."""
    command = [sys.executable, "-m", "benchmarks.zero_reuse", "--serve", f"={address}", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent)
    try:
        engine = Engine(process)
        engine.wait_for("ready")
        yield engine
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30.0)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=2, help="prompts in a turn")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--step", type=int, default=512, help="tokens in a step")
    parser.add_argument("--block", type=int, default=128, help="tokens in a block")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve.removeprefix("="), options)
        return
    with ExitStack() as stack:
        address, _ = stack.enter_context(node_process("2 GiB"))
        engines = [stack.enter_context(started(each, sys.argv[1:])) for each in (address, "")]
        for engine in engines:
            engine.turn()  # warms up
        ratios = []
        for number in range(options.rounds):
            order = engines if number % 2 else engines[::-1]
            times = {engine: engine.turn() for engine in order}
            ratios.append(times[engines[0]] / times[engines[1]])
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(ratios)
        met = "met" if median <= BAR else "NOT MET"
        print(f"time with the connector / without: {median:.4f} (quartiles {low:.4f} .. {high:.4f}; bar {BAR}: {met})")


if __name__ == "__main__":
    main()
