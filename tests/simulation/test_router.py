"""The router's policy before modelled engines: the loads of `benchmarks.serving`, many seeds, no noise of a machine."""

from statistics import fmean, median

import pytest

from benchmarks.router_simulation import Played, RouterName, play
from benchmarks.serving_load import Load
from raykv.integrations.routing.choice import Rates

SEEDS = range(16)
RATES = [Rates(0.0023, 0.15), Rates(0.008, 0.3), Rates(0.00002, 0.01)]
"""Seconds per token and per step: engines with 0.4 of a core on two kinds of CPU, and one about as fast as a GPU."""


def played(router: RouterName, load: Load, rates: Rates, replicas: int = 4) -> list[Played]:
    return [play(router, load, replicas, rates, seed) for seed in SEEDS]


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_conversations_are_answered_sooner_than_by_counting_requests(rates: Rates):
    load = Load(think_s=rates.step_s * 27)
    mine = played("raykv", load, rates)
    assert median(each.imbalance for each in mine) <= 1.3
    for other in ("two-choices", "shortest-queue"):
        theirs = played(other, load, rates)
        assert fmean(each.ttft_s for each in mine) < fmean(each.ttft_s for each in theirs)
        assert fmean(each.computed for each in mine) < 1.01 * fmean(each.computed for each in theirs)


@pytest.mark.parametrize("rates", RATES, ids=str)
def test_a_burst_of_one_new_prefix_computes_it_once(rates: Rates):
    load = Load(sessions=16, turns=1, systems=1, system_words=1990, first_words=8, think_s=1e-3)
    least = 1990 + 16 * 8 + 17 * 8
    assert max(each.computed for each in played("raykv", load, rates, replicas=2)) <= 1.2 * least
