"""Maps keys to their owners. The owner of a key is the node that knows which nodes have the key's chunk.

A ring has SLOTS slots, and each key belongs to one slot. Weighted rendezvous hashing gives each slot an owner. Every
node and client computes the same ring from the same members. When a node joins or leaves, only the slots of that node
change their owner.

Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996); weights after Schindelhauer and
Schomaker (2005).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from raykv.types import Bits, KeyArray, NodeId

SLOT_BITS: Final = 12
SLOTS: Final = 1 << SLOT_BITS
MAX_MEMBERS: Final = 4096
"""A view has at most this many members, because computing the ring takes 32 KiB of memory for each."""

MAX_NICS: Final = 16
"""A node is read over at most this many NICs."""

MemberId: TypeAlias = Annotated[NodeId, msgspec.Meta(max_length=64)]
"""The name of a node in a message, as long as `NodeConfig.node_id` may be."""
LEARN_S: Final = 3.0
"""For this long after a change of the view, the old owners of keys still answer, because the new owners do not know all
holders yet. Holders announce their chunks to new owners at their next heartbeat."""
RESTART_EPOCHS: Final = 4096
"""A directory that starts adopts a node's view, with an epoch that is greater by this number. Its predecessor may have
published later views, and the node may have changed its own entry. So no two views have the same epoch."""


class Member(msgspec.Struct, frozen=True):
    """A node of the cluster, as other processes see it.

    Attributes:
        node_id: The node's name.
        host: Identity of the node's host. Processes with equal hosts share memory.
        endpoints: Addresses by transport: "tcp" has "host:port", "unix" has "unix:..." for the node's host, and "rdma"
            has the GIDs of the node's ports, for people to read. Without "rdma" the node is not read over RDMA. "nixl"
            has the names of NIXL's backends. "nic0",
            "nic1", ... have "host:port" for the node's NICs, if it is read over several; "tcp" may equal one of them.
        weight: The node's share of the ring, relative to other nodes.
        incarnation: Start time of the node's process. After a restart this time differs, and the node's location index
            is empty.
    """

    node_id: MemberId
    host: str
    endpoints: dict[str, str]
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    @property
    def address(self) -> str:
        """The endpoint for other hosts; empty if there is none."""
        return self.endpoints.get("tcp", "")

    @property
    def local_address(self) -> str:
        """The endpoint for processes on the node's host; empty if there is none."""
        return self.endpoints.get("unix", "")

    @property
    def nics(self) -> tuple[str, ...]:
        """The endpoints for large reads from other hosts: one for each NIC, empty for a NIC that is not served.

        If the node names no NICs, its only endpoint is `address`.
        """
        count = 0
        while count < MAX_NICS and f"nic{count}" in self.endpoints:
            count += 1
        return tuple(self.endpoints[f"nic{number}"] for number in range(count)) or (self.address,)


class View(msgspec.Struct, frozen=True, dict=True):
    """The members of the cluster at one time. A later view has a greater epoch."""

    epoch: int = 0
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()

    @cached_property
    def ring(self) -> "Ring":
        """The ring of this view's members, which gives each key its owner."""
        return Ring([(member.node_id, member.weight) for member in self.members])

    def member(self, node_id: NodeId) -> Member | None:
        """Return the member with this name, or None."""
        return self._by_id.get(node_id)

    @cached_property
    def _by_id(self) -> dict[NodeId, Member]:
        return {member.node_id: member for member in self.members}


def is_next(old: View, new: View) -> bool:
    """Whether the directory has published no other view between these two, judged by their epochs."""
    return bool(old.members) and new.epoch - old.epoch in (0, 1, RESTART_EPOCHS)


def owner_changed(old: View, new: View, keys: KeyArray) -> Bits:
    """Return for each key whether its owner is another node in `new`, or has restarted with an empty location index."""
    if not new.members:
        return np.zeros(len(keys), np.bool_)
    return np.not_equal(_incarnations(old, keys), _incarnations(new, keys))


def _incarnations(view: View, keys: KeyArray) -> npt.NDArray[np.int64]:
    """Return the incarnation of each key's owner: the start time of the owner's process, in nanoseconds."""
    incarnations = {member.node_id: member.incarnation for member in view.members}
    return np.array([incarnations[name] for name in view.ring.nodes], np.int64)[view.ring.owners(keys)]


class Ring:
    """The owner of each ring slot, for one list of weighted nodes.

    Attributes:
        nodes: Names of the nodes, sorted.
        owner_of_slot: Shape [SLOTS]: for each slot the index of its owner in `nodes`; -1 when there are no nodes.
    """

    def __init__(self, weights: Sequence[tuple[NodeId, float]]) -> None:
        ordered = sorted(weights)
        self.nodes = tuple(name for name, _ in ordered)
        share = np.array([weight for _, weight in ordered], np.float64)
        seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name, _ in ordered], np.uint64)
        # Uniform numbers of 53 bits, never 0 or 1, so that the logarithm is finite and not 0.
        uniform = ((_mix(np.arange(SLOTS, dtype=np.uint64)[:, None] ^ seeds) >> np.uint64(11)) + 0.5) * 2.0**-53
        scores = share / np.log(uniform)
        self.owner_of_slot = (scores.argmin(axis=1) if ordered else np.full(SLOTS, -1)).astype(np.int16)

    def owners(self, keys: KeyArray) -> npt.NDArray[np.int16]:
        """Return the index in `nodes` of each key's owner; -1 when there are no nodes."""
        slots = keys[:, 0] >> np.uint64(64 - SLOT_BITS)  # the highest bits of the key
        owners: npt.NDArray[np.int16] = self.owner_of_slot[slots]
        return owners

    def shares(self, keys: KeyArray) -> dict[NodeId, list[int]]:
        """Return, for each node that owns some of the keys, the indices of these keys in `keys`."""
        owners = self.owners(keys)
        some = np.unique(owners[owners >= 0]).tolist()
        return {self.nodes[owner]: np.flatnonzero(owners == owner).tolist() for owner in some}


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each number, like SplitMix64 without its first shift. The result is the same on every machine."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
