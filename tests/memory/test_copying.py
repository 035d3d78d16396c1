"""Copies of chunks in one or several pieces, the checksums of copies, and threads that share a large copy."""

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.errors import UsageError
from raykv.memory import native
from raykv.memory.copying import (
    STREAM_NBYTES,
    CopyThreads,
    all_byte_views,
    checksum_of,
    copy,
    gather,
    scatter,
)
from tests.support.copies import gather_hashed

pytestmark = pytest.mark.usefixtures("loops")


def cut(raw: bytes | bytearray, places: list[int]) -> list[memoryview]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [memoryview(raw)[start:stop] for start, stop in pairwise(edges)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.lists(st.integers(0, 300), max_size=5))
def test_gather_and_scatter_are_each_others_inverse(raw, from_, to):
    whole, back = bytearray(len(raw)), bytearray(len(raw))
    gather(memoryview(whole), cut(raw, from_))
    assert whole == raw
    assert scatter(memoryview(whole), cut(back, to))
    assert back == raw
    assert checksum_of(cut(raw, to)) == xxhash.xxh3_64_intdigest(raw)


@pytest.mark.parametrize("lengths", [[3], [5], [2, 1], [2, 3], []])
def test_lengths_that_differ_copy_nothing(lengths):
    into = [bytearray(length) for length in lengths]
    assert not scatter(memoryview(b"four"), [memoryview(each) for each in into])
    assert into == [bytes(length) for length in lengths]


@pytest.mark.parametrize("nbytes", [0, 1, (64 << 10) - 1, 64 << 10, 1 << 20])
def test_large_and_small_copies(nbytes, rng):
    source, target = rng.randbytes(nbytes), bytearray(nbytes)
    copy(memoryview(target), memoryview(source))
    assert target == source


@pytest.mark.parametrize("stream", [False, True])
def test_gather_hashed_copies_and_hashes(rng, stream):
    """The copy and its checksum are right for any alignment and length. The bytes around the target do not change."""
    for _ in range(30):
        nbytes = rng.choice([0, 1, 63, 4095, 4096, 4097, 70_000, (256 << 10) + 1, STREAM_NBYTES + 333])
        source = bytearray(rng.randbytes(nbytes + 64))
        before, behind = rng.randrange(64), rng.randrange(64)
        pieces = cut(memoryview(source)[before : before + nbytes].tobytes(), [rng.randrange(nbytes + 1)] * 2)
        room = bytearray(b"\xaa" * (before + nbytes + behind))
        target = memoryview(room)[before : before + nbytes]
        assert gather_hashed(target, pieces, stream=stream) == xxhash.xxh3_64_intdigest(b"".join(pieces))
        assert target == b"".join(pieces)
        assert room[:before] + room[before + nbytes :] == b"\xaa" * (before + behind)


def test_helpers_are_called_for_large_batches(loops):
    threads = CopyThreads(4)
    jobs: list[object] = []
    threads._pool, threads._pid = SimpleNamespace(submit=lambda share, job: jobs.append(job)), os.getpid()
    for chunks, nbytes, helpers in [
        (100, 1 << 30, 3),
        (2, 1 << 30, 1),
        (1, 1 << 30, 0),
        (100, 2 << 20, 1),
        (9, 1000, 0),
    ]:
        jobs.clear()
        call = threads.called(chunks, nbytes)
        assert (call is not None) == (helpers > 0 and native.loops is not None)
        if call is not None:
            call("job")
            assert jobs == ["job"] * helpers


def batch(rng, count: int, nbytes: int):
    values = [[memoryview(rng.randbytes(nbytes))] for _ in range(count)]
    return [memoryview(bytearray(nbytes)) for _ in range(count)], values, np.zeros(count, np.uint64)


class Helpers:
    """Starts `count` threads that share a copy job. With `fails_after_s`, the call raises KeyError after that time."""

    def __init__(self, count: int, fails_after_s: float | None = None) -> None:
        self.count, self.fails_after_s = count, fails_after_s
        self.threads: list[threading.Thread] = []

    def __call__(self, job: object) -> None:
        self.job = job
        self.threads = [threading.Thread(target=native.loops.share, args=(job,)) for _ in range(self.count)]
        for thread in self.threads:
            thread.start()
        if self.fails_after_s is not None:
            time.sleep(self.fails_after_s)
            raise KeyError("no")

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("loops", ["compiled"], indirect=True)
def test_a_helper_takes_each_chunk_once_or_comes_too_late(rng, loops):
    for number in range(80):
        slots, values, checksums = batch(rng, rng.randrange(1, 40), rng.choice([241, 5000, 100_000]))
        helpers = Helpers(rng.randrange(4))
        native.loops.fill(slots, values, checksums, bool(number % 2), helpers)
        assert checksums.tolist() == [checksum_of(value) for value in values]
        assert all(slot == value[0] for slot, value in zip(slots, values, strict=True))
        memory = [slot.obj for slot in slots]
        for slot, value in zip(slots, values, strict=True):
            slot[:] = bytes(len(slot))
            slot.release()  # after this, the slot may be reused
            value[0].release()
        native.loops.share(helpers.job)
        helpers.join()
        assert all(room.count(0) == len(room) for room in memory), "a late helper wrote all the same"


@pytest.mark.parametrize("loops", ["compiled"], indirect=True)
def test_no_thread_copies_any_more_when_the_call_has_failed(rng, loops):
    slots, values, checksums = batch(rng, 200, 100_000)
    begun = 0
    for number in range(40):
        helpers = Helpers(1, fails_after_s=0.001 * (number % 2))
        checksums[:] = 0
        with pytest.raises(KeyError):
            native.loops.fill(slots, values, checksums, True, helpers)
        seen = checksums.copy()
        helpers.join()
        assert (checksums == seen).all()
        begun += 0 < np.count_nonzero(seen) < len(slots)
    assert begun


@pytest.mark.parametrize("loops", ["compiled"], indirect=True)
def test_threads_that_were_called_copy(rng, loops, monkeypatch):
    threads, share, seen = CopyThreads(2), native.loops.share, []

    def counted(job: object) -> None:
        share(job)
        seen.append(threading.current_thread().name)

    monkeypatch.setattr(native, "loops", SimpleNamespace(share=counted, fill=native.loops.fill))
    slots, values, checksums = batch(rng, 4, 1 << 20)
    call = threads.called(4, 4 << 20)
    waited = threading.Event()

    def call_and_wait(job: object) -> None:
        call(job)
        until_s = time.monotonic() + 10.0
        while not seen and time.monotonic() < until_s:
            time.sleep(0.001)
        waited.set()

    native.loops.fill(slots, values, checksums, True, call_and_wait)
    assert waited.is_set()
    assert seen == ["raykv-copy_0"]
    assert checksums.tolist() == [checksum_of(value) for value in values]
    threads.close()


def test_a_process_that_may_have_no_more_threads_copies_alone(monkeypatch, rng):
    threads = CopyThreads(2)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    slots, values, _ = batch(rng, 4, 1 << 20)
    assert threads.fill(slots, values).tolist() == [checksum_of(value) for value in values]


@pytest.mark.parametrize("loops", ["compiled"], indirect=True)
def test_a_child_by_fork_has_threads_of_its_own(rng, loops):
    """The child is forked while a lock of the parent's executor is held. So the child must not use this executor."""
    threads = CopyThreads(2)
    slots, values, _ = batch(rng, 4, 1 << 20)
    expected = [checksum_of(value) for value in values]
    assert threads.fill(slots, values).tolist() == expected
    with threads._pool._shutdown_lock:
        child = os.fork()
        if not child:
            for slot in slots:
                slot[:] = bytes(len(slot))
            right = True
            for _ in range(100):
                right = right and threads.fill(slots, values).tolist() == expected
            os._exit(0 if right and threading.active_count() == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert threads.fill(slots, values).tolist() == expected
    threads.close()


@pytest.mark.parametrize("loops", ["compiled"], indirect=True)
def test_a_job_is_nothing_else(loops):
    for wrong in (None, 5, object()):
        with pytest.raises((ValueError, TypeError)):
            native.loops.share(wrong)


def test_byte_views_are_taken_as_they_are_and_everything_else_is_made_one(rng):
    plain = [memoryview(bytearray(n + 1)) for n in range(5)]
    views, sizes = all_byte_views(plain, "into", writable=True)
    assert (views, sizes) == ([[view] for view in plain], [1, 2, 3, 4, 5])
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    for odd, size in [
        (bytearray(3), 3),
        (memoryview(bytearray(8)).cast("I"), 8),
        (memoryview(array), 12),
        (array, 12),
        ([bytearray(2), array], 14),
        (memoryview(bytearray()), 0),
        ([], 0),
    ]:
        mixed = [*plain, odd]
        rng.shuffle(mixed)
        views, sizes = all_byte_views(mixed, "into", writable=True)
        assert sizes == [sum(map(len, pieces)) for pieces in views]
        assert sizes[next(place for place, each in enumerate(mixed) if each is odd)] == size
        assert all(view.format == "B" and view.ndim == 1 for pieces in views for view in pieces)
    assert all_byte_views((), "into", writable=True) == ([], [])
    assert all_byte_views([memoryview(b"abc")], "values", writable=False)[1] == [3]


def test_views_that_cannot_be_used_are_named():
    let_go = memoryview(bytearray(9))
    let_go.release()
    for bad in (memoryview(b"abc"), b"abc", memoryview(bytearray(8))[::2], let_go, 5, None):
        with pytest.raises(UsageError, match=r"field 'into\[1\]'"):
            all_byte_views([memoryview(bytearray(4)), bad], "into", writable=True)


def test_every_way_of_a_large_copy_is_tried_and_is_right(rng, loops):
    """The first large copies of a process try all ways in turn. So this test copies in a new process."""
    if native.loops is None or not native.loops.avx2(True):
        pytest.skip("only one way here")
    subprocess.run([sys.executable, "-c", WAYS, str(rng.randrange(1 << 30))], check=True)


WAYS = """
import random, sys, xxhash
from mmap import mmap
import numpy as np
from raykv.memory import native
from tests.support.copies import gather_hashed
from raykv.memory.layout import RECORD
rng = random.Random(int(sys.argv[1]))
room, source = mmap(-1, 1 << 20), memoryview(rng.randbytes(1 << 20))  # a map begins at a page
records, index, columns = np.zeros(1, RECORD), np.zeros(2, np.int32), np.zeros((2, 1), np.uint32)
records["generation"] = 2
reader = native.loops.Reader(records, index, index, np.zeros(1, np.uint64), source, *columns, 0.0, 1)


def read(target, start):
    records["page"], records["nbytes"] = start >> 12, len(target)
    hits, row = np.zeros(1, np.bool_), np.zeros(1, np.int32)
    reader.read(row, records["generation"].copy(), [target], hits, 1, True, None)
    assert hits[0]


for small, large, rounds in ((16 << 10, 64 << 10, 60), (128 << 10, 512 << 10, 40)):
    for number in range(rounds):
        nbytes, to = rng.randrange(small, large), 64 * rng.randrange(512)
        start, before = 4096 * rng.randrange(16), rng.choice([0, 32, rng.randrange(64)])
        part, target = source[start : start + nbytes], memoryview(room)[to + before : to + before + nbytes]
        target[:] = bytes(nbytes)
        around = room[: to + before], room[to + before + nbytes :]
        if number % 2:
            read(target, start)
        else:
            assert gather_hashed(target, [part], stream=True) == xxhash.xxh3_64_intdigest(part)
        assert target == part
        assert (room[: to + before], room[to + before + nbytes :]) == around
"""
