"""A cluster of real processes: a directory, a node with its owner on each host, and clients under load."""

import os
import secrets
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.chaos.children import Child, Gone, ask_all
from tests.chaos.hosts import Network
from tests.support.nodes import stop_process

DIRECTORY: Final = "dir"
"""The host of the directory. A client without a node on its host runs there, too."""
PORT: Final = 7000
HEARTBEAT_S: Final = 0.25
MEMBER_TIMEOUT_S: Final = 1.5
CHUNK_NBYTES: Final = 256 << 10
ARENA_NBYTES: Final = 64 << 20
POLL_S: Final = 0.02


class Cluster:
    """Processes on the hosts of a network. `close` ends all and removes their files.

    Attributes:
        network: The hosts.
        owners: The owner of each host's node.
        clients: The process of clients on each host.
        results: Sum of what the clients counted.
        problems: What the clients found wrong.
        overruns_s: How late the latest operation ended: by the clock, and without the time that other processes took.
        waited_for: What the last `converge` waited for, and when it began to.
    """

    def __init__(
        self, hosts: Sequence[str], *, seed: int, name: str = "chaos", beneath: "Cluster | None" = None
    ) -> None:
        """Make the network, and start nothing. `beneath`: share the hosts and their files with this cluster."""
        self._name, self._owns = name, beneath is None
        self.network = beneath.network if beneath else Network([*hosts, DIRECTORY])
        self._shm_dir = beneath._shm_dir if beneath else Path(tempfile.mkdtemp(prefix="raykv-chaos-", dir="/dev/shm"))
        self._secret, self._seed = secrets.token_hex(32), seed
        self._storage = {"arena_nbytes": ARENA_NBYTES, "extent_nbytes": 4 << 20, "shm_dir": str(self._shm_dir)}
        self.hosts = list(hosts)
        self.owners: dict[str, Child] = {}
        self.clients: dict[str, Child] = {}
        self.directory: Child | None = None
        self.results: Counter[str] = Counter()
        self.problems: list[str] = []
        self.overruns_s = [0.0, 0.0]
        self.waited_for: dict[str, float] = {}
        self._probes = 0
        self._starting: list[str] = []
        self._client_fields: dict[str, tuple[str, int, float]] = {}
        self._known = {DIRECTORY}  # hosts whose clients can connect, because they have or had a node
        self._port = PORT if beneath is None else PORT + 1

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self, hosts: Sequence[str] | None = None, *, prompts: int = 150, fresh: float = 0.15) -> None:
        """Start the directory, the nodes of `hosts` (None: all), and the clients of all hosts.

        Args:
            hosts: Other hosts have clients, but no node yet.
            prompts: Number of prompts that the clients share. Each has 1 MiB.
            fresh: Share of the requests that are for a prompt of their own.
        """
        self.start_directory()
        for host in hosts or self.hosts:
            self.start_node(host)
        self.wait_ready()
        for host in self.hosts:
            self._start_client(host, f"unix:{self._shm_dir}/raykv-{self._name}-{host}.sock", prompts, fresh)
        stats = self.owners[self.hosts[0]].ask("stats")
        self._start_client(DIRECTORY, stats["address"], prompts, fresh)
        for client in self.clients.values():
            assert client.receive() == "ready"

    def _child(self, host: str, module: str, **fields: Any) -> Child:
        clock = self._clock(host)
        if not clock.exists():
            clock.write_bytes(bytes(8))
        path = os.pathsep.join([str(Path(__file__).parent / "clock"), *(each or os.getcwd() for each in sys.path)])
        environment = ["env", f"RAYKV_TEST_CLOCK={clock}", f"PYTHONPATH={path}"]
        command = self.network.command(host, *environment)
        return Child(command, f"tests.chaos.{module}", secret=self._secret, **fields)

    def _clock(self, host: str) -> Path:
        return self._shm_dir / f"clock-{host}"

    def start_directory(self) -> None:
        """Start the directory, and wait until it serves."""
        self.directory = self._child(
            DIRECTORY, "directory", address=self._directory_address, member_timeout_s=MEMBER_TIMEOUT_S
        )
        assert self.directory.receive() == "ready"

    @property
    def _directory_address(self) -> str:
        return f"{self.network.addresses[DIRECTORY]}:{self._port}"

    def start_node(self, host: str) -> None:
        """Start a host's node. `wait_ready` waits for it."""
        config = {
            "cluster": self._name,
            "node_id": host,
            "host": host,  # all hosts of the test share one /dev/shm
            "bind": f"{self.network.addresses[host]}:0",
            "heartbeat_s": HEARTBEAT_S,
            "storage": self._storage,
        }
        self.owners[host] = self._child(host, "owner", name=host, config=config, directory=self._directory_address)
        self._starting.append(host)
        self._known.add(host)

    def wait_ready(self) -> None:
        """Wait until the nodes that were started serve."""
        starting, self._starting = self._starting, []
        for host in starting:
            assert self.owners[host].receive() == "ready"

    def restart_ended(self) -> None:
        """Start the owners that have ended, as Ray does."""
        for host, owner in list(self.owners.items()):
            if owner.ended:
                owner.close()
                self.start_node(host)
        self.wait_ready()

    def stop_node(self, host: str, *, unlink: bool) -> None:
        """Stop a node in order. `unlink`: it leaves the cluster and its memory is removed."""
        owner = self.owners.pop(host)
        owner.ask("stop", unlink=unlink)
        owner.close()

    def _start_client(self, host: str, address: str, prompts: int, fresh: float) -> None:
        fields = {"seed": f"{self._seed}-{host}", "nbytes": CHUNK_NBYTES, "prompts": prompts, "fresh": fresh}
        self._client_fields[host] = address, prompts, fresh
        self.clients[host] = self._child(host, "load", name=host, address=address, **fields)

    def restart_client(self, host: str) -> None:
        """Kill the client process of a host, which holds leases, and start another one."""
        self.collect()
        self.clients[host].kill()
        self._start_client(host, *self._client_fields[host])
        assert self.clients[host].receive() == "ready"
        self.clients[host].ask("read", names=["nothing"])  # connects: nobody could, once the host's node has left
        self.clients[host].ask("start")

    def stop_clients(self) -> None:
        """Let all clients end in order."""
        while self.clients:
            self.clients.popitem()[1].close()

    def start_load(self) -> None:
        ask_all(self.clients, "start")

    def close(self) -> None:
        """End everything. What cannot end in order is killed with its host."""
        children = [*self.clients.values(), *self.owners.values(), *([self.directory] if self.directory else [])]
        for pid in self.network.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for child in children:
            child.kill()
        if self._owns:
            self.network.close()
            shutil.rmtree(self._shm_dir, ignore_errors=True)

    # -- what may happen --------------------------------------------------------------------------------------------

    def pids(self, host: str) -> dict[str, int]:
        """Return the process ids on a host: "node", "supervisor", "owner"."""
        found: dict[str, int] = self.owners[host].ask("pids")
        return found

    def pause(self, pid: int) -> None:
        stop_process(pid)

    def resume(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def set_clock(self, host: str, shift_s: float) -> None:
        """Let the wall clock of a host's processes jump: from now on it shows `shift_s` more than the real one."""
        with self._clock(host).open("r+b") as file:
            file.write(struct.pack("d", shift_s))

    def drain(self, host: str) -> dict[str, Any]:
        """Move a node's chunks to the others, then stop it. Returns what the drain has done."""
        owner = self.owners[host]
        owner.ask("drain", nbytes_per_s=1e9)
        until_s, found = time.monotonic() + 60.0, dict[str, Any]()
        while found.get("state") != "done":
            assert time.monotonic() < until_s, f"the drain does not end: {found}"
            time.sleep(POLL_S)
            found = owner.ask("stats")["drain"] or {}
        self.stop_node(host, unlink=True)
        return found

    # -- what must hold ---------------------------------------------------------------------------------------------

    def collect(self) -> Counter[str]:
        """Add the clients' results since the last call to the sums. Returns these results."""
        found: Counter[str] = Counter()
        for report in ask_all(self.clients, "report").values():
            found.update(report["counts"])
            self.problems += report["problems"]
            self.overruns_s = [max(pair) for pair in zip(self.overruns_s, report["overruns_s"], strict=True)]
        self.results += found
        return found

    def unsettled(self) -> str:
        """Say why the nodes do not agree yet; empty if they do and have announced all."""
        assert self.directory is not None
        view = self.directory.ask("view")
        if set(view["members"]) != set(self.owners):
            return f"members {sorted(view['members'])}, wanted {sorted(self.owners)}"
        for host, stats in ask_all(self.owners, "stats").items():
            if stats["epoch"] != view["epoch"]:
                return f"{host} has epoch {stats['epoch']}, the directory {view['epoch']}"
            if stats["incarnation"] != view["members"][host]:
                return f"the directory knows another process of {host}"
            if stats["unannounced"]:
                return f"{host} has {stats['unannounced']} keys to announce"
        return ""

    def converge(self, within_s: float) -> float:
        """Wait until all nodes agree. Returns the seconds.

        Then each host reads what each other host has written, and finds all chunks of the shared prompts that lie in
        the memory of any node.
        """
        began_s, problem = time.monotonic(), "not asked yet"
        self.waited_for = {}
        while problem:
            try:
                problem = self.unsettled()
            except Gone as error:
                problem = str(error)
            self._require(began_s, within_s, problem)
        self._probes += 1
        names = {host: [f"probe-{self._probes}-{host}"] for host in self.owners}
        for host, name in names.items():
            while not self.clients[host].ask("write", names=name):
                self._require(began_s, within_s, f"{host} cannot store")
        everything = [name for each in names.values() for name in each]
        lacking: dict[str, list[str]] | None = None
        while lacking is None or any(lacking.values()):
            hits = ask_all(self._readers(), "read", names=everything)
            lacking = {
                host: [name for name, hit in zip(everything, got, strict=True) if not hit] for host, got in hits.items()
            }
            self._require(began_s, within_s, f"not readable: {lacking}")
        while lost := self._lost():
            self._require(began_s, within_s, f"held, but not found: {lost}")
        return time.monotonic() - began_s

    def found_after(self, hosts: Sequence[str], within_s: float) -> float:
        """Store chunks on the first of some hosts, and wait until the second finds them. Returns the seconds.

        Only chunks are stored whose owner is one of `hosts`. So no other host is needed for them.
        """
        writer, reader = (self.clients[host] for host in hosts[:2])
        self._probes += 1
        names = [f"probe-{self._probes}-{number}" for number in range(20)]
        owners = writer.ask("owners", names=names)
        names = [name for name, owner in zip(names, owners, strict=True) if self.host_of(owner) in hosts]
        began_s = time.monotonic()
        while not (writer.ask("write", names=names) and all(reader.ask("read", names=names))):  # some may be evicted
            self._require(began_s, within_s, f"{hosts[1]} does not find what {hosts[0]} has stored")
        return time.monotonic() - began_s

    def host_of(self, node_id: str) -> str:
        """Return the host of a node."""
        return node_id

    def _readers(self) -> dict[str, Child]:
        return {host: client for host, client in self.clients.items() if host in self._known}

    def _lost(self) -> dict[str, list[int]]:
        """Return the chunks that a node holds and a host does not find, by host.

        A chunk may be evicted meanwhile: only what is lost again and again is lost.
        """
        holders = {host: client for host, client in self.clients.items() if host in self.owners}
        held = {chunk for chunks in ask_all(holders, "here").values() for chunk in chunks}
        found = ask_all(self._readers(), "found")
        held &= {chunk for chunks in ask_all(holders, "here").values() for chunk in chunks}
        return {host: sorted(held.difference(chunks)) for host, chunks in found.items() if held.difference(chunks)}

    def _require(self, began_s: float, within_s: float, problem: str) -> None:
        self.waited_for.setdefault(problem, round(time.monotonic() - began_s, 2))
        if problem and time.monotonic() - began_s > within_s:
            raise AssertionError(f"after {time.monotonic() - began_s:.2f} s: {problem}")
        time.sleep(POLL_S)
