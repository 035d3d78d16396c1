"""What the end-to-end tests share: free ports, and the traces that a deployment must not leave behind."""

import os
import re
import socket
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def traces() -> set[object]:
    """Return everything that a deployment made on this machine: processes of Ray nodes, memory files, directories.

    Processes of engines and actors are included, because their command line or environment names the directory of their
    Ray node. Memory files of Python's `multiprocessing` count only if no process maps them, because a test that runs at
    the same time may have made them.
    """
    files = {entry.name: entry.inode() for entry in os.scandir("/dev/shm")}
    nodes = {name for name in files if name.startswith("raykv-demo")}
    used = mapped_inodes()
    others = {name for name, inode in files.items() if name.startswith(("psm_", "sem.")) and inode not in used}
    return ray_processes() | nodes | others | set(Path("/tmp").glob("raykv-ray-*"))


def mapped_inodes() -> set[int]:
    """Return the inodes of the files in /dev/shm that some process maps. A mapped semaphore has lost its name there."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.update(int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps.read_text()))
        except OSError:
            continue
    return found


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
