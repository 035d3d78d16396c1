"""Hints under every policy: priorities, ended sessions, times to live."""

import numpy as np
import pytest

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.config import NamespaceConfig
from raykv.errors import UsageError
from raykv.eviction import POLICIES
from raykv.eviction.by_columns import LRU
from tests.support.stores import FULL, LETTERS, Bench, names_to_keys

COUNT = len(LETTERS)


class FullBench(Bench):
    """A bench with a chunk in each slot. The chunks were stored one after the other."""

    @classmethod
    def filled(cls, policy: str, *, chained: bool = False) -> "FullBench":
        bench = cls.open(policy=policy, low_water=0.0, **FULL)
        for place, name in enumerate(LETTERS):
            bench.put(name, parent=LETTERS[place - 1] if chained and place else None, chained=chained)
        return bench

    def read(self, places) -> None:
        self.now_s += 1.0
        self.store.unpin(self.pin([LETTERS[place] for place in places]))

    def hint(self, places, **fields) -> int:
        return self.store.hint(names_to_keys([LETTERS[place] for place in places]), now_s=self.now_s, **fields)

    def retain(self, places, ttl_s: float, priority: int) -> int:
        keys = names_to_keys([LETTERS[place] for place in places])
        return self.store.row_hints.retain(keys, ttl_s, priority, now_s=self.now_s)

    def gone(self) -> list[int]:
        return np.flatnonzero(self.store.table.find(names_to_keys(LETTERS)) < 0).tolist()

    def put_new(self, count: int, prefix: str = "x") -> int:
        return self.put([f"{prefix}{number}" for number in range(count)], chained=False)


@pytest.fixture(params=POLICIES)
def bench(request):
    made = FullBench.filled(request.param)
    yield made
    made.close()


def test_low_goes_before_all_and_high_after_all(bench):
    bench.read(range(0, COUNT, 3))
    assert bench.hint([5, 11, 30], priority=-1) == 3
    assert bench.hint([0, 1, 2, 3], priority=7) == 4
    assert bench.put_new(3) == 3
    assert bench.gone() == [5, 11, 30]
    bench.put_new(25, "y")
    assert not {0, 1, 2, 3} & set(bench.gone())


def test_retained_chunks_outlive_others_for_a_time(bench):
    assert bench.retain([0, 1, 2], 50.0, 100) == 3
    assert bench.retain([3], 50.0, -5) == 1, "this is below the priority that it has"
    bench.put_new(COUNT - 3)
    assert not {0, 1, 2} & set(bench.gone()), "any other chunk goes first"
    assert bench.put_new(1, "y") == 1
    bench.now_s += 51.0
    rows, now = bench.store.table.find(names_to_keys(LETTERS[:3])), bench.store.table.ticks(bench.now_s)
    assert not bench.store.row_hints.ranks(rows, now).any(), "afterwards they are as others"


def test_retention_never_shortens_nor_lowers(bench):
    bench.hint([0], ttl_s=10.0)
    bench.hint([1], ttl_s=1000.0, priority=50)
    bench.hint([2], ended=True)
    expires = bench.column("expires", LETTERS[:2])
    bench.retain([0, 1, 2, 3], 100.0, 20)
    assert bench.column("expires", LETTERS[:4]) == [expires[0] + 90 * 64, expires[1], 0, 0]
    rows, columns = bench.store.table.find(names_to_keys(LETTERS[:4])), bench.store.row_hints

    def ranks(after_s: float) -> list[int]:
        return columns.ranks(rows, bench.store.table.ticks(bench.now_s + after_s)).tolist()

    assert ranks(0.0) == [20, 50, 20, 20]
    bench.retain([0, 3], 10.0, 20)
    bench.retain([2], 10.0, 30)
    bench.retain([3], 200.0, 20)
    bench.retain([2], 1000.0, 1)
    assert ranks(99.0)[1:] == [50, 0, 20]
    assert ranks(0.0) == [20, 50, 30, 20]
    assert ranks(199.0)[3] == 20
    assert ranks(201.0)[1:] == [50, 0, 0]


def test_an_ended_session_goes_first_unless_somebody_reads_it(bench):
    assert bench.hint([20, 21, 22, 23], ended=True) == 4
    bench.hint([7], priority=-100)
    bench.read([22])
    bench.put_new(3)
    assert bench.gone() == [20, 21, 23]
    bench.put_new(1, "y")
    assert bench.gone() == [7, 20, 21, 23]


def test_what_has_expired_goes_before_everything(bench):
    bench.hint([3, 4], ttl_s=5.0)
    bench.hint([9], ended=True)
    bench.hint([9], ttl_s=1000.0, ended=True)
    bench.now_s += 100.0
    bench.put_new(2)
    assert bench.gone() == [3, 4]
    assert (bench.store.counters.expired, bench.store.counters.evicted) == (2, 0)
    bench.put_new(1, "y")
    assert bench.gone() == [3, 4, 9]


def test_a_row_that_is_used_again_has_no_hints_of_the_chunk_before(bench):
    bench.retain(range(COUNT), 50.0, 9)
    bench.hint(range(COUNT), ttl_s=50.0, priority=-5, ended=True)
    bench.put("wxyz", chained=False)
    rows = bench.store.table.find(names_to_keys("wxyz"))
    assert not bench.store.row_hints.ranks(rows, bench.store.table.ticks(bench.now_s)).any()
    assert bench.column("expires", "wxyz") == [0] * 4


def test_defaults_of_the_group_and_hints_of_the_writer(bench):
    bench.store.configure(bench.group, NamespaceConfig(priority=4, ttl_s=50.0), now_s=bench.now_s)
    bench.put("w")
    bench.put("x", hints={"ttl_s": 10.0, "priority": -3})
    rows, now = bench.store.table.find(names_to_keys("wx")), bench.store.table.ticks(bench.now_s)
    assert bench.store.row_hints.ranks(rows, now).tolist() == [4, -3]
    expires, inserted = bench.column("expires", "wx"), bench.column("inserted", "wx")
    assert [end - begin for end, begin in zip(expires, inserted, strict=True)] == [50 * 64, 10 * 64]


def test_what_may_go_below_memory(bench):
    rows, now = bench.store.table.find(names_to_keys("ABC")), bench.store.table.ticks(bench.now_s)
    assert not bench.store.row_hints.below(rows, now)[1].any()
    bench.hint([0], priority=-5)
    bench.hint([1], ended=True)
    may, priorities = bench.store.row_hints.below(rows, now)
    assert (may.all(), priorities.tolist()) == (True, [-1, 1, 0])
    bench.store.configure(bench.group, NamespaceConfig(tiers="dram"), now_s=bench.now_s)
    assert not bench.store.row_hints.below(rows, now)[0].any()
    bench.store.configure(bench.group, NamespaceConfig(tiers="ssd"), now_s=bench.now_s)
    assert bench.store.row_hints.below(rows, now)[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("policy", ["leaf_lru", "density", "ttl"])
def test_a_chain_still_goes_from_its_end(policy):
    bench = FullBench.filled(policy, chained=True)
    bench.hint(range(COUNT // 2), ended=True)  # the first half of the chain: each of its chunks has a child
    bench.put_new(5)
    assert bench.gone() == [*range(COUNT - 5, COUNT)]
    bench.close()


class Requests(LRU):
    """LRU that records each call of `on_request_done`."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []

    def on_request_done(self, columns, rows, output_tokens, now):
        self.done.append((len(rows), output_tokens))


def test_policies_learn_of_requests_that_are_done():
    bench = FullBench.filled("lru")
    bench.store.use_policy(None, Requests, now_s=bench.now_s)
    assert bench.store.hint(names_to_keys("AB?"), output_tokens=300, now_s=bench.now_s) == 2
    assert bench.store.hint(names_to_keys("?"), output_tokens=300, now_s=bench.now_s) == 0
    assert bench.store.hint(names_to_keys("A"), touch=True, now_s=bench.now_s) == 1
    assert bench.store.evictor.policies.default.done == [(2, 300)]
    assert bench.column("frequency", "AB") == [1, 0]
    assert bench.store.used_nbytes == COUNT * PAGE
    bench.close()


@pytest.mark.parametrize("fields", [{"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"priority": 101}, {"output_tokens": -1}])
def test_a_hint_out_of_range_is_refused(fields):
    bench = FullBench.filled("lru")
    with pytest.raises(UsageError, match=next(iter(fields))):
        bench.hint([0], **fields)
    bench.close()
