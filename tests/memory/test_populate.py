"""Extents get memory ahead of need. Until an extent has memory, it is not used, and its pages are not touched."""

import os
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.errors import ConfigError
from raykv.memory import arena, numa, populate
from raykv.memory.arena import SharedMemory, free_nbytes
from raykv.memory.cgroup import RESERVE_NBYTES, MemoryLimit
from raykv.memory.free_rows import FreeRows
from raykv.memory.layout import ROWS_AT_START
from raykv.memory.populate import Populator
from raykv.memory.slots import Slots
from raykv.memory.table import Table

MIB = 1 << 20
EXTENTS, EXTENT_NBYTES = 16, MIB
LOCK = threading.Lock()


class Memory:
    """The arena, slots and rows of a node."""

    def __init__(self, path: Path | None = None, rows: int = 64) -> None:
        size = {"extents": EXTENTS, "extent_nbytes": EXTENT_NBYTES}
        self.table = Table.create(None, rows=rows, now_s=0.0, **size)
        self.arena = SharedMemory.create(path, EXTENTS * EXTENT_NBYTES, huge_pages="never")
        self.slots = Slots(self.table.extent_slots, EXTENT_NBYTES)
        self.slots.open_extents()
        populated = self.table.rows_populated
        self.free_rows = FreeRows(np.zeros(populated, np.bool_), rows=rows, limit=populated)
        self.populator = Populator(self.arena, self.table, self.slots, self.free_rows)
        self.hooked: list[tuple[int, int]] = []
        self.populator.on_populated.append(lambda offset, nbytes: self.hooked.append((offset, nbytes)))

    def taken(self) -> int:
        return os.stat(self.arena.path).st_blocks * 512

    def take(self, count: int) -> np.ndarray:
        return self.slots.take(np.arange(count, dtype=np.int32), EXTENT_NBYTES)

    def step_all(self, *, quiet: bool) -> int:
        steps = 0
        while self.populator.step(LOCK, quiet=quiet):
            steps += 1
        return steps


@pytest.fixture
def small_tmpfs(shm_dir):
    place = shm_dir / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_some_extents_are_populated_ahead_and_all_when_nobody_writes():
    memory = Memory()
    ahead = EXTENTS // populate.AHEAD_SHARE
    assert memory.populator.due
    assert memory.step_all(quiet=False) == ahead
    assert not memory.populator.due
    assert memory.slots.free_populated_nbytes == memory.taken() == ahead * EXTENT_NBYTES
    memory.take(1)
    assert memory.populator.due
    assert memory.step_all(quiet=False) == 1
    assert memory.step_all(quiet=True) == EXTENTS - ahead - 1
    assert memory.taken() == EXTENTS * EXTENT_NBYTES
    assert memory.slots.next_without_memory() == -1


def test_each_extent_is_announced_once_before_its_first_use():
    memory = Memory()
    memory.populator.step(LOCK, quiet=False)
    assert memory.hooked == [(0, EXTENT_NBYTES)]
    pages = memory.take(3)
    assert sorted(offset for offset, _ in memory.hooked) == sorted(page * PAGE for page in pages.tolist())
    memory.slots.give(pages)
    memory.take(2)
    memory.step_all(quiet=True)
    assert sorted(memory.hooked) == [(extent * EXTENT_NBYTES, EXTENT_NBYTES) for extent in range(EXTENTS)]


def test_an_extent_that_was_claimed_meanwhile_stays_claimed_and_is_announced_once(monkeypatch):
    memory = Memory()
    extent, take = memory.slots.next_without_memory(), memory.arena.populate

    def claimed(offset: int, nbytes: int, *, hurry: bool = False) -> bool:
        if not hurry:
            memory.take(1)
        return take(offset, nbytes, hurry=hurry)

    monkeypatch.setattr(memory.arena, "populate", claimed)
    assert memory.populator.step(LOCK, quiet=False)
    assert memory.slots.free_populated_nbytes == 0
    assert len(memory.slots.rows_in(extent)) == 1
    assert memory.hooked == [(extent * EXTENT_NBYTES, EXTENT_NBYTES)]


def test_the_lock_is_free_while_memory_is_taken(monkeypatch):
    memory = Memory()
    held: list[bool] = []

    def watched(offset: int, nbytes: int, *, hurry: bool = False) -> bool:
        held.append(LOCK.locked())
        return True

    monkeypatch.setattr(memory.arena, "populate", watched)
    memory.populator.step(LOCK, quiet=True)
    assert held == [False]


def test_an_extent_without_memory_is_out_of_use_until_there_is_some(small_tmpfs):
    """Another process fills the file system. There is no SIGBUS and no error, and populated extents stay in use."""
    memory = Memory(small_tmpfs / "arena")
    pages = memory.take(2)
    ballast = small_tmpfs / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_nbytes(small_tmpfs) - EXTENT_NBYTES)
    assert len(memory.take(5)) == 1
    assert memory.slots.extents_failed == EXTENTS - 3
    assert memory.slots.usable_nbytes == 3 * EXTENT_NBYTES
    assert memory.slots.free_nbytes == 0
    assert memory.step_all(quiet=False) == memory.step_all(quiet=True) == 0
    assert "file system" in memory.populator.refused
    assert not memory.populator.step(LOCK, quiet=False, retry=True)
    memory.slots.give(pages)
    assert memory.slots.free_nbytes == 2 * EXTENT_NBYTES
    ballast.unlink()
    assert memory.step_all(quiet=True) == 0
    assert memory.populator.step(LOCK, quiet=True, retry=True)
    assert not memory.populator.refused
    assert memory.step_all(quiet=True) == 1
    assert memory.slots.extents_failed == EXTENTS - 5
    assert len(memory.take(9)) == 4


def test_rows_are_populated_ahead(monkeypatch):
    monkeypatch.setattr(populate, "AHEAD_ROWS", 2 * ROWS_AT_START)
    memory = Memory(rows=5 * ROWS_AT_START)
    assert memory.table.rows_populated == ROWS_AT_START == len(memory.free_rows)
    memory.step_all(quiet=False)
    assert memory.table.rows_populated == memory.free_rows.limit == 3 * ROWS_AT_START
    memory.free_rows.take(2 * ROWS_AT_START)
    assert memory.populator.due
    memory.step_all(quiet=False)
    assert memory.free_rows.limit == memory.table.rows == 5 * ROWS_AT_START
    assert not memory.populator.step(LOCK, quiet=False)


def test_neighbouring_extents_come_from_the_memory_nodes_in_turn(monkeypatch):
    memory, asked = Memory(), []

    @contextmanager
    def preferred(node: int):
        asked.append(node)
        yield True

    monkeypatch.setattr(populate, "preferred", preferred)
    memory.populator = Populator(memory.arena, memory.table, memory.slots, memory.free_rows, nodes=(2, 5, 7))
    memory.take(1)
    memory.step_all(quiet=True)
    assert asked == [(2, 5, 7)[extent % 3] for extent in range(EXTENTS)]


def test_where_memory_nodes_may_not_be_chosen_one_line_says_so(monkeypatch, caplog):
    memory = Memory()
    monkeypatch.setattr(numa, "_SET_MEMPOLICY", {})
    memory.populator = Populator(memory.arena, memory.table, memory.slots, memory.free_rows, nodes=(0, 1))
    assert memory.step_all(quiet=True) == EXTENTS
    assert len(caplog.records) == 1


def test_the_next_process_finds_populated_extents_populated():
    """Under a full memory limit, it could not take this memory again."""
    memory = Memory()
    for _ in range(2):
        memory.populator.step(LOCK, quiet=False)
    memory.slots.give(memory.take(1))
    again = Slots(memory.table.extent_slots, EXTENT_NBYTES)
    again.open_extents()
    assert again.free_populated_nbytes == memory.slots.free_populated_nbytes == memory.taken() == 2 * EXTENT_NBYTES
    assert again.free_nbytes == EXTENTS * EXTENT_NBYTES


class Container:
    """A simulated memory limit. The arena's own memory counts as used."""

    def __init__(self, memory: Memory, monkeypatch: pytest.MonkeyPatch, room_nbytes: int) -> None:
        self.measured, self.room_nbytes = 0, room_nbytes
        self._memory = memory
        monkeypatch.setattr(arena, "memory_limit", self.measure)

    def measure(self) -> MemoryLimit:
        self.measured += 1
        used = self._memory.taken()
        return MemoryLimit(self.room_nbytes + RESERVE_NBYTES, used)


def test_no_memory_is_taken_beyond_the_limit_of_the_container(monkeypatch, caplog):
    memory = Memory()
    container = Container(memory, monkeypatch, 3 * EXTENT_NBYTES)
    assert memory.step_all(quiet=True) == 3
    assert memory.taken() == 3 * EXTENT_NBYTES
    assert "memory limit" in memory.populator.refused
    assert not memory.populator.due
    assert len(memory.take(EXTENTS)) == 3
    assert memory.slots.extents_failed == EXTENTS - 3
    measured = container.measured
    assert not memory.populator.step(LOCK, quiet=True)
    assert container.measured == measured, "without `retry`, the kernel is not asked again"
    assert not memory.populator.step(LOCK, quiet=True, retry=True)
    assert memory.taken() == 3 * EXTENT_NBYTES
    assert len(caplog.records) == 1
    container.room_nbytes = 9 * EXTENT_NBYTES
    assert memory.populator.step(LOCK, quiet=False, retry=True)
    assert not memory.populator.refused
    assert memory.step_all(quiet=True) == 5
    assert memory.taken() == 9 * EXTENT_NBYTES
    assert len(memory.take(EXTENTS)) == 6


def test_a_writer_leaves_room_for_the_extent_that_the_background_takes(monkeypatch):
    memory = Memory()
    Container(memory, monkeypatch, EXTENT_NBYTES)
    take, taken = memory.arena.populate, []

    def meanwhile(offset: int, nbytes: int, *, hurry: bool = False) -> bool:
        taken.append(len(memory.take(1)))
        return take(offset, nbytes, hurry=hurry)

    monkeypatch.setattr(memory.arena, "populate", meanwhile)
    assert memory.populator.step(LOCK, quiet=False)
    assert taken == [0]
    assert memory.taken() == EXTENT_NBYTES


def test_rows_are_not_populated_beyond_the_limit_either(monkeypatch):
    memory = Memory(rows=5 * ROWS_AT_START)
    container = Container(memory, monkeypatch, 100)
    assert not memory.populator.step(LOCK, quiet=False)
    assert memory.table.rows_populated == memory.free_rows.limit == ROWS_AT_START
    container.room_nbytes = 64 * MIB
    assert memory.populator.step(LOCK, quiet=False, retry=True)
    assert memory.table.rows_populated == memory.free_rows.limit == 5 * ROWS_AT_START


def test_a_table_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(arena, "memory_limit", lambda: MemoryLimit(200 * MIB, 150 * MIB))
    with pytest.raises(ConfigError, match=r"max_chunks.*memory limit is 209,715,200 bytes, and 157,286,400 are in use"):
        Table.create(None, rows=1 << 20, extents=1, extent_nbytes=MIB, now_s=0.0)
