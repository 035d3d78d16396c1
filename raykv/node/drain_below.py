"""The second half of a drain: moves the chunks that only tiers below memory have.

Chunks are read from the tier into lent slots, a run at a time, and sent from there, so memory keeps what it has. A tier
that nodes share is left as it is, because the other nodes find its chunks by themselves.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.errors import RayKVError
from raykv.node.moving import WINDOW_ROWS, ChunkSender, Window, runs_of
from raykv.protocol import chunk_keys
from raykv.tier.base import Found, Tier
from raykv.tier.mover import TierMover
from raykv.tier.segments.format import key_array, raw_keys
from raykv.types import Bits, Hints, KeyArray

NO_PARENT = bytes(chunk_keys.KEY_NBYTES)


class Listing(NamedTuple):
    """Chunks of a tier in the order in which to move them, and their lengths in bytes."""

    keys: KeyArray
    nbytes: npt.NDArray[np.uint32]


class BelowDrain:
    """Moves the chunks of a node's tiers to other nodes. One thread uses it."""

    def __init__(self, mover: TierMover, sender: ChunkSender) -> None:
        self._mover, self._sender, self._progress = mover, sender, sender.progress

    def run(self, seen: set[bytes], nbytes_per_s: float, stopping: threading.Event) -> None:
        """Move all chunks but those in `seen`, which gets their keys. Ends early if `stopping` is set."""
        for tier in sorted(self._mover.tiers, key=lambda tier: not tier.shared):
            listing = list_chunks(tier, seen)
            seen.update(raw_keys(listing.keys))
            self._progress.below_memory += len(listing.keys)
            if tier.shared:
                self._progress.elsewhere += len(listing.keys)
                continue
            for first in range(0, len(listing.keys), WINDOW_ROWS):
                if stopping.is_set():
                    return
                some = slice(first, first + WINDOW_ROWS)
                self._move(tier, Listing(listing.keys[some], listing.nbytes[some]), nbytes_per_s, stopping)

    def _move(self, tier: Tier, listing: Listing, nbytes_per_s: float, stopping: threading.Event) -> None:
        found = tier.find(listing.keys)
        if problem := _problem_of(tier):  # without a problem, chunks that are absent were deleted or have expired
            for entry, nbytes in zip(found, listing.nbytes.tolist(), strict=True):
                self._progress.leave(entry is None, nbytes, problem)
        window, entries = window_of(listing.keys, found)
        elsewhere = self._sender.held_elsewhere(window.keys)
        self._progress.elsewhere += int(elsewhere.sum())
        for places in runs_of(window, ~elsewhere):
            while places and not stopping.is_set():
                done = self._send(tier, window, entries, places, stopping)
                self._sender.pace(int(window.nbytes[places[:done]].sum()), nbytes_per_s, stopping)
                places = places[done:]

    def _send(
        self, tier: Tier, window: Window, entries: list[Found], places: list[int], stopping: threading.Event
    ) -> int:
        """Read and send the first chunks of a run. Returns how many: all for which memory has slots."""
        nbytes, progress, transit = int(window.nbytes[places[0]]), self._progress, self._mover.transit
        try:
            with transit.reading(tier, window.keys[places], [entries[at] for at in places], stopping) as arrived:
                count = len(arrived.offsets)
                if lost := count - int(arrived.right.sum()):
                    progress.leave(lost, nbytes, _problem_of(tier) or f"not readable in the tier {tier.name!r}")
                for start, stop in _unbroken(arrived.right):
                    values = [transit.view(offset, nbytes) for offset in arrived.offsets[start:stop]]
                    self._sender.send(window, places[start:stop], values)
        except RayKVError as error:  # for example, the chunks are larger than an extent of this process
            progress.leave(len(places), nbytes, str(error))
            return len(places)
        if not count:
            progress.leave(len(places), nbytes, "no memory into which to read them")
        return count or len(places)


def list_chunks(tier: Tier, seen: set[bytes]) -> Listing:
    """List the chunks of a tier that are not in `seen`: the most read chains first, parents before their children."""
    keys = tier.keys()
    keys = keys[np.array([raw not in seen for raw in raw_keys(keys)], np.bool_)]
    parts = []
    for first in range(0, len(keys), WINDOW_ROWS):
        some = keys[first : first + WINDOW_ROWS]
        window, entries = window_of(some, tier.find(some))
        numbers = np.array([(entry.nbytes, entry.reads, entry.depth) for entry in entries], np.int64).reshape(-1, 3)
        parts.append((window.keys, window.parent_keys, numbers))
    if not parts:
        return Listing(chunk_keys.empty(), np.zeros(0, np.uint32))
    keys, parents, numbers = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = parents_first(keys, parents, numbers[:, 2], numbers[:, 1])
    return Listing(keys[order], numbers[order, 0].astype(np.uint32))


def parents_first(
    keys: KeyArray, parents: KeyArray, depths: npt.NDArray[np.int64], reads: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """Return an order of chunks in which trees with the most reads are first, and parents before their children.

    A tree is a chunk without a parent in `keys`, and all that descends from it. Its reads are those of its most read
    chunk.
    """
    count = len(keys)
    whole = np.ascontiguousarray(np.concatenate([keys, parents])).view("V16").ravel()
    numbers = np.unique(whole, return_inverse=True)[1]
    place_of = np.full(2 * count, -1)
    place_of[numbers[:count]] = np.arange(count)
    above = place_of[numbers[count:]]
    root = np.where(above >= 0, above, np.arange(count))
    for _ in range(int(depths.max(initial=0)).bit_length() + 1):  # each step doubles the distance to the root
        root = root[root]
    most = np.zeros(count, np.int64)
    np.maximum.at(most, root, reads)
    order: npt.NDArray[np.intp] = np.lexsort((depths, root, -most[root]))
    return order


def window_of(keys: KeyArray, found: Sequence[Found | None]) -> tuple[Window, list[Found]]:
    """Return a window of the chunks that were found, and their metadata."""
    entries = [entry for entry in found if entry is not None]
    keys, today_s = keys[np.array([entry is not None for entry in found], np.bool_)], time.time()
    place_of = {raw: place for place, raw in enumerate(raw_keys(keys))}
    outside = len(entries)
    parents = [
        place_of.get(entry.parent, outside + place) if entry.parent else -1 for place, entry in enumerate(entries)
    ]
    window = Window(
        keys,
        np.arange(len(entries), dtype=np.int32),
        np.array([entry.nbytes for entry in entries], np.uint32),
        np.array([entry.group for entry in entries], np.uint16),
        np.array(parents, np.int32),
        key_array([entry.parent or NO_PARENT for entry in entries]),
        np.array([entry.depth for entry in entries], np.uint32),
        [Hints(max(0.001, entry.expires_s - today_s) if entry.expires_s else 0.0) for entry in entries],
    )
    return window, entries


def _problem_of(tier: Tier) -> str:
    """Return why chunks of a tier may have become unreadable; empty if the tier works."""
    stats = tier.stats()
    states = {stats["state"], *(path["state"] for path in stats.get("paths", ()))}
    return "" if states == {"on"} else f"the tier {tier.name!r} is {stats['state']}: {stats['reason']}"


def _unbroken(right: Bits) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each sequence of set bits. A chunk after a gap does not follow the chunk before the gap."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], right, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
