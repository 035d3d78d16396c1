"""Decides under which tensor ranks an engine stores its KV.

An engine stores KV as an engine with `store_tp_size` tensor ranks would: each chunk holds the KV heads of one such
rank. So engines of different tensor parallel sizes share chunks. Bytes are neither moved nor joined: a worker that has
the KV heads of several ranks reads and writes each rank's heads in place.
"""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode, MLAAttentionSpec, SlidingWindowMLASpec

from raykv.errors import ConfigError
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.groups import layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_PLAIN_MODES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""Quantization modes that allow a division by heads. In other modes, kernels may put scales between the heads."""


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The tensor ranks under which an engine stores its KV.

    Attributes:
        count: Number of these ranks.
        per_worker: Number of ranks whose KV heads each worker has.
        replicas: This many consecutive workers have the same bytes, for example the same latents (MLA).
    """

    count: int
    per_worker: int = 1
    replicas: int = 1

    def of(self, worker: int) -> range:
        """Return the ranks whose KV a worker has. `worker`: the worker's own tensor rank."""
        first = worker // self.replicas * self.per_worker
        return range(first, first + self.per_worker)

    def replica(self, worker: int) -> tuple[int, int]:
        """Return (index of the worker among the workers with the same bytes, number of these workers)."""
        return worker % self.replicas, self.replicas


def tensor_ranks(vllm_config: "VllmConfig", cache: "KVCacheConfig", config: ConnectorConfig) -> TensorRanks:
    """Decide under which tensor ranks this engine stores its KV.

    Raises:
        ConfigError: The KV cannot be divided for `store_tp_size`. The message names the reason and the remedy.
    """
    size, wanted = vllm_config.parallel_config.tensor_parallel_size, config.store_tp_size
    specs = list(chain.from_iterable(layer_specs(group.kv_cache_spec) for group in cache.prefix_cacheable_groups))
    if wanted in (None, size) or all(getattr(spec, "max_tp_shards", None) == 1 for spec in specs):
        return TensorRanks(size // cache.kv_tp_replicas, replicas=cache.kv_tp_replicas)
    assert wanted is not None
    if wanted % size:
        raise _refusal(
            config,
            f"tensor_parallel_size is {size}",
            "set the largest tensor_parallel_size of the engines that share KV; it must be a multiple of each",
        )
    for spec in specs:
        _check_layer(spec, size, config)
    draft = vllm_config.speculative_config
    if draft is not None and vllm_config.num_lookahead_tokens > 0:
        draft_size = draft.draft_parallel_config.tensor_parallel_size
        if draft_size != size:
            raise _refusal(config, f"draft_tensor_parallel_size is {draft_size}", f"set both to {size}")
    return TensorRanks(wanted, per_worker=wanted // size)


def _check_layer(spec: "KVCacheSpec", size: int, config: ConnectorConfig) -> None:
    """Refuse a layer whose KV cannot be divided by heads. The blocks of others have shape [heads, tokens, content]."""
    remedy = f"leave it out, or set it to tensor_parallel_size ({size}); then engines of this size share KV"
    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        raise _refusal(config, f"the KV of a layer is not divided by heads ({type(spec).__name__})", remedy)
    is_packed = spec.num_head_slots is not None or spec.state_content_bytes is not None
    if is_packed or spec.kv_quant_mode not in _PLAIN_MODES:
        raise _refusal(config, "the attention kernel packs heads or scales in a way of its own", remedy)
    assert config.store_tp_size is not None
    # If each worker has one head of the layer, several workers may have the same head. So `size` is only a maximum.
    if spec.num_kv_heads % (config.store_tp_size // size):
        heads = spec.num_kv_heads * size if spec.num_kv_heads > 1 else f"at most {size}"
        raise _refusal(config, f"a layer has {heads} KV heads", "set a divisor of this number, or leave it out")


def _refusal(config: ConnectorConfig, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"field 'store_tp_size': {config.store_tp_size}, but {problem}; {remedy}")
