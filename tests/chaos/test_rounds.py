"""Rounds of faults under load: no wrong byte, no failed operation, none past its deadline, and convergence."""

from collections import Counter
from itertools import islice

import pytest

from tests.chaos.hosts import missing
from tests.chaos.rounds import KINDS, plan
from tests.chaos.run import HOSTS, run
from tests.support.soak import soak

network = pytest.mark.skipif(bool(missing()), reason=missing())


def test_a_plan_is_a_function_of_its_seed_and_has_every_kind(seed: int):
    events = list(islice(plan(seed, HOSTS), 60))
    assert events == list(islice(plan(seed, HOSTS), 60))
    assert events != list(islice(plan(seed + 1, HOSTS), 60))
    kinds = Counter(event.kind for event in events)
    assert set(kinds) == {*KINDS, "drain", "join"} - {"move"}
    away = ""
    for event in events:
        assert event.kind == "join" if event.host == away else event.kind != "join"
        away = event.host if event.kind == "drain" else "" if event.kind == "join" else away


@network
@pytest.mark.slow
def test_the_cluster_survives_rounds_of_faults(seed: int):
    assert run(seed % 1000, 8).failures == []


@network
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_cluster_survives_many_rounds_of_faults():
    assert run(soak("seed", 1), soak("rounds", 100)).failures == []
