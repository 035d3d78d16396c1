"""Every fuzz target, with its seeds and with mutated seeds. The runner `tests.fuzz.run` goes on for longer."""

import random
import time
import zlib

import pytest

from tests.fuzz.base import TARGETS, Target, load_targets, mutated
from tests.support.soak import soak

SHORT_S = 0.1

load_targets()


def fuzz(target: Target, seed: int, seconds: float) -> None:
    """Run a target until the time is over. The input of a failure is printed."""
    rng, seeds, count, accepted = random.Random(seed ^ zlib.crc32(target.name.encode())), list(target.seeds()), 0, 0
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        data = mutated(rng, seeds)
        try:
            accepted += target(data)
        except BaseException:
            print(f"target {target.name}, input {data!r}")
            raise
        count += 1
    print(f"{target.name}: {count} inputs, {accepted} accepted")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_seeds_are_accepted(name: str):
    """At least one seed of each target encodes a real object, unless nobody may pass."""
    target = TARGETS[name]
    accepted = [target(seed) for seed in target.seeds()]
    assert any(accepted) or name in ("greeting", "seal", "stream")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_mutated_seeds(name: str, seed: int):
    fuzz(TARGETS[name], seed, SHORT_S)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_mutated_seeds_for_longer(name: str, seed: int):
    fuzz(TARGETS[name], seed, soak("fuzz", 20))
