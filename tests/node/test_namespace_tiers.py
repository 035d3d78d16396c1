"""The tiers that a namespace's config allows for its chunks, and which chunks are demoted first."""

import time
from collections.abc import Iterator

import pytest

from raykv.config import NamespaceConfig
from raykv.tier import demotion
from tests.support.house import House
from tests.support.stores import names_to_keys

CHUNKS = [f"chunk-{number}" for number in range(15)]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A store with room for one more chunk, of which an eighth is demoted in advance."""
    monkeypatch.setattr(demotion, "AHEAD_NBYTES", 0)
    made = House(low_water=0.0, high_water=0.01)
    for name in CHUNKS:
        made.put([name], 60_000, chained=False)
    yield made
    made.mover.close()
    made.store.close()


def demoted(house: House) -> list[str]:
    """Demote all chunks that are due. Returns the names of the chunks that are below memory."""
    house.mover.demote()
    house.toy.go_on()
    return [name for name, below in zip(CHUNKS, house.below(CHUNKS), strict=True) if below]


@pytest.mark.parametrize(("tiers", "first"), [("both", []), ("ssd", CHUNKS[:2]), ("dram", [])])
def test_tiers_of_a_namespace(house, tiers, first):
    house.store.configure(house.bench.group, NamespaceConfig(tiers=tiers), now_s=time.monotonic())
    assert demoted(house) == first
    if tiers == "dram":
        house.read(CHUNKS)
        assert demoted(house) == []


def test_a_session_that_ended_is_demoted_first_though_it_was_read_once(house):
    house.read(CHUNKS)
    house.store.hint(names_to_keys(CHUNKS[7:9]), ended=True, now_s=time.monotonic())
    assert demoted(house) == CHUNKS[7:9]
    house.put(["new-1", "new-2"], 60_000, chained=False)
    assert house.read(CHUNKS) == [number != 7 for number in range(15)], "and it leaves memory when room is needed"
