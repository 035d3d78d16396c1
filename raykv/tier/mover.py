"""The tiers of one node, and the traffic between them and its memory.

No thread of its own: the node's reclaimer calls `demote`, the handlers of requests call `promote`, and the tiers call
back from their threads. The store changes under the node's lock. No tier is called under it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raykv.protocol import chunk_keys
from raykv.protocol.reasons import Reason
from raykv.storage.store import Store
from raykv.tier.base import Tier
from raykv.tier.demotion import Demotion
from raykv.tier.promotion import Promotion
from raykv.types import Bits, KeyArray

OUTLIVES_S = 1.0
"""Expiry times of two copies differ by less than this when they are the same."""


class TierMover:
    """Thread-safe.

    Attributes:
        tiers: Fastest first; may be empty.
        demote, due, writing, barring: See `Demotion`.
        promote, give_up: See `Promotion`.
    """

    def __init__(self, store: Store, lock: threading.Lock, tiers: Sequence[Tier], changed: Callable[[], None]) -> None:
        """Move chunks of `store`. The mover acquires `lock`, and calls `changed` when there is news to announce."""
        self.tiers, self._store, self._lock = tuple(tiers), store, lock
        self._changed = changed
        self.demotion = Demotion(store, lock, self.tiers, self._on_written)
        self.promotion = Promotion(store, lock, self.tiers, changed)
        self.demote, self.barring = self.demotion.demote, self.demotion.barring
        self.promote, self.give_up = self.promotion.promote, self.promotion.give_up
        self._changes: list[KeyArray] = []
        self._changes_lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self.tiers)

    @property
    def due(self) -> bool:
        return self.demotion.due

    @property
    def writing(self) -> bool:
        return self.demotion.writing

    def _on_written(self, keys: KeyArray) -> None:
        self.drop_outdated(keys)  # their expiry may have changed meanwhile
        self._changed()

    def has(self, keys: KeyArray) -> Bits:
        here = np.zeros(len(keys), np.bool_)
        for tier in self.tiers:
            here |= tier.has(keys)
        return here

    def keys(self) -> KeyArray:
        """All chunks of the tiers; see `Tier.keys`."""
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
        """Delete chunks from the tiers. Returns how many there were, each tier's counted.

        A full deletion: within `barring`, this; then, under the node's lock, in memory, and `give_up`.
        """
        return self._remove(lambda tier: tier.delete(keys), Reason.DELETED)

    def drop(self, group: int) -> int:
        """Delete a quota group's chunks, also those on their way up. Returns how many there were."""
        count = self._remove(lambda tier: tier.drop(group), Reason.DROPPED)
        self.promotion.give_up_group(group)
        return count

    def drop_outdated(self, keys: KeyArray) -> int:
        """Chunks were stored, or got another expiry: delete copies below that would outlive them, or expire early.

        Without it, a chunk that is stored again with a TTL could be read from a tier after its end. Returns the count.
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
        """End the tiers' threads. Slots of chunks on their way up are given back."""
        for tier in self.tiers:
            tier.close()


def _differ(below_s: float, memory_s: float) -> bool:
    """Whether a copy below outlives the one in memory, or expires although that one never does; 0 is never."""
    if not memory_s:
        return below_s > 0
    return not below_s or below_s > memory_s + OUTLIVES_S
