"""The SSD tier as its callers see it: what was written is there, byte for byte, also after a restart."""

from pathlib import Path

import pytest

from raykv.config import SsdConfig
from raykv.errors import ConfigError
from tests.tier.ssd_fixtures import SEGMENT, Arena, Driven, Names, all_keys, content_of, keys_for, wait_for

SIZES = [1, 100, 4095, 4096, 4097, 65_536, 100_000, SEGMENT // 2]


def test_what_was_written_comes_back_in_all_sizes(tmp_path: Path):
    with Driven(tmp_path).started() as driven:
        for place, nbytes in enumerate(SIZES):
            (key,) = keys_for(1, place)
            chunk = driven.chunk(key, nbytes, depth=place, parent=keys_for(1, 99)[0], reads=3, account=1)
            assert driven.write([chunk]) == [True]
            assert driven.has([key]) == [True]
            assert driven.read([key], nbytes) == [content_of(key, nbytes)]
        (found,) = driven.tier.find(__import__("raykv.tier.index", fromlist=["key_array"]).key_array([key]))
        assert found == (nbytes, chunk.checksum, 1, place, keys_for(1, 99)[0], 4, 0.0)
        stats = driven.tier.stats()
        assert stats["state"] == "on"
        assert stats["chunks"] == len(SIZES)
        assert stats["used_nbytes"] == driven.tier.used_nbytes(1) == sum(SIZES)
        assert stats["written_nbytes"] == stats["read_nbytes"] == sum(SIZES)


@pytest.mark.parametrize("direct", ["try", "never"])
@pytest.mark.parametrize("paths", [1, 3])
def test_a_restart_finds_everything(tmp_path: Path, direct: str, paths: int):
    places = [tmp_path / str(number) for number in range(paths)]
    keys = keys_for(200)
    with Driven(places, direct=direct).started() as driven:
        driven.put(keys, 20_000, account=2, depth=7, expires_s=4e9)
        before = driven.tier.find(__import__("raykv.tier.index", fromlist=["key_array"]).key_array(keys))
        if paths > 1:
            assert all(path["segments"] for path in driven.tier.stats()["paths"])
    with Driven(places, direct=direct).started() as driven:
        assert all_keys(driven.tier) == set(keys)
        assert driven.tier.find(__import__("raykv.tier.index", fromlist=["key_array"]).key_array(keys)) == before
        came, went = driven.tier.take_changes()
        assert {row.tobytes() for row in came} == set(keys)
        assert not len(went)
        for first in range(0, len(keys), 20):
            some = keys[first : first + 20]
            assert driven.read(some, 20_000) == [content_of(key, 20_000) for key in some]
