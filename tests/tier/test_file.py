"""Packs in a shared directory. Every node finds the chunks of all nodes, and failures cost only misses."""

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

import raykv
from raykv.config import FileTierConfig
from raykv.errors import ConfigError
from raykv.tier.file import folder, state, writing
from raykv.tier.file import tier as file_tier
from raykv.tier.file.folder import Folder
from raykv.tier.file.scanning import Scanner
from raykv.tier.segments import requests
from raykv.tier.segments.format import key_array
from tests.support.soak import soak
from tests.support.tiers import BLOCK, PACK, Arena, FileDriver, all_keys, keys_for, wait_for


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RETRY_S", 0.1)
    monkeypatch.setattr(writing, "TOMBSTONES_S", 0.02)


def used_nbytes(folder: Path) -> int:
    """Return the bytes on disk of all files in a folder. Other processes may remove files meanwhile."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


# -- what is written is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes",
    [
        1,
        *(pytest.param(nbytes, marks=pytest.mark.slow) for nbytes in (100, BLOCK - 1, BLOCK, 1 << 18)),
        BLOCK + 1,
        70_000,
        PACK - 4 * BLOCK,
    ],
)
def test_what_is_written_is_read_at_once_and_by_others(tmp_path, nbytes):
    keys = keys_for(5)
    with FileDriver(tmp_path, seal_s=0.05).on() as one, FileDriver(tmp_path, "b").on() as other:
        one.put(keys, nbytes)
        assert one.right(keys, nbytes) == [True] * 5
        other.sees(keys)
        assert other.right(keys[::-1], nbytes) == [True] * 5
        assert one.tier.stats()["written_nbytes"] == 5 * nbytes
        assert other.tier.used_nbytes() == one.tier.used_nbytes() == 5 * nbytes
        assert other.tier.used_nbytes(0) == 5 * nbytes
        assert other.tier.used_nbytes(1) == 0


def test_what_a_chunk_is_made_of_comes_back(tmp_path):
    keys = keys_for(2)
    until_s = time.time() + 1000.0
    with FileDriver(tmp_path).on() as one, FileDriver(tmp_path, "b").on() as other:
        one.write([one.chunk(keys[1], 5000, group=2, depth=7, parent=keys[0], reads=3, expires_s=until_s)])
        other.sees([keys[1]])
        for each in (one, other):
            found = each.tier.find(key_array(keys))
            assert found[0] is None
            assert found[1] is not None
            assert (found[1].nbytes, found[1].group, found[1].depth) == (5000, 2, 7)
            assert (found[1].parent, found[1].reads, found[1].expires_s) == (keys[0], 3, until_s)


def test_each_node_reports_its_own_packs_alone(tmp_path):
    keys = keys_for(6)
    with FileDriver(tmp_path).on() as one, FileDriver(tmp_path, "b").on() as other:
        one.put(keys[:4], 5000)
        other.put(keys[4:], 5000)
        other.sees(keys)
        one.sees(keys)
        assert all_keys(one.tier) == set(keys[:4])
        assert all_keys(other.tier) == set(keys[4:])
        added, removed = one.tier.take_changes()
        assert {key.tobytes() for key in added} == set(keys[:4])
        assert not len(removed)
        one.delete(keys[2:])
        assert {key.tobytes() for key in one.tier.take_changes()[1]} == set(keys[2:4])


def test_what_is_too_large_or_there_already_is_not_written(tmp_path):
    keys = keys_for(3)
    with FileDriver(tmp_path).on() as one:
        assert one.write([one.chunk(keys[0], PACK), one.chunk(keys[1], 5000)]) == [False, True]
        before = one.tier.stats()["disk_nbytes"]
        assert one.write([one.chunk(keys[1], 5000), one.chunk(keys[1], 5000)]) == [True, True]
        assert one.tier.stats()["disk_nbytes"] <= before + 2 * BLOCK  # a summary may have been written


def test_a_start_finds_what_was_written_before_by_anybody(tmp_path):
    keys = keys_for(40)
    with FileDriver(tmp_path, seal_s=60.0).on() as one:
        one.put(keys, 60_000)
        packs = len(one.packs())
        assert packs >= 2
    assert len(list(one.folder.glob("*.part"))) == 0
    assert len(one.packs()) == packs + 1
    for writer in ("a", "stranger"):
        with FileDriver(tmp_path, writer).on() as later:
            later.sees(keys)
            assert later.right(keys, 60_000) == [True] * 40
            assert all_keys(later.tier) == (set(keys) if writer == "a" else set())


def test_a_pack_is_published_when_it_is_old_enough(tmp_path):
    with FileDriver(tmp_path, seal_s=0.1).on() as one:
        one.put(keys_for(1), 5000)
        wait_for(lambda: len(one.packs()) == 1)
        assert one.right(keys_for(1), 5000) == [True]
        assert one.packs()[0].stat().st_size == PACK
        assert one.packs()[0].stat().st_blocks * 512 < 8 * BLOCK, "what is not filled takes no room"


def test_of_two_copies_the_later_one_stays_when_the_other_goes(tmp_path):
    key = keys_for(1)
    with FileDriver(tmp_path, seal_s=60.0).on() as one, FileDriver(tmp_path, "b", seal_s=60.0).on() as other:
        one.put(key, 5000)
        other.put(key, 5000)
    with FileDriver(tmp_path, "c").on() as third:
        third.sees(key)
        third.packs()[0].unlink()
        wait_for(lambda: third.tier.stats()["packs"] == 1)
        assert third.right(key, 5000) == [True]


def test_with_too_few_rows_the_newest_packs_are_known(tmp_path):
    keys = keys_for(300)
    with FileDriver(tmp_path, max_chunks=100).on() as one:
        for first in range(0, 300, 30):
            one.put(keys[first : first + 30], 20_000)
        assert one.tier.stats()["chunks"] <= 100
        assert all(one.has(keys[-30:]))
    with FileDriver(tmp_path, "b", max_chunks=100).on() as other:
        other.sees(keys[-30:])


# -- deleted and dropped --------------------------------------------------------------------------------------------


def test_what_is_deleted_stays_so_for_others_and_after_a_restart(tmp_path):
    keys = keys_for(30)
    with FileDriver(tmp_path).on() as one, FileDriver(tmp_path, "b").on() as other:
        one.put(keys[:20], 20_000)
        other.put(keys[20:], 20_000)
        one.sees(keys)
        other.sees(keys)
        assert one.delete(keys[10:25]) == 15
        assert not any(one.has(keys[10:25]))
        other.sees(keys[10:25], here=False)
        assert all(other.has(keys[:10] + keys[25:]))
    with FileDriver(tmp_path, "c").on() as later:
        later.sees(keys[:10] + keys[25:])
        assert not any(later.has(keys[10:25]))


def test_what_is_stored_again_after_it_was_deleted_is_there(tmp_path):
    keys = keys_for(4)
    with FileDriver(tmp_path, seal_s=60.0).on() as one, FileDriver(tmp_path, "b").on() as other:
        for _ in range(3):
            one.put(keys, 5000)
            assert one.delete(keys) == 4
            assert one.right(keys, 5000) == [False] * 4
        one.put(keys[:2], 5000)
        # Wait until `other` knows the tombstones. Before that, `other` takes keys[2] for stored, and does not write it.
        wait_for(
            lambda: (
                not one.tier._catalog.tombstones.pending
                and other.tier._catalog.tombstones.latest == one.tier._catalog.tombstones.latest
            )
        )
        other.put(keys[2:3], 5000)
        assert one.right(keys[:2], 5000) == [True] * 2
    with FileDriver(tmp_path, "c").on() as later:
        later.sees(keys[:3])
        assert later.right(keys, 5000) == [True, True, True, False]


def test_a_dropped_group_stays_dropped_and_may_store_again(tmp_path):
    keys = keys_for(20)
    with FileDriver(tmp_path).on() as one, FileDriver(tmp_path, "b").on() as other:
        one.put(keys[:10], 5000, group=1)
        one.put(keys[10:15], 5000, group=2)
        other.sees(keys[:15])
        assert other.tier.drop(1) == 10
        one.sees(keys[:10], here=False)
        one.put(keys[15:], 5000, group=1)
        assert all(one.has(keys[10:]))
    with FileDriver(tmp_path, "c").on() as later:
        later.sees(keys[10:])
        assert not any(later.has(keys[:10]))
        assert later.tier.used_nbytes(1) == 5 * 5000


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_a_chunk_deleted_before_its_pack_was_read_is_not_found(tmp_path, monkeypatch, how):
    keys, learn, may = keys_for(10), Scanner._learn, threading.Event()
    gone, left = (keys[:4], keys[4:]) if how == "delete" else (keys, [])
    with FileDriver(tmp_path).on() as one:
        one.put(keys, 5000, group=1)

    def late(self, name):
        assert may.wait(10.0)
        return learn(self, name)

    monkeypatch.setattr(Scanner, "_learn", late)
    with FileDriver(tmp_path) as later:
        assert (later.delete(gone) if how == "delete" else later.tier.drop(1)) == 0, "it does not know of them"
        may.set()
        wait_for(lambda: later.tier.stats()["packs"] == 1)
        assert not any(later.has(gone))
        later.sees(left)
        wait_for(lambda: not later.tier._catalog.tombstones.pending)
        assert not any(later.has(gone))
    with FileDriver(tmp_path, "c").on() as third:
        wait_for(lambda: third.tier.stats()["packs"] == 1)
        third.sees(left)
        assert not any(third.has(gone))


def test_a_part_without_chunks_closes_its_file_once(tmp_path, monkeypatch):
    """When `seal` is tried again, the number of the closed descriptor may already belong to another file."""
    directory = Folder(tmp_path, "a")
    directory.prepare()
    filling, remove = writing.Part(directory, 7, nbytes=PACK), Folder.remove
    monkeypatch.setattr(Folder, "remove", lambda self, name: (_ for _ in ()).throw(OSError(errno.EIO, "gone away")))
    with pytest.raises(OSError, match="gone away"):
        filling.seal()
    monkeypatch.setattr(Folder, "remove", remove)
    with open(os.devnull) as other:
        assert filling.seal() is None
        filling.close()
        assert os.fstat(other.fileno())


def test_tombstones_are_written_though_a_failed_attempt_left_its_part(tmp_path, monkeypatch):
    keys, write, broken = keys_for(4), folder.write_all, [True]

    def once(fd, pieces, offset):
        if broken and os.readlink(f"/proc/self/fd/{fd}").endswith(".part") and len(pieces) == 1:
            broken.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, pieces, offset)

    with FileDriver(tmp_path).on() as one:
        one.put(keys, 5000)
        wait_for(lambda: one.tier._state.filling is None)  # until the part is sealed
        monkeypatch.setattr(folder, "write_all", once)
        monkeypatch.setattr(Folder, "remove", lambda self, name: None)
        assert one.delete(keys[:2]) == 2
        wait_for(lambda: not broken and not one.tier._catalog.tombstones.pending)
        one.on()
    with FileDriver(tmp_path, "b").on() as later:
        later.sees(keys[2:])
        assert not any(later.has(keys[:2]))


def test_what_is_deleted_while_it_is_written_is_not_there(tmp_path, monkeypatch):
    key, real, going, gone = keys_for(1), os.pwritev, threading.Event(), threading.Event()

    def slow(*given):
        going.set()
        gone.wait(5.0)
        return real(*given)

    with FileDriver(tmp_path).on() as one:
        monkeypatch.setattr(os, "pwritev", slow)
        done = threading.Event()
        results = []
        assert one.tier.write([one.chunk(key[0], 5000)], lambda chunks, good: (results.extend(good), done.set())) == 1
        assert going.wait(5.0)
        one.delete(key)
        gone.set()
        assert done.wait(5.0)
        assert results == [False]
        assert one.has(key) == [False]
    with FileDriver(tmp_path, "b").on() as later:
        time.sleep(0.2)
        assert later.has(key) == [False]


@pytest.mark.slow
def test_tombstone_files_stay_few_and_are_removed_when_nothing_older_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "TOMBSTONES_S", 0.0)
    monkeypatch.setattr(writing, "MERGE_FILES", 4)
    keys = keys_for(40)
    with FileDriver(tmp_path, seal_s=0.2).on() as one:
        one.put(keys, 5000)
        wait_for(lambda: len(one.packs()) == 1)
        for key in keys[:30]:
            one.delete([key])
            wait_for(lambda: not one.tier._catalog.tombstones.pending)
        assert 1 <= len(list(one.folder.glob("*.tombs"))) <= 6
        with FileDriver(tmp_path, "b").on() as other:
            other.sees(keys[30:])
            assert not any(other.has(keys[:30]))
        one.packs()[0].unlink()
        wait_for(lambda: not list(one.folder.iterdir()))
        wait_for(lambda: not one.tier._catalog.tombstones._keys)


# -- making room ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_packs_that_were_used_longest_ago_go_first(tmp_path):
    keys = [keys_for(16, number) for number in range(8)]  # one pack holds 16 chunks of 60 000 bytes
    with FileDriver(tmp_path, capacity_nbytes=6 * PACK, scan_s=60.0).on() as one:
        for number in range(4):
            one.put(keys[number], 60_000)
        wait_for(lambda: len(one.packs()) == 4)
        packs = one.packs()
        for age, pack in enumerate(packs):
            os.utime(pack, (time.time() - 100 + age,) * 2)
        assert all(one.right(keys[0], 60_000))
        wait_for(lambda: packs[0].stat().st_mtime > time.time() - 30)
        for number in range(4, 7):
            one.put(keys[number], 60_000)
            wait_for(lambda: not list(one.folder.glob("*.part")))
        assert [all(one.has(some)) for some in keys[:7]] == [True, False, True, True, True, True, True]
        assert [any(one.has(some)) for some in keys[:3]] == [True, False, True]
        assert one.tier.stats()["packs_removed"] == 1


@pytest.mark.slow
def test_the_directory_keeps_within_its_capacity(tmp_path):
    keys = keys_for(400)
    with FileDriver(tmp_path, capacity_nbytes=5 * PACK, seal_s=0.2).on() as one:
        for first in range(0, 400, 10):
            one.put(keys[first : first + 10], 60_000)
            assert used_nbytes(one.folder) <= 5 * PACK
        wait_for(lambda: not list(one.folder.glob("*.part")))
        assert one.tier.stats()["packs_removed"] > 10
        assert 3 * PACK <= used_nbytes(one.folder) <= 5 * PACK
        assert all(one.has(keys[-20:]))


# -- other processes ------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time, os, threading
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support import tiers
from raykv.tier.file import writing
writing.TOMBSTONES_S = 0.02
path, writer, salt, count, size, capacity = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:7])
with tiers.FileDriver(path, writer, capacity_nbytes=capacity, seal_s=0.2).on() as tier:
    keys = tiers.keys_for(count, salt)
    print("ready", flush=True)
    for first in range(0, count, 8):
        good = tier.write([tier.chunk(key, size) for key in keys[first : first + 8]])
        os.write(1, f"{{first}} {{sum(good)}}\\n".encode())  # a line is there as a whole, or not at all
    print("done", flush=True)
    sys.stdin.read()
"""


def child(path: Path, writer: str, salt: int, count: int, size: int, capacity: int = 64 * PACK) -> subprocess.Popen:
    """Start a process that writes chunks, and then waits until its input ends."""
    program = PROGRAM.format(root=str(Path(raykv.__file__).parents[1]))
    arguments = [str(path), writer, *map(str, (salt, count, size, capacity))]
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen) -> None:
    process.communicate(timeout=20.0)
    assert process.returncode == 0


@pytest.mark.slow
def test_two_processes_see_what_each_other_writes(tmp_path):
    with FileDriver(tmp_path).on() as one:
        process = child(tmp_path, "b", 1, 60, 30_000)
        one.put(keys_for(60), 30_000)
        one.sees(keys_for(60, 1))
        assert one.right(keys_for(60, 1), 30_000) == [True] * 60
        end(process)


def kill_and_look(path: Path, rng: random.Random, number: int) -> None:
    process = child(path, "n0", number, 4000, 20_000, 1000 * PACK)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(rng.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    whole, _, _ = process.stdout.read().rpartition("\n")
    said = [line.split() for line in whole.splitlines() if line != "done"]
    process.wait()
    if process.stdin:
        process.stdin.close()
    process.stdout.close()
    written = sum(int(words[1]) for words in said)
    keys = keys_for(4000, number)
    with FileDriver(path, "n0", capacity_nbytes=1000 * PACK).on() as after:
        wait_for(lambda: not list(after.folder.glob("*.part")))
        wait_for(lambda: after.tier.stats()["packs"] == len(after.packs()))
        here = after.has(keys)
        assert all(here[:written]), "chunks reported as written are there"
        assert after.right(keys[:written], 20_000) == [True] * written
        after.right(keys[written : written + 100], 20_000)
    shutil.rmtree(path / "raykv")


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_chunks(tmp_path, rng):
    for number in range(2):
        kill_and_look(tmp_path, rng, number)


@pytest.mark.soak
def test_a_writer_is_killed_at_many_moments(tmp_path, rng):
    for number in range(soak("kills", 40)):
        kill_and_look(tmp_path, rng, number)


@pytest.mark.slow
def test_several_that_make_room_at_once_do_not_empty_the_directory(tmp_path):
    capacity = 12 * PACK
    processes = [child(tmp_path, f"w{number}", number, 600, 60_000, capacity) for number in range(2)]
    lowest, highest, full = 1 << 60, 0, False
    while not all(process.poll() is not None or said_done(process) for process in processes):
        folder = tmp_path / "raykv"
        if not folder.exists():
            continue
        now = used_nbytes(folder)
        full = full or now > capacity - 3 * PACK
        if full:
            lowest, highest = min(lowest, now), max(highest, now)
        time.sleep(0.01)
    for process in processes:
        end(process)
    assert full
    # Less than the capacity is used: each process leaves space for the part that it fills, and removes whole packs,
    # perhaps one too many.
    assert lowest >= capacity - 5 * PACK
    assert highest <= capacity + PACK, "the part that the other one has just begun"


def said_done(process: subprocess.Popen) -> bool:
    """Read the output so far. Returns whether the process has written all chunks."""
    if not hasattr(process, "said"):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        process.said = ""  # type: ignore[attr-defined]
    with contextlib.suppress(BlockingIOError):
        process.said += os.read(process.stdout.fileno(), 1 << 16).decode()  # type: ignore[attr-defined, union-attr]
    return "done" in process.said  # type: ignore[attr-defined]


# -- damage ---------------------------------------------------------------------------------------------------------


def hurt(victim: Path, rng: random.Random) -> int:
    """Cut a file, or flip some of its bits. Returns the number of flipped bits, or 0 if the file was cut."""
    size, flips = victim.stat().st_size, rng.choice((0, 1, 1, 100))
    if not flips:
        os.truncate(victim, rng.randrange(size))
    with victim.open("r+b") as opened:
        for _ in range(flips):
            place = rng.choice((rng.randrange(size), rng.randrange(min(size, 100_000)), size - 1 - rng.randrange(4096)))
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return flips


def damage(path: Path, rng: random.Random, rounds: int) -> None:
    nbytes, keys = 9000, keys_for(100)
    with FileDriver(path / "whole").on() as one:
        one.put(keys, nbytes)
        one.delete(keys[:3])
    for _ in range(rounds):
        shutil.copytree(path / "whole", path / "hurt")
        files = sorted((path / "hurt/raykv").iterdir())
        count, victim = len(files) - 1, rng.choice(files)
        flips = hurt(victim, rng)
        with FileDriver(path / "hurt", "b").on() as later:
            wait_for(lambda later=later, count=count: later.tier.stats()["packs"] == count)
            if victim.suffix != ".tombs":
                wait_for(lambda later=later: later.tier._catalog.tombstones.latest > 0)
            arrived = later.right(keys, nbytes)
            assert later.state == "on"
            assert victim.suffix == ".tombs" or not any(arrived[:3])
            assert flips != 1 or sum(arrived[3:]) >= 96, "one bit is in one chunk, or in what is there twice"
        shutil.rmtree(path / "hurt")


def test_damaged_files_cost_misses_only(tmp_path, rng):
    damage(tmp_path, rng, 12)


@pytest.mark.soak
def test_files_damaged_at_many_places_cost_misses_only(tmp_path, rng):
    damage(tmp_path, rng, soak("damage", 200))


def test_all_before_a_cut_is_served(tmp_path):
    keys = keys_for(20)
    with FileDriver(tmp_path, seal_s=60.0).on() as one:
        for key in keys:  # one batch per chunk: 4096 bytes for the record, and 8192 for the chunk
            one.put([key], 8000)
    pack = one.packs()[0]
    os.truncate(pack, 10 * 3 * BLOCK + 100)
    with FileDriver(tmp_path, "b").on() as later:
        later.sees(keys[:10])
        assert later.right(keys, 8000) == [True] * 10 + [False] * 10
        assert later.tier.stats()["corrupt"] == 0


def test_a_wrong_bit_in_a_chunk_is_a_miss_and_the_chunk_is_dropped(tmp_path):
    keys = keys_for(3)
    with FileDriver(tmp_path).on() as one:
        one.put(keys, 4096)
    with one.packs()[0].open("r+b") as opened:
        opened.seek(2 * BLOCK + 77)
        opened.write(b"\xff\x00\xff")
    with FileDriver(tmp_path, "b").on() as later:
        later.sees(keys)
        assert later.right(keys, 4096) == [True, False, True]
        assert later.tier.stats()["corrupt"] == 1
        assert later.has(keys) == [True, False, True]


def test_stale_parts_are_removed(tmp_path):
    folder = Folder(tmp_path, "dead")
    folder.prepare()
    old, fresh = folder.name(time.time_ns() - 10**15, "part"), folder.name(time.time_ns(), "part")
    for name in (old, fresh):
        (folder.path / str(name)).write_bytes(bytes(BLOCK))
    os.utime(folder.path / str(old), (1.0, 1.0))
    (folder.path / "something else").write_text("not ours")
    with FileDriver(tmp_path, "b").on():
        wait_for(lambda: not (folder.path / str(old)).exists())
        assert (folder.path / str(fresh)).exists()
    with FileDriver(tmp_path, "dead").on():
        wait_for(lambda: not (folder.path / str(fresh)).exists())
    assert (folder.path / "something else").exists()


def test_two_of_one_name_leave_each_other_s_parts_alone(tmp_path):
    keys = keys_for(4)
    with FileDriver(tmp_path, seal_s=60.0).on() as one:
        one.put(keys[:2], 5000)
        with FileDriver(tmp_path).on() as other:
            other.put(keys[2:], 5000)
            assert other.has(keys) == [False, False, True, True]
            assert len(list(one.folder.glob("*.part"))) == 2
        one.sees(keys)


# -- file systems that fail -----------------------------------------------------------------------------------------


def test_what_vanishes_costs_misses(tmp_path):
    keys = keys_for(40)
    with FileDriver(tmp_path).on() as one, FileDriver(tmp_path, "b", scan_s=60.0).on() as blind:
        one.put(keys, 60_000)
        wait_for(lambda: not list(one.folder.glob("*.part")))
        with FileDriver(tmp_path, "c").on() as other:
            other.sees(keys)
            gone = one.packs()[0]
            gone.unlink()
            arrived = other.right(keys, 60_000)
            assert 0 < sum(arrived) < 40
            assert other.has(keys) == arrived
            one_has = one.has
            wait_for(lambda: one_has(keys) == arrived)
        assert blind.state == "on"


@pytest.mark.slow
def test_a_directory_that_is_removed_turns_it_off_until_it_is_back(tmp_path):
    keys = keys_for(10)
    root = tmp_path / "mount"
    with FileDriver(root).on() as one:
        one.put(keys, 5000)
        shutil.rmtree(root)
        wait_for(lambda: one.state == "off")
        assert "No such file" in one.tier.stats()["reason"]
        assert one.tier.write([one.chunk(keys[0], 5000)], lambda chunks, good: None) == 0
        assert not any(one.has(keys))
        time.sleep(0.3)
        assert not root.exists(), "the mount point is not made again"
        root.mkdir()
        one.on()
        wait_for(lambda: one.tier.stats()["chunks"] == 0)
        one.put(keys, 5000)
        assert one.right(keys, 5000) == [True] * 10


@pytest.mark.slow
def test_a_full_file_system_turns_it_off_for_writing_alone(tmp_path):
    keys = keys_for(40)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with FileDriver(tmp_path).on() as one:
        one.put(keys[:10], 30_000)
        wait_for(lambda: len(one.packs()) == 1)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
            with contextlib.suppress(AssertionError):
                one.write([one.chunk(key, 30_000) for key in keys[10:30]], timeout_s=0.5)
            wait_for(lambda: one.state == "off")
            assert one.tier.stats()["reason"]
            assert one.right(keys[:10], 30_000) == [True] * 10
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        one.on()
        one.put(keys[30:], 30_000)
        assert one.right(keys[30:], 30_000) == [True] * 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB. The test is skipped if it cannot be mounted."""
    root = tmp_path / "disk"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(root)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_full_disk(small_disk):
    keys = keys_for(200)
    with FileDriver(small_disk, capacity_nbytes=32 * PACK).on() as one:
        with contextlib.suppress(AssertionError):
            one.write([one.chunk(key, 60_000) for key in keys], timeout_s=0.5)
        wait_for(lambda: one.state == "off")
        assert "No space left" in one.tier.stats()["reason"]
        here = [key for key, is_here in zip(keys, one.has(keys), strict=True) if is_here]
        assert len(here) > 20
        assert one.right(here, 60_000) == [True] * len(here)
        one.packs()[0].unlink()
        one.on()


def test_a_read_only_file_system_is_read(small_disk):
    keys = keys_for(10)
    with FileDriver(small_disk).on() as one:
        one.put(keys, 5000)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with FileDriver(small_disk, "b") as later:
        wait_for(lambda: later.state == "off")
        later.sees(keys)
        assert "Read-only" in later.tier.stats()["reason"]
        assert later.right(keys, 5000) == [True] * 10
        assert later.delete(keys[:2]) == 2
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        later.on()
    with FileDriver(small_disk, "c").on() as third:
        third.sees(keys[2:])
        assert not any(third.has(keys[:2]))


def test_a_path_that_is_none_does_not_stop_a_start(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with FileDriver(tmp_path / "file") as one:
        wait_for(lambda: one.state == "off")
        assert one.tier.write([one.chunk(keys_for(1)[0], 5000)], lambda chunks, good: None) == 0
        assert not one.tier.read(
            key_array(keys_for(1)), one.tier.find(key_array(keys_for(1))), [0], lambda arrived: None
        )


def test_a_read_only_directory_that_holds_too_much_is_read(small_disk):
    keys = keys_for(30)
    with FileDriver(small_disk).on() as one:
        one.put(keys, 60_000)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with FileDriver(small_disk, "b", capacity_nbytes=256 << 10, pack_nbytes=64 << 10) as later:
        later.sees(keys)
        wait_for(lambda: later.tier.stats()["errors"] > 2)
        assert later.right(keys, 60_000) == [True] * 30


def test_a_read_error_turns_it_off_for_a_while(tmp_path, monkeypatch):
    keys, real, broken = keys_for(10), os.preadv, [True]

    def bad(*given):
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*given)

    with FileDriver(tmp_path).on() as one:
        one.put(keys, 5000)
        monkeypatch.setattr(state, "RETRY_S", 0.3)
        monkeypatch.setattr(os, "preadv", bad)
        assert one.right(keys[:2], 5000) == [False] * 2
        assert one.state == "off"
        assert "Input/output" in one.tier.stats()["reason"]
        assert not one.tier.read(key_array(keys), one.tier.find(key_array(keys)), [0] * 10, lambda arrived: None)
        broken[0] = False
        one.on()
        assert one.right(keys[2:], 5000) == [True] * 8


def test_what_is_being_written_is_not_given_back_before_its_time(tmp_path, monkeypatch):
    keys, real, block, done = keys_for(8), os.pwritev, threading.Event(), []

    def slow(*given):
        block.wait(10.0)
        return real(*given)

    def bad(*given):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with FileDriver(tmp_path).on() as one:
        one.put(keys[:2], 5000)
        monkeypatch.setattr(os, "pwritev", slow)
        one.tier.write([one.chunk(keys[2], 5000)], lambda chunks, good: done.append(list(good)))
        wait_for(lambda: not one.tier._state.queue)
        one.tier.write([one.chunk(keys[3], 5000)], lambda chunks, good: done.append(list(good)))
        monkeypatch.setattr(os, "preadv", bad)
        assert one.right(keys[:1], 5000) == [False]
        wait_for(lambda: done == [[False]])
        block.set()
        wait_for(lambda: done == [[False], [True]])


def test_without_locks_two_of_one_name_still_read_right_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "lock", lambda fd: True)
    monkeypatch.setattr(writing, "lock", lambda fd: True)
    keys = keys_for(60)
    with FileDriver(tmp_path, seal_s=60.0).on() as one:
        one.put(keys[:10], 30_000)
        with FileDriver(tmp_path).on() as other:
            other.sees(keys[:10])
            one.put(keys[10:], 30_000)
            assert one.right(keys, 30_000) == [True] * 60
            other.right(keys, 30_000)
    with FileDriver(tmp_path, "c").on() as later:
        later.sees(keys)
        assert later.right(keys, 30_000) == [True] * 60


@pytest.mark.parametrize("call", ["pwritev", "preadv", "fsync"])
def test_no_call_waits_for_a_slow_file_system(tmp_path, monkeypatch, call):
    keys, real, block = keys_for(8), getattr(os, call), threading.Event()

    def slow(*given):
        block.wait(10.0)
        return real(*given)

    with FileDriver(tmp_path, io_timeout_s=0.1, seal_s=0.1, scan_s=60.0).on() as one:
        one.put(keys[:4], 5000)
        monkeypatch.setattr(os, call, slow)
        done = []
        one.tier.write([one.chunk(key, 5000) for key in keys[4:]], lambda chunks, good: done.append(list(good)))
        one.tier.read(
            key_array(keys[:4]),
            one.tier.find(key_array(keys[:4])),
            [0, 8192, 16384, 24576],
            lambda arrived: done.append(list(arrived)),
        )
        wait_for(lambda: one.state == "slow")
        assert "longer than 0.1 s" in one.tier.stats()["reason"]
        began_s = time.monotonic()
        assert one.tier.write([one.chunk(xxhash.xxh3_128_digest(b"x"), 5000)], lambda chunks, good: None) == 0
        assert not one.tier.read(key_array(keys[:4]), one.tier.find(key_array(keys[:4])), [0] * 4, lambda arrived: None)
        one.has(keys)
        one.tier.find(key_array(keys))
        one.delete(keys[3:4])
        one.tier.take_changes()
        assert time.monotonic() - began_s < 0.1
        block.set()
        monkeypatch.setattr(os, call, real)
        one.on()
        wait_for(lambda: len(done) == 2)
        assert [True] * 4 in done
        assert one.tier.stats()["timeouts"] >= 1


def test_close_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(file_tier, "CLOSE_S", 0.2)
    keys, real, writing, block, done = keys_for(30), os.pwritev, threading.Event(), threading.Event(), []

    def slow(*given):
        writing.set()
        block.wait(10.0)
        return real(*given)

    one = FileDriver(tmp_path).on()
    monkeypatch.setattr(os, "pwritev", slow)
    for key in keys:
        if key == keys[1]:
            assert writing.wait(20.0), "the others are queued behind the first"
        one.tier.write([one.chunk(key, 5000)], lambda chunks, good: done.append(list(good)))
    began_s = time.monotonic()
    one.tier.close()
    assert time.monotonic() - began_s < 1.0
    assert all(good == [False] for good in done)
    assert len(done) >= 20, "what was queued is called back"
    block.set()


def test_a_queue_that_is_full_takes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "QUEUED_CHUNKS", 4)
    keys, real, block, done = keys_for(30), os.pwritev, threading.Event(), []

    def slow(*given):
        block.wait(10.0)
        return real(*given)

    with FileDriver(tmp_path).on() as one:
        monkeypatch.setattr(os, "pwritev", slow)
        taken = [one.tier.write([one.chunk(key, 5000)], lambda chunks, good: done.append(list(good))) for key in keys]
        assert 4 <= sum(taken) <= 8
        assert one.tier.stats()["refused"] == 30 - sum(taken)
        block.set()
        wait_for(lambda: done == [[True]] * sum(taken))


def test_what_cannot_work_is_said():
    for fields in ({"pack_nbytes": 5000}, {"pack_nbytes": 32 << 10}, {"capacity_nbytes": 100 << 20}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            FileTierConfig.load({"path": "/x", "capacity_nbytes": "4 GiB", **fields})


# -- random traffic -------------------------------------------------------------------------------------------------


class Visitor(threading.Thread):
    """A thread that stores, deletes and reads chunks. It alone uses these chunks, so it knows which must be there."""

    def __init__(self, tier: FileDriver, number: int, seed: float, steps: int) -> None:
        super().__init__()
        self.tier, self.keys, self.rng, self.steps = tier, keys_for(40, number), random.Random(seed), steps
        self.sizes = {key: self.rng.choice((100, 5000, 60_000)) for key in self.keys}
        self.stored: set[bytes] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self.steps):
                self.step(self.rng.sample(self.keys, self.rng.randrange(1, 6)), self.rng.random())
        except BaseException as error:
            self.failure = error
            raise

    def step(self, keys: list[bytes], kind: float) -> None:
        if kind < 0.45:
            good = self.tier.write([self.tier.chunk(key, self.sizes[key]) for key in keys])
            assert all(good)
            self.stored.update(keys)
        elif kind < 0.6:
            self.tier.delete(keys)
            self.stored.difference_update(keys)
            assert not any(self.tier.has(keys))
        else:
            assert self.tier.right(keys[:1], self.sizes[keys[0]]) == [keys[0] in self.stored]


def traffic(path: Path, rng: random.Random, steps: int) -> None:
    """Run three threads on two tiers. Afterwards these tiers, and a third one, must have exactly the stored chunks."""
    with FileDriver(path, arena=Arena(64 << 20)).on() as one, FileDriver(path, "b", arena=Arena(64 << 20)).on() as two:
        visitors = [Visitor(tier, number, rng.random(), steps) for number, tier in enumerate((one, two, one))]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join()
        assert not any(visitor.failure for visitor in visitors)
        keys = [key for visitor in visitors for key in visitor.keys]
        expected = [key in visitor.stored for visitor in visitors for key in visitor.keys]
        for each in (one, two):
            wait_for(lambda each=each: each.has(keys) == expected)
    with FileDriver(path, "later").on() as later:
        wait_for(lambda: later.has(keys) == expected)
        for visitor in visitors:
            for key in visitor.stored:
                assert later.right([key], visitor.sizes[key]) == [True]


def test_random_traffic(tmp_path, rng):
    traffic(tmp_path, rng, 60)


@pytest.mark.soak
def test_much_random_traffic(tmp_path, rng):
    for number in range(soak("traffic", 5)):
        traffic(tmp_path / str(number), rng, 400)
