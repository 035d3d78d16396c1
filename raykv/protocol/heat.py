"""What nodes report to the directory about the load of their chunks, and what the directory answers.

Heat is the load of reads on the chunks of one node, in bytes a second. A hot prefix is a chain of chunks that are read
together. Its head, the first chunk of the chain, identifies it. A replica is a copy of a hot prefix on a further node.
"""

from typing import Annotated, Final, TypeAlias

import msgspec

from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.types import NodeId

MAX_REPORTED: Final = 64
"""A report has at most this many prefixes: those with the highest load."""


Head: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
Load: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix on one node that is read often.

    Attributes:
        head: Key of the prefix's first chunk, 16 bytes.
        load: Bytes a second that are read from this node's copy.
        chunks: Number of chunks of the prefix on this node.
        replica: Whether this copy is a replica, which the node deletes when the directory no longer lists it.
        nbytes: Length of these chunks together.
    """

    head: Head
    load: Load
    chunks: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    replica: bool = False
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0


class HeatReport(msgspec.Struct, frozen=True, array_like=True):
    """The heat of one node.

    Attributes:
        load: Bytes a second that are read from the node, all chunks together.
        prefixes: Its hottest prefixes, at most MAX_REPORTED.
    """

    load: Load
    prefixes: Annotated[tuple[HotPrefix, ...], msgspec.Meta(max_length=MAX_REPORTED)] = ()


class CopyOrder(msgspec.Struct, frozen=True, array_like=True):
    """The directory asks a node to copy the prefix with this `head` to the nodes in `targets`."""

    head: bytes
    targets: tuple[NodeId, ...]


class HeatOrders(msgspec.Struct, frozen=True, array_like=True):
    """The directory's answer to a report.

    Attributes:
        copies: Prefixes that this node must copy to other nodes.
        keep: Heads of the prefixes of which this node has a copy that is needed. It deletes its other replicas, and
            reports ordinary copies even if nobody reads them here.
        adopt: Heads of the replicas that become ordinary chunks, because no other node has an ordinary copy any more.
    """

    copies: tuple[CopyOrder, ...] = ()
    keep: tuple[bytes, ...] = ()
    adopt: tuple[bytes, ...] = ()
