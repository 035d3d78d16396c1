"""Copies between GPU and arena, as shares of the link's rate, and what they cost an engine that computes meanwhile.

Run by hand on a host with a GPU: `python -m benchmarks.gpu [--shape 70b] [--out gpu.json]`. Takes four minutes.

It needs cupy and torch, and raykv's own four dependencies; it says what is missing. The limit is a plain copy of the
same bytes between pinned memory and the GPU, one call for each chunk, in the same run. The ways take turns; each figure
is the median of three rounds. Every way is compared with NumPy, byte by byte, on random pages and slots.
"""

import argparse
import json
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

try:
    from raykv.gpu.copies import WAYS, PageCopies, Way
    from raykv.gpu.device import CudaDevice, Device, missing
    from raykv.gpu.pinning import Pinning
    from raykv.gpu.tiles import Run, Tiles
    from raykv.memory.arena import SharedMemory
    from raykv.memory.copying import checksum_of
except ModuleNotFoundError as error:
    sys.exit(f"raykv cannot be imported: {error}. Its dependencies are msgspec, numpy, pydantic and xxhash.")

ROUNDS: Final = 3
OVERLAP_ROUNDS: Final = 5
STREAM_STEPS: Final = 5
"""Steps of a stream of matrix products: two seconds on an H200."""
CALL_CHUNKS: Final = 32
"""Chunks of one call, as in `raykv.integrations.kv_layout`."""
EXTENT_NBYTES: Final = 64 << 20
PIN_S: Final = 300.0


class Shape(NamedTuple):
    """A paged KV cache.

    Attributes:
        runs: Number of runs of a page, in all layers.
        run_nbytes: Length of a run.
        layer_runs: Runs of a layer.
        layer_flops: Floating-point operations of one layer for one token.
        page_tokens: Tokens of a page.
    """

    runs: int
    run_nbytes: int
    layer_runs: int
    layer_flops: float
    page_tokens: int

    @property
    def block_nbytes(self) -> int:
        return self.runs * self.run_nbytes


SHAPES: Final = {
    # 80 layers, keys and values of 8 heads of 128, bf16, pages of 16 tokens: runs of 32 KiB, blocks of 5 MiB.
    "70b": Shape(160, 16 * 8 * 128 * 2, 2, 2 * 70e9 / 80, 16),
    # One of 8 tensor ranks of it.
    "70b-tp8": Shape(160, 16 * 1 * 128 * 2, 2, 2 * 70e9 / 80 / 8, 16),
    # 61 layers of latents of 576, bf16, pages of 64 tokens.
    "mla": Shape(61, 64 * 576 * 2, 1, 2 * 37e9 / 61, 64),
}


def slots_of(arena_nbytes: int, slot_nbytes: int) -> list[int]:
    """Return where the slots of an arena begin.

    As in a node, no slot crosses the end of an extent: CUDA refuses a copy that touches two registrations.
    """
    extents, each = range(0, arena_nbytes, EXTENT_NBYTES), EXTENT_NBYTES // slot_nbytes
    return [extent + number * slot_nbytes for extent in extents for number in range(each)]


class Rig:
    """A KV cache on a device, a pinned arena, and chunks at random pages and slots."""

    def __init__(self, device: Device, shape: Shape, arena: SharedMemory, pages: int, rng: random.Random) -> None:
        self.device, self.shape, self.arena = device, shape, arena
        device.use()
        self.stream = device.stream()
        self.count = min(pages, len(slots_of(arena.nbytes, shape.block_nbytes)))
        self.cache = device.allocate(pages * shape.block_nbytes)
        content = np.random.default_rng(rng.randrange(1 << 30)).bytes(self.cache.nbytes)
        self.content = np.frombuffer(content, np.uint8).reshape(shape.runs, pages, shape.run_nbytes)
        self._copy_whole(self.cache.address, self.content.ctypes.data)
        starts = range(0, self.cache.nbytes, pages * shape.run_nbytes)
        runs = [Run(self.cache.address + start, shape.run_nbytes, shape.run_nbytes) for start in starts]
        self.copies = PageCopies(device, Tiles(runs), 1)
        self.chunks = [[page] for page in rng.sample(range(pages), self.count)]
        slots = rng.sample(slots_of(arena.nbytes, shape.block_nbytes), self.count)
        self.addresses = [arena.address + slot for slot in slots]
        self.nbytes = self.count * shape.block_nbytes

    def _copy_whole(self, target: int, source: int) -> None:
        self.device.copy(target, source, self.cache.nbytes, self.stream)
        self.device.synchronize(self.device.record(self.stream))

    def calls(self) -> Iterator[slice]:
        return (slice(first, first + CALL_CHUNKS) for first in range(0, self.count, CALL_CHUNKS))

    def store(self, way: Way) -> None:
        for call in self.calls():
            for _ in self.copies.store(self.chunks[call], self.addresses[call], way=way):
                pass

    def load(self, way: Way) -> None:
        for call in self.calls():
            self.copies.load(self.chunks[call], self.addresses[call], way=way)

    def plain(self, *, to_host: bool) -> None:
        """Copy as many bytes without pages: one call for each chunk, from the beginning of the cache."""
        nbytes = self.shape.block_nbytes
        for number, slot in enumerate(self.addresses):
            place = self.cache.address + number * nbytes
            self.device.copy(*((slot, place) if to_host else (place, slot)), nbytes, self.stream)
        self.device.synchronize(self.device.record(self.stream))

    def per_run(self, *, to_host: bool) -> None:
        """Copy with one call of cudaMemcpyAsync for each run of each page."""
        runs = self.copies.tiles.table
        starts = self.cache.address + np.arange(self.shape.runs) * (len(self.content[0]) * self.shape.run_nbytes)
        assert len(runs) >= len(starts)
        for (page,), slot in zip(self.chunks, self.addresses, strict=True):
            for number, start in enumerate(starts.tolist()):
                place, at = start + page * self.shape.run_nbytes, slot + number * self.shape.run_nbytes
                ends = (at, place) if to_host else (place, at)
                self.device.copy(*ends, self.shape.run_nbytes, self.stream)
        self.device.synchronize(self.device.record(self.stream))

    def check(self, way: Way) -> None:
        """Store and load with one way. Raises AssertionError at the first wrong byte."""
        self._copy_whole(self.cache.address, self.content.ctypes.data)
        memory = np.frombuffer(self.arena.view, np.uint8)
        memory[:] = 0xA5
        self.store(way)
        nbytes = self.shape.block_nbytes
        for (page,), address in zip(self.chunks, self.addresses, strict=True):
            chunk = memory[address - self.arena.address :][:nbytes]
            assert np.array_equal(chunk, self.content[:, page].ravel()), f"{way}: a stored chunk differs"
        back = self.device.host_memory(self.cache.nbytes)
        back[:] = 0x5A
        self._copy_whole(self.cache.address, back.ctypes.data)
        self.load(way)
        self._copy_whole(back.ctypes.data, self.cache.address)
        loaded, used = back.reshape(self.content.shape), {page for (page,) in self.chunks}
        for page in range(len(self.content[0])):
            expected = self.content[:, page] if page in used else 0x5A
            assert np.array_equal(loaded[:, page], np.broadcast_to(expected, loaded[:, page].shape)), f"{way}: {page}"


@contextmanager
def pinned_arena(device: Device, nbytes: int) -> Iterator[tuple[SharedMemory, float]]:
    """Yield an arena in shared memory that is populated and pinned, and how fast it was pinned, in bytes a second."""
    with tempfile.TemporaryDirectory(prefix="raykv-gpu-", dir="/dev/shm") as folder:
        nbytes = -(-nbytes // EXTENT_NBYTES) * EXTENT_NBYTES
        arena = SharedMemory.create(Path(folder) / "arena", nbytes)
        assert arena.populate(0, nbytes), "no room in /dev/shm"
        pinning, began_s = Pinning(device, arena, EXTENT_NBYTES), time.perf_counter()
        pinning.covers(arena.address, nbytes)
        assert pinning.wait(PIN_S)
        rate = nbytes / (time.perf_counter() - began_s)
        if pinning.refused:
            sys.exit(f"CUDA does not pin the arena: {pinning.refused}")
        try:
            yield arena, rate
        finally:
            pinning.close()
            arena.close()


def measure(rig: Rig) -> dict[str, dict[str, float]]:
    """Return the rate of each way in each direction, in bytes a second. The first round only warms up."""
    ways = [way for way in WAYS if way != "batched" or rig.device.has_batched_copies]
    lines: dict[str, dict[str, Callable[[], None]]] = {
        "plain copy": {"store": lambda: rig.plain(to_host=True), "load": lambda: rig.plain(to_host=False)}
    }
    for way in ways:
        lines[way] = {"store": lambda way=way: rig.store(way), "load": lambda way=way: rig.load(way)}  # type: ignore[misc]
    lines["a copy a run"] = {"store": lambda: rig.per_run(to_host=True), "load": lambda: rig.per_run(to_host=False)}
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(1 + ROUNDS):
        for line, calls in lines.items():
            for direction, call in calls.items():
                began_s = time.perf_counter()
                call()
                taken.setdefault((line, direction), []).append(time.perf_counter() - began_s)
    return {
        line: {direction: rig.nbytes / statistics.median(taken[line, direction][1:]) for direction in calls}
        for line, calls in lines.items()
    }


def checksum_rate(rig: Rig) -> float:
    """Return how fast one thread hashes chunks in the arena, in bytes a second. A save hashes what it has stored."""
    nbytes, taken = rig.shape.block_nbytes, []
    views = [rig.arena.view[start : start + nbytes] for start in (each - rig.arena.address for each in rig.addresses)]
    for _ in range(1 + ROUNDS):
        began_s = time.perf_counter()
        for view in views:
            checksum_of([view])
        taken.append(time.perf_counter() - began_s)
    for view in views:
        view.release()
    return rig.nbytes / statistics.median(taken[1:])


def table(rates: dict[str, dict[str, float]]) -> str:
    """Format rates for people, as shares of those of the plain copy."""
    lines = [f"{'':<14} {'GPU -> arena':>22} {'arena -> GPU':>22}"]
    for name, each in rates.items():
        cells = [f"{rate / 1e9:8.2f} GB/s {rate / rates['plain copy'][way]:7.1%}" for way, rate in each.items()]
        lines.append(f"{name:<14} {cells[0]:>22} {cells[1]:>22}")
    return "\n".join(lines)


class Overlap:
    """A stream of matrix products as large as the layers of a model's prefill, and stores on another thread."""

    WIDTH: Final = 8192

    def __init__(self, rig: Rig, tokens: int) -> None:
        import torch

        self._torch, self._rig, shape = torch, rig, rig.shape
        self._layers = shape.runs // shape.layer_runs
        self._chunks = min(rig.count, tokens // shape.page_tokens)
        columns = max(256, round(shape.layer_flops / 2 / self.WIDTH / 256) * 256)
        self._input = torch.randn(tokens, self.WIDTH, device="cuda", dtype=torch.bfloat16)
        self._weights = torch.randn(self.WIDTH, columns, device="cuda", dtype=torch.bfloat16)
        self._output = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)

    def stream(self, after_layer: Callable[[int], None]) -> float:
        """Run all layers `STREAM_STEPS` times without a gap. Returns the seconds on the GPU."""
        began, ended = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for layer in [*range(self._layers)] * STREAM_STEPS:
            self._torch.matmul(self._input, self._weights, out=self._output)
            after_layer(layer)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def alone(self) -> float:
        return self.stream(lambda _: None)

    def by_layers(self, way: Way) -> float:
        """Store the KV of every step, each layer after its matrix product."""
        rig, ready = self._rig, queue.SimpleQueue[Any]()

        def store() -> None:
            chosen = rig.chunks[: self._chunks], rig.addresses[: self._chunks]
            for _ in range(STREAM_STEPS):
                for _ in rig.copies.store(*chosen, layers=(ready.get() for _ in range(self._layers)), way=way):
                    pass

        def after_layer(layer: int) -> None:
            event = self._torch.cuda.Event(blocking=True)
            event.record()
            size = rig.shape.layer_runs
            ready.put((range(layer * size, (layer + 1) * size), event))

        return self._beside(store, after_layer)

    def saturated(self, way: Way) -> float:
        """Store without a pause as long as the stream runs."""
        done = threading.Event()

        def store() -> None:
            while not done.is_set():
                for call in self._rig.calls():
                    for _ in self._rig.copies.store(self._rig.chunks[call], self._rig.addresses[call], way=way):
                        pass
                    if done.is_set():
                        break

        return self._beside(store, lambda _: None, done)

    def _beside(
        self, store: Callable[[], None], after_layer: Callable[[int], None], done: threading.Event | None = None
    ) -> float:
        thread = threading.Thread(target=store)
        thread.start()
        seconds = self.stream(after_layer)
        if done is not None:
            done.set()
        thread.join()
        return seconds

    def measure(self) -> dict[str, dict[str, float]]:
        """Return by how much each way slows the stream down, as a share. Streams with and without stores take turns.

        A stream lasts seconds, because a GPU at its power limit gives away after a gap what it takes back later:
        single steps of 0.4 s differed by 7 % on an H200, according to where in the round the gap was.
        """
        ways = [way for way in WAYS if way != "batched" or self._rig.device.has_batched_copies]
        slower: dict[str, dict[str, float]] = {"by layers": {}, "without a pause": {}}
        for way in ways:
            for name, stream in (("by layers", self.by_layers), ("without a pause", self.saturated)):
                stream(way)
                ratios, before = [], self.alone()
                for _ in range(OVERLAP_ROUNDS):
                    during, after = stream(way), self.alone()
                    ratios.append(during / ((before + after) / 2) - 1)
                    before = after
                slower[name][way] = statistics.median(ratios)
        return slower


def engine_path(shape: Shape, pages: int) -> float:
    """Return the rate of `DeviceLayout.read`, which copies without raykv's kernels, in bytes a second."""
    import torch

    from raykv.integrations.kv_layout import DeviceLayout

    layers = shape.runs // shape.layer_runs
    size = shape.layer_runs, pages, shape.run_nbytes
    caches = {f"{n}": torch.zeros(size, dtype=torch.uint8, device="cuda").transpose(0, 1) for n in range(layers)}
    layout, taken = DeviceLayout(caches, pages, 1), []
    for _ in range(1 + ROUNDS):
        began_s = time.perf_counter()
        layout.read([[page] for page in range(min(pages, CALL_CHUNKS))], layout.fence())
        taken.append(time.perf_counter() - began_s)
    return min(pages, CALL_CHUNKS) * shape.block_nbytes / statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="70b")
    parser.add_argument("--gib", type=float, default=1.25, help="bytes of a round, and of the arena (default: 1.25)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prefill step (default: 2048)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"no copies to measure: {reason}")
    device, shape = CudaDevice(), SHAPES[options.shape]
    pages = max(1, int(options.gib * (1 << 30)) // shape.block_nbytes)
    extents = -(-pages // (EXTENT_NBYTES // shape.block_nbytes))
    with pinned_arena(device, extents * EXTENT_NBYTES) as (arena, pin_rate):
        rig = Rig(device, shape, arena, 2 * pages, random.Random(options.seed))
        found: dict[str, Any] = {"shape": options.shape, "chunks": rig.count, "chunk_nbytes": shape.block_nbytes}
        found |= {"seed": options.seed, "pin_rate": pin_rate, "gpu": _gpu_name()}
        print(
            f"{found['gpu']}, {options.shape}: {rig.count} chunks of {shape.block_nbytes:,} bytes; seed {options.seed}"
        )
        print(f"pinning: {pin_rate / 1e9:.1f} GB/s")
        for way in WAYS:
            if way != "batched" or device.has_batched_copies:
                rig.check(way)
        print("bit-exact: all ways, both directions\n")
        rates = found["rates"] = measure(rig)
        print(table(rates))
        found["checksums"] = checksum_rate(rig)
        print(f"checksums of stored chunks, on one thread: {found['checksums'] / 1e9:.2f} GB/s")
        found["chosen"] = {"rates": rig.copies.calibrate(2 * pages), "ways": rig.copies.ways}
        print(f"chosen by calibration: {rig.copies.ways}")
        try:
            found["without_kernels"] = engine_path(shape, CALL_CHUNKS)
            print(f"stores without raykv's kernels (torch): {found['without_kernels'] / 1e9:.2f} GB/s\n")
            found["slower"] = Overlap(rig, options.tokens).measure()
            for name, each in found["slower"].items():
                cells = ", ".join(f"{way} {share:+.2%}" for way, share in each.items())
                print(f"a stream of prefill steps of {options.tokens} tokens with stores {name}: {cells}")
        except ModuleNotFoundError as error:
            print(f"not measured: {error}")
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))


def _gpu_name() -> str:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


if __name__ == "__main__":
    main()
