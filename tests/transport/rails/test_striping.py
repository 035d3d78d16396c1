"""Batches over simulated rails with unequal rates, changes and losses. The clock belongs to the test."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from raykv.errors import UsageError
from raykv.transport.breaker import MAX_GROWTH
from raykv.transport.rails.striping import RATED_NBYTES, STRIPED_NBYTES, WINDOW_S, Rails, Share

GBIT = 1e9 / 8
MIB = 1 << 20
PAUSE_S = 0.5
LATENCY_S = 5e-6
DETECTION_S = 2e-3
"""How long a sender takes to see that a rail is dead."""


class Simulation:
    """Readers that each move one batch after the other, over rails that serve shares one after the other.

    Attributes:
        rates: The true rate of each rail at a time, in bytes a second. 0: the rail is dead.
        moved: (time, rail, bytes) of each share that was transferred.
        batches: For each finished batch, how often each of its chunks was transferred.
    """

    def __init__(self, rails: Rails, rates: list[Callable[[float], float]], rng: random.Random) -> None:
        self.rails, self.rates, self.rng = rails, rates, rng
        self.now_s = 0.0
        self.moved: list[tuple[float, int, int]] = []
        self.batches: list[Counter[int]] = []
        self.failed = 0
        self.free_s = [0.0] * len(rates)
        self.events = list[tuple[float, int, Callable[[], None]]]()
        self.numbers = itertools.count()

    def run(self, *, readers: int, until_s: float) -> None:
        """Let readers begin batches until a time, and finish them.

        A single reader cuts its chunks into parts of at most 1 MiB: with one batch at a time, a chunk more or less
        would be more than 5 % of a slow rail's part.
        """
        self.most_nbytes = 20_000_000 if readers > 1 else MIB
        for _ in range(readers):
            self._batch(until_s)
        while self.events:
            self.now_s, _, event = heapq.heappop(self.events)
            event()

    def _batch(self, until_s: float) -> None:
        """Begin a batch of 1 to 64 chunks of 0.5 to 20 MB, all of one size, as a namespace has it."""
        if self.now_s < until_s:
            nbytes, count = self.rng.randint(500_000, 20_000_000), self.rng.randint(1, 64)
            parts = [min(self.most_nbytes, nbytes - start) for start in range(0, nbytes, self.most_nbytes)]
            sizes = parts * count
            self._send(sizes, list(range(len(sizes))), [], Counter(), until_s)

    def _send(self, sizes: list[int], chunks: list[int], left: list[Share], done: Counter[int], until_s: float) -> None:
        """Assign some chunks of a batch."""
        shares = self.rails.assign([sizes[chunk] for chunk in chunks], self.now_s)
        assert sorted(index for share in shares for index in share.indices) == list(range(len(chunks)))
        left.extend(shares)
        for share in shares:
            self._transfer(share, sizes, [chunks[index] for index in share.indices], left, done, until_s)

    def _transfer(
        self,
        share: Share,
        sizes: list[int],
        chunks: list[int],
        left: list[Share],
        done: Counter[int],
        until_s: float,
    ) -> None:
        begun_s = max(self.now_s, self.free_s[share.rail])
        rate = self.rates[share.rail](begun_s)
        end_s = begun_s + share.nbytes / rate if rate else float("inf")
        dies = not rate or not self.rates[share.rail](end_s)

        def end() -> None:
            left.remove(share)
            if dies:
                self.failed += 1
                self.rails.fail(share, self.now_s)
                self._send(sizes, chunks, left, done, until_s)
            else:
                self.rails.done(share, self.now_s)
                self.moved.append((self.now_s, share.rail, share.nbytes))
                done.update(chunks)
            if not left:
                assert done == Counter(range(len(sizes))), "each chunk once"
                self.batches.append(done)
                self._batch(until_s)

        if dies:
            at_s = self.now_s + DETECTION_S
        else:
            self.free_s[share.rail], at_s = end_s, end_s + LATENCY_S
        heapq.heappush(self.events, (at_s, next(self.numbers), end))

    def shares(self, from_s: float, to_s: float) -> list[float]:
        """Return the part of all bytes that each rail moved in a span of time."""
        moved = [0] * len(self.rates)
        for at_s, rail, nbytes in self.moved:
            moved[rail] += nbytes if from_s <= at_s < to_s else 0
        return [nbytes / sum(moved) for nbytes in moved]


def simulation(rng: random.Random, rates: list[Callable[[float], float]], nominal: list[float]) -> Simulation:
    return Simulation(Rails(nominal, pause_s=PAUSE_S, rng=rng), rates, rng)


def assert_near_ideal(shares: list[float], rates: list[float]) -> None:
    """Check that each rail's part differs from the ideal, rate / sum of the rates, by less than 5 % of the ideal."""
    ideal = [rate / sum(rates) for rate in rates]
    for share, wanted in zip(shares, ideal, strict=True):
        assert abs(share - wanted) <= 0.05 * wanted, (shares, ideal)


@pytest.mark.parametrize("readers", [1, 4, 16])
def test_rails_of_unequal_rates_share_the_load(rng, readers):
    """The rails say that they are equal; the measured rates show 400, 200 and 100 Gbit/s."""
    rates = [400 * GBIT, 200 * GBIT, 100 * GBIT]
    run = simulation(rng, [lambda _, rate=rate: rate for rate in rates], [400 * GBIT] * 3)
    run.run(readers=readers, until_s=4.0)
    assert_near_ideal(run.shares(0.5, 4.0), rates)
    if readers > 1:  # the rails are never idle: all bytes arrive in the time that the sum of the rates needs
        assert sum(nbytes for _, _, nbytes in run.moved) >= 0.95 * 4.0 * sum(rates)
    for rail, rate in enumerate(rates):
        assert abs(run.rails.rate(rail, run.now_s) - rate) <= 0.05 * rate
        assert run.rails.outstanding(rail) == 0


@pytest.mark.parametrize("readers", [1, 8])
def test_a_rail_whose_rate_changes_is_used_by_its_new_rate(rng, readers):
    """The first rail falls from 400 to 100 Gbit/s, and rises again."""

    def first(now_s: float) -> float:
        return (100 if 4.0 <= now_s < 8.0 else 400) * GBIT

    run = simulation(rng, [first, lambda _: 200 * GBIT, lambda _: 100 * GBIT], [400 * GBIT, 200 * GBIT, 100 * GBIT])
    run.run(readers=readers, until_s=12.0)
    settle_s = 4 * WINDOW_S
    assert_near_ideal(run.shares(1.0, 4.0), [400, 200, 100])
    assert_near_ideal(run.shares(4.0 + settle_s, 8.0), [100, 200, 100])
    assert_near_ideal(run.shares(8.0 + settle_s, 12.0), [400, 200, 100])


def test_a_rail_lost_in_the_middle_loses_no_chunk_and_is_used_again_when_it_is_back(rng):
    """The simulation checks each batch: each chunk is transferred once, whatever fails."""
    lost_s, back_s, end_s = 2.0, 5.0, 12.0
    rates = [400 * GBIT, 200 * GBIT, 100 * GBIT]
    sources = [lambda _, rate=rate: rate for rate in rates]
    sources[1] = lambda now_s: 0.0 if lost_s <= now_s < back_s else rates[1]
    run = simulation(rng, sources, rates)
    run.run(readers=8, until_s=end_s)
    assert run.failed
    assert_near_ideal(run.shares(1.0, lost_s), rates)
    without = run.shares(lost_s + 0.2, back_s)
    assert without[1] == 0.0
    assert_near_ideal([without[0], without[2]], [rates[0], rates[2]])
    back_by_s = back_s + MAX_GROWTH * PAUSE_S  # the longest pause
    assert run.rails.works(1, end_s)
    assert_near_ideal(run.shares(back_by_s + 1.0, end_s), rates)
    assert run.failed <= 16 + 8, "the shares under way when it was lost, and one probe a pause"


def test_any_rails_lose_and_come_back_at_random(rng):
    """Outages of all rails but the nearest, in seeded runs: every batch arrives whole."""
    for _ in range(10):
        count = rng.randint(2, 8)
        outages = [sorted(rng.uniform(0, 3.0) for _ in range(4)) for _ in range(count)]
        outages[0] = [9.0] * 4
        rates = [rng.choice([100, 200, 400]) * GBIT for _ in range(count)]

        def rate(now_s: float, rail: int, outages=outages, rates=rates) -> float:
            first, second, third, fourth = outages[rail]
            return 0.0 if first <= now_s < second or third <= now_s < fourth else rates[rail]

        sources = [lambda now_s, rail=rail, rate=rate: rate(now_s, rail) for rail in range(count)]
        run = simulation(rng, sources, rates)
        run.run(readers=4, until_s=3.0)
        assert len(run.batches) > 100
        assert [run.rails.outstanding(rail) for rail in range(count)] == [0] * count


# -- rules -------------------------------------------------------------------------------------------------------------


def four(rng: random.Random, pause_s: float = PAUSE_S) -> Rails:
    return Rails([400 * GBIT] * 4, pause_s=pause_s, rng=rng)


def spread(shares: list[Share]) -> dict[int, list[int]]:
    return {share.rail: share.indices for share in shares}


@pytest.mark.parametrize("near", range(4))
def test_a_small_batch_goes_to_the_nearest_rail_and_a_large_one_to_all(rng, near):
    rails = four(rng)
    small = [STRIPED_NBYTES // 4] * 3 + [STRIPED_NBYTES // 4 - 1]
    assert spread(rails.assign(small, 0.0, near=near)) == {near: [0, 1, 2, 3]}
    large = four(rng).assign([STRIPED_NBYTES // 4] * 4, 0.0, near=near)
    assert sorted(share.indices[0] for share in large) == [0, 1, 2, 3]
    assert {share.rail for share in large} == {0, 1, 2, 3}
    assert {share.nbytes for share in large} == {STRIPED_NBYTES // 4}
    assert rails.assign([], 0.0) == []


def test_a_small_batch_avoids_a_rail_that_was_taken_out(rng):
    rails = four(rng)
    rails.take_out(2, 0.0)
    assert spread(rails.assign([MIB, MIB], 0.0, near=2)) == {0: [0, 1]}
    assert [rails.works(rail, 0.0) for rail in range(4)] == [True, True, False, True]


def test_what_is_under_way_counts(rng):
    """The first rail still has 60 MiB to send; three others take a batch of 60 MiB, 20 MiB each."""
    rails = four(rng)
    first = rails.assign([60 * MIB], 0.0)
    assert spread(first) == {0: [0]}
    shares = rails.assign([4 * MIB] * 15, 0.0)
    assert {share.rail: len(share.indices) for share in shares} == {1: 5, 2: 5, 3: 5}
    rails.done(first[0], 1e-3)
    assert rails.outstanding(0) == 0


def test_the_spread_ends_within_one_chunk_of_the_best(rng):
    """Moving the smallest chunk of a rail to another rail never makes it end earlier there."""
    for _ in range(200):
        rates = [rng.choice([25, 100, 200, 400]) * GBIT for _ in range(rng.randint(1, 8))]
        sizes = [rng.randint(1, 20 * MIB) for _ in range(rng.randint(1, 64))]
        if sum(sizes) < STRIPED_NBYTES:
            continue
        shares = Rails(rates, pause_s=PAUSE_S, rng=rng).assign(sizes, 0.0)
        assert sorted(index for share in shares for index in share.indices) == list(range(len(sizes)))
        moved = {share.rail: sum(sizes[index] for index in share.indices) for share in shares}
        assert all(share.nbytes == moved[share.rail] for share in shares)
        assert all(share.indices == sorted(share.indices) for share in shares)
        for share in shares:
            smallest = min(sizes[index] for index in share.indices)
            for other, rate in enumerate(rates):
                assert moved[share.rail] / rates[share.rail] <= (moved.get(other, 0) + smallest) / rate + 1e-12


def test_a_probe_is_one_element_and_brings_the_rail_back(rng):
    rails = four(rng)
    batch = [4 * MIB] * 12
    first = rails.assign(batch, 0.0)
    for share in first:
        if share.rail == 1:
            rails.fail(share, 0.1)
        else:
            rails.done(share, 0.1)
    assert set(spread(rails.assign(batch, 0.1))) == {0, 2, 3}
    later_s = 0.1 + PAUSE_S
    probing = rails.assign(batch, later_s)
    assert spread(probing)[1] == [11]
    assert 1 not in spread(rails.assign(batch, later_s)), "one probe at a time"
    (probe,) = (share for share in probing if share.rail == 1)
    rails.cancel(probe, later_s)
    assert not rails.works(1, later_s), "a probe that says nothing leaves the rail out"
    (again,) = (share for share in rails.assign(batch, later_s) if share.rail == 1)
    rails.done(again, later_s)
    assert rails.works(1, later_s)
    assert len(spread(rails.assign(batch, later_s))[1]) > 1


def test_a_single_element_is_no_probe_while_another_rail_works(rng):
    rails = four(rng)
    rails.take_out(0, 0.0)
    assert spread(rails.assign([8 * MIB], PAUSE_S)) == {1: [0]}
    assert spread(rails.assign([MIB, MIB], PAUSE_S)) == {0: [1], 1: [0]}


def test_if_all_rails_are_out_nothing_is_assigned_until_a_probe_takes_all(rng):
    rails = four(rng)
    for rail in range(4):
        rails.take_out(rail, 0.0)
    assert rails.assign([4 * MIB] * 8, 0.0) == []
    (probe,) = rails.assign([4 * MIB] * 8, PAUSE_S, near=3)
    assert (probe.rail, probe.indices) == (3, list(range(8)))
    rails.done(probe, PAUSE_S)
    assert set(spread(rails.assign([4 * MIB] * 8, PAUSE_S))) >= {3}


def test_a_share_that_failed_before_the_rail_was_back_does_not_take_it_out_again(rng):
    rails = Rails([400 * GBIT] * 2, pause_s=PAUSE_S, rng=rng)
    old = [share for share in rails.assign([4 * MIB] * 4, 0.0) if share.rail == 1]
    rails.take_out(1, 0.0)
    (probe,) = (share for share in rails.assign([4 * MIB] * 4, PAUSE_S) if share.rail == 1)
    rails.done(probe, PAUSE_S)
    rails.fail(old[0], PAUSE_S)
    assert rails.works(1, PAUSE_S)


def test_small_shares_say_nothing_about_the_rate(rng):
    """Each takes 1 ms, mostly latency."""
    rails, now_s = four(rng), 0.0
    for _ in range(1000):
        (share,) = rails.assign([RATED_NBYTES - 1], now_s)
        now_s += 1e-3
        rails.done(share, now_s)
    assert rails.rate(0, now_s) == pytest.approx(400 * GBIT)


def test_shares_that_run_at_the_same_time_do_not_make_a_rail_look_slow(rng):
    """Eight batches at a time share a rail of 100 Gbit/s: each takes eight times as long, at the same rate."""
    rails, now_s, rate = Rails([400 * GBIT], pause_s=PAUSE_S, rng=rng), 0.0, 100 * GBIT
    for _ in range(200):
        shares = [rails.assign([16 * MIB], now_s)[0] for _ in range(8)]
        now_s += 8 * 16 * MIB / rate
        for share in shares:
            rails.done(share, now_s)
        now_s += 0.01  # idle time is not counted
    assert rails.rate(0, now_s) == pytest.approx(rate, rel=0.01)


def test_a_slow_rail_that_was_not_used_is_tried_again(rng):
    """A rail at a thousandth of its rate gets no chunk any more. Its measurements fade, and it gets some again."""
    rails = Rails([400 * GBIT] * 2, pause_s=PAUSE_S, rng=rng)
    batch, now_s = [8 * MIB] * 8, 0.0
    shares = rails.assign(batch, now_s)
    assert set(spread(shares)) == {0, 1}
    for share in shares:
        now_s = share.nbytes / ((400 if share.rail == 0 else 0.4) * GBIT)
        rails.done(share, now_s)
    now_s += 1.0
    (share,) = rails.assign(batch, now_s)
    assert share.rail == 0
    rails.done(share, now_s + share.nbytes / (400 * GBIT))
    assert set(spread(rails.assign(batch, now_s + 30.0))) == {0, 1}


@pytest.mark.parametrize("rates", [[], [400 * GBIT, 0.0], [-1.0]])
def test_rails_without_a_rate_are_refused(rng, rates):
    with pytest.raises(UsageError, match="nominal rate"):
        Rails(rates, pause_s=PAUSE_S, rng=rng)
