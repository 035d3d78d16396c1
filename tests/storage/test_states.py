"""Random operations. After each one, every row is in exactly one of the five states, and all counts agree."""

import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig
from raykv.eviction import POLICIES
from raykv.eviction.by_columns import LRU
from raykv.memory.arena import SharedMemory
from raykv.memory.layout import QUARANTINE_S, RowState
from raykv.memory.table import Table
from raykv.storage.files import remove_files, store_files
from raykv.storage.store import LentSlots
from tests.support.stores import KIB, Bench, check, crashed, names_to_keys, reopen, states

FIRSTS = "abcdefghijkl"
ALPHABET = [f"{first}{place}" for first in FIRSTS for place in range(9)]


class Recorder(LRU):
    """LRU that checks the rows that are reported to it."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def on_insert(self, columns, rows, now):
        assert not self.rows & set(rows.tolist()), "reported twice"
        assert (columns.state[rows] == RowState.READY).all()
        self.rows |= set(rows.tolist())

    def on_remove(self, columns, rows, now, *, evicted):
        assert self.rows >= set(rows.tolist()), "never reported"
        assert (columns.state[rows] == RowState.READY).all()
        assert columns.nbytes[rows].all()
        self.rows -= set(rows.tolist())


class Operations:
    """Runs random operations on a store. It holds lent slots, pins, and rows that are to be dropped."""

    def __init__(self, bench: Bench, rng: random.Random, sizes: dict[str, int]) -> None:
        self.bench, self.store, self.rng, self.sizes = bench, bench.store, rng, sizes
        self.groups = [bench.group, bench.open_group("b", 300 * KIB)]
        self.lent: list[tuple[str, LentSlots]] = []
        self.pins: list[np.ndarray] = []
        self.dropped: list[tuple[np.ndarray, np.ndarray]] = []
        self.quarantined: dict[int, float] = {}  # row -> end of its quarantine
        self.recorder: Recorder | None = None

    def step(self) -> None:
        first = self.rng.choice(FIRSTS)
        names = [f"{first}{place}" for place in range(self.rng.randrange(1, 9))]
        group = self.groups[ord(first) % 2]
        self.rng.choices([self.write, self.read, self.control], [6, 3, 1])[0](first, names, group)
        self.check()

    def write(self, first: str, names: list[str], group: int) -> None:
        bench, rng, nbytes = self.bench, self.rng, self.sizes[first]
        match rng.choice(["put"] * 4 + ["lend", "commit"] * 3 + ["give back", "cut off"]):
            case "put":
                chained = rng.random() < 0.8
                parent = rng.choice(ALPHABET) if chained and rng.random() < 0.3 else None
                hints = {"ttl_s": rng.choice([0.0, 0.0, 5.0, 40.0]), "priority": rng.choice([0, 0, -5, 5])}
                bench.put(names, nbytes, group=group, chained=chained, parent=parent, hints=hints)
            case "lend":
                protect = names if rng.random() < 0.5 else []
                ahead = rng.choice([0, 0, 5])
                self.lent.append(
                    (first, bench.lend(rng.randrange(4), nbytes, ahead=ahead, protect=protect, group=group))
                )
            case "commit" if self.lent:
                first, lent = self.lent.pop(rng.randrange(len(self.lent)))
                names = rng.choices([f"{first}{place}" for place in range(9)], k=rng.randrange(1, 10))
                written = sorted(rng.sample(range(len(names)), min(len(names), len(lent.rows))))
                used = np.zeros(len(lent.rows), np.bool_)
                chain = {"parent": rng.choice([None, *ALPHABET]), "chained": rng.random() < 0.8}
                used[: len(written)] = bench.commit(
                    names, lent, written, self.sizes[first], group=self.groups[ord(first) % 2], **chain
                )
                assert all(bench.row(names[place]) >= 0 for place in written)
                self.store.give_back(lent.rows[~used])
            case "give back" if self.lent:
                self.store.give_back(self.lent.pop()[1].rows)
            case "cut off" if self.lent:
                rows = self.lent.pop()[1].rows
                self.store.quarantine(rows, now_s=bench.now_s)
                self.quarantined |= dict.fromkeys(rows.tolist(), bench.now_s + QUARANTINE_S)

    def read(self, first: str, names: list[str], group: int) -> None:
        bench, rng, keys = self.bench, self.rng, names_to_keys(names)
        match rng.choice(["pin", "pin", "unpin", "delete", "time", "rows", "drop", "corrupt"]):
            case "pin":
                self.pins.append(self.store.pin(keys, now_s=bench.now_s, touch=rng.random() < 0.5).rows)
            case "unpin" if self.pins:
                rows = self.pins.pop(rng.randrange(len(self.pins)))
                half = rng.randrange(len(rows) + 1)
                self.pins.append(rows[half:])
                self.store.unpin(rows[:half])
            case "delete":
                here = [name for name in names if bench.row(name) >= 0]
                assert bench.delete(names) == len(here)
                assert bench.here(names) == ""
            case "time":
                bench.now_s += rng.choice([1.0, QUARANTINE_S])
                while self.store.evict_ahead(now_s=bench.now_s):
                    self.check()
                ended = {row for row, until_s in self.quarantined.items() if until_s <= bench.now_s}
                assert not ended & set(states(self.store)[RowState.QUARANTINED])
            case "rows":
                self.dropped.append(self.store.rows_of(group))
            case "drop" if self.dropped:
                rows, generations = self.dropped.pop()
                self.store.drop(rows[:20], generations[:20], now_s=bench.now_s)
            case "corrupt":
                rows = self.store.table.find(keys)
                self.store.drop_corrupt(np.unique(rows[rows >= 0])[:1], now_s=bench.now_s)

    def control(self, first: str, names: list[str], group: int) -> None:
        bench, rng, store = self.bench, self.rng, self.store
        match rng.choice(["hint", "expire", "configure", "policy"]):
            case "hint":
                hints = {"ttl_s": rng.choice([None, 0.0, 20.0]), "priority": rng.choice([None, -5, 0, 5])}
                ended, touch = rng.random() < 0.3, rng.random() < 0.3
                store.hint(names_to_keys(names), **hints, ended=ended, touch=touch, now_s=bench.now_s)
            case "expire":
                store.expire(nullcontext(), now_s=bench.now_s)
                expires, ready = store.table.columns.expires, states(store)[RowState.READY]
                assert not ((expires[ready] > 0) & (expires[ready] <= store.table.ticks(bench.now_s))).any()
            case "configure":
                self.recorder = None
                config = NamespaceConfig(
                    policy=rng.choice([None, *POLICIES]),
                    ttl_s=rng.choice([None, 30.0]),
                    dram_quota_nbytes=rng.choice([None, 200 * KIB]),
                    tiers=rng.choice(["both", "ssd"]),
                )
                store.configure(group, config, now_s=bench.now_s)
            case "policy":
                self.recorder = None
                store.use_policy(rng.choice([None, *self.groups]), rng.choice([None, *POLICIES]), now_s=bench.now_s)
                if rng.random() < 0.5:
                    for each in self.groups:
                        store.use_policy(each, None, now_s=bench.now_s)
                    store.use_policy(None, Recorder, now_s=bench.now_s)
                    self.recorder = store.evictor.policies.default

    def check(self) -> None:
        pins = Counter(row for rows in self.pins for row in rows.tolist() if row >= 0)
        check(self.store, pins)
        rows_of = states(self.store)
        assert rows_of[RowState.LENT] == sorted(row for _, lent in self.lent for row in lent.rows.tolist())
        quarantined = set(rows_of[RowState.QUARANTINED])
        self.quarantined = {row: until_s for row, until_s in self.quarantined.items() if row in quarantined or
                            until_s > self.bench.now_s}  # fmt: skip
        assert quarantined == set(self.quarantined)
        held = {row for row, count in pins.items() if count}
        assert held == {*rows_of[RowState.PENDING_DELETE], *(set(rows_of[RowState.READY]) & held)}
        if self.recorder is not None:
            assert self.recorder.rows == set(rows_of[RowState.READY])
        self.bench.here(ALPHABET)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("round_", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 4))])
def test_every_row_is_in_exactly_one_state(policy, round_, rng):
    bench = Bench.open(policy=policy, arena_nbytes=512 * KIB)
    sizes = {first: rng.choice([PAGE, 2 * PAGE, 5 * PAGE, 16 * PAGE]) for first in FIRSTS}
    operations = Operations(bench, rng, sizes)
    for _ in range(500):
        operations.step()
    counters, departures = bench.store.counters, bench.store.evictor.departures.sum(axis=0)
    print(counters)
    assert departures[1:6].tolist() == [
        counters.evicted, counters.expired, counters.deleted, counters.dropped, counters.corrupt,
    ]  # fmt: skip
    assert counters.evicted
    bench.close()


def tear(prefix: Path, rng: random.Random) -> None:
    """Change some rows as a kill in the middle of a change would. Recovery must not trust these rows."""
    table = Table(SharedMemory.attach(store_files(prefix)[0], writable=True))
    columns = table.columns
    for row in range(table.rows_populated):
        if rng.random() < 0.7:
            continue
        match columns.state[row]:
            case RowState.READY:  # a kill in `remove` leaves this, and so does one before the last write of `commit`
                columns.generation[row] += 1
            case RowState.PENDING_DELETE:  # as after a kill in `free_unpinned`
                columns.generation[row] += 1
            case RowState.LENT:  # as after a kill before the last write of `commit`
                columns.state[row] = RowState.READY
                columns.key_hi[row], columns.key_lo[row] = rng.getrandbits(64), rng.getrandbits(64)
    table.changing().__enter__()  # this change never ends, so the table stays dirty
    table.memory.close()


@pytest.mark.parametrize("round_", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 6))])
def test_states_across_crashes(shm_dir, round_, rng):
    """After each kill, ready rows stay ready; lent, torn and quarantined rows are quarantined; others are free."""
    bench = Bench.open(shm_dir / "life-0", arena_nbytes=512 * KIB)
    sizes = {first: rng.choice([PAGE, 2 * PAGE, 5 * PAGE, 16 * PAGE]) for first in FIRSTS}
    until_s: dict[int, float] = {}
    for life in range(1, 12):
        operations = Operations(bench, rng, sizes)
        operations.quarantined = until_s
        for _ in range(rng.randrange(60)):
            operations.step()
        before, columns = states(bench.store), bench.store.table.columns
        prefix, torn = crashed(bench.store, shm_dir, f"life-{life}"), rng.random() < 0.5
        if torn:
            tear(prefix, rng)
        again = reopen(prefix, bench.now_s + rng.choice([0.0, 3.0]), arena_nbytes=512 * KIB)
        after, found = states(again.store), again.store.table.columns
        ready = [row for row in before[RowState.READY] if found.generation[row] == columns.generation[row]]
        half_done = sorted(set(before[RowState.READY]) - set(ready))
        assert after[RowState.READY] == ready
        assert torn or not half_done
        in_doubt = {*before[RowState.LENT], *before[RowState.QUARANTINED], *half_done}
        was_deleted = set(before[RowState.PENDING_DELETE])
        assert in_doubt <= set(after[RowState.QUARANTINED]) <= in_doubt | was_deleted
        assert was_deleted <= {*after[RowState.QUARANTINED], *after[RowState.FREE]}
        assert not after[RowState.LENT]
        assert not after[RowState.PENDING_DELETE]
        assert again.store.recovered == len(ready)
        # A running quarantine ends at its time in spite of the crash. All other quarantines begin with the restart.
        going_on = {row: end_s for row, end_s in operations.quarantined.items() if end_s > again.now_s}
        until_s = dict.fromkeys(after[RowState.QUARANTINED], again.now_s + QUARANTINE_S) | going_on
        bench.store.close()
        remove_files(shm_dir / f"life-{life - 1}")
        bench = again
    bench.close()
