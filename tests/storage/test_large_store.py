"""Stores of up to ten million rows have no list of all rows or of all slots. No step is slower in a larger store."""

import time
from pathlib import Path

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.memory.arena import SharedMemory
from raykv.storage.store import Store, Written
from raykv.types import Batch
from tests.support.stores import SPACE, config_for


def private_nbytes() -> int:
    """Bytes of memory that this process does not share with others."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def write(store: Store, keys: np.ndarray, now_s: float) -> int:
    """Lend one slot per key, and commit the slots in runs of 512. Returns the number of chunks stored."""
    lent = store.lend(0, PAGE, len(keys), now_s=now_s)
    stored = 0
    for first in range(0, len(lent.rows), 512):
        run = slice(first, first + 512)
        positions = np.arange(len(lent.rows[run]), dtype=np.int32)
        written = Written(positions, lent.rows[run], positions.astype(np.uint64))
        stored += int(store.commit(0, Batch(keys[run], PAGE), written, now_s=now_s).sum())
    return stored


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "rows", [pytest.param(1_000_000, id="1M"), pytest.param(10_000_000, id="10M", marks=pytest.mark.soak)]
)
def test_a_large_table_costs_what_its_rows_cost(rows, monkeypatch, np_rng):
    monkeypatch.setattr("raykv.storage.files.require_room", lambda *args, **options: None)
    config = config_for(arena_nbytes=rows * PAGE, extent_nbytes=32 << 20, max_chunks=rows)
    batch, now_s, before, start_s = 8192, 1.0, private_nbytes(), time.monotonic()
    store = Store.open(config, None, now_s=0.0)
    assert store.groups.open(SPACE) == 0
    assert time.monotonic() - start_s < 2.0
    assert private_nbytes() - before < 64 << 20
    monkeypatch.setattr(SharedMemory, "populate", lambda memory, *args, **options: True)  # no chunk's bytes are written

    def next_keys(count: int) -> np.ndarray:
        return np.frombuffer(np_rng.bytes(16 * count), "<u8").reshape(-1, 2)

    while store.chunks < rows * 0.97:
        if len(store.allocator.free_rows) < batch:
            assert store.table.populate_rows(store.table.rows_populated + (1 << 18))
            store.allocator.free_rows.limit = store.table.rows_populated
        now_s += 0.01
        assert write(store, next_keys(batch), now_s) == batch
        store.take_changes()
    print(f"{store.chunks:,} chunks, {(private_nbytes() - before) / rows:.1f} private bytes a row")
    assert private_nbytes() - before < 10 * rows + (64 << 20)
    took_s = []
    for _ in range(200):  # the free slots run out; then victims are chosen from samples of the rows
        now_s += 0.01
        keys, start_s = next_keys(2048), time.monotonic()
        assert write(store, keys, now_s) == 2048
        took_s.append(time.monotonic() - start_s)
    assert store.counters.evicted > 0
    print(f"2048 chunks at most {max(took_s) * 1e3:.0f} ms, usually {sorted(took_s)[100] * 1e3:.0f} ms")
    assert sorted(took_s)[100] < 0.2
    while store.evictor.needs_eviction:
        store.evict_ahead(now_s=now_s)
    ready = store.table.ready_rows()
    assert store.chunks == len(ready) > rows * 0.9
    assert int(store.table.columns.inserted[ready].max()) == store.table.ticks(now_s), "the newest stay"
    start_s = time.monotonic()
    again = Store(config, store.table, store.arena, now_s=now_s)
    print(f"taken over in {time.monotonic() - start_s:.1f} s")
    assert (again.chunks, again.used_nbytes) == (store.chunks, store.used_nbytes)
    assert again.allocator.slots.free_nbytes == store.allocator.slots.free_nbytes
    assert len(again.allocator.free_rows) == len(store.allocator.free_rows)
    store.close()
