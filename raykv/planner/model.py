"""The shape of a model: the size of a token's keys and values, and the cost of computing them."""

from dataclasses import dataclass
from typing import Final

DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape; the defaults are those of Llama 3.1 8B.

    `kv_heads`, `head_size` and `dtype` are those of keys and values, `hidden` is query heads times head size, and
    `parameters` are those active for each token.
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
        """Floating-point operations to compute tokens.

        `attended`: for each token the number of tokens before it, summed: its attention extends to them.
        """
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.hidden * (attended + tokens)
