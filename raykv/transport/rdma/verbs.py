"""The parts of pyverbs that raykv uses, under the same names for version 44 and later versions.

No function of pyverbs releases the GIL. So nothing here waits: see `QueuePair.wait`.
"""

import os
import threading
from typing import Any

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


_opening = threading.Lock()


def open_channel(context: Any) -> tuple[Any, int]:
    """Make a completion channel. Returns the channel and its file descriptor.

    Version 44 does not give the descriptor, so it is found among the descriptors of this process.
    """
    with _opening:
        before = _event_descriptors()
        channel = CompChannel(context)
        fd = getattr(channel, "fd", None)
        if fd is None:
            (fd,) = _event_descriptors() - before
    os.set_blocking(fd, False)
    return channel, fd


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            pass  # this descriptor was closed meanwhile
    return found
