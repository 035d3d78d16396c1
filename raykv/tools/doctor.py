"""The command `raykv doctor`: checks this host's limits and settings for raykv, and suggests remedies.

Each check gets the path of the root directory, so that tests can simulate another host.
"""

import importlib.util
import os
import platform
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from raykv.config import GIB, KIB, MIB
from raykv.gpu import device, driver
from raykv.memory import native, numa, pages
from raykv.memory.cgroup import cgroup_file, lines_of
from raykv.memory.cgroup import memory_limit as find_memory_limit
from raykv.memory.host import meminfo
from raykv.transport import nixl
from raykv.transport.rails.topology import Gpu, Place, Topology, read_topology
from raykv.transport.socket_library import installed_libraries, loaded_libraries, supervisors

Grade = Literal["ok", "better", "wrong"]

MIN_SHM_NBYTES: Final = GIB
MIN_FILES: Final = 4096
PACED: Final = "bbr"
"""The TCP congestion controls whose names begin with this text use timers to pace the sender."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        grade: "ok"; "better": raykv works, but the remedy would help; "wrong": raykv cannot work well.
        says: The result, for people: one or several lines.
        remedy: A command or a step that helps. Empty if nothing needs to be done.
    """

    name: str
    grade: Grade
    says: str
    remedy: str = ""


def examine(root: Path = Path("/")) -> list[Finding]:
    """Run all checks. This changes nothing on the host."""
    memory = (shared_memory, memory_limit, huge_pages, hugetlb_pools, memory_nodes)
    software = (system, compiled_loops)
    network = (tcp, sockets, rdma_devices, nixl_agent, locked_memory, nics, nearest_nics)
    return [check(root) for check in (*memory, cores, open_files, *software, *network, gpu)]


def report(findings: Iterable[Finding]) -> str:
    """Format findings for people: a line each or several, with the remedy below."""
    words = {"ok": "ok", "better": "could be better", "wrong": "WRONG"}
    lines = []
    for finding in findings:
        says = finding.says.replace("\n", f"\n{'':<36}")
        lines.append(f"{finding.name:<18} {words[finding.grade]:<16} {says}")
        if finding.remedy:
            lines.append(f"{'':<18} {'':<16} -> {finding.remedy}")
    return "\n".join(lines)


def better(name: str, says: str, remedy: str, *, when: bool) -> Finding:
    """Return a finding with grade "better" if `when` is true, else "ok" without the remedy."""
    return Finding(name, "better", says, remedy) if when else Finding(name, "ok", says)


# -- memory ------------------------------------------------------------------------------------------------------------


def shared_memory(root: Path) -> Finding:
    """Check size and free space of /dev/shm, which holds the arenas."""
    name, place = "shared memory", root / "dev/shm"
    remount = (
        "mount -o remount,size=80% /dev/shm (containers: docker run --shm-size=64g, or an emptyDir of medium Memory)"
    )
    if not place.is_dir():
        return Finding(name, "wrong", "there is no /dev/shm", "mount -t tmpfs -o size=80% tmpfs /dev/shm")
    if not os.access(place, os.W_OK):
        return Finding(name, "wrong", "/dev/shm is not writable", "chmod 1777 /dev/shm")
    stat, total = os.statvfs(place), meminfo(root).get("MemTotal", 0)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    says = f"/dev/shm has {_size(size)}, {_size(free)} free"
    if free < MIN_SHM_NBYTES:
        return Finding(name, "wrong", says, remount)
    small = size < total // 2
    return better(name, f"{says}; the host has {_size(total)}" if small else says, remount, when=small)


def memory_limit(root: Path) -> Finding:
    """Check the container's memory limit. Shared memory counts towards this limit."""
    name, limit = "memory limit", find_memory_limit(root)
    if limit is None:
        return Finding(name, "ok", "no limit of a container")
    stat = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    size = stat.f_blocks * stat.f_frsize if stat else 0
    says = (
        f"this container may use {_size(limit.nbytes)}, shared memory included, and uses {_size(limit.used_nbytes)}; "
        f"a node takes at most {_size(max(0, limit.room_nbytes))} more"
    )
    remedy = "keep arena_nbytes well below the limit, or raise it (docker run --memory, resources.limits.memory)"
    more = size > limit.nbytes
    return better(name, f"{says}; /dev/shm promises {_size(size)}" if more else says, remedy, when=more)


def huge_pages(root: Path) -> Finding:
    """Check whether the kernel gives huge pages for shared memory, by requesting one."""
    name, setting = "huge pages", _chosen(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    size = _size(pages.huge_nbytes())
    if pages.try_collapse():
        return Finding(name, "ok", f"shared memory gets pages of {size} on request (shmem_enabled: {setting})")
    says = f"this kernel makes no pages of {size} for shared memory on request (shmem_enabled: {setting})"
    remedy = "mount -o remount,huge=within_size /dev/shm, or update the kernel to 6.1 or later"
    return Finding(name, "better", says, remedy)


def hugetlb_pools(root: Path) -> Finding:
    """Check whether the host's hugetlb pools are mounted. A host needs no pool if the check `huge_pages` is ok."""
    pools = []
    for pool in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        page = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) * KIB
        count = _text(pool / "nr_hugepages")
        if count.isdigit() and int(count):
            free = pages.hugetlb_free_nbytes(page, sys=root / "sys")
            pools.append(f"{_size(int(count) * page)} in {_size(page)} pages, {_size(free)} free")
    if not pools:
        return Finding("hugetlb pool", "ok", "none, and none is needed")
    mounts = [line.split() for line in lines_of(root / "proc/mounts")]
    places = [fields[1] for fields in mounts if len(fields) > 2 and fields[2] == "hugetlbfs"]
    mounted = f"mounted at {', '.join(places)}: may serve as shm_dir" if places else "but mounted nowhere"
    remedy = "mount -t hugetlbfs -o mode=1777 none /dev/hugepages (with pagesize=1G for pages of 1 GiB)"
    return better("hugetlb pool", f"{'; '.join(pools)}, {mounted}", remedy, when=not places)


def memory_nodes(root: Path) -> Finding:
    """Check on which NUMA nodes this process may place memory."""
    nodes = numa.usable_nodes(root)
    with numa.preferred(nodes[0]) as allowed:
        forbidden = len(nodes) > 1 and not allowed
    says = f"{len(nodes)}: {', '.join(map(str, nodes))}" + ("; placing memory is forbidden" if forbidden else "")
    return better("memory nodes", says, "docker run --cap-add SYS_NICE", when=forbidden)


def cores(root: Path) -> Finding:
    """Check how many CPU cores this process may use."""
    allowed, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cgroup_file(root, "cpu.max").split()
    says = f"{allowed} of {total}"
    if quota and quota[0].isdigit():
        share = int(quota[0]) / int(quota[1])
        says += f", limited to the time of {share:.1f} cores"
        allowed = min(allowed, round(share))
    return better(
        "cores", says, "give the node 2 cores or more (docker run --cpus, taskset, num_cpus)", when=allowed < 2
    )


def open_files(root: Path) -> Finding:
    """Check the limit of open files. Each connection of a node is an open file."""
    count, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {min(65536, most)} (or LimitNOFILE=65536; docker run --ulimit nofile=65536)"
    return better("open files", f"{count:,} at most", remedy, when=count < MIN_FILES)


# -- machine and software ----------------------------------------------------------------------------------------------


def system(root: Path) -> Finding:
    """Report the versions of the kernel and of the C library. The grade is always "ok"."""
    return Finding("system", "ok", platform.platform())


def compiled_loops(root: Path) -> Finding:
    """Check whether raykv uses its C extension."""
    says = "built" if native.loops is not None else "not built, or RAYKV_NATIVE=0 is set: lookups are slower"
    remedy = "install a C compiler and Python's headers, then: pip install --force-reinstall --no-deps raykv"
    return better("compiled loops", says, remedy, when=native.loops is None)


def tcp(root: Path) -> Finding:
    """Check whether TCP's congestion control paces the sender with timers, which take CPU time."""
    chosen = _text(root / "proc/sys/net/ipv4/tcp_congestion_control")
    paced = chosen.startswith(PACED)
    says = f"congestion control is {chosen}" + (": its timers take up to a quarter of a sender's time" if paced else "")
    remedy = "inside a datacenter: sysctl net.ipv4.tcp_congestion_control=cubic (or ip route change ... congctl cubic)"
    return better("TCP", says, remedy, when=paced)


def rdma_devices(root: Path) -> Finding:
    """Check whether chunks can be read over RDMA: a device with an active port, and pyverbs."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    active = [f"{port.parts[-3]}:{port.name}" for port in ports if _text(port / "state").startswith("4:")]
    if not active:
        says = f"{', '.join(port.parts[-3] for port in ports)}: no port is active" if ports else "no device"
        return better(
            "RDMA", f"{says}; nodes read each other over TCP", "bring the port up: rdma link", when=bool(ports)
        )
    lacks = importlib.util.find_spec("pyverbs") is None
    says = f"active: {', '.join(active)}" + ("; pyverbs is missing, so nodes read each other over TCP" if lacks else "")
    remedy = "install python3-pyverbs of the distribution or of MLNX_OFED; reads then take no CPU of the holder"
    return better("RDMA", says, remedy, when=lacks)


def sockets(root: Path) -> Finding:
    """Tell which accelerated socket libraries are installed, and who runs with one. The grade is always "ok"."""
    found = installed_libraries(root)
    here = ", ".join(loaded_libraries()) or "the kernel's sockets"
    lines = [f"installed: {', '.join(found) or 'no accelerated socket library'}", f"this process: {here}"]
    lines += [f"supervisor {pid}: LD_PRELOAD {preload or 'is not set'}" for pid, preload in supervisors(root)]
    return Finding("socket library", "ok", "\n".join(lines))


def nixl_agent(root: Path) -> Finding:
    """Check whether NIXL is installed. It is off by default, so the grade is always "ok"."""
    if nixl.missing():
        says = "not installed; pip install 'raykv[nixl]' brings reads over UCX: RDMA, EFA or TCP"
        return Finding("NIXL", "ok", says)
    return Finding("NIXL", "ok", 'installed; used if the field nixl is not "off" (see docs/security.md)')


def locked_memory(root: Path) -> Finding:
    """Check the limit of locked memory, which RDMA devices need for the arena. It matters only if there is a device."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = any((root / "sys/class/infiniband").glob("*"))
    says = "no limit" if limit == resource.RLIM_INFINITY else f"{_size(limit)} at most"
    remedy = "ulimit -l unlimited (or LimitMEMLOCK=infinity; docker run --ulimit memlock=-1)"
    return better("locked memory", says, remedy, when=devices and limit != resource.RLIM_INFINITY and os.geteuid() != 0)


# -- NICs --------------------------------------------------------------------------------------------------------------


def nics(root: Path) -> Finding:
    """List the RDMA ports and network devices, with rate and NUMA node. The grade is always "ok"."""
    topology = read_topology(root / "sys")
    ports = (_nic(port.name, port.active, port.gbit_s, port.place, port.link_layer) for port in topology.ports)
    devices = (_nic(each.name, each.active, each.gbit_s, each.place, "TCP") for each in topology.net_devices)
    return Finding("NICs", "ok", "\n".join([*ports, *devices]) or "none is visible")


def nearest_nics(root: Path) -> Finding:
    """List the NICs nearest to each GPU and NUMA node: RDMA ports, or network devices if there are none."""
    topology = read_topology(root / "sys")
    lines = [f"GPU {each.index} ({each.place.address}): {_nearest(topology, each)}" for each in topology.gpus]
    lines += [f"NUMA node {node}: {_nearest(topology, node)}" for node in topology.numa_nodes]
    return Finding("nearest NICs", "ok", "\n".join(lines) or "no GPU and no NUMA node is visible")


def _nic(name: str, active: bool, gbit_s: float, place: Place, kind: str) -> str:
    rate = f"{gbit_s:g} Gbit/s" if gbit_s else "rate unknown"
    node = f"NUMA node {place.numa_node}" if place.numa_node >= 0 else "NUMA node unknown"
    return f"{name}: {f'{rate}, ' if active else ''}{kind or 'link unknown'}, {node}{'' if active else ', down'}"


def _nearest(topology: Topology, near: Gpu | int) -> str:
    """Format the NICs that are as near as the nearest one, fastest first, with their distance."""
    place = near.place if isinstance(near, Gpu) else Place(numa_node=near)
    found = [(nic.name, topology.distance(place, nic.place)) for nic in topology.nearest(near)] or [
        (nic.name, topology.distance(place, nic.place)) for nic in topology.nearest_net_devices(near)
    ]
    names = [name for name, distance in found if distance is found[0][1]]
    return f"{', '.join(names)} ({found[0][1].name})" if found else "no NIC is up"


def gpu(root: Path) -> Finding:
    """Check what GPU engines need to copy KV straight between GPU memory and the arena."""
    name, reason = "GPU copies", device.missing(root)
    if not device.has_gpu(root):
        return Finding(name, "ok", f"{reason}: engines on CPU need nothing")
    if reason:
        remedy = (
            f"{device.REMEDY}; then GPU engines copy straight between GPU memory and the arena, not through the CPU"
        )
        return Finding(name, "better", reason, remedy)
    says = "the driver and cupy are there"
    batched = driver.has_batched_copies(driver.library())
    remedy = "update NVIDIA's driver to 570 or later; then one call queues many copies, where that is the fastest way"
    return better(name, says if batched else f"{says}; the driver has no batched copies", remedy, when=not batched)


# -- helpers -----------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    return "".join(lines_of(path)) or "unknown"


def _chosen(path: Path) -> str:
    text = _text(path)
    return text[text.index("[") + 1 : text.index("]")] if "[" in text and "]" in text else "unknown"


def _size(nbytes: int) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / MIB:.0f} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
