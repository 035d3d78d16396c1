"""What goes down to the tiers before memory needs its room, and what comes back up."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from tests.storage.test_store import Bench, config_for, content, names_to_keys

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.memory.slots import slot_nbytes
from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.storage.store import Store
from raykv.tier.admission import Admission
from raykv.tier.base import Arrived, Chunk, Found, Tier, Written
from raykv.tier.mover import Names, Tiers, _runs
from raykv.types import KeyArray


def split(keys: KeyArray) -> list[bytes]:
    raw = chunk_keys.to_bytes(keys)
    return [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]


class Shelf(Tier):
    """A tier in a dictionary, whose operations wait until somebody lets them go on."""

    name = "ssd"

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.chunks: dict[bytes, tuple[Found, bytes]] = {}
        self.queue: list = []
        self.takes = 1 << 30
        self.changes: list[bytes] = []
        self.sound = True

    def go_on(self) -> int:
        """Do what is queued."""
        work, self.queue = self.queue, []
        for each in work:
            each()
        return len(work)

    def has(self, keys: KeyArray) -> np.ndarray:
        return np.array([key in self.chunks for key in split(keys)], np.bool_)

    def find(self, keys: KeyArray) -> list[Found | None]:
        return [self.chunks[key][0] if key in self.chunks else None for key in split(keys)]

    def write(self, chunks: Sequence[Chunk], done: Written) -> int:
        taken = list(chunks[: self.takes])
        self.takes -= len(taken)

        def work() -> None:
            for chunk in taken:
                found = Found(
                    chunk.nbytes,
                    chunk.checksum,
                    chunk.group,
                    chunk.depth,
                    chunk.parent,
                    chunk.reads,
                    chunk.expires_s,
                )
                self.chunks[chunk.key] = found, bytes(self.view[chunk.offset : chunk.offset + chunk.nbytes])
                self.changes.append(chunk.key)
            done(taken, [True] * len(taken))

        if taken:
            self.queue.append(work)
        return len(taken)

    def read(self, keys: KeyArray, found: Sequence[Found | None], offsets: Sequence[int], done: Arrived) -> bool:
        if not self.sound:
            return False

        def work() -> None:
            came = []
            for key, offset in zip(split(keys), offsets, strict=True):
                entry = self.chunks.get(key)
                if entry:
                    self.view[offset : offset + len(entry[1])] = entry[1]
                came.append(entry is not None)
            done(came)

        self.queue.append(work)
        return True

    def delete(self, keys: KeyArray) -> int:
        return sum(self.chunks.pop(key, None) is not None for key in split(keys))

    def drop(self, group: int) -> int:
        mine = [key for key, (found, _) in self.chunks.items() if found.group == group]
        return sum(self.chunks.pop(key, None) is not None for key in mine)

    def keys(self) -> KeyArray:
        return chunk_keys.from_bytes(b"".join(self.chunks))

    def take_changes(self) -> tuple[KeyArray, KeyArray]:
        changes, self.changes = self.changes, []
        return chunk_keys.from_bytes(b"".join(changes)), chunk_keys.empty()

    def used_nbytes(self, group: int | None = None) -> int:
        return sum(found.nbytes for found, _ in self.chunks.values() if group in (None, found.group))

    def stats(self) -> dict:
        return {"chunks": len(self.chunks)}

    def close(self) -> None:
        self.go_on()


class House:
    """A store with one shelf below it."""

    def __init__(self, **fields) -> None:
        store = Store.open(config_for(**fields), None, now_s=time.monotonic())
        self.bench = Bench(store)
        self.bench.now_s = time.monotonic()
        self.shelf = Shelf(store.arena.view)
        self.lock = threading.Lock()
        self.changed = 0
        gate = Admission(None, now_s=time.monotonic())
        self.tiers = Tiers(store, self.lock, [self.shelf], admissions=[gate], changed=self.note)
        self.store = store

    def note(self) -> None:
        self.changed += 1

    def put(self, names: list[str], **options) -> int:
        self.bench.now_s = time.monotonic() - 1.0
        return self.bench.put(names, **options)

    def read(self, names: list[str]) -> list[bool]:
        """Whether each is in memory, with the right bytes."""
        pinned = self.store.pin(names_to_keys(names), now_s=time.monotonic())
        for name, row, start, nbytes in zip(names, pinned.rows, pinned.offsets, pinned.nbytes, strict=True):
            if row >= 0:
                assert self.store.arena.view[int(start) : int(start) + int(nbytes)] == content(name, int(nbytes))
        self.store.unpin(pinned.rows)
        return (pinned.rows >= 0).tolist()

    def pins(self) -> int:
        return int(self.store.table.columns.pins.sum())

    def delete(self, names: list[str], between: Callable[[], object] = lambda: None) -> None:
        """As a node does; `between` comes after what lies below was forgotten."""
        keys = names_to_keys(names)
        with self.tiers.barring(keys):
            self.tiers.delete(keys)
            between()
            with self.lock:
                self.store.delete(keys, now_s=time.monotonic())
                self.tiers.give_up(keys)

    def drop(self, group: int, between: Callable[[], object] = lambda: None) -> None:
        """As `Namespaces` does."""
        with self.tiers.barring(group=group):
            with self.lock:
                rows, generations = self.store.doomed(group, now_s=time.monotonic())
            self.tiers.drop(group)
            between()
            with self.lock:
                self.store.drop_doomed(rows, generations)


@pytest.fixture
def house() -> House:
    return House(low_water=0.0, high_water=0.01)


def fill(house: House, count: int = 15, nbytes: int = 60_000) -> list[str]:
    """An arena that is full but for one chunk."""
    names = [f"chunk-{number}" for number in range(count)]
    for name in names:
        house.put([name], nbytes=nbytes, chained=False)
    return names


def test_what_was_read_goes_down_before_its_turn_and_what_was_not_does_not(house):
    names = fill(house)
    house.read(names[:1])
    time.sleep(0.05)
    house.read(names[2:])
    house.tiers.demote()
    assert house.pins() == 0 or house.shelf.queue
    house.shelf.go_on()
    # The two that go first by age are 1 (never read) and 0 (read): of them only the one that was read is written.
    assert [name for name in names if house.shelf.has(names_to_keys([name]))[0]] == ["chunk-0"]
    assert house.tiers.demoted == 1
    assert house.pins() == 0
    house.tiers.demote()
    assert not house.shelf.queue, "what is down already is not written again"


def test_nothing_goes_down_while_there_is_room(house):
    names = fill(house, count=8)
    house.read(names)
    house.tiers.demote()
    assert not house.shelf.queue


def test_while_it_is_written_a_chunk_is_not_evicted(house):
    names = fill(house)
    house.read(names)
    house.tiers.demote()
    held = house.pins()
    assert held > 0
    house.put([f"more-{number}" for number in range(15)], nbytes=60_000, chained=False)
    assert house.pins() == held
    assert sum(house.read(names)) == held
    house.shelf.go_on()
    assert house.pins() == 0
    assert len(house.shelf.chunks) == held


def test_a_tier_that_takes_little_leaves_the_rest_as_it_was(house):
    names = fill(house)
    house.read(names)
    house.shelf.takes = 1
    house.tiers.demote()
    assert house.pins() == 1
    house.shelf.go_on()
    assert house.pins() == 0
    assert house.tiers.demoted == 1


def test_what_lies_below_comes_back_with_its_place_in_its_chain(house):
    chain = [f"link-{number}" for number in range(6)]
    house.put(chain, nbytes=PAGE)
    house.read(chain)
    house.tiers._demote_to(house.shelf, Admission(None, now_s=0.0))  # there is room: nothing is due
    rows = house.store.table.find(names_to_keys(chain))
    chunks, held = house.tiers._hold(rows, names_to_keys(chain))
    assert house.shelf.write(chunks, house.tiers._written(held)) == 6
    house.shelf.go_on()
    assert house.store.delete(names_to_keys(chain)) == 6
    assert house.tiers.promote(names_to_keys(chain), until_s=0.0) == 6
    assert not any(house.read(chain)), "nobody sees them before they are there"
    assert len(house.shelf.queue) == 1, "one run, one request"
    house.shelf.go_on()
    assert all(house.read(chain))
    assert house.tiers.promoted == 6
    columns = house.store.table.columns
    rows = house.store.table.find(names_to_keys(chain))
    assert columns.depth[rows].tolist() == list(range(6))
    assert [int(columns.parent[row]) for row in rows[1:]] == rows[:-1].tolist()
    assert columns.frequency[rows].tolist() == [2] * 6, "one read before, one since"
    assert house.changed


def test_who_asks_for_what_is_on_its_way_waits_for_it(house):
    house.put(["a"], nbytes=PAGE)
    rows = house.store.table.find(names_to_keys(["a"]))
    chunks, held = house.tiers._hold(rows, names_to_keys(["a"]))
    house.shelf.write(chunks, house.tiers._written(held))
    house.shelf.go_on()
    house.store.delete(names_to_keys(["a"]))
    assert house.tiers.promote(names_to_keys(["a"]), until_s=0.0) == 1
    came = []
    waiting = threading.Thread(
        target=lambda: came.append(house.tiers.promote(names_to_keys(["a"]), until_s=time.monotonic() + 10.0))
    )
    waiting.start()
    while waiting.is_alive() and not came and len(house.shelf.queue) == 1:
        house.shelf.go_on()
        waiting.join(0.01)
    waiting.join(10.0)
    assert came == [1] or came == [0]
    assert house.read(["a"]) == [True]
    assert house.tiers.promoted == 1


def test_nobody_waits_longer_than_he_said_and_it_comes_all_the_same(house):
    house.put(["a"], nbytes=PAGE)
    rows = house.store.table.find(names_to_keys(["a"]))
    chunks, held = house.tiers._hold(rows, names_to_keys(["a"]))
    house.shelf.write(chunks, house.tiers._written(held))
    house.shelf.go_on()
    house.store.delete(names_to_keys(["a"]))
    house.tiers.promote(names_to_keys(["a"]), until_s=time.monotonic() + 0.01)
    assert house.tiers.late == 1
    assert house.read(["a"]) == [False]
    house.shelf.go_on()
    assert house.read(["a"]) == [True]


def test_a_tier_that_refuses_or_has_lost_it_costs_a_miss_and_no_room(house):
    house.put(["a"], nbytes=PAGE)
    used = house.store.used_nbytes
    rows = house.store.table.find(names_to_keys(["a"]))
    chunks, held = house.tiers._hold(rows, names_to_keys(["a"]))
    house.shelf.write(chunks, house.tiers._written(held))
    house.shelf.go_on()
    house.store.delete(names_to_keys(["a"]))
    house.shelf.sound = False
    house.tiers.promote(names_to_keys(["a"]), until_s=time.monotonic() + 1.0)
    assert house.read(["a"]) == [False]
    assert house.store.used_nbytes == used - PAGE
    house.shelf.sound = True
    house.tiers.promote(names_to_keys(["a"]), until_s=0.0)
    house.shelf.chunks.clear()
    house.shelf.go_on()
    assert house.read(["a"]) == [False]
    assert house.store.used_nbytes == used - PAGE
    assert house.tiers.stats()["promoting_nbytes"] == 0


def test_what_a_tier_refuses_is_asked_of_the_next_one(house):
    house.put(["a", "b"], nbytes=PAGE)
    other = Shelf(house.store.arena.view)
    rows = house.store.table.find(names_to_keys(["a", "b"]))
    chunks, held = house.tiers._hold(rows, names_to_keys(["a", "b"]))
    house.shelf.write(chunks, house.tiers._written(held))
    other.write(chunks, lambda chunks, ok: None)
    house.shelf.go_on()
    other.go_on()
    house.tiers.tiers = [house.shelf, other]
    house.store.delete(names_to_keys(["a", "b"]))
    house.shelf.sound = False
    assert house.tiers.promote(names_to_keys(["a", "b"]), until_s=0.0) == 2
    other.go_on()
    assert house.read(["a", "b"]) == [True, True]
    assert house.tiers.stats()["promoting_nbytes"] == 0


def test_what_has_little_time_left_keeps_it(house):
    house.put(["a"], nbytes=PAGE)
    rows = house.store.table.find(names_to_keys(["a"]))
    house.store.table.columns.expires[rows] = house.store.table.ticks(time.monotonic() + 100.0)
    chunks, held = house.tiers._hold(rows, names_to_keys(["a"]))
    assert 98.0 < chunks[0].expires_s - time.time() < 101.0
    house.shelf.write(chunks, house.tiers._written(held))
    house.shelf.go_on()
    house.store.delete(names_to_keys(["a"]))
    house.tiers.promote(names_to_keys(["a"]), until_s=0.0)
    house.shelf.go_on()
    expires = int(house.store.table.columns.expires[house.store.table.find(names_to_keys(["a"]))][0])
    assert 95.0 < house.store.table.seconds(expires) - time.monotonic() < 101.0


def test_runs_are_of_one_kind():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        keys = names_to_keys([f"{n}" for n in range(rng.randrange(0, 12))])
        raw = split(keys)
        found: list[Found | None] = []
        for place in range(len(raw)):
            follows = place and rng.random() < 0.6
            before = found[place - 1] if place else None
            depth = before.depth + 1 if follows and before else 0
            entry = Found(
                rng.choice((PAGE, PAGE, 3 * PAGE)),
                0,
                rng.choice((0, 0, 1)),
                depth,
                raw[place - 1] if follows and before else b"",
                0,
                0.0,
            )
            found.append(entry if rng.random() < 0.8 else None)
        runs = _runs(keys, found, 4 * PAGE)
        covered = [place for run in runs for place in range(run.start, run.stop)]
        assert covered == [place for place, entry in enumerate(found) if entry is not None]
        for run in runs:
            entries = found[run]
            assert len({(entry.nbytes, entry.group) for entry in entries}) == 1
            assert len(entries) == 1 or entries[0].nbytes * len(entries) <= 4 * PAGE
            if len(entries) > 1:
                chained = [entry.parent == key for entry, key in zip(entries[1:], raw[run][:-1], strict=True)]
                assert all(chained) or not any(entry.parent for entry in entries)
                if all(chained):
                    assert all(now.depth == before.depth + 1 for before, now in pairwise(entries))


def test_accounts_are_known_by_their_fields(house):
    names = Names(house.store, house.lock)
    text = names.text(house.bench.group)
    assert names.number(text) == house.bench.group
    assert names.number(b"not json") is None
    assert names.number(b"{" * 5000) is None
    assert names.number(text.replace(b'"m"', b'"another"')) not in (None, house.bench.group)


def test_random_traffic_keeps_memory_and_shelf_in_agreement():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    house = House(low_water=0.05, high_water=0.1)
    names = [f"n{number}" for number in range(60)]
    for _step in range(600):
        some = rng.sample(names, rng.randrange(1, 5))
        act = rng.random()
        if act < 0.4:
            house.put(some[:1], nbytes=rng.choice((PAGE, 20_000, 60_000)), chained=False)
        elif act < 0.6:
            house.read(some)
        elif act < 0.8:
            house.tiers.promote(names_to_keys(some), until_s=0.0)
        elif act < 0.9:
            house.tiers.demote()
        elif act < 0.95:
            house.tiers.delete(names_to_keys(some))
            house.store.delete(names_to_keys(some))
        if rng.random() < 0.5:
            house.shelf.go_on()
        house.store.tend(now_s=time.monotonic())
    house.shelf.go_on()
    house.read(names)
    assert house.pins() == 0
    assert not house.tiers._in_hand.any()
    assert not house.tiers._rising
    sizes = house.store.room.slot_sizes(house.store.table.ready_rows())
    assert (
        house.store.used_nbytes
        == int(sizes.sum())
        == sum(slot_nbytes(int(n)) for n in house.store.table.columns.nbytes[house.store.table.ready_rows()])
    )


# -- what is deleted on its way ---------------------------------------------------------------------------------------


def below(house: House) -> list[str]:
    """Chunks that are on the shelf, and not in memory."""
    names = fill(house)
    house.read(names)
    house.tiers.demote()
    house.shelf.go_on()
    down = [name for name in names if house.shelf.has(names_to_keys([name]))[0]]
    assert down
    assert house.store.delete(names_to_keys(down), now_s=time.monotonic()) == len(down)
    return down


def gone(house: House, names: list[str]) -> bool:
    while house.shelf.go_on():
        pass
    return not (any(house.read(names)) or house.shelf.has(names_to_keys(names)).any() or house.pins())


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_what_is_deleted_on_its_way_up_does_not_come_back(house, how):
    down = below(house)
    assert house.tiers.promote(names_to_keys(down), until_s=0.0) == len(down)
    assert house.shelf.queue
    under_way = dict(house.shelf.chunks)
    house.delete(down) if how == "delete" else house.drop(house.bench.group)
    assert not house.shelf.chunks
    house.shelf.chunks = under_way  # the read had begun, and succeeds
    assert house.shelf.go_on()
    house.shelf.chunks = {}
    assert gone(house, down)
    assert house.tiers.stats()["promoting_nbytes"] == 0


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_what_is_deleted_on_its_way_down_stays_nowhere(house, how):
    names = fill(house)
    house.read(names)
    house.tiers.demote()
    held = [name for name, pinned in zip(names, house.store.table.columns.pins[:15].tolist(), strict=True) if pinned]
    assert held
    assert house.shelf.queue
    house.delete(held) if how == "delete" else house.drop(house.bench.group)
    assert gone(house, held)
    house.put(held, nbytes=60_000, chained=False)
    assert all(house.read(held)), "and what is stored later stays"
    house.tiers.demote()
    house.shelf.go_on()
    assert all(house.read(held))


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_what_is_being_forgotten_is_not_written_down_again(house, how):
    names = fill(house)
    house.read(names)
    house.tiers.demote()
    house.shelf.go_on()
    assert house.shelf.chunks

    def forerun() -> None:
        house.tiers.demote()
        house.shelf.go_on()

    house.delete(names, forerun) if how == "delete" else house.drop(house.bench.group, forerun)
    assert gone(house, names)
    house.put(names, nbytes=60_000, chained=False)
    house.read(names)
    forerun()
    assert house.shelf.chunks, "what is stored later goes down again"
