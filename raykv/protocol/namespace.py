"""The namespace: all conditions that must be equal before stored KV may be reused."""

import hashlib
import json
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field

from raykv.config import Model

DIGEST_NBYTES = 16


class Namespace(Model):
    """The conditions under which chunks were computed.

    A key depends on the digest of all fields, so two namespaces never share a key. `salt` and `lora` may differ between
    the requests of one model. All tenants and adapters of a model form one quota group (`group`), which has its own
    capacity and policy on a node.

    Attributes:
        model: Name or path of the weights.
        revision: Version of the weights: a commit, or a digest of the files.
        dtype: Element type of the stored KV.
        layout: Shape and order of the engine's bytes in a chunk.
        chunk_tokens: Tokens in a chunk.
        tp_rank, tp_size, pp_rank, pp_size: Tensor and pipeline parallelism. A chunk contains the KV of one rank.
        attention_backend: Kernel family. It includes the CPU instruction set if the byte layout differs between CPUs.
        hash_algorithm: Name of the engine's hash function for tokens, with its seed.
        lora: Name and path of the LoRA adapter; empty for none.
        salt: The tenant's salt; empty for none.
        extra: Anything else that must match.
    """

    model: Annotated[str, Field(min_length=1)]
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    chunk_tokens: Annotated[int, Field(ge=1)] = 1
    tp_rank: Annotated[int, Field(ge=0)] = 0
    tp_size: Annotated[int, Field(ge=1)] = 1
    pp_rank: Annotated[int, Field(ge=0)] = 0
    pp_size: Annotated[int, Field(ge=1)] = 1
    attention_backend: str = ""
    hash_algorithm: str = ""
    lora: str = ""
    salt: str = ""
    extra: dict[str, str] = Field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        """A hash of all fields, 16 bytes."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_NBYTES, person=b"raykv-namespace").digest()

    @cached_property
    def group(self) -> "Namespace":
        """The quota group of this namespace: the same fields without `salt` and `lora`."""
        return self.with_fields(salt="", lora="")

    def with_fields(self, **fields: object) -> Self:
        """Return a copy of this namespace with some fields changed."""
        return self.load({**self.model_dump(), **fields})

    def differences(self, other: "Namespace") -> list[str]:
        """Return the names of the fields that differ between the two namespaces."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [field for field in mine if mine[field] != theirs[field]]
