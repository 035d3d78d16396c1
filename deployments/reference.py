"""Answers requests with a plain vLLM engine, without raykv or a prefix cache, for comparison with the demo's answers.

    python -m deployments.reference --model FOLDER --answer-tokens 40

Prints READY when the engine has started. Then it reads one request per line from stdin (a JSON list of messages) and
writes one `Answer` per line to stdout. The engine uses one thread, one process and float32, as the demo's engines do.
"""

import argparse
import os
import sys
from typing import Any

from pydantic import BaseModel, TypeAdapter

READY = "ready"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
MESSAGES: TypeAdapter[list[dict[str, str]]] = TypeAdapter(list[dict[str, str]])


class Answer(BaseModel):
    """One answered request.

    Attributes:
        prompt: Token ids of the prompt, including those of the chat template.
        tokens: Token ids of the answer.
        text: Text of the answer.
        ttft_s: Seconds to the first token.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    ttft_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.reference")
    parser.add_argument("--model", required=True)
    parser.add_argument("--answer-tokens", type=int, required=True)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    engine = LLM(
        options.model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        kv_cache_memory_bytes=512 << 20,
        distributed_executor_backend="uni",
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.answer_tokens)
    print(READY, flush=True)
    for line in sys.stdin:
        messages: Any = MESSAGES.validate_json(line)
        (output,) = engine.chat(messages, sampling, use_tqdm=False)
        answer = Answer(
            prompt=output.prompt_token_ids,
            tokens=list(output.outputs[0].token_ids),
            text=output.outputs[0].text,
            ttft_s=output.metrics.first_token_latency,
        )
        print(answer.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
