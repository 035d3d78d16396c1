"""Compares KV caches of vLLM: one engine each, the same requests, one request at a time.

Run by hand: `make bench-connectors`, or `python -m benchmarks.connectors [--load long] [--systems vllm,raykv]`.

All systems run at the same time. Each request goes to one system after the other, and only one system is busy at a
time. So a change of the machine's speed affects all alike. The order is drawn for each request, so what a system does
after its answer slows each of the others alike. Each round starts all systems anew, in another order: on some machines
what starts later is faster. The loads:

multi-turn: sessions ask in turn, with all that was said before. An engine has memory for two sessions.
long: the same with histories of 8 000 tokens.
repeat: six prompts of 2 000 tokens, and again; an engine has memory for one.
new: prompts that share nothing.
agentic: recorded sessions of agents, from the folder `--traces`, shortened.
prefix-repetition, timed-trace: loads of `vllm bench serve`. long-doc-qa, multi-round-chat: of `lmcache bench engine`.

For each system: time to the first token; tokens that were reused, as a share of what an engine that holds everything
would reuse; CPU seconds of the system's processes. A system that does not start is named with the reason.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import environments, outside_loads, recorded_sessions
from benchmarks.engine_servers import KINDS, MIB, EngineOptions, EngineServer, engine_server
from benchmarks.machine import facts
from benchmarks.serving_load import Asked, reusable
from deployments.model import ensure_model

VOCABULARY: Final = range(1000, 40000)
MARGIN_TOKENS: Final = 64
SPARE_BLOCKS: Final = 2
"""An engine never uses one block, and a request may need one more than its tokens fill."""
SYSTEMS: Final = "everything,none,vllm,raykv,lmcache,mooncake"


@dataclass(frozen=True, slots=True)
class Load:
    """What the sessions do.

    Attributes:
        sessions, turns: Numbers of sessions, and of requests of each.
        first_tokens, turn_tokens: Lengths of the first question, and of the later ones.
        answer_tokens: Tokens of each answer.
        cached_sessions: Number of sessions for which an engine has memory.
        step_tokens: Most tokens that an engine computes in one step.
    """

    sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int = 100
    answer_tokens: int = 8
    cached_sessions: int = 2
    step_tokens: int = 512

    @property
    def session_tokens(self) -> int:
        later = (self.turns - 1) * self.turn_tokens
        return self.first_tokens + later + self.turns * self.answer_tokens


LOADS: Final = {
    "multi-turn": Load(sessions=8, turns=6, first_tokens=600),
    "long": Load(sessions=3, turns=3, first_tokens=7800, step_tokens=1024),
    "repeat": Load(sessions=6, turns=2, first_tokens=2000, turn_tokens=1, cached_sessions=1),
    "new": Load(sessions=8, turns=1, first_tokens=1000),
    "agentic": Load(sessions=8, turns=1, first_tokens=3000),
    **dict.fromkeys(outside_loads.PROGRAMS, Load(sessions=8, turns=1, first_tokens=1100)),
}


@dataclass(slots=True)
class Played:
    """One request of one system.

    Attributes:
        asked: The answer. None: the request failed.
        took_s, cpu_s: Time until the end of the answer, and CPU seconds of the system's processes.
        problem: Why the request failed.
    """

    session: int
    turn: int
    asked: Asked | None
    took_s: float
    cpu_s: float
    problem: str = ""


class Player:
    """Sends the requests of a load to one system, whose server each round starts anew."""

    server: EngineServer

    def __init__(self) -> None:
        self._client: Any = None
        self._histories: dict[int, list[int]] = {}
        self.rounds: list[list[Played]] = []
        self.brought: list[outside_loads.Brought] = []

    def connect(self, server: EngineServer) -> None:
        import openai

        self.server = server
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=900.0)

    def begin(self) -> None:
        """Begin a round."""
        self._histories = {}
        self.rounds.append([])

    def play(self, load: Load, session: int, turn: int, question: Sequence[int]) -> None:
        """Ask a question with all that was said before in its session."""
        asked = self.send(load, session, turn, [*self._histories.get(session, []), *question])
        if asked is not None:
            self._histories[session] = asked.prompt + asked.tokens

    def send(self, load: Load, session: int, turn: int, prompt: list[int]) -> Asked | None:
        import openai

        before_s, began_s = self.server.cpu_s(), time.monotonic()
        asked, problem = None, ""
        try:
            asked = ask(self._client, self.server.name, prompt, load.answer_tokens)
        except openai.OpenAIError as error:
            problem = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - began_s
        self.rounds[-1].append(Played(session, turn, asked, took_s, self.server.cpu_s() - before_s, problem))
        return asked

    def figures(self, block_tokens: int) -> dict[str, Any]:
        """Return the figures of all rounds, each the median of the rounds; `rounds`: those of each round."""
        rounds = [round_figures(each, block_tokens) for each in self.rounds]
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0] if key != "ttft_by_turn_s"}
        by_turn = zip(*(each["ttft_by_turn_s"] for each in rounds), strict=True)
        return {**medians, "ttft_by_turn_s": [statistics.median(turn) for turn in by_turn], "rounds": rounds}


def ask(client: Any, model: str, prompt: list[int], tokens: int) -> Asked:
    """Send one request, and read its answer as a stream. Raises openai.OpenAIError if it fails."""
    began_s, ttft_s, usage = time.monotonic(), 0.0, None
    answer: list[int] = []
    text = ""
    stream = client.completions.create(
        model=model,
        prompt=prompt,
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            answer += choice.model_extra.get("token_ids") or []
            ttft_s = ttft_s or (time.monotonic() - began_s if answer else 0.0)
            text += choice.text
    assert usage is not None, "the server sent no usage"
    assert len(answer) == tokens, f"{len(answer)} tokens in the answer, not {tokens}"
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return Asked(began_s, ttft_s, cached, prompt, answer, text, "")


def round_figures(played: list[Played], block_tokens: int) -> dict[str, Any]:
    asked = [each.asked for each in played if each.asked]
    turns = 1 + max(each.turn for each in played)
    by_turn = [[each.asked.ttft_s for each in played if each.asked and each.turn == turn] for turn in range(turns)]
    later = [ttft_s for ttfts in by_turn[1:] for ttft_s in ttfts]
    return {
        "ttft_mean_s": statistics.fmean(each.ttft_s for each in asked),
        "ttft_later_s": statistics.fmean(later) if later else 0.0,
        "total_s": sum(each.took_s for each in played),
        "cpu_s": sum(each.cpu_s for each in played),
        "reused": sum(each.cached for each in asked) / max(1, reusable(asked, block_tokens)),
        "failed": len(played) - len(asked),
        "ttft_by_turn_s": [statistics.fmean(ttfts) if ttfts else 0.0 for ttfts in by_turn],
    }


def play(players: list[Player], load: Load, number: int, seed: int) -> None:
    """Play one round. Each question goes to all systems before the next one."""
    for turn in range(load.turns):
        for session in range(load.sessions):
            rng = random.Random(f"{seed} {number} {session} {turn}")
            question = rng.choices(VOCABULARY, k=load.turn_tokens if turn else load.first_tokens)
            for player in shuffled(players, f"{seed} {number} {session} {turn}"):
                player.play(load, session, turn, question)


def replay(players: list[Player], load: Load, number: int, seed: int, folder: Path, block_tokens: int) -> None:
    """Replay recorded sessions, one request at a time, in the order of their times, with other tokens in each round."""
    recorded = recorded_sessions.read(
        folder,
        seed=seed + number,
        block_tokens=block_tokens,
        max_tokens=load.first_tokens,
        vocabulary=VOCABULARY,
    )
    for place, each in enumerate(recorded):
        for player in shuffled(players, f"{seed} {number} {place}"):
            player.send(load, each.session, each.turn, each.prompt)


def shuffled(players: list[Player], seed: str) -> list[Player]:
    return random.Random(f"order {seed}").sample(players, len(players))


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Format the figures for people, as a table in Markdown. Ratios are medians over the rounds."""
    base = next((name for name in ("everything", "none", "vllm") if name in figures), next(iter(figures)))
    lines = [
        f"| | TTFT mean s | TTFT from turn 2 s | time / {base} | TTFT from turn 2 / {base} "
        "| reused of ideal | CPU s | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in figures.items():
        ratio, later = (relative(each, figures[base], key) for key in ("total_s", "ttft_later_s"))
        cells = [
            f"{each['ttft_mean_s']:.2f}",
            f"{each['ttft_later_s']:.2f}",
            f"{ratio:.3f}",
            f"{later:.3f}",
            f"{each['reused']:.1%}",
            f"{each['cpu_s']:.0f}",
            f"{each['failed']:.0f}",
        ]
        lines.append(f"| {KINDS[name].about} | {' | '.join(cells)} |")
    return "\n".join(lines)


def relative(figures: dict[str, Any], base: dict[str, Any], key: str) -> float:
    pairs = zip(figures["rounds"], base["rounds"], strict=False)  # some systems play fewer rounds
    return statistics.median(mine[key] / other[key] if other[key] else 0.0 for mine, other in pairs)


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the mean time to the first token over the turns, a line for each system."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    for name, each in figures.items():
        ttfts = each["ttft_by_turn_s"]
        axes.plot(
            range(1, len(ttfts) + 1), ttfts, "o-", label=KINDS[name].about, linewidth=3 if name == "raykv" else 1.5
        )
    axes.set(xlabel="turn", ylabel="time to the first token, mean, s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def engine_options(load: Load, block_tokens: int, pool_nbytes: int) -> EngineOptions:
    from transformers import AutoConfig

    model = ensure_model()
    config = AutoConfig.from_pretrained(model)
    head = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    session = -(-(load.session_tokens + MARGIN_TOKENS) // block_tokens) * block_tokens
    spare = SPARE_BLOCKS * block_tokens
    return EngineOptions(
        model=model,
        block_tokens=block_tokens,
        step_tokens=load.step_tokens,
        max_tokens=load.session_tokens + MARGIN_TOKENS,
        cache_tokens=load.cached_sessions * session + spare,
        whole_tokens=(load.sessions + 1) * session + spare,
        pool_nbytes=pool_nbytes,
        token_nbytes=2 * config.num_hidden_layers * config.num_key_value_heads * head * 4,
    )


def start(
    players: dict[str, Player],
    options: EngineOptions,
    made: Mapping[str, environments.Environment],
    scratch: Path,
    stack: ExitStack,
) -> dict[str, str]:
    """Start the systems one after the other. Return why those that do not start cannot run."""
    problems = {}
    for name, player in players.items():
        began_s = time.monotonic()
        try:
            player.connect(stack.enter_context(engine_server(name, options, scratch, made)))
            print(f"{name}: ready after {time.monotonic() - began_s:.0f} s", flush=True)
        except RuntimeError as error:
            print(f"{name}: cannot run: {error}", flush=True)
            problems[name] = str(error)
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=SYSTEMS, help=f"of {', '.join(KINDS)} (default: {SYSTEMS})")
    parser.add_argument("--load", choices=sorted(LOADS), default="multi-turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", default="none,vllm", help="systems that play one round only (default: none,vllm)")
    parser.add_argument("--sessions", type=int, help="number of sessions, in place of the load's")
    parser.add_argument("--turns", type=int, help="requests of a session, in place of the load's")
    parser.add_argument("--tokens", type=int, help="of the first question, in place of the load's")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block and of a chunk (default: 32)")
    parser.add_argument("--pool", type=int, default=1024, help="memory of each store, MiB (default: 1024)")
    parser.add_argument("--traces", type=Path, help="folder of recorded sessions in kv-cache-tester's format")
    parser.add_argument("--trace-tokens", type=int, default=1, help="tokens for a block of the recording (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument("--chart", type=Path, help="draw the time to the first token of each turn to this PNG file")
    options = parser.parse_args()
    names = options.systems.split(",")
    if unknown := set(names) - set(KINDS):
        sys.exit(f"--systems: {', '.join(sorted(unknown))}: unknown; there are {', '.join(KINDS)}")
    if options.load == "agentic" and not (options.traces and options.traces.is_dir()):
        sys.exit("--load agentic needs --traces: a folder of recorded sessions, which kv-cache-tester publishes")
    changed = {"sessions": options.sessions, "turns": options.turns, "first_tokens": options.tokens}
    load = replace(LOADS[options.load], **{name: value for name, value in changed.items() if value is not None})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    run(names, load, options)


def run(names: Sequence[str], load: Load, options: argparse.Namespace) -> None:
    """Start the systems, and play all rounds. The results are printed and written after each round."""
    outside, engines = options.load in outside_loads.PROGRAMS, engine_options(load, options.block, options.pool * MIB)
    used = {KINDS[name].environment for name in names} | ({outside_loads.LMCACHE} if outside else set())
    made, once = environments.prepare(used), options.once.split(",")
    players = {name: Player() for name in names}
    for number in range(options.rounds):
        some = [name for name in players if number == 0 or name not in once]
        first = number % max(1, len(some))
        order = {name: players[name] for name in some[first:] + some[:first]}
        with tempfile.TemporaryDirectory(prefix="rkb-", dir="/dev/shm") as name, ExitStack() as stack:
            problems = start(order, engines, made, Path(name), stack)
            if problems and (number or len(problems) == len(order)):
                sys.exit("a system did not start again" if number else "no system can run")
            for name in problems:
                del players[name], order[name]
            play_round(list(order.values()), load, number, engines, made, Path(name), options)
        report(list(players.values()), load, options, number + 1)


def play_round(
    players: list[Player],
    load: Load,
    number: int,
    engines: EngineOptions,
    made: Mapping[str, environments.Environment],
    folder: Path,
    options: argparse.Namespace,
) -> None:
    """Warm the systems up, and play one round."""
    for player in players:
        player.begin()
    warm = replace(load, sessions=1, turns=2, first_tokens=min(load.first_tokens, 600))
    play(players, warm, number, -options.seed)
    for player in players:
        player.rounds.pop()
        player.begin()
    if options.load in outside_loads.PROGRAMS:
        for player in shuffled(players, f"{options.seed} {number}"):
            brought = outside_loads.send(options.load, player.server, engines, options.seed + number, made, folder)
            player.brought.append(brought)
    elif options.load == "agentic":
        replay(players, load, number, options.seed, options.traces, options.trace_tokens)
    else:
        play(players, load, number, options.seed)


def report(players: list[Player], load: Load, options: argparse.Namespace, rounds: int) -> None:
    """Print the table, and write the figures and the chart, of the rounds so far."""
    outside = outside_loads.PROGRAMS.get(options.load)
    print(
        f"\n{options.load}: {outside or load}; blocks of {options.block} tokens; seed {options.seed}; round {rounds}\n"
    )
    figures: dict[str, dict[str, Any]]
    if outside:
        figures = {player.server.name: outside_loads.figures(player.brought) for player in players}
        print(outside_loads.table(figures), flush=True)
    else:
        figures = {player.server.name: player.figures(options.block) for player in players}
        print(table(figures), flush=True)
    problems = {each.problem for player in players for some in player.rounds for each in some if each.problem}
    print("\n".join(sorted(problems)), flush=True)
    if options.out:
        about = {"machine": facts(), "load": asdict(load), "options": vars(options)}
        options.out.write_text(json.dumps({**about, "systems": figures}, indent=1, default=str))
    if options.chart and not outside:
        draw(figures, options.chart)


if __name__ == "__main__":
    main()
