"""Measures the hand-off of long prompts from prefill to decode workers of Ray Serve.

Run by hand: `python -m benchmarks.hand_off [--tokens 8000] [--rounds 3]`.

Three deployments take turns: one worker that does everything, and a prefill and a decode worker on a Ray node each,
with the ticket after the prefill (`sequential`) and with loads during the prefill (`concurrent`). Both Ray
nodes are on this host, so KV goes through its shared memory. Each request has a new prompt, so nothing is reused.

For each: time to the first token, and what the engines say about the request, with the times of day. A hand-off is the
time from the end of the prefill engine's request to the first token at the client. On a virtual machine, the hypervisor
may give the processors to others meanwhile: this share of the CPU time is shown as *stolen*, for each round.
"""

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.machine import facts
from benchmarks.serving_load import ask, words
from benchmarks.serving_ray import DTYPE, openai_client, ray_serve
from deployments.model import ensure_model

POOL: Final = "handoff"
MIB: Final = 1 << 20
SYSTEMS: Final = ("unified", "sequential", "concurrent")
BLOCK_TOKENS: Final = 32
ANSWER_TOKENS: Final = 4
WARM_UP_WORDS: Final = 600
TRAIL_S: Final = 1.0
"""The engines send their sentences on threads."""
LOADED: Final = re.compile(r"from (\d\d:\d\d:\d\d\.\d{3}) to (\d\d:\d\d:\d\d\.\d{3})")


@dataclass
class Request:
    """One request.

    Attributes:
        prompt_tokens: Length of its prompt.
        ttft_s: Time to the first token.
        hand_off_s: Time from the end of the prefill engine's request to the first token; 0 if one engine did all.
        loading_first_s: By how much the decode engine's load began before the prefill engine had ended.
        stolen: Share of the machine's CPU time that its hypervisor gave to others meanwhile.
        timeline: What happened when: seconds since the request was sent, and a sentence.
    """

    prompt_tokens: int
    ttft_s: float
    hand_off_s: float
    loading_first_s: float
    stolen: float
    timeline: list[tuple[float, str]]


@contextmanager
def running(step_tokens: int, pool_nbytes: int) -> Iterator[int]:
    """Run the three deployments. Yields the port of their OpenAI servers."""
    with ray_serve([{"prefill": 8}, {"decode": 8}], cpus=8, pool=POOL, pool_nbytes=pool_nbytes) as port:
        from ray import serve
        from ray.serve.llm import build_openai_app, build_pd_openai_app

        from deployments.pd import INGRESS, llm_config

        for system in SYSTEMS:
            began_s = time.monotonic()
            if system == "unified":
                fields = llm_config(_args(system, step_tokens), 1, {"prefill": 1.0})
                app = build_openai_app({"llm_configs": [fields], **INGRESS})
            else:
                prefill = llm_config(_args(system, step_tokens), 1, {"prefill": 1.0}, role="prefill")
                decode = llm_config(_args(system, step_tokens), 1, {"decode": 1.0}, role="decode")
                app = build_pd_openai_app({"prefill_config": prefill, "decode_config": decode, **INGRESS})
            serve.run(app, name=system, route_prefix=f"/{system}")
            print(f"{system}: up after {time.monotonic() - began_s:.0f} s", flush=True)
        yield port


def _args(system: str, step_tokens: int) -> Any:
    from deployments.pd import PDArgs

    return PDArgs(
        model=str(ensure_model()),
        model_id=system,
        device="cpu",
        dtype=DTYPE,
        max_model_len=8192,
        block_tokens=BLOCK_TOKENS,
        kv_cache_nbytes=512 * MIB,
        pool=POOL,
        connector={"concurrent_hand_off": system == "concurrent"},
        engine={"max_num_batched_tokens": step_tokens},
    )


def measure(client: Any, pool: Any, system: str, count: int, rng: random.Random) -> Request:
    """Send one request with a new prompt of `count` words, and read its trail."""
    text = words(rng, count)
    sent_s, before = time.time(), psutil.cpu_times()
    asked = ask(client, system, [{"role": "user", "content": text}], ANSWER_TOKENS)
    after = psutil.cpu_times()
    stolen = (after.steal - before.steal) / (sum(after) - sum(before))
    time.sleep(TRAIL_S)
    lines = [(each.at_s - sent_s, each.text) for each in pool.trail(asked.request_id)]
    timeline = sorted([*lines, (asked.ttft_s, "client: the first token")])
    ends = [at_s for at_s, text in lines if text.startswith("prefill")]
    begins = [_of_day(found[1], sent_s) for _, text in lines if (found := LOADED.search(text))]
    hand_off_s = asked.ttft_s - ends[0] if ends else 0.0
    first_s = ends[0] - begins[0] if begins and ends else 0.0
    return Request(len(asked.prompt), asked.ttft_s, hand_off_s, first_s, stolen, timeline)


def _of_day(text: str, sent_s: float) -> float:
    """Return the time of day `text` as seconds since the request was sent."""
    hours, minutes, seconds = text.split(":")
    return (int(hours) * 3600 + int(minutes) * 60 + float(seconds) - sent_s % 86_400) % 86_400


def table(requests: dict[str, list[Request]]) -> str:
    """Format the medians for people, as a table in Markdown."""
    lines = ["| | prompt tokens | TTFT s | hand-off s | TTFT / (unified + hand-off) | load began earlier, s | stolen |"]
    lines.append("|---|---|---|---|---|---|---|")
    unified_s = statistics.median(each.ttft_s for each in requests["unified"])
    for system, each in requests.items():
        tokens = statistics.median(one.prompt_tokens for one in each)
        ttft_s = statistics.median(one.ttft_s for one in each)
        hand_off_s = statistics.median(one.hand_off_s for one in each)
        first_s = statistics.median(one.loading_first_s for one in each)
        share = ttft_s / (unified_s + hand_off_s)
        stolen = ", ".join(f"{one.stolen:.0%}" for one in each)
        lines.append(
            f"| {system} | {tokens:.0f} | {ttft_s:.2f} | {hand_off_s:.2f} | {share:.3f} | {first_s:.2f} | {stolen} |"
        )
    return "\n".join(lines)


def show(request: Request) -> None:
    for at_s, text in request.timeline:
        print(f"    {at_s:7.2f} s  {text}")


def play(port: int, rounds: int, tokens: int, seed: int) -> dict[str, list[Request]]:
    import raykv
    from raykv.cluster import find_address

    clients = {system: openai_client(port, system) for system in SYSTEMS}
    found: dict[str, list[Request]] = {system: [] for system in SYSTEMS}
    with raykv.connect(raykv.Namespace(model="any"), address=find_address(POOL)) as pool:
        for system in SYSTEMS:  # the first request of an engine compiles kernels
            warm = measure(clients[system], pool, system, WARM_UP_WORDS, random.Random(f"{seed} warm {system}"))
        count = int(tokens * WARM_UP_WORDS / warm.prompt_tokens)
        for turn in range(rounds):
            order: Sequence[str] = SYSTEMS[turn % 3 :] + SYSTEMS[: turn % 3]
            for system in order:
                request = measure(clients[system], pool, system, count, random.Random(f"{seed} {turn} {system}"))
                found[system].append(request)
                said = f"first token after {request.ttft_s:.2f} s, {request.stolen:.0%} of the machine stolen"
                print(f"round {turn + 1}, {system}: {said}", flush=True)
                show(request)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="of a prompt (default: 8000)")
    parser.add_argument("--step", type=int, default=1024, help="tokens of an engine's step (default: 1024)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool", type=int, default=1536, help="raykv's memory on each Ray node, MiB (default: 1536)")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    options = parser.parse_args()
    with running(options.step, options.pool * MIB) as port:
        requests = play(port, options.rounds, options.tokens, options.seed)
    print(f"\nsteps of {options.step} tokens; seed {options.seed}; medians of {options.rounds} rounds\n")
    print(table(requests))
    if options.out:
        figures = {system: [asdict(one) for one in each] for system, each in requests.items()}
        options.out.write_text(json.dumps({"machine": facts(), "dtype": DTYPE, "systems": figures}, indent=1))


if __name__ == "__main__":
    main()
