"""The contract of tiers, run for the SSD tier, the file tier and a toy tier."""

import os
from pathlib import Path

import pytest

from raykv.tier.segments.format import BLOCK_NBYTES
from tests.support.tier_contract import Hanging, TierContract
from tests.support.tiers import Arena, Driver, FileDriver, SsdDriver, content_of, environment
from tests.support.toy_tier import ToyTier


def overwrite(folder: Path, key: bytes) -> None:
    """Change the first byte of a chunk in every file that has it. Chunks begin at multiples of BLOCK_NBYTES."""
    beginning = content_of(key, 5000)[:64]
    for path in folder.rglob("*"):
        raw = path.read_bytes() if path.is_file() else b""
        for block in range(0, len(raw), BLOCK_NBYTES):
            if raw[block : block + 64] == beginning:
                with path.open("r+b") as opened:
                    opened.seek(block)
                    opened.write(bytes([beginning[0] ^ 1]))


class TestSsdTier(TierContract):
    def open(self, path: Path) -> Driver:
        self.path = path
        return SsdDriver(path, direct="never").started()

    def damage(self, driver: Driver, key: bytes) -> None:
        overwrite(self.path, key)

    def hang(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Hanging:
        return Hanging(monkeypatch, os, "pwritev", "preadv")


class TestFileTier(TierContract):
    def open(self, path: Path) -> Driver:
        self.path = path
        return FileDriver(path).on()

    damage, hang = TestSsdTier.damage, TestSsdTier.hang


class TestToyTier(TierContract):
    def open(self, path: Path) -> Driver:
        arena = Arena()
        return Driver(ToyTier({}, environment(arena)), arena)

    def damage(self, driver: Driver, key: bytes) -> None:
        found, content = driver.tier.chunks[key]
        driver.tier.chunks[key] = found, bytes([content[0] ^ 1]) + content[1:]

    def hang(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Hanging:
        return Hanging(monkeypatch, driver.tier, "go_on")
