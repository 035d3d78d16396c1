"""Numbers of quota groups: which namespaces share a number, how many there are, and when a number is reused."""

import numpy as np
import pytest

from raykv.config import NamespaceConfig
from raykv.errors import CapacityError, LostError, UsageError
from raykv.memory.layout import MAX_NAMESPACES, QUARANTINE_S
from raykv.protocol.namespace import Namespace
from tests.support.stores import SPACE, Bench, crashed, names_to_keys, reopen


@pytest.fixture
def bench():
    made = Bench.open()
    yield made
    made.close()


def test_tenants_and_adapters_of_one_model_share_a_group(bench):
    assert bench.store.groups.open(SPACE.with_fields(salt="s", lora="l")) == bench.group
    assert bench.store.groups.open(SPACE.with_fields(dtype="d")) != bench.group
    assert bench.store.groups.number(SPACE.group.digest) == bench.store.groups.find(SPACE.group.digest) == bench.group
    nobody = Namespace(model="nobody").digest
    assert bench.store.groups.find(nobody) is None
    with pytest.raises(LostError):
        bench.store.groups.number(nobody)


def fill_list(bench: Bench) -> None:
    """Open as many groups as there are numbers. All are in the cluster's list of namespaces."""
    for number in range(MAX_NAMESPACES - 1):
        bench.store.groups.retire(bench.store.groups.open(Namespace(model=f"m{number}")), retired=False)
    bench.store.groups.retire(bench.group, retired=False)


def test_the_list_is_bounded(bench):
    with pytest.raises(UsageError, match="namespace of"):
        bench.store.groups.open(Namespace(model="m" * 3000))
    fill_list(bench)
    with pytest.raises(CapacityError):
        bench.store.groups.open(Namespace(model="one too many"))


def test_the_number_of_a_dropped_group_is_used_again_when_no_row_has_it(shm_dir):
    """While lent, quarantined or pinned rows have the number, the next process must find the dropped namespace."""
    bench = Bench.open(shm_dir / "n")
    fill_list(bench)
    groups, number, now_s = bench.store.groups, bench.store.groups.open(Namespace(model="m7")), bench.now_s
    config = NamespaceConfig(ttl_s=5.0, policy="fifo", priority=7)
    bench.store.configure(number, config, now_s=now_s)
    bench.put("abc", group=number)
    pinned, lent = bench.pin("a"), bench.lend(2, group=number)
    groups.retire(number)
    rows, generations = bench.store.rows_of(number)
    assert bench.store.drop(rows, generations, now_s=now_s) == 3
    endings = [
        lambda: bench.store.unpin(pinned),
        lambda: bench.store.give_back(lent.rows[:1]),
        lambda: bench.store.quarantine(lent.rows[1:], now_s=bench.now_s),
        lambda: bench.store.evict_ahead(now_s=bench.now_s + QUARANTINE_S),
    ]
    for life, end in enumerate(endings):
        with pytest.raises(CapacityError):
            groups.open(Namespace(model="new"))
        again = reopen(crashed(bench.store, shm_dir, f"life-{life}"), bench.now_s)
        assert again.store.groups.find(Namespace(model="m7").digest) == number, "the table is sound"
        again.store.close()
        end()
    assert groups.open(Namespace(model="new")) == number
    assert groups.find(Namespace(model="m7").digest) is None
    assert not bench.store.evictor.departures[number].any()
    assert bench.store.evictor.policies.own(number) is None, "nothing of the old group's config holds"
    bench.put("xyz", group=number)
    assert bench.column("expires", "xyz") == [0, 0, 0]
    rows = bench.store.table.find(names_to_keys("xyz"))
    assert not np.any(bench.store.row_hints.ranks(rows, bench.store.table.ticks(bench.now_s)))
    bench.close()


def test_a_group_that_is_opened_again_is_not_given_away(bench):
    fill_list(bench)
    number = bench.store.groups.open(Namespace(model="m7"))
    bench.store.groups.retire(number)
    bench.store.groups.retire(number, retired=False)
    with pytest.raises(CapacityError):
        bench.store.groups.open(Namespace(model="new"))
