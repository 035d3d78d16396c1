"""The findings of `raykv doctor`, on this host and on simulated ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from raykv.gpu import device, driver
from raykv.memory import native, pages
from raykv.tools import cli, doctor
from tests.support.sysfs import build_sys, lines_of

GIB = 1 << 30


class Host:
    """A simulated /proc, /sys and /dev."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev/shm").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def shm_size(monkeypatch):
    """Return a function that sets the size of /dev/shm that `statvfs` reports."""

    def set_size(nbytes: int, free: int) -> None:
        stat = os.statvfs_result((4096, 4096, nbytes // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))
        monkeypatch.setattr(doctor.os, "statvfs", lambda _: stat)

    return set_size


def test_this_host_is_looked_at_and_every_finding_is_whole():
    found = doctor.examine()
    assert len({finding.name for finding in found}) == 17
    for finding in found:
        assert finding.grade in ("ok", "better", "wrong")
        assert finding.name
        assert finding.says
        assert finding.remedy or finding.grade == "ok"
    text = doctor.report(found)
    assert all(finding.name in text for finding in found)
    assert all(line in text for finding in found for line in finding.says.splitlines())


def test_a_host_that_says_nothing_is_looked_at_too(tmp_path):
    found = {finding.name: finding for finding in doctor.examine(tmp_path)}
    assert found["shared memory"].grade == "wrong"
    assert "mount -t tmpfs" in found["shared memory"].remedy


@pytest.mark.parametrize(
    ("size", "free", "grade"),
    [
        (64 << 20, 64 << 20, "wrong"),
        (64 * GIB, GIB // 2, "wrong"),
        (8 * GIB, 8 * GIB, "better"),
        (64 * GIB, 60 * GIB, "ok"),
    ],
)
def test_shared_memory(host, shm_size, size, free, grade):
    host.write("proc/meminfo", f"MemTotal: {100 * GIB >> 10} kB")
    shm_size(size, free)
    finding = doctor.shared_memory(host.root)
    assert finding.grade == grade
    assert ("remount,size" in finding.remedy) == (grade != "ok")


@pytest.mark.parametrize(
    ("files", "grade", "says"),
    [
        ({}, "ok", "no limit"),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, "ok", "no limit"),
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/box/memory.max": "max",
                "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
                "sys/fs/cgroup/pod/memory.current": str(GIB),
            },
            "better",
            "may use 8.0 GiB, shared memory included, and uses 1.0 GiB; a node takes at most 6.8 GiB more",
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/box\n0::/",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(80 * GIB),
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIB),
            },
            "ok",
            "80.0 GiB",
        ),
        (
            {"proc/self/cgroup": "5:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            "ok",
            "no limit",
        ),
    ],
)
def test_the_limit_of_a_container_counts_shared_memory(host, shm_size, files, grade, says):
    shm_size(32 * GIB, 32 * GIB)
    for path, text in files.items():
        host.write(path, text)
    finding = doctor.memory_limit(host.root)
    assert (finding.grade, says in finding.says) == (grade, True)


@pytest.mark.parametrize(
    ("works", "setting", "grade"), [(True, "never", "ok"), (False, "advise", "better"), (False, "never", "better")]
)
def test_huge_pages(host, monkeypatch, works, setting, grade):
    monkeypatch.setattr(pages, "try_collapse", lambda: works)
    host.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", f"always [{setting}] deny")
    finding = doctor.huge_pages(host.root)
    assert finding.grade == grade
    assert setting in finding.says or grade == "better"


def test_pools_of_huge_pages(host):
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    for name, count in (("nr", 1024), ("free", 1000), ("resv", 488)):
        host.write(f"{pool}/{name}_hugepages", str(count))
    host.write("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0")
    finding = doctor.hugetlb_pools(host.root)
    assert finding.grade == "better"
    assert finding.says == "2.0 GiB in 2 MiB pages, 1.0 GiB free, but mounted nowhere"
    host.write("proc/mounts", "none /mnt/huge hugetlbfs rw,pagesize=2M 0 0")
    finding = doctor.hugetlb_pools(host.root)
    assert finding.grade == "ok"
    assert "/mnt/huge" in finding.says
    host.write(f"{pool}/nr_hugepages", "0")
    assert doctor.hugetlb_pools(host.root).says == "none, and none is needed"


def test_memory_nodes(host):
    host.write("sys/devices/system/node/has_memory", "0-1")
    host.write("proc/self/status", "Mems_allowed_list:\t0-1")
    assert doctor.memory_nodes(host.root).says.startswith("2: 0, 1")


def test_cores_by_time(host):
    host.write("proc/self/cgroup", "0::/box")
    host.write("sys/fs/cgroup/box/cpu.max", "50000 100000")
    finding = doctor.cores(host.root)
    assert finding.grade == "better"
    assert "0.5 cores" in finding.says


@pytest.mark.parametrize(("limit", "grade"), [(1024, "better"), (65536, "ok")])
def test_open_files(host, monkeypatch, limit, grade):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    assert doctor.open_files(host.root).grade == grade


@pytest.mark.parametrize(("chosen", "grade"), [("cubic", "ok"), ("bbr", "better"), ("bbr3", "better")])
def test_tcp(host, chosen, grade):
    host.write("proc/sys/net/ipv4/tcp_congestion_control", chosen)
    found = doctor.tcp(host.root)
    assert found.grade == grade
    assert f"is {chosen}" in found.says


def test_nics_of_a_large_host(host):
    build_sys(host.root / "sys", lines_of("dgx_h100"))
    nics = doctor.nics(host.root).says.splitlines()
    assert len(nics) == 12 + 13
    assert nics[0] == "mlx5_0:1: 400 Gbit/s, InfiniBand, NUMA node 0"
    assert "eno3: 10 Gbit/s, TCP, NUMA node 0" in nics
    finding = doctor.nearest_nics(host.root)
    nearest = finding.says.splitlines()
    assert nearest[0] == "GPU 0 (0000:1b:00.0): mlx5_0:1 (PXB)"
    assert nearest[7] == "GPU 7 (0000:df:00.0): mlx5_11:1 (PXB)"
    assert nearest[8:] == [
        "NUMA node 0: mlx5_0:1, mlx5_1:1, mlx5_3:1, mlx5_4:1, mlx5_5:1, mlx5_2:1 (NODE)",
        "NUMA node 1: mlx5_6:1, mlx5_7:1, mlx5_9:1, mlx5_10:1, mlx5_11:1, mlx5_8:1 (NODE)",
    ]
    lines = doctor.report([finding]).splitlines()
    assert lines[1] == " " * 36 + nearest[1], "further lines are below the first"


def test_nics_that_are_down_or_unknown(host):
    build_sys(host.root / "sys", lines_of("workstation"))
    assert "mlx5_1:1: Ethernet, NUMA node unknown, down" in doctor.nics(host.root).says
    assert doctor.nearest_nics(host.root).says.splitlines() == [
        "GPU 0 (0000:07:00.0): mlx5_0:1 (PHB)",
        "NUMA node 0: mlx5_0:1 (NODE)",
    ]


def test_a_host_without_rdma_names_its_network_devices(host):
    build_sys(host.root / "sys", [line for line in lines_of("workstation") if "infiniband" not in line])
    assert doctor.nearest_nics(host.root).says.splitlines() == [
        "GPU 0 (0000:07:00.0): enp1s0f0np0, enp6s0 (PHB)",
        "NUMA node 0: enp1s0f0np0, enp6s0 (NODE)",
    ]
    (host.root / "empty").mkdir()
    assert doctor.nics(host.root / "empty").says == "none is visible"


def test_what_sys_says_is_recorded(tmp_path, capsys):
    path = tmp_path / "here.txt"
    assert cli.main(["doctor", "--record-sys", str(path)]) == 0
    build_sys(tmp_path / "sys", path.read_text().splitlines())
    assert doctor.nearest_nics(tmp_path) == doctor.nearest_nics(Path("/"))
    assert cli.main(["doctor", "--record-sys", str(path)]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize("built", [True, False])
def test_compiled_loops(host, monkeypatch, built):
    monkeypatch.setattr(native, "loops", built or None)
    found = doctor.compiled_loops(host.root)
    assert found.grade == ("ok" if built else "better")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, False])
def test_the_command_needs_no_ray_and_its_status_shows_the_grade(wrong):
    program = f"""
import sys
sys.modules["ray"] = None
from raykv.tools import cli
from raykv.tools import doctor
doctor.examine = lambda: [doctor.Finding("a thing", {"wrong" if wrong else "better"!r}, "so it is", "mend it")]
sys.exit(cli.main(sys.argv[1:]))
"""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program, "doctor", *arguments], capture_output=True, text=True)

    done = run()
    assert done.returncode == wrong
    assert "-> mend it" in done.stdout
    (found,) = json.loads(run("--json").stdout)
    assert found == {
        "name": "a thing",
        "grade": "wrong" if wrong else "better",
        "says": "so it is",
        "remedy": "mend it",
    }


@pytest.mark.parametrize(
    ("ports", "pyverbs", "grade", "says"),
    [
        ({}, True, "ok", "no device"),
        ({"mlx5_0": "1: DOWN"}, True, "better", "no port is active"),
        ({"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"}, True, "ok", "active: mlx5_0:1"),
        ({"mlx5_0": "4: ACTIVE"}, False, "better", "pyverbs is missing"),
    ],
)
def test_rdma(host, monkeypatch, ports, pyverbs, grade, says):
    for name, state in ports.items():
        host.write(f"sys/class/infiniband/{name}/ports/1/state", state)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if pyverbs else None)
    found = doctor.rdma_devices(host.root)
    assert (found.grade, says in found.says) == (grade, True), found


def test_gpu_copies(host, monkeypatch):
    assert doctor.gpu(host.root).grade == "ok", "no GPU, nothing to do"
    host.write("dev/nvidia0", "")
    monkeypatch.setattr(driver, "library", lambda: None)
    finding = doctor.gpu(host.root)
    assert (finding.grade, finding.says) == ("better", "there is a GPU, but libcuda.so.1 is missing")
    assert "--gpus all" in finding.remedy
    old, new = SimpleNamespace(), SimpleNamespace(cuMemcpyBatchAsync_v2=None)
    monkeypatch.setattr(driver, "library", lambda: old)
    monkeypatch.setattr(device, "find_spec", lambda _: None)
    finding = doctor.gpu(host.root)
    assert (finding.grade, finding.says) == ("better", "there is a GPU, but cupy is missing")
    assert "pip install cupy" in finding.remedy
    assert "not through the CPU" in finding.remedy
    monkeypatch.setattr(device, "find_spec", lambda _: object())
    assert "update NVIDIA's driver" in doctor.gpu(host.root).remedy
    monkeypatch.setattr(driver, "library", lambda: new)
    assert doctor.gpu(host.root).grade == "ok"
