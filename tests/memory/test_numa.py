"""NUMA nodes: which ones may be used, and which memory policy a thread has."""

import ctypes
import os

import numpy as np
import pytest

from raykv.memory import numa, pages


@pytest.mark.parametrize(
    ("text", "numbers"), [("0\n", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,4,6-7\n", {0, 1, 4, 6, 7}), ("\n", set())]
)
def test_lists_as_the_kernel_writes_them(text, numbers):
    assert numa.parse_list(text) == numbers


@pytest.mark.parametrize(
    ("has_memory", "allowed", "nodes"),
    [
        ("0-3", "0-3", (0, 1, 2, 3)),
        ("0,2", "0-7", (0, 2)),  # nodes 1 and 3 have cores but no memory
        ("0-3", "1-2", (1, 2)),  # the container may use only nodes 1 and 2
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


def policy() -> tuple[int, set[int]]:
    """Return this thread's memory policy and the nodes of the policy, from get_mempolicy."""
    mode, mask = ctypes.c_int(), np.zeros(numa.MAX_NODES // 64, np.uint64)
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    assert pages.syscall_error(number, ctypes.addressof(mode), mask.ctypes.data, numa.MAX_NODES, 0, 0) == 0
    return mode.value, set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_preference_lasts_for_a_block_of_code():
    node = numa.usable_nodes()[0]
    with numa.preferred(node) as allowed:
        if not allowed:
            pytest.skip("memory policies are not allowed here")
        assert policy() == (numa.MPOL_PREFERRED, {node})
    with pytest.raises(KeyError), numa.preferred(node):
        raise KeyError
    assert policy() == (numa.MPOL_DEFAULT, set())


def test_other_processors_have_other_numbers(monkeypatch):
    monkeypatch.setattr(numa, "_SET_MEMPOLICY", {})
    with numa.preferred(0) as allowed:
        assert not allowed
