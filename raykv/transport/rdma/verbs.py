"""The parts of pyverbs that raykv uses, under the same names for version 44 and later versions.

No function of pyverbs releases the GIL. So nothing here waits: see `QueuePair.wait`.
"""

import os
import threading
from typing import Any, Final

from pyverbs.addr import GID as GID
from pyverbs.addr import AHAttr as AHAttr
from pyverbs.addr import GlobalRoute as GlobalRoute
from pyverbs.cq import CQ as CQ
from pyverbs.cq import CompChannel as CompChannel
from pyverbs.device import Context as Context
from pyverbs.mr import MR as MR
from pyverbs.pd import PD as PD
from pyverbs.pyverbs_error import PyverbsError as PyverbsError
from pyverbs.pyverbs_error import PyverbsRDMAError as PyverbsRDMAError
from pyverbs.qp import QPAttr as QPAttr
from pyverbs.qp import QPCap as QPCap
from pyverbs.qp import QPEx as QPEx
from pyverbs.qp import QPInitAttrEx as QPInitAttrEx
from pyverbs.wr import SGE as SGE

try:
    from pyverbs import enums as enums
except ImportError:  # newer versions
    from pyverbs import libibverbs_enums as enums  # noqa: F401


TRIES: Final = 16
"""Other libraries make and close channels rarely, so that many failures in a row have another cause."""

_channels = threading.RLock()
"""Held while a channel of this module is made or closed."""


def open_channel(context: Any) -> tuple[Any, int]:
    """Make a completion channel. Returns the channel and its file descriptor.

    Version 44 does not give the descriptor, so it is found among the descriptors of this process. That fails if another
    library makes or closes a channel just then, so it is tried again.

    Raises:
        PyverbsError: The device has no room for a channel, or its descriptor was not found.
    """
    with _channels:
        for _ in range(TRIES):
            before = _event_descriptors()
            channel = CompChannel(context)
            fd = getattr(channel, "fd", None)
            new = _event_descriptors() - before if fd is None else {fd}
            if len(new) == 1:
                (found,) = new
                os.set_blocking(found, False)
                return channel, found
            channel.close()
    raise PyverbsError("the descriptor of a completion channel was not found")


def close_channel(channel: Any) -> None:
    """Close a channel. Its descriptor may belong to the next one at once, so nobody makes one meanwhile."""
    with _channels:
        channel.close()


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            pass  # this descriptor was closed meanwhile
    return found
