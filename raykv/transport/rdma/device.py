"""An open port of an RDMA device, which is one rail: its protection domain, its address, and memory registrations."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from raykv.errors import CapacityError, ConfigError
from raykv.transport.rails.topology import Gid, RdmaPort, read_topology
from raykv.transport.rdma import DEVICES, verbs

log = logging.getLogger(__name__)

READABLE: Final = int(verbs.enums.IBV_ACCESS_REMOTE_READ)
WRITABLE: Final = READABLE | int(verbs.enums.IBV_ACCESS_REMOTE_WRITE)
"""What peers may do with registered memory, or over a queue pair. 0: nothing."""
IPV4: Final = "0000:0000:0000:0000:0000:ffff:"
"""Addresses that stand for an IPv4 address begin so."""


class Device:
    """One active port. Thread-safe, except `close`.

    Attributes:
        name: The device's name, such as "mlx5_0".
        port: Number of the port.
        gid, gid_index: The port's address for queue pairs, and its index in the port's table.
        interface: The network interface of this address; "" if there is none.
        lid: The port's address within an InfiniBand subnet; 0 on Ethernet.
        mtu: The port's MTU, as a number of the enum ibv_mtu.
        gbit_s: The port's rate in Gbit/s; 0 if unknown.
        context, pd: The opened device and its protection domain.
    """

    def __init__(self, port: RdmaPort) -> None:
        """Open a port. Raises PyverbsError."""
        self.name, self.port, self.gbit_s = port.device, port.port, port.gbit_s
        self.context = verbs.Context(name=port.device)
        self.pd = verbs.PD(self.context)
        found = self.context.query_port(port.port)
        self.lid, self.mtu = int(found.lid), int(found.active_mtu)
        self.gid_index = best_gid(port.gids)
        self.interface = next((gid.netdev for gid in port.gids if gid.index == self.gid_index), "")
        self.gid = str(self.context.query_gid(port.port, self.gid_index).gid)

    def __repr__(self) -> str:
        return f"{self.name}:{self.port} ({self.gid})"

    def register(self, address: int, nbytes: int, *, remote: int) -> Any:
        """Register memory of this process. It stays in place until the registration's `close`.

        Args:
            address: The memory's address. The memory must have real pages.
            nbytes: Its length.
            remote: What peers may do with the memory: 0, READABLE or WRITABLE.

        Raises:
            CapacityError: The kernel or the device refuses; usually the limit of locked memory is too low.
        """
        try:
            return verbs.MR(self.pd, nbytes, remote | verbs.enums.IBV_ACCESS_LOCAL_WRITE, address=address)
        except verbs.PyverbsError as error:
            raise CapacityError(
                f"{self.name} cannot register {nbytes:,} bytes ({error}): raise the limit of locked memory (ulimit -l)"
            ) from error

    def close(self) -> None:
        """Close the port. Its queue pairs and registrations must be closed before."""
        with suppress(verbs.PyverbsError):
            self.pd.close()
            self.context.close()


def best_gid(gids: Sequence[Gid]) -> int:
    """Return the index of the address to use: RoCE v2 with IPv4, else RoCE v2, else the first."""
    ranked = [(gid.kind == "RoCE v2", gid.gid.startswith(IPV4), -gid.index) for gid in gids]
    return -max(ranked)[2] if ranked else 0


def open_devices(names: tuple[str, ...] = ()) -> list[Device]:
    """Open the usable ports of the host, or those of the devices in `names`. A port that cannot be opened is logged.

    Raises:
        ConfigError: A device in `names` does not exist.
    """
    topology = read_topology(DEVICES.parents[1])
    there = sorted({port.device for port in topology.ports})
    if unknown := sorted(set(names) - set(there)):
        raise ConfigError(f"field 'rdma': no device {', '.join(unknown)} here; there are: {', '.join(there) or 'none'}")
    named = [port for port in topology.ports if port.device in names and port.active]
    opened = []
    for port in named if names else topology.nearest():
        try:
            opened.append(Device(port))
        except verbs.PyverbsError as error:
            log.warning("%s is not used: %s", port.name, error)
    return opened
