"""Records the part of /sys that `read_topology` reads, as text: a line a file or link, with paths below /sys.

    class/infiniband/mlx5_0 -> ../../devices/pci0000:15/.../0000:18:00.0/infiniband/mlx5_0
    devices/pci0000:15/.../0000:18:00.0/numa_node = 0

The text has the MAC and IP addresses that are part of GIDs.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from raykv.transport.rails.topology import GPU_CLASSES, GPU_VENDORS

PORT_FILES: Final = ("state", "rate", "link_layer")
NET_FILES: Final = ("operstate", "speed", "type", "phys_port_name")
GPU_FILES: Final = ("class", "vendor", "numa_node")


def record_sys(root: Path = Path("/sys")) -> str:
    """Return the recording of a host. What cannot be read is left out. `root`: where sysfs is mounted."""
    root = root.resolve()
    lines = dict.fromkeys(
        line
        for part in (_rdma(root), _net(root), _gpus(root), _numa(root))
        for path in part
        if (line := _line(root, path)) is not None
    )
    return "".join(f"{line}\n" for line in lines)


def _rdma(root: Path) -> Iterator[Path]:
    for entry in sorted(root.glob("class/infiniband/*")):
        yield entry
        yield from _device(entry)
        for port in sorted(entry.glob("ports/*")):
            yield from (port / name for name in PORT_FILES)
            for gid in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
                if (_text(gid) or "0").strip("0:"):
                    yield from (gid, port / "gid_attrs/types" / gid.name, port / "gid_attrs/ndevs" / gid.name)


def _net(root: Path) -> Iterator[Path]:
    for entry in sorted(root.glob("class/net/*")):
        if entry.is_symlink():  # not the file bonding_masters
            yield entry
        if (entry / "device").is_symlink():
            yield from _device(entry)
            yield from (entry / name for name in NET_FILES)


def _device(entry: Path) -> Iterator[Path]:
    """Yield what tells where a device is attached: the link to it, its NUMA node, and its physical function."""
    device = Path(os.path.realpath(entry / "device"))
    yield from (entry / "device", device / "numa_node", device / "physfn")
    yield device.parent / "numa_node"  # of the PCI function, where the device is a sub-function or a virtio device


def _gpus(root: Path) -> Iterator[Path]:
    for entry in sorted(root.glob("bus/pci/devices/*")):
        if _text(entry / "vendor") in GPU_VENDORS and (_text(entry / "class") or "").startswith(GPU_CLASSES):
            yield entry
            yield from (entry / name for name in GPU_FILES)


def _numa(root: Path) -> Iterator[Path]:
    yield from (node / "distance" for node in sorted(root.glob("devices/system/node/node*")))


def _line(root: Path, path: Path) -> str | None:
    """Return the line of one file or link, under its real path, or None if it cannot be read."""
    path = Path(os.path.realpath(path.parent)) / path.name
    if not path.is_relative_to(root):
        return None
    name = path.relative_to(root)
    if path.is_symlink():
        return f"{name} -> {os.readlink(path)}"
    text = _text(path)
    return None if text is None else f"{name} = {text}"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
