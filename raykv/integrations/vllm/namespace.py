"""Computes an engine's raykv namespace. Two engines share KV only if their namespaces are equal."""

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from huggingface_hub import snapshot_download
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from raykv.errors import ConfigError
from raykv.integrations.vllm.config import ConnectorConfig
from raykv.integrations.vllm.epochs import stated
from raykv.integrations.vllm.metadata import Rank, Scope
from raykv.integrations.vllm.revision import content_digest, signature
from raykv.protocol.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")
"""Fields of a model's configuration that differ between hosts, or that the namespace contains already."""


def namespace_of(
    vllm_config: "VllmConfig",
    config: ConnectorConfig,
    *,
    rank: Rank,
    tensor_ranks: int,
    block_tokens: Sequence[int],
    layout: str,
    attention: str,
) -> Namespace:
    """Make the namespace of the chunks of one rank.

    Args:
        rank: The rank under which the chunks are stored.
        tensor_ranks: Number of tensor ranks under which the engine stores chunks. Engines of different tensor parallel
            sizes can share chunks if this number is equal.
        block_tokens: For each group, the number of tokens in a block.
        layout, attention: Descriptions of all groups, from `Layout.description` and `attention_of`.

    Raises:
        ConfigError: The revision of the weights is unknown, or the engine's block hash is not reproducible.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    path = Path(model.model)
    return Namespace(
        # Only the name of the folder, because hosts may have the model under different paths.
        model=path.resolve().name if path.exists() else model.model,
        revision=revision_of(vllm_config, config),
        dtype=f"{str(model.dtype).removeprefix('torch.')}/{cache.cache_dtype}",
        layout=layout,
        chunk_tokens=block_tokens[0] * config.chunk_blocks,
        pp_rank=rank[0],
        pp_size=parallel.pipeline_parallel_size,
        tp_rank=rank[1],
        tp_size=tensor_ranks,
        attention_backend=attention,
        hash_algorithm=hash_algorithm(cache.prefix_caching_hash_algo),
        extra={
            "engine": f"vllm {vllm.__version__}",
            "block_tokens": ",".join(map(str, block_tokens)),
            "quantization": str(model.quantization),
            "architecture": config_digest(model.hf_config),
            **media_digest(model.multimodal_config),
            **drafter(vllm_config),
        },
    )


def revision_of(vllm_config: "VllmConfig", config: ConnectorConfig) -> str:
    """Identify the weights of an engine and of its drafter. If `config.revision` is set, it identifies both.

    Raises:
        ConfigError: The weights are neither local files nor a commit of the hub. The remedy is to set `revision`.
    """
    target = _weights_of(vllm_config.model_config, vllm_config.load_config, config)
    if config.revision is not None or not _has_drafter(vllm_config):
        return target
    draft = vllm_config.speculative_config.draft_model_config
    return f"{target}+{_weights_of(draft, vllm_config.load_config, config)}"


def _weights_of(model: Any, load: Any, config: ConnectorConfig) -> str:
    prefix = "dummy:" if str(load.load_format) == "dummy" else ""
    if config.revision is not None:
        return prefix + stated(config.revision)
    path = Path(model.model)
    if path.exists():
        return f"{prefix}content:{content_digest(path)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return f"{prefix}commit:{commit}"
    raise ConfigError(
        f"cannot identify the weights of {model.model!r}: they are no local files and have no commit; "
        "set 'revision' in kv_connector_extra_config (any text that changes whenever the weights do)"
    )


def _has_drafter(vllm_config: "VllmConfig") -> bool:
    """Return whether the KV cache holds the layers of a drafter in addition to those of the model."""
    return vllm_config.speculative_config is not None and vllm_config.num_lookahead_tokens > 0


def drafter(vllm_config: "VllmConfig") -> dict[str, str]:
    """Describe the drafter of speculative decoding. The result is empty if the KV cache has no layers of a drafter."""
    if not _has_drafter(vllm_config):
        return {}
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config
    return {"drafter": f"{speculative.method}/{model.dtype}/{config_digest(model.hf_config)}"}


def config_digest(hf_config: Any) -> str:
    """Digest a model's configuration with its overrides. An override, such as another rope scaling, changes the KV."""
    fields = {key: value for key, value in hf_config.to_dict().items() if key not in _VOLATILE_FIELDS}
    return digest_of(fields)


def media_digest(config: Any) -> dict[str, str]:
    """Digest the settings for images and other media. The engine's block hashes do not cover these settings."""
    if config is None:  # the model takes only text
        return {}
    names = ("mm_processor_kwargs", "mm_device_do_normalize", "media_io_kwargs")
    return {"media": digest_of({name: getattr(config, name, None) for name in names})}


def digest_of(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_algorithm(name: str) -> str:
    """Name the engine's hash function for token blocks, together with its seed.

    Raises:
        ConfigError: The seed is random in every process, so engines could not share chunks.
    """
    function = get_hash_fn_by_name(name)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        raise ConfigError(
            f"prefix_caching_hash_algo={name!r} starts from a random seed in every process, so engines could share "
            "nothing; use 'sha256' (vLLM's default), or set PYTHONHASHSEED to the same number for all engines"
        )
    return f"{name}:{hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()}"


def attention_of(vllm_config: "VllmConfig", layer_names: list[str]) -> str:
    """Name the attention kernels of these layers. On CPU add the instruction set, which changes a block's layout."""
    layers = vllm_config.compilation_config.static_forward_context
    used = [layers[name] for name in layer_names if name in layers]
    return ",".join(sorted({f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}" for layer in used}))


class Scopes:
    """Computes the scope of each request: its salt, and its adapter by name and content.

    If the files of an adapter change while this process runs, we cannot know which weights the engine uses. From then
    on no other process shares the adapter's chunks, and no older chunk is reused. New weights under a new path are
    shared as usual.
    """

    MAX_ADAPTERS = 16_384

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Any, str]] = {}
        """Maps (name, path) of an adapter to (last `signature` of its files, its text in `Scope.lora`)."""

    def of(self, request: "Request") -> Scope:
        adapter = request.lora_request
        return Scope(lora="" if adapter is None else self.adapter(adapter), salt=request.cache_salt or "")

    def adapter(self, adapter: Any) -> str:
        """Return the text of a LoRA adapter in `Scope.lora`."""
        name, place = adapter.lora_name, adapter.lora_path
        seen, scope = self._known.get((name, place), (None, ""))
        private = f"{name}:{secrets.token_hex(16)}"
        try:
            path = adapter_files(place)
            now = () if path is None else signature(path)
            if seen == now:
                return scope
            # If the files have changed or are not on this host, only this process uses the adapter's chunks.
            scope = private if seen or not now or path is None else f"{name}:{content_digest(path)}"
        except (OSError, RuntimeError):  # `expanduser` raises RuntimeError for an unknown user
            return private
        if seen is None and len(self._known) >= self.MAX_ADAPTERS:
            return private
        self._known[name, place] = now, scope
        return scope


def adapter_files(place: str) -> Path | None:
    """Find an adapter on this host by its path or its name on the hub. None means that this host does not have it."""
    path = Path(place).expanduser()
    if path.exists():
        return path
    try:
        return Path(snapshot_download(place, local_files_only=True))
    except (OSError, ValueError):  # it is not downloaded, or its name is not valid
        return None
