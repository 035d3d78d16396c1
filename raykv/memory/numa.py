"""Takes memory from all NUMA nodes of a host.

The extents of an arena take memory from the NUMA nodes in turn, so a half-full arena uses all nodes equally. The memory
policy is "preferred", not "bind". If the chosen node is full, the kernel takes pages from another node. With the policy
"bind", the kernel would kill a process instead.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from raykv.memory.pages import syscall_error

MPOL_DEFAULT: Final = 0
MPOL_PREFERRED: Final = 1
MAX_NODES: Final = 1024
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}  # number of the system call on each machine type


def usable_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Return the NUMA nodes that have memory and are open to this process, or (0,) if the host does not report them."""
    try:
        present = parse_list((root / "sys/devices/system/node/has_memory").read_text())
        status = (root / "proc/self/status").read_text().splitlines()
        allowed = next(line for line in status if line.startswith("Mems_allowed_list:")).partition(":")[2]
    except (OSError, StopIteration):
        return (0,)
    return tuple(sorted(present & parse_list(allowed))) or (0,)


def parse_list(text: str) -> set[int]:
    """Return the numbers in a kernel list such as "0-2,5"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def preferred(node: int) -> Iterator[bool]:
    """In the `with` block, this thread takes new pages from one NUMA node, as long as the node has free pages.

    Yields:
        Whether the kernel and the container allow this. If not, pages come from any node.
    """
    number, mask = _SET_MEMPOLICY.get(os.uname().machine), np.zeros(MAX_NODES // 64, np.uint64)
    mask[node // 64] = 1 << node % 64
    allowed = number is not None and not syscall_error(number, MPOL_PREFERRED, mask.ctypes.data, MAX_NODES)
    try:
        yield allowed
    finally:
        if number is not None:
            syscall_error(number, MPOL_DEFAULT, 0, 0)
