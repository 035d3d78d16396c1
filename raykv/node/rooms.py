"""The room of other nodes, and the choice of the node that gets the next chunks. Logic without input, output or clock.

An empty node must not attract all chunks at once: its links and its processor would be busy, and reads from it slow.
So chunks are spread by chance, in proportion to the free room, and no node gets more than half of them.
"""

import math
import random
from collections import Counter
from typing import Final, NamedTuple

from raykv.types import NodeId

MOST_SHARE: Final = 0.5
"""One node gets at most this share of the bytes between two updates, as long as another node has room. Bytes of chunks
that the node owns do not count."""


class Room(NamedTuple):
    """Free bytes of a node, in memory and in its own tiers below memory."""

    memory: int = 0
    below: int = 0


class Rooms:
    """The room of other nodes, as one node knows it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rooms: dict[NodeId, Room] = {}
        self._sent: Counter[NodeId] = Counter()

    def update(self, rooms: dict[NodeId, Room]) -> None:
        """Replace what is known of all nodes."""
        self._rooms = rooms
        self._sent.clear()

    def order(self, owner: NodeId, nbytes: int, *, below: bool) -> list[NodeId]:
        """Return the nodes with room for `nbytes` bytes, in the order in which to try them.

        The owner is the first. The others follow in random order: a node with twice the room is twice as likely to be
        before another. Nodes that have got more than MOST_SHARE of the bytes are the last.
        """
        free = {name: room.below if below else room.memory for name, room in self._rooms.items()}
        chance = {name: math.log(1.0 - self._rng.random()) / room for name, room in free.items() if room >= nbytes > 0}
        most = MOST_SHARE * self._sent.total()
        return sorted(chance, key=lambda name: (name != owner, self._sent[name] > most, -chance[name]))

    def take(self, name: NodeId, nbytes: int, *, below: bool, owned: bool) -> None:
        """Record that a node has stored `nbytes` bytes. `owned`: the node owns the first of these chunks."""
        room = self._rooms.get(name, Room())
        self._rooms[name] = Room(room.memory - nbytes * (not below), room.below - nbytes * below)
        if not owned:
            self._sent[name] += nbytes

    def close(self, name: NodeId, *, below: bool) -> None:
        """Record that a node has taken less than it was offered. It gets nothing more until the next update."""
        room = self._rooms.get(name, Room())
        self._rooms[name] = room._replace(below=0) if below else room._replace(memory=0)
