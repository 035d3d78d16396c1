"""What an engine and its replica report to routers: namespace, measured rates, queue, tokenizer and adapters."""

from typing import Annotated, Any, Final

from pydantic import Field

from raykv.config import Model
from raykv.protocol.namespace import Namespace
from raykv.types import NodeId

STATS_KEY: Final = "raykv"
"""The key of a `ReplicaReport` in a replica's routing stats."""
DISK: Final = "/disk"
"""End of the names of paths to SSD or file. Names of nodes contain no slash."""
MAX_PATHS: Final = 32
"""An engine reports the rates of at most this many paths."""
MAX_ADAPTERS: Final = 256
"""A replica reports at most this many LoRA adapters."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=0)]


def path_name(holder: NodeId, *, below: bool) -> str:
    """Name the path of loads from a holder. Loads from its SSD or file have a path of their own."""
    return holder + DISK if below else holder


class EngineReport(Model):
    """What one engine measures of itself.

    Attributes:
        namespace: Namespace of the engine's first rank without adapter and salt. The first rank stands for all, because
            all ranks store a chunk in the same step. In a later epoch its revision is the epoch.
        suffix: End of the names of the chunks that routers look up: those of the first KV cache group that needs whole
            prefixes.
        hash_tokens: Number of tokens in a block to which the engine gives a hash.
        chunk_nbytes: Bytes that one worker loads for one chunk, summed over all groups.
        near: Names of the raykv nodes on the engine's host.
        cache_tokens: Number of tokens whose KV fits into the engine's own prefix cache. 0: it has none.
        filled_tokens: Number of tokens that were computed or loaded since the engine's start. Each took a place in the
            cache, so what was used last `cache_tokens` before the present value is gone.
        queued_tokens: Tokens that the engine still has to compute for its requests.
        seconds_per_token: Measured time of a step for each of its tokens. 0: not measured yet.
        seconds_per_step: Measured time of a step that only continues answers. 0: not measured yet.
        seconds_per_byte: Measured times of loads, by path (see `path_name`).
    """

    namespace: Namespace
    suffix: str = ""
    hash_tokens: Annotated[int, Field(ge=1)]
    chunk_nbytes: Annotated[int, Field(ge=0)] = 0
    near: tuple[str, ...] = ()
    cache_tokens: Tokens = 0
    filled_tokens: Tokens = 0
    queued_tokens: Tokens = 0
    seconds_per_token: Amount = 0.0
    seconds_per_step: Amount = 0.0
    seconds_per_byte: Annotated[dict[str, Amount], Field(max_length=MAX_PATHS)] = Field(default_factory=dict)

    @property
    def chunk_tokens(self) -> int:
        return self.namespace.chunk_tokens


class TokenizerReport(Model):
    """How an engine makes tokens from requests. The fields are those of vLLM's arguments.

    Attributes:
        tokenizer: Path or name on the hub.
        template_kwargs: Defaults of the chat template's variables.
        content_format: "string": the template gets the text of a message. "openai": it gets a list of parts.
    """

    tokenizer: str
    mode: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    content_format: str = "auto"
    template_kwargs: dict[str, Any] = Field(default_factory=dict)


class Adapter(Model):
    """A LoRA adapter of an engine: its path, and its text in the namespace's field `lora`."""

    path: str
    scope: str


class ReplicaReport(Model):
    """What one replica tells routers.

    Attributes:
        engine: The engine's last report. None: the engine has not worked yet.
        age_s: Seconds since the engine made its report.
        adapters: The LoRA adapters that the engine knows, by the name under which requests ask for them.
    """

    engine: EngineReport | None = None
    age_s: Amount = 0.0
    tokenizer: TokenizerReport | None = None
    adapters: Annotated[dict[str, Adapter], Field(max_length=MAX_ADAPTERS)] = Field(default_factory=dict)
