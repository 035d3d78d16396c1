"""Tells vLLM where the tokens of a hit come from: memory of this host, memory of another node, an SSD or a file."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from raykv.integrations.vllm.lookups import Found
from raykv.types import Holder, NodeId


def source_of(holder: Holder, near: Collection[NodeId]) -> CacheHitSource:
    """Return the source of a chunk. `near`: the nodes on this host."""
    if holder.below_memory:
        return CacheHitSource.DISK
    return CacheHitSource.HOST if holder.node_id in near else CacheHitSource.P2P


def hit_sources(found: Found, tokens: range, near: Collection[NodeId]) -> dict[CacheHitSource, int]:
    """Count the tokens of a hit by source. The counts add up to the number of tokens.

    In each group, a token has the source of the first loaded chunk that ends after the token. If groups or ranks have
    different sources for a token, the source farthest from the GPU counts.

    Args:
        tokens: The range of tokens to load.
        near: The nodes on this host.
    """
    groups = [list(_sources(found, index, ends, near)) for index, ends in found.hit.ends.items() if ends]
    counts: Counter[CacheHitSource] = Counter()
    start = tokens.start
    for end in sorted({min(end, tokens.stop) for group in groups for end, _ in group} | {tokens.stop}):
        if end > start:
            sources = [group[at][1] for group in groups if (at := bisect_left(group, end, key=_end)) < len(group)]
            unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
            counts[CacheHitSource.outermost(sources) if sources else unknown] += end - start
            start = end
    return dict(counts)


def _sources(
    found: Found, index: int, ends: list[int], near: Collection[NodeId]
) -> Iterator[tuple[int, CacheHitSource]]:
    """Yield (end, source) of each loaded chunk of a group."""
    for end in ends:
        holders = [held[index, end] for held in found.held.values()]
        yield end, CacheHitSource.outermost(source_of(holder, near) for holder in holders)


def _end(chunk: tuple[int, CacheHitSource]) -> int:
    return chunk[0]
