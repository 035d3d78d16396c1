"""The demo: two Ray nodes on this machine, one for prefill, one for decode, and a conversation over a long document.

    make demo     shows what the pool saves, and checks it
    make serve    leaves the same deployment running for requests of your own

The two nodes count as two hosts: they share no memory, and all bytes between them go over TCP.
"""

import argparse
import importlib
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.local_ray import SETTINGS, LocalRay, require_token
from deployments.model import MODEL_PATH, ensure_model
from deployments.reference import MESSAGES, READY, Answer
from deployments.reuse import Reuse, ReuseMeter

if TYPE_CHECKING:
    from raykv import Client

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTIONS = (
    "What is the purpose of the station?",
    "What is the name of the station cat?",
    "Summarise this handbook.",
)
NODES = {"127.0.0.2": "A", "127.0.0.3": "B"}
POOL = "demo"
MODEL_ID = MODEL_PATH.name
ANSWER_TOKENS = 64
WANTED_SPEEDUP = 5.0
ROUTED = "routed "
PATIENT = {"tokenize_timeout_s": 0.05, "lookup_timeout_s": 0.05}
"""The routers may take longer than by default, because all of these processes share a few cores."""
UNKNOWN = "routed by chance: the routers have no report of the engines yet"
ROUTES_S = 2.0
DRIVER_SETTINGS = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_metrics_report_interval_ms": "500",
    "RAY_prestart_worker_first_driver": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
HEAD = ("turn", "prompt", "reused by prefill (A)", "reused by decode (B)", "moved", "TTFT", "without", "", "tokens")
LEGEND = """
prompt   its tokens, with the chat template
reused   tokens whose KV was loaded instead of computed: from which node (A or B), by which path (shm or tcp)
moved    the bytes that were loaded
TTFT     time to the first token, by the OpenAI API; without: by a plain vLLM engine, alone on this machine, no HTTP
tokens   prompt and answer, compared with that engine, which computes every prompt in full; float32, greedy
The engines' own prefix caches are off, so all reuse is the pool's."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """One request of the conversation, and the deployment's answer."""

    title: str
    messages: Messages
    answer: Answer
    reuse: Reuse


def main() -> int:
    """Run the demo.

    Returns:
        0 if every promise is true (see `check`), else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m deployments.demo", description="What a shared KV cache saves.")
    parser.add_argument("--serve", action="store_true", help="leave the deployment running until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000, help="port of the OpenAI server (default 8000)")
    options = parser.parse_args()
    started_s = time.monotonic()
    logging.disable(logging.WARNING)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # if it is set, each child process compiles vLLM again
    os.environ.update(DRIVER_SETTINGS)
    ensure_model()
    with deployment(options.port):
        if options.serve:
            wait_for_ctrl_c(options.port)
            return 0
        turns = converse(options.port)
        process = reference_process()
    without = answer_without_pool(process, [turn.messages for turn in turns])
    print_table(turns, without)
    good = check(turns, without)
    print(f"\nAll of it took {time.monotonic() - started_s:.0f} s.")
    return 0 if good else 1


# -- starting and stopping --------------------------------------------------------------------------------------------


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show a step while it runs, and its duration."""
    start_s = time.monotonic()
    out = sys.stdout
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.5):
            print(f"\r  {what} ... {time.monotonic() - start_s:.0f} s", end="", file=out, flush=True)

    print(f"  {what} ...", end="", file=out, flush=True)
    ticker = threading.Thread(target=tick, daemon=True)
    if out.isatty():
        ticker.start()
    try:
        yield
    finally:
        done.set()
        if out.isatty():
            ticker.join()
            print(f"\r  {what} ...", end="", file=out)
        print(f" {time.monotonic() - start_s:.1f} s", file=out, flush=True)


@contextmanager
def deployment(port: int) -> Iterator[None]:
    """Run the deployment while the context lasts. Nothing is left behind, even after an error."""
    os.environ.update(SETTINGS)
    require_token()
    # Importing vLLM takes as long as starting Ray. Both run at the same time, because starting Ray is mostly waiting.
    importing = threading.Thread(target=importlib.import_module, args=("ray.serve.llm",), daemon=True)
    importing.start()
    with ExitStack() as running:
        print("Starting")
        with step("Ray: two nodes, A (127.0.0.2) for prefill and B (127.0.0.3) for decode"):
            nodes = LocalRay([{"prefill": 1}, {"decode": 1}])
            running.callback(nodes.close)
        try:
            start(port, running, address=nodes.address, importing=importing)
            yield
        except Exception:  # save the logs, which say why, before `finally` removes them
            save_logs(nodes)
            raise
        finally:
            print()
            with step("Stopping"), redirect_stdout(io.StringIO()):  # Ray prints a false alarm when it ends
                running.close()


def start(port: int, running: ExitStack, *, address: str, importing: threading.Thread) -> None:
    """Start the pool and the app on the Ray cluster at `address`. Register in `running` how to end them."""
    with step("raykv: on each of them, 1 GiB of memory for the pool"):
        import ray

        from raykv import cluster

        ray.init(address=address, log_to_driver=False)
        running.callback(ray.shutdown)
        running.callback(cluster.stop, POOL)
        cluster.start(name=POOL, separate_hosts=True, storage={"arena_nbytes": "1 GiB"})
    with step("Ray Serve: the OpenAI server"):
        importing.join()
        from ray import serve

        from deployments import pd

        running.callback(serve.shutdown)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    with step("vLLM: a prefill and a decode worker (this takes longest, most of a minute)"):
        args = pd.PDArgs(
            model=str(MODEL_PATH),
            model_id=MODEL_ID,
            device="cpu",
            dtype="float32",
            prefill_resources={"prefill": 0.001},
            decode_resources={"decode": 0.001},
            max_model_len=8192,
            kv_cache_nbytes=512 << 20,
            engine_prefix_caching=False,
            pool=POOL,
            router=PATIENT,
        )
        serve.run(pd.build(args), name="pd")


def save_logs(nodes: LocalRay) -> None:
    """Save the logs of a run that failed."""
    logs = next(nodes.directory.glob("session_2*/logs"), None)
    if logs is not None:
        saved = MODEL_PATH.parents[1] / "demo-logs"
        shutil.rmtree(saved, ignore_errors=True)
        shutil.copytree(logs, saved, ignore_dangling_symlinks=True)
        print(f"\nThe logs are in {saved}", file=sys.stderr)


def wait_for_ctrl_c(port: int) -> None:
    print(
        f"""
Ready; Ctrl-C ends it. Try, in another terminal:

  curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{MODEL_ID}", "stream": true, "temperature": 0, "max_tokens": 40,
    "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
""",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass


# -- the conversation -------------------------------------------------------------------------------------------------


def converse(port: int) -> list[Turn]:
    """Ask the questions about the document one after another, then the first question again."""
    from openai import OpenAI

    import raykv
    from raykv.cluster import find_address

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    meter = ReuseMeter(POOL)
    turns: list[Turn] = []

    def turn(title: str, messages: Messages) -> str:
        print(f"\n  {title}: {messages[-1]['content'].rpartition(chr(10))[2]}")
        answer, request_id = ask(client, messages)
        print(*(f"     {line}" for line in routes(pool, request_id) or [UNKNOWN]), sep="\n")
        turns.append(Turn(title, messages, answer, meter.next(answers=2)))
        return answer.text

    with raykv.connect(raykv.Namespace(model="-"), address=find_address(POOL)) as pool:
        document = DOCUMENT.read_text()
        print(f"\nA conversation over {DOCUMENT.name}, {len(document.split())} words")
        messages: Messages = []
        for number, question in enumerate(QUESTIONS, start=1):
            content = f"{document}\n{question}" if number == 1 else question
            messages = [*messages, {"role": "user", "content": content}]
            messages = [*messages, {"role": "assistant", "content": turn(str(number), messages)}]
        turn("1 again", messages[:1])
    return turns


def ask(client: Any, messages: Messages) -> tuple[Answer, str]:
    """Send one request, and print the answer while it arrives. Returns the answer and the request's id."""
    prompt: list[int] = []
    tokens: list[int] = []
    text, ttft_s = "", 0.0
    start_s = time.perf_counter()
    response = client.chat.completions.with_raw_response.create(
        model=MODEL_ID,
        messages=messages,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    print("     ", end="")
    for event in response.parse():
        prompt = event.model_extra.get("prompt_token_ids") or prompt
        for choice in event.choices:
            tokens += choice.model_extra.get("token_ids") or []
            ttft_s = ttft_s or (time.perf_counter() - start_s if tokens else 0.0)
            text += choice.delta.content or ""
            print((choice.delta.content or "").replace("\n", " "), end="", flush=True)
    print(f"\n     [first token after {ttft_s:.2f} s]", flush=True)
    return Answer(prompt=prompt, tokens=tokens, text=text, ttft_s=ttft_s), response.headers["x-request-id"]


def routes(pool: "Client", request_id: str) -> list[str]:
    """Return why the routers sent a request where they did: to a decode worker, and from there to a prefill worker.

    The routers' sentences arrive after their decisions. Any that have not arrived in time are left out.
    """
    until_s = time.monotonic() + ROUTES_S
    while True:
        found = [each.text for each in pool.trail(request_id) if each.text.startswith(ROUTED)]
        if len(found) >= len(NODES) or time.monotonic() > until_s:
            return [ROUTED + text.removeprefix(ROUTED).partition(" ")[2] for text in found]
        time.sleep(0.1)


def reference_process() -> subprocess.Popen[str]:
    """Start the plain engine. It loads while the deployment stops, and answers requests after that."""
    command = [sys.executable, "-m", "deployments.reference", "--model", str(MODEL_PATH)]
    return subprocess.Popen(
        [*command, "--answer-tokens", str(ANSWER_TOKENS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def answer_without_pool(process: subprocess.Popen[str], requests: Sequence[Messages]) -> list[Answer]:
    """Send the same requests to the plain engine, which then runs alone on this machine."""
    assert process.stdin is not None
    assert process.stdout is not None
    answers = []
    print("\nThe same without the pool")
    with process:
        with step("A plain vLLM engine"):
            if process.stdout.readline().strip() != READY:
                raise RuntimeError("the plain engine did not start; run python -m deployments.reference to see why")
        with step(f"Its answers to the {len(requests)} requests"):
            for messages in requests:
                process.stdin.write(MESSAGES.dump_json(messages).decode() + "\n")
                process.stdin.flush()
                answers.append(Answer.model_validate_json(process.stdout.readline()))
        process.stdin.close()
    return answers


# -- results ----------------------------------------------------------------------------------------------------------


def print_table(turns: Sequence[Turn], without: Sequence[Answer]) -> None:
    """Print for each turn what was reused, from where, and what that saved."""
    prefill, decode = NODES
    rows = [
        (
            turn.title,
            str(len(turn.answer.prompt)),
            sources(turn.reuse, prefill),
            sources(turn.reuse, decode),
            ", ".join(f"{nbytes / 1e6:.0f} MB {path}" for path, nbytes in sorted(turn.reuse.nbytes.items())),
            f"{turn.answer.ttft_s:.2f} s",
            f"{plain.ttft_s:.2f} s",
            f"{plain.ttft_s / turn.answer.ttft_s:.1f}x",
            "identical" if same(turn.answer, plain) else "DIFFERENT",
        )
        for turn, plain in zip(turns, without, strict=True)
    ]
    widths = [max(len(row[column]) for row in [HEAD, *rows]) for column in range(len(HEAD))]
    print()
    for row in [HEAD, tuple("-" * width for width in widths), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(LEGEND)


def sources(reuse: Reuse, reader: str) -> str:
    """Format what one node loaded: number of tokens, holder and path, such as "1920 A tcp"."""
    parts = [
        f"{tokens} {NODES.get(holder, holder)} {path}"
        for (loader, holder, path), tokens in sorted(reuse.tokens.items())
        if loader == reader
    ]
    return ", ".join(parts) or "-"


def same(one: Answer, other: Answer) -> bool:
    return one.prompt == other.prompt and one.tokens == other.tokens


def check(turns: Sequence[Turn], without: Sequence[Answer]) -> bool:
    """Print each promise of the demo, and return whether all of them are true."""
    speedup = without[-1].ttft_s / turns[-1].answer.ttft_s
    crossed = [any(loader != holder for loader, holder, _ in turn.reuse.tokens) for turn in turns]
    left = sorted(path.name for path in Path("/dev/shm").glob(f"raykv-{POOL}-*"))
    promises = {
        "every turn's tokens are identical": all(map(same, (turn.answer for turn in turns), without)),
        "from turn 2 on, KV is loaded from the other node": all(crossed[1:]),
        f"the repeated prompt's first token is {speedup:.0f} times sooner (at least {WANTED_SPEEDUP:.0f} wanted)": (
            speedup >= WANTED_SPEEDUP
        ),
        f"nothing stayed in /dev/shm{': ' if left else ''}{', '.join(left)}": not left,
    }
    print()
    for promise, true in promises.items():
        print(f"  {'yes' if true else 'NO '}  {promise}")
    return all(promises.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
