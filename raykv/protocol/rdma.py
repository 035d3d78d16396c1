"""What the two ends of an RDMA connection tell each other."""

from typing import Annotated, Final

import msgspec

MAX_RAILS: Final = 32
"""A connection has at most this many queue pairs."""

U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class QueuePairEnd(msgspec.Struct, frozen=True, array_like=True):
    """One end of a queue pair.

    Attributes:
        gid: Address of the port (128 bits), as text.
        lid: Address of the port within an InfiniBand subnet; 0 on Ethernet.
        number: Number of the queue pair on its device.
        psn: Number of the first packet that this end sends.
        mtu: MTU of the port, as a number of the enum ibv_mtu.
    """

    gid: Annotated[str, msgspec.Meta(max_length=64)]
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 24) - 1)]
    psn: Annotated[int, msgspec.Meta(ge=0, le=(1 << 24) - 1)]
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
