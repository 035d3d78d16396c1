"""The shape of a model, from which follow the bytes of KV per token and the cost of prefill."""

from dataclasses import dataclass
from typing import Final

DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape. The defaults describe Llama 3.1 8B.

    `kv_heads`, `head_size` and `dtype` describe keys and values. `hidden` is query heads times head size. `parameters`
    counts the parameters that are active for each token.
    """

    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    hidden: int = 4096
    parameters: float = 8.03e9

    @property
    def token_nbytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * DTYPE_NBYTES[self.dtype]

    def prefill_flops(self, tokens: int, attended: int) -> float:
        """Return the floating-point operations for a prefill.

        `attended` is the sum, over these tokens, of the number of tokens before each.
        """
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.hidden * (attended + tokens)
