"""Bytes in pieces."""

import os
import subprocess
import sys
import threading
from itertools import pairwise
from mmap import mmap

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.errors import UsageError
from raykv.memory import native
from raykv.memory.copying import STREAM_NBYTES, CopyThreads, all_byte_views, checksum_of, copy, gather, scatter, store

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
def test_store_copies_and_hashes(rng, stream):
    """Any alignment and length, and nothing around the target is touched."""
    for _ in range(30):
        nbytes = rng.choice([0, 1, 63, 4095, 4096, 4097, 70_000, (256 << 10) + 1, STREAM_NBYTES + 333])
        source = bytearray(rng.randbytes(nbytes + 64))
        before, behind = rng.randrange(64), rng.randrange(64)
        pieces = cut(memoryview(source)[before : before + nbytes].tobytes(), [rng.randrange(nbytes + 1)] * 2)
        room = bytearray(b"\xaa" * (before + nbytes + behind))
        target = memoryview(room)[before : before + nbytes]
        assert store(target, pieces, stream=stream) == xxhash.xxh3_64_intdigest(b"".join(pieces))
        assert target == b"".join(pieces)
        assert room[:before] + room[before + nbytes :] == b"\xaa" * (before + behind)


def test_shares_cover_everything_once():
    threads = CopyThreads(4)
    seen: list[int] = []
    for parts, shares in [(1, 1), (4, 4), (7, 4), (100, 3)]:
        seen.clear()
        threads.run(lambda first, end: seen.extend(range(first, end)), parts, shares)
        assert sorted(seen) == list(range(parts))
    assert threads.share(100, 1 << 30) == 4
    assert threads.share(2, 1 << 30) == 2
    assert threads.share(100, 1000) == 1
    threads.close()


def test_a_share_that_fails_is_told_when_all_have_ended():
    threads = CopyThreads(3)
    ended = []

    def task(first: int, end: int) -> None:
        if first == 1:
            raise KeyError(first)
        ended.append(first)

    with pytest.raises(KeyError):
        threads.run(task, 3, 3)
    assert sorted(ended) == [0, 2]
    threads.close()


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


def test_views_that_will_not_do_are_named():
    let_go = memoryview(bytearray(9))
    let_go.release()
    for bad in (memoryview(b"abc"), b"abc", memoryview(bytearray(8))[::2], let_go, 5, None):
        with pytest.raises(UsageError, match=r"field 'into\[1\]'"):
            all_byte_views([memoryview(bytearray(4)), bad], "into", writable=True)


def test_every_way_of_a_large_copy_is_tried_and_is_right(rng, loops):
    if native.copy is None or native.quickest is None:
        pytest.skip("only one way without the compiled loops")
    room, source = mmap(-1, 128 << 10), memoryview(rng.randbytes(128 << 10))  # a map begins at a page
    for number in range(2200):  # each way is tried at least once in 1024 copies, and in 1024 stores
        nbytes, to = rng.randrange(16 << 10, 64 << 10), 64 * rng.randrange(512)
        start, before = rng.randrange(64 << 10), rng.choice([0, 32, rng.randrange(64)])
        part, target = source[start : start + nbytes], memoryview(room)[to + before : to + before + nbytes]
        target[:] = bytes(nbytes)
        around = room[: to + before], room[to + before + nbytes :]
        if number % 2:
            native.copy(target, part, True)
        else:
            assert store(target, [part], stream=True) == xxhash.xxh3_64_intdigest(part)
        assert target == part
        assert (room[: to + before], room[to + before + nbytes :]) == around
    assert set(native.quickest(16 << 10)) <= {"fetched", "pages", "plain"}


def test_copy_threads_keep_off_the_core_of_their_caller():
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("one core only")
    threads = CopyThreads(2)
    allowed: list[set[int]] = []

    def cores_of_the_thread() -> set[int]:
        both = threading.Barrier(2, timeout=10.0)

        def task(first: int, end: int) -> None:
            both.wait()
            if threading.current_thread() is not threading.main_thread():
                allowed.append(os.sched_getaffinity(0))

        threads.run(task, 2, 2)
        return allowed[-1]

    try:
        assert len(cores_of_the_thread()) == len(mine) - 1
        for core in sorted(mine) * 2:
            os.sched_setaffinity(0, {core})
            assert cores_of_the_thread() == mine - {core}
        bound = CopyThreads(2)  # begun where there is one core: it stays there
        threads.close()
        threads = bound
        assert cores_of_the_thread() == {core}
    finally:
        os.sched_setaffinity(0, mine)
        threads.close()


SMALL_COPIES = """
from mmap import mmap
from raykv.memory import native
from raykv.memory.copying import store
target, source = memoryview(mmap(-1, 1 << 20)), memoryview(bytes(1 << 20))  # a map begins at a page
few, some = target[: 64 << 10], source[: 64 << 10]
for _ in range(2048):
    native.copy(few, some, True), store(few, [some], stream=True)
assert None not in native.quickest(64 << 10) and set(native.quickest(4 << 20)) == {None}
for _ in range(64):
    native.copy(target, source, True), store(target, [source], stream=True)
assert None not in native.quickest(4 << 20)
"""


def test_small_copies_do_not_decide_how_large_ones_are_made(loops):
    if native.copy is None or native.vectors is None or not native.vectors(512):
        pytest.skip("only one way here")
    subprocess.run([sys.executable, "-c", SMALL_COPIES], check=True)
