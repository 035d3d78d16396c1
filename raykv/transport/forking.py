"""Cleanup in the child of a fork.

Connections belong to the parent. The child closes its descriptors and sends nothing, because a shutdown or a message
would reach the parent's peer. The child makes new connections when it needs them.
"""

import ctypes
import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """An object with state that a forked child must not share with its parent."""

    def after_fork(self) -> None:
        """Clean up in the child. Send nothing. Make new locks, because threads of the parent may hold the old locks."""
        ...


_registered: WeakSet[Forkable] = WeakSet()


def drop_after_fork(each: Forkable) -> None:
    """Call `each.after_fork()` in every child that is forked later. The registry holds only a weak reference."""
    _registered.add(each)


def abandon(owned: object) -> None:
    """Never free an object of the parent in this child: its destructor would reach the parent's device."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def _after_fork() -> None:
    for each in list(_registered):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
