"""Least recently used, leaves first: the default."""

from raykv.eviction.lru import LRU


class LeafLRU(LRU):
    """LRU that never evicts a chunk before the chunks that follow it in a chain.

    Source: SGLang's RadixAttention (Zheng et al., 2024) evicts leaves by recency.
    """

    leaf_first = True
