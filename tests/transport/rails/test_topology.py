"""The nearest NIC of each GPU and NUMA node on recorded hosts, against expectations written by hand."""

import shutil

import pytest

from raykv.transport.rails.recording import record_sys
from raykv.transport.rails.topology import Distance, Gpu, Place, Topology, read_topology
from tests.support.sysfs import RECORDINGS, build_sys, lines_of

PIX, PXB, PHB, NODE, SYS = Distance
HOSTS = sorted(path.stem for path in RECORDINGS.glob("*.txt"))


@pytest.fixture
def host(tmp_path):
    """Return a function that builds a recorded host, and reads its topology."""

    def build(name: str) -> Topology:
        return read_topology(build_sys(tmp_path / name, lines_of(name)))

    return build


def names(topology: Topology, near: Gpu | int | None) -> list[str]:
    return [port.name for port in topology.nearest(near)]


def test_a_workstation(host):
    """One GPU, one usable port. No NUMA node is known, and there is only one."""
    topology = host("workstation")
    (gpu,) = topology.gpus
    assert (gpu.index, gpu.vendor, gpu.place.address, gpu.place.numa_node) == (0, "0x10de", "0000:07:00.0", -1)
    assert [(port.name, port.active, port.gbit_s) for port in topology.ports] == [
        ("mlx5_0:1", True, 25.0),
        ("mlx5_1:1", False, 40.0),
    ]
    for near in (gpu, 0, None):
        assert names(topology, near) == ["mlx5_0:1"]
        assert [device.name for device in topology.nearest_net_devices(near)] == ["enp1s0f0np0", "enp6s0"]
    assert topology.distance(gpu.place, topology.ports[0].place) is PHB
    assert topology.distance(Place(numa_node=0), topology.ports[0].place) is NODE
    assert [(device.name, device.active, device.gbit_s) for device in topology.net_devices] == [
        ("enp1s0f0np0", True, 25.0),
        ("enp1s0f1np1", False, 0.0),
        ("enp6s0", True, 1.0),
    ]


DGX_PAIRS = {
    "0000:1b:00.0": (0, "mlx5_0"),
    "0000:43:00.0": (0, "mlx5_3"),
    "0000:52:00.0": (0, "mlx5_4"),
    "0000:61:00.0": (0, "mlx5_5"),
    "0000:9d:00.0": (1, "mlx5_6"),
    "0000:c3:00.0": (1, "mlx5_9"),
    "0000:d1:00.0": (1, "mlx5_10"),
    "0000:df:00.0": (1, "mlx5_11"),
}
"""GPU -> its socket, and the NIC behind the same switches."""
DGX_SOCKETS = [
    ["mlx5_0:1", "mlx5_1:1", "mlx5_3:1", "mlx5_4:1", "mlx5_5:1", "mlx5_2:1"],
    ["mlx5_6:1", "mlx5_7:1", "mlx5_9:1", "mlx5_10:1", "mlx5_11:1", "mlx5_8:1"],
]
"""The ports of each socket. The last one has 100 Gbit/s, the others 400."""


def test_a_dgx_h100(host):
    """Each GPU's NIC is the one behind its switches, then those of its socket, then the other socket's."""
    topology = host("dgx_h100")
    assert [gpu.place.address for gpu in topology.gpus] == list(DGX_PAIRS)
    ports = {port.device: port for port in topology.ports}
    for gpu, (socket, nic) in zip(topology.gpus, DGX_PAIRS.values(), strict=True):
        assert gpu.place.numa_node == socket
        own, here, there = f"{nic}:1", DGX_SOCKETS[socket], DGX_SOCKETS[1 - socket]
        fast_there, slow_there = there[:-1], there[-1:]
        assert names(topology, gpu) == [own, *(name for name in here if name != own), *fast_there, *slow_there]
        distances = [topology.distance(gpu.place, port.place) for port in topology.nearest(gpu)]
        assert distances == [PXB] + [NODE] * 5 + [SYS] * 6
    for socket in (0, 1):
        assert names(topology, socket) == DGX_SOCKETS[socket] + DGX_SOCKETS[1 - socket]
    assert names(topology, None)[-2:] == ["mlx5_2:1", "mlx5_8:1"], "the slow ones"
    assert topology.distance(ports["mlx5_1"].place, ports["mlx5_2"].place) is PIX, "two ports of one card"
    assert {port.link_layer for port in topology.ports if port.gbit_s == 400} == {"InfiniBand"}
    assert {device.name for device in topology.net_devices if device.ip_over_ib} == {
        *("ibp24s0", "ibp41s0f0", "ibp64s0", "ibp79s0", "ibp94s0"),
        *("ibp154s0", "ibp170s0f0", "ibp192s0", "ibp206s0", "ibp220s0"),
    }
    assert [device.name for device in topology.nearest_net_devices(topology.gpus[4])][:2] == ["ibp154s0", "ibp170s0f0"]


MI350X_PAIRS = {
    "0000:08:00.0": (0, "bnxt_re0"),
    "0000:18:00.0": (0, "bnxt_re1"),
    "0000:68:00.0": (0, "bnxt_re2"),
    "0000:78:00.0": (0, "bnxt_re3"),
    "0000:88:00.0": (1, "bnxt_re4"),
    "0000:98:00.0": (1, "bnxt_re5"),
    "0000:e8:00.0": (1, "bnxt_re6"),
    "0000:f9:00.0": (1, "bnxt_re7"),
}
"""GPU -> its socket, and the NIC behind the same switch."""
MI350X_SOCKETS = [[f"bnxt_re{number}:1" for number in numbers] for numbers in (range(4), range(4, 8))]


def test_eight_gpus_and_eight_nics_of_a_real_server(host):
    """Each GPU's NIC is behind the same switch; the GPU has a switch of its own below it."""
    topology = host("mi350x")
    assert [gpu.place.address for gpu in topology.gpus] == list(MI350X_PAIRS)
    for gpu, (socket, nic) in zip(topology.gpus, MI350X_PAIRS.values(), strict=True):
        assert (gpu.vendor, gpu.place.numa_node) == ("0x1002", socket)
        others = [name for name in MI350X_SOCKETS[socket] if name != f"{nic}:1"]
        assert names(topology, gpu) == [f"{nic}:1", *others, *MI350X_SOCKETS[1 - socket]]
        distances = [topology.distance(gpu.place, port.place) for port in topology.nearest(gpu)]
        assert distances == [PXB] + [NODE] * 3 + [SYS] * 4
    for socket in (0, 1):
        assert names(topology, socket) == MI350X_SOCKETS[socket] + MI350X_SOCKETS[1 - socket]
    assert {port.gbit_s for port in topology.ports} == {400.0}


def test_a_real_dgx_spark(host):
    """One GPU, one NIC. The port with a cable is two devices, in two PCI domains. Both are needed for the full rate."""
    topology = host("dgx_spark")
    gpu = topology.gpu_at("0000000F:01:00.0")
    assert gpu is not None
    assert topology.gpus == (gpu,)
    for near in (gpu, 0, None):
        assert names(topology, near) == ["roceP2p1s0f1:1", "rocep1s0f1:1"]
        assert [each.name for each in topology.nearest_net_devices(near)] == ["enP2p1s0f1np1", "enp1s0f1np1"]
    assert {topology.distance(gpu.place, port.place) for port in topology.ports} == {NODE}


def test_a_real_server_with_two_ports(host):
    """Both ports are on the second socket: from the first one, they are far, but there is nothing nearer."""
    topology = host("two_ports")
    assert topology.gpus == ()
    for near in (0, 1, None):
        assert names(topology, near) == ["mlx5_0:1", "mlx5_1:1"]
        assert [each.name for each in topology.nearest_net_devices(near)] == ["p1p1", "p1p2"]
    ports = topology.ports
    assert topology.distance(ports[0].place, ports[1].place) is PIX
    assert [topology.distance(Place(numa_node=node), ports[0].place) for node in (0, 1)] == [SYS, NODE]


@pytest.mark.parametrize("written", ["0000:C3:00.0", "00000000:C3:00.0", "0000:c3:00.0"])
def test_a_gpu_is_found_by_the_address_that_cuda_or_nvml_writes(host, written):
    found = host("dgx_h100").gpu_at(written)
    assert found is not None
    assert (found.index, found.place.address) == (5, "0000:c3:00.0")
    assert host("workstation").gpu_at(written) is None


def test_a_dpu(host):
    """Two rails: the sub-functions share the wires of the two ports, and representors are not NICs."""
    topology = host("bluefield_dpu")
    assert topology.gpus == ()
    assert [port.device for port in topology.ports if port.shared] == ["mlx5_2", "mlx5_3"]
    for near in (0, None):
        assert names(topology, near) == ["mlx5_0:1", "mlx5_1:1"]
        assert [device.name for device in topology.nearest_net_devices(near)] == ["p0", "p1", "oob_net0"]
    assert [port.gbit_s for port in topology.nearest(0)] == [200.0, 200.0]
    assert topology.distance(topology.ports[0].place, topology.ports[1].place) is PIX


def test_a_bonded_device_and_four_numa_nodes(host):
    """Nodes 0 and 1 are one socket, 2 and 3 the other. A near NIC comes first, also if it is slower."""
    topology = host("bonded")
    assert [gpu.place.numa_node for gpu in topology.gpus] == [0, 1, 2, 3]
    expected = [["mlx5_bond_0:1", "mlx5_2:1"]] * 2 + [["mlx5_2:1", "mlx5_bond_0:1"]] * 2
    assert [names(topology, gpu) for gpu in topology.gpus] == expected
    assert [names(topology, node) for node in range(4)] == expected
    assert names(topology, None) == ["mlx5_2:1", "mlx5_bond_0:1"], "the fastest one"
    nearest = [topology.nearest(node)[0].place for node in range(4)]
    assert [topology.distance(Place(numa_node=node), nearest[node]) for node in range(4)] == [NODE, SYS, NODE, SYS]
    (bond,) = (port for port in topology.ports if port.device == "mlx5_bond_0")
    assert {gid.netdev for gid in bond.gids} == {"bond0"}
    assert [(gid.index, gid.gid) for gid in bond.gids if gid.kind == "RoCE v2" and ":ffff:" in gid.gid] == [
        (3, "0000:0000:0000:0000:0000:ffff:0a00:0201")
    ]
    assert [port.device for port in topology.ports if port.shared] == ["mlx5_3", "mlx5_4"], "virtual functions"


def test_a_virtual_function_is_used_where_its_physical_function_is_not_visible(tmp_path):
    """So it is in a container that got the virtual functions, and their interfaces with them."""
    hidden = [line for line in lines_of("bonded") if not line.startswith("class/infiniband/mlx5_2 ")]
    interfaces = [f"class/net/enp193s0v{number} -> ../../devices/virtual/net/lo" for number in (0, 1)]
    assert names(read_topology(build_sys(tmp_path, [*hidden, *interfaces])), 2)[:2] == ["mlx5_3:1", "mlx5_4:1"]


def test_a_device_of_another_network_namespace_is_not_used(tmp_path):
    """RDMA devices are visible in all namespaces. Here the virtual functions' interfaces are in those of containers."""
    hidden = [line for line in lines_of("bonded") if not line.startswith("class/infiniband/mlx5_2 ")]
    topology = read_topology(build_sys(tmp_path, hidden))
    assert names(topology, 2) == ["mlx5_bond_0:1"]
    assert [port.gids for port in topology.ports if port.shared] == [(), ()]


def test_a_port_that_goes_down_is_not_a_rail(tmp_path):
    state = "mlx5_0/ports/1/state = "
    lines = [line.replace(f"{state}4: ACTIVE", f"{state}1: DOWN") for line in lines_of("dgx_h100")]
    topology = read_topology(build_sys(tmp_path, lines))
    assert names(topology, topology.gpus[0])[0] == "mlx5_1:1"
    assert len(topology.ports) == 12


def test_devices_behind_one_switch(tmp_path):
    """A switch with a NIC and a GPU below it, and a second switch below the first."""
    switch = "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    ways = {
        "near": f"{switch}/0000:02:01.0/0000:04:00.0",
        "far": f"{switch}/0000:02:02.0/0000:05:00.0/0000:06:00.0/0000:07:00.0",
        "bridge": "devices/pci0000:00/0000:00:03.0/0000:08:00.0",
    }
    places = {name: Place(tuple(way.split("/")[1:]), 0) for name, way in ways.items()}
    gpu = Place((*switch.split("/")[1:], "0000:02:00.0", "0000:03:00.0"), 0)
    topology = Topology(numa_nodes={0: {}, 1: {}})
    assert {name: topology.distance(gpu, place) for name, place in places.items()} == {
        "near": PIX,
        "far": PXB,
        "bridge": PHB,
    }
    assert topology.distance(gpu, Place()) is SYS, "nothing is known of it, and there are two nodes"
    assert topology.distance(gpu, gpu) is PIX


def test_a_host_without_sysfs(tmp_path):
    assert read_topology(tmp_path / "none") == Topology()
    assert Topology().nearest() == Topology().nearest_net_devices(3) == []


@pytest.mark.parametrize("name", HOSTS)
def test_whatever_is_missing_or_damaged_the_rest_is_read(name, tmp_path, rng):
    """Files are removed, damaged, or replaced by folders and circular links, in seeded runs."""
    whole = read_topology(build_sys(tmp_path / "whole", lines_of(name)))
    known = {port.name for port in whole.ports}
    for number in range(4):
        root = build_sys(tmp_path / str(number), lines_of(name))
        files = sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())
        for path in rng.sample(files, 30):
            path.unlink()
            match rng.randrange(4):
                case 0:
                    path.write_bytes(b"\xff\xfe nonsense")
                case 1:
                    path.mkdir()
                case 2:
                    path.symlink_to(path.name)
        topology = read_topology(root)
        assert {port.name for port in topology.ports} <= known
        for near in (*topology.gpus, *topology.numa_nodes, None):
            assert all(port.active for port in topology.nearest(near))
            topology.nearest_net_devices(near)
        shutil.rmtree(root)


@pytest.mark.parametrize("name", HOSTS)
def test_a_recording_of_a_recording_is_the_same(name, tmp_path):
    lines = lines_of(name)
    root = build_sys(tmp_path, lines)
    (root / "class/net/bonding_masters").write_text("bond0\n")  # a file among the links, as the kernel's bonding has it
    again = record_sys(root).splitlines()
    assert sorted(again) == sorted(lines)
    assert len(set(again)) == len(again)
    copied = read_topology(build_sys(tmp_path / "copied", again))
    assert copied == read_topology(root)


def test_this_host_is_read_and_recorded(tmp_path):
    """Whatever this host is: a recording shows the same topology as the host."""
    here = read_topology()
    assert read_topology(build_sys(tmp_path, record_sys().splitlines())) == here
