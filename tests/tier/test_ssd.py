"""The SSD tier as its callers see it. Written chunks are there, byte for byte, also after a restart."""

import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from raykv.config import SsdConfig
from raykv.errors import ConfigError
from raykv.tier.base import Chunk, Environment
from raykv.tier.segments import requests
from raykv.tier.segments.format import key_array
from raykv.tier.segments.log import Batch
from raykv.tier.ssd import tier as ssd_tier
from raykv.tier.ssd.recovery import Recovery
from raykv.tier.ssd.workers import Writer
from tests.support.tiers import SEGMENT, Arena, Names, SsdDriver, all_keys, content_of, keys_for, wait_for

SIZES = [1, 100, 4095, 4096, 4097, 65_536, 100_000, SEGMENT // 2]


def test_what_was_written_comes_back_in_all_sizes(tmp_path: Path):
    with SsdDriver(tmp_path).started() as driven:
        (parent,) = keys_for(1, 99)
        for place, nbytes in enumerate(SIZES):
            (key,) = keys_for(1, place)
            chunk = driven.chunk(key, nbytes, depth=place, parent=parent, reads=3, group=1)
            assert driven.write([chunk]) == [True]
            assert driven.has([key]) == [True]
            assert driven.read([key], nbytes) == [content_of(key, nbytes)]
            found = driven.tier.find(key_array([key]))
            assert found == [(nbytes, chunk.checksum, 1, place, parent, 4, 0.0)], "one read more than it came with"
        stats = driven.tier.stats()
        assert stats["state"] == "on"
        assert stats["chunks"] == len(SIZES)
        assert stats["used_nbytes"] == driven.tier.used_nbytes(1) == sum(SIZES)
        assert stats["written_nbytes"] == stats["read_nbytes"] == sum(SIZES)
        assert driven.tier.used_nbytes(0) == 0


@pytest.mark.parametrize("direct", ["try", "never"])
@pytest.mark.parametrize("paths", [1, 3])
def test_a_restart_finds_everything(tmp_path: Path, direct: str, paths: int):
    places = [tmp_path / str(number) for number in range(paths)]
    keys = keys_for(200)
    with SsdDriver(places, direct=direct).started() as driven:
        driven.put(keys, 20_000, group=2, depth=7, expires_s=4e9)
        before = driven.tier.find(key_array(keys))
        assert all(path["segments"] for path in driven.tier.stats()["paths"])
    with SsdDriver(places, direct=direct).started() as driven:
        assert all_keys(driven.tier) == set(keys)
        assert driven.tier.find(key_array(keys)) == before
        added, removed = driven.tier.take_changes()
        assert {row.tobytes() for row in added} == set(keys)
        assert not len(removed)
        for first in range(0, len(keys), 20):
            some = keys[first : first + 20]
            assert driven.read(some, 20_000) == [content_of(key, 20_000) for key in some]


def test_what_is_here_is_not_written_again(tmp_path: Path):
    keys = keys_for(10)
    with SsdDriver(tmp_path).started() as driven:
        driven.put(keys, 5000)
        written = driven.tier.stats()["written_nbytes"]
        assert driven.write([driven.chunk(key, 5000) for key in keys]) == [True] * 10
        assert driven.tier.stats()["written_nbytes"] == written
        (twice,) = keys_for(1, 5)
        assert driven.write([driven.chunk(twice, 5000)] * 2) == [True, False], "it is being written already"
        assert driven.tier.stats()["chunks"] == 11


def test_what_is_not_here_does_not_come(tmp_path: Path):
    keys = keys_for(4)
    with SsdDriver(tmp_path).started() as driven:
        driven.put(keys[:2], 5000)
        assert driven.has(keys) == [True, True, False, False]
        assert driven.read(keys, 5000) == [*(content_of(key, 5000) for key in keys[:2]), None, None]
        assert driven.read(keys[2:], 5000) == [None, None]
        assert driven.tier.find(key_array(keys))[2:] == [None, None]
        assert driven.delete(keys) == 2
        assert driven.read(keys, 5000) == [None] * 4
        assert driven.write([]) == []
        assert driven.has([]) == []


def test_a_chunk_that_is_too_large_is_refused_and_delays_no_other(tmp_path: Path):
    keys = keys_for(3)
    with SsdDriver(tmp_path).started() as driven:
        chunks = [driven.chunk(keys[0], SEGMENT), driven.chunk(keys[1], SEGMENT - 4 * 4096), driven.chunk(keys[2], 10)]
        assert driven.write(chunks) == [False, True, True]
        assert driven.tier.stats()["refused"] == 1


def test_deleted_and_dropped_chunks_stay_away(tmp_path: Path):
    keys = keys_for(60)
    with SsdDriver(tmp_path).started() as driven:
        for group in range(3):
            driven.put(keys[group::3], 9000, group=group)
        driven.tier.take_changes()
        assert driven.delete(keys[:9] + keys[:9]) == 18, "as many as were here, for each key that was asked for"
        assert driven.tier.drop(2) == 17
        assert driven.tier.used_nbytes(2) == 0
        added, removed = driven.tier.take_changes()
        assert len(added) == 0
        assert len(removed) == 9 + 17
        gone = {*keys[:9], *keys[2::3]}
        assert all_keys(driven.tier) == set(keys) - gone
        assert driven.flush(10.0)
        (again,) = keys[:1]
        driven.put([again], 9000)
    with SsdDriver(tmp_path).started() as driven:
        assert all_keys(driven.tier) == (set(keys) - gone) | {again}
        assert driven.read([again], 9000) == [content_of(again, 9000)]


@pytest.mark.slow
def test_dropping_many_chunks_takes_less_than_a_second(tmp_path: Path):
    keys = keys_for(20_000)
    with SsdDriver(tmp_path, capacity_nbytes=256 << 20, segment_nbytes=16 << 20, max_chunks=30_000).started() as driven:
        offset = driven.arena.put(bytes(4096))
        checksum = driven.chunk(keys[0], 4096).checksum
        chunks = [Chunk(key, offset, 4096, checksum, group=number % 2) for number, key in enumerate(keys)]
        assert all(driven.write(chunks))
        assert driven.tier.drop(1) == len(keys) // 2
        assert driven.tier.stats()["chunks"] == len(keys) // 2


def test_expired_chunks_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now_s = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    keys = keys_for(10)
    with SsdDriver(tmp_path).started() as driven:
        driven.put(keys[:5], 5000, expires_s=2000.0)
        driven.put(keys[5:], 5000)
        assert all(driven.has(keys))
        now_s[0] = 2001.0
        assert driven.has(keys) == [False] * 5 + [True] * 5
        assert driven.tier.find(key_array(keys[:5])) == [None] * 5
        assert driven.read(keys[:1], 5000) == [None]
        driven.put(keys[:2], 5000)
        assert driven.has(keys[:3]) == [True, True, False]
    with SsdDriver(tmp_path).started() as driven:
        assert all_keys(driven.tier) == {*keys[:2], *keys[5:]}


@pytest.mark.slow
def test_reclaiming_keeps_chunks_that_are_read_and_drops_the_others(tmp_path: Path):
    nbytes = 30_000
    hot, cold = keys_for(8), keys_for(2000, 1)
    with SsdDriver(tmp_path, capacity_nbytes=8 * SEGMENT).started() as driven:
        driven.put(hot, nbytes)
        for first in range(0, len(cold), 20):
            driven.put(cold[first : first + 20], nbytes)
            assert driven.read(hot, nbytes) == [content_of(key, nbytes) for key in hot]
        stats = driven.tier.stats()
        assert stats["moved_nbytes"] > 0
        assert stats["used_nbytes"] <= stats["capacity_nbytes"]
        assert stats["disk_nbytes"] <= 1.3 * stats["written_nbytes"]
        here = all_keys(driven.tier)
        assert here >= set(hot)
        assert here >= set(cold[-100:])
        assert not here & set(cold[:1000])
    here = all_keys(driven.tier)
    with SsdDriver(tmp_path, capacity_nbytes=20 * SEGMENT).started() as driven:  # so large that nothing is reclaimed
        assert all_keys(driven.tier) == here
        assert driven.read(hot, nbytes) == [content_of(key, nbytes) for key in hot]


@pytest.mark.slow
def test_write_amplification_is_bounded_when_everything_is_read(tmp_path: Path):
    nbytes = 60_000
    with SsdDriver(tmp_path, capacity_nbytes=8 * SEGMENT).started() as driven:
        for salt in range(100):
            keys = keys_for(16, salt)
            driven.put(keys, nbytes)
            assert driven.read(keys, nbytes) == [content_of(key, nbytes) for key in keys]
        stats = driven.tier.stats()
        assert stats["moved_nbytes"] > 0
        assert stats["disk_nbytes"] <= 1.3 * stats["written_nbytes"] * 61_440 / nbytes, "all but the rest of blocks"


def test_quotas_hold_within_a_segment(tmp_path: Path):
    nbytes, quota = 30_000, 2 * SEGMENT
    with SsdDriver(tmp_path).started() as driven:
        driven.put(keys_for(50, 1), nbytes, group=1)
        driven.tier.set_quota(0, quota)
        keys = keys_for(300)
        for first in range(0, len(keys), 20):
            driven.put(keys[first : first + 20], nbytes, group=0)
            assert driven.tier.used_nbytes(0) <= quota + SEGMENT
        assert quota - SEGMENT <= driven.tier.used_nbytes(0)
        assert driven.has(keys[-20:]) == [True] * 20, "the newest stay"
        assert driven.tier.used_nbytes(1) == 50 * nbytes, "others lose nothing"
        driven.tier.set_quota(0, nbytes)
        assert driven.tier.used_nbytes(0) <= SEGMENT
        assert driven.write([driven.chunk(keys_for(1, 7)[0], nbytes + 1)]) == [False]
        assert driven.flush(10.0)
    left = all_keys(driven.tier)
    with SsdDriver(tmp_path).started() as driven:
        assert all_keys(driven.tier) == left


@pytest.mark.slow
def test_rows_run_short_before_space_does(tmp_path: Path):
    keys = keys_for(3000)
    with SsdDriver(tmp_path, max_chunks=256, capacity_nbytes=16 * SEGMENT).started() as driven:
        driven.put(keys, 8000)
        here = all_keys(driven.tier)
        assert len(here) <= 256
        assert keys[-1] in here
        assert driven.read(keys[-1:], 8000) == [content_of(keys[-1], 8000)]


def test_a_full_queue_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "QUEUED_CHUNKS", 8)
    with SsdDriver(tmp_path).started() as driven:
        taken, results = 0, []
        chunks = [driven.chunk(key, 5000) for key in keys_for(100)]
        while taken < len(chunks):
            some = driven.tier.write(chunks[taken:], lambda _, good: results.extend(good))
            assert some <= 16
            taken += some
        wait_for(lambda: len(results) == len(chunks))
        assert all(results)


@pytest.mark.slow
def test_two_processes_on_one_directory_are_refused(tmp_path: Path):
    with SsdDriver(tmp_path).started():
        with pytest.raises(ConfigError, match="another process uses"):
            SsdDriver(tmp_path)
        program = f"""
import sys
from pathlib import Path
from tests.support.tiers import SsdDriver
SsdDriver(Path({str(tmp_path)!r}))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert "ConfigError" in done.stderr
        assert "another process uses" in done.stderr
    SsdDriver(tmp_path).started().tier.close()


@pytest.mark.slow
def test_more_and_fewer_segments_than_before(tmp_path: Path):
    keys = keys_for(400)
    with SsdDriver(tmp_path, capacity_nbytes=16 * SEGMENT).started() as driven:
        driven.put(keys, 30_000)
    with SsdDriver(tmp_path, capacity_nbytes=4 * SEGMENT).started() as driven:
        assert set(keys[-40:]) <= all_keys(driven.tier) <= set(keys), "the oldest are being reclaimed"
        driven.put(keys_for(1000, 1), 30_000)
        wait_for(lambda: driven.tier.stats()["paths"][0]["segments"] <= 4)
        assert len(list(tmp_path.glob("*/*.segment"))) <= 5
        newest = keys_for(1000, 1)[-10:]
    with SsdDriver(tmp_path, segment_nbytes=2 * SEGMENT).started() as driven:  # a new segment size, so it starts empty
        assert not all_keys(driven.tier)
        driven.put(newest, 30_000)
        assert driven.read(newest, 30_000) == [content_of(key, 30_000) for key in newest]


def test_chunks_of_an_unknown_group_are_not_entered(tmp_path: Path):
    with SsdDriver(tmp_path).started() as driven:
        driven.put(keys_for(5), 5000, group=0)
        driven.put(keys_for(5, 1), 5000, group=3)
    forgetful = Names()
    forgetful.texts.pop()
    config = SsdConfig(paths=(tmp_path,), capacity_nbytes=16 * SEGMENT, segment_nbytes=SEGMENT)
    tier = ssd_tier.SsdTier(config, Environment(Arena().view, "raykv-test-n0", forgetful))
    wait_for(lambda: tier.stats()["state"] == "on")
    assert all_keys(tier) == set(keys_for(5))
    tier.close()


def test_after_closing_nothing_is_taken_and_all_are_called_back(tmp_path: Path):
    driven = SsdDriver(tmp_path, capacity_nbytes=64 * SEGMENT).started()
    results: list[bool] = []
    count = 0
    for salt in range(20):
        chunks = [driven.chunk(key, 100_000) for key in keys_for(20, salt)]
        count += driven.tier.write(chunks, lambda _, good: results.extend(good))
    driven.tier.close()
    assert len(results) == count
    written = results.count(True)
    assert driven.tier.write([driven.chunk(keys_for(1)[0], 10)], lambda *_: None) == 0
    assert not driven.tier.read(key_array(keys_for(1)), driven.tier.find(key_array(keys_for(1))), [0], lambda _: None)
    with SsdDriver(tmp_path, capacity_nbytes=64 * SEGMENT).started() as driven:
        assert len(all_keys(driven.tier)) == written


@pytest.mark.slow
def test_several_threads_against_a_dictionary(tmp_path: Path, seed: int):
    """Each thread has its own keys, so it knows which are deleted. No thread ever gets wrong bytes."""
    places = [tmp_path / "a", tmp_path / "b"]
    sizes = [100, 4096, 20_000, 70_000]
    problems: list[str] = []

    def work(number: int, driven: SsdDriver) -> None:
        rng = np.random.default_rng([seed, number])
        keys, deleted = keys_for(150, number), set[bytes]()
        for _ in range(120):
            some = [keys[place] for place in rng.choice(len(keys), 8, replace=False)]
            nbytes = {key: sizes[key[0] % len(sizes)] for key in some}
            action = rng.random()
            if action < 0.45:
                driven.write([driven.chunk(key, nbytes[key]) for key in some])
                deleted -= set(some)
            elif action < 0.9:
                for key in some[:3]:
                    (got,) = driven.read([key], nbytes[key])
                    if got is not None and (key in deleted or got != content_of(key, nbytes[key])):
                        problems.append(f"{key.hex()} is wrong, or was deleted")
            else:
                driven.delete(some)
                deleted |= set(some)
                if any(driven.has(some)):
                    problems.append("deleted, and still here")

    arena = Arena(256 << 20)
    with SsdDriver(places, arena=arena, capacity_nbytes=5 * SEGMENT).started() as driven:
        threads = [threading.Thread(target=work, args=(number, driven)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert driven.tier.stats()["corrupt"] == 0
        assert driven.tier.stats()["errors"] == 0
        assert driven.flush(10.0)
    here = all_keys(driven.tier)
    with SsdDriver(
        places, arena=arena, capacity_nbytes=20 * SEGMENT
    ).started() as driven:  # so large that nothing is reclaimed
        assert all_keys(driven.tier) == here
        for key in here:
            nbytes = sizes[key[0] % len(sizes)]
            assert driven.read([key], nbytes) == [content_of(key, nbytes)]


def test_a_stale_copy_on_one_path_does_not_put_out_the_live_one_on_another(tmp_path: Path, monkeypatch):
    """The tombstone of the stale copy is read last."""
    stale, live = tmp_path / "a", tmp_path / "b"
    (key,), nbytes = keys_for(1), 60_000
    with SsdDriver(stale).started() as driven:
        driven.put([key], nbytes)
        driven.put(keys_for(20, 1), nbytes)  # fill the segment, so that the tombstone is in the next one
        assert driven.delete([key]) == 1
    with SsdDriver(live).started() as driven:
        driven.put([key], nbytes)
    other_on = threading.Event()
    real = Recovery._read

    def read(self: Recovery, number: int, *arguments) -> None:
        """Let the path with the stale copy read its tombstone only when the other path is on."""
        if self._drive.number == 0 and number > 0:
            wait_for(lambda: self._shared.drives[1].state == "on")
            other_on.set()
        real(self, number, *arguments)

    monkeypatch.setattr(Recovery, "_read", read)
    for _ in range(2):  # the second start finds tombstones written by the first start
        other_on.clear()
        with SsdDriver([stale, live]).started() as driven:
            assert all_keys(driven.tier) == {key, *keys_for(20, 1)}
            assert driven.read([key], nbytes) == [content_of(key, nbytes)]
            assert other_on.is_set()
            assert driven.flush(10.0)


def test_a_late_move_does_not_delete_a_chunk_that_was_stored_since(tmp_path: Path, monkeypatch):
    (key,), nbytes = keys_for(1), 60_000
    held, release = threading.Event(), threading.Event()
    real = Writer._write

    def write(self: Writer, batch: Batch) -> None:
        for item in batch.content.items:
            if item.chunk.key == key and item.moved_from >= 0:
                held.set()
                assert release.wait(20.0)
        real(self, batch)

    monkeypatch.setattr(Writer, "_write", write)
    with SsdDriver(tmp_path, capacity_nbytes=8 * SEGMENT).started() as driven:
        driven.put([key], nbytes)
        for salt in range(1, 100):
            assert driven.read([key], nbytes) == [content_of(key, nbytes)]
            if held.wait(0.01):
                break
            driven.tier.write([driven.chunk(each, nbytes) for each in keys_for(8, salt)], lambda *_: None)
        assert held.wait(20.0)
        assert driven.delete([key]) == 1
        assert driven.write([driven.chunk(key, nbytes)]) == [False], "it is being written still"
        release.set()
        wait_for(lambda: driven.write([driven.chunk(key, nbytes)]) == [True])
        assert driven.read([key], nbytes) == [content_of(key, nbytes)]
        assert driven.flush(10.0)
    with SsdDriver(tmp_path, capacity_nbytes=20 * SEGMENT).started() as driven:
        assert driven.read([key], nbytes) == [content_of(key, nbytes)]


def test_the_lock_is_the_directory_s(tmp_path: Path):
    with (
        SsdDriver(tmp_path).started(),
        (tmp_path / "raykv-test-n0" / "lock").open() as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_its_threads_do_not_interrupt_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with SsdDriver(tmp_path).started():
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("raykv-ssd0-")]
        assert threads
        assert {os.sched_getscheduler(thread.native_id) for thread in threads} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER

    def refused(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with SsdDriver(tmp_path).started() as driven:
        assert driven.write([driven.chunk(b"k" * 16, 5000)]) == [True]


@pytest.mark.parametrize("starting", [0, 1])
@pytest.mark.parametrize("how", ["delete", "drop"])
def test_a_chunk_deleted_while_a_path_starts_is_found_on_neither_path(tmp_path: Path, monkeypatch, how, starting):
    first, second = tmp_path / "a", tmp_path / "b"
    (key,), others, nbytes = keys_for(1), keys_for(20, 1), 60_000
    with SsdDriver(first).started() as driven:
        driven.put([key], nbytes, group=1)
        driven.put(others, nbytes)  # more chunks than one segment holds
    with SsdDriver(second).started() as driven:
        driven.put([key], nbytes, group=1)
    one_is_on, deleted = threading.Event(), threading.Event()
    real = Recovery._read

    def read(self: Recovery, number: int, *arguments) -> None:
        if self._drive.number == starting:
            wait_for(lambda: self._shared.drives[1 - starting].state == "on")
            one_is_on.set()
            assert deleted.wait(20.0)
        real(self, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "_read", read)
        with SsdDriver([first, second]) as driven:
            assert one_is_on.wait(20.0)
            assert (driven.delete([key]) if how == "delete" else driven.tier.drop(1)) == 1
            deleted.set()
            driven.started()
            assert all_keys(driven.tier) == set(others)
            assert driven.flush(10.0)
    with SsdDriver([first, second]).started() as driven:
        assert all_keys(driven.tier) == set(others)


def test_spare_chunks_fit_without_removing_others(tmp_path: Path, rng: random.Random):
    """Whatever the sizes and the batches, chunks that `spare_chunks` announces replace nothing."""
    with SsdDriver(tmp_path, capacity_nbytes=12 * SEGMENT).started() as driver:
        here: list[bytes] = []
        while True:
            nbytes = rng.choice([1, 4096, 5000, 60_000, 300_000, 700_000])
            spare = driver.tier.spare_chunks(0, nbytes)
            if not spare:
                break
            keys = keys_for(min(spare, rng.randrange(1, 40)), salt=len(here) + 1)
            for key in keys:
                assert driver.write([driver.chunk(key, nbytes)]) == [True]
            here += keys
        wait_for(lambda: driver.tier._shared.drives[0].log.reclaiming is None)
        assert all(driver.has(here))
        assert driver.tier.used_nbytes() > 4 * SEGMENT
        assert driver.tier.spare_chunks(0, 17 * SEGMENT) == 0


def test_a_quota_and_a_drive_that_is_off_leave_no_spare_chunks(tmp_path: Path):
    with SsdDriver(tmp_path).started() as driver:
        driver.put(keys_for(3), 50_000)
        driver.tier.set_quota(0, 200_000)
        assert [driver.tier.spare_chunks(group, 50_000) > 1 for group in (0, 1)] == [False, True]
        assert driver.tier.spare_chunks(0, 50_000) == 1
        driver.tier._shared.fail_later(driver.tier._shared.drives[0], OSError("gone"))
        assert driver.tier.spare_chunks(1, 50_000) == 0
