"""What put, get, match and a remote get cost beside the machine's own limits, in turn, round after round.

    python -m benchmarks.data_path [--rounds N] [--json FILE]

Limits: one thread copying the same objects (`memcpy`), a dict of arrays in this process (`dict`), and a bare pair of
TCP sockets that sends from one buffer and receives into another (`sockets`). A ratio is the limit's time over ours:
1.0 is as fast as the limit.
"""

import argparse
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import raykv

KIB, MIB = 1 << 10, 1 << 20
BATCH_NBYTES = 64 * MIB
NAMESPACE = raykv.Namespace(model="benchmark")


def seconds(task: Callable[[], object]) -> float:
    """Wall time of one call."""
    start_s = time.perf_counter()
    task()
    return time.perf_counter() - start_s


class Workload:
    """Objects of one size on two nodes, and every way to move them."""

    def __init__(self, cluster: raykv.EmbeddedCluster, nbytes: int) -> None:
        self.nbytes, self.count = nbytes, max(8, min(512, BATCH_NBYTES // nbytes))
        self.here, self.there = cluster.client(NAMESPACE, node=0), cluster.client(NAMESPACE, node=1)
        rng = np.random.default_rng(nbytes)
        self.values = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(self.count)]
        self.into = [np.zeros(nbytes, np.uint8) for _ in range(self.count)]
        self.keys = self.here.keys(f"{nbytes}-{number}" for number in range(self.count))
        self.here.put(self.keys, self.values, chained=False)
        self.copies = {place: value.copy() for place, value in enumerate(self.values)}
        cluster.settle()

    def memcpy(self) -> None:
        """Copy all objects."""
        for target, source in zip(self.into, self.values, strict=True):
            np.copyto(target, source)

    def dict_get(self) -> None:
        """A cache that is a dict in this process."""
        for place, target in enumerate(self.into):
            np.copyto(target, self.copies[place])

    def get(self) -> None:
        """One batch from this host's node."""
        assert self.here.get(self.keys, self.into).prefix == self.count

    def get_single(self) -> None:
        """One by one from this host's node."""
        for place, target in enumerate(self.into):
            assert self.here.get(self.keys[place : place + 1], [target]).hits[0]

    def put(self) -> None:
        """One batch to this host's node (deleted outside the clock)."""
        assert self.here.put(self.keys, self.values, chained=False).stored == self.count

    def remote(self) -> None:
        """One batch from the other node, over TCP."""
        assert self.there.get(self.keys, self.into).prefix == self.count

    def sockets(self) -> None:
        """The same bytes over a bare pair of sockets."""
        listener = socket.create_server(("127.0.0.1", 0))
        asking = socket.create_connection(listener.getsockname())
        answering, _ = listener.accept()

        def send() -> None:
            for value in self.values:
                answering.sendall(memoryview(value))

        sender = threading.Thread(target=send)
        sender.start()
        for target in self.into:
            view = memoryview(target)
            while len(view):
                view = view[asking.recv_into(view) :]
        sender.join()
        for each in (asking, answering, listener):
            each.close()


def measure(workload: Workload, rounds: int) -> dict[str, float]:
    """Median seconds of each way, measured in turn."""
    ways = ("memcpy", "get", "put", "dict_get", "get_single", "sockets", "remote")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            if way == "put":
                workload.here.delete(workload.keys)
            times[way].append(seconds(getattr(workload, way)))
    return {way: statistics.median(values) for way, values in times.items()}


def lookups(cluster: raykv.EmbeddedCluster, rounds: int) -> float:
    """Keys a second that `match` answers, in batches of 1 000 that are all here."""
    client = cluster.client(NAMESPACE, node=0)
    keys = client.keys(f"lookup-{number}" for number in range(1000))
    client.put(keys, [b"x"] * len(keys))
    assert client.match(keys).count == len(keys)
    return len(keys) / statistics.median(seconds(lambda: client.match(keys)) for _ in range(10 * rounds))


def main() -> int:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records = []
    titles = f"{'object':>9} {'memcpy GB/s':>12} {'get':>6} {'put':>6} {'single get':>11} {'remote':>7}"
    print(titles + "   (ratios to the limit)")
    with raykv.embedded(nodes=2, arena_nbytes="512 MiB") as cluster:
        for nbytes in (16 * KIB, 64 * KIB, MIB, 4 * MIB):
            workload = Workload(cluster, nbytes)
            times = measure(workload, arguments.rounds)
            total = workload.count * nbytes
            record = {
                "object_nbytes": nbytes,
                "objects": workload.count,
                "memcpy_gb_per_s": total / times["memcpy"] / 1e9,
                "get_to_memcpy": times["memcpy"] / times["get"],
                "put_to_memcpy": times["memcpy"] / times["put"],
                "single_get_to_dict": times["dict_get"] / times["get_single"],
                "remote_get_to_sockets": times["sockets"] / times["remote"],
                "single_get_us": times["get_single"] / workload.count * 1e6,
            }
            records.append(record)
            print(
                f"{nbytes // KIB:>5} KiB {record['memcpy_gb_per_s']:>12.2f} {record['get_to_memcpy']:>6.2f} "
                f"{record['put_to_memcpy']:>6.2f} {record['single_get_to_dict']:>11.2f} "
                f"{record['remote_get_to_sockets']:>7.2f}"
            )
            workload.here.delete(workload.keys)
        rate = lookups(cluster, arguments.rounds)
        print(f"match: {rate / 1e6:.2f} M keys/s in batches of 1 000")
    if arguments.json:
        arguments.json.write_text(json.dumps({"copies": records, "match_keys_per_s": rate}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
