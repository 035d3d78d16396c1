"""The comparison of the soak finds what grows, and nothing else."""

import os
import random

import pytest

from tests.chaos.hosts import missing
from tests.chaos.soak import Sample, growth, sample, soak
from tests.support.soak import soak as number


def samples(process: str, rng: random.Random, *, grows: float = 0.0, ends_s: float = 1800.0) -> list[Sample]:
    """Samples each 5 s: numbers that rise to a level first, move about it, and grow by `grows` of it in an hour."""
    found = []
    for at_s in range(0, int(ends_s), 5):
        level = min(1.0, at_s / 200) + grows * at_s / 3600
        noise = rng.uniform(-0.05, 0.05)
        numbers = (int(40e6 * (level + noise)), int(40 * (level + noise)), int(30 * (level + noise)))
        found.append(Sample(float(at_s), process, 1, *numbers))
    return found


def test_what_grows_is_found(rng: random.Random):
    assert growth(samples("flat", rng)) == []
    assert growth([*samples("flat", rng), *samples("restarted", rng, grows=9.0, ends_s=900.0)]) == []
    found = growth([*samples("flat", rng), *samples("leak", rng, grows=2.0)])
    assert [line.split()[1] for line in found] == ["nbytes", "descriptors", "threads"]
    assert all(line.startswith("leak: ") for line in found)


def test_a_sample_is_of_this_process():
    mine = sample(1.0, "me", os.getpid())
    assert mine is not None
    assert mine.nbytes > 10 << 20
    assert mine.threads >= 1
    assert mine.descriptors >= 3
    assert sample(1.0, "nobody", 1 << 22) is None


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_processes_stay_flat_under_load_and_faults():
    assert soak(number("seed", 1), number("minutes", 30), None) == []
