"""Replays conversations of a trace through a node, with and without hints of an agent harness. Counts the hits.

Run by hand: `python -m benchmarks.agentic_hints`. Needs neither vLLM nor a GPU; takes less than five minutes.

The trace is `tests/data/mooncake_synthetic_trace.jsonl.gz`. It is made from public data sets, and names no sessions.
So sessions are inferred: a call continues an earlier call if its blocks begin with all full blocks of the earlier call.
If several earlier calls match, the longest one counts.

A real node in this process serves the calls. It stores a chunk of 4 KiB for each full block of 512 tokens, so that the
arena fits on a small machine. Tokens outside full blocks are never hits, but they lower the hit ratio: it is the share
of all tokens.

The harness gives these hints, and the functions of the vLLM connector read them (`raykv_hints`):

* The session's id, which is inferred from earlier calls only.
* `session_end` with the last call of the session in the trace. A real harness knows when its task ends. It does not
  know whether other sessions read the same blocks later. In one mode, other calls get this hint by mistake.
* `pin_s` with every call that has no `session_end`, because a tool call follows. A real harness sees in the model's
  answer that the session continues. The time is a quantile of the pauses that have ended so far.

No hint raises the priority of a shared system prompt, because no block of the trace is in more than 24 requests.
"""

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

import raykv
from raykv.integrations.vllm.hints import NO_HINTS, PARAMETER, HintSender, RequestHints, parse
from raykv.memory.layout import TICKS_PER_S
from raykv.planner.replay import DECODE_S
from raykv.planner.trace import Trace, read_trace

TRACE: Final = Path(__file__).parents[1] / "tests" / "data" / "mooncake_synthetic_trace.jsonl.gz"
NBYTES: Final = 4096
EXTENT_CHUNKS: Final = 16
PARTS: Final = 3
"""The trace is cut into this many parts with equal numbers of calls. Each part is replayed on a new, empty node."""
SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2)
MAX_HINT_S: Final = 86_400.0
FIRST_PAUSE_S, PAUSES, PAUSE_QUANTILE = 60.0, 10, 0.75
"""A harness expects FIRST_PAUSE_S until it has seen PAUSES pauses, and then the quantile PAUSE_QUANTILE of them."""


class Call(NamedTuple):
    """One request: its times in seconds, the ids of its full blocks, its numbers of tokens, and its session."""

    at_s: float
    done_s: float
    chunks: list[int]
    tokens: int
    output_tokens: int
    session: str
    is_last: bool


@dataclass(frozen=True)
class Mode:
    """Which hints a harness gives. It gives `session_end` by mistake with a share `wrong` of the calls."""

    ends: bool = False
    pins: bool = False
    wrong: float = 0.0


NONE: Final = "no hints"
MODES: Final = {
    NONE: Mode(),
    "ends": Mode(ends=True),
    "ends, pins": Mode(ends=True, pins=True),
    "20 % wrong": Mode(ends=True, pins=True, wrong=0.2),
}


class Case(NamedTuple):
    """One replay: a part of the trace, on a node with room for `share` of the part's distinct chunks."""

    policy: str
    share: float
    part: int
    mode: str


def calls_of(trace: Trace) -> list[Call]:
    full = [each.chunks[: each.tokens // trace.chunk_tokens] for each in trace.requests]
    ends: dict[int, str] = {}  # last full block of a call -> the call's session
    last: dict[str, int] = {}
    sessions = []
    for place, chunks in enumerate(full):
        sessions.append(next((ends[chunk] for chunk in reversed(chunks) if chunk in ends), f"session {place}"))
        last[sessions[-1]] = place
        if chunks:
            ends[chunks[-1]] = sessions[-1]
    return [
        Call(
            request.at_s,
            request.at_s + DECODE_S * request.output_tokens,
            chunks,
            request.tokens,
            request.output_tokens,
            session,
            last[session] == place,
        )
        for place, (request, chunks, session) in enumerate(zip(trace.requests, full, sessions, strict=True))
    ]


def part_of(calls: Sequence[Call], number: int) -> Sequence[Call]:
    """Return one of PARTS parts. A session that continues in a later part does not end in this part."""
    size = -(-len(calls) // PARTS)
    return calls[number * size : (number + 1) * size]


def chunks_of(calls: Sequence[Call]) -> int:
    return len({chunk for call in calls for chunk in call.chunks})


def shared_ends(calls: Sequence[Call]) -> tuple[int, int]:
    """Return the number of blocks in the sessions' last calls, and how many of these blocks later calls read.

    Only the report uses these numbers. A harness cannot know them.
    """
    last_read = {chunk: place for place, call in enumerate(calls) for chunk in call.chunks}
    marked = [(place, chunk) for place, call in enumerate(calls) if call.is_last for chunk in call.chunks]
    return len(marked), sum(last_read[chunk] > place for place, chunk in marked)


class Harness:
    """Gives the hints of calls. It knows what has happened so far, and whether a call is its session's last one."""

    def __init__(self, mode: Mode, rng: random.Random) -> None:
        self._mode, self._rng = mode, rng
        self._pauses: list[float] = []
        self._idle_since_s: dict[str, float] = {}

    def hints(self, call: Call) -> RequestHints:
        """Return the hints of a call that arrives now."""
        began_s = self._idle_since_s.pop(call.session, None)
        if began_s is not None and call.at_s > began_s:
            self._pauses.append(call.at_s - began_s)
        if not self._mode.ends:
            return NO_HINTS
        too_early = self._rng.random() < self._mode.wrong
        own: dict[str, Any] = {"session_end": True} if call.is_last or too_early else {}
        if self._mode.pins and not own:
            own["pin_s"] = self._expected_pause_s()
        request: Any = SimpleNamespace(kv_transfer_params={PARAMETER: own}, kv_hints=None, session_id=call.session)
        return parse(request, MAX_HINT_S).hints

    def end(self, call: Call) -> None:
        """Learn that a call has ended."""
        self._idle_since_s[call.session] = call.done_s

    def _expected_pause_s(self) -> float:
        enough = len(self._pauses) >= PAUSES
        return float(np.quantile(self._pauses, PAUSE_QUANTILE)) if enough else FIRST_PAUSE_S


class Engine:
    """Calls a node as vLLM's connector does, at the times of the trace.

    Attributes:
        hit_tokens: Number of tokens that `begin` has read from the node.
    """

    def __init__(self, cluster: raykv.EmbeddedCluster, most_chunks: int, chunk_tokens: int) -> None:
        self._client = cluster.client(raykv.Namespace(model="m"))
        local = self._client.router.local
        assert local is not None
        self._tables = (cluster.nodes[0].store.table, local.reader.table)
        self._sender = HintSender(list, save_wait_s=0.0)
        self._into, self._values = (list(np.zeros((most_chunks, NBYTES), np.uint8)) for _ in range(2))
        self._chunk_tokens, self._now_s, self.hit_tokens = chunk_tokens, 0.0, 0

    def at(self, now_s: float) -> None:
        """Set the clock of the chunk tables to `now_s`, or to one tick after its last time if that is later."""
        self._now_s = max(self._now_s + 1 / TICKS_PER_S, now_s)
        for table in self._tables:
            table.made_at_s = time.monotonic() - self._now_s

    def begin(self, call: Call, hints: RequestHints) -> None:
        """Read the stored prefix of a call, and store the rest."""
        keys = self._client.keys(names_of(call))
        count = self._client.match(keys).count
        if count:
            got = self._client.get(keys[:count], self._into[:count]).prefix
            self.hit_tokens += got * self._chunk_tokens
        stored = hints.of_stored
        options: Any = {} if stored is None else {"ttl_s": stored.ttl_s or None, "priority": stored.priority}
        self._client.put(keys, self._values[: len(keys)], **options)

    def end(self, call: Call, hints: RequestHints) -> None:
        """Report the number of output tokens of an ended call, and send the call's hints."""
        names = names_of(call)
        self._client.hint(self._client.keys(names), output_tokens=call.output_tokens)
        if hints.after_end:
            self._sender.send([self._client], hints, "", names, prompt=len(names))


def names_of(call: Call) -> list[bytes]:
    return [b"%d" % chunk for chunk in call.chunks]


def events_of(calls: Sequence[Call]) -> Iterator[tuple[float, int, bool]]:
    """Yield the arrivals and ends of all calls in order of time: (seconds, place of the call, whether it arrives)."""
    running: list[tuple[float, int]] = []
    for place, call in enumerate(calls):
        while running and running[0][0] <= call.at_s:
            yield *heapq.heappop(running), False
        yield call.at_s, place, True
        heapq.heappush(running, (call.done_s, place))
    while running:
        yield *heapq.heappop(running), False


def replay(calls: Sequence[Call], mode: Mode, *, policy: str, share: float, chunk_tokens: int, seed: int) -> float:
    """Replay calls on a new node with room for `share` of their chunks. Return the hits, as a share of all tokens."""
    extents = max(1, round(share * chunks_of(calls) / EXTENT_CHUNKS))
    storage: dict[str, Any] = {
        "arena_nbytes": extents * EXTENT_CHUNKS * NBYTES,
        "extent_nbytes": EXTENT_CHUNKS * NBYTES,
        "max_chunks": 2 * extents * EXTENT_CHUNKS,
        "policy": policy,
        "low_water": 0.0,
        "high_water": 0.001,
    }
    harness, hints = Harness(mode, random.Random(seed)), [NO_HINTS] * len(calls)
    with raykv.embedded(1, **storage) as cluster:
        engine = Engine(cluster, max(len(call.chunks) for call in calls), chunk_tokens)
        for at_s, place, arrives in events_of(calls):
            call = calls[place]
            engine.at(at_s - calls[0].at_s)
            if arrives:
                hints[place] = harness.hints(call)
            else:
                harness.end(call)
            if call.chunks:
                (engine.begin if arrives else engine.end)(call, hints[place])
        return engine.hit_tokens / sum(call.tokens for call in calls)


def cases_of(policy: str, modes: Sequence[str]) -> list[Case]:
    return [Case(policy, share, part, mode) for share in SHARES for part in range(PARTS) for mode in modes]


def run_case(case: Case) -> float:
    trace = read_trace(TRACE)
    calls = part_of(calls_of(trace), case.part)
    return replay(
        calls,
        MODES[case.mode],
        policy=case.policy,
        share=case.share,
        chunk_tokens=trace.chunk_tokens,
        seed=case.part,
    )


def report(ratios: dict[Case, float], policy: str, modes: Sequence[str]) -> None:
    """Print a policy's hit ratios and their means over the parts, and each case in which hints lower the ratio."""
    print(f"\n{policy}: tokens hit, in %; mean of {PARTS} parts, and the parts\n| arena | {' | '.join(modes)} |")
    print("|---" * (1 + len(modes)) + "|")
    for share in SHARES:
        cells = []
        for mode in modes:
            parts = [100 * ratios[Case(policy, share, part, mode)] for part in range(PARTS)]
            cells.append(f"{statistics.mean(parts):.2f} ({', '.join(f'{each:.2f}' for each in parts)})")
        print(f"| {share:.0%} | {' | '.join(cells)} |")
    for case, ratio in ratios.items():
        before = ratios[case._replace(mode=NONE)]
        if ratio < before:
            change = f"{100 * (ratio - before):+.2f} points"
            print(f"LOWER: {case.mode}, {case.share:.0%}, part {case.part}: {change}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", default="leaf_lru,density", help="names, comma; wrong hints with the first only")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    policies, began_s = options.policies.split(","), time.monotonic()
    calls = calls_of(read_trace(TRACE))
    marked, again = shared_ends(calls)
    print(f"{len(calls):,} calls, {len({call.session for call in calls}):,} sessions, {chunks_of(calls):,} chunks")
    print(f"of {marked:,} chunks in use at the end of a session, {again:,} are read again later")
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for policy in policies:
            modes = [mode for mode in MODES if policy == policies[0] or not MODES[mode].wrong]
            cases = cases_of(policy, modes)
            report(dict(zip(cases, pool.map(run_case, cases), strict=True)), policy, modes)
    print(f"\n{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
