"""Tiers by name: those of the package, and tiers from outside it."""

import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raykv.config import NodeConfig
from raykv.errors import ConfigError
from raykv.protocol.reasons import Place
from raykv.storage.store import Store
from raykv.tier import registry
from raykv.tier.mover import TierMover
from raykv.tier.registry import open_tiers, register_tier
from tests.support.stores import Bench, names_to_keys
from tests.support.tiers import wait_for
from tests.support.toy_tier import ToyTier


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a test, remove the tiers that it registered."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def opened(**storage: Any) -> tuple[Bench, TierMover]:
    sizes = {"arena_nbytes": 1 << 20, "extent_nbytes": 1 << 16, "max_chunks": 64, "shm_dir": None}
    config = NodeConfig.load({"node_id": "n0", "storage": {**sizes, **storage}})
    store = Store.open(config.storage, None, now_s=time.monotonic())
    return Bench(store, time.monotonic()), open_tiers(config, store, threading.Lock(), changed=lambda: None)


def test_without_tiers_there_is_none():
    _, mover = opened()
    assert not mover


@pytest.mark.parametrize("opener", [ToyTier, "tests.support.toy_tier:ToyTier"])
def test_a_tier_from_outside_the_package_holds_chunks(opener):
    register_tier("toy", opener)
    bench, mover = opened(tiers={"toy": {"takes": 5}})
    (toy,) = mover.tiers
    assert isinstance(toy, ToyTier)
    assert (toy.name, toy.place, toy.takes) == ("toy", Place.OTHER, 5)
    bench.put("A")
    keys = names_to_keys("A")
    mover.demotion.write(toy, bench.store.table.find(keys), keys)
    wait_for(lambda: bool(mover.find(keys)[1].all()) and not mover.demotion.writing)
    bench.store.delete(keys, now_s=time.monotonic())
    assert mover.promote(keys, until_s=time.monotonic() + 5.0) == 1
    bench.now_s = time.monotonic()
    assert bench.here("A") == "A"
    assert set(mover.stats()["tiers"]) == {"toy"}
    mover.close()


def test_the_tiers_of_the_package_are_opened_from_their_configs(tmp_path: Path):
    register_tier("toy", ToyTier)
    ssd = {"paths": [str(tmp_path / "ssd")], "capacity_nbytes": 4 << 20, "segment_nbytes": 1 << 20}
    file = {"path": str(tmp_path / "shared"), "capacity_nbytes": 8 << 20, "pack_nbytes": 1 << 20}
    _, mover = opened(ssd=ssd, file=file, tiers={"toy": {}})
    assert [tier.name for tier in mover.tiers] == ["ssd", "file", "toy"]
    assert [tier.place for tier in mover.tiers] == [Place.SSD, Place.FILE, Place.OTHER]
    wait_for(lambda: all(tier.stats()["state"] == "on" for tier in mover.tiers))
    for directory in (tmp_path / "ssd/raykv-default-n0", tmp_path / "shared/raykv"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    mover.close()


@pytest.mark.parametrize(
    ("opener", "name", "problem"),
    [
        (None, "toys", "no tier is called 'toys'; there are: file, ssd"),
        ("tests.support.nowhere:ToyTier", "toy", "cannot be imported"),
        ("tests.support.toy_tier:Nothing", "toy", "cannot be imported"),
        ("", "toy", "cannot be imported"),
    ],
)
def test_a_tier_that_cannot_be_opened_is_a_config_error(opener, name, problem):
    if opener is not None:
        register_tier("toy", opener)
    with pytest.raises(ConfigError, match=problem):
        opened(tiers={name: {}})


def test_when_one_tier_cannot_be_opened_the_others_are_closed(tmp_path: Path):
    ssd = {"paths": [str(tmp_path)], "capacity_nbytes": 4 << 20, "segment_nbytes": 1 << 20}
    with pytest.raises(ConfigError):
        opened(ssd=ssd, tiers={"unknown": {}})
    _, mover = opened(ssd=ssd)  # works only if the failed call has released the lock of the directory
    mover.close()


def test_files_are_not_written_through_links(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "ssd/raykv-default-n0"
    directory.mkdir(parents=True)
    (directory / "lock").symlink_to(victim)
    ssd = {"paths": [str(tmp_path / "ssd")], "capacity_nbytes": 4 << 20, "segment_nbytes": 1 << 20}
    _, mover = opened(ssd=ssd)
    assert mover.tiers[0].stats()["state"] == "off"
    mover.close()
    (directory / "lock").unlink()
    (directory / "000000.segment").symlink_to(victim)
    _, mover = opened(ssd=ssd)
    wait_for(lambda: mover.tiers[0].stats()["state"] in ("on", "off"))
    mover.close()
    assert victim.read_text() == "precious"
