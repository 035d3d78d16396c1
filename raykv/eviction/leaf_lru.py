"""Least recently used, leaves first: the default."""

from raykv.eviction.lru import LRU


class LeafLRU(LRU):
    """LRU that never takes a chunk before those that follow it in a chain.

    Source: SGLang's RadixAttention evicts leaves by recency (Zheng et al., 2024).
    """

    leaf_first = True
