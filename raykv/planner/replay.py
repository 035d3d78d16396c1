"""Replay a trace through a cache of a given size: how much a policy would have saved."""

import heapq
import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from raykv.eviction.base import Policy
from raykv.memory.table import TICKS_PER_S
from raykv.planner.cache import Cache
from raykv.planner.ssd import Ssd
from raykv.planner.trace import Request, Trace

DECODE_S: Final = 0.03
"""Time that a request is taken to need for each token that it makes."""

Mode = Literal["prefix", "objects"]


@dataclass(slots=True)
class Outcome:
    """What a replay counted, in chunks, but for tokens.

    Attributes:
        prefix_hits: Hits with all chunks before them in their request hit too: those that an engine can use.
        plain_hits: Chunks that were there when they were asked for.
        tokens_hit: Tokens of the prefix hits.
        attended: Sum over those tokens of the tokens before them in their request.
        stored, evicted: Chunks.
        ssd_hits: Of the prefix hits, those that came from the SSD.
    """

    prefix_hits: int = 0
    plain_hits: int = 0
    tokens_hit: int = 0
    attended: int = 0
    stored: int = 0
    evicted: int = 0
    ssd_hits: int = 0

    def note(self, trace: Trace, request: Request, prefix: int, plain: int) -> None:
        tokens = min(request.tokens, prefix * trace.chunk_tokens)
        self.prefix_hits += prefix
        self.plain_hits += plain
        self.tokens_hit += tokens
        self.attended += tokens * (tokens - 1) // 2


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    *,
    mode: Mode = "prefix",
    ttl_s: float = math.inf,
    ssd: Ssd | None = None,
) -> Outcome:
    """Replay a trace.

    Args:
        policy: A new one: what it learns stays with it.
        capacity: Chunks that the cache holds.
        mode: "prefix", as a node does it: a request reads the leading chunks that are there, and stores the others,
            for which nothing of its own is evicted; what finds no room is left out. Or "objects", as caches are
            compared: each access is by itself, and each miss evicts one.
        ttl_s: Time from store to expiry. Only a policy that looks at expiry makes use of it.
        ssd: A second tier, empty: what is evicted is offered to it, and what is read from it is stored in memory again.
            In mode "prefix" only.
    """
    cache = Cache(policy, max(1, capacity), trace.chunks, ssd)
    outcome = Outcome()
    if mode == "prefix":
        _by_prefix(trace, cache, ssd, outcome, ttl_s)
    else:
        _by_object(trace, cache, outcome, ttl_s)
    outcome.stored, outcome.evicted = cache.stored, cache.evicted
    return outcome


def _by_prefix(trace: Trace, cache: Cache, ssd: Ssd | None, outcome: Outcome, ttl_s: float) -> None:
    now = 0
    running: list[tuple[float, int]] = []
    for place, request in enumerate(trace.requests):
        chunks = np.array(request.chunks, np.int64)
        now = max(now + 1, math.ceil((request.at_s - trace.requests[0].at_s) * TICKS_PER_S))
        while running and running[0][0] <= request.at_s:
            done = trace.requests[heapq.heappop(running)[1]]
            cache.told(done.chunks, done.output_tokens, now)
        if request.output_tokens:
            heapq.heappush(running, (request.at_s + DECODE_S * request.output_tokens, place))
        rows = cache.row_of[chunks]
        here = rows >= 0
        found = here if ssd is None else here | [ssd.has(chunk) for chunk in request.chunks]
        prefix = len(rows) if found.all() else int(found.argmin())
        outcome.note(trace, request, prefix, int(found.sum()))
        cache.read(rows[:prefix][here[:prefix]], now)
        reads = {} if ssd is None else {chunk: ssd.read(chunk) for chunk in chunks[:prefix][~here[:prefix]].tolist()}
        outcome.ssd_hits += len(reads)
        if not here.all():
            cache.hold(rows[here], True)
            cache.make_room(len(set(chunks[~here].tolist())), now)
            cache.hold(rows[here], False)
            cache.store(request.chunks, trace.tokens_of(request), _expiry(now, ttl_s), now, reads)


def _expiry(now: int, ttl_s: float) -> int:
    return 0 if ttl_s == math.inf else now + math.ceil(ttl_s * TICKS_PER_S)


def _by_object(trace: Trace, cache: Cache, outcome: Outcome, ttl_s: float) -> None:
    now, rows = 0, cache.row_of.data
    for request in trace.requests:
        sizes = trace.tokens_of(request)
        prefix, plain = 0, 0
        for at, chunk in enumerate(request.chunks):
            now += 1
            row = rows[chunk]
            if row >= 0:
                plain += 1
                prefix += prefix == at
                cache.read_one(row, now)
            else:
                cache.make_room(1, now)
                cache.store([chunk], sizes[at : at + 1], _expiry(now, ttl_s), now)
        outcome.note(trace, request, prefix, plain)
