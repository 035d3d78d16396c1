"""Real vLLM engines in this process, and small models for them.

The random weights of the models are so large that a wrong key, value or state changes the answer.
"""

import json
import os
import random
from collections import Counter
from concurrent.futures import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers

# Use one process, no model hub, and one thread. Several threads would spin while they wait for each other.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
torch.set_num_threads(1)

from safetensors.torch import save_file  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

BLOCK = 32
LATENT_BLOCK = 32 if torch.cpu._is_amx_tile_supported() else 16
"""Tokens in a block of latents (MLA). vLLM has two kernels for them on CPU, and each takes only its own size."""
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
    """Write a model with two layers of full attention and four with a sliding window of 64 tokens."""
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
    """Write a model like DeepSeek-V2: its layers store latents (MLA).

    Its weights are smaller than those of the other models. With larger weights, the rounding of bfloat16 would change
    answers: even without a cache, an answer would depend on whether the prompts are sent one by one or all at once.
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
    """Write a model like Qwen3-Next: three layers with a state (gated delta net), and one with full attention.

    Only the last layer has experts, and every token uses all of them. If a router had to choose, the rounding of
    bfloat16 could change its choice. Then even an engine without raykv would give other answers under pressure.
    """
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
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1, 2],
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


def greedy(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **fields)


def connectors() -> list[Any]:
    """Return the raykv connectors of the workers in this process."""
    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", [group]))


def name_of(request: Any) -> str:
    """Return the name under which a request was added. vLLM appends random characters to it."""
    name: str = request.request_id.rpartition("-")[0]
    return name


class Aborted:
    """Requests that are aborted while they run. Each is aborted when it reaches the state of `DUE` set for it.

    Attributes:
        states: State -> number of requests aborted in it. Counted by `abort_due`.
    """

    DUE = ("loading", "decoding", "preempted", "prefilling")
    MOST_TOKENS = 60
    """A request that does not reach its state is aborted after this many generated tokens."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._left = engine, {}
        self.states: Counter[str] = Counter()

    def add(self, tokens: list[int]) -> None:
        number = len(self._left)
        name = f"aborted {number}"
        self._left[name] = self.DUE[number % len(self.DUE)]
        self._engine.add_request(name, {"prompt_token_ids": tokens}, greedy(self.MOST_TOKENS + 20))

    def abort_due(self) -> None:
        """Abort the requests that have reached their state. Call this after each step."""
        requests = self._engine.engine_core.engine_core.scheduler.requests.values()
        for request in list(requests):
            name = name_of(request)
            if name in self._left and not request.is_finished():
                state = self._state(request)
                if state == self._left[name] or request.num_output_tokens >= self.MOST_TOKENS:
                    del self._left[name]
                    self.states[state] += 1
                    self._engine.abort_request([name])

    def _state(self, request: Any) -> str:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            loads = [connector.worker_side.loading.get(request.request_id) for connector in connectors()]
            return "loading" if any(load and not load[1].done() for load in loads) else "loaded"
        if request.status == RequestStatus.PREEMPTED:
            return "preempted"
        if request.status == RequestStatus.RUNNING:
            return "decoding" if request.num_output_tokens > 1 else "prefilling"
        return "waiting"


class Engine:
    """One vLLM engine, stopped at the end of its `with` block. If `address` is None, it has no connector.

    Attributes:
        steps: Number of steps in `answer_among` so far.
    """

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
        self.steps = 0
        # Wait long, so that a busy machine skips nothing. Always load, although computing is faster in these models.
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
            greedy(count, logprobs=logprobs, extra_args={"kv_transfer_params": params} if params else None),
            use_tqdm=False,
        )
        self._wait_for_saves()
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    def answer_among(
        self, prompts: list[list[int]], aborted: list[list[int]], *, count: int = 8, logprobs: int = 1
    ) -> tuple[Counter[str], int]:
        """Like `answer`, but also send the requests of `aborted` among the others, and abort them: see `Aborted`.

        Returns:
            (`Aborted.states`, number of `prompts` that were preempted).
        """
        engine, ended, preempted = self.llm.llm_engine, {}, set()
        victims, requests = Aborted(engine), engine.engine_core.engine_core.scheduler.requests
        places = random.Random(len(prompts)).sample(range(len(prompts)), len(aborted))
        for number, tokens in enumerate(prompts):
            if number in places:
                victims.add(aborted[places.index(number)])
            engine.add_request(str(number), {"prompt_token_ids": tokens}, greedy(count, logprobs=logprobs))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = output
            self.steps += 1
            victims.abort_due()
            preempted |= {name_of(each) for each in requests.values() if each.num_preemptions}
        self.outputs = [ended[str(number)] for number in range(len(prompts))]
        self._wait_for_saves()
        return victims.states, len(preempted & ended.keys())

    def _wait_for_saves(self) -> None:
        for connector in connectors():
            wait([saving.future for saving in connector.worker_side.saving])

    def preemptions(self) -> int:
        """Return how often the engine has preempted a request, by vLLM's own counter."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def is_idle(self) -> bool:
        """Return whether the engine has no request and no load, and all its blocks are free."""
        core = self.llm.llm_engine.engine_core.engine_core.scheduler
        pool = core.kv_cache_manager.block_pool
        loads = [load for connector in connectors() for load in connector.worker_side.loading]
        return not core.requests and not loads and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def logprobs(self) -> list[list[float]]:
        """Return the log probabilities of the last answers' tokens. In two runs they are equal only if the KV is."""
        return [
            [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)]
            for one in self.outputs
        ]

    def counted(self, name: str, *labels: str) -> int:
        """Return the sum of those series of a Prometheus counter of the connector that have all these label values."""
        return sum(
            metric.value
            for metric in self.llm.get_metrics()
            if metric.name == f"vllm:raykv_{name}" and set(labels) <= set(metric.labels.values())
        )

    def reused_tokens(self) -> int:
        """Return how many prompt tokens of the last answers were not computed, but loaded or in the engine's cache."""
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
