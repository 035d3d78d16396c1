"""Request routers before modelled engines: `python -m benchmarks.router_simulation --seeds 32`.

The load of `benchmarks.serving`, raykv's own routes, and two rules that count requests. An engine is modelled by the
times of a token and of a step, as its reports tell them, so there is no noise, and a change of a few per cent is seen
in a minute. It shows what a policy can gain; `benchmarks.serving` shows what real engines make of it.

The model: an engine batches continuously and plans one step ahead, so a new request waits for the step that runs and
the next one. All engines share one pool; chunks are there when the step that computed them has ended. Loads take a
fixed time and a time per byte. Engines evict what was used least recently.
"""

import argparse
import heapq
import itertools
import statistics
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final, Literal, NamedTuple, Protocol

from benchmarks.serving_load import BLOCK_TOKENS, Load
from raykv import Namespace
from raykv.integrations.routing.choice import Rates, RouterOptions
from raykv.integrations.routing.locations import Run, Stored
from raykv.integrations.routing.prompts import Prompt
from raykv.integrations.routing.report import EngineReport, ReplicaReport
from raykv.integrations.routing.routes import Routes

TOKEN_NBYTES: Final = 23_040
"""KV of a token of SmolLM2-135M in bfloat16. An engine's own cache of 128 MiB has room for CACHE_TOKENS."""
CACHE_TOKENS: Final = 5_800
MESSAGE_TOKENS: Final = 8
"""The chat template adds so many to a message."""
ON_THE_WAY_S: Final = 0.05
"""From the router to the engine, and from the engine to the client."""
LOAD_S: Final = 0.02
BYTE_S: Final = 1 / 2e9
"""A load takes LOAD_S, and BYTE_S for each byte."""
REPORT_S: Final = 2.0
"""Engines report as often to the router."""
RECHECK_S: Final = 0.1
NODE: Final = "node"
NAMESPACE: Final = Namespace(model="m", chunk_tokens=BLOCK_TOKENS)
Segment = tuple[Hashable, int]


@dataclass
class Request:
    """One request. All times are of the simulated clock.

    Attributes:
        segments: Names and numbers of tokens of its messages.
        on_end: Called with the request after its last token.
        blocks, later_blocks: Names of its whole blocks, without its answer and with it.
        ready_s: When its load ends.
        reused: Tokens that the engine had or loaded. None: the engine has not looked yet.
        left: Tokens of the prompt that no step has begun to compute.
        planned, got: Tokens of the answer in planned steps, and in steps that have ended.
        first_s: When the client has the first token.
    """

    number: int
    segments: list[Segment]
    began_s: float
    answer_tokens: int
    on_end: Callable[["Request"], None]
    blocks: list[Hashable] = field(default_factory=list)
    later_blocks: list[Hashable] = field(default_factory=list)
    ready_s: float = 0.0
    reused: int | None = None
    left: int = 0
    planned: int = 0
    got: int = 0
    first_s: float = 0.0

    def __post_init__(self) -> None:
        self.blocks = _blocks(self.segments)
        self.later_blocks = _blocks([*self.segments, (("answer", self.number), self.answer_tokens)])

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


def _blocks(segments: list[Segment]) -> list[Hashable]:
    """Name each whole block by its place and the segments up to its end."""
    names, ends = tuple(name for name, _ in segments), list(itertools.accumulate(tokens for _, tokens in segments))
    stops = range(BLOCK_TOKENS, ends[-1] + 1, BLOCK_TOKENS)
    return [(stop, names[: 1 + next(place for place, end in enumerate(ends) if end >= stop)]) for stop in stops]


class Clock:
    """Calls functions in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now_s + delay_s, next(self._numbers), call))

    def run(self, is_done: Callable[[], bool]) -> None:
        while self._calls and not is_done():
            self.now_s, _, call = heapq.heappop(self._calls)
            call()


Step = list[tuple[Request, int]]


class Engine:
    """A continuously batching engine. `pool`: the blocks that are stored, shared by all engines."""

    def __init__(self, clock: Clock, rates: Rates, pool: set[Hashable]) -> None:
        self._clock, self._rates, self._pool = clock, rates, pool
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._is_busy, self._next_step = False, Step()
        self._cached: dict[Hashable, int] = {}
        self.filled = self.computed = 0

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._begin()

    def queued_tokens(self) -> int:
        return sum(each.left for each in self._running) + sum(each.tokens for each in self._waiting)

    def _begin(self) -> None:
        if not self._is_busy and (step := self._plan()):
            self._run(step)

    def _plan(self) -> Step:
        step = Step()
        for request in self._running:
            if request.planned < request.answer_tokens:
                request.planned += 1
                step.append((request, 1))
        for request in [each for each in self._waiting if each.ready_s <= self._clock.now_s]:
            if request.reused is None and self._begin_load(request):
                continue
            self._waiting.remove(request)
            self._running.append(request)
            reused = max(request.reused or 0, self._reusable(request))
            request.left, request.planned = request.tokens - reused, 1
            self.computed += request.left
            self._fill(request.blocks, request.left + request.answer_tokens)
            step.append((request, request.left))
        return step

    def _begin_load(self, request: Request) -> bool:
        """Load what the pool has and the engine has not. Returns whether there is any."""
        own, request.reused = self._reusable(request), 0
        leading = sum(1 for _ in itertools.takewhile(self._pool.__contains__, request.blocks)) * BLOCK_TOKENS
        wanted = min(leading, _most(request)) - own
        if wanted <= 0:
            return False
        request.reused = own + wanted
        took_s = LOAD_S + wanted * TOKEN_NBYTES * BYTE_S
        request.ready_s = self._clock.now_s + took_s
        self.filled += wanted
        self._clock.after(took_s, self._begin)
        return True

    def _reusable(self, request: Request) -> int:
        own = itertools.takewhile(
            lambda block: self.filled - self._cached.get(block, -CACHE_TOKENS) < CACHE_TOKENS, request.blocks
        )
        return min(sum(1 for _ in own) * BLOCK_TOKENS, _most(request))

    def _fill(self, blocks: list[Hashable], tokens: int) -> None:
        self.filled += tokens
        self._cached |= dict.fromkeys(blocks, self.filled)

    def _run(self, step: Step) -> None:
        self._is_busy = True
        prefill = sum(tokens for _, tokens in step if tokens > 1)
        self._clock.after(self._rates.step_s + prefill * self._rates.token_s, partial(self._end, step))
        for request, _ in step:
            request.left = 0
        self._next_step = self._plan()

    def _end(self, step: Step) -> None:
        for request, _ in step:
            request.got += 1
            if not request.first_s:
                request.first_s = self._clock.now_s + ON_THE_WAY_S
                self._pool.update(request.blocks)
            if request.got == request.answer_tokens:
                self._running.remove(request)
                self._fill(request.later_blocks, 0)
                self._pool.update(request.later_blocks)
                request.on_end(request)
        self._is_busy, step, self._next_step = False, self._next_step, Step()
        if step:
            self._run(step)
        else:
            self._begin()


def _most(request: Request) -> int:
    """Return how many tokens can be reused at most: the last one is always computed."""
    return (request.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Router(Protocol):
    def choose(self, request: Request) -> int | None:
        """Return the engine's number. None: ask again after RECHECK_S."""

    def end(self, request: Request) -> None: ...


class CountingRouter:
    """Sends a request to the engine with the fewest requests, of all or of two that are drawn."""

    def __init__(self, engines: int, rng: Random, drawn: int) -> None:
        self._rng, self._drawn = rng, drawn
        self._ongoing: list[set[int]] = [set() for _ in range(engines)]

    def choose(self, request: Request) -> int:
        drawn = self._rng.sample(range(len(self._ongoing)), min(self._drawn, len(self._ongoing)))
        best = min(drawn, key=lambda number: len(self._ongoing[number]))
        self._ongoing[best].add(request.number)
        return best

    def end(self, request: Request) -> None:
        for each in self._ongoing:
            each.discard(request.number)


class RayKVRoutes:
    """raykv's routes, with reports as often as Ray Serve passes them on."""

    def __init__(self, clock: Clock, engines: list[Engine], rates: Rates, pool: set[Hashable], rng: Random) -> None:
        self._clock, self._engines, self._rates, self._pool = clock, engines, rates, pool
        self._options = RouterOptions()
        self._routes = Routes(self._options, rng)
        self._names = [str(number) for number in range(len(engines))]
        self._report()

    def _report(self) -> None:
        reports: dict[str, ReplicaReport | None] = {}
        for name, engine in zip(self._names, self._engines, strict=True):
            fields = EngineReport(
                namespace=NAMESPACE,
                hash_tokens=BLOCK_TOKENS,
                chunk_nbytes=BLOCK_TOKENS * TOKEN_NBYTES,
                near=(NODE,),
                cache_tokens=CACHE_TOKENS,
                filled_tokens=engine.filled,
                queued_tokens=engine.queued_tokens(),
                seconds_per_token=self._rates.token_s,
                seconds_per_step=self._rates.step_s,
                seconds_per_byte={NODE: BYTE_S},
            )
            reports[name] = ReplicaReport(engine=fields)
        self._routes.update(reports, self._clock.now_s)
        self._clock.after(REPORT_S, self._report)

    def choose(self, request: Request) -> int | None:
        now_s, chunks = self._clock.now_s, request.tokens // BLOCK_TOKENS
        keys = [repr(request.segments[:stop]).encode() for stop in range(1, len(request.segments) + 1)]
        prompt = Prompt(keys, list(itertools.accumulate(tokens for _, tokens in request.segments)))
        at_best = Stored((Run(chunks, ()),), NAMESPACE.digest)
        choice = self._routes.settled(prompt, at_best, self._names, now_s=now_s)
        if choice is None:
            leading = sum(1 for _ in itertools.takewhile(self._pool.__contains__, request.blocks))
            stored = Stored((Run(leading, (NODE,)),) if leading else (), NAMESPACE.digest)
            left_s = self._options.max_wait_s - (now_s - request.began_s)
            choice = self._routes.choose(prompt, stored, self._names, wait_left_s=left_s, now_s=now_s)
        if choice.wait_s:
            return None
        self._routes.begin(str(request.number), prompt, choice.order, now_s)
        return int(choice.order[0].replica_id)

    def end(self, request: Request) -> None:
        name = self._routes.chosen(str(request.number))
        if name is not None:
            self._routes.end(str(request.number), name, self._clock.now_s)


RouterName = Literal["two-choices", "shortest-queue", "raykv"]
ROUTERS: Final[tuple[RouterName, ...]] = ("two-choices", "shortest-queue", "raykv")


class Played(NamedTuple):
    """The figures of one run: mean times to the first token, of all requests, of first and of later turns."""

    ttft_s: float
    first_s: float
    later_s: float
    computed: int
    imbalance: float


def play(name: RouterName, load: Load, replicas: int, rates: Rates, seed: int) -> Played:
    """Play a load once. The pauses depend on the seed alone, so they are the same for all routers."""
    clock, rng = Clock(), Random(seed)
    pool: set[Hashable] = set()
    engines = [Engine(clock, rates, pool) for _ in range(replicas)]
    router: Router
    if name == "raykv":
        router = RayKVRoutes(clock, engines, rates, pool, rng)
    else:
        router = CountingRouter(replicas, rng, 2 if name == "two-choices" else replicas)
    requests: list[Request] = []
    ended: list[Request] = []

    def route(request: Request) -> None:
        number = router.choose(request)
        if number is None:
            clock.after(RECHECK_S, partial(route, request))
        else:
            clock.after(ON_THE_WAY_S, partial(engines[number].add, request))

    def converse(session: int) -> None:
        pauses = Random(seed * 1013 + session)
        segments: list[Segment] = [(("system", session % load.systems), load.system_words + MESSAGE_TOKENS)]

        def ask(turn: int) -> None:
            words = load.turn_words if turn else load.first_words
            segments.append((("user", session, turn), words + MESSAGE_TOKENS))
            request = Request(len(requests), [*segments], clock.now_s, load.answer_tokens, partial(end, turn))
            requests.append(request)
            route(request)

        def end(turn: int, request: Request) -> None:
            router.end(request)
            ended.append(request)
            segments.append((("answer", request.number), load.answer_tokens))
            if turn + 1 < load.turns:
                clock.after(pauses.expovariate(1 / load.think_s), partial(ask, turn + 1))

        clock.after(pauses.expovariate(1 / load.think_s), partial(ask, 0))

    for session in range(load.sessions):
        converse(session)
    clock.run(lambda: len(ended) == load.requests)
    computed = [engine.computed for engine in engines]
    first = [each.first_s - each.began_s for each in requests if len(each.segments) == 2]
    later = [each.first_s - each.began_s for each in requests if len(each.segments) > 2]
    mean = statistics.fmean
    imbalance = max(computed) * replicas / sum(computed)
    return Played(mean(first + later), mean(first), mean(later or [0.0]), sum(computed), imbalance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=Load.sessions)
    parser.add_argument("--turns", type=int, default=Load.turns)
    parser.add_argument("--think", type=float, default=4.0, help="mean pause before a request, seconds (default: 4)")
    parser.add_argument("--token", type=float, default=2.3, help="milliseconds per token of a prefill (default: 2.3)")
    parser.add_argument("--step", type=float, default=150.0, help="milliseconds per step (default: 150)")
    options = parser.parse_args()
    load = Load(sessions=options.sessions, turns=options.turns, think_s=options.think)
    rates = Rates(options.token / 1e3, options.step / 1e3)
    print(f"{load}; {options.replicas} replicas; {rates}; means of {options.seeds} seeds\n")
    print(
        "| | TTFT mean, s | first turns | later turns | computed tokens | max/mean, median |\n|---|---|---|---|---|---|"
    )
    for name in ROUTERS:
        runs = [play(name, load, options.replicas, rates, seed) for seed in range(options.seeds)]
        ttft_s, first_s, later_s, computed = (statistics.fmean(each) for each in list(zip(*runs, strict=True))[:4])
        imbalance = statistics.median(each.imbalance for each in runs)
        print(
            f"| {name} | {ttft_s:.3f} | {first_s:.3f} | {later_s:.3f} | {computed:.0f} | {imbalance:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
