"""Ray nodes on hosts of their own, with two RDMA devices each. `python -m tests.rdma.run_hosts` runs these tests."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.chaos.cluster import CHUNK_NBYTES, DIRECTORY
from tests.chaos.hosts import Network, run
from tests.cluster.ray_hosts import RayCluster
from tests.rdma.run_hosts import HERE
from tests.support.nodes import wait_until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(HERE not in os.environ, reason="needs the machine of python -m tests.rdma.run_hosts"),
]

RAILS = ("rail0", "rail1")
START_S = 120.0


class Rails:
    """Two further interfaces of each host, each joined to those of the other hosts, and an RDMA device on each."""

    def __init__(self, network: Network, hosts: list[str]) -> None:
        self._network = network
        for number, rail in enumerate(RAILS):
            bridge = f"{rail}-bridge"
            run("ip", "netns", "add", bridge)
            run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", bridge, "link", "set", "bridge", "up", "mtu", "4200")
            for place, host in enumerate(hosts, start=1):
                namespace, here = Path(network.file(host)).name, self._interface(host, rail)
                run("ip", "-n", namespace, "link", "add", here, "type", "veth", "peer", "name", host, "netns", bridge)
                run("ip", "-n", bridge, "link", "set", "dev", host, "mtu", "4200", "master", "bridge", "up")
                run("ip", "-n", namespace, "addr", "add", f"10.78.{number}.{place}/24", "dev", here)
                run("ip", "-n", namespace, "link", "set", here, "mtu", "4200", "up")
                self.on(host, "rdma", "link", "add", f"rxe{number}{place}", "type", "rxe", "netdev", here)
                wait_until(lambda host=host, rail=rail: self.is_active(host, rail), START_S)

    def _interface(self, host: str, rail: str) -> str:
        return f"{host}{rail}"  # unlike on other hosts: RDMA devices are visible in all namespaces

    def on(self, host: str, *command: str) -> str:
        return run(*self._network.command(host, *command))

    def is_active(self, host: str, rail: str) -> bool:
        """Return whether the RDMA device of a rail works."""
        lines = self.on(host, "rdma", "link", "show").splitlines()
        return any(f"netdev {self._interface(host, rail)} " in f"{line} " and " ACTIVE " in line for line in lines)

    def sent(self, host: str) -> dict[str, int]:
        """Return the packets that each rail of a host has sent."""
        files = {rail: f"/sys/class/net/{self._interface(host, rail)}/statistics/tx_packets" for rail in RAILS}
        return {rail: int(self.on(host, "cat", file)) for rail, file in files.items()}

    def set(self, host: str, rail: str, state: str) -> None:
        self.on(host, "ip", "link", "set", self._interface(host, rail), state)

    def close(self) -> None:
        for rail in RAILS:
            subprocess.run(["ip", "netns", "del", f"{rail}-bridge"], check=True)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[RayCluster, Rails]]:
    made = RayCluster(["h2", "h3"], seed=1)
    try:
        rails = Rails(made.network, ["h2", "h3"])
        try:
            made.start_on_ray(prompts=20, fresh=0.15)
            made.converge(START_S)
            yield made, rails
            assert made.stop() == []
        finally:
            rails.close()
    finally:
        made.close()


def test_chunks_of_another_host_come_over_both_rails(both: tuple[RayCluster, Rails]):
    cluster, rails = both
    names = [f"chunk-{number}" for number in range(40)]
    wait_until(lambda: cluster.clients["h2"].ask("write", names=names), START_S)
    everything = {"rdma": len(names) * CHUNK_NBYTES}
    reader, holder = cluster.clients["h3"], cluster.clients["h2"]
    wait_until(lambda: reader.ask("read_by_path", names=names) == everything, START_S)
    requests, packets = holder.ask("stats")["requests"], rails.sent("h2")
    assert reader.ask("read_by_path", names=names) == everything
    now = holder.ask("stats")["requests"]
    for request in ("Read", "Pin", "Write"):
        assert now.get(request, 0) == requests.get(request, 0)
    for rail, before in packets.items():
        assert rails.sent("h2")[rail] - before > 0.05 * everything["rdma"] / 4096, f"{rail} sent too little"
    assert cluster.clients[DIRECTORY].ask("read_by_path", names=names) == {"tcp": everything["rdma"]}  # no device there


def test_a_rail_that_goes_down_in_the_middle_of_a_read_costs_nothing(both: tuple[RayCluster, Rails]):
    cluster, rails = both
    reader, names = cluster.clients["h3"], [f"steady-{number}" for number in range(60)]
    wait_until(lambda: cluster.clients["h2"].ask("write", names=names), START_S)
    everything = len(names) * CHUNK_NBYTES

    def read() -> dict[str, int]:
        found: dict[str, int] = reader.ask("read_by_path", names=names)
        assert sum(found.values()) == everything, f"chunks are missing: {found}"
        return found

    wait_until(lambda: read() == {"rdma": everything}, START_S)
    for rail in (*RAILS, RAILS[0]):
        reader.send("read_by_path", names=names)
        rails.set("h2", rail, "down")
        try:
            found = reader.receive()
            print(f"{rail} down: {found}")
            assert sum(found.values()) == everything, f"chunks are missing: {found}"
            wait_until(lambda: read() == {"rdma": everything}, START_S)  # the other rail alone
        finally:
            rails.set("h2", rail, "up")
        before = rails.sent("h2")[rail]
        wait_until(lambda rail=rail, before=before: read() and rails.sent("h2")[rail] > before + 500, START_S)


def test_without_rails_bytes_go_over_tcp(both: tuple[RayCluster, Rails]):
    """All this under the load of `tests.chaos`, which checks every byte.

    It checks deadlines, too. These are only printed: a User-Mode kernel has one CPU, and this kernel computes the
    checksums of all devices on it, in the time of whichever process runs.
    """
    cluster, rails = both
    cluster.start_load()

    def wait_for_gets(path: str) -> None:
        before = cluster.results[path]
        wait_until(lambda: cluster.collect() and cluster.results[path] > before + 20, START_S)

    wait_for_gets("over rdma")
    for rail in RAILS:
        rails.set("h2", rail, "down")
    try:
        wait_for_gets("over tcp")
    finally:
        for rail in RAILS:
            rails.set("h2", rail, "up")
    wait_for_gets("over rdma")
    late = [problem for problem in cluster.problems if "overran" in problem]
    print(f"{len(late)} of {sum(cluster.results.values())} operations were late: {late[:3]}")
    assert [problem for problem in cluster.problems if problem not in late] == []
