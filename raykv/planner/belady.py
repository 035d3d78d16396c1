"""Belady's bound: the hits of a cache that knows all future reads. No real policy has more."""

import heapq
from typing import Final

from raykv.planner.replay import Outcome
from raykv.planner.trace import Trace

_NEVER: Final = 1 << 62


def belady(trace: Trace, capacity: int) -> Outcome:
    """Replay with the policy that evicts the chunk whose next read is latest (Belady, 1966).

    Each chunk is read independently of the chunks before it, so all hits count as prefix hits.
    """
    accesses = [chunk for request in trace.requests for chunk in request.chunks]
    following, last = [_NEVER] * len(accesses), [_NEVER] * trace.chunks
    for at in range(len(accesses) - 1, -1, -1):
        following[at], last[accesses[at]] = last[accesses[at]], at
    outcome, at = Outcome(), 0
    next_read = [-1] * trace.chunks  # -1 for chunks that are not in the cache
    heap: list[tuple[int, int]] = []
    for request in trace.requests:
        for place, (chunk, tokens) in enumerate(zip(request.chunks, trace.tokens_of(request), strict=True)):
            if next_read[chunk] >= 0:
                start = place * trace.chunk_tokens
                outcome.plain_hits += 1
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
    outcome.prefix_hits = outcome.plain_hits
    return outcome


def _evict(heap: list[tuple[int, int]], next_read: list[int]) -> None:
    while True:
        at, chunk = heapq.heappop(heap)
        if next_read[chunk] == -at:
            next_read[chunk] = -1
            return
