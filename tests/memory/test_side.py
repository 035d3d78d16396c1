"""The side index: rows that writers publish themselves, until the node takes them in."""

import mmap
import multiprocessing
import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from raykv.memory import native
from raykv.memory.arena import SharedMemory
from raykv.memory.table import SIDE_WINDOW, Table

BUILT = native.Reader
ROWS = 4096

pytestmark = pytest.mark.skipif(BUILT is None, reason="the compiled loops were not built, or RAYKV_NATIVE is 0")


def lent_table(path: Path | None = None) -> Table:
    """A table whose rows are all lent: odd, with a slot, without a key."""
    made = Table.create(path, rows=ROWS, extents=2, extent_nbytes=1 << 20, now_s=0.0)
    made.columns.generation[:] = 5
    made.columns.nbytes[:] = 4096
    return made


def writer_of(made: Table):
    """Something that publishes, also where a test looks keys up without the compiled loops."""
    hidden, native.Reader = native.Reader, BUILT
    try:
        return made.reader(memoryview(bytearray(1 << 20)))
    finally:
        native.Reader = hidden


def keys_of(numbers) -> np.ndarray:
    spread = np.array(list(numbers), np.uint64)
    return np.stack([spread * np.uint64(0x9E3779B97F4A7C15), spread * np.uint64(0xD6E8FEB86659FD93)], axis=1)


def same_window(count: int) -> np.ndarray:
    """Keys that all belong into one window."""
    return np.array([(number, number ^ 12345) for number in range(1, count + 1)], np.uint64)


def publish(writer, keys: np.ndarray, rows, generation: int = 5, nbytes: int = 100) -> list[int]:
    rows = list(rows)
    checksums = np.arange(len(rows), dtype=np.uint64)
    return list(writer.publish(rows, [generation] * len(rows), keys.tobytes(), checksums, nbytes))


def seen(made: Table, keys: np.ndarray) -> list[int]:
    """Rows that a reader finds, by every way that there is."""
    rows = made.look(keys, 1)[0].tolist()
    reader = made.reader(memoryview(bytearray(1 << 20)))
    for key, row in zip(keys, rows, strict=True):
        found = made.look_one(int(key[0]), int(key[1]), 1)
        assert (-1 if found is None else found[0]) == row
        assert reader is None or reader.ready(key.tobytes()) is (row >= 0)
    return rows


@pytest.mark.usefixtures("loops")
def test_what_is_published_is_seen_before_and_after_it_is_taken_in():
    made = lent_table()
    keys, other = keys_of(range(300)), keys_of(range(1000, 1050))
    assert publish(writer_of(made), keys, range(300)) == [1] * 300
    assert seen(made, np.concatenate([keys, other])) == [*range(300), *[-1] * 50]
    assert made.find(keys).tolist() == [-1] * 300, "the node does not know of it yet"
    assert made.has_published
    assert sorted(made.side_rows()) == list(range(300))
    made.insert(keys, np.arange(300, dtype=np.int32))
    assert seen(made, keys) == list(range(300))
    made.leave_side(np.arange(200, dtype=np.int32))
    for row in range(200, 300):
        made.leave_side_one(row)
    made.note_taken(300)
    assert not made.has_published
    assert made.side_rows() == []
    assert seen(made, np.concatenate([keys, other])) == [*range(300), *[-1] * 50]
    assert made.columns.nbytes[:300].tolist() == [100] * 300
    assert made.columns.checksum[:300].tolist() == list(range(300))


@pytest.mark.usefixtures("loops")
def test_what_is_published_is_seen_in_whichever_index_is_in_use():
    made = lent_table()
    keys, rows = keys_of(range(60)), np.arange(60, dtype=np.int32)
    publish(writer_of(made), keys, rows)
    made.insert(keys[:20], rows[:20])
    made.rebuild_index(rows[:20])
    assert seen(made, keys) == rows.tolist()
    made.insert(keys[20:], rows[20:])
    made.leave_side(rows)
    assert seen(made, keys) == rows.tolist()
    made.note_all_taken(made.published)
    assert seen(made, keys) == rows.tolist()
    assert made.look(keys, None)[0].tolist() == rows.tolist()


@pytest.mark.usefixtures("loops")
def test_what_is_not_ready_or_expired_is_not_seen():
    made = lent_table()
    keys = keys_of(range(3))
    publish(writer_of(made), keys, range(3))
    made.columns.generation[0] += 1
    made.columns.expires[1] = 1
    assert seen(made, keys) == [-1, -1, 2]
    assert made.look(keys, None)[0].tolist() == [-1, 1, 2]


@pytest.mark.usefixtures("loops")
def test_what_is_published_is_seen_behind_a_row_that_is_being_taken_back():
    """Who finds, after entering its row, that the key is there already, takes its entry back: it may lie in front."""
    made = lent_table()
    keys = same_window(2)
    assert publish(writer_of(made), keys, [7, 3]) == [1, 1]
    made.leave_side_one(7)
    (window,) = (each for each in made._side.reshape(-1, SIDE_WINDOW) if 3 + 2 in each)
    assert window[0] == 0
    made.columns.key_hi[9], made.columns.key_lo[9] = keys[1]
    window[0] = 9 + 2
    assert seen(made, keys) == [-1, 3]
    assert made.look(keys, None)[0].tolist() == [-1, 3]


def test_a_window_takes_as_many_as_it_has_entries():
    made = lent_table()
    keys = same_window(SIDE_WINDOW + 3)
    verdicts = publish(writer_of(made), keys, range(len(keys)))
    assert verdicts == [1] * SIDE_WINDOW + [0] * 3
    assert made.look(keys, 1)[0].tolist() == [*range(SIDE_WINDOW), -1, -1, -1]
    assert made.columns.generation[SIDE_WINDOW : len(keys)].tolist() == [5] * 3, "still lent"
    made.leave_side_one(4)
    assert publish(writer_of(made), keys[-1:], [len(keys) - 1]) == [1]


def test_a_key_is_published_once():
    made = lent_table()
    writer, keys = writer_of(made), keys_of(range(4))
    assert publish(writer, keys[[0, 0, 1]], [0, 1, 2]) == [1, 2, 1]
    made.insert(keys[2:3], np.array([3], np.int32))
    assert publish(writer, keys[2:3], [4]) == [2], "it is in the index, being written"
    made.columns.expires[3] = 1
    assert publish(writer, keys[2:3], [4]) == [0], "it has expired: the node must drop it first"
    assert made.side_rows().count(4) == 0
    assert made.columns.generation[[1, 4]].tolist() == [5, 5]


def test_a_loan_that_has_ended_cannot_be_published():
    made = lent_table()
    writer, keys = writer_of(made), keys_of(range(4))
    assert publish(writer, keys[:1], [0], generation=3) == [0], "the row was given to somebody else"
    assert publish(writer, keys[:1], [0], generation=6) == [0]
    assert publish(writer, keys[:1], [0]) == [1]
    assert publish(writer, keys[1:2], [0]) == [0], "it is visible already"
    assert publish(writer, keys[2:], [ROWS, -1]) == [0, 0]
    assert publish(writer, keys[2:3], [1], nbytes=0) == [0]
    assert publish(writer, keys[2:3], [1], nbytes=1 << 32) == [0]
    for arguments in (([1], [5], b"short", bytes(8), 1), ([1], [], bytes(16), bytes(8), 1), ((1,), [5], b"", b"", 1)):
        with pytest.raises((ValueError, TypeError)):
            writer.publish(*arguments)
    assert made.published == 1


@pytest.mark.parametrize("stream_nbytes", [0, 1 << 20], ids=["streamed", "plain"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("nbytes", [241, 4096, 70_001])
def test_one_chunk_is_copied_hashed_and_published_in_one_call(
    pieces: int, nbytes: int, stream_nbytes: int, rng: random.Random
):
    made, arena = lent_table(), memoryview(mmap.mmap(-1, 1 << 20))  # whole pages, as an arena is
    writer, (key, other) = made.reader(arena), keys_of(range(2))
    content = rng.randbytes(nbytes)
    cuts = [0, *sorted(rng.sample(range(1, nbytes), pieces - 1)), nbytes]
    parts = [memoryview(content)[start:end] for start, end in pairwise(cuts)]
    expected = xxhash.xxh3_64_intdigest(content)
    assert writer.store(7, 5, 8192, key.tobytes(), parts, stream_nbytes) == (True, expected.to_bytes(8, "little"))
    assert bytes(arena) == bytes(8192) + content + bytes(len(arena) - 8192 - nbytes)
    assert seen(made, np.stack([key, other])) == [7, -1]
    assert made.columns.checksum[7] == expected
    assert made.columns.nbytes[7] == nbytes
    # What others have, and a loan that has ended, are left to the node.
    assert writer.store(8, 5, 0, key.tobytes(), tuple(parts), stream_nbytes) == (False, expected.to_bytes(8, "little"))
    assert writer.store(8, 3, 0, other.tobytes(), parts, stream_nbytes)[0] is False
    assert seen(made, np.stack([key, other])) == [7, -1]


def test_a_chunk_is_stored_nowhere_else_than_in_a_writable_arena():
    made, nbytes = lent_table(), 4096
    arena = bytearray(1 << 20)
    writer, key, content = made.reader(memoryview(arena)), bytes(16), b"x" * nbytes
    good = (1, 5, 0, key, [content], 1 << 20)
    for place, wrong in [
        *((0, value) for value in (-1, 1 << 31, "1")),
        *((1, value) for value in (-1, 1 << 32)),
        *((2, value) for value in (-1, len(arena) + 1, len(arena) - nbytes + 1, 1 << 64)),
        *((3, value) for value in (b"short", bytearray(16), 5)),
        *((4, value) for value in (content, [], [b"x" * 240], ["text"], [content, None], [memoryview(content)[::2]])),
    ]:
        with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
            writer.store(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(TypeError):
        writer.store(*good[:-1])
    with pytest.raises(ValueError, match="writable"):
        made.reader(memoryview(bytes(arena))).store(*good)
    assert not any(arena)
    assert made.look(np.zeros((1, 2), np.uint64), None)[0].tolist() == [-1]
    assert writer.store(*good)[0] is True


def test_a_key_is_known_as_soon_as_it_is_being_written():
    made = lent_table()
    writer, keys = writer_of(made), keys_of(range(5))
    made.insert(keys[:3], np.arange(3, dtype=np.int32))
    publish(writer, keys[3:4], [3])
    made.columns.generation[0] = 6
    made.columns.expires[2] = 1
    assert [writer.known(key.tobytes()) for key in keys] == [True, True, False, True, False]
    assert [writer.ready(key.tobytes()) for key in keys] == [True, False, False, True, False]
    with pytest.raises(ValueError, match="16 bytes"):
        writer.known(b"short")


def race(path: Path, number: int, rounds: int, told) -> None:
    made = Table(SharedMemory.attach(path, writable=True))
    writer = writer_of(made)
    own, stored = list(range(number * 1000, number * 1000 + 1000)), 0
    for first in range(0, rounds, 4):
        keys = keys_of(range(first, first + 4))
        for verdict in publish(writer, keys, own[:4]):
            stored += verdict == 1
        own = [row for row in own if made.columns.generation[row] & 1]
    told.put(stored)


@pytest.mark.slow
def test_processes_that_publish_the_same_keys_publish_each_at_most_once(shm_dir):
    """Who loses a race asks the node, so at most once is what must hold here."""
    path = shm_dir / "table"
    made = lent_table(path)
    spawn = multiprocessing.get_context("spawn")
    told = spawn.SimpleQueue()
    processes = [spawn.Process(target=race, args=(path, number, 800, told)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    stored = sum(told.get() for _ in processes)
    rows = np.array(made.side_rows(), np.int32)
    pairs = set(zip(made.columns.key_hi[rows].tolist(), made.columns.key_lo[rows].tolist(), strict=True))
    print(f"{stored} of 800 keys published by {len(processes)} processes")
    assert len(rows) == len(pairs) == stored == made.published
    assert (made.columns.generation[rows] == 6).all()
    assert stored > 700


@pytest.mark.slow
def test_a_reader_beside_the_writer_and_the_node_misses_nothing(rng: random.Random):
    """A key, once published, is found from then on, while its row moves from the side index to the index."""
    made = lent_table()
    writer, reader = writer_of(made), made.reader(memoryview(bytearray(1 << 20)))
    keys = keys_of(range(ROWS))
    published, stopping = [0], threading.Event()
    missed: list[int] = []

    def read() -> None:
        while not stopping.is_set():
            upto = published[0]
            if not upto:
                continue
            number = rng.randrange(max(0, upto - 40), upto)
            some = [number, rng.randrange(upto)]
            if not reader.ready(keys[number].tobytes()) or (made.look(keys[some], 1)[0] < 0).any():
                missed.append(number)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for number in range(ROWS):
        assert publish(writer, keys[number : number + 1], [number]) == [1]
        published[0] = number + 1
        if number % 7 == 0:
            upto = made.published
            for row in made.side_rows():
                made.insert_one(int(keys[row, 0]), int(keys[row, 1]), row)
                made.leave_side_one(row)
            made.note_all_taken(upto)
            time.sleep(0)
    stopping.set()
    for thread in readers:
        thread.join()
    assert missed == []


def publish_forever(path: Path, number: int) -> None:
    made = Table(SharedMemory.attach(path, writable=True))
    writer = writer_of(made)
    for row in range(number * 500, number * 500 + 500):
        publish(writer, keys_of([row]), [row])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_rows_or_odd_ones(shm_dir, rng: random.Random):
    path = shm_dir / "table"
    made = lent_table(path)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=publish_forever, args=(path, number)) for number in range(3)]
    for process in processes:
        process.start()
    until_s = time.monotonic() + 60
    while made.published < rng.randrange(100, 700) and time.monotonic() < until_s:
        time.sleep(0.0005)
    for process in processes:
        process.kill()
        process.join()
    print(f"{made.published} published when they were killed")
    for row in made.side_rows():
        generation = int(made.columns.generation[row])
        assert generation in (5, 6)
        if generation == 6:
            assert made.columns.nbytes[row] == 100
            assert made.look(keys_of([row]), 1)[0].tolist() == [row]
    made.leave_side(np.array(made.side_rows(), np.int32))
    assert made.side_rows() == []


def test_what_is_not_published_is_not_settled():
    made = lent_table()
    writer, keys = writer_of(made), keys_of(range(4))
    made.columns.parent[:] = -2
    assert publish(writer, keys, range(4)) == [1] * 4
    rows = np.arange(4, dtype=np.int32)

    def settle(rows=rows, nbytes=100, group=0, parent=-1) -> bool:
        told = {"nbytes": nbytes, "group": group, "chained": True, "parent": parent, "depth": 7}
        return made.settle(writer, keys, np.array(rows, np.int32), **told)

    before = bytes(made.memory.view)
    assert not settle(rows=[0, 1, 2, 4]), "not published"
    assert not settle(rows=[0, 1, 3, 2]), "under other keys"
    assert not settle(rows=[0, 1, 2, ROWS])
    assert not settle(rows=[0, 1, 2, -1])
    assert not settle(nbytes=101)
    assert not settle(group=1)
    assert not settle(parent=ROWS)
    with pytest.raises(ValueError, match="keys"):
        settle(rows=[0, 1, 2])
    assert bytes(made.memory.view) == before
    assert settle(parent=9)
    assert made.find(keys).tolist() == [0, 1, 2, 3]
    assert made.columns.parent[:4].tolist() == [9, 0, 1, 2]
    assert made.columns.depth[:4].tolist() == [7, 8, 9, 10]
    assert made.columns.children[[9, 0, 1, 2, 3]].tolist() == [1, 1, 1, 1, 0]
    assert made.side_rows() == []
    assert not made.has_published
    assert not settle(), "it is in the index"
