"""What an owner knows: which nodes hold which key. A wrong entry costs a miss, and is then corrected."""

import threading
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.codec import pack_bits
from raykv.protocol.messages import MAX_HOLDERS, Located
from raykv.types import Bits, KeyArray, NodeId

MAX_SHARED: Final = 1 << 16
"""Distinct locations that keys share as one object. Beyond it, sharing starts again."""


class Location(NamedTuple):
    """Where one chunk is.

    Attributes:
        holders: Nodes that announced it; the last one most recently.
        below: Those of them that have it in a tier below memory only.
        nbytes: Its length; 0 for unknown.
    """

    holders: tuple[NodeId, ...] = ()
    below: tuple[NodeId, ...] = ()
    nbytes: int = 0

    def added(self, node_id: NodeId, nbytes: int, below: bool) -> "Location":
        """This location with one more holder, or with another length and place for it."""
        holders = self.holders if node_id in self.holders else (*self.holders, node_id)
        others = tuple(holder for holder in self.below if holder != node_id)
        return Location(holders, (*others, node_id) if below else others, nbytes)

    def within(self, nodes: frozenset[NodeId]) -> "Location":
        """This location with those holders only."""
        holders, below = (tuple(holder for holder in some if holder in nodes) for some in (self.holders, self.below))
        return Location(holders, below, self.nbytes)


UNKNOWN: Final = Location()


class LocationIndex:
    """Locations of the keys that one node owns. Thread-safe.

    Equal locations are one object: a key costs its 16 bytes and an entry of a dict.
    """

    def __init__(self, max_keys: int) -> None:
        """Keep at most `max_keys`; beyond it the oldest announcements go."""
        self._max_keys = max_keys
        self._locations: dict[bytes, Location] = {}
        self._shared: dict[tuple[Location, NodeId, int, bool], Location] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._locations)

    def add(self, node_id: NodeId, keys: KeyArray, nbytes: npt.NDArray[np.uint32], below: Bits | None = None) -> None:
        """`node_id` holds these chunks, of these lengths; those in `below` in a tier below memory only."""
        bits = repeat(False) if below is None else below.tolist()
        with self._lock:
            shared, locations = self._shared, self._locations
            if len(shared) > MAX_SHARED:
                shared.clear()
            for key, length, is_below in zip(_split(keys), nbytes.tolist(), bits, strict=False):
                before = locations.get(key, UNKNOWN)
                change = (before, node_id, length, is_below)
                after = shared.get(change)
                if after is None:
                    after = shared[change] = before.added(node_id, length, is_below)
                locations[key] = after
            excess = len(locations) - self._max_keys
            if excess > 0:  # drop some more at once: finding a dict's first entry passes all that were deleted before
                for key in list(islice(locations, excess + self._max_keys // 16)):
                    del locations[key]

    def remove(self, node_id: NodeId, keys: KeyArray) -> None:
        """`node_id` no longer holds these chunks."""
        with self._lock:
            for key in _split(keys):
                before = self._locations.get(key, UNKNOWN)
                if before.holders == (node_id,):
                    del self._locations[key]
                elif node_id in before.holders:
                    self._locations[key] = before.within(frozenset(before.holders) - {node_id})

    def locate(self, keys: KeyArray) -> list[Location]:
        """Location of each key; UNKNOWN where no holder is known."""
        return list(map(self._locations.get, _split(keys), repeat(UNKNOWN)))

    def follow_view(self, *, nodes: frozenset[NodeId], owned: Callable[[KeyArray], Bits]) -> None:
        """Drop holders that are not among `nodes`, and keys that this node no longer owns."""
        with self._lock:
            if not self._locations:
                return
            raw = list(self._locations)
            stays = owned(chunk_keys.from_bytes(b"".join(raw)))
            left: dict[bytes, Location] = {}
            for position in np.flatnonzero(stays).tolist():
                location = self._locations[raw[position]]
                if not nodes.issuperset(location.holders):
                    location = location.within(nodes)
                if location.holders:
                    left[raw[position]] = location
            self._locations = left


def located(locations: Sequence[Location]) -> Located:
    """The answer that describes these locations, one a key."""
    distinct = {id(location): location for location in locations}
    numbers: dict[tuple[NodeId, ...], int] = {}
    entries: dict[int, tuple[int, int, bool]] = {}
    for identity, (holders, below, nbytes) in distinct.items():
        shown = holders[-MAX_HOLDERS:]
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
