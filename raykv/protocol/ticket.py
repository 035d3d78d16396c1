"""The hand-off ticket: with it a decode worker reads what a prefill worker stored, without a lookup.

A ticket travels in HTTP requests, which users may forge. So it names holders by node name and carries no address: a
forged ticket can only name members of the cluster, and costs a miss.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Self

from pydantic import Field

from raykv.config import Model
from raykv.errors import NamespaceMismatch
from raykv.protocol.namespace import Namespace
from raykv.types import Match, NodeId

MAX_RUNS = 256


class Run(Model):
    """Consecutive chunks that one node holds."""

    node_id: Annotated[str, Field(min_length=1, max_length=64)]
    chunks: Annotated[int, Field(ge=1, le=1 << 24)]


class Ticket(Model):
    """Who holds the first chunks of one prompt.

    Attributes:
        group: The namespace without salt and adapter, to explain a mismatch.
        digest: Digest of the whole namespace, as hexadecimal text.
        runs: Holders from the first chunk on.
    """

    group: Namespace
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    runs: Annotated[tuple[Run, ...], Field(max_length=MAX_RUNS)]

    @classmethod
    def of(cls, namespace: Namespace, holders: Sequence[NodeId]) -> Self:
        """Make a ticket for chunks that these nodes hold, one entry a chunk."""
        runs = tuple(Run(node_id=name, chunks=len(list(group))) for name, group in groupby(holders))
        return cls(group=namespace.group, digest=namespace.digest.hex(), runs=runs[:MAX_RUNS])

    def match(self, namespace: Namespace, wanted: int) -> Match:
        """The leading chunks, at most `wanted`, that the ticket promises.

        Raises:
            NamespaceMismatch: The ticket was made under another namespace; names the fields.
        """
        if self.digest != namespace.digest.hex():
            namespace.group.require_equal(self.group, what="the hand-off ticket")
            raise NamespaceMismatch(
                "the hand-off ticket belongs to another namespace; fields that differ: salt or lora"
            )
        holders = [run.node_id for run in self.runs for _ in range(min(run.chunks, wanted))][:wanted]
        return Match(len(holders), tuple(holders))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON message."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Read what `to_json` wrote. ConfigError if a field is missing, unknown or wrong."""
        return cls.load(fields if isinstance(fields, dict) else {"ticket": fields})
