"""Which NICs, GPUs and NUMA nodes a host has, and how far they are from each other, by /sys.

`read_topology` never raises: what is missing, broken or unreadable is unknown. Containers often hide parts of /sys.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, TypeVar

UNKNOWN_NODE: Final = -1
"""The kernel's number for "no NUMA node is known", which virtual machines often show."""
GPU_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and other display controllers; processing accelerators (AMD Instinct MI300)."""
GPU_VENDORS: Final = ("0x10de", "0x1002")
HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
FUNCTION: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
UPLINK: Final = re.compile(r"p\d+(s\d+)?")
"""The `phys_port_name` of a real port. Representors of functions have other names, such as pf0hpf or pf0vf3."""
SUB_FUNCTION: Final = re.compile(r"\w+\.sf\.\d+")
ARPHRD_ETHER: Final = 1
ARPHRD_INFINIBAND: Final = 32
SAME_NODE: Final = 10
"""The distance of a NUMA node from itself in the kernel's table. Another socket has 20 or more."""
FAR_NODE: Final = 255


class Distance(IntEnum):
    """How far two devices are from each other, by the names of `nvidia-smi topo -m`. Smaller is nearer."""

    PIX = 0
    """Through at most one PCIe switch."""
    PXB = 1
    """Through several PCIe switches, but not through the CPU."""
    PHB = 2
    """Through the host bridge that both are attached to."""
    NODE = 3
    """Through two host bridges of the same NUMA node."""
    SYS = 4
    """Through the link between NUMA nodes, or unknown."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is attached.

    Attributes:
        pci: The way from the host bridge to the device: ("pci0000:15", "0000:15:01.0", ..., "0000:18:00.0"). Empty for
            a device without PCI, such as Soft-RoCE.
        numa_node: The NUMA node, or UNKNOWN_NODE.
    """

    pci: tuple[str, ...] = ()
    numa_node: int = UNKNOWN_NODE

    @property
    def address(self) -> str:
        """The PCI address, such as "0000:18:00.0", or "" for a device without PCI."""
        return self.pci[-1] if self.pci else ""


@dataclass(frozen=True, slots=True)
class Gid:
    """A used entry of a port's GID table. `kind`: "RoCE v2" or "IB/RoCE v1". `netdev`: "" if there is none.

    A container may see the addresses of other network namespaces. They cannot be used, and are left out.
    """

    index: int
    gid: str
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device.

    Attributes:
        device: The name for verbs, such as "mlx5_0".
        port: The number of the port, from 1.
        active: Whether the port's state is ACTIVE, and this network namespace has an address of it.
        gbit_s: The rate in Gbit/s; 0 if unknown.
        link_layer: "InfiniBand" or "Ethernet"; "" if unknown.
        place: Where the device is attached.
        physical: The PCI address of the function that owns the wire. For a virtual function or a sub-function it is not
            the device's own address.
        shared: Whether the device is a virtual function or a sub-function.
        gids: The used entries of the GID table.
    """

    device: str
    port: int
    active: bool
    gbit_s: float
    link_layer: str
    place: Place
    physical: str
    shared: bool = False
    gids: tuple[Gid, ...] = ()

    @property
    def name(self) -> str:
        """The name as NCCL and UCX write it, such as "mlx5_0:1"."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network device with a wire. Virtual ones (bridges, bonds, veth) and representors are left out.

    `active`: whether the link is up. `gbit_s`: 0 if unknown. `ip_over_ib`: whether the link is InfiniBand.
    """

    name: str
    active: bool
    gbit_s: float
    place: Place
    ip_over_ib: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `index`: its number in the order of PCI addresses, as in `nvidia-smi`. `vendor`: "0x10de" is NVIDIA."""

    index: int
    vendor: str
    place: Place


Nic = TypeVar("Nic", RdmaPort, NetDevice)


@dataclass(frozen=True, slots=True)
class Topology:
    """The NICs, GPUs and NUMA nodes of a host, each in the order of their names.

    Attributes:
        numa_nodes: For each NUMA node the distances to other nodes, by the kernel's table.
    """

    ports: tuple[RdmaPort, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    numa_nodes: dict[int, dict[int, int]] = field(default_factory=dict)

    def gpu_at(self, address: str) -> Gpu | None:
        """Return the GPU with a PCI address as CUDA or NVML write it: "0000:1B:00.0", "00000000:1B:00.0"."""
        domain, _, rest = address.lower().partition(":")
        wanted = f"{domain.lstrip('0').zfill(4)}:{rest}"
        return next((gpu for gpu in self.gpus if gpu.place.address == wanted), None)

    def distance(self, one: Place, other: Place) -> Distance:
        """Return the distance of two devices. A Place without PCI stands for the memory of its NUMA node."""
        common = sum(1 for _ in _common(one.pci, other.pci))
        if common > 1:
            most = max(len(one.pci), len(other.pci)) - common - 1  # bridges between the last common one and a device
            return Distance.PIX if most <= 1 else Distance.PXB
        if common:
            return Distance.PHB
        return Distance.NODE if self._node_distance(one, other) <= SAME_NODE else Distance.SYS

    def nearest(self, near: Gpu | int | None = None) -> list[RdmaPort]:
        """Return the usable RDMA ports, nearest first; at equal distance the fastest first, then by name.

        A virtual function or sub-function is left out if the function that owns its wire has a port in the list: as
        rails, both together are not faster than one.

        Args:
            near: A GPU, a NUMA node whose memory is to be sent, or None if any memory may be sent.
        """
        active = [port for port in self.ports if port.active]
        owners = {port.physical for port in active if not port.shared}
        return self._sort(near, (port for port in active if not (port.shared and port.physical in owners)))

    def nearest_net_devices(self, near: Gpu | int | None = None) -> list[NetDevice]:
        """Return the network devices that are up, in the order of `nearest`."""
        return self._sort(near, (device for device in self.net_devices if device.active))

    def _sort(self, near: Gpu | int | None, nics: Iterable[Nic]) -> list[Nic]:
        place = near.place if isinstance(near, Gpu) else None if near is None else Place(numa_node=near)

        def order(nic: Nic) -> tuple[int, int, float, list[int | str]]:
            if place is None:
                return 0, 0, -nic.gbit_s, _by_number(nic.name)
            distance, nodes = self.distance(place, nic.place), self._node_distance(place, nic.place)
            return distance, nodes if distance is Distance.SYS else 0, -nic.gbit_s, _by_number(nic.name)

        return sorted(nics, key=order)

    def _node_distance(self, one: Place, other: Place) -> int:
        """Return the kernel's distance of two NUMA nodes. On a host with one node, an unknown node is that one."""
        if len(self.numa_nodes) <= 1:
            return SAME_NODE
        if one.numa_node == other.numa_node != UNKNOWN_NODE:
            return SAME_NODE
        return max(SAME_NODE + 1, self.numa_nodes.get(one.numa_node, {}).get(other.numa_node, FAR_NODE))


def read_topology(root: Path = Path("/sys")) -> Topology:
    """Read the topology of a host. `root`: where sysfs is mounted."""
    interfaces = {entry.name for entry in _entries(root / "class/net")}
    return Topology(
        ports=tuple(port for entry in _entries(root / "class/infiniband") for port in _ports(entry, interfaces)),
        net_devices=tuple(_net_devices(root)),
        gpus=tuple(_gpus(root)),
        numa_nodes=_numa_nodes(root),
    )


def _ports(entry: Path, interfaces: set[str]) -> Iterator[RdmaPort]:
    place, physical, shared = _attachment(entry)
    for port in _entries(entry / "ports"):
        if not port.name.isdigit():
            continue
        gids = tuple(_gids(port))
        usable = tuple(gid for gid in gids if not interfaces or not gid.netdev or gid.netdev in interfaces)
        yield RdmaPort(
            device=entry.name,
            port=int(port.name),
            active=_text(port / "state").endswith("ACTIVE") and (bool(usable) or not gids),
            gbit_s=_number(_text(port / "rate").partition(" ")[0]),
            link_layer=_text(port / "link_layer"),
            place=place,
            physical=physical,
            shared=shared,
            gids=usable,
        )


def _gids(port: Path) -> Iterator[Gid]:
    for entry in _entries(port / "gids"):
        gid = _text(entry)
        if entry.name.isdigit() and gid.strip("0:"):
            kind, netdev = (_text(port / "gid_attrs" / name / entry.name) for name in ("types", "ndevs"))
            yield Gid(int(entry.name), gid, kind, netdev)


def _net_devices(root: Path) -> Iterator[NetDevice]:
    for entry in _entries(root / "class/net"):
        if not (entry / "device").is_symlink() or "/devices/virtual/" in os.path.realpath(entry):
            continue
        port_name, link_type = _text(entry / "phys_port_name"), _number(_text(entry / "type"), ARPHRD_ETHER)
        if (port_name and not UPLINK.fullmatch(port_name)) or link_type not in (ARPHRD_ETHER, ARPHRD_INFINIBAND):
            continue
        place, _, _ = _attachment(entry)
        active, gbit_s = _text(entry / "operstate") == "up", max(0.0, _number(_text(entry / "speed"))) / 1000
        yield NetDevice(entry.name, active, gbit_s, place, ip_over_ib=link_type == ARPHRD_INFINIBAND)


def _gpus(root: Path) -> Iterator[Gpu]:
    found = []
    for entry in _entries(root / "bus/pci/devices"):
        vendor = _text(entry / "vendor")
        if vendor in GPU_VENDORS and _text(entry / "class").startswith(GPU_CLASSES):
            found.append((vendor, Place(_pci(os.path.realpath(entry)), _node(entry))))
    found.sort(key=lambda each: each[1].address)
    return (Gpu(index, vendor, place) for index, (vendor, place) in enumerate(found))


def _numa_nodes(root: Path) -> dict[int, dict[int, int]]:
    entries = [entry for entry in _entries(root / "devices/system/node") if re.fullmatch(r"node\d+", entry.name)]
    numbers = [int(entry.name.removeprefix("node")) for entry in entries]
    found = {}
    for number, entry in zip(numbers, entries, strict=True):
        distances = [int(text) for text in _text(entry / "distance").split() if text.isdigit()]
        found[number] = dict(zip(numbers, distances, strict=False))
    return found


def _attachment(entry: Path) -> tuple[Place, str, bool]:
    """Return where a device of a class is attached, the function that owns its wire, and whether it only shares it."""
    device = entry / "device" if (entry / "device").is_symlink() else entry
    where = os.path.realpath(device)
    pci, node = _pci(where), _node(device)
    if not pci:
        return Place((), node), "", False
    function = Path(where[: where.rindex(pci[-1]) + len(pci[-1])])
    node = _node(function) if node == UNKNOWN_NODE else node
    owner = function / "physfn"
    if owner.is_symlink():  # a virtual function (SR-IOV)
        return Place(pci, node), Path(os.path.realpath(owner)).name, True
    return Place(pci, node), pci[-1], SUB_FUNCTION.fullmatch(os.path.basename(where)) is not None


def _pci(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if FUNCTION.fullmatch(part) or HOST_BRIDGE.fullmatch(part))


def _node(device: Path) -> int:
    return int(_number(_text(device / "numa_node"), UNKNOWN_NODE))


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> Iterator[str]:
    """Return the bridges that the ways to two devices have in common. The device itself is not one."""
    for left, right in zip(one[:-1], other[:-1], strict=False):
        if left != right:
            return
        yield left


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: _by_number(entry.name))
    except OSError:
        return []


def _by_number(name: str) -> list[int | str]:
    """Return a key that sorts mlx5_9 before mlx5_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _number(text: str, default: float = 0.0) -> float:
    try:
        return float(text)
    except ValueError:
        return default
