"""The tiers of one node, and the traffic between them and its memory.

The mover has no thread: the node's reclaimer calls `demote`, request handlers call `promote`, and the tiers call back
from their threads. The mover holds the node's lock when it changes the store, but not when it calls a tier.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.protocol import chunk_keys
from raykv.protocol.reasons import Place, Reason
from raykv.storage.store import Store
from raykv.tier.base import Tier
from raykv.tier.demotion import Demotion
from raykv.tier.promotion import Promotion
from raykv.tier.transit import Transit
from raykv.types import KeyArray

OUTLIVES_S = 1.0
"""A copy in a tier may expire up to this much later than the copy in memory. See `TierMover.drop_outdated`."""


class TierMover:
    """Moves chunks between one store and its tiers. Thread-safe.

    Attributes:
        tiers: The tiers, fastest first. A node may have none.
        demotion: Writes chunks to the tiers.
        promotion: Reads chunks from the tiers.
        transit: Moves chunks between the tiers and other nodes.
        demote, barring: See `Demotion`.
        promote, give_up: See `Promotion`.
    """

    def __init__(self, store: Store, lock: threading.Lock, tiers: Sequence[Tier], changed: Callable[[], None]) -> None:
        """Move chunks of `store`, which `lock` guards. `changed` is called when `take_changes` may have new keys."""
        self.tiers, self._store, self._lock = tuple(tiers), store, lock
        self._changed = changed
        self.demotion = Demotion(store, lock, self.tiers, self._on_written)
        self.promotion = Promotion(store, lock, self.tiers, changed)
        self.transit = Transit(store, lock, self.tiers, self.demotion, changed)
        self.demote, self.barring = self.demotion.demote, self.demotion.barring
        self.promote, self.give_up = self.promotion.promote, self.promotion.give_up
        self._changes: list[KeyArray] = []
        self._changes_lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self.tiers)

    def _on_written(self, keys: KeyArray) -> None:
        self.drop_outdated(keys)  # the expiry in memory may have changed during the write
        self._changed()

    def find(self, keys: KeyArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Return two arrays: the place of the fastest tier that has each chunk, and the chunk's length in bytes.

        A chunk that no tier has gets NOWHERE and 0.
        """
        places, nbytes = np.full(len(keys), Place.NOWHERE, np.uint8), np.zeros(len(keys), np.uint32)
        for tier in self.tiers:
            absent = np.flatnonzero(places == Place.NOWHERE)
            held = absent[tier.has(keys[absent])]
            for position, found in zip(held.tolist(), tier.find(keys[held]), strict=True):
                if found is not None:
                    places[position], nbytes[position] = tier.place, found.nbytes
        return places, nbytes

    def keys(self) -> KeyArray:
        """Return the keys of all chunks in the tiers; see `Tier.keys`."""
        return np.concatenate([chunk_keys.empty(), *(tier.keys() for tier in self.tiers)])

    def take_changes(self) -> list[KeyArray]:
        with self._changes_lock:
            for tier in self.tiers:
                self._collect_changes(tier, Reason.EVICTED)
            changes, self._changes = self._changes, []
        return changes

    def _collect_changes(self, tier: Tier, reason: Reason) -> None:
        added, removed = tier.take_changes()
        self._changes += [added, removed]
        if len(removed):
            with self._lock:
                self._store.eviction_log.add(removed, reason, tier=tier.place, now_s=time.monotonic())

    def delete(self, keys: KeyArray) -> int:
        """Delete chunks from the tiers. Returns the number of copies deleted.

        To delete the chunks in memory too, a caller enters `barring`, calls `delete`, takes the node's lock, deletes
        the chunks in memory, and calls `give_up`.
        """
        return self._remove(lambda tier: tier.delete(keys), Reason.DELETED)

    def drop(self, group: int) -> int:
        """Delete a quota group's chunks from the tiers, and cancel its promotions.

        Returns the number of copies deleted.
        """
        count = self._remove(lambda tier: tier.drop(group), Reason.DROPPED)
        self.promotion.give_up_group(group)
        return count

    def drop_outdated(self, keys: KeyArray) -> int:
        """Delete from the tiers all copies with an outdated expiry. Call this after a put or a change of expiry.

        A copy that expires later than the chunk in memory is outdated, because a tier could return the copy after the
        chunk's expiry. If the chunk in memory never expires, a copy with any expiry is outdated. Returns the number of
        copies deleted.
        """
        count, now_s = 0, time.monotonic()
        today_s = time.time() - now_s
        for tier in self.tiers:
            below = keys[tier.has(keys)]
            if not len(below):
                continue
            found = tier.find(below)
            table = self._store.table
            with self._lock:
                ends = [table.cells.expires[row] if row >= 0 else -1 for row in table.find(below).tolist()]
            outdated = [
                entry is not None and ticks >= 0 and _differ(entry.expires_s, ticks and today_s + table.seconds(ticks))
                for entry, ticks in zip(found, ends, strict=True)
            ]
            count += tier.delete(below[outdated]) if any(outdated) else 0
        return count

    def _remove(self, remove_from: Callable[[Tier], int], reason: Reason) -> int:
        count = 0
        with self._changes_lock:
            for tier in self.tiers:
                self._collect_changes(tier, Reason.EVICTED)
                count += remove_from(tier)
                self._collect_changes(tier, reason)
        return count

    def set_quota(self, group: int, nbytes: int | None) -> None:
        for tier in self.tiers:
            tier.set_quota(group, nbytes)

    def stats(self) -> dict[str, Any]:
        return {
            "tiers": {tier.name: tier.stats() for tier in self.tiers},
            "demoted": self.demotion.demoted,
            "promoted": self.promotion.promoted,
            "promotions_late": self.promotion.late,
            "promoting_nbytes": self.promotion.nbytes,
        }

    def close(self) -> None:
        """Close the tiers. Unfinished promotions end without a result, and their slots are freed."""
        for tier in self.tiers:
            tier.close()


def _differ(below_s: float, memory_s: float) -> bool:
    """Whether a tier's copy is outdated. Arguments: expiry of the two copies in seconds since 1970, 0 for never."""
    if not memory_s:
        return below_s > 0
    return not below_s or below_s > memory_s + OUTLIVES_S
