"""Which memory node (NUMA) the parts of an arena lie on.

The arena is cut into as many runs of extents as the host has memory nodes that we may use, and each run asks for its
pages from one of them. A host with one memory node needs none of this.

The kernel's policy is "preferred", not "bind": a cache had better take a slower page than call the out-of-memory
killer. The policy belongs to the file, so that it holds for whoever touches a page first.
"""

import ctypes
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

MPOL_DEFAULT: Final = 0
MPOL_PREFERRED: Final = 1
_MPOL_F_ADDR: Final = 2
_MAX_NODES: Final = 1024
_SYSCALLS: Final = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of mbind and get_mempolicy; libnuma, which knows them too, may not be installed."""


def part_of(extents: int, parts: int) -> npt.NDArray[np.int64]:
    """Part that each extent belongs to: runs of equal length, but for one extent. A function of two numbers alone."""
    return np.arange(extents) * max(1, parts) // max(1, extents)


def in_turns(extents: int, parts: int) -> list[int]:
    """All extents in an order in which the parts take turns, so that a half-full arena uses all nodes alike."""
    part = part_of(extents, parts)
    place = np.arange(extents) - np.searchsorted(part, part)  # within its part
    order: list[int] = np.lexsort((part, place)).tolist()
    return order


def usable_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Memory nodes that have memory and that this process may use, in order. (0,) where the host does not say."""
    try:
        present = parse_list((root / "sys/devices/system/node/has_memory").read_text())
        status = (root / "proc/self/status").read_text().splitlines()
        allowed = next(line for line in status if line.startswith("Mems_allowed_list:")).partition(":")[2]
    except (OSError, StopIteration):
        return (0,)
    return tuple(sorted(present & parse_list(allowed))) or (0,)


def home_node(root: Path = Path("/")) -> int | None:
    """The node of all the cores that this process may run on; None if they are of several, or it is not known."""
    cores = os.sched_getaffinity(0)
    for place in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cores <= parse_list((place / "cpulist").read_text()):
            return int(place.name.removeprefix("node"))
    return None


def parse_list(text: str) -> set[int]:
    """Numbers of a list as the kernel writes it: "0-2,5"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def spread(arena: SharedMemory, extents: int, extent_nbytes: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Let each part of the arena take its pages from one node. Pages that are there already stay where they are.

    Returns:
        The node of each part, in order. () if there is only one, or the kernel or the container does not let us: then
        nothing is asked for, and that is logged.
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
    """Take the pages of a part from one node, as long as it has any.

    Raises:
        OSError: EPERM or ENOSYS in containers that forbid it, EINVAL for a node that there is not.
    """
    mask = np.zeros(_MAX_NODES // 64, np.uint64)
    mask[node // 64] = 1 << node % 64
    _syscall(0, memory.address + offset, nbytes, MPOL_PREFERRED, mask.ctypes.data, _MAX_NODES, 0)


def preference(memory: SharedMemory, offset: int) -> tuple[int, set[int]]:
    """Policy at an offset, and its nodes.

    Raises:
        OSError: As for `prefer`.
    """
    mode, mask = ctypes.c_int(), np.zeros(_MAX_NODES // 64, np.uint64)
    _syscall(1, ctypes.addressof(mode), mask.ctypes.data, _MAX_NODES, memory.address + offset, _MPOL_F_ADDR)
    return mode.value, set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def may_prefer() -> bool:
    """Whether the kernel, or the container, lets us place memory; tried on one page."""
    memory = SharedMemory.create(None, 4096, huge_pages="never")
    try:
        prefer(memory, 0, 4096, usable_nodes()[0])
    except OSError:
        return False
    finally:
        memory.close()
    return True


def _syscall(which: int, *arguments: int) -> None:
    machine = os.uname().machine
    if machine not in _SYSCALLS:
        raise OSError(f"memory policies are not known for {machine}")
    number = syscall_error(_SYSCALLS[machine][which], *arguments)
    if number:
        raise OSError(number, os.strerror(number))
