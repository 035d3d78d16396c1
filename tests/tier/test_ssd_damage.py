"""Files that were cut or have flipped bits. A start succeeds, all intact chunks are served, and no byte is wrong."""

import random
import shutil
from pathlib import Path

import pytest

from raykv.tier.segments.format import BLOCK_NBYTES, key_array
from raykv.tier.segments.index import SEGMENTS
from tests.support.soak import soak
from tests.support.tiers import Arena, SsdDriver, all_keys, content_of, keys_for

SEGMENT_NBYTES = 256 << 10
FIELDS = {"segment_nbytes": SEGMENT_NBYTES, "capacity_nbytes": 20 * SEGMENT_NBYTES, "max_chunks": 2000, "depth": 2}
SIZES = [500, 4096, 9000, 17_000]
TRIALS = [pytest.param(5, id="quick"), pytest.param(0, id="soak", marks=pytest.mark.soak)]

Places = dict[bytes, tuple[int, int, int]]
"""For each key: number of its segment, and offsets of the chunk's first and last byte in the segment."""


contents = {key: content_of(key, SIZES[key[0] % len(SIZES)]) for key in keys_for(250)}


def size_of(key: bytes) -> int:
    return SIZES[key[0] % len(SIZES)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Places]:
    """Make a directory with sealed segments and an unsealed one. Every fifth key is deleted, and has a tombstone."""
    path = tmp_path_factory.mktemp("whole")
    keys = keys_for(250)
    with SsdDriver(path, **FIELDS).started() as driven:
        for first in range(0, len(keys), 5):
            some = keys[first : first + 5]
            assert all(driven.write([driven.chunk(key, size_of(key)) for key in some]))
            driven.delete(some[:1])
        assert driven.flush(10.0)
        index = driven.tier._shared.index
        columns = index.columns
        rows = index.find_all(key_array(keys))
        places = {
            key: (
                int(index.segment[row]) % SEGMENTS,
                int(columns.page[row]) * BLOCK_NBYTES,
                int(columns.page[row]) * BLOCK_NBYTES + size_of(key) - 1,
            )
            for key, row in zip(keys, rows.tolist(), strict=True)
            if row >= 0
        }
        paths = driven.tier.stats()["paths"]
        assert paths[0]["segments"] - paths[0]["free_segments"] > 6
    assert len(places) == 200
    return path, places


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(32 << 20)


def check(path: Path, arena: Arena, places: Places, intact: set[bytes], rng: random.Random) -> int:
    """Start on damaged files, and check all chunks that are served. Returns how many of `places` are served."""
    with SsdDriver(path, arena=arena, **FIELDS).started() as driven:
        assert driven.tier.stats()["state"] == "on"
        served = 0
        for size in SIZES:
            keys = [key for key in keys_for(250) if size_of(key) == size]
            for key, got in zip(keys, driven.read(keys, size), strict=True):
                assert got in (None, contents[key])
                assert got is not None or key not in intact
                served += key in places and got is not None
        fresh = keys_for(10, rng.randrange(1 << 30))
        assert all(driven.write([driven.chunk(key, 5000) for key in fresh]))
        assert driven.read(fresh, 5000) == [content_of(key, 5000) for key in fresh]
        assert driven.tier.stats()["errors"] == 0
    return served


@pytest.mark.parametrize("trials", TRIALS)
def test_segments_cut_at_random_offsets(
    whole: tuple[Path, Places], tmp_path: Path, arena: Arena, rng: random.Random, trials: int
):
    source, places = whole
    for trial in range(trials or soak("damage", 200)):
        path = tmp_path / str(trial)
        shutil.copytree(source, path)
        number = rng.choice(sorted({segment for segment, *_ in places.values()}))
        cut = rng.randrange(SEGMENT_NBYTES)
        with open(path / "raykv-test-n0" / f"{number:06}.segment", "r+b") as file:
            file.truncate(cut)
        intact = {
            key
            for key, (segment, _, last) in places.items()
            if segment != number or last // BLOCK_NBYTES < cut // BLOCK_NBYTES
        }
        check(path, arena, places, intact, rng)
        shutil.rmtree(path)


@pytest.mark.parametrize("trials", TRIALS)
def test_random_bits_flipped(whole: tuple[Path, Places], tmp_path: Path, arena: Arena, rng: random.Random, trials: int):
    source, places = whole
    lost = 0
    for trial in range(trials or soak("damage", 200)):
        path = tmp_path / str(trial)
        shutil.copytree(source, path)
        damaged: dict[int, int] = {}
        for _ in range(rng.choice([1, 1, 3, 30])):
            number = rng.choice(sorted({segment for segment, *_ in places.values()}))
            bit = rng.randrange(8 * SEGMENT_NBYTES)
            damaged[number] = min(bit // 8, damaged.get(number, SEGMENT_NBYTES))
            with open(path / "raykv-test-n0" / f"{number:06}.segment", "r+b") as file:
                file.seek(bit // 8)
                byte = file.read(1)[0]
                file.seek(bit // 8)
                file.write(bytes([byte ^ 1 << bit % 8]))
        intact = {key for key, (segment, _, last) in places.items() if last < damaged.get(segment, SEGMENT_NBYTES)}
        lost += len(places) - check(path, arena, places, intact, rng)
        shutil.rmtree(path)
    assert lost > 0, "the test damages something"


def test_files_that_are_none(tmp_path: Path, arena: Arena, rng: random.Random):
    directory = tmp_path / "raykv-test-n0"
    directory.mkdir()
    (directory / "000000.segment").write_bytes(b"")
    (directory / "000001.segment").write_bytes(rng.randbytes(SEGMENT_NBYTES))
    (directory / "000003.segment").write_bytes(bytes(5 * SEGMENT_NBYTES))
    (directory / "000900.segment").write_bytes(rng.randbytes(100))
    (directory / "notes.txt").write_text("not ours")
    assert check(tmp_path, arena, {}, set(), rng) == 0
    assert (directory / "notes.txt").read_text() == "not ours"


def test_wrong_bytes_are_dropped_and_stay_away(whole: tuple[Path, Places], tmp_path: Path, arena: Arena):
    source, places = whole
    path = tmp_path / "copy"
    shutil.copytree(source, path)
    key, (segment, first, _) = next(iter(places.items()))
    with open(path / "raykv-test-n0" / f"{segment:06}.segment", "r+b") as file:
        file.seek(first)
        file.write(b"wrong")
    with SsdDriver(path, arena=arena, **FIELDS).started() as driven:
        assert driven.has([key]) == [True]
        assert driven.read([key], size_of(key)) == [None]
        assert driven.tier.stats()["corrupt"] == 1
        assert driven.has([key]) == [False]
        assert driven.flush(10.0)
    with SsdDriver(path, arena=arena, **FIELDS).started() as driven:
        assert key not in all_keys(driven.tier)
        assert len(all_keys(driven.tier)) == len(places) - 1
        assert driven.write([driven.chunk(key, size_of(key))]) == [True]
        assert driven.read([key], size_of(key)) == [content_of(key, size_of(key))]
