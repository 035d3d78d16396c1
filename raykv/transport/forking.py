"""Cleanup in the child of a fork.

Connections belong to the parent. The child closes its descriptors and sends nothing, since a shutdown or a message
would reach the parent's peer. Objects connect again at their first use in the child.
"""

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """An object with state that a forked child must not share with its parent."""

    def after_fork(self) -> None:
        """Called in the child. Must send nothing, and make new locks: threads of the parent may hold the old locks."""
        ...


_registered: WeakSet[Forkable] = WeakSet()


def drop_after_fork(each: Forkable) -> None:
    """Register an object: `each.after_fork()` is called in every forked child. The registry holds a weak reference."""
    _registered.add(each)


def _after_fork() -> None:
    for each in list(_registered):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
