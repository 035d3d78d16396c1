"""A store with its own clock and named chunks, and a check of the row states in docs/storage.md."""

import hashlib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig, StorageConfig
from raykv.memory.layout import MAX_NAMESPACES, RowState
from raykv.memory.slots import slot_nbytes
from raykv.protocol import chunk_keys
from raykv.protocol.namespace import Namespace
from raykv.storage.files import store_files
from raykv.storage.store import LentSlots, Store, Written
from raykv.types import Batch, Hints

SPACE = Namespace(model="m")
KIB = 1 << 10
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
FULL = {"arena_nbytes": 128 * KIB}
"""An arena with room for as many one-page chunks as there are LETTERS."""


def config_for(path: Path | None = None, **fields: Any) -> StorageConfig:
    """A config with an arena of 16 extents of 64 KiB. `fields` replace its fields."""
    made = {"arena_nbytes": 1 << 20, "extent_nbytes": 64 * KIB, "max_chunks": 64, "shm_dir": path, **fields}
    return StorageConfig.load(made)


def names_to_keys(names: Any) -> np.ndarray:
    return chunk_keys.named(SPACE.digest, names)


@lru_cache(maxsize=1000)
def content(name: str, nbytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(nbytes)


def batch_of(names: Any, nbytes: int = PAGE, *, parent: str | None = None, hints: Any = (), **fields: Any) -> Batch:
    """Make a batch of named chunks. `parent` is the parent's name. `hints` are fields of Hints."""
    above = None if parent is None else names_to_keys([parent])
    return Batch(names_to_keys(names), nbytes, parent=above, hints=Hints(**dict(hints)), **fields)


class Bench:
    """A store, its clock, and a quota group."""

    def __init__(self, store: Store, now_s: float = 1.0) -> None:
        self.store = store
        self.now_s = now_s
        self.group = store.groups.open(SPACE)

    @classmethod
    def open(cls, prefix: Path | None = None, *, now_s: float = 1.0, **fields: Any) -> "Bench":
        """Open a store on files. If `prefix` is None, the store is in anonymous memory."""
        made_at_s = 0.0 if now_s == 1.0 else now_s
        return cls(Store.open(config_for(prefix and prefix.parent, **fields), prefix, now_s=made_at_s), now_s)

    def open_group(self, model: str, quota_nbytes: int) -> int:
        """Open another quota group. Quota 0 means no quota. Returns the group's number."""
        number = self.store.groups.open(Namespace(model=model))
        self.store.configure(number, NamespaceConfig(dram_quota_nbytes=quota_nbytes or None), now_s=self.now_s)
        return number

    def lend(
        self, count: int, nbytes: int = PAGE, *, ahead: int = 0, protect: Any = (), group: Any = None
    ) -> LentSlots:
        """Lend slots. Chunks with the names in `protect` are not evicted to make room."""
        self.now_s += 1.0
        number = self.group if group is None else group
        keys = [names_to_keys(protect)] if len(protect) else []
        return self.store.lend(number, nbytes, count, ahead=ahead, protect=keys, now_s=self.now_s)

    def fill(self, lent: LentSlots, names: Any, nbytes: int = PAGE) -> np.ndarray:
        """Write the chunks of these names into the slots, in order. Returns their checksums."""
        checksums = []
        for start, name in zip(lent.offsets.tolist(), names, strict=False):
            self.store.arena.view[start : start + nbytes] = content(name, nbytes)
            checksums.append(xxhash.xxh3_64_intdigest(content(name, nbytes)))
        return np.array(checksums, np.uint64)

    def commit(
        self, names: Any, lent: LentSlots, written: Any = None, nbytes: int = PAGE, *, group: Any = None, **fields: Any
    ) -> list[bool]:
        """Fill slots with the chunks at these positions of `names`, and commit. Returns whether each was stored."""
        positions = np.arange(len(names), dtype=np.int32) if written is None else np.array(written, np.int32)
        checksums = self.fill(lent, [names[place] for place in positions.tolist()], nbytes)
        number = self.group if group is None else group
        batch = batch_of(names, nbytes, **fields)
        placed = Written(positions, lent.rows[: len(positions)], checksums)
        return self.store.commit(number, batch, placed, now_s=self.now_s).tolist()

    def put(
        self, names: Any, nbytes: int = PAGE, *, group: Any = None, parent: str | None = None, **fields: Any
    ) -> int:
        """Store the chunks that are missing, and give unused slots back. Returns how many were stored."""
        self.now_s += 1.0
        missing = self.store.missing(names_to_keys(names), now_s=self.now_s).tolist()
        protect = [*names, *([] if parent is None else [parent])]
        lent = self.lend(len(missing), nbytes, protect=protect, group=group)
        used = self.commit(names, lent, missing[: len(lent.rows)], nbytes, group=group, parent=parent, **fields)
        self.store.give_back(lent.rows[~np.array(used, np.bool_)])
        return sum(used)

    def pin(self, names: Any) -> np.ndarray:
        """Pin chunks. Returns their rows."""
        return self.store.pin(names_to_keys(names), now_s=self.now_s).rows

    def delete(self, names: Any) -> int:
        return self.store.delete(names_to_keys(names), now_s=self.now_s)

    def here(self, names: Any) -> str:
        """Check the bytes of all chunks that can be read. Returns their names, joined."""
        rows, _ = self.store.table.find_ready(names_to_keys(names), self.store.table.ticks(self.now_s))
        columns, found = self.store.table.columns, []
        for name, row in zip(names, rows.tolist(), strict=True):
            if row >= 0:
                start, nbytes = int(columns.page[row]) * PAGE, int(columns.nbytes[row])
                assert bytes(self.store.arena.view[start : start + nbytes]) == content(name, nbytes), name
                found.append(name)
        return "".join(found)

    def row(self, name: str) -> int:
        return int(self.store.table.find(names_to_keys([name]))[0])

    def column(self, column: str, names: Any) -> list[int]:
        """Return the values of one column for these chunks."""
        values: list[int] = getattr(self.store.table.columns, column)[[self.row(name) for name in names]].tolist()
        return values

    def verify(self, names: Any) -> int:
        """Look for damage as the node does after a reader's report. Returns the number of dropped chunks."""
        pinned = self.store.pin(names_to_keys(names), now_s=self.now_s)
        count = self.store.drop_corrupt(self.store.corrupt(pinned), now_s=self.now_s)
        self.store.unpin(pinned.rows)
        return count

    def close(self) -> None:
        check(self.store)
        self.store.close()


def states(store: Store) -> dict[RowState, list[int]]:
    """Return the rows of each state."""
    state = store.table.columns.state[: store.table.rows_populated]
    return {each: np.flatnonzero(state == each).tolist() for each in RowState}


def check(store: Store, pins: "Counter[int] | None" = None) -> None:
    """Check what must hold between any two calls: row states, index, pins, counts, slots and chains agree.

    Args:
        pins: Expected number of pins by row. None: the numbers are not checked.
    """
    columns, table, allocator = store.table.columns, store.table, store.allocator
    assert not table.header["dirty"]
    rows_of = states(store)
    free, lent, ready, quarantined, deleted = (rows_of[state] for state in RowState)
    assert sum(map(len, rows_of.values())) == table.rows_populated, "a row in no state"
    assert sorted(allocator.free_rows) == free
    assert sorted(row for _, rows in allocator._quarantine for row in rows.tolist()) == quarantined
    assert store.chunks == len(ready)

    generations, held = columns.generation.tolist(), columns.pins.tolist()
    readable = {row for row in range(table.rows_populated) if generations[row] and generations[row] % 2 == 0}
    assert readable == {*ready, *deleted}, "readers trust the generation"
    assert all(held[row] for row in deleted), "a deleted chunk that nobody pins"
    assert not any(held[row] for row in [*free, *lent, *quarantined])
    if pins is not None:
        assert held[: table.rows_populated] == [pins[row] for row in range(table.rows_populated)]

    assert sorted(table.index_entries().tolist()) == ready
    keys = np.stack([columns.key_hi[ready], columns.key_lo[ready]], axis=1)
    assert table.find(keys).tolist() == ready, "a key twice, or not to be found"
    in_use = [*lent, *ready, *quarantined, *deleted]
    check_slots(store, in_use)
    for counts, rows in ((allocator.used_nbytes, in_use), (allocator.lent_nbytes, lent)):
        expected = np.zeros(MAX_NAMESPACES, np.int64)
        for row in rows:
            expected[columns.group[row]] += slot_nbytes(int(columns.nbytes[row]))
        assert counts.tolist() == expected.tolist()
    check_chains(store, ready)


def check_slots(store: Store, rows: list[int]) -> None:
    """Check that the slots of these rows do not overlap, and that `Slots` lists exactly these rows."""
    columns, table, slots = store.table.columns, store.table, store.allocator.slots
    sizes = {row: slot_nbytes(int(columns.nbytes[row])) for row in rows}
    extent_sizes, first_pages = table.extent_slots.tolist(), columns.page.tolist()
    owner: dict[int, int] = {}
    by_extent: dict[int, list[int]] = {}
    for row, size in sizes.items():
        first = first_pages[row]
        extent, within = divmod(first * PAGE, table.extent_nbytes)
        assert extent_sizes[extent] == size
        assert within % size == 0
        assert within + size <= table.extent_nbytes
        by_extent.setdefault(extent, []).append(row)
        for page in range(first, first + size // PAGE):
            assert owner.setdefault(page, row) == row, "two chunks in one place"
    for extent in range(table.extents):
        assert sorted(slots.rows_in(extent).tolist()) == sorted(by_extent.get(extent, []))
    tails = sum(table.extent_nbytes % extent_sizes[extent] for extent in by_extent)
    unusable = tails + slots.extents_failed * table.extent_nbytes
    assert slots.free_nbytes == table.extents * table.extent_nbytes - sum(sizes.values()) - unusable


def check_chains(store: Store, ready: list[int]) -> None:
    """Check that `children` counts the ready children of each row. A stale link to a parent does not count."""
    columns = store.table.columns
    children: Counter[int] = Counter()
    for row in ready:
        parent = int(columns.parent[row])
        assert -1 <= parent < store.table.rows
        if parent >= 0 and columns.generation[parent] == columns.parent_generation[row]:
            children[parent] += 1
    assert [int(columns.children[row]) for row in ready] == [children[row] for row in ready]


def crashed(store: Store, directory: Path, name: str) -> Path:
    """Copy the files as a kill at this moment would leave them. Returns the prefix of the copies."""
    prefix = directory / name
    for source, target in zip((store.table.memory, store.arena), store_files(prefix), strict=True):
        target.write_bytes(bytes(source.view))
    return prefix


def reopen(prefix: Path, now_s: float, **fields: Any) -> Bench:
    """Open the files as the next process would."""
    again = Bench.open(prefix, now_s=now_s, **fields)
    check(again.store)
    return again
