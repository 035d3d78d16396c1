"""Huge pages are used if the kernel gives them. Otherwise small pages are used, and nothing crashes."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raykv.config import StorageConfig
from raykv.errors import ConfigError
from raykv.memory import pages
from raykv.memory.arena import SharedMemory, free_nbytes, require_pages
from raykv.memory.table import ROWS_AT_START, Table
from raykv.storage.store import Store

MIB = 1 << 20
HUGE = pages.huge_nbytes()

needs_collapse = pytest.mark.skipif(not pages.try_collapse(), reason="this kernel makes no huge pages on request")


@pytest.fixture
def mount(shm_dir):
    """Return a function that mounts a file system. All are unmounted at the end of the test."""
    mounted = []

    def mount(kind: str, options: str) -> Path:
        place = shm_dir / f"mount-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, kind, place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a {kind} here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


def mapped_huge(memory: SharedMemory) -> int:
    """Bytes of this mapping that are in huge pages, by the kernel's count in smaps."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            inside = int(first.partition("-")[0], 16) == memory.address
        elif inside and first in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
            found += int(rest.split()[0]) << 10
    return found


def blocks(memory: SharedMemory) -> int:
    """Bytes of the file that are backed by memory."""
    return os.stat(memory.path).st_blocks * 512


@pytest.mark.parametrize("nbytes", [1, 5000, HUGE - 4096, HUGE, 3 * HUGE + 4096])
@pytest.mark.parametrize("writable", [True, False])
def test_files_of_any_size_are_mapped_where_huge_pages_fit(shm_dir, nbytes, writable):
    (shm_dir / "file").write_bytes(b"a" * nbytes)
    memory = SharedMemory.attach(shm_dir / "file", writable=writable)
    assert len(memory.view) == memory.nbytes == nbytes
    assert memory.view[nbytes - 1] == ord("a")
    assert memory.view.readonly != writable
    assert memory.address % HUGE == 0
    memory.close()


def test_a_mapping_ends_with_its_last_user(shm_dir):
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(shm_dir / "file"))

    memory = SharedMemory.create(shm_dir / "file", 2 * HUGE)
    memory.populate(0, HUGE)
    part = memory.view[:10]
    assert mappings() == 1
    memory.close()
    part[0] = 1
    assert mappings() == 1
    del part
    assert mappings() == 0
    assert not memory.populate(0, HUGE)
    assert memory.huge_nbytes <= HUGE


@needs_collapse
@pytest.mark.parametrize("named", [True, False])
def test_memory_comes_in_huge_pages_without_any_setting(shm_dir, named):
    made = SharedMemory.create(shm_dir / "file" if named else None, 4 * HUGE)
    assert made.populate(HUGE // 2, 3 * HUGE)  # half of a huge page, two whole pages, half of a page
    assert blocks(made) in range(3 * HUGE, 3 * HUGE + 8192)
    assert made.huge_nbytes == mapped_huge(made) == 2 * HUGE
    made.view[HUGE // 2 : 3 * HUGE] = b"x" * (HUGE * 5 // 2)
    seen = SharedMemory.attach(made.path, writable=False)
    assert seen.view[HUGE // 2 : 3 * HUGE] == b"x" * (HUGE * 5 // 2)
    assert mapped_huge(seen) == 2 * HUGE
    seen.close()
    made.close()


@needs_collapse
def test_a_hurry_takes_small_pages_that_may_become_huge_later(shm_dir):
    memory = SharedMemory.create(shm_dir / "file", 4 * HUGE, huge_pages="try")
    assert memory.populate(0, 4 * HUGE, hurry=True)
    assert blocks(memory) == 4 * HUGE
    assert memory.huge_nbytes == 0
    memory.view[5] = 7
    assert memory.populate(0, 4 * HUGE)
    assert memory.huge_nbytes == 4 * HUGE
    assert memory.view[5] == 7
    memory.close()


@needs_collapse
def test_small_pages_become_huge_ones_under_the_chunks_there(shm_dir, np_rng):
    content = np_rng.bytes(2 * HUGE)
    made = SharedMemory.create(shm_dir / "file", 2 * HUGE, huge_pages="never")
    assert made.populate(0, 2 * HUGE)
    made.view[:] = content
    assert made.huge_nbytes == mapped_huge(made) == 0
    again = SharedMemory.attach(made.path, writable=True, huge_pages="try")
    assert again.populate(0, 2 * HUGE)
    assert again.huge_nbytes == mapped_huge(again) == 2 * HUGE
    assert again.view == content == made.view
    again.close()
    made.close()


@needs_collapse
def test_a_table_that_grew_in_steps_is_mostly_in_huge_pages(shm_dir, np_rng):
    rows, step = 16 * ROWS_AT_START, 4 * ROWS_AT_START
    made = Table.create(shm_dir / "table", rows=rows, extents=2, extent_nbytes=MIB, now_s=0.0)
    seen = Table(SharedMemory.attach(made.memory.path, writable=False))
    keys = np_rng.integers(0, 1 << 64, (rows, 2), np.uint64)
    for first in range(0, rows, step):
        assert made.populate_rows(first + step)
        made.insert(keys[first : first + step], np.arange(first, first + step, dtype=np.int32))
    assert made.memory.huge_nbytes > made.memory.nbytes // 3
    assert (seen.find(keys) == np.arange(rows)).all()
    assert mapped_huge(seen.memory) > 0
    seen.memory.close()
    made.memory.close()


@pytest.mark.parametrize("collapses", [True, False])
@pytest.mark.parametrize("huge", ["never", "within_size"])
def test_a_full_tmpfs_is_an_answer_and_costs_nothing(mount, huge, collapses, monkeypatch):
    """How many huge pages the file gets is up to the kernel: where memory is scattered, it has none for a while."""
    refused, kernel_collapses = [], pages.collapse

    def collapse(*where: int) -> bool:
        made = collapses and kernel_collapses(*where)
        if collapses and not made:
            refused.append(errno.errorcode[ctypes.get_errno()])
        return made

    monkeypatch.setattr(pages, "collapse", collapse)
    place = mount("tmpfs", f"size={5 * HUGE},huge={huge}")
    made = SharedMemory.create(place / "file", 16 * HUGE)
    assert made.populate(0, 2 * HUGE)
    assert not made.populate(2 * HUGE, 4 * HUGE)
    assert blocks(made) == 2 * HUGE
    assert made.populate(2 * HUGE, 3 * HUGE)
    for offset in (0, 5 * HUGE, 14 * HUGE):
        assert made.populate(offset, 2 * HUGE) == (offset == 0)
    assert free_nbytes(place) == 0
    made.view[: 5 * HUGE] = b"x" * (5 * HUGE)
    if not collapses:
        assert not made.huge_nbytes
    elif not refused:
        assert made.huge_nbytes in (4 * HUGE, 5 * HUGE)
    assert set(refused) <= {"ENOMEM", "EAGAIN", "EBUSY"}, "madvise(2): a try later may succeed"
    made.close()


@pytest.mark.parametrize(("huge", "expected"), [("within_size", 4 * HUGE), ("never", 0)])
def test_a_kernel_that_collapses_nothing_gives_huge_pages_if_the_mount_says_so(mount, monkeypatch, huge, expected):
    monkeypatch.setattr(pages, "collapse", lambda *_: False)
    made = SharedMemory.create(mount("tmpfs", f"size=64m,huge={huge}") / "file", 4 * HUGE)
    assert made.populate(0, 4 * HUGE)
    assert blocks(made) == 4 * HUGE
    made.view[:] = b"x" * (4 * HUGE)
    assert mapped_huge(made) == expected
    made.close()


def test_required_huge_pages_that_the_kernel_does_not_give_are_refused(shm_dir, monkeypatch):
    config = StorageConfig(
        arena_nbytes=4 * HUGE, extent_nbytes=HUGE, max_chunks=64, shm_dir=shm_dir, huge_pages="require"
    )
    with pytest.raises(ConfigError, match=r"'extent_nbytes'.*multiple"):
        Store.open(config.model_copy(update={"extent_nbytes": HUGE // 2}), shm_dir / "n", now_s=0.0)
    monkeypatch.setattr(pages, "collapse", lambda *_: False)
    with pytest.raises(ConfigError, match=r"'huge_pages'.*raykv doctor"):
        Store.open(config, shm_dir / "n", now_s=0.0)
    assert not list(shm_dir.iterdir())
    Store.open(config.model_copy(update={"huge_pages": "try"}), shm_dir / "n", now_s=0.0).close()
    with pytest.raises(ConfigError, match=r"'huge_pages'.*raykv doctor"):
        Store.open(config, shm_dir / "n", now_s=0.0)


@needs_collapse
def test_an_extent_without_huge_pages_is_out_of_use_where_they_are_required(shm_dir, monkeypatch):
    memory = SharedMemory.create(shm_dir / "file", 4 * HUGE, huge_pages="require")
    require_pages(memory, HUGE)
    assert memory.populate(0, 2 * HUGE)
    monkeypatch.setattr(pages, "collapse", lambda *_: False)
    assert memory.populate(0, 2 * HUGE)  # this part already has huge pages
    assert not memory.populate(2 * HUGE, HUGE)
    memory.close()


def test_a_hugetlbfs_without_pages_is_refused_with_words(mount):
    place = mount("hugetlbfs", "size=64m")
    if free_nbytes(place):
        pytest.skip("this host has a pool of huge pages")
    with pytest.raises(ConfigError, match=r"'arena_nbytes'.*0 free"):
        Store.open(StorageConfig(arena_nbytes="32 MiB", shm_dir=place), place / "n", now_s=0.0)
    with pytest.raises(ConfigError, match="no room"):
        SharedMemory.create(place / "file", 1)
    assert not list(place.iterdir())


def test_a_hugetlbfs_with_pages_holds_arena_and_table(mount):
    place = mount("hugetlbfs", "size=16m")
    if free_nbytes(place) < 16 * MIB:
        pytest.skip("this host has no pool of huge pages")
    config = StorageConfig(
        arena_nbytes="8 MiB", extent_nbytes="4 MiB", max_chunks=64, shm_dir=place, huge_pages="require"
    )
    with pytest.raises(ConfigError, match="multiple"):
        Store.open(config.model_copy(update={"extent_nbytes": MIB}), place / "n", now_s=0.0)
    for incarnation in (1, 2):
        store = Store.open(config, place / "n", now_s=0.0)
        assert store.table.header["incarnation"] == incarnation
        assert store.arena.populate(4 * MIB, 4 * MIB)
        store.arena.view[4 * MIB :] = b"x" * (4 * MIB)
        assert store.arena.huge_nbytes >= 4 * MIB
        store.close()


def test_the_pool_of_huge_pages_in_sysfs(tmp_path):
    pool = tmp_path / "kernel/mm/hugepages/hugepages-2048kB"
    assert pages.hugetlb_free_nbytes(2 * MIB, sys=tmp_path) == 0
    pool.mkdir(parents=True)
    (pool / "free_hugepages").write_text("10\n")
    (pool / "resv_hugepages").write_text("4\n")
    assert pages.hugetlb_free_nbytes(2 * MIB, sys=tmp_path) == 12 * MIB


@pytest.mark.slow
def test_a_thread_may_read_while_the_process_ends(shm_dir):
    program = (
        "import sys, threading, time; from pathlib import Path; from raykv.memory.arena import SharedMemory\n"
        "memory = SharedMemory.create(Path(sys.argv[1]), 8 << 20); memory.populate(0, 8 << 20)\n"
        "def read():\n    while True: bytes(memory.view)\n"
        "threading.Thread(target=read, daemon=True).start(); time.sleep(0.05)"
    )
    done = subprocess.run([sys.executable, "-c", program, shm_dir / "file"], check=False)
    assert done.returncode == 0
