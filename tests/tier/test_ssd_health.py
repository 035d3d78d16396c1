"""Drives that are full, read-only, removed, broken or slow. No call waits, `stats` says why, other drives work on."""

import errno
import fcntl
import itertools
import os
import resource
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from raykv.tier.segments.format import key_array
from raykv.tier.ssd import state as ssd_state
from raykv.tier.ssd import tier as ssd_tier
from raykv.tier.ssd import upkeep
from tests.support.tiers import SEGMENT, Arena, SsdDriver, all_keys, content_of, keys_for, wait_for

NBYTES = 60_000
FREEZE, THAW, SHUT_DOWN = 0xC0045877, 0xC0045878, 0x8004587D
"""FIFREEZE, FITHAW and EXT4_IOC_SHUTDOWN."""
QUICK_S = 0.5
"""In these tests, a call of the tier may take at most this long, whatever the disk does."""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals between retries."""
    monkeypatch.setattr(ssd_state, "RETRY_S", 0.15)
    monkeypatch.setattr(upkeep, "GROW_S", 0.15)
    monkeypatch.setattr(ssd_tier, "TIDY_S", 0.05)
    monkeypatch.setattr(ssd_tier, "WATCH_S", 0.05)


def run(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that makes and mounts a file system. All are unmounted at the end of the test.

    Below each there is another one that cannot be written: while a test has unmounted the first one, nobody can begin
    to use the empty directory.
    """
    mounted: list[Path] = []

    def mount_one(kind: str, nbytes: int, options: str = "noatime") -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        if kind == "tmpfs":
            words = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)]
        else:
            image = tmp_path / f"image{len(mounted)}"
            with open(image, "wb") as file:
                file.truncate(nbytes)
            if not shutil.which("mkfs.ext4") or not run("mkfs.ext4", "-q", "-F", str(image)):
                pytest.skip("no mkfs.ext4")
            words = ["mount", "-o", f"loop,{options}", str(image), str(path)]
        below = ["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(path)]
        if os.geteuid() != 0 or not run(*below) or not run(*words):
            pytest.skip("file systems cannot be mounted here")
        mounted.append(path)
        return path

    yield mount_one
    for path in mounted:
        thaw(path)
        while run("umount", "-l", str(path)):
            pass


def control(path: Path, request: int, argument: bytes | int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, request, argument)
    finally:
        os.close(fd)


def thaw(path: Path) -> None:
    try:
        control(path, THAW)
    except OSError:
        pass  # the file system is not frozen


def state(driven: SsdDriver, number: int = 0) -> str:
    return str(driven.tier.stats()["paths"][number]["state"])


def quickly(call: Callable[[], object]) -> object:
    began_s = time.monotonic()
    result = call()
    assert time.monotonic() - began_s < QUICK_S
    return result


def offer(driven: SsdDriver, salt: int, results: list[bool] | None = None) -> int:
    """Offer chunks without waiting. Returns how many the tier took."""
    chunks = [driven.chunk(key, NBYTES) for key in keys_for(20, salt)]

    def done(_: object, good: object) -> None:
        if results is not None:
            results.extend(good)  # type: ignore[call-overload]

    return int(quickly(lambda: driven.tier.write(chunks, done)))  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["tmpfs", pytest.param("ext4", marks=pytest.mark.slow)])
def test_a_full_drive_reclaims_what_it_has(mount, kind: str):
    path = mount(kind, 24 * SEGMENT)
    (path / "other").write_bytes(bytes(12 * SEGMENT))
    with SsdDriver(path, capacity_nbytes=64 * SEGMENT).started() as driven:
        for salt in range(40):
            driven.put(keys_for(20, salt), NBYTES)
        stats = driven.tier.stats()
        assert stats["state"] == "on"
        assert "No space left" in stats["reason"]
        assert 3 < stats["paths"][0]["segments"] < 24
        assert driven.read(keys_for(20, 39), NBYTES) == [content_of(key, NBYTES) for key in keys_for(20, 39)]
        (path / "other").unlink()
        before = stats["paths"][0]["segments"]

        def grows() -> bool:
            driven.put(keys_for(5, time.monotonic_ns()), NBYTES)
            return bool(driven.tier.stats()["paths"][0]["segments"] > before)

        wait_for(grows)
        assert driven.tier.stats()["reason"] == ""


@pytest.mark.slow
def test_a_drive_that_is_full_from_the_beginning_is_off(mount):
    path = mount("tmpfs", SEGMENT // 2)
    with SsdDriver(path).started() as driven:
        wait_for(lambda: state(driven) == "off")
        assert "No space left" in driven.tier.stats()["reason"]
        assert offer(driven, 0) == 0
        run("mount", "-o", f"remount,size={64 * SEGMENT}", str(path))
        wait_for(lambda: state(driven) == "on")
        driven.put(keys_for(20), NBYTES)


@pytest.mark.slow
def test_files_that_must_not_grow(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SsdDriver(tmp_path).started() as driven:
        wait_for(lambda: driven.tier.stats()["paths"][0]["segments"] == 2)
        wait_for(lambda: not driven.tier._workers[0].io.busy())
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT // 2, before[1]))
            (tmp_path / "raykv-test-n0" / "000000.segment").chmod(0o600)
            results: list[bool] = []
            wait_for(lambda: offer(driven, 0, results) == 0)
            wait_for(lambda: state(driven) == "off")
            assert "too large" in driven.tier.stats()["reason"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        wait_for(lambda: state(driven) == "on")
        driven.put(keys_for(20, 1), NBYTES)


def test_a_read_only_directory(mount):
    path = mount("tmpfs", 64 * SEGMENT)
    assert run("mount", "-o", "remount,ro", str(path))
    with SsdDriver(path).started() as driven:
        assert state(driven) == "off"
        assert "Read-only" in driven.tier.stats()["reason"]
        assert offer(driven, 0) == 0
        assert driven.tier.stats()["refused"] == 20
        assert not quickly(
            lambda: driven.tier.read(
                key_array(keys_for(1)), driven.tier.find(key_array(keys_for(1))), [0], lambda _: None
            )
        )
        assert run("mount", "-o", "remount,rw", str(path))
        wait_for(lambda: state(driven) == "on")
        driven.put(keys_for(20), NBYTES)


@pytest.mark.slow
def test_one_of_two_read_only_while_running(mount, tmp_path: Path):
    path = mount("ext4", 64 * SEGMENT, "noatime,errors=remount-ro")
    device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(path) in line)
    trigger = Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error")
    if not trigger.exists():
        pytest.skip("the kernel has no trigger_fs_error")
    with SsdDriver([path, tmp_path / "other"]).started() as driven:
        for salt in range(5):
            driven.put(keys_for(20, salt), NBYTES)
        trigger.write_text("for a test")
        salts = itertools.count(10)

        def seen() -> bool:
            offer(driven, next(salts))  # only an operation shows the error
            return state(driven) == "off" and "Read-only" in driven.tier.stats()["reason"]

        wait_for(seen)
        assert state(driven, 1) == "on"
        for salt in range(5, 10):
            driven.put(keys_for(20, salt), NBYTES)
            assert driven.read(keys_for(20, salt), NBYTES) == [content_of(key, NBYTES) for key in keys_for(20, salt)]


def test_a_directory_removed_while_running(tmp_path: Path):
    with SsdDriver(tmp_path / "ssd").started() as driven:
        driven.put(keys_for(20), NBYTES)
        (tmp_path / "ssd").rename(tmp_path / "removed")  # in one step; during rmtree, the tier could make "ssd" again
        shutil.rmtree(tmp_path / "removed")
        offer(driven, 2)  # notices the loss, if no earlier operation has
        wait_for(lambda: state(driven) == "off" or not all_keys(driven.tier))
        wait_for(lambda: state(driven) == "on")
        assert not all_keys(driven.tier), "it was made anew, and is empty"
        assert driven.tier.stats()["errors"] > 0
        driven.put(keys_for(20, 1), NBYTES)
        assert driven.read(keys_for(1, 1), NBYTES) == [content_of(keys_for(1, 1)[0], NBYTES)]
    with SsdDriver(tmp_path / "ssd").started() as driven:
        assert all_keys(driven.tier) == set(keys_for(20, 1))


@pytest.mark.slow
def test_a_drive_that_breaks_and_comes_back(mount):
    path = mount("ext4", 64 * SEGMENT)
    arena = Arena()
    with SsdDriver(path, arena).started() as driven:
        driven.put(keys_for(20), NBYTES)
        driven.delete(keys_for(20)[:5])
        assert driven.flush(10.0)
        control(path, SHUT_DOWN, struct.pack("I", 0))  # flag 0: the kernel first writes its cache to the disk
        results: list[bool] = []
        wait_for(lambda: offer(driven, 1, results) == 0 or state(driven) == "off")
        wait_for(lambda: state(driven) == "off")
        assert driven.tier.stats()["errors"] > 0
        assert not any(driven.has(keys_for(20)))
        driven.delete(keys_for(20)[5:10])  # the drive is off, so the tier does not know its chunks
        assert not driven.flush(0.1)
        wait_for(lambda: run("umount", str(path)))  # works only if the tier has closed its files
        image = path.with_name("image0")
        assert run("mount", "-o", "loop,noatime", str(image), str(path))
        wait_for(lambda: state(driven) == "on")
        assert not any(driven.has(keys_for(20)[:10])), "deleted before, and meanwhile"
        wait_for(lambda: driven.flush(1.0))
        left = set(keys_for(20)[10:])
        assert all_keys(driven.tier) >= left
        assert driven.read(sorted(left), NBYTES) == [content_of(key, NBYTES) for key in sorted(left)]
    with SsdDriver(path, arena).started() as driven:
        assert all_keys(driven.tier) >= left
        assert not any(driven.has(keys_for(20)[:10]))


@pytest.mark.slow
def test_a_drive_that_hangs(mount):
    """On a frozen file system, writes hang in the kernel until it is thawed."""
    path = mount("ext4", 64 * SEGMENT)
    with SsdDriver(path, io_timeout_s=2.0).started() as driven:
        driven.put(keys_for(20), NBYTES)
        control(path, FREEZE)
        try:
            results: list[bool] = []
            taken = 0
            for salt in range(1, 6):
                taken += offer(driven, salt, results)
            assert taken
            wait_for(lambda: state(driven) == "slow")
            stats = driven.tier.stats()
            assert stats["state"] == "slow"
            assert stats["timeouts"] == 1
            assert offer(driven, 9) == 0
            assert not quickly(
                lambda: driven.tier.read(
                    key_array(keys_for(1)), driven.tier.find(key_array(keys_for(1))), [0], lambda _: None
                )
            )
            quickly(lambda: driven.delete(keys_for(3)))
            assert quickly(lambda: driven.has(keys_for(4))) == [False] * 3 + [True]
            assert not driven.flush(0.05)
            # Queued writes are called back. Writes in the kernel are not: the kernel may still read their buffers.
            wait_for(lambda: len(results) > 0 or taken <= 4 * 20)
        finally:
            thaw(path)
        wait_for(lambda: state(driven) == "on")
        wait_for(lambda: len(results) == taken)
        assert driven.flush(10.0)
        driven.put(keys_for(20, 7), NBYTES)
        assert driven.tier.stats()["errors"] == 0
    with SsdDriver(path).started() as driven:
        assert not any(driven.has(keys_for(3)))
        assert all(driven.has(keys_for(20)[3:]))


@pytest.mark.slow
def test_one_of_two_that_hangs_does_not_hold_up_the_other(mount, tmp_path: Path):
    path = mount("ext4", 64 * SEGMENT)
    with SsdDriver([path, tmp_path / "other"], io_timeout_s=2.0, capacity_nbytes=50 * SEGMENT).started() as driven:
        control(path, FREEZE)
        try:
            results: list[bool] = []
            taken = sum(offer(driven, salt, results) for salt in range(5))
            wait_for(lambda: state(driven) == "slow")
            assert state(driven, 1) == "on"
            for salt in range(10, 15):
                driven.put(keys_for(20, salt), NBYTES)
                assert driven.read(keys_for(2, salt), NBYTES) == [content_of(key, NBYTES) for key in keys_for(2, salt)]
        finally:
            thaw(path)
        wait_for(lambda: len(results) == taken)
        assert all(results)


def test_reads_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hung = threading.Event()
    hung.set()
    preadv = os.preadv

    def slow_preadv(*arguments):
        hung.wait(20.0)
        return preadv(*arguments)

    with SsdDriver(tmp_path, io_timeout_s=2.0, depth=2).started() as driven:
        keys = keys_for(20)
        for key in keys:
            driven.put([key], NBYTES)
        monkeypatch.setattr(os, "preadv", slow_preadv)
        hung.clear()
        called: list[list[bool]] = []
        for key in keys:
            one, slot = key_array([key]), [driven.arena.slot(NBYTES)]
            assert quickly(partial(driven.tier.read, one, driven.tier.find(one), slot, called.append))
        wait_for(lambda: state(driven) == "slow")
        wait_for(lambda: len(called) == len(keys) - 2)
        assert called == [[False]] * (len(keys) - 2), "called back though both threads hang"
        assert not quickly(
            lambda: driven.tier.read(key_array(keys[:1]), driven.tier.find(key_array(keys[:1])), [0], lambda _: None)
        )
        assert offer(driven, 3) == 0
        hung.set()
        wait_for(lambda: state(driven) == "on")
        wait_for(lambda: len(called) == len(keys))
        assert called[-2:] == [[True]] * 2, "late, but right"
        assert driven.read(keys, NBYTES) == [content_of(key, NBYTES) for key in keys]


def test_a_bad_spot_costs_its_chunk_and_many_turn_the_path_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bad = [1]
    preadv = os.preadv

    def bad_preadv(*arguments):
        if bad[0]:
            bad[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", bad_preadv)
    with SsdDriver(tmp_path).started() as driven:
        keys = keys_for(20)
        bad[0] = 0
        for key in keys:
            driven.put([key], NBYTES)
        bad[0] = 1
        assert driven.read(keys[:1], NBYTES) == [None]
        assert driven.has(keys[:2]) == [False, True]
        assert state(driven) == "on"
        assert driven.tier.stats()["errors"] == 1
        assert driven.read(keys[1:2], NBYTES) == [content_of(keys[1], NBYTES)]
        bad[0] = 3
        for key in keys[2:5]:
            assert driven.read([key], NBYTES) == [None]
        wait_for(lambda: state(driven) == "on")
        assert driven.has(keys[5:]) == [True] * 15, "found again"
        assert driven.flush(5.0)
    with SsdDriver(tmp_path).started() as driven:
        assert driven.has(keys) == [False, True, False, False, False] + [True] * 15


def test_a_bad_spot_in_a_reclaimed_segment_costs_its_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    preadv, bad = os.preadv, []

    def bad_preadv(*arguments):
        if bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", bad_preadv)
    with SsdDriver(tmp_path, capacity_nbytes=8 * SEGMENT).started() as driven:
        hot = keys_for(4)
        driven.put(hot, NBYTES)
        assert None not in driven.read(hot, NBYTES)
        bad.append(True)
        for salt in range(1, 16):
            driven.put(keys_for(20, salt), NBYTES)
        assert state(driven) == "on"
        assert driven.tier.stats()["errors"] > 0
        bad.clear()
        assert not any(driven.has(hot)), "they could not be moved"
        assert driven.read(keys_for(20, 15), NBYTES) == [content_of(key, NBYTES) for key in keys_for(20, 15)]
