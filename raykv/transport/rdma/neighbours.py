"""Asks whether a peer's port answers on the local network, before the kernel waits for it.

The kernel waits up to a second for the hardware address of a port that is down. pyverbs holds the GIL meanwhile, so
that the whole process would stand still.
"""

import socket
import time
from pathlib import Path
from typing import Final

IPV4: Final = "0000:0000:0000:0000:0000:ffff:"
"""GIDs that stand for an IPv4 address begin so."""
PATIENCE_S: Final = 0.2
POLL_S: Final = 0.005
ARP: Final = Path("/proc/net/arp")
DISCARD_PORT: Final = 9


def answers(here: str, there: str, interface: str) -> bool:
    """Return whether a peer's port can be reached from a port of this host.

    Args:
        here, there: The GIDs of the two ports.
        interface: The network interface of the port here. "": it is unknown.

    Returns:
        False only if the peer is on the local network and did not answer in time. What cannot be known is True:
        addresses other than IPv4, and peers behind a router.
    """
    if not (here.startswith(IPV4) and there.startswith(IPV4) and interface):
        return True
    address, until_s = ipv4_of(there), time.monotonic() + PATIENCE_S
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            # As for RDMA: the kernel asks over this interface, whatever the routing table says.
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            asking.bind((ipv4_of(here), 0))
            asking.sendto(b"", (address, DISCARD_PORT))  # lets the kernel ask for the hardware address
    except PermissionError:  # a kernel before 5.7
        return True
    except OSError:
        return False
    while _is_unknown(address, interface):
        if time.monotonic() >= until_s:
            return False
        time.sleep(POLL_S)
    return True


def ipv4_of(gid: str) -> str:
    """Return the IPv4 address that a GID stands for."""
    high, low = gid.removeprefix(IPV4).split(":")
    return socket.inet_ntoa(bytes.fromhex(high.zfill(4) + low.zfill(4)))


def _is_unknown(address: str, interface: str) -> bool:
    """Return whether the kernel has asked for the hardware address over this interface, and knows none."""
    try:
        lines = ARP.read_text().splitlines()[1:]
    except OSError:
        return False
    entries = (words for words in map(str.split, lines) if (words[0], words[-1]) == (address, interface))
    return any(int(words[2], 16) == 0 for words in entries)
