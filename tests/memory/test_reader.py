"""Reads that race with the writer, step by step. After any step of the writer, a read gets right bytes or a miss."""

import hashlib
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.config import SLOT_ALIGNMENT_NBYTES
from raykv.errors import UsageError
from raykv.memory import native, reader
from raykv.memory.arena import SharedMemory
from raykv.memory.copying import CopyThreads
from raykv.memory.reader import ShmReader
from raykv.memory.table import Table
from raykv.protocol import chunk_keys

pytestmark = pytest.mark.usefixtures("loops")

ROWS, PAGE = 16, SLOT_ALIGNMENT_NBYTES
SIZES = (1, 100, PAGE, 5000)
KEYS = chunk_keys.from_bytes(hashlib.shake_128(b"keys").digest(16 * 40))


def content(number: int, version: int) -> bytes:
    return hashlib.shake_128(f"{number} {version}".encode()).digest(SIZES[number % 4])


class Writer:
    """The table and arena of a node. Each change consists of steps, and a reader may run between any two steps."""

    def __init__(self) -> None:
        self.table = Table.create(None, rows=ROWS, extents=1, extent_nbytes=ROWS * 2 * PAGE, now_s=0.0)
        self.arena = SharedMemory.create(None, ROWS * 2 * PAGE)
        self.arena.populate(0, self.arena.nbytes)
        self.reader = ShmReader(str(self.table.memory.path), str(self.arena.path), writable=False)
        self.versions = dict.fromkeys(range(40), 0)
        self.holds: dict[int, int] = {}  # row -> number of the ready chunk in this row
        self.indexed: dict[int, int] = {}  # row -> number of the key that the index maps to this row

    def steps(self, row: int, number: int):
        """Remove the chunk in `row`, if any, and then store chunk `number` there. Readers may run at each yield."""
        cells = self.table.cells
        if number in self.indexed.values() and self.indexed.get(row) != number:
            return  # a writer enters a key only once
        if row in self.indexed:
            self.holds.pop(row, None)
            cells.generation[row] |= 1
            yield
            self.table.remove(np.array([row], np.int32))
            del self.indexed[row]
            yield
        cells.generation[row] |= 1
        self.versions[number] += 1
        value = content(number, self.versions[number])
        cells.page[row], cells.nbytes[row] = 2 * row, len(value)
        yield
        start = 2 * row * PAGE
        self.arena.view[start : start + len(value) // 2] = value[: len(value) // 2]
        yield
        self.arena.view[start + len(value) // 2 : start + len(value)] = value[len(value) // 2 :]
        self.table.insert(KEYS[number : number + 1], np.array([row], np.int32))
        self.indexed[row] = number
        yield
        cells.generation[row] = cells.generation[row] + 1 & 0xFFFFFFFF or 2
        self.holds[row] = number

    def put(self, row: int, number: int) -> None:
        for _ in self.steps(row, number):
            pass


@pytest.fixture
def writer():
    made = Writer()
    yield made
    made.reader.close()


def right(writer: Writer, number: int, target: bytes) -> bool:
    """Whether these bytes are a complete version of the chunk."""
    return any(target == content(number, version) for version in range(1, writer.versions[number] + 1))


changes = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 39), st.integers(1, 6)), min_size=1, max_size=8)
HYPOTHESIS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@HYPOTHESIS
@given(before=changes, between=changes, asked=st.lists(st.integers(0, 39), min_size=1, max_size=20))
def test_a_change_between_lookup_and_copy_is_a_miss_or_right(monkeypatch, before, between, asked):
    writer = Writer()
    for row, number, _ in before:
        writer.put(row, number)
    find_ready = Table.find_ready

    def found_then_changed(table, keys, now):
        answer = find_ready(table, keys, now)
        for row, number, steps in between:
            for _ in zip(range(steps), writer.steps(row, number), strict=False):
                pass
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Table, "find_ready", found_then_changed)
        into = [bytearray(SIZES[number % 4]) for number in asked]
        hits, nbytes = writer.reader.read(KEYS[asked], into, verify=False, now_s=1.0)
    for number, target, hit in zip(asked, into, hits.tolist(), strict=True):
        assert not hit or right(writer, number, bytes(target))
    assert nbytes == sum(len(target) for target, hit in zip(into, hits.tolist(), strict=True) if hit)
    writer.reader.close()


@pytest.mark.slow
@HYPOTHESIS
@given(before=changes, unfinished=changes, asked=st.integers(0, 39))
def test_a_half_done_change_is_a_miss_or_right(before, unfinished, asked):
    """The read of a ready chunk must be a hit. The read of a half-changed chunk is a miss or gets right bytes."""
    writer = Writer()
    for row, number, _ in before:
        writer.put(row, number)
    for row, number, steps in unfinished:
        for _ in zip(range(steps), writer.steps(row, number), strict=False):
            pass
    key, target = KEYS[asked].tobytes(), bytearray(SIZES[asked % 4])
    hit = writer.reader.read_one(key, target)
    assert hit == writer.reader.ready_one(key)
    assert not hit or right(writer, asked, bytes(target))
    if asked in writer.holds.values():
        assert hit
        assert bytes(target) == content(asked, writer.versions[asked])
    writer.reader.close()


@pytest.mark.parametrize("loops", ["plain"], indirect=True)
@pytest.mark.parametrize("torn_at", range(8))
def test_a_change_in_the_middle_of_the_copy_is_a_miss(writer, monkeypatch, torn_at):
    """The plain loop can be stopped in the middle of a chunk. tests/test_stress.py tests the compiled loop."""
    writer.put(3, 7)
    change = writer.steps(3, 11)
    copied = reader.scatter

    def half_then_change(source, into):
        middle = len(source) // 2
        into[0][:middle] = source[:middle]
        for _ in zip(range(torn_at), change, strict=False):
            pass
        into[0][middle:] = source[middle:]
        return True

    monkeypatch.setattr(reader, "scatter", half_then_change if torn_at else copied)
    target = bytearray(SIZES[7 % 4])
    hits, _ = writer.reader.read(KEYS[7:8], [target], verify=False, now_s=1.0)
    assert hits[0] == (torn_at == 0)
    assert writer.reader.read_one(KEYS[7].tobytes(), target) == (torn_at == 0)


@pytest.mark.parametrize("last", [0xFFFFFFFC, 0xFFFFFFFE])
def test_generations_wrap(writer, last):
    writer.put(0, 1)
    writer.table.cells.generation[0] = last
    target = bytearray(SIZES[1])
    for version in range(2, 6):
        assert writer.reader.read(KEYS[1:2], [target], verify=False, now_s=1.0)[0][0]
        assert bytes(target) == content(1, version - 1)
        rows, generations = writer.table.find_ready(KEYS[1:2], 1)
        writer.put(0, 1)
        assert writer.table.cells.generation[0] not in (0, int(generations[0]))
        assert rows[0] == 0


def test_chunks_lie_in_many_pieces(writer, np_rng):
    for row in range(ROWS):
        writer.put(row, row)
    into, joined = [], []
    for number in range(ROWS):
        cuts = sorted(np_rng.integers(0, SIZES[number % 4] + 1, 3).tolist())
        whole = bytearray(SIZES[number % 4])
        view = memoryview(whole)
        pieces = [view[first:end] for first, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        into.append(tuple(pieces) if number % 2 else pieces)
        joined.append(whole)
    hits, nbytes = writer.reader.read(KEYS[:ROWS], into, verify=True, now_s=1.0, threads=CopyThreads(1))
    assert not hits.any()  # with `verify`, checksums are compared, and this writer writes none
    hits, nbytes = writer.reader.read(KEYS[:ROWS], into, verify=False, now_s=1.0)
    assert hits.all()
    assert nbytes == sum(map(len, joined))
    assert joined == [bytearray(content(number, 1)) for number in range(ROWS)]


def test_reads_are_counted(writer):
    writer.put(5, 9)
    for _ in range(3):
        writer.reader.read(KEYS[9:10], [bytearray(SIZES[1])], verify=False, now_s=10.0)
    assert writer.table.columns.frequency[5] == 3
    assert writer.table.columns.accessed[5] == writer.table.ticks(10.0)
    writer.table.columns.frequency[5] = 0xFFFFFFFF
    assert writer.reader.read_one(KEYS[9].tobytes(), bytearray(SIZES[1]))
    assert writer.table.columns.frequency[5] == 0


def test_an_expired_chunk_is_a_miss(writer):
    writer.put(5, 9)
    writer.table.columns.expires[5] = 1
    assert not writer.reader.ready_one(KEYS[9].tobytes())
    assert not writer.reader.read_one(KEYS[9].tobytes(), bytearray(SIZES[1]))
    assert not writer.reader.read(KEYS[9:10], [bytearray(SIZES[1])], verify=False, now_s=10.0)[0].any()


def test_lengths_of_what_is_ready(writer):
    for row in range(4):
        writer.put(row, row)
    writer.table.columns.generation[1] += 1
    writer.table.columns.expires[2] = 1
    lengths = writer.reader.lengths(KEYS[[0, 1, 2, 3, 4, 3]], now_s=10.0)
    assert lengths.dtype == np.uint32
    assert lengths.tolist() == [SIZES[0], 0, 0, SIZES[3], 0, SIZES[3]]
    assert writer.reader.lengths(KEYS[:0], now_s=10.0).tolist() == []


@pytest.mark.parametrize("entry", [2 + 5, 2 + ROWS, (1 << 31) - 1, -1])
def test_an_index_without_an_empty_entry_makes_misses(writer, entry):
    writer.put(5, 9)
    writer.table.index[:] = entry
    key, target = KEYS[8], bytearray(SIZES[0])
    assert not writer.reader.ready_one(key.tobytes())
    assert not writer.reader.read_one(key.tobytes(), target)
    assert not writer.reader.ready(key[None], now_s=1.0).any()
    assert not writer.reader.lengths(key[None], now_s=1.0).any()
    assert not writer.reader.read(key[None], [target], verify=False, now_s=1.0)[0].any()


@pytest.mark.slow
def test_readers_miss_no_chunk_that_is_there_while_the_index_changes(rng: random.Random):
    """Readers find every committed key while other keys are added and removed, and while the index is rebuilt.

    A lookup may miss if the index is rebuilt twice during the lookup. So the test waits before each rebuild
    until both readers have begun new lookups.
    """
    rows, steps = 512, 4000
    table = Table.create(None, rows=rows, extents=1, extent_nbytes=rows * PAGE, now_s=0.0)
    arena = SharedMemory.create(None, rows * PAGE)
    reader = ShmReader(str(table.memory.path), str(arena.path), writable=False)
    keys = chunk_keys.from_bytes(rng.randbytes(16 * rows))
    stay, stopping, missed, rounds = rows // 2, threading.Event(), list[int](), [0, 0]
    table.columns.nbytes[:] = 100
    table.insert(keys[:stay], np.arange(stay, dtype=np.int32))
    table.columns.generation[:stay] = 2

    def read(place: int) -> None:
        mine, target = random.Random(rng.random()), bytearray(100)
        while not stopping.is_set():
            number = mine.randrange(stay)
            if not reader.ready(keys[:stay], now_s=1.0).all() or not reader.ready_one(keys[number].tobytes()):
                missed.append(number)
            if not reader.read_one(keys[number].tobytes(), target):
                missed.append(number)
            rounds[place] += 1

    threads = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    here: list[int] = []
    for step in range(steps):
        if here and (len(here) == stay or rng.random() < 0.5):
            row = here.pop(rng.randrange(len(here)))
            table.cells.generation[row] += 1
            table.remove(np.array([row], np.int32))
        else:
            row = rng.choice([row for row in range(stay, rows) if row not in here])
            here.append(row)
            table.insert(keys[row : row + 1], np.array([row], np.int32))
            table.cells.generation[row] = (table.cells.generation[row] | 1) + 1
        if step % 200 == 0:
            begun = list(rounds)
            while any(now < before + 2 for now, before in zip(rounds, begun, strict=True)):
                time.sleep(0)
            table.rebuild_index(table.index_entries())
    stopping.set()
    for thread in threads:
        thread.join()
    reader.close()
    assert missed == []


def test_another_length_is_a_miss_and_nothing_is_written(writer):
    writer.put(5, 9)
    for length in (0, SIZES[1] - 1, SIZES[1] + 1, 3 * PAGE):
        target = bytearray(length)
        assert not writer.reader.read(KEYS[9:10], [target], verify=False, now_s=1.0)[0][0]
        assert not writer.reader.read(KEYS[9:10], [[target]], verify=False, now_s=1.0)[0][0]
        assert not writer.reader.read_one(KEYS[9].tobytes(), target)
        assert not any(target)


@pytest.mark.parametrize(
    "wrong", [b"read-only", "text", 5, None, np.zeros((40, 40), np.uint8)[:, ::2], [bytearray(4), b"read-only"]]
)
def test_a_target_that_is_not_a_buffer_is_named(writer, wrong):
    writer.put(5, 9)
    good = bytearray(SIZES[1])
    with pytest.raises(UsageError, match=r"into\[1\]"):
        writer.reader.read(KEYS[[9, 9, 9]], [good, wrong, good], verify=False, now_s=1.0)


@pytest.mark.parametrize("key", [b"", b"15 bytes of key", b"17 bytes of a key"])
def test_a_key_has_sixteen_bytes(writer, key):
    with pytest.raises(ValueError, match="16"):
        writer.reader.ready_one(key)
    with pytest.raises(ValueError, match="16"):
        writer.reader.read_one(key, bytearray(8))


def test_a_damaged_table_does_not_lead_outside(writer, np_rng):
    """Rows have random pages. Each read is a miss or copies bytes of the arena, and the process survives."""
    for row in range(ROWS):
        writer.put(row, row)
    for _ in range(50):
        writer.table.columns.page[:] = np_rng.integers(0, 1 << 32, ROWS, np.uint64).astype(np.uint32)
        hits, _ = writer.reader.read(
            KEYS[:ROWS], [bytearray(SIZES[n % 4]) for n in range(ROWS)], verify=False, now_s=1.0
        )
        inside = writer.table.columns.page.astype(np.int64) * PAGE + writer.table.columns.nbytes <= writer.arena.nbytes
        assert not (hits & ~inside).any()
        for number in range(ROWS):
            writer.reader.read_one(KEYS[number].tobytes(), bytearray(SIZES[number % 4]))


def test_large_batches_are_shared_between_threads(np_rng):
    chunk, count = 1 << 20, 6
    table = Table.create(None, rows=ROWS, extents=1, extent_nbytes=count * chunk, now_s=0.0)
    arena = SharedMemory.create(None, count * chunk)
    arena.populate(0, arena.nbytes)
    values = np_rng.integers(0, 256, (count, chunk), np.uint8)
    np.frombuffer(arena.view, np.uint8)[:] = values.ravel()
    rows = np.arange(count, dtype=np.int32)
    table.insert(KEYS[:count], rows)
    table.columns.page[:count] = rows * (chunk // PAGE)
    table.columns.nbytes[:count] = chunk
    table.columns.generation[:count] = 2
    reader = ShmReader(str(table.memory.path), str(arena.path), writable=False)
    threads = CopyThreads(3)
    assert (threads.called(count, count * chunk) is not None) == (native.loops is not None)
    for _ in range(20):
        into = [np.zeros(chunk + 5, np.uint8)[n % 5 :][:chunk] for n in range(count)]  # not aligned
        hits, nbytes = reader.read(KEYS[:count], into, verify=False, now_s=1.0, threads=threads)
        assert hits.all()
        assert nbytes == count * chunk
        assert all((target == value).all() for target, value in zip(into, values, strict=True))
    with pytest.raises(UsageError, match=r"into\[5\]"):
        reader.read(KEYS[:count], [*into[:5], b"read-only"], verify=False, now_s=1.0, threads=threads)
    threads.close()
    reader.close()
