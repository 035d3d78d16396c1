"""The breaker and the rates, with a clock of the test."""

import random

import pytest

from raykv.transport.breaker import (
    JITTER,
    MAX_GROWTH,
    RATED_NBYTES,
    SLOW_CALLS,
    SLOW_S,
    SLOW_SHARE,
    Breaker,
    Rates,
    Verdict,
)

PAUSE_S = 2.0


def call(breaker: Breaker, verdict: Verdict, now_s: float) -> None:
    began = breaker.begin(now_s)
    assert began is not None
    breaker.end(began, verdict, now_s)


def opened(rng: random.Random, verdict: Verdict = Verdict.FAILED) -> Breaker:
    breaker = Breaker(PAUSE_S, rng)
    for _ in range(SLOW_CALLS if verdict is Verdict.SLOW else 1):
        call(breaker, verdict, 0.0)
    assert not breaker.admits(0.0)
    return breaker


def test_after_the_pause_one_request_at_a_time_may_go(rng):
    breaker = opened(rng)
    assert breaker.pause_s(0.0) is not None
    assert breaker.begin((1 - JITTER) * PAUSE_S - 0.01) is None
    probe = breaker.begin(PAUSE_S)
    assert probe is not None
    assert [breaker.begin(PAUSE_S) for _ in range(10)] == [None] * 10
    assert breaker.pause_s(PAUSE_S) == 0.0
    breaker.end(probe, Verdict.ALIVE, PAUSE_S)
    assert breaker.pause_s(PAUSE_S) is None
    assert all(breaker.begin(PAUSE_S) is not None for _ in range(10))


def test_a_probe_without_a_verdict_lets_the_next_one_go(rng):
    breaker = opened(rng)
    for _ in range(3):
        call(breaker, Verdict.NONE, PAUSE_S)
    assert breaker.pause_s(PAUSE_S) == 0.0


def test_pauses_grow_up_to_a_bound_and_start_over_after_success(rng):
    breaker, now_s, pauses = Breaker(PAUSE_S, rng), 0.0, []
    for _ in range(8):
        call(breaker, Verdict.FAILED, now_s)
        pause_s = breaker.pause_s(now_s)
        assert pause_s is not None
        pauses.append(pause_s)
        assert not breaker.admits(now_s + 0.99 * pause_s)
        now_s += pause_s
    for number, pause_s in enumerate(pauses):
        longest_s = PAUSE_S * min(MAX_GROWTH, 2**number)
        assert (1 - JITTER) * longest_s <= pause_s <= longest_s
    assert len(set(pauses[-4:])) == 4, "the pauses of equal length differ by chance"
    call(breaker, Verdict.ALIVE, now_s)
    call(breaker, Verdict.FAILED, now_s)
    assert (breaker.pause_s(now_s) or 0.0) <= PAUSE_S


def test_calls_that_fail_together_open_the_breaker_once(rng):
    breaker = Breaker(PAUSE_S, rng)
    began = [breaker.begin(0.0) for _ in range(16)]
    for number in began:
        assert number is not None
        breaker.end(number, Verdict.FAILED, 1.0)
    assert breaker.admits(1.0 + PAUSE_S)
    probe = breaker.begin(1.0 + PAUSE_S)
    assert probe is not None
    for number in began:  # calls from before neither close the breaker nor take the place of the probe
        assert number is not None
        breaker.end(number, Verdict.FAST, 1.0 + PAUSE_S)
    assert not breaker.admits(1.0 + PAUSE_S)


def test_slow_calls_in_a_row_open_it_and_a_fast_one_between_does_not(rng):
    breaker = Breaker(PAUSE_S, rng)
    for _ in range(5):
        for _ in range(SLOW_CALLS - 1):
            call(breaker, Verdict.SLOW, 0.0)
            call(breaker, Verdict.ALIVE, 0.0)
            call(breaker, Verdict.NONE, 0.0)
        call(breaker, Verdict.FAST, 0.0)
    assert breaker.admits(0.0)


@pytest.mark.parametrize(
    ("verdict", "closes"),
    [
        (Verdict.ALIVE, True),
        (Verdict.NONE, False),
        (Verdict.SLOW, False),
        (Verdict.FAILED, False),
        (Verdict.FAST, True),
    ],
)
def test_a_slow_peer_is_back_after_a_probe_that_is_not_slow(rng, verdict, closes):
    breaker = opened(rng, Verdict.SLOW)
    call(breaker, verdict, PAUSE_S)
    assert (breaker.pause_s(PAUSE_S) is None) == closes


def test_after_a_small_probe_one_slow_call_opens_the_breaker_of_a_slow_peer_again(rng):
    breaker = opened(rng, Verdict.SLOW)
    call(breaker, Verdict.ALIVE, PAUSE_S)
    assert all(breaker.begin(PAUSE_S) is not None for _ in range(5)), "requests go again, also at the same time"
    call(breaker, Verdict.SLOW, PAUSE_S)
    assert not breaker.admits(2 * PAUSE_S), "the pause is longer than the first"
    call(breaker, Verdict.FAST, 4 * PAUSE_S)
    call(breaker, Verdict.SLOW, 4 * PAUSE_S)
    assert breaker.admits(4 * PAUSE_S)


def test_without_a_pause_it_never_opens(rng):
    breaker = Breaker(0.0, rng)
    for verdict in (Verdict.FAILED, *[Verdict.SLOW] * 9):
        call(breaker, verdict, 0.0)
    assert all(breaker.begin(0.0) is not None for _ in range(3))


def test_one_probe_at_a_time_whatever_happens(rng):
    """A random run, compared with the rules: no call goes during a pause, and at most one goes until a good answer."""
    for _ in range(200):
        breaker, now_s, under_way = Breaker(PAUSE_S, rng), 0.0, list[tuple[int, bool]]()
        for _ in range(60):
            now_s += rng.random()
            was_open, pause_s = breaker.pause_s(now_s) is not None, breaker.pause_s(now_s)
            if rng.random() < 0.5:
                began = breaker.begin(now_s)
                if began is not None:
                    assert not pause_s
                    assert not (was_open and any(probe for _, probe in under_way))
                    under_way.append((began, was_open))
            elif under_way:
                began, probe = under_way.pop(rng.randrange(len(under_way)))
                verdict = rng.choice(list(Verdict))
                breaker.end(began, verdict, now_s)
                if was_open and not probe:
                    assert breaker.pause_s(now_s) == pause_s, "a call from before the pause has changed it"


# -- rates ------------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def rates(**nbytes_per_s: float) -> Rates:
    made = Rates()
    for address, rate in nbytes_per_s.items():
        for _ in range(3):
            assert made.judge(address, int(rate), 1.0, late=False) is not Verdict.SLOW
    return made


@pytest.mark.parametrize(
    ("nbytes", "seconds", "late", "expected"),
    [
        (0, 9.0, False, Verdict.ALIVE),
        (RATED_NBYTES - 1, 9.0, False, Verdict.ALIVE),
        (0, 9.0, True, Verdict.FAILED),
        (100 * MIB, 1.0, False, Verdict.FAST),
        (100 * MIB, 1.0, True, Verdict.NONE),
        (100 * MIB // SLOW_SHARE + MIB, 1.0, False, Verdict.FAST),
        (100 * MIB // SLOW_SHARE - MIB, 1.0, False, Verdict.SLOW),
        (100 * MIB // SLOW_SHARE - MIB, 1.0, True, Verdict.SLOW),
        (MIB, 0.4, False, Verdict.FAST),
        (MIB // 2, 0.4, True, Verdict.SLOW),
    ],
)
def test_a_read_is_compared_with_those_from_others(nbytes, seconds, late, expected):
    assert SLOW_S == 0.5
    assert rates(a=100 * MIB, b=90 * MIB, c=300 * MIB).judge("d", nbytes, seconds, late=late) is expected


def test_without_others_only_deadlines_count():
    made = rates(d=100 * MIB)
    assert made.judge("d", MIB, 60.0, late=False) is Verdict.FAST
    assert made.judge("d", MIB, 60.0, late=True) is Verdict.SLOW
    made = rates(a=100 * MIB, d=100 * MIB)
    made.remove("a")
    assert made.judge("d", MIB, 60.0, late=False) is Verdict.FAST


def test_one_slow_peer_among_others_does_not_make_the_others_slow():
    made = rates(a=100 * MIB, b=100 * MIB, c=100 * MIB)
    assert [made.judge("c", MIB, 1.0, late=False) for _ in range(9)] == [Verdict.SLOW] * 9
    assert made.judge("a", 100 * MIB, 1.0, late=False) is Verdict.FAST
