"""Admission to a tier: which chunks are admitted, and how the byte budget limits writes."""

import numpy as np
import pytest

from raykv.tier.admission import DAY_S, Admission, deserve


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_chunks_that_were_read_or_follow_one_that_was_are_admitted():
    reads, parents = numbers(0, 1, 0, 7), numbers(0, 0, 1, 3)
    assert deserve(reads, parents).tolist() == [False, True, True, True]
    assert deserve(reads, parents, numbers(1, -1, 0, 0)).tolist() == [True, False, True, True], "hints outweigh it"


def test_a_scan_stays_out_and_costs_nothing():
    admission = Admission(DAY_S * 100, now_s=0.0)
    before = admission.left_nbytes(now_s=0.0)
    nobody = np.zeros(10_000, np.int64)
    assert not admission.admit(nobody, nobody, nobody + 4096, now_s=0.0).any()
    assert admission.left_nbytes(now_s=0.0) == before


def test_without_a_budget_all_that_deserve_it_are_let_in():
    admission = Admission(now_s=0.0)
    assert admission.admit(numbers(1, 0, 2), numbers(0, 0, 0), numbers(1 << 50, 1, 1 << 50), now_s=0.0).tolist() == [
        True,
        False,
        True,
    ]
    admission.spend(1 << 60, now_s=0.0)
    assert admission.left_nbytes(now_s=0.0) == float("inf")


def test_the_budget_fills_as_time_passes_up_to_a_burst():
    admission = Admission(DAY_S * 10, burst_s=100.0, now_s=50.0)  # 10 bytes a second, and at most 1000 at once
    read, none = numbers(1, 1, 1), numbers(0, 0, 0)
    assert admission.admit(read, none, numbers(600, 500, 400), now_s=50.0).tolist() == [True, False, True]
    assert not admission.admit(read, none, numbers(1, 1, 1), now_s=50.0).any()
    assert not admission.admit(read, none, numbers(1, 1, 1), now_s=10.0).any(), "a clock that went back grants nothing"
    assert admission.admit(read, none, numbers(20, 20, 20), now_s=55.0).tolist() == [True, True, False]
    assert admission.left_nbytes(now_s=1e6) == 1000
    admission.spend(1500, now_s=1e6)
    assert not admission.admit(read, none, numbers(1, 1, 1), now_s=1e6 + 50).any(), "what was moved is paid off first"
    assert admission.admit(read, none, numbers(1, 1, 1), now_s=1e6 + 51).all()


def test_hints_come_first_when_the_budget_is_short():
    admission = Admission(DAY_S, burst_s=10.0, now_s=0.0)
    some = admission.admit(
        numbers(1, 1, 0, 0), numbers(0, 0, 0, 0), numbers(4, 4, 4, 4), now_s=0.0, priority=numbers(0, 0, 1, 2)
    )
    assert some.tolist() == [False, False, True, True]


@pytest.mark.parametrize("budget_nbytes", [0, 5_000, 50_000, 5_000_000])
def test_never_more_than_the_budget_and_a_burst(budget_nbytes, np_rng):
    admission = Admission(budget_nbytes, burst_s=3600.0, now_s=0.0)
    now_s, written, wanted = 0.0, 0, 0
    for _ in range(500):
        now_s += float(np_rng.exponential(300.0))
        count = int(np_rng.integers(0, 20))
        reads, parents = np_rng.integers(0, 2, count), np_rng.integers(0, 2, count)
        nbytes = np_rng.integers(1, 100, count)
        some = admission.admit(reads, parents, nbytes, now_s=now_s)
        assert not (some & ~deserve(reads, parents)).any()
        written += int(nbytes[some].sum())
        wanted += int(nbytes[deserve(reads, parents)].sum())
        assert written <= budget_nbytes * (now_s + 3600.0) / DAY_S + 1e-6
    most = min(wanted, budget_nbytes * now_s / DAY_S)
    assert written >= 0.8 * most - 100, "and it is used"
