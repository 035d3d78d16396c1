"""A raykv cluster on Ray nodes, each in a network namespace of its own, under the load of `tests.chaos`."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from deployments.local_ray import OBJECT_STORE_NBYTES, SETTINGS, end_with_parent
from tests.chaos.children import Child
from tests.chaos.cluster import DIRECTORY, MEMBER_TIMEOUT_S, Cluster
from tests.support.nodes import wait_until

PORT: Final = 6379
START_S: Final = 180.0


class RayCluster(Cluster):
    """Ray runs the directory and the nodes. Each host has a Ray node, a raykv node and clients.

    The host of the directory has them too. It is the head of the Ray cluster.
    """

    def __init__(self, hosts: Sequence[str], *, seed: int) -> None:
        super().__init__(hosts, seed=seed, name="ray")
        self._ray_dir = Path(tempfile.mkdtemp(prefix="raykv-ray-", dir="/tmp"))  # sockets need a short path
        self._ray: dict[str, subprocess.Popen[bytes]] = {}
        self._host_of_node: dict[str, str] = {}

    def start_on_ray(self, *, prompts: int, fresh: float) -> None:
        """Start Ray, the directory, the nodes and the clients. For the arguments see `Cluster.start`."""
        self._start_ray([DIRECTORY])
        self.directory = self._driver()
        assert self.directory.receive(START_S) == "ready"
        self._ask_driver("start")  # Ray has no other node yet, so the directory is on the head
        self._start_ray(self.hosts)
        self._secret = self.directory.ask("secret")
        for host, (node_id, address) in self._ask_driver("start").items():
            self._host_of_node[node_id] = host
            self._known.add(host)
            self._start_client(host, address, prompts, fresh)
        for client in self.clients.values():
            assert client.receive() == "ready"
        self.owners = self.clients  # they answer for the nodes, which Ray owns

    def _start_ray(self, hosts: Sequence[str]) -> None:
        """Start a Ray node on each host, and wait until all have joined. The first host of all is the head."""
        address = f"{self.network.addresses[DIRECTORY]}:{PORT}"
        for host in hosts:
            head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            command = self._with_ray(
                host,
                *(str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"),
                *(head if host == DIRECTORY else [f"--address={address}"]),
                f"--node-ip-address={self.network.addresses[host]}",
                f"--temp-dir={self._ray_dir / host}",  # nodes that share one may choose the same sockets
                "--num-cpus=0",  # the actors need none, and Ray starts no workers ahead
                f"--object-store-memory={OBJECT_STORE_NBYTES}",
            )
            with self._log(host).open("wb") as output:
                self._ray[host] = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
                )
        for host in hosts:
            wait_until(partial(self._has_joined, host), START_S)

    def _has_joined(self, host: str) -> bool:
        output = self._log(host).read_text(errors="replace")
        assert self._ray[host].poll() is None, f"no Ray node on {host}:\n{output[-2000:]}"
        return "Ray runtime started" in output

    def _log(self, host: str) -> Path:
        return self._ray_dir / f"{host}.log"

    def _with_ray(self, host: str, *arguments: str) -> list[str]:
        """Return the command that runs a program of Ray on a host, with this tree's code."""
        paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {**SETTINGS, "PYTHONPATH": os.pathsep.join(paths)}
        return self.network.command(host, "env", *(f"{name}={value}" for name, value in settings.items()), *arguments)

    def _driver(self) -> Child:
        addresses = self.network.addresses
        config = {
            "name": self._name,
            "storage": self._storage,
            "member_timeout_s": MEMBER_TIMEOUT_S,
            "separate_hosts": True,  # all hosts of the test share one /dev/shm
        }
        return Child(
            self._with_ray(DIRECTORY),
            "tests.cluster.ray_driver",
            config=config,
            addresses=addresses,
            head=addresses[DIRECTORY],
            port=PORT,
        )

    def _ask_driver(self, command: str) -> Any:
        assert self.directory is not None
        self.directory.send(command)
        return self.directory.receive(START_S)

    def host_of(self, node_id: str) -> str:
        return self._host_of_node[node_id]

    def stop(self) -> list[str]:
        """Stop the clients and the raykv cluster in order. Returns the files that the nodes have left."""
        self.stop_clients()
        self._ask_driver("stop")
        return [path.name for path in self._shm_dir.glob("raykv-*")]

    def close(self) -> None:
        """End everything. What runs on the hosts is killed, Ray's own processes too."""
        try:
            super().close()
        finally:
            for process in self._ray.values():
                process.kill()
                process.wait()
            shutil.rmtree(self._ray_dir, ignore_errors=True)
