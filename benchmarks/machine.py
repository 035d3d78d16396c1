"""Describes the machine on which the figures were measured."""

import os
import platform
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Return processor, kernel, memory, huge pages, load, and the default congestion control of TCP sockets."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line), ""
    )
    memory = {line.partition(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines()}
    pages = "/sys/kernel/mm/transparent_hugepage"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "cache": _read("/sys/devices/system/cpu/cpu0/cache/index3/size").strip(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "memory_gib": round(int(memory["MemTotal"]) / (1 << 20), 1),
        "available_gib": round(int(memory["MemAvailable"]) / (1 << 20), 1),
        "transparent_hugepage": _chosen(f"{pages}/enabled"),
        "transparent_hugepage_shmem": _chosen(f"{pages}/shmem_enabled"),
        "hugepages": memory.get("HugePages_Total", "0"),
        "load": os.getloadavg()[0],
        "tcp_congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control").strip(),
    }


def cpu_flags() -> set[str]:
    """Return the names of the processor's extensions, as the kernel lists them."""
    flags = next((line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _chosen(path: str) -> str:
    text = _read(path)
    return text.partition("[")[2].partition("]")[0]
