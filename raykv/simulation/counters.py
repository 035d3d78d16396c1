"""What a simulated cluster has done so far."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Self

from raykv.types import NodeId


@dataclass
class Counters:
    """Counters of all nodes and engines. The difference of two of them is what was done in between.

    Attributes:
        reads: For each node the chunks read from its memory, by engines on any node. This is the node's load. Copying
            a prefix to another node is no read.
        sent: Those of these chunks that were sent to other nodes.
        requests: Requests that have ended.
        wanted, hits: Chunks in all prompts, and those of them that were read instead of computed.
        misled: Chunks that a holder, which an owner has named, did not have.
        copied: Chunks that were copied as replicas.
        announced, announced_again: Keys in announcements, and those of them that a new view caused.
    """

    reads: Counter[NodeId] = field(default_factory=Counter)
    sent: int = 0
    requests: int = 0
    wanted: int = 0
    hits: int = 0
    misled: int = 0
    copied: int = 0
    announced: int = 0
    announced_again: int = 0

    def copy(self) -> Self:
        return replace(self, reads=self.reads.copy())

    def __sub__(self, before: Self) -> Self:
        changed = {each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)[1:]}
        return replace(self, reads=self.reads - before.reads, **changed)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.wanted if self.wanted else 0.0

    def skew(self, nodes: int) -> float:
        """Return the load of the node that is read most, divided by the mean load of all `nodes` nodes."""
        return max(self.reads.values(), default=0) * nodes / max(1, self.reads.total())
