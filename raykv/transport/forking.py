"""What a process drops when it is the child of a fork.

A connection is the parent's. The child closes its descriptors and sends nothing: a shutdown or a message would get to
the parent's peer. Objects connect again at their first use in the child.
"""

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """Holds something that a forked child must not share with its parent."""

    def after_fork(self) -> None:
        """Called in the child: send nothing, and make new locks. The old ones may be held by threads of the parent."""
        ...


_registered: WeakSet[Forkable] = WeakSet()


def drop_after_fork(each: Forkable) -> None:
    """Have `each.after_fork()` called in every child that this process forks, while the object lives."""
    _registered.add(each)


def _after_fork() -> None:
    for each in list(_registered):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
