"""Memory nodes: which extents lie where, and what the kernel was asked for."""

import ctypes
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.memory import numa, pages
from raykv.memory.arena import SharedMemory

MIB = 1 << 20
MPOL_DEFAULT = 0


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


def preference(memory: SharedMemory, offset: int) -> tuple[int, set[int]]:
    """Policy at an offset, as the kernel says it (get_mempolicy), and its nodes."""
    mode, mask = ctypes.c_int(), np.zeros(numa.MAX_NODES // 64, np.uint64)
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    of_address = 2
    arguments = ctypes.addressof(mode), mask.ctypes.data, numa.MAX_NODES, memory.address + offset, of_address
    assert pages.syscall_error(number, *arguments) == 0
    return mode.value, set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


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
        assert preference(memory, 2 * MIB) == (numa.MPOL_PREFERRED, {node})
        assert preference(memory, 5 * MIB) == (numa.MPOL_PREFERRED, {node})
        assert preference(memory, 6 * MIB) == (MPOL_DEFAULT, set())
    assert arena.populate(0, 8 * MIB)
    seen.close()


def test_each_part_of_an_arena_prefers_its_node(arena):
    node = numa.usable_nodes()[0]
    assert numa.spread(arena, 7, MIB, (node, node)) == (node, node)  # one machine shows no more
    assert preference(arena, 6 * MIB) == (numa.MPOL_PREFERRED, {node})
    assert preference(arena, 7 * MIB) == (MPOL_DEFAULT, set())  # behind the last extent


def test_one_node_needs_nothing_and_a_refusal_is_one_line(arena, caplog):
    assert numa.spread(arena, 8, MIB, numa.usable_nodes()[:1]) == ()
    assert preference(arena, MIB)[1] <= {numa.usable_nodes()[0]}
    assert not caplog.records
    assert numa.spread(arena, 8, MIB, (1022, 1023)) == ()
    assert len(caplog.records) == 1


def test_other_processors_have_other_numbers(arena, monkeypatch):
    monkeypatch.setattr(numa, "_MBIND", {})
    with pytest.raises(OSError, match="not known"):
        numa.prefer(arena, 0, MIB, 0)
    assert numa.spread(arena, 8, MIB, (0, 1)) == ()
