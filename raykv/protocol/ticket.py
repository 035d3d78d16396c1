"""The hand-off ticket: a decode worker uses it to read a prefill worker's chunks without a lookup.

A ticket is sent in HTTP requests, so users may forge a ticket. For this reason a ticket contains node names and no
addresses. A forged ticket cannot name a host outside the cluster, and only causes misses.
"""

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Annotated, Any, Self

from pydantic import Field

from raykv.config import Model
from raykv.errors import NamespaceMismatch
from raykv.protocol.namespace import Namespace
from raykv.types import Match, NodeId

MAX_RUNS = 256
HAND_OFF = "raykv_hand_off"
"""The field of `kv_transfer_params` with the id of a hand-off whose decode engine does not wait for a ticket."""
MAX_HAND_OFF = 256
"""An id has at most this many characters."""


class Run(Model):
    """Consecutive chunks that one node holds. An empty `node_id` stands for chunks that no node holds."""

    node_id: Annotated[str, Field(max_length=64)]
    chunks: Annotated[int, Field(ge=1, le=1 << 24)]


class Ticket(Model):
    """The holders of the chunks of one prompt, from the first chunk on.

    Attributes:
        group: The namespace without salt and LoRA adapter. If the reader has another namespace, the error
            names the fields that differ.
        digest: Digest of the whole namespace, as hexadecimal text.
        runs: The nodes that hold the chunks, in the order of the chunks.
    """

    group: Namespace
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    runs: Annotated[tuple[Run, ...], Field(max_length=MAX_RUNS)]

    @classmethod
    def of(cls, namespace: Namespace, holders: Sequence[NodeId | None]) -> Self:
        """Make a ticket. `holders`: the node that holds each chunk, or None. At most MAX_RUNS runs are included."""
        runs = tuple(Run(node_id=name or "", chunks=len(list(group))) for name, group in groupby(holders))
        return cls(group=namespace.group, digest=namespace.digest.hex(), runs=runs[:MAX_RUNS])

    def holders(self, namespace: Namespace, wanted: int) -> list[NodeId | None]:
        """Return the node of each of the first `wanted` chunks; None if the ticket names no node for the chunk.

        Raises:
            NamespaceMismatch: The ticket belongs to another namespace. The error names the fields that differ.
        """
        if self.digest != namespace.digest.hex():
            mine, theirs = namespace.group, self.group
            differences = [
                f"{field} ({getattr(theirs, field)!r} there, {getattr(mine, field)!r} here)"
                for field in mine.differences(theirs)
            ]
            fields = ", ".join(differences or ["salt or lora"])
            raise NamespaceMismatch(f"the hand-off ticket belongs to another namespace; fields that differ: {fields}")
        named = [run.node_id or None for run in self.runs for _ in range(min(run.chunks, wanted))][:wanted]
        return named + [None] * (wanted - len(named))

    def match(self, namespace: Namespace, wanted: int) -> Match:
        """Return the leading chunks that the ticket names a node for, at most `wanted`.

        Raises the errors of `holders`.
        """
        named = tuple(takewhile(bool, self.holders(namespace, wanted)))
        return Match(len(named), tuple(name for name in named if name))

    def to_json(self) -> dict[str, Any]:
        """Return the ticket as values that JSON can encode."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Decode the output of `to_json`. Raises ConfigError if a field is missing, unknown or wrong."""
        return cls.load(fields if isinstance(fields, dict) else {"ticket": fields})
