"""The demo: two Ray nodes on this machine, prefill on one, decode on the other, and a conversation over a long document.

    make demo     shows what the pool saves, and checks it
    make serve    leaves the same deployment running for requests of your own

The two nodes count as two hosts: nothing passes between them through shared memory, all goes over TCP.
"""

import argparse
import importlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.local_ray import SETTINGS, LocalRay, require_token
from deployments.model import MODEL_PATH, ensure_model
from deployments.reference import MESSAGES, READY, Answer

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTIONS = (
    "In one sentence, what does this handbook describe?",
    "At which water level does the second pump start?",
    "Both feeds have failed at night. What does the operator do first?",
)
POOL = "demo"
MODEL_ID = "smollm2"
ANSWER_TOKENS = 40
WANTED_SPEEDUP = 5.0
DRIVER_SETTINGS = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_metrics_report_interval_ms": "500",
    "RAY_prestart_worker_first_driver": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """One request of the conversation, as the deployment answered it."""

    title: str
    messages: Messages
    answer: Answer
    reuse: Any


def main() -> int:
    """Run the demo.

    Returns:
        0 when everything that it promises was so.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deployments.demo", description="Show what a shared KV cache saves."
    )
    parser.add_argument("--serve", action="store_true", help="leave the deployment running until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000, help="of the OpenAI server (default 8000)")
    options = parser.parse_args()
    started_s = time.monotonic()
    # Without bytecode, each of the processes to come would compile vLLM anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.update(DRIVER_SETTINGS)
    ensure_model()
    if options.serve:
        with deployment(options.port):
            wait_for_ctrl_c(options.port)
        return 0
    with deployment(options.port) as reference:
        turns = converse(options.port)
        process = reference()
    answers = answer_without_pool(process, [turn.messages for turn in turns])
    print_table(turns, answers)
    good = check(turns, answers)
    print(f"\nAll of it took {time.monotonic() - started_s:.0f} s.")
    return 0 if good else 1


# -- starting and stopping ------------------------------------------------------------------------------------------------


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show what is going on, and for how long it has been."""
    start_s = time.monotonic()
    done = threading.Event()
    live = sys.stdout.isatty()

    def tick() -> None:
        while not done.wait(0.5):
            print(f"\r  {what} ... {time.monotonic() - start_s:.0f} s", end="", flush=True)

    print(f"  {what} ...", end="", flush=True)
    ticker = threading.Thread(target=tick, daemon=True)
    if live:
        ticker.start()
    try:
        yield
    finally:
        done.set()
        if live:
            ticker.join()
            print(f"\r  {what} ...", end="")
        print(f" {time.monotonic() - start_s:.1f} s", flush=True)


@contextmanager
def deployment(port: int) -> Iterator[Any]:
    """Run the deployment for the time of the context. Gives a function that starts the reference engine's process."""
    os.environ.update(SETTINGS)
    require_token()
    # Importing vLLM takes as long as starting Ray; one waits for the other mostly.
    importing = threading.Thread(target=importlib.import_module, args=("ray.serve.llm",), daemon=True)
    importing.start()
    references: list[subprocess.Popen[str]] = []

    def start_reference() -> subprocess.Popen[str]:
        references.append(reference_process())
        return references[-1]

    print("Starting")
    with step("Ray, two nodes: 127.0.0.2 (A, for prefill) and 127.0.0.3 (B, for decode)"):
        nodes = LocalRay([{"prefill": 1}, {"decode": 1}])
    try:
        import ray
        from ray import serve

        from deployments import pd
        from raykv import cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        with step("raykv, a node with 1 GiB of memory on each"):
            ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            cluster.start(name=POOL, separate_hosts=True, storage={"arena_nbytes": "1 GiB"})
        with step("Ray Serve"):
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            importing.join()
        with step("vLLM, one prefill and one decode worker (the longest part, most of a minute)"):
            serve.run(pd.build(app_args()), name="pd")

        print("\nStopping")
        with step("Ray Serve and its workers"):
            serve.shutdown()
        with step("raykv and Ray"):
            cluster.stop(POOL)
            ray.shutdown()
            nodes.close()
    except BaseException:
        keep_logs(nodes)
        for process in references:
            process.kill()
        raise
    finally:
        nodes.close()


def app_args() -> Any:
    """What is served: see deployments/pd.py. Only the pool keeps prefixes, so all reuse in the table is the pool's."""
    from deployments import pd

    return pd.PDArgs(
        model=str(MODEL_PATH),
        model_id=MODEL_ID,
        device="cpu",
        dtype="float32",
        prefill_resources={"prefill": 0.001},
        decode_resources={"decode": 0.001},
        max_model_len=8192,
        kv_cache_nbytes="512 MiB",
        engine_prefix_caching=False,
        pool=POOL,
    )


def keep_logs(nodes: LocalRay) -> None:
    """Save the logs of a run that failed."""
    kept = MODEL_PATH.parents[1] / "demo-logs"
    shutil.rmtree(kept, ignore_errors=True)
    logs = next(nodes.directory.glob("session_*/logs"), None)
    if logs is not None:
        shutil.copytree(logs, kept, ignore_dangling_symlinks=True, dirs_exist_ok=True)
        print(f"\nThe logs are in {kept}", file=sys.stderr)


def wait_for_ctrl_c(port: int) -> None:
    print(
        f"""
Ready; Ctrl-C ends it. Try, in another terminal:

  curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{MODEL_ID}", "stream": true, "max_tokens": 40,
    "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
""",
        flush=True,
    )
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()


# -- the conversation -----------------------------------------------------------------------------------------------------


def converse(port: int) -> list[Turn]:
    """Ask about the document, turn by turn, and at last the first question once more."""
    from openai import OpenAI

    from deployments.reuse import ReuseMeter

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    meter = ReuseMeter(POOL)
    document = DOCUMENT.read_text()
    print(f"\nA conversation over {DOCUMENT.name} ({len(document.split())} words)")
    messages: Messages = []
    turns: list[Turn] = []
    for number, question in enumerate(QUESTIONS, start=1):
        messages = [*messages, {"role": "user", "content": f"{document}\n{question}" if number == 1 else question}]
        print(f"\n  {number}. {question}")
        answer = ask(client, messages)
        turns.append(Turn(str(number), messages, answer, meter.next(answers=2)))
        messages = [*messages, {"role": "assistant", "content": answer.text}]
    print(f"\n  1 again, as another user. {QUESTIONS[0]}")
    answer = ask(client, turns[0].messages)
    turns.append(Turn("1 again", turns[0].messages, answer, meter.next(answers=2)))
    return turns


def ask(client: Any, messages: Messages) -> Answer:
    """Send one request and show the answer as it comes."""
    start_s = time.perf_counter()
    prompt: list[int] = []
    tokens: list[int] = []
    text, ttft_s = "", 0.0
    stream = client.chat.completions.create(
        model=MODEL_ID,
        messages=messages,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    print("     ", end="")
    for event in stream:
        prompt = (event.model_extra or {}).get("prompt_token_ids") or prompt
        for choice in event.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
            ttft_s = ttft_s or (time.perf_counter() - start_s if tokens else 0.0)
            text += choice.delta.content or ""
            print((choice.delta.content or "").replace("\n", " "), end="", flush=True)
    print(f"\n     [first token after {ttft_s:.2f} s]", flush=True)
    return Answer(prompt=prompt, tokens=tokens, text=text, ttft_s=ttft_s)


def reference_process() -> subprocess.Popen[str]:
    """Start the plain engine. It loads while the deployment stops, and is asked when that is gone."""
    command = [sys.executable, "-m", "deployments.reference", "--model", str(MODEL_PATH)]
    return subprocess.Popen(
        [*command, "--answer-tokens", str(ANSWER_TOKENS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def answer_without_pool(process: subprocess.Popen[str], requests: Sequence[Messages]) -> list[Answer]:
    """Have the plain engine answer the same requests, alone on this machine."""
    assert process.stdin is not None
    assert process.stdout is not None
    print("\nThe same without the pool")
    answers = []
    with process:
        with step("a plain vLLM engine"):
            if process.stdout.readline().strip() != READY:
                raise RuntimeError("the reference engine did not start: python -m deployments.reference says why")
        with step(f"its answers to the {len(requests)} requests"):
            for messages in requests:
                process.stdin.write(MESSAGES.dump_json(messages).decode() + "\n")
                process.stdin.flush()
                answers.append(Answer.model_validate_json(process.stdout.readline()))
        process.stdin.close()
    return answers


# -- what came of it ------------------------------------------------------------------------------------------------------


def print_table(turns: Sequence[Turn], without: Sequence[Answer]) -> None:
    """Say per turn what was reused, from where, and what that saved."""
    head = (
        "turn",
        "prompt",
        "reused by prefill on A",
        "reused by decode on B",
        "moved",
        "TTFT",
        "without",
        "",
        "tokens",
    )
    rows = [
        (
            turn.title,
            f"{len(turn.answer.prompt)}",
            sources(turn.reuse, "127.0.0.2"),
            sources(turn.reuse, "127.0.0.3"),
            " + ".join(f"{nbytes / 1e6:.0f} MB {path}" for path, nbytes in sorted(turn.reuse.nbytes.items())),
            f"{turn.answer.ttft_s:.2f} s",
            f"{plain.ttft_s:.2f} s",
            f"{plain.ttft_s / turn.answer.ttft_s:.1f}x",
            "identical" if same(turn.answer, plain) else "DIFFERENT",
        )
        for turn, plain in zip(turns, without, strict=True)
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print()
    for row in [head, tuple("-" * width for width in widths), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        "\nprompt: its tokens. reused: tokens whose KV came from the pool, from the node A or B, through shared memory (shm)"
        "\nor TCP. moved: the bytes of that. TTFT: time to the first token, through the OpenAI API. without: the same of a"
        "\nplain vLLM engine alone on this machine, without HTTP. tokens: against that engine, which computes every prompt in"
        "\nfull; float32, greedy. The engines' own prefix caches are off: all reuse is the pool's."
    )


def sources(reuse: Any, reader: str) -> str:
    """Where one node's tokens came from, in words."""
    name = {"127.0.0.2": "A", "127.0.0.3": "B"}
    parts = [
        f"{tokens} from {name.get(holder, holder)} ({path})"
        for (loader, holder, path), tokens in sorted(reuse.tokens.items())
        if loader == reader
    ]
    return ", ".join(parts) or "-"


def same(one: Answer, other: Answer) -> bool:
    return one.prompt == other.prompt and one.tokens == other.tokens


def check(turns: Sequence[Turn], without: Sequence[Answer]) -> bool:
    """Say whether the demo has shown what it promises."""
    speedup = without[-1].ttft_s / turns[-1].answer.ttft_s
    crossed = [any(loader != holder for loader, holder, _ in turn.reuse.tokens) for turn in turns]
    left = sorted(path.name for path in Path("/dev/shm").glob(f"raykv-{POOL}-*"))
    promises = {
        "every turn's tokens are identical": all(map(same, (turn.answer for turn in turns), without)),
        "from turn 2 on, KV came from the other node": all(crossed[1:]),
        f"the repeated prompt's first token came {speedup:.0f} times sooner (at least {WANTED_SPEEDUP:.0f})": speedup
        >= WANTED_SPEEDUP,
        "nothing stayed in /dev/shm" if not left else f"left in /dev/shm: {left}": not left,
    }
    print()
    for promise, kept in promises.items():
        print(f"  {'yes' if kept else 'NO '}  {promise}")
    return all(promises.values())


if __name__ == "__main__":
    sys.exit(main())
