"""A store with a toy tier below it, for tests of demotion and promotion."""

import threading
import time
from collections.abc import Callable
from typing import Any

from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from tests.support.stores import Bench, config_for, content, names_to_keys
from tests.support.tiers import environment_of
from tests.support.toy_tier import ToyTier


class House:
    """A store, a toy tier, and their mover. The toy tier does nothing until `toy.go_on` is called."""

    def __init__(self, **fields: Any) -> None:
        store = Store.open(config_for(**fields), None, now_s=time.monotonic())
        self.bench = Bench(store)
        self.bench.now_s = time.monotonic()
        self.toy = ToyTier({"manual": True}, environment_of(store.arena.view))
        self.lock = threading.Lock()
        self.changes = 0
        self.mover = TierMover(store, self.lock, [self.toy], self.count_change)
        self.store = store

    def count_change(self) -> None:
        self.changes += 1

    def put(self, names: list[str], nbytes: int, **options: Any) -> int:
        self.bench.now_s = time.monotonic() - 3.0
        return self.bench.put(names, nbytes, **options)

    def fill(self, count: int = 15, nbytes: int = 60_000) -> list[str]:
        """Store chunks. The default number is one less than fit into the arena. Returns their names."""
        names = [f"chunk-{number}" for number in range(count)]
        for name in names:
            self.put([name], nbytes, chained=False)
        return names

    def read(self, names: list[str]) -> list[bool]:
        """Read chunks in memory, and check their bytes. Returns for each whether it is in memory."""
        pinned = self.store.pin(names_to_keys(names), now_s=time.monotonic())
        for name, row, start, nbytes in zip(names, pinned.rows, pinned.offsets, pinned.nbytes, strict=True):
            if row >= 0:
                assert self.store.arena.view[int(start) : int(start) + int(nbytes)] == content(name, int(nbytes))
        self.store.unpin(pinned.rows)
        return (pinned.rows >= 0).tolist()

    def below(self, names: list[str]) -> list[bool]:
        """Return for each chunk whether the toy tier has it."""
        return self.toy.has(names_to_keys(names)).tolist()

    def promote(self, names: list[str], until_s: float = 0.0) -> int:
        return self.mover.promote(names_to_keys(names), until_s=until_s)

    def sink(self, names: list[str]) -> None:
        """Write chunks to the toy tier, even if no demotion is due, and remove them from memory."""
        keys = names_to_keys(names)
        chunks, taken = self.mover.demotion.write(self.toy, self.store.table.find(keys), keys)
        assert taken == len(chunks) == len(names)
        self.toy.go_on()
        assert self.store.delete(keys, now_s=time.monotonic()) == len(names)

    def pins(self) -> int:
        return int(self.store.table.columns.pins.sum())

    def delete(self, names: list[str], between: Callable[[], object] = lambda: None) -> None:
        """Delete chunks as a node does: first in the tiers, then in memory. `between` runs in between."""
        keys = names_to_keys(names)
        with self.mover.barring(keys):
            self.mover.delete(keys)
            between()
            with self.lock:
                self.store.delete(keys, now_s=time.monotonic())
                self.mover.give_up(keys)

    def drop(self, group: int, between: Callable[[], object] = lambda: None) -> None:
        """Drop a quota group as a node does: first in the tiers, then in memory. `between` runs in between."""
        with self.mover.barring(group=group):
            with self.lock:
                rows, generations = self.store.rows_of(group)
            self.mover.drop(group)
            between()
            with self.lock:
                self.store.drop(rows, generations, now_s=time.monotonic())
