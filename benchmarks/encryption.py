"""Measures what protection of chunk bytes on their way costs: remote reads with and without TLS, and keyed hashes.

Run by hand: `python -m benchmarks.encryption`

Two node processes hold the same chunks, one of them with TLS. A client that does not map their memory reads a batch
from one and from the other, in turn. One thread computes the keyed hashes and the checksum of raykv over these bytes.
"""

import argparse
import hmac
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import xxhash

import raykv
from raykv.client.router import Router
from raykv.config import ClientConfig, NodeConfig, TlsConfig
from raykv.embedded import InProcessMembership
from raykv.supervisor.handle import NodeHandle
from tests.support.certificates import Authority

NBYTES = 4 << 20
CHUNKS = 32
SECRET = bytes(32)
GB = CHUNKS * NBYTES / 1e9
KEYS = [f"chunk-{number}" for number in range(CHUNKS)]
VALUES = [os.urandom(NBYTES) for _ in KEYS]

Work: TypeAlias = tuple[Callable[[], object], Sequence[int]]
"""What is measured, and other processes that take part."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    home = Path(tempfile.mkdtemp(prefix="rkb-", dir="/dev/shm"))
    try:
        with ExitStack() as stack:
            reads = {
                "plain": _reader(stack, home, "plain", None),
                "TLS 1.3": _reader(stack, home, "tls", Authority(home / "ca").issue("node")),
            }
            _measure("remote get of 4 MiB chunks", reads, rounds)
        hashes: dict[str, Work] = {
            "xxh3-64": (lambda: [xxhash.xxh3_64_intdigest(value) for value in VALUES], ()),
            "keyed BLAKE2b": (lambda: [blake2b(value, key=SECRET, digest_size=16).digest() for value in VALUES], ()),
            "HMAC-SHA256": (lambda: [hmac.digest(SECRET, value, "sha256") for value in VALUES], ()),
        }
        _measure("hash, one thread", hashes, rounds)
    finally:
        shutil.rmtree(home)


def _reader(stack: ExitStack, home: Path, name: str, tls: TlsConfig | None) -> Work:
    """Start a node that holds the chunks. Returns the work of reading them over TCP."""
    storage = {"arena_nbytes": "192 MiB", "shm_dir": str(home)}
    config = NodeConfig.load({"cluster": name, "node_id": "n", "host": "elsewhere", "storage": storage, "tls": tls})
    node = NodeHandle(config, secret=SECRET, membership=InProcessMembership(member_timeout_s=60.0))
    stack.callback(node.stop, unlink=True)
    fields = {"address": node.stats()["address"], "secret": SECRET.hex(), "tls": tls, "timeout_s": 60.0}
    client = stack.enter_context(raykv.Client(raykv.Namespace(model="m"), Router(ClientConfig.load(fields))))
    for key, value in zip(KEYS, VALUES, strict=True):  # one by one, because a connection gets at most half of the arena
        assert client.put([key], [value]).stored == 1
    into = [bytearray(NBYTES) for _ in KEYS]

    def read() -> None:
        result = client.get(KEYS, into)
        assert (all(result.hits), set(result.nbytes_by_path)) == (True, {"tcp"})

    read()
    assert into == VALUES
    return read, (node.pid,)


def _measure(title: str, works: dict[str, Work], rounds: int) -> None:
    """Do each work in each round. Print its speed, that of the first as a ratio, and the processor time of all ends."""
    speeds: dict[str, list[float]] = {name: [] for name in works}
    costs: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, (work, others) in works.items():
            began_s, before_s = time.perf_counter(), _cpu_s(*others)
            work()
            if number:  # the first round warms up
                speeds[name].append(GB / (time.perf_counter() - began_s))
                costs[name].append((_cpu_s(*others) - before_s) / GB)
    base = next(iter(speeds.values()))
    print(title)
    for name, figures in speeds.items():
        ratio = statistics.median(one / other for one, other in zip(figures, base, strict=True))
        cost_s = statistics.mean(costs[name])
        print(f"  {name:<14} {statistics.median(figures):6.2f} GB/s   x {ratio:.2f}   {cost_s:.2f} CPU seconds a GB")


def _cpu_s(*others: int) -> float:
    """Return the processor time of this process and of others."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in others]
    return time.process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
