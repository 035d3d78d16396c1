"""Compares the speed of an SSD tier with that of `fio` with O_DIRECT, at the same block size and queue depth.

Run by hand: `python -m benchmarks.tiers --directory /path/on/the/drive`

The tier writes chunks one after another, as in a demotion, and reads them back in batches, as in a promotion. The order
of the batches is random. Rounds of the tier and of `fio` alternate, because a drive's speed changes with time. Medians
and their ratio are printed.

`fio` writes a file of its own. For reads, `fio` uses the tier's segments, because other places of a virtual drive may
be slower or faster. It reads the segments once in order and once at random, and the better result counts.

The arena has huge pages, like the arena of a node. `fio` gets huge pages too if the host has free ones in its pool
(`sysctl vm.nr_hugepages=64`). Without them, `fio` may be much slower.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import xxhash

from raykv.config import GIB, MIB, SsdConfig
from raykv.memory.arena import SharedMemory
from raykv.tier.base import Chunk, Environment
from raykv.tier.ssd.tier import SsdTier

BATCH = 16
"""Number of chunks in one read call. A request for a prefix also reads many chunks at once."""
CALLS = 4
"""Number of calls that read at the same time."""


class OneName:
    """Implements `tier.base.GroupNames` for a single quota group."""

    def text(self, group: int) -> bytes:
        return b'{"model":"bench"}'

    def number(self, text: bytes) -> int | None:
        return 0


class Bench:
    """A tier, and an arena full of chunks that are written to the tier."""

    def __init__(self, directory: Path, *, chunk_nbytes: int, total_nbytes: int, depth: int, arena_nbytes: int) -> None:
        self.chunk_nbytes, self.count = chunk_nbytes, total_nbytes // chunk_nbytes
        self.memory = SharedMemory.create(None, arena_nbytes, huge_pages="try")
        self.memory.populate(0, arena_nbytes)
        self.arena = self.memory.view
        random = np.random.default_rng(1)
        for start in range(0, arena_nbytes, 16 * MIB):
            self.arena[start : start + 16 * MIB] = random.bytes(min(16 * MIB, arena_nbytes - start))
        slots = list(range(0, arena_nbytes - chunk_nbytes + 1, chunk_nbytes))
        self.slots, self.read_slots = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        self.checksums = [xxhash.xxh3_64_intdigest(self.arena[slot : slot + chunk_nbytes]) for slot in self.slots]
        config = SsdConfig(paths=(directory,), capacity_nbytes=total_nbytes + total_nbytes // 8 + GIB // 2, depth=depth)
        self.tier = SsdTier(config, Environment(self.arena, "bench", OneName()))
        while self.tier.stats()["state"] == "starting":
            time.sleep(0.01)
        self.round = 0
        self.keys = np.empty((0, 2), np.uint64)

    def write(self) -> float:
        """Write all chunks once, under new keys. Returns bytes per second."""
        self.round += 1
        keys = np.random.default_rng(self.round).integers(0, 1 << 63, (self.count, 2), np.uint64)
        chunks = [
            Chunk(
                keys[number].tobytes(),
                self.slots[number % len(self.slots)],
                self.chunk_nbytes,
                self.checksums[number % len(self.slots)],
                0,
            )
            for number in range(self.count)
        ]
        left, ended = [self.count], threading.Event()
        lock = threading.Lock()

        def done(_: Sequence[Chunk], good: Sequence[bool]) -> None:
            assert all(good)
            with lock:
                left[0] -= len(good)
                if not left[0]:
                    ended.set()

        began_s, taken = time.perf_counter(), 0
        while taken < len(chunks):
            some = self.tier.write(chunks[taken : taken + 64], done)
            taken += some
            if not some:
                time.sleep(0.001)
        ended.wait()
        took_s = time.perf_counter() - began_s
        self.keys = keys
        return self.count * self.chunk_nbytes / took_s

    def read(self) -> float:
        """Read the chunks of the last `write` once, in batches. Returns bytes per second."""
        order = np.random.default_rng(self.round).permutation(self.count // BATCH)
        places: SimpleQueue[list[int]] = SimpleQueue()  # free groups of slots: each call reads into one
        for call in range(CALLS):
            places.put(self.read_slots[call * BATCH : (call + 1) * BATCH])
        arrived: list[int] = []
        began_s = time.perf_counter()
        for batch in order.tolist():
            offsets = places.get()

            def done(good: Sequence[bool], offsets: list[int] = offsets) -> None:
                arrived.append(sum(good))
                places.put(offsets)

            keys = self.keys[batch * BATCH : (batch + 1) * BATCH]
            while not self.tier.read(keys, self.tier.find(keys), offsets, done):
                time.sleep(0.001)
        for _ in range(CALLS):
            places.get()
        took_s = time.perf_counter() - began_s
        assert sum(arrived) == len(order) * BATCH, self.tier.stats()
        return len(order) * BATCH * self.chunk_nbytes / took_s

    def clear(self) -> None:
        """Delete all chunks, to make space for the next round."""
        self.tier.drop(0)

    def close(self) -> None:
        self.tier.close()


def fio(files: Sequence[Path], mode: str, *, chunk_nbytes: int, total_nbytes: int, depth: int, engine: str) -> float:
    """Run fio. Returns bytes per second."""
    words = [
        "fio", "--name=peer", f"--filename={':'.join(map(str, files))}", f"--size={total_nbytes}", f"--rw={mode}",
        f"--bs={chunk_nbytes}", "--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", "--output-format=json",
        "--fallocate=posix", "--file_service_type=sequential",
    ]  # fmt: skip
    if "read" in mode:
        words.append("--readonly")
    if "HugePages_Free:        0" not in Path("/proc/meminfo").read_text():
        words.append("--iomem=shmhuge")  # huge pages, like the arena
    found = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    return float(found["jobs"][0]["read" if "read" in mode else "write"]["bw_bytes"])


def compare(directory: Path, *, chunk_nbytes: int, total_nbytes: int, depth: int, rounds: int, engine: str) -> None:
    """Measure the tier and fio with one chunk size, and print medians and their ratio."""
    mine = Bench(directory, chunk_nbytes=chunk_nbytes, total_nbytes=total_nbytes, depth=depth, arena_nbytes=GIB)
    speeds: dict[str, list[float]] = {name: [] for name in ("write", "fio write", "read", "fio read")}
    given = {"chunk_nbytes": chunk_nbytes, "total_nbytes": total_nbytes, "depth": depth, "engine": engine}
    for _ in range(2):  # fills all segments, because a file system takes longer for the first write of a block
        mine.write()
        mine.clear()
    files = [directory / "fio"]
    fio(files, "write", **given)
    for number in range(rounds):
        turns: dict[str, Callable[[], float]] = {
            "write": mine.write,
            "fio write": lambda: fio(files, "write", **given),
        }
        for name in sorted(turns, reverse=bool(number % 2)):  # the first write after reads is slower
            speeds[name].append(turns[name]())
        segments = sorted(directory.glob("bench/*.segment"))[: total_nbytes // (64 * MIB)]
        speeds["read"].append(mine.read())
        speeds["fio read"].append(max(fio(segments, mode, **given) for mode in ("read", "randread")))
        mine.clear()
    huge = mine.memory.huge_nbytes / mine.memory.nbytes
    mine.close()
    (directory / "fio").unlink()
    for name in ("write", "read"):
        ours, theirs = statistics.median(speeds[name]), statistics.median(speeds[f"fio {name}"])
        shown = " ".join(
            f"{value / MIB:.0f}/{peer / MIB:.0f}"
            for value, peer in zip(speeds[name], speeds[f"fio {name}"], strict=True)
        )
        print(
            f"{name:5} {chunk_nbytes // MIB} MiB, depth {depth}: {ours / MIB:6.0f} MiB/s, fio ({engine}) "
            f"{theirs / MIB:6.0f} MiB/s, ratio {ours / theirs:.2f}, {huge:.0%} huge pages   rounds: {shown}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the drive to be measured")
    parser.add_argument("--gib", type=float, default=2.0, help="working set")
    parser.add_argument("--depth", type=int, nargs="+", default=[4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4], help="chunk sizes")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--engine", default="libaio", help="fio's: libaio or io_uring")
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="raykv-tiers-", dir=asked.directory))
    try:
        for depth in asked.depth:
            for mib in asked.mib:
                compare(
                    directory,
                    chunk_nbytes=mib * MIB,
                    total_nbytes=int(asked.gib * GIB),
                    depth=depth,
                    rounds=asked.rounds,
                    engine=asked.engine,
                )
                shutil.rmtree(directory / "bench")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
