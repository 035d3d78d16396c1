"""Real vLLM engines in this process, and small models for them.

The weights of the models are drawn wide enough that a wrong key, value or state changes the answer.
"""

import json
import os
import random
from collections.abc import Iterable
from concurrent.futures import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers

# One process, one thread (several threads would spin while they wait for each other), and no model hub.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
torch.set_num_threads(1)

from safetensors.torch import save_file  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: E402

BLOCK = 32
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD = 128, 256, 512, 2, 4, 2, 32
CHUNK_NBYTES = BLOCK * LAYERS * 2 * KV_HEADS * HEAD * 4


def write_model(folder: Path, *, seed: int) -> Path:
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * scale

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, scale=1),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        block = {
            "self_attn.q_proj": weight(HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": weight(KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": weight(KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": weight(HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": weight(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": weight(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": weight(HIDDEN, INTERMEDIATE),
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in block.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gemma(folder: Path) -> Path:
    """A model with two layers of full attention and four with a sliding window of 64 tokens."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=len(layers),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        query_pre_attn_scalar=HEAD,
        sliding_window=64,
        layer_types=layers,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    return _write_random(folder, config, torch.float32)


def write_mla(folder: Path) -> Path:
    """A model like DeepSeek-V2: its layers store latents (MLA).

    With wider weights the rounding of bfloat16 changes every answer: an engine without a cache then answers the same
    prompts differently one by one and all at once.
    """
    config = transformers.DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=LAYERS,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=4096,
    )
    return _write_random(folder, config, torch.bfloat16, scale=0.05)


def write_next(folder: Path) -> Path:
    """A model like Qwen3-Next: three layers with a recurrent state (gated delta net) and one with full attention."""
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        max_position_embeddings=4096,
    )
    return _write_random(folder, config, torch.bfloat16)


def _write_random(folder: Path, config: Any, dtype: torch.dtype, *, scale: float = 0.12) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.0 if "embed_tokens" in name else scale)
    model.save_pretrained(folder)
    return folder


class Engine:
    """One vLLM engine, stopped at the end of its `with` block. If `address` is None, it has no cache."""

    def __init__(
        self,
        model: Path,
        address: str | None,
        *,
        dtype: str = "float32",
        transfer: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        # A busy machine must skip nothing, and these models compute a prompt sooner than any load ends.
        patient = {"lookup_timeout_s": 5.0, "store_timeout_s": 5.0, "load_policy": "always"}
        connector = {
            "kv_connector": "RayKVConnector",
            "kv_connector_module_path": "raykv.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address, **patient, **(extra or {})},
            **(transfer or {}),
        }
        self.llm = LLM(
            str(model),
            **{
                "skip_tokenizer_init": True,
                "dtype": dtype,
                "block_size": BLOCK,
                "max_model_len": 1024,
                "max_num_batched_tokens": 128,  # so that most prompts are prefilled in several steps
                "enforce_eager": True,
                "seed": 0,
                "kv_cache_memory_bytes": 64 << 20,
                "distributed_executor_backend": "uni",
                "disable_log_stats": False,
                "kv_transfer_config": connector if address else None,
                **arguments,
            },
        )

    def answer(
        self,
        prompts: list[list[int]],
        *,
        count: int = 8,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        logprobs: int = 1,
    ) -> list[list[int]]:
        """Send all prompts at once, and wait for answers and saves. Returns the greedy tokens for each prompt."""
        self.outputs = self.llm.generate(
            [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts],
            SamplingParams(
                temperature=0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
            use_tqdm=False,
        )
        if has_kv_transfer_group():
            group = get_kv_transfer_group()
            for connector in getattr(group, "_connectors", [group]):
                wait([future for _, _, future in connector.worker_side.saving])
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    def abort_some(self, prompts: Iterable[list[int]]) -> None:
        """Send prompts, and abort all of them after a few steps, whatever their state."""
        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
        names = []
        for number, tokens in enumerate(prompts):
            names.append(f"aborted {number}")
            engine.add_request(names[-1], {"prompt_token_ids": tokens}, params)
        for name in names:
            engine.step()
            engine.abort_request([name])

    def logprobs(self) -> list[list[float]]:
        """Log probabilities of the last answers' tokens. They are equal only if the KV was, bit for bit."""
        return [
            [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)]
            for one in self.outputs
        ]

    def counted(self, name: str, *labels: str) -> int:
        """Value of one of the connector's Prometheus counters, summed over all labels that are not given."""
        return sum(
            metric.value
            for metric in self.llm.get_metrics()
            if metric.name == f"vllm:raykv_{name}" and set(labels) <= set(metric.labels.values())
        )

    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed for the last answers, but loaded or found in the engine's own cache."""
        return sum(output.num_cached_tokens or 0 for output in self.outputs)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def prompt(seed: int, tokens: int, *, after: list[int] | None = None) -> list[int]:
    rng = random.Random(seed)
    return [*(after or []), *(rng.randrange(3, VOCABULARY) for _ in range(tokens))]
