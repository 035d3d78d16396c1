"""Measures reads over two NICs against reads over one, and what a cable that goes down costs.

Run by hand, as root: `python -m benchmarks.nics`

Two hosts are network namespaces, joined by two cables. Traffic control limits what the node sends over each. A client
on the other host reads the same chunks again and again, and checks their bytes. "One" reads over the first cable only.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.chaos.children import Child
from tests.chaos.hosts import Network, missing

SECRET: Final = "5e" * 32
COUNT, NBYTES = 32, 1 << 20
CABLES: Final = ((150, 150), (200, 100))
"""The rates of the two cables in Mbit/s."""


class Hosts:
    """A holder of chunks, and two readers: one that uses both cables, and one that uses the first."""

    def __init__(self, stack: ExitStack, megabits: tuple[int, int]) -> None:
        self.network = network = Network(["a", "b"])
        stack.callback(network.close)
        for number, rate in enumerate(megabits):
            network.join("a", "b", number)
            network.set_rate("a", rate, nic=f"nic{number}")
        home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        storage = {"arena_nbytes": "128 MiB", "extent_nbytes": "4 MiB", "shm_dir": str(home)}
        config = {"node_id": "holder", "host": "a", "bind": "10.78.0.1:0", "nics": "nic0,nic1", "storage": storage}
        address = self._child(stack, "a", name="holder", config=config).ask("address")
        both, one = ({"address": address, "timeout_s": 60.0, "nics": nics} for nics in ("auto", "off"))
        self.both, self.one = (
            self._child(stack, "b", name="reader", config=config, pause_s=5.0) for config in (both, one)
        )

    def _child(self, stack: ExitStack, host: str, **fields: Any) -> Child:
        common = {"secret": SECRET, "count": COUNT, "nbytes": NBYTES}
        child = Child(self.network.command(host), "tests.chaos.reading", **fields, **common)
        stack.callback(child.close)
        child.receive()
        return child

    def read(self, reader: Child, times: int) -> list[float]:
        """Return the seconds of each read."""
        found = reader.ask("read", times=times)
        assert (found["missing"], found["wrong"]) == (0, 0), found
        seconds: list[float] = found["took_s"]
        return seconds

    def received(self) -> list[int]:
        return [self.network.received_nbytes("b", nic) for nic in ("nic0", "nic1")]

    def cut_one(self, times: int) -> list[float]:
        """Turn the second cable off during the second of some reads. Returns the seconds of each read."""
        took_s: list[float] = []
        before = self.received()[1]
        thread = threading.Thread(target=lambda: took_s.extend(self.read(self.both, times)))
        thread.start()
        while self.received()[1] < before + COUNT * NBYTES * 3 // 4:
            time.sleep(0.01)
        self.network.set_up("b", "nic1", up=False)
        thread.join()
        self.network.set_up("b", "nic1", up=True)
        return took_s


def measure(megabits: tuple[int, int], times: int) -> None:
    with ExitStack() as stack:
        hosts = Hosts(stack, megabits)
        for reader in (hosts.both, hosts.one):
            hosts.read(reader, 2)
        one, both, shares = [], [], [0, 0]
        for _ in range(times):
            one += hosts.read(hosts.one, 1)
            before = hosts.received()
            both += hosts.read(hosts.both, 1)
            shares = [share + now - was for share, was, now in zip(shares, before, hosts.received(), strict=True)]
        rates = [COUNT * NBYTES / statistics.median(each) / 1e6 for each in (one, both)]
        limits = [megabits[0] / 8, sum(megabits) / 8]
        text = " | ".join(f"{rate:.1f} ({rate / limit:.2f})" for rate, limit in zip(rates, limits, strict=True))
        print(f"| {megabits[0]} + {megabits[1]} | {text} | {rates[1] / rates[0]:.2f} | {shares[0] / shares[1]:.2f} |")
        cut = ", ".join(f"{each:.2f}" for each in hosts.cut_one(5))
        print(f"  the second cable goes down in the second of five reads: {cut} s", flush=True)


def main() -> None:
    """Print a table, with what a cable that goes down costs under each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reads", type=int, default=9, help="reads of each kind")
    options = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    print("| cables, Mbit/s | one, MB/s (of its limit) | both, MB/s (of their limit) | gain | bytes, first / second |")
    print("|---|---|---|---|---|")
    for megabits in CABLES:
        measure(megabits, options.reads)


if __name__ == "__main__":
    main()
