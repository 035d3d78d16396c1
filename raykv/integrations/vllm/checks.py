"""Refuses engines that the connector does not support. The error names the field and the remedy."""

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from raykv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_KNOWN_SPECS = (FullAttentionSpec, MLAAttentionSpec)


def check_engine(vllm_config: "VllmConfig") -> None:
    """Refuse an engine if a miss could fail a request, or if its KV depends on more than the prefix.

    Raises:
        ConfigError: The engine is not supported. The message names vLLM's field and a value that works.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_transfer_config.kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: vLLM would fail a "
            "request whose KV could not be loaded; set it to 'recompute'"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "decode_context_parallel_size and prefill_context_parallel_size above 1 spread a block's tokens over "
            "ranks, which RayKVConnector does not support; set both to 1"
        )
    if vllm_config.model_config.runner_type != "generate":
        raise ConfigError(
            f"runner={vllm_config.model_config.runner_type!r}: RayKVConnector serves generating models only; "
            "leave kv_transfer_config out"
        )
    media = vllm_config.model_config.multimodal_config
    if media is not None and not media.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "mm_processor_cache_gb=0 with enable_prefix_caching=False: vLLM then numbers images instead of hashing "
            "them, and different images would share KV; leave one of the two on"
        )
    if vllm_config.num_lookahead_tokens > 0:
        raise ConfigError(
            "speculative_config names a drafter with its own KV cache, which RayKVConnector does not support yet; "
            "use a drafter without one (ngram), or none"
        )


def check_cache(kv_cache_config: "KVCacheConfig") -> int:
    """Refuse a KV cache that is not one group of full attention.

    With a sliding window, blocks may be missing. Blocks of other kinds, such as Mamba's, hold a state instead of
    tokens. With several groups, vLLM cannot recompute from the first block that failed to load.

    Returns:
        Number of tokens in a block.

    Raises:
        ConfigError: The cache is not supported. The message names the unsupported parts.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group.kv_cache_spec)]
    unknown = sorted({type(spec).__name__ for spec in specs if type(spec) not in _KNOWN_SPECS})
    if unknown:
        raise ConfigError(f"a KV cache of {', '.join(unknown)} is not supported by RayKVConnector; full attention is")
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ConfigError(
            f"the KV cache has {len(kv_cache_config.kv_cache_groups)} groups and RayKVConnector supports one; "
            "set disable_hybrid_kv_cache_manager=True"
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ConfigError(
            "this model attends to later tokens, so its KV depends on more than the prefix and cannot be reused"
        )
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def _specs(spec: "KVCacheSpec") -> list["KVCacheSpec"]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
