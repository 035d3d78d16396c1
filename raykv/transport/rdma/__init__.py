"""One-sided reads and writes over RDMA. Only the other modules of this package need pyverbs; import them late."""

import importlib.util
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/sys/class/infiniband")
"""The kernel lists the RDMA devices of the host here."""


def missing() -> str:
    """Return why this process cannot use RDMA; empty if it can try."""
    if not (DEVICES.is_dir() and any(DEVICES.iterdir())):
        return "this host has no RDMA device"
    if importlib.util.find_spec("pyverbs") is None:
        return "pyverbs is not installed; take it from the distribution (python3-pyverbs) or from MLNX_OFED"
    return ""
