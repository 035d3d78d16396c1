"""Replays a trace through a cache of a given size, with any policy or Belady's optimal policy. Counts the hits."""

import heapq
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from raykv.eviction.base import Policy
from raykv.memory.layout import TICKS_PER_S
from raykv.planner.cache import Cache
from raykv.planner.ssd import Ssd
from raykv.planner.trace import Trace

DECODE_S: Final = 0.03
"""Assumed time per generated token. A replay uses this time to compute when a request ends."""
_NEVER: Final = 1 << 62


@dataclass(slots=True)
class Outcome:
    """The counts of a replay. A hit is a prefix hit if all earlier chunks of the request are hits.

    Attributes:
        prefix_hits: Number of chunks with a prefix hit.
        tokens_hit: Number of tokens in these chunks.
        attended: Number of earlier tokens in the prompt, summed over the `tokens_hit` tokens.
        stored, evicted: Number of chunks stored in memory, and evicted from memory.
        ssd_hits: Number of chunks with a prefix hit that were read from the SSD.
    """

    prefix_hits: int = 0
    tokens_hit: int = 0
    attended: int = 0
    stored: int = 0
    evicted: int = 0
    ssd_hits: int = 0


def replay(
    trace: Trace, policy: Policy, capacity: int, *, ssd: Ssd | None = None, decode_s: float = DECODE_S
) -> Outcome:
    """Replay a trace.

    As on a node, a request reads its leading chunks up to the first miss, and stores the missing chunks. A request
    never evicts its own chunks; chunks that do not fit are not stored. Evicted chunks are offered to the SSD. A chunk
    that is read from the SSD is stored in memory again.

    Args:
        trace: The requests to replay.
        policy: A policy that was not used before.
        capacity: Size of memory in chunks.
        ssd: An empty SSD. None means no SSD.
        decode_s: Seconds per generated token.
    """
    cache, outcome, now = Cache(policy, max(1, capacity), trace.chunks, ssd), Outcome(), 0
    running: list[tuple[float, int]] = []
    for place, request in enumerate(trace.requests):
        chunks = np.array(request.chunks, np.int64)
        now = max(now + 1, math.ceil((request.at_s - trace.requests[0].at_s) * TICKS_PER_S))
        while running and running[0][0] <= request.at_s:
            done = trace.requests[heapq.heappop(running)[1]]
            cache.request_done(done.chunks, done.output_tokens, now)
        if request.output_tokens:
            heapq.heappush(running, (request.at_s + decode_s * request.output_tokens, place))
        rows = cache.row_of[chunks]
        here = rows >= 0
        found = here if ssd is None else here | [ssd.has(chunk) for chunk in request.chunks]
        prefix = len(rows) if found.all() else int(found.argmin())
        tokens = min(request.tokens, prefix * trace.chunk_tokens)
        outcome.prefix_hits += prefix
        outcome.tokens_hit += tokens
        outcome.attended += tokens * (tokens - 1) // 2
        cache.read(rows[:prefix][here[:prefix]], now)
        reads = {} if ssd is None else {chunk: ssd.read(chunk) for chunk in chunks[:prefix][~here[:prefix]].tolist()}
        outcome.ssd_hits += len(reads)
        if not here.all():
            cache.make_room(len(set(chunks[~here].tolist())), now, protect=rows[here])
            cache.store(request.chunks, trace.tokens_of(request), now, reads)
    outcome.stored, outcome.evicted = cache.stored, cache.evicted
    return outcome


def belady(trace: Trace, capacity: int) -> Outcome:
    """Replay with the policy that evicts the chunk whose next read is farthest away. No real policy has more hits.

    Here every hit counts as a prefix hit, even if an earlier chunk of the request was missed. Source: Belady, 1966.
    """
    accesses = [chunk for request in trace.requests for chunk in request.chunks]
    following, last = [_NEVER] * len(accesses), [_NEVER] * trace.chunks
    for at in range(len(accesses) - 1, -1, -1):
        following[at], last[accesses[at]] = last[accesses[at]], at
    outcome, at = Outcome(), 0
    next_read = [-1] * trace.chunks  # -1: the chunk is not in the cache
    heap: list[tuple[int, int]] = []
    for request in trace.requests:
        for place, (chunk, tokens) in enumerate(zip(request.chunks, trace.tokens_of(request), strict=True)):
            if next_read[chunk] >= 0:
                start = place * trace.chunk_tokens
                outcome.prefix_hits += 1
                outcome.tokens_hit += tokens
                outcome.attended += tokens * start + tokens * (tokens - 1) // 2
            else:
                if outcome.stored - outcome.evicted >= capacity:
                    _evict(heap, next_read)
                    outcome.evicted += 1
                outcome.stored += 1
            next_read[chunk] = following[at]
            heapq.heappush(heap, (-following[at], chunk))
            at += 1
    return outcome


def _evict(heap: list[tuple[int, int]], next_read: list[int]) -> None:
    while True:
        at, chunk = heapq.heappop(heap)
        if next_read[chunk] == -at:
            next_read[chunk] = -1
            return
