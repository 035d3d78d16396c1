"""Refuses engines that the connector does not support. The error names the field and the remedy."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from raykv.errors import ConfigError
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.groups import layer_specs
from raykv.integrations.vllm.metadata import WorkerNamespaces

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KNOWN_SPECS = (
    *(FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec),
    *(ChunkedLocalAttentionSpec, MambaSpec),
)


def check_engine(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that `RayKVConnector` does not support, such as one in which a miss could fail a request.

    Raises:
        ConfigError: The engine is not supported. The message names vLLM's field and a value that works.
    """
    parallel = vllm_config.parallel_config
    # Inside a MultiConnector, this connector has its own configuration, but vLLM obeys the policy in MultiConnector's.
    # So both are checked. While vLLM makes a worker's connector, vLLM's current configuration is MultiConnector's.
    for config in (vllm_config, get_current_vllm_config_or_none() or vllm_config):
        transfer = config.kv_transfer_config
        if transfer is not None and transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                f"kv_transfer_config.kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: vLLM would fail a "
                "request whose KV could not be loaded; set it to 'recompute', within a MultiConnector on both levels"
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


def check_offloading(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that `RayKVTier` does not support.

    Raises:
        ConfigError: The engine is not supported. The message names vLLM's field and a value that works.
    """
    check_engine(vllm_config)
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "enable_lora=True: a tier learns only the names of adapters, so RayKVTier cannot tell two versions of an "
            "adapter apart; use RayKVConnector, or set enable_lora=False"
        )


def check_handshakes(handshakes: Collection[object]) -> list[WorkerNamespaces]:
    """Return the handshakes that come from workers of this connector.

    Raises:
        ConfigError: There is no such handshake. The message names the field and the remedy.
    """
    names = {type(each).__name__ for each in handshakes}
    workers = [each for each in handshakes if isinstance(each, WorkerNamespaces)]
    if not workers:
        raise ConfigError(
            f"field 'connectors' of MultiConnector: vLLM passes on the handshake of one connector only, and that is "
            f"{', '.join(sorted(names)) or 'none'}; put RayKVConnector first, and leave out connectors that need a "
            "handshake of their own, such as NixlConnector"
        )
    return workers


def check_cache(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ConnectorConfig) -> None:
    """Refuse a KV cache whose blocks `RayKVConnector` cannot reuse.

    Raises:
        ConfigError: The cache is not supported. The message names the unsupported parts and the remedy.
    """
    groups = kv_cache_config.prefix_cacheable_groups
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    unknown = sorted({type(spec).__name__ for spec in specs if type(spec) not in _KNOWN_SPECS})
    if unknown or not specs:
        raise ConfigError(
            f"a KV cache of {', '.join(unknown) or 'no reusable blocks'} is not supported by RayKVConnector; full and "
            "sliding-window attention, MLA, chunked local attention and Mamba states are"
        )
    if any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs):
        raise ConfigError(
            "mamba_cache_mode='none' stores no state at the end of a block, so no prefix can be reused; set "
            "enable_prefix_caching=True and mamba_cache_mode='align'"
        )
    is_plain = len(groups) == 1 and all(isinstance(spec, FullAttentionSpec) for spec in specs)
    if not is_plain and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching=False: for a model with sliding windows or states, RayKVConnector stores what "
            "vLLM's prefix cache can reuse; set enable_prefix_caching=True"
        )
    if not is_plain and config.chunk_blocks > 1:
        raise ConfigError(
            f"field 'chunk_blocks': {config.chunk_blocks}, but a model with sliding windows, states or several KV "
            "cache groups needs 1; for larger chunks set vLLM's block_size"
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ConfigError(
            "this model attends to later tokens, so its KV depends on more than the prefix and cannot be reused"
        )
