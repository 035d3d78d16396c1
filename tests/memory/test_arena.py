"""Files in shared memory: created, attached, refused with a reason, and populated before they are touched."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from raykv.config import StorageConfig
from raykv.errors import ConfigError, LostError
from raykv.memory.arena import SharedMemory, free_nbytes, require_room
from raykv.protocol.namespace import Namespace
from raykv.storage.store import Store, Written
from raykv.types import Batch

MIB = 1 << 20


@pytest.fixture
def small_tmpfs(shm_dir):
    """A file system of 5 MiB, of which a table takes 2 MiB."""
    place = shm_dir / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("named", [True, False])
def test_two_mappings_see_the_same_bytes(shm_dir, named):
    made = SharedMemory.create(shm_dir / "file" if named else None, 8192)
    seen = SharedMemory.attach(made.path, writable=False)
    assert made.populate(0, 8192)
    made.view[5000] = 42
    assert seen.view[5000] == 42
    assert seen.view.readonly
    assert seen.is_current()
    seen.close()
    made.close()


def test_files_are_for_their_owner_alone(shm_dir):
    SharedMemory.create(shm_dir / "file", 4096).close()
    assert (shm_dir / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_that_exists_is_not_made_again(shm_dir):
    (shm_dir / "file").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="File exists"):
        SharedMemory.create(shm_dir / "file", 4096)
    assert (shm_dir / "file").read_bytes() == b"precious"


def test_a_missing_file_cannot_be_attached(shm_dir):
    (shm_dir / "empty").touch()
    for name in ("missing", "empty", "."):
        with pytest.raises(LostError):
            SharedMemory.attach(shm_dir / name, writable=True)


def test_a_mapping_outlives_its_file_and_knows_it(shm_dir):
    made = SharedMemory.create(shm_dir / "file", 4096)
    made.view[0] = 1
    made.path.unlink()
    assert not made.is_current()
    SharedMemory.create(shm_dir / "file", 4096).close()
    assert not made.is_current()
    assert made.view[0] == 1
    made.close()


def test_views_outlive_close_and_nothing_leaks(shm_dir):
    before = descriptors()
    made = SharedMemory.create(shm_dir / "file", 4096)
    part = made.view[10:20]
    made.close()
    made.close()
    part[0] = 7
    assert part[0] == 7
    del part, made
    forgotten = SharedMemory.attach(shm_dir / "file", writable=True)
    del forgotten
    assert descriptors() == before


def test_one_owner_at_a_time(shm_dir):
    first = SharedMemory.create(shm_dir / "file", 4096)
    first.own(timeout_s=0.0)
    second = SharedMemory.attach(shm_dir / "file", writable=True)
    with pytest.raises(ConfigError, match="node_id"):
        second.own(timeout_s=0.0)
    view = first.view[:10]
    first.close()
    second.own(timeout_s=0.0)
    second.close()
    del view


def test_ownership_ends_with_a_killed_process(shm_dir):
    program = (
        "import os, signal, sys; from pathlib import Path; from raykv.memory.arena import SharedMemory;"
        "SharedMemory.create(Path(sys.argv[1]), 4096).own(timeout_s=0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(shm_dir / "file")], check=False)
    found = SharedMemory.attach(shm_dir / "file", writable=True)
    found.own(timeout_s=5.0)
    found.close()


def test_sizes_that_cannot_be_served_are_refused_before_anything_is_made(shm_dir):
    with pytest.raises(ConfigError, match=r"'arena_nbytes'.*lower arena_nbytes.*remount"):
        require_room(shm_dir, free_nbytes(shm_dir) + MIB * 1024, field="arena_nbytes")
    with pytest.raises(ConfigError, match=r"'arena_nbytes'.*the host has only"):
        require_room(None, 1 << 50, field="arena_nbytes")
    for path in (shm_dir / "missing", shm_dir / "file"):
        (shm_dir / "file").touch()
        with pytest.raises(ConfigError, match=r"'shm_dir'.*is not a directory"):
            require_room(path, 0, field="arena_nbytes")
        with pytest.raises(ConfigError, match="'shm_dir'"):
            Store.open(StorageConfig(shm_dir=path), path / "raykv-x", now_s=0.0)
    with pytest.raises(ConfigError, match="'arena_nbytes'"):
        Store.open(StorageConfig(arena_nbytes="900 TiB", max_chunks=1024, shm_dir=shm_dir), shm_dir / "x", now_s=0.0)
    assert [path.name for path in shm_dir.iterdir()] == ["file"]


def test_too_little_room_at_the_start(small_tmpfs):
    config = StorageConfig(arena_nbytes="64 MiB", extent_nbytes="1 MiB", shm_dir=small_tmpfs)
    with pytest.raises(ConfigError, match="arena_nbytes"):
        Store.open(config, small_tmpfs / "n", now_s=0.0)
    assert not list(small_tmpfs.iterdir())


def test_memory_is_taken_before_it_is_touched(small_tmpfs):
    made = SharedMemory.create(small_tmpfs / "file", 64 * MIB)
    assert made.populate(0, 4 * MIB)
    made.view[: 4 * MIB] = b"x" * (4 * MIB)
    assert not made.populate(4 * MIB, 2 * MIB)
    made.close()


def test_when_the_file_system_fills_up_later_chunks_are_skipped_or_others_evicted(small_tmpfs, np_rng):
    """Another process fills the file system. There is no SIGBUS and no error, and populated extents stay in use."""
    config = StorageConfig(arena_nbytes="2 MiB", extent_nbytes="256 KiB", max_chunks=64, shm_dir=small_tmpfs)
    store, lock = Store.open(config, small_tmpfs / "n", now_s=0.0), threading.Lock()
    group = store.groups.open(Namespace(model="m"))

    def fill(count: int, nbytes: int, now_s: float) -> int:
        keys = np_rng.integers(1 << 63, size=(count, 2)).astype("u8")
        loan = store.lend(group, nbytes, count, now_s=now_s)
        for start in loan.offsets.tolist():
            store.arena.view[start : start + nbytes] = b"x" * nbytes
        positions = np.arange(len(loan.rows), dtype=np.int32)
        written = Written(positions, loan.rows, loan.rows.astype("u8"))
        assert store.commit(group, Batch(keys, nbytes, chained=False), written, now_s=now_s).all()
        return len(loan.rows)

    assert fill(2, 256 << 10, 1.0) == 2
    ballast = small_tmpfs / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_nbytes(small_tmpfs) - (300 << 10))
    assert fill(4, 256 << 10, 2.0) == 3  # one extent gets memory now, and two had memory before
    assert store.allocator.slots.extents_failed == 5
    assert store.counters.evicted == 2
    assert store.chunks == 3
    assert not store.table.header["dirty"]
    assert fill(70, 4096, 3.0) == 64
    assert store.used_nbytes == 64 * 4096
    while store.evict_ahead(now_s=4.0):  # the water marks are shares of the usable extents
        pass
    assert store.chunks > 32
    assert not store.populator.step(lock, quiet=True)
    ballast.unlink()
    for left in range(4, -1, -1):
        assert store.populator.step(lock, quiet=True, retry=True)
        assert store.allocator.slots.extents_failed == left
    assert not store.populator.step(lock, quiet=True)
    assert fill(5, 256 << 10, 5.0) == 5
    store.close()
