"""Slots compared with a model that knows the slot of every page."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.config import SLOT_ALIGNMENT_NBYTES as PAGE
from raykv.errors import DamagedError
from raykv.memory.slots import Slots, slot_nbytes, slot_places

EXTENTS, EXTENT_PAGES = 5, 12
EXTENT_NBYTES = EXTENT_PAGES * PAGE
SIZES = [PAGE * pages for pages in (1, 2, 3, 5, 12)]


def slots_of(column: np.ndarray, broken: frozenset[int] = frozenset(), rows=(), firsts=()) -> Slots:
    made = Slots(column, EXTENT_NBYTES)
    made.populate = lambda extent: extent not in broken
    made.enter(np.array(rows, np.int32), slot_places(np.array(firsts, np.uint32), column, EXTENT_NBYTES))
    made.open_extents()
    return made


class Model:
    """Remembers which slot each page of the arena belongs to."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.column = np.zeros(EXTENTS, np.uint32)
        self.broken = broken
        self.owner: dict[int, int] = {}  # page -> first page of its slot
        self.size: dict[int, int] = {}  # first page -> slot size
        self.rows, self.row_of = 0, dict[int, int]()  # number of rows so far; first page -> row
        self.slots = slots_of(self.column, broken)

    def take(self, count: int, size: int) -> None:
        promised = self.slots.free(size)
        rows = np.arange(self.rows, self.rows + count, dtype=np.int32)
        self.rows += count
        pages = self.slots.take(rows, size).tolist()
        self.row_of.update(zip(pages, rows.tolist(), strict=False))
        if not self.broken:
            assert len(pages) == min(count, promised) == min(count, self.brute_free(size, taken=len(pages)))
        for first in pages:
            assert 0 <= first < EXTENTS * EXTENT_PAGES
            assert first // EXTENT_PAGES == (first + size // PAGE - 1) // EXTENT_PAGES, "across the border of an extent"
            assert first // EXTENT_PAGES not in self.broken
            for page in range(first, first + size // PAGE):
                assert page not in self.owner, "two owners"
                self.owner[page] = first
            self.size[first] = size

    def brute_free(self, size: int, taken: int) -> int:
        """Count the free slots of `size`, extent by extent. Called before the model adds the slots just taken."""
        total = 0
        for extent in range(EXTENTS):
            users = [s for first, s in self.size.items() if first // EXTENT_PAGES == extent]
            if all(user == size for user in users):
                total += EXTENT_NBYTES // size - len(users)
        return total

    def give(self, firsts: list[int]) -> None:
        for first in firsts:
            for page in range(first, first + self.size.pop(first) // PAGE):
                del self.owner[page]
        self.slots.give(np.array(firsts, np.uint32))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 20), st.sampled_from(SIZES)),
        st.tuples(st.just("give"), st.integers(0, 1000), st.integers(1, 15)),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps, st.frozensets(st.integers(0, EXTENTS - 1), max_size=2))
def test_no_page_ever_has_two_owners(todo, broken):
    model = Model(broken)
    for what, a, b in todo:
        if what == "take":
            model.take(a, b)
        else:
            firsts = sorted(model.size)
            model.give([firsts[(a + i) % len(firsts)] for i in range(min(b, len(firsts)))])
        for extent in range(EXTENTS):
            mine = sorted(model.row_of[first] for first in model.size if first // EXTENT_PAGES == extent)
            assert sorted(model.slots.rows_in(extent).tolist()) == mine
    model.give(sorted(model.size))
    for size in SIZES:  # all extents are free again, and can serve any size
        possible = (EXTENTS - len(broken)) * (EXTENT_NBYTES // size)
        assert len(model.slots.take(np.arange(1000, dtype=np.int32), size)) == possible
        model.slots = slots_of(np.zeros(EXTENTS, np.uint32), broken)


@pytest.mark.usefixtures("loops")
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_everything_can_be_derived_again_from_the_columns(todo):
    model = Model()
    for what, a, b in todo:
        if what == "take":
            model.take(a, b)
        elif model.size:
            model.give(sorted(model.size)[: 1 + a % 7])
    firsts = np.array(list(model.size), np.uint32)
    rows = np.arange(len(firsts), dtype=np.int32)[::-1].copy()
    again = slots_of(model.column.copy(), rows=rows, firsts=firsts[rows])
    for extent in range(EXTENTS):
        mine = firsts // EXTENT_PAGES == extent
        assert sorted(again.rows_in(extent).tolist()) == np.flatnonzero(mine).tolist()
    assert again.free_nbytes == model.slots.free_nbytes
    assert [again.free(size) for size in SIZES] == [model.slots.free(size) for size in SIZES]
    model.slots = again
    for size in SIZES:
        model.take(3, size)


@pytest.mark.parametrize(
    ("nbytes", "slot"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (10 * PAGE, 10 * PAGE), (0, PAGE)]
)
def test_slots_are_whole_pages(nbytes, slot):
    assert slot_nbytes(nbytes) == slot


def test_an_overwritten_slot_size_ends_the_search_for_a_slot():
    """The extent is full, but counts as open, since its size says that more slots fit."""
    column = np.zeros(EXTENTS, np.uint32)
    slots = slots_of(column)
    first = slots.take(np.arange(1, dtype=np.int32), 2 * PAGE)
    assert len(slots.take(np.arange(100, 101, dtype=np.int32), PAGE)) == 1, "another extent has slots of this size"
    column[int(first[0]) // EXTENT_PAGES] = PAGE
    with pytest.raises(DamagedError, match="overwritten"):
        slots.take(np.arange(1, 40, dtype=np.int32), 2 * PAGE)
    assert len(slots.take(np.arange(40, 43, dtype=np.int32), 2 * PAGE)) == 3, "other extents are used"
