"""A network of hosts on this machine: network namespaces, joined by a bridge that stands in a namespace of its own.

Everything is made with `ip` and `tc` alone. A partition is a permanent neighbour entry with an address that no host
has: packets leave and arrive nowhere, and the sender learns nothing. Loss is a classic BPF filter that redirects a
random share of packets to an interface that leads nowhere. A packet here is what TCP hands over, up to 64 KiB.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Final

NOWHERE: Final = "02:00:00:00:ff:ff"
"""A hardware address that no interface has."""
KILL_S: Final = 10.0
"""`Network.close` kills processes for this long at most."""
POLL_S: Final = 0.01
RANDOM_WORD: Final = (-4096 + 56) & 0xFFFFFFFF
"""Where a classic BPF program loads a random number from: SKF_AD_OFF + SKF_AD_RANDOM."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Hosts that reach each other. `close` ends their processes and removes them.

    Attributes:
        addresses: The IPv4 address of each host.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"raykv-{os.getpid()}"
        self.addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, start=1)}
        try:
            run("ip", "netns", "add", self._bridge)
            run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
            for host in hosts:
                self._add(host)
        except BaseException:
            self.close()
            raise

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}-bridge"

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def file(self, host: str) -> str:
        """Return the file that stands for a host's network namespace."""
        return f"/run/netns/{self._namespace(host)}"

    def _add(self, host: str) -> None:
        name, bridge = self._namespace(host), self._bridge
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "add", "eth", "type", "veth", "peer", "name", host, "netns", bridge)
        run("ip", "-n", bridge, "link", "set", "dev", host, "master", "bridge", "up")
        run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth")
        run("ip", "-n", name, "link", "set", "eth", "up")
        run("ip", "-n", name, "link", "add", "sink", "type", "veth", "peer", "name", "drain")
        for end in ("sink", "drain"):
            run("ip", "-n", name, "link", "set", end, "up")
        run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth", "clsact")

    def join(self, one: str, other: str, number: int) -> tuple[str, str]:
        """Connect two hosts by a cable of their own, in a network of its own. Returns their addresses there.

        At both ends it ends in an interface named "nic" and the number.
        """
        nic, addresses = f"nic{number}", (f"10.78.{number}.1", f"10.78.{number}.2")
        ends = self._namespace(one), self._namespace(other)
        run("ip", "-n", ends[0], "link", "add", nic, "type", "veth", "peer", "name", nic, "netns", ends[1])
        for name, address in zip(ends, addresses, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", nic)
            run("ip", "-n", name, "link", "set", nic, "up")
        return addresses

    def set_up(self, host: str, nic: str, *, up: bool) -> None:
        """Turn an interface on or off."""
        run("ip", "-n", self._namespace(host), "link", "set", nic, "up" if up else "down")

    def received_nbytes(self, host: str, nic: str) -> int:
        """Return how many bytes an interface has received so far."""
        (found,) = json.loads(run("ip", "-n", self._namespace(host), "-s", "-j", "link", "show", "dev", nic))
        nbytes: int = found["stats64"]["rx"]["bytes"]
        return nbytes

    def command(self, host: str, *arguments: str) -> list[str]:
        """Return the command that runs a program on a host."""
        return ["ip", "netns", "exec", self._namespace(host), *arguments]

    def cut(self, sender: str, receiver: str) -> None:
        """Lose all packets from `sender` to `receiver`. The other direction still works."""
        self._neighbour("replace", sender, receiver, "lladdr", NOWHERE, "nud", "permanent")

    def mend(self, sender: str, receiver: str) -> None:
        """Undo `cut`."""
        self._neighbour("del", sender, receiver)

    def _neighbour(self, do: str, sender: str, receiver: str, *how: str) -> None:
        run("ip", "-n", self._namespace(sender), "neigh", do, self.addresses[receiver], "dev", "eth", *how)

    def set_loss(self, host: str, percent: float) -> None:
        """Lose this share of the packets that a host sends. 0: none."""
        tc = self.command(host, "tc", "filter")
        if not percent:
            run(*tc, "del", "dev", "eth", "egress")
            return
        # Load a random word. If it is at least `limit`, return 0: no match. Otherwise the packet matches.
        limit = int(percent / 100 * (1 << 32))
        program = f"4,32 0 0 {RANDOM_WORD},53 0 1 {limit},6 0 0 0,6 0 0 4294967295"
        sink = ("action", "mirred", "egress", "redirect", "dev", "sink")
        run(*tc, "add", "dev", "eth", "egress", "bpf", "bytecode", program, *sink)

    def set_rate(self, host: str, megabits: float, *, nic: str = "eth") -> None:
        """Limit what a host sends, in Mbit/s. 0: no limit."""
        tc = self.command(host, "tc", "qdisc")
        if not megabits:
            run(*tc, "del", "dev", nic, "root")
            return
        run(*tc, "add", "dev", nic, "root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms")

    def pids(self) -> list[int]:
        """Return the processes that run on the hosts."""
        found = []
        for host in self.addresses:
            try:
                found += list(map(int, run("ip", "netns", "pids", self._namespace(host)).split()))
            except OSError:
                pass  # there is no such namespace
        return found

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove the hosts."""
        until_s = time.monotonic() + KILL_S
        while (pids := self.pids()) and time.monotonic() < until_s:  # a process may start another one meanwhile
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            time.sleep(POLL_S)
        for name in (*map(self._namespace, self.addresses), self._bridge):
            try:
                run("ip", "netns", "del", name)
            except OSError:
                pass  # it was never made


@cache
def missing() -> str:
    """Say what this machine lacks for a `Network`; empty if nothing."""
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"no {', '.join(lacking)} here (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        network = Network(["try"])
    except OSError as error:
        return f"no network namespaces here: {error}"
    try:
        network.set_loss("try", 50)
        network.set_rate("try", 10)
    except OSError as error:
        return f"no traffic control here: {error}"
    finally:
        network.close()
    return ""


def both_ways(ones: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    """Return the (sender, receiver) pairs between two sets of hosts, in both directions."""
    others = list(others)
    pairs = [(one, other) for one in ones for other in others if one != other]
    return pairs + [(receiver, sender) for sender, receiver in pairs]
