"""What the end-to-end tests share: free ports, and the traces that a deployment must not leave behind."""

import os
import socket
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def traces() -> set[object]:
    """Return everything that a deployment made on this machine: processes of Ray nodes, memory files, directories.

    Processes of engines and actors are included, because their command line or environment names the directory of their
    Ray node.
    """
    memory = {name for name in os.listdir("/dev/shm") if name.startswith(("raykv-demo", "psm_", "sem."))}
    return ray_processes() | memory | set(Path("/tmp").glob("raykv-ray-*"))


def ray_processes() -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if b"/tmp/raykv-ray-" in text:
            found.add(int(process.name))
    return found
