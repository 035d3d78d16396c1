"""The KV cache groups of an engine: which chunks they store, and the longest hit on which all of them agree.

vLLM divides the layers of a hybrid model into groups. Each group has its own block table. For a hit of T tokens, a
full-attention group needs all blocks before token T. A sliding-window group needs only the last blocks before T, and a
state-space group needs only the state at T. raykv does not repeat these rules. It asks a copy of vLLM's coordinator, in
which the set of stored chunks replaces the block pool.
"""

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

Hashes = Sequence[bytes]
"""The engine's hashes of one request. Entry n covers all tokens before token (n + 1) * `Groups.hash_tokens`."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group.

    Attributes:
        index: Index of the group in vLLM's configuration and block tables.
        block_tokens: Number of tokens in a block.
        chunk_blocks: Number of blocks in a chunk.
        whole: Whether a hit needs all chunks before the hit's end. False: it needs only the last ones.
        handed_over: Whether vLLM itself says which blocks to store, as it does for Mamba states. Otherwise the block
            table of the request shows them.
        suffix: Bytes at the end of the name of each chunk of this group. Empty if there is only one group.
    """

    index: int
    block_tokens: int
    chunk_blocks: int
    whole: bool
    handed_over: bool
    suffix: bytes

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.chunk_blocks

    def blocks_of(self, end: int) -> range:
        """Return the positions in the block table that belong to the chunk that ends at token `end`."""
        last = -(-end // self.block_tokens)
        return range(last - self.chunk_blocks, last)


class Hit(NamedTuple):
    """The longest prefix that can be loaded.

    Attributes:
        tokens: Number of tokens of the prefix, including those that the engine has already.
        ends: Maps the index of each group to the ends of the chunks to load, as numbers of tokens in ascending order.
    """

    tokens: int
    ends: dict[int, list[int]]


NO_HIT: Final = Hit(0, {})


class Groups:
    """All groups whose chunks are stored.

    Attributes:
        each: The groups.
        hash_tokens: Number of tokens between the ends of two successive hashes of the engine.
        null_block: Id of vLLM's null block, the placeholder for empty places in block tables.
    """

    def __init__(self, config: "KVCacheConfig", chunk_blocks: int) -> None:
        indexes = config.prefix_cacheable_group_ids
        self.each = tuple(
            self._group(index, config.kv_cache_groups[index].kv_cache_spec, chunk_blocks, len(indexes) == 1)
            for index in indexes
        )
        self.hash_tokens = config.hash_block_size or self.each[0].block_tokens
        self.null_block = 0
        self._coordinator: KVCacheCoordinator | None = None

    @staticmethod
    def _group(index: int, spec: "KVCacheSpec", chunk_blocks: int, alone: bool) -> Group:
        layer = spec_of(spec)
        return Group(
            index=index,
            block_tokens=spec.block_size,
            chunk_blocks=chunk_blocks,
            whole=isinstance(layer, FullAttentionSpec),
            handed_over=isinstance(layer, MambaSpec) and layer.mamba_cache_mode == "align",
            suffix=b"" if alone else b"/%d" % index,
        )

    def bind(self, coordinator: "KVCacheCoordinator") -> None:
        """Use the rules of vLLM's coordinator. Before this call, hits are found only if `is_plain` is True."""
        self._coordinator = coordinator
        self.null_block = coordinator.block_pool.null_block.block_id

    @property
    def has_fine_hits(self) -> bool:
        """Whether a hit may end inside a block."""
        return self._coordinator is not None and self._coordinator.enable_partial_hash_hits

    def has_chunk(self, group: Group, hashes: Hashes, computed: int) -> bool:
        """Return whether the hashes cover a chunk of the group that ends after token `computed`."""
        size = self.hash_tokens if self.has_fine_hits else group.chunk_tokens
        return len(hashes) * self.hash_tokens >= (computed // size + 1) * size

    def name(self, group: Group, hashes: Hashes, end: int) -> bytes:
        """Return the name of the chunk of `group` that ends at token `end`."""
        return bytes(hashes[end // self.hash_tokens - 1]) + group.suffix

    def ends(self, group: Group, hashes: Hashes, start: int, stop: int) -> list[int]:
        """Return the ends of the group's chunks that have hashes, after token `start` and up to token `stop`."""
        stop = min(stop, len(hashes) * self.hash_tokens)
        first = start // group.chunk_tokens + 1
        return [number * group.chunk_tokens for number in range(first, stop // group.chunk_tokens + 1)]

    def fine_ends(self, hashes: Hashes, start: int, stop: int) -> list[int]:
        """Return the ends of all hashes after token `start`, up to token `stop`."""
        size = self.hash_tokens
        return [number * size for number in range(start // size + 1, min(stop // size, len(hashes)) + 1)]

    def longest(self, hashes: Hashes, computed: int, limit: int, stored: Mapping[int, Container[int]]) -> Hit:
        """Find the longest prefix that vLLM's rules allow.

        Args:
            computed: Number of tokens that the engine has already, a multiple of the size of a block.
            limit: The prefix has at most this many tokens.
            stored: Maps the index of each group to the ends of its stored chunks.
        """
        if self.is_plain:
            return self._longest_plain(hashes, computed, limit, stored[self.each[0].index])
        cached = {group.index: self._hashes_of(group, hashes, computed, stored[group.index]) for group in self.each}
        blocks, tokens = self._find(hashes, limit, _StoredBlocks(self.hash_tokens, cached))
        if tokens <= computed:
            return NO_HIT
        ends = {}
        for group in self.each:
            needed = [
                place
                for place, block in enumerate(blocks[group.index])
                if not block.is_null and place >= computed // group.block_tokens
            ]
            chunks = dict.fromkeys(place // group.chunk_blocks for place in needed)
            last = stored[group.index] if group.whole else ()
            ends[group.index] = [self._end(group, chunk, tokens, last) for chunk in chunks]
        return Hit(tokens, ends)

    @property
    def is_plain(self) -> bool:
        """Whether the only group is one of full attention. Then a hit is a prefix without a gap."""
        return len(self.each) == 1 and self.each[0].whole

    def _longest_plain(self, hashes: Hashes, computed: int, limit: int, stored: Container[int]) -> Hit:
        (group,) = self.each
        ends = list(
            takewhile(lambda end: end in stored, self.ends(group, hashes, computed, limit + group.chunk_tokens))
        )
        tokens = min(ends[-1], limit) // group.block_tokens * group.block_tokens if ends else 0
        if self._coordinator is not None and group.index in self._coordinator.eagle_group_ids:
            tokens -= group.block_tokens  # with EAGLE, the last block is computed again, as in vLLM's coordinator
        if tokens <= computed:
            return NO_HIT
        return Hit(tokens, {group.index: ends[: -(-tokens // group.chunk_tokens) - computed // group.chunk_tokens]})

    def _end(self, group: Group, chunk: int, tokens: int, stored: Container[int]) -> int:
        """Return the token at which chunk number `chunk` of the prompt ends, for a hit of `tokens` tokens.

        A hit may end inside its last block. Then the chunk of the whole block is loaded if that chunk's end is in
        `stored`. Otherwise the chunk that ends with the hit is loaded.
        """
        end = (chunk + 1) * group.chunk_tokens
        return end if end <= tokens or not self.has_fine_hits or end in stored else tokens

    def _hashes_of(self, group: Group, hashes: Hashes, computed: int, ends: Container[int]) -> set[bytes]:
        """Return the hashes of the blocks that the engine has or raykv stores."""
        found = set()
        for end in self.fine_ends(hashes, 0, len(hashes) * self.hash_tokens) if self.has_fine_hits else ():
            if end in ends:
                found.add(bytes(hashes[end // self.hash_tokens - 1]))
        for end in range(group.block_tokens, len(hashes) * self.hash_tokens + 1, group.block_tokens):
            chunk_end = -(-end // group.chunk_tokens) * group.chunk_tokens
            if end <= computed or chunk_end in ends:
                found.add(bytes(hashes[end // self.hash_tokens - 1]))
        return found

    def _find(self, hashes: Hashes, limit: int, pool: "_StoredBlocks") -> tuple[Any, int]:
        coordinator = self._coordinator
        if coordinator is None:
            return (), 0
        finder = copy.copy(coordinator)
        finder.block_pool = pool  # type: ignore[assignment]
        finder.single_type_managers = tuple(map(copy.copy, coordinator.single_type_managers))
        for manager in finder.single_type_managers:
            manager.block_pool = pool  # type: ignore[assignment]
        blocks, tokens, _ = finder.find_longest_cache_hit(hashes, limit)  # type: ignore[arg-type]
        return blocks, tokens


class _StoredBlocks:
    """Replaces vLLM's block pool during a search for a hit. A block counts as cached if its hash is in `cached`."""

    def __init__(self, hash_tokens: int, cached: Mapping[int, set[bytes]]) -> None:
        self.hash_block_size = hash_tokens
        self.null_block, self.stored_block = KVCacheBlock(0), KVCacheBlock(1)
        self.null_block.is_null = True
        self._cached = cached

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        found = all(bytes(block_hash) in self._cached[index] for index in kv_cache_group_ids)
        return [self.stored_block] * len(kv_cache_group_ids) if found else None


def spec_of(spec: "KVCacheSpec") -> "KVCacheSpec":
    """Return the specification of a group's first layer. All layers of a group are of the same kind."""
    return layer_specs(spec)[0]


def layer_specs(spec: "KVCacheSpec") -> list["KVCacheSpec"]:
    """Return the specification of each layer of a group. If all layers share one, the list has only this one."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
