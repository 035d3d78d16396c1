"""Measures how much a saturated SSD slows down a node's reads from memory.

Run by hand: `python -m benchmarks.hot --directory /path/on/the/drive`

The node runs in its own process. This process reads single chunks that stay in memory, alternately with and without
load. The load comes from a second process, which makes the node promote chunks from the SSD without a pause. The second
process copies none of the promoted chunks, so that the drive is busy and not the CPU. With `--writes`, the second
process also puts and reads chunks.
"""

import argparse
import json
import multiprocessing
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import raykv
from raykv.config import GIB, MIB

NODE = Path(__file__).parent / "systems" / "raykv_node.py"
SPACE = raykv.Namespace(model="hot")
HOT, HOT_NBYTES = 1024, 64 << 10
COLD_NBYTES = MIB
BATCH = 16
STORED_NBYTES = 3 * GIB


def saturate(address: str, go: Any, stop: Any, ready: Any, writes: bool) -> None:
    """Store more chunks than memory holds. Read each once, so that the SSD tier admits it. Then promote random ones."""
    client = raykv.connect(SPACE, address=address, copy_threads=1)
    values = [np.frombuffer(np.random.default_rng(number).bytes(COLD_NBYTES), np.uint8) for number in range(BATCH)]
    into = [np.zeros(COLD_NBYTES, np.uint8) for _ in range(BATCH)]
    number, random = 0, np.random.default_rng(0)

    def store() -> None:
        names = [f"cold-{number + place}" for place in range(BATCH)]
        client.put(names, values, chained=False)
        client.get(names, into)

    while number * COLD_NBYTES < STORED_NBYTES:
        store()
        number += BATCH
        time.sleep(0.01)  # gives the node time to demote most chunks
    ready.set()
    while not stop.is_set():
        if not go.wait(0.05):
            continue
        if writes:
            store()
            number += BATCH
        old = int(random.integers(0, number // BATCH)) * BATCH
        client.match([f"cold-{old + place}" for place in range(BATCH)], promote=True)
    client.close()


def measure(client: raykv.Client, keys: list[bytes], into: memoryview, seconds: float) -> list[float]:
    """Read random chunks one by one for `seconds`. Returns the seconds of each read."""
    times, until_s, clock = [], time.perf_counter() + seconds, time.perf_counter
    random = np.random.default_rng(7)
    while clock() < until_s:
        for place in random.integers(0, len(keys), 256).tolist():
            began_s = clock()
            hit = client.get_one(keys[place], into)
            times.append(clock() - began_s)
            assert hit
    return times


def main() -> None:
    """Measure, and print one line per round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the drive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--writes", action="store_true", help="the second process also puts and reads")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as drive,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        ssd = {"paths": [drive], "capacity_nbytes": 8 * GIB}
        storage = {"arena_nbytes": GIB, "shm_dir": shm, "ssd": ssd}
        fields = {"node_id": "hot", "cluster": "bench", "storage": storage}
        command = [sys.executable, "-P", str(NODE), json.dumps(fields), secrets.token_hex(32)]
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert node.stdout is not None
        node.stdout.readline()
        address = f"unix:{shm}/raykv-bench-hot.sock"
        go, stop, ready = (multiprocessing.Event() for _ in range(3))
        load = multiprocessing.Process(target=saturate, args=(address, go, stop, ready, options.writes))
        load.start()
        ready.wait()
        client = raykv.connect(SPACE, address=address)
        names = [f"hot-{number}" for number in range(HOT)]
        value = np.zeros(HOT_NBYTES, np.uint8)
        for start in range(0, HOT, 64):
            client.put(names[start : start + 64], [value] * 64, chained=False)
        client.flush()
        keys = [client.key(name) for name in names]
        into = memoryview(bytearray(HOT_NBYTES))
        measure(client, keys, into, 1.0)
        ratios = []
        for number in range(options.rounds):
            alone = np.percentile(measure(client, keys, into, options.seconds), [50, 99, 99.9]) * 1e6
            before = client.stats()["nodes"]["hot"]["tiers"]["ssd"]
            go.set()
            began_s = time.monotonic()
            busy = np.percentile(measure(client, keys, into, options.seconds), [50, 99, 99.9]) * 1e6
            took_s = time.monotonic() - began_s
            go.clear()
            after = client.stats()["nodes"]["hot"]["tiers"]["ssd"]
            moved = [(after[name] - before[name]) / took_s / 1e6 for name in ("disk_nbytes", "read_nbytes")]
            ratios.append(busy[1] / alone[1])
            print(
                f"round {number + 1}: p50/p99/p99.9 alone {alone.round(1)} us, busy {busy.round(1)} us "
                f"({moved[0]:.0f} MB/s written, {moved[1]:.0f} MB/s read): p99 {ratios[-1]:.2f}x",
                flush=True,
            )
            time.sleep(1.0)
        print(f"p99 of reads of memory while the SSD is busy: {statistics.median(ratios):.2f}x (bar 2x)")
        stop.set()
        load.join()
        client.close()
        assert node.stdin is not None
        node.stdin.close()
        node.wait(20.0)


if __name__ == "__main__":
    main()
