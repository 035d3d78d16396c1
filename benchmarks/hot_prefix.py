"""Measures the throughput of reads of one hot prefix, by its number of copies.

Run by hand, as root: `python -m benchmarks.hot_prefix`

Four nodes run in network namespaces of their own. Traffic control limits what each node sends to the same rate.
Readers on a fifth host, which has no node, read the same prefix again and again, and check its bytes. The directory
lets the prefix have one copy, then two, three and four. The nodes make the copies by themselves.
"""

import argparse
import hashlib
import json
import math
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import raykv
from benchmarks.system import die_with_parent
from raykv.config import MIB
from raykv.embedded import InProcessMembership
from raykv.membership import heat_map
from raykv.membership.proxy import MembershipProxyServer
from raykv.transport.server import SocketServer

NODE: Final = Path(__file__).parent / "systems" / "raykv_node.py"
SPACE: Final = raykv.Namespace(model="hot")
NODES, READERS = 4, 6
CHUNKS, NBYTES = 8, 256 << 10
READY_S: Final = 60.0


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def hosts(mbit_per_s: int) -> Iterator[tuple[str, list[str]]]:
    """Make a namespace with a bridge for this process, and one for each node. Yields their names."""
    mark = f"rkh{os.getpid() % 10_000}"
    hub, spaces = f"{mark}h", [f"{mark}n{number}" for number in range(NODES)]
    try:
        for space in (hub, *spaces):
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "addr", "add", f"{address_of(-1)}/24", "dev", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for number, space in enumerate(spaces):
            port = f"port{number}"
            run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "wire", "netns", space)
            run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", space, "addr", "add", f"{address_of(number)}/24", "dev", "wire")
            run("ip", "-n", space, "link", "set", "wire", "up")
            shape = ["rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "50ms"]
            run("tc", "-n", space, "qdisc", "add", "dev", "wire", "root", "tbf", *shape)
        yield hub, spaces
    finally:
        for space in (hub, *spaces):
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def address_of(number: int) -> str:
    return f"10.231.0.{number + 10}"


@contextmanager
def node(number: int, space: str, home: Path, secret: str, membership: InProcessMembership) -> Iterator[str]:
    """Run a node in its namespace. Yields the node's address."""
    server = SocketServer(
        MembershipProxyServer(membership, f"n{number}"),
        f"{address_of(-1)}:0",
        bytes.fromhex(secret),
        io_timeout_s=10.0,
        max_connections=64,
    )
    server.serve()
    storage = {"arena_nbytes": 64 * MIB, "shm_dir": str(home)}
    fields = {"node_id": f"n{number}", "cluster": "hot", "bind": f"{address_of(number)}:0", "host": space}
    text = json.dumps({**fields, "storage": storage, "heartbeat_s": 0.5})
    command = ["ip", "netns", "exec", space, sys.executable, "-P", str(NODE), text, secret, server.address]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, preexec_fn=die_with_parent)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
        process.stdin.close()
        process.wait(20.0)
    finally:
        process.kill()
        process.wait()
        server.close()


class Load:
    """Threads that read the prefix. `nbytes` counts what arrived; wrong bytes end the program."""

    def __init__(self, address: str, secret: str, contents: list[bytes]) -> None:
        self.nbytes, self._contents = 0, contents
        self._stopping = threading.Event()
        self._clients = [raykv.connect(SPACE, address=address, secret=secret) for _ in range(READERS)]
        self._threads = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in self._clients]
        for thread in self._threads:
            thread.start()

    def _read(self, client: raykv.Client) -> None:
        keys = client.chain(list(range(CHUNKS)))
        into = [bytearray(NBYTES) for _ in range(CHUNKS)]
        while not self._stopping.is_set():
            match = client.match(keys)
            hits = client.get(keys[: match.count], into[: match.count], match=match).hits
            for place, hit in enumerate(hits):
                if hit and into[place] != self._contents[place]:
                    print("wrong bytes")
                    os._exit(1)
            self.nbytes += NBYTES * sum(hits)

    def rate(self, seconds: float) -> float:
        """Return the bytes a second that arrive in the next seconds."""
        before, began_s = self.nbytes, time.monotonic()
        time.sleep(seconds)
        return (self.nbytes - before) / (time.monotonic() - began_s)

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()


def measure(spaces: list[str], home: Path, seconds: float) -> list[float]:
    """Return the throughput with 1, 2, ... copies of the prefix."""
    secret, membership = secrets.token_hex(32), InProcessMembership(member_timeout_s=30.0, hot_nbytes_per_s=1e5)
    with ExitStack() as stack:
        addresses = [stack.enter_context(node(n, space, home, secret, membership)) for n, space in enumerate(spaces)]
        writer = stack.enter_context(raykv.connect(SPACE, address=addresses[0], secret=secret))
        contents = [hashlib.shake_128(bytes([place])).digest(NBYTES) for place in range(CHUNKS)]
        keys = writer.chain(list(range(CHUNKS)))
        wait_for(lambda: len(membership.logic.view.members) == NODES)
        assert writer.put(keys, contents).stored == CHUNKS
        wait_for(lambda: writer.match(keys).count == CHUNKS)
        heat_map.EPSILON = NODES  # type: ignore[misc]
        heat_map.SLACK = math.inf  # type: ignore[misc]  # no further copy to relieve a node
        load = Load(addresses[0], secret, contents)
        stack.callback(load.close)
        rates = []
        for copies in range(1, NODES + 1):
            heat_map.EPSILON = NODES / (copies - 0.3)  # type: ignore[misc]  # one prefix has the whole load
            wait_for(lambda: copies_of(writer, keys) == copies)  # noqa: B023 - used at once
            load.rate(1.0)
            rates.append(load.rate(seconds))
        return rates


def copies_of(client: raykv.Client, keys: object) -> int:
    """Return how many nodes have at least one chunk of the prefix."""
    return sum(node["chunks"] > 0 for node in client.stats()["nodes"].values())


def wait_for(condition: object) -> None:
    until_s = time.monotonic() + READY_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until_s:
            raise TimeoutError("the cluster does not get ready")
        time.sleep(0.1)


def main() -> None:
    """Run the rounds inside the hub's namespace, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=int, default=200, help="rate of each node in Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement")
    parser.add_argument("--spaces", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.spaces is None:
        with hosts(options.mbit) as (hub, spaces):
            run("ip", "netns", "exec", hub, sys.executable, "-m", "benchmarks.hot_prefix", *sys.argv[1:],
                "--spaces", ",".join(spaces))  # fmt: skip
        return
    rounds = []
    for number in range(options.rounds):
        home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
        try:
            rounds.append(measure(options.spaces.split(","), home, options.seconds))
        finally:
            shutil.rmtree(home, ignore_errors=True)
        print(f"round {number + 1}: " + ", ".join(f"{rate / 1e6:.1f}" for rate in rounds[-1]) + " MB/s", flush=True)
    limit = options.mbit * 1e6 / 8
    print(f"\nmedians of {options.rounds} rounds; each node sends at most {limit / 1e6:.1f} MB/s\n")
    print("| copies | MB/s | times one copy | share of the links |\n|---|---|---|---|")
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    for copies, rate in enumerate(medians, 1):
        print(f"| {copies} | {rate / 1e6:.1f} | {rate / medians[0]:.2f} | {rate / (copies * limit):.2f} |")


if __name__ == "__main__":
    main()
