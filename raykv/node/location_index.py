"""The location index of one node. It maps each key that this node owns to the holders: the nodes that have the chunk.

A wrong entry makes one reader miss the chunk. After that, the entry is corrected.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.codec import pack_bits
from raykv.protocol.messages import MAX_HOLDERS, Located
from raykv.types import Bits, KeyArray, NodeId

MAX_KNOWN: Final = 1024
"""At most this many holders of one key are known. The holders that were added first are dropped."""
MAX_SHARED: Final = 1 << 17
"""Keys share `Location` objects through a table. If the locations in the table have more than this many holders in
total, `LocationIndex` clears it."""

SPREAD_HOLDERS: Final = 3
"""If a chunk has at least this many holders, its owner does not answer every read with `locate` itself, but names other
holders. With fewer holders, the further request would cost more than it saves."""


class Location(NamedTuple):
    """The holders of one chunk.

    Attributes:
        holders: Nodes that announced the chunk, in the order in which they were added.
        below: Those holders that have the chunk only in a tier below memory.
        nbytes: Length of the chunk; 0 if unknown.
    """

    holders: tuple[NodeId, ...] = ()
    below: tuple[NodeId, ...] = ()
    nbytes: int = 0

    def added(self, node_id: NodeId, nbytes: int, below: bool) -> "Location":
        """Return a copy with this holder and length. `below`: the holder has the chunk only in a tier below memory."""
        holders = self.holders if node_id in self.holders else (*self.holders[1 - MAX_KNOWN :], node_id)
        others = tuple(holder for holder in self.below if holder != node_id and holder in holders)
        return Location(holders, (*others, node_id) if below else others, nbytes)

    def within(self, nodes: frozenset[NodeId]) -> "Location":
        """Return a copy that has only those holders that are in `nodes`."""
        holders, below = (tuple(holder for holder in some if holder in nodes) for some in (self.holders, self.below))
        return Location(holders, below, self.nbytes)


UNKNOWN: Final = Location()


class LocationIndex:
    """Locations of the keys that one node owns. Thread-safe.

    Keys with equal locations share one `Location` object. So each key costs only its 16 bytes and a dict entry.
    """

    def __init__(self, max_keys: int = 1 << 22) -> None:
        """Make an empty index for at most `max_keys` keys. A full index drops the keys that were added first."""
        self._max_keys = max_keys
        self._locations: dict[bytes, Location] = {}
        self._former: dict[bytes, Location] = {}  # of keys that another node owns since the last `follow_view`
        self._shared: dict[tuple[Location, NodeId, int, bool], Location] = {}
        self._shared_holders = 0  # total number of holders of the locations in `_shared`
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._locations)

    def add(self, node_id: NodeId, keys: KeyArray, nbytes: npt.NDArray[np.uint32], below: Bits | None = None) -> None:
        """Record that `node_id` holds these chunks. `below`: which of them are only in a tier below memory."""
        bits = repeat(False) if below is None else below.tolist()
        with self._lock:
            shared, locations = self._shared, self._locations
            if self._shared_holders > MAX_SHARED:
                shared.clear()
                self._shared_holders = 0
            for key, length, is_below in zip(_split(keys), nbytes.tolist(), bits, strict=False):
                before = locations.get(key, UNKNOWN)
                change = (before, node_id, length, is_below)
                after = shared.get(change)
                if after is None:
                    after = shared[change] = before.added(node_id, length, is_below)
                    self._shared_holders += len(after.holders)
                locations[key] = after
            excess = len(locations) - self._max_keys
            if excess > 0:  # drop many keys at once, because finding a dict's first entry is slow after deletions
                for key in list(islice(locations, excess + self._max_keys // 16)):
                    del locations[key]

    def remove(self, node_id: NodeId, keys: KeyArray) -> None:
        """Record that `node_id` does not hold these chunks any more."""
        with self._lock:
            for key in _split(keys):
                before = self._locations.get(key, UNKNOWN)
                if before.holders == (node_id,):
                    del self._locations[key]
                elif node_id in before.holders:
                    self._locations[key] = before.within(frozenset(before.holders) - {node_id})

    def locate(self, keys: KeyArray) -> list[Location]:
        """Return the location of each key; UNKNOWN if no holder is known."""
        raw, former = _split(keys), self._former
        found = list(map(self._locations.get, raw, repeat(UNKNOWN)))
        if not former:
            return found
        return [former.get(key, UNKNOWN) if each is UNKNOWN else each for key, each in zip(raw, found, strict=True)]

    def follow_view(self, *, nodes: frozenset[NodeId], owned: Callable[[KeyArray], Bits]) -> None:
        """Keep only the holders in `nodes`, and only the keys for which `owned` returns True.

        `locate` still finds the other keys until `forget_former`, or until the next call of this method.
        """
        with self._lock:
            raw = list(self._locations)
            stays = owned(chunk_keys.from_bytes(b"".join(raw))).tolist()
            left: dict[bytes, Location] = {}
            former: dict[bytes, Location] = {}
            for key, stay in zip(raw, stays, strict=True):
                location = self._locations[key]
                if not nodes.issuperset(location.holders):
                    location = location.within(nodes)
                if location.holders:
                    (left if stay else former)[key] = location
            self._locations, self._former = left, former

    def forget_former(self) -> None:
        """Forget the keys that were not owned any more at the last `follow_view`."""
        self._former = {}


def named_holders(holders: tuple[NodeId, ...], rng: Random) -> tuple[NodeId, ...]:
    """Return the holders that an answer names: all, or a random choice of MAX_HOLDERS."""
    return tuple(rng.sample(holders, MAX_HOLDERS)) if len(holders) > MAX_HOLDERS else holders


def left_to_others(location: Location, node_id: NodeId, rng: Random) -> Location | None:
    """Decide whether an owner leaves the read of a chunk that it has to the chunk's other holders.

    Returns:
        The location without this node, for all but an equal share of the reads; None if this node serves the read.
    """
    count = len(location.holders)
    if count < SPREAD_HOLDERS or rng.random() * count < 1:
        return None
    return location.within(frozenset(location.holders) - {node_id})


def located(locations: Sequence[Location], rng: Random) -> Located:
    """Encode locations, one for each key, as the answer to a `Locate` request.

    If a chunk has more than MAX_HOLDERS holders, a random choice of them is named, so that readers spread over all of
    them. Keys with the same holders get the same choice: a reader can then read a whole prefix from one node.
    """
    distinct = {id(location): location for location in locations}
    numbers: dict[tuple[NodeId, ...], int] = {}
    choices: dict[tuple[NodeId, ...], tuple[NodeId, ...]] = {}
    entries: dict[int, tuple[int, int, bool]] = {}
    for identity, (holders, below, nbytes) in distinct.items():
        shown = choices.get(holders) or choices.setdefault(holders, named_holders(holders, rng))
        number = numbers.setdefault(shown, len(numbers)) if shown else -1
        entries[identity] = (number, nbytes, bool(holders) and len(below) == len(holders))
    columns = np.array([entries[id(location)] for location in locations], np.int64).reshape(-1, 3)
    lengths = columns[:, 1].astype("<u4")
    return Located(
        choices=tuple(numbers),
        places=columns[:, 0].astype("<i4").tobytes(),
        nbytes=lengths.tobytes() if lengths.any() else b"",
        below_memory=pack_bits(columns[:, 2] != 0),
    )


def _split(keys: KeyArray) -> list[bytes]:
    raw: list[bytes] = np.frombuffer(chunk_keys.to_bytes(keys), f"V{KEY_NBYTES}").tolist()
    return raw
