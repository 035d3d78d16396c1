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
        """Called in the child, before anything else runs there: send nothing, take no lock, make new locks.

        A lock may be held by a thread that the child does not have.
        """
        ...


_registered: WeakSet[Forkable] = WeakSet()


def drop_after_fork(each: Forkable) -> None:
    """Have `each.after_fork()` called in every child that this process forks, while the object lives."""
    _registered.add(each)


os.register_at_fork(after_in_child=lambda: [each.after_fork() for each in list(_registered)])
