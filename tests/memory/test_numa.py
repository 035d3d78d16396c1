"""Memory nodes: which extents lie where, and what the kernel was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.memory import numa
from raykv.memory.arena import SharedMemory

MIB = 1 << 20


@given(st.integers(0, 3000), st.integers(0, 12))
def test_parts_are_runs_of_equal_length_but_for_one(extents, parts):
    found = numa.part_of(extents, parts)
    assert len(found) == extents
    assert (np.diff(found) >= 0).all()
    if extents >= parts > 0:
        lengths = np.bincount(found, minlength=parts)
        assert len(lengths) == parts
        assert lengths.max() - lengths.min() <= 1
    elif extents:
        assert found.max() < max(1, parts)


@given(st.integers(0, 500), st.integers(1, 12))
def test_parts_take_turns(extents, parts):
    found = numa.in_turns(extents, parts)
    assert sorted(found) == list(range(extents))
    used = np.zeros(parts, int)
    for extent in found[: extents // parts * parts]:
        used[numa.part_of(extents, parts)[extent]] += 1
        assert used.max() - used.min() <= 1
    assert numa.in_turns(extents, 1) == list(range(extents))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0\n", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,4,6-7\n", {0, 1, 4, 6, 7}), ("\n", set())]
)
def test_lists_as_the_kernel_writes_them(text, numbers):
    assert numa.parse_list(text) == numbers


@pytest.mark.parametrize(
    ("has_memory", "allowed", "nodes"),
    [
        ("0-3", "0-3", (0, 1, 2, 3)),
        ("0,2", "0-7", (0, 2)),  # nodes with cores alone
        ("0-3", "1-2", (1, 2)),  # a container limited to some
        ("0-1", "4", (0,)),
        (None, "0", (0,)),
    ],
)
def test_nodes_that_may_be_used(tmp_path, has_memory, allowed, nodes):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
    if has_memory is not None:
        (tmp_path / "sys/devices/system/node").mkdir(parents=True)
        (tmp_path / "sys/devices/system/node/has_memory").write_text(has_memory + "\n")
    assert numa.usable_nodes(tmp_path) == nodes


def test_the_home_of_a_process_is_the_node_of_all_its_cores(tmp_path, monkeypatch):
    for node, cores in enumerate(("0-3", "4-7")):
        place = tmp_path / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cores + "\n")
    for cores, home in (({4, 6}, 1), ({0, 1, 2, 3}, 0), ({3, 4}, None), ({9}, None)):
        monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert numa.home_node(tmp_path) == home


def allowed(memory: SharedMemory) -> bool:
    try:
        numa.prefer(memory, 0, 4096, numa.usable_nodes()[0])
    except OSError:
        return False
    return True


@pytest.fixture
def arena(shm_dir):
    made = SharedMemory.create(shm_dir / "file", 8 * MIB)
    if not allowed(made):
        pytest.skip("memory policies are not allowed here")
    yield made
    made.close()


def test_a_preference_belongs_to_the_file_and_others_see_it(arena):
    node = numa.usable_nodes()[0]
    numa.prefer(arena, 2 * MIB, 4 * MIB, node)
    seen = SharedMemory.attach(arena.path, writable=True)
    for memory in (arena, seen):
        assert numa.preference(memory, 2 * MIB) == (numa.MPOL_PREFERRED, {node})
        assert numa.preference(memory, 5 * MIB) == (numa.MPOL_PREFERRED, {node})
        assert numa.preference(memory, 6 * MIB) == (numa.MPOL_DEFAULT, set())
    assert arena.populate(0, 8 * MIB)
    seen.close()


def test_each_part_of_an_arena_prefers_its_node(arena):
    node = numa.usable_nodes()[0]
    assert numa.spread(arena, 7, MIB, (node, node)) == (node, node)  # one machine shows no more
    assert numa.preference(arena, 6 * MIB) == (numa.MPOL_PREFERRED, {node})
    assert numa.preference(arena, 7 * MIB) == (numa.MPOL_DEFAULT, set())  # behind the last extent


def test_one_node_needs_nothing_and_a_refusal_is_one_line(arena, caplog):
    assert numa.spread(arena, 8, MIB, numa.usable_nodes()[:1]) == ()
    assert numa.preference(arena, MIB)[1] <= {numa.usable_nodes()[0]}
    assert not caplog.records
    assert numa.spread(arena, 8, MIB, (1022, 1023)) == ()
    assert len(caplog.records) == 1


def test_other_processors_have_other_numbers(arena, monkeypatch):
    monkeypatch.setattr(numa, "_SYSCALLS", {})
    with pytest.raises(OSError, match="not known"):
        numa.prefer(arena, 0, MIB, 0)
    assert numa.spread(arena, 8, MIB, (0, 1)) == ()
