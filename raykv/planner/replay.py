"""Replays a trace through a cache of a given size, and counts the hits of a policy."""

import heapq
import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from raykv.eviction.base import Policy
from raykv.memory.layout import TICKS_PER_S
from raykv.planner.cache import Cache
from raykv.planner.ssd import Ssd
from raykv.planner.trace import Request, Trace

DECODE_S: Final = 0.03
"""Assumed time per generated token. A replay computes from it when a request ends."""

Mode = Literal["prefix", "objects"]


@dataclass(slots=True)
class Outcome:
    """The counts of a replay, in chunks. At a prefix hit all earlier chunks of the request hit too.

    `attended` is the sum, over the hit tokens, of the number of tokens before each in its request.
    """

    prefix_hits: int = 0
    plain_hits: int = 0
    tokens_hit: int = 0
    attended: int = 0
    stored: int = 0
    evicted: int = 0
    ssd_hits: int = 0

    def add(self, trace: Trace, request: Request, prefix: int, plain: int) -> None:
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
    decode_s: float = DECODE_S,
) -> Outcome:
    """Replay a trace. The caller passes a new policy, and an empty `ssd` or None.

    Mode "prefix" works like a node: a request reads its leading chunks up to the first miss and stores the missing
    chunks. A request never evicts its own chunks; chunks that do not fit are not stored. Mode "objects" is the usual
    way to compare caches: each chunk is read independently, and each miss evicts one chunk. `ttl_s` is the time from
    store to expiry; only the policy `ttl` uses it. The `ssd` (only in mode "prefix") receives evicted chunks. A chunk
    that is read from the `ssd` is stored in memory again. `decode_s` is the time per generated token.
    """
    cache = Cache(policy, max(1, capacity), trace.chunks, ssd)
    outcome = Outcome()
    if mode == "prefix":
        _by_prefix(trace, cache, ssd, outcome, _Times(ttl_s, decode_s))
    else:
        _by_object(trace, cache, outcome, _Times(ttl_s, decode_s))
    outcome.stored, outcome.evicted = cache.stored, cache.evicted
    return outcome


class _Times(NamedTuple):
    ttl_s: float
    decode_s: float

    def expiry(self, now: int) -> int:
        return 0 if self.ttl_s == math.inf else now + math.ceil(self.ttl_s * TICKS_PER_S)


def _by_prefix(trace: Trace, cache: Cache, ssd: Ssd | None, outcome: Outcome, times: _Times) -> None:
    now = 0
    running: list[tuple[float, int]] = []
    for place, request in enumerate(trace.requests):
        chunks = np.array(request.chunks, np.int64)
        now = max(now + 1, math.ceil((request.at_s - trace.requests[0].at_s) * TICKS_PER_S))
        while running and running[0][0] <= request.at_s:
            done = trace.requests[heapq.heappop(running)[1]]
            cache.request_done(done.chunks, done.output_tokens, now)
        if request.output_tokens:
            heapq.heappush(running, (request.at_s + times.decode_s * request.output_tokens, place))
        rows = cache.row_of[chunks]
        here = rows >= 0
        found = here if ssd is None else here | [ssd.has(chunk) for chunk in request.chunks]
        prefix = len(rows) if found.all() else int(found.argmin())
        outcome.add(trace, request, prefix, int(found.sum()))
        cache.read(rows[:prefix][here[:prefix]], now)
        reads = {} if ssd is None else {chunk: ssd.read(chunk) for chunk in chunks[:prefix][~here[:prefix]].tolist()}
        outcome.ssd_hits += len(reads)
        if not here.all():
            cache.make_room(len(set(chunks[~here].tolist())), now, protect=rows[here])
            cache.store(request.chunks, trace.tokens_of(request), times.expiry(now), now, reads)


def _by_object(trace: Trace, cache: Cache, outcome: Outcome, times: _Times) -> None:
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
                cache.read(np.array([row], np.int32), now)
            else:
                cache.make_room(1, now)
                cache.store([chunk], sizes[at : at + 1], times.expiry(now), now)
        outcome.add(trace, request, prefix, plain)
