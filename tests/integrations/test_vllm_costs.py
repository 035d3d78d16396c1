"""Loading or computing a prefix: which one the estimates choose, and what they learn from."""

import pytest

pytest.importorskip("vllm")

from raykv.integrations.vllm.costs import LEAST_TOKENS, PROBE_S, Costs
from raykv.integrations.vllm.metadata import LoadTimes

SECONDS_PER_TOKEN = 1e-3


def measured(*, nbytes_per_s: float, seconds_per_token: float = SECONDS_PER_TOKEN) -> Costs:
    costs = Costs()
    costs.add_step(500, 0.0)
    costs.add_step(0, 500 * seconds_per_token)
    costs.begin_load("first", "n", 1 << 20, 1.0)
    costs.end_load("first", LoadTimes(1.0, 1.0 + (1 << 20) / nbytes_per_s, 1 << 20))
    return costs


def test_without_measurements_a_prefix_is_loaded():
    assert Costs().is_load_sooner("n", 1 << 40, 1, queued_tokens=0, now_s=0.0)


@pytest.mark.parametrize(("nbytes_per_s", "queued", "expected"), [(30e6, 0, True), (20e6, 0, False), (20e6, 200, True)])
def test_the_sooner_one_is_chosen(nbytes_per_s: float, queued: int, expected: bool):
    """A load of 1 000 tokens (23 MB) takes 0.8 or 1.2 s. Computing them takes 1 s, after the queued tokens."""
    costs = measured(nbytes_per_s=nbytes_per_s)
    assert costs.is_load_sooner("n", 23_040_000, 1000, queued_tokens=queued, now_s=10.1) is expected


def test_steps_count_by_their_tokens():
    """A step of 4 000 tokens of a prompt, then many steps that decode 64 requests: 8 tokens in a millisecond, or 2."""
    costs, now_s = Costs(), 0.0
    for _ in range(20):
        for tokens, step_s in ((4000, 0.5), *[(64, 0.032)] * 10):
            costs.add_step(tokens, now_s)
            now_s += step_s
    costs.add_step(0, now_s)
    assert costs.seconds_per_token == pytest.approx((0.5 + 10 * 0.032) / 4640, rel=0.2)


def test_an_engine_that_gets_slower_is_noticed_within_some_thousand_tokens():
    costs = measured(nbytes_per_s=1e9, seconds_per_token=1e-3)
    for step in range(20):
        costs.add_step(1000, 10.0 + 4 * step)
    costs.add_step(0, 90.0)
    assert costs.seconds_per_token == pytest.approx(4e-3, rel=0.1)


def test_a_load_waits_for_those_before_it():
    costs = measured(nbytes_per_s=100e6)
    begun = 0
    while costs.is_load_sooner("n", 46_080_000, 1000, queued_tokens=0, now_s=10.0) and begun < 100:
        costs.begin_load(str(begun), "n", 46_080_000, 10.0)
        begun += 1
    # A fourth load would end after 1.84 s. Computing costs less: 1 s, and a delay of two other requests. The loads of
    # these two end after 0.46 and 0.92 s, so the two wait 0.54 and 0.08 s more. That is 1.62 s in all.
    assert begun == 3
    assert costs.is_load_sooner("another holder", 23_040_000, 1000, queued_tokens=0, now_s=10.0)


def test_parallel_loads_count_the_time_of_the_link_once():
    costs = Costs()
    costs.add_step(500, 0.0)
    costs.add_step(0, 0.5)
    for number in range(4):
        costs.begin_load(str(number), "n", 25_000_000, 1.0)
    for number in range(4):
        costs.end_load(str(number), LoadTimes(1.0, 2.0 + number / 100, 25_000_000))  # 100 MB in 1.03 s
    assert costs.is_load_sooner("n", 90_000_000, 1000, queued_tokens=0, now_s=3.0)
    assert not costs.is_load_sooner("n", 110_000_000, 1000, queued_tokens=0, now_s=3.1)


def test_a_slow_path_is_probed_from_time_to_time_and_used_when_it_is_fast():
    costs, probes = measured(nbytes_per_s=1e6), []
    for now_s in range(10, 200):
        assert not costs.is_load_sooner("n", 23_040_000, 1000, queued_tokens=0, now_s=now_s)
        if costs.is_probe_due("n", now_s):
            probes.append(now_s)
            costs.begin_load("probe", "n", 1 << 20, now_s)
            assert not costs.is_probe_due("n", now_s + PROBE_S), "the first one has not ended"
            costs.end_load("probe", LoadTimes(now_s, now_s + 1.0, 1 << 20))
    assert len(probes) == pytest.approx(190 / (PROBE_S + 1.0), abs=1)
    costs.begin_load("probe", "n", 1 << 20, 200.0)
    costs.end_load("probe", LoadTimes(200.0, 200.01, 1 << 20))
    assert costs.is_load_sooner("n", 23_040_000, 1000, queued_tokens=0, now_s=201.0)


def test_loads_that_fail_make_a_path_slow_however_quickly_they_fail():
    costs = measured(nbytes_per_s=30e6)
    assert costs.is_load_sooner("n", 23_040_000, 1000, queued_tokens=0, now_s=10.0)
    for number in range(10):
        costs.begin_load("lost", "n", 23_040_000, 10.0 + number)
        costs.end_load("lost", LoadTimes(10.0 + number, 10.01 + number, 0))
    assert not costs.is_load_sooner("n", 23_040_000, 1000, queued_tokens=0, now_s=20.0)


def test_steps_that_only_continue_answers_are_measured_apart():
    """With asynchronous scheduling the next step is scheduled at once, so the first after a prefill lasts as long."""
    costs, now_s = Costs(), 0.0
    for step_s in (0.02, 0.04):
        for tokens, took_s in ((500, 0.0), (1, 0.5), *[(2, step_s)] * 60, (0, 60.0)):
            costs.add_step(tokens, now_s)
            now_s += took_s
        assert costs.seconds_per_step == pytest.approx(step_s, rel=0.01)


def test_short_steps_and_pauses_are_no_measure_of_the_engine():
    costs = Costs()
    for tokens, now_s in ((LEAST_TOKENS - 1, 0.0), (500, 5.0), (0, 5.5), (500, 6.0), (0, 100.0)):
        costs.add_step(tokens, now_s)
    assert costs.seconds_per_token == pytest.approx(0.001)
