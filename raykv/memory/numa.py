"""Spreading an arena over the NUMA nodes of a host.

The arena is cut into parts of neighbouring extents, one part per usable NUMA node. The pages of a part come from its
node. The kernel's policy is "preferred", not "bind": a page of a distant node is better than the out-of-memory killer.
The policy belongs to the file, so it also holds when another process touches a page first.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.memory.arena import SharedMemory
from raykv.memory.pages import syscall_error

log = logging.getLogger(__name__)

MPOL_PREFERRED: Final = 1
MAX_NODES: Final = 1024
_MBIND: Final = {"x86_64": 237, "aarch64": 235}  # system call numbers; libnuma may not be installed


def part_of(extents: int, parts: int) -> npt.NDArray[np.int64]:
    return np.arange(extents) * max(1, parts) // max(1, extents)


def in_turns(extents: int, parts: int) -> list[int]:
    """All extents, one of each part in turn. In this order a half-full arena uses all NUMA nodes equally."""
    part = part_of(extents, parts)
    place = np.arange(extents) - np.searchsorted(part, part)  # within its part
    order: list[int] = np.lexsort((part, place)).tolist()
    return order


def usable_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA nodes that have memory and that this process may use. (0,) if the host does not report them."""
    try:
        present = parse_list((root / "sys/devices/system/node/has_memory").read_text())
        status = (root / "proc/self/status").read_text().splitlines()
        allowed = next(line for line in status if line.startswith("Mems_allowed_list:")).partition(":")[2]
    except (OSError, StopIteration):
        return (0,)
    return tuple(sorted(present & parse_list(allowed))) or (0,)


def parse_list(text: str) -> set[int]:
    """The numbers of a kernel list such as "0-2,5"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def spread(arena: SharedMemory, extents: int, extent_nbytes: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Let each part of the arena take its pages from one NUMA node. Pages that exist already stay where they are.

    Returns: The node of each part. () when there is only one node, or when the kernel or the container forbids memory
    policies, which is logged.
    """
    if len(nodes) < 2:
        return ()
    parts = part_of(extents, len(nodes))
    for number, node in enumerate(nodes):
        own = np.flatnonzero(parts == number)
        if not own.size:
            continue
        try:
            prefer(arena, int(own[0]) * extent_nbytes, len(own) * extent_nbytes, node)
        except OSError as error:
            log.warning("the arena is not spread over memory nodes %s: %s", list(nodes), error)
            return ()
    return tuple(nodes)


def prefer(memory: SharedMemory, offset: int, nbytes: int, node: int) -> None:
    """Take new pages of a part of `memory` from one NUMA node, as long as the node has free pages.

    Raises OSError: EPERM or ENOSYS: the container forbids memory policies. EINVAL: the node does not exist.
    """
    machine = os.uname().machine
    if machine not in _MBIND:
        raise OSError(f"memory policies are not known for {machine}")
    mask = np.zeros(MAX_NODES // 64, np.uint64)
    mask[node // 64] = 1 << node % 64
    number = syscall_error(
        _MBIND[machine], memory.address + offset, nbytes, MPOL_PREFERRED, mask.ctypes.data, MAX_NODES, 0
    )
    if number:
        raise OSError(number, os.strerror(number))


def may_prefer() -> bool:
    """Whether the kernel and the container allow memory policies; tries one page."""
    memory = SharedMemory.create(None, 4096, huge_pages="never")
    try:
        prefer(memory, 0, 4096, usable_nodes()[0])
    except OSError:
        return False
    finally:
        memory.close()
    return True
