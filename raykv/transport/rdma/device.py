"""An open port of an RDMA device, which is one rail: its protection domain, its address, and memory registrations."""

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from raykv.errors import CapacityError, ConfigError
from raykv.transport.rdma import DEVICES, verbs

log = logging.getLogger(__name__)

REMOTE: Final = (
    verbs.enums.IBV_ACCESS_LOCAL_WRITE | verbs.enums.IBV_ACCESS_REMOTE_READ | verbs.enums.IBV_ACCESS_REMOTE_WRITE
)
MAX_GIDS: Final = 64
"""The number of entries of a port's table of addresses that are looked at."""


class Device:
    """One active port. Thread-safe, except `close`.

    Attributes:
        name: The device's name, such as "mlx5_0".
        port: Number of the port.
        gid, gid_index: The port's address for queue pairs, and its index in the port's table.
        lid: The port's address within an InfiniBand subnet; 0 on Ethernet.
        mtu: The port's MTU, as a number of the enum ibv_mtu.
        context, pd: The opened device and its protection domain.
        lock: Held while a queue pair is made, because `verbs.open_channel` needs that.
    """

    def __init__(self, name: str, port: int) -> None:
        """Open a port. Raises PyverbsError."""
        self.name, self.port, self.lock = name, port, threading.Lock()
        self.context = verbs.Context(name=name)
        self.pd = verbs.PD(self.context)
        found = self.context.query_port(port)
        self.lid, self.mtu = int(found.lid), int(found.active_mtu)
        self.gid_index = best_gid(DEVICES / name / "ports" / str(port))
        self.gid = str(self.context.query_gid(port, self.gid_index).gid)

    def __repr__(self) -> str:
        return f"{self.name}:{self.port} ({self.gid})"

    def register(self, address: int, nbytes: int, *, remote: bool) -> Any:
        """Register memory of this process. It stays in place until the registration's `close`.

        Args:
            address: The memory's address. The memory must have real pages.
            nbytes: Its length.
            remote: Whether peers may read and write the memory.

        Raises:
            CapacityError: The kernel or the device refuses; usually the limit of locked memory is too low.
        """
        access = REMOTE if remote else verbs.enums.IBV_ACCESS_LOCAL_WRITE
        try:
            return verbs.MR(self.pd, nbytes, access, address=address)
        except verbs.PyverbsError as error:
            raise CapacityError(
                f"{self.name} cannot register {nbytes:,} bytes ({error}): raise the limit of locked memory (ulimit -l)"
            ) from error

    def close(self) -> None:
        """Close the port. Its queue pairs and registrations must be closed before."""
        with suppress(verbs.PyverbsError):
            self.pd.close()
            self.context.close()


def best_gid(port: Path) -> int:
    """Return the index of the address to use: RoCE v2 with IPv4, else RoCE v2, else the first.

    `port`: the port's directory under /sys.
    """
    ranked = []
    for index in range(MAX_GIDS):
        try:
            kind = (port / f"gid_attrs/types/{index}").read_text().strip()
            gid = (port / f"gids/{index}").read_text().strip()
        except OSError:
            continue  # there is no such entry
        ipv4 = gid.startswith("0000:0000:0000:0000:0000:ffff:")
        ranked.append((kind == "RoCE v2", ipv4, -index))
    return -max(ranked)[2] if ranked else 0


def open_devices(names: tuple[str, ...] = ()) -> list[Device]:
    """Open all active ports of the host, or those of the devices in `names`. A port that cannot be opened is logged.

    Raises:
        ConfigError: A device in `names` does not exist.
    """
    there = sorted(each.name for each in DEVICES.iterdir()) if DEVICES.is_dir() else []
    if unknown := sorted(set(names) - set(there)):
        raise ConfigError(f"field 'rdma': no device {', '.join(unknown)} here; there are: {', '.join(there) or 'none'}")
    opened = []
    for name in names or there:
        for port in _active_ports(DEVICES / name):
            try:
                opened.append(Device(name, port))
            except verbs.PyverbsError as error:
                log.warning("port %d of %s is not used: %s", port, name, error)
    return opened


def _active_ports(device: Path) -> Iterator[int]:
    for port in sorted((device / "ports").iterdir()):
        if (port / "state").read_text().startswith("4:"):
            yield int(port.name)
