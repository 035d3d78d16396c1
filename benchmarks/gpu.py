"""Measures copies between a paged KV cache in GPU memory and pinned chunks in the arena, as a share of the link's rate.

Run by hand on a host with an NVIDIA GPU, cupy and torch: `python -m benchmarks.gpu --json gpu.json`

The cache has the shape of a 70B model's: 80 layers, 8 KV heads of 128 bf16 numbers, blocks (pages) of 16 tokens.
`--heads 1` is the part of one of 8 tensor ranks. The limit is a plain copy between GPU memory and memory of
cudaHostAlloc in the same run. All lines are measured in turn in each round; the figures are medians. The bytes are
compared after each line of raykv.

The last part stores layer by layer while torch multiplies matrices for as long as a 70B model would compute these
tokens, and once with too little computation, so that the link is always busy. It compares the time of the computation
with and without the store.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from benchmarks.machine import facts
from raykv.gpu.calibration import AllPinned, calibrated
from raykv.gpu.copies import Chunk, Direction, PagedCopies, Way
from raykv.gpu.device import Device, Pitched, missing, open_device
from raykv.gpu.paged import PagedCache, Run
from raykv.gpu.pinning import Pinning
from raykv.memory.arena import SharedMemory
from raykv.memory.slots import slot_nbytes

Copy = Callable[[int, int, int, int], None]
"""cudaMemcpyAsync: (to, source, bytes, stream)."""

MIN_SHARE: Final = 0.9
MAX_SLOWDOWN: Final = 1.01
SINGLE_COPIES: Final = 4096
"""The line with a copy for each page and run makes about this many copies."""
TOKEN_FLOP: Final = 140e9
"""Floating-point operations of a 70B model for one token."""
MATRIX: Final = 4096


@dataclass(frozen=True)
class Shape:
    """The paged cache and what is copied of it.

    Attributes:
        run_nbytes: Bytes of the keys, or of the values, of one layer in one block.
        blocks: Blocks of the cache. Half of them, in random order, are copied.
        chunk_blocks: Blocks of one chunk.
    """

    layers: int = 80
    heads: int = 8
    head_nbytes: int = 256
    block_tokens: int = 16
    blocks: int = 256
    chunk_blocks: int = 4
    extent_nbytes: int = 32 << 20

    @property
    def run_nbytes(self) -> int:
        return self.heads * self.head_nbytes * self.block_tokens

    @property
    def block_nbytes(self) -> int:
        return 2 * self.layers * self.run_nbytes


class Bench:
    """A filled cache in GPU memory, an arena with pinned chunks, and the lines to measure.

    Attributes:
        content: The cache's bytes, shape [layers, 2, blocks, run_nbytes].
        seconds: Measured seconds of each line and round, for `nbytes` bytes.
    """

    def __init__(self, device: Device, copy: Copy, shape: Shape, seed: int = 1) -> None:
        self.device, self.copy, self.shape = device, copy, shape
        rng = np.random.default_rng(seed)
        self.content = rng.integers(0, 256, (shape.layers, 2, shape.blocks, shape.run_nbytes), dtype=np.uint8)
        self.stream = device.new_stream()
        self.gpu = device.allocate(self.content.nbytes)
        self.pinned = device.allocate_pinned(self.content.nbytes)
        runs = [
            [self._run(layer, part) for part in range(2)]  # as vLLM's caches: keys and values apart
            for layer in range(shape.layers)
        ]
        self.cache = PagedCache.of(runs, shape.blocks)
        self._fill_arena(rng.permutation(shape.blocks)[: shape.blocks // 2].tolist())
        self.seconds: dict[str, list[float]] = {}
        self.wrong: list[str] = []
        self._upload(self.content)

    def _run(self, layer: int, part: int) -> Run:
        nbytes = self.shape.run_nbytes
        return Run(self.gpu.address + (2 * layer + part) * self.shape.blocks * nbytes, nbytes, nbytes)

    def _fill_arena(self, moved: list[int]) -> None:
        """Make the arena with slots for the blocks in `moved`, and pin it."""
        shape, step = self.shape, self.shape.chunk_blocks
        slot, extent = slot_nbytes(step * shape.block_nbytes), shape.extent_nbytes
        groups = [moved[start : start + step] for start in range(0, len(moved), step)]
        extents = -(-len(groups) // (extent // slot))
        self.arena = SharedMemory.create(None, extents * extent)
        for number in range(extents):
            if not self.arena.populate(number * extent, extent):
                raise SystemExit("no memory for the arena")
        began_s = time.perf_counter()
        self.pinning = Pinning(self.device, self.arena, np.full(extents, slot, np.uint32), extent)
        while self.pinning.step():
            pass
        self.pin_rate = self.arena.nbytes / (time.perf_counter() - began_s)
        assert self.pinning.pinned_nbytes == self.arena.nbytes, self.pinning.refused
        self.chunks: list[Chunk] = []
        for number, group in enumerate(groups):
            extent_number, place = divmod(number, extent // slot)
            self.chunks.append((group, self.arena.address + extent_number * extent + place * slot))
        self.moved, self.nbytes = moved, len(moved) * shape.block_nbytes

    # -- what is measured -------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Measure each line once, and compare the bytes."""
        for direction in get_args(Direction):
            self._time(f"{direction}: plain copy, cudaHostAlloc", partial(self._plain, direction))
            self._time(f"{direction}: plain copy, arena", partial(self._whole_chunks, direction))
            self._time(f"{direction}: a copy per page", partial(self._single, self._pairs(direction)))
            for way in get_args(Way):
                copies = PagedCopies(self.device, self.cache, self.pinning, direction, way)
                for name, step in (("all layers", self.shape.layers), ("by layer", 1)):
                    self._paged(f"{direction}: {way}, {name}", copies, step)
                copies.close()

    def _time(self, line: str, queue: Callable[[Any], tuple[Any, int]]) -> None:
        """Measure the GPU's time from `after` to the event that `queue` returns, and scale it to `self.nbytes`."""
        begin = self.device.record(self.stream, timed=True)
        end, nbytes = queue(begin)
        self.device.synchronize(end)
        taken_s = self.device.elapsed_s(begin, end) * self.nbytes / nbytes
        self.seconds.setdefault(line, []).append(taken_s)

    def _paged(self, line: str, copies: PagedCopies, step: int) -> None:
        def queue(after: Any) -> tuple[Any, int]:
            transfer = copies.begin(self.chunks)
            for layer in range(0, self.shape.layers, step):
                end = transfer.queue(layer, step, after=after, timed=True)
            return end, self.nbytes

        if copies.direction == "store":
            self.slots()[:] = 0
        else:
            self._poison()
        self._time(line, queue)
        if not (self.stored_is_right() if copies.direction == "store" else self.loaded_is_right()):
            self.wrong.append(line)

    def _plain(self, direction: Direction, after: Any) -> tuple[Any, int]:
        self._copy(direction, self.gpu.address, self.pinned.address, self.nbytes)
        return self.device.record(self.stream, timed=True), self.nbytes

    def _whole_chunks(self, direction: Direction, after: Any) -> tuple[Any, int]:
        """Copy each chunk between its slot and contiguous GPU memory: no gather and no scatter."""
        start = self.gpu.address
        for group, address in self.chunks:
            self._copy(direction, start, address, len(group) * self.shape.block_nbytes)
            start += len(group) * self.shape.block_nbytes
        return self.device.record(self.stream, timed=True), self.nbytes

    def _pairs(self, direction: Direction) -> list[tuple[int, int]]:
        """Return target and source of the first runs of the first blocks, each for a copy of its own."""
        nbytes, pairs = self.shape.run_nbytes, []
        for place in self.cache.places(self.chunks)[: -(-SINGLE_COPIES // len(self.cache.runs))]:
            for run in self.cache.runs:
                gpu = int(run["address"]) + int(place["block"]) * nbytes
                host = int(place["address"]) + int(run["offset"])
                pairs.append((host, gpu) if direction == "store" else (gpu, host))
        return pairs

    def _single(self, pairs: list[tuple[int, int]], after: Any) -> tuple[Any, int]:
        nbytes, stream, copy = self.shape.run_nbytes, self.stream, self.copy
        for to, source in pairs:
            copy(to, source, nbytes, stream)
        return self.device.record(self.stream, timed=True), nbytes * len(pairs)

    def _copy(self, direction: Direction, gpu: int, host: int, nbytes: int) -> None:
        to, source = (host, gpu) if direction == "store" else (gpu, host)
        self.device.copy_rows(Pitched(to, 0), Pitched(source, 0), nbytes, 1, self.stream)

    # -- the bytes --------------------------------------------------------------------------------------------------

    def slots(self) -> Any:
        return np.frombuffer(self.arena.view, np.uint8)

    def _upload(self, content: Any) -> None:
        self._pinned_bytes()[:] = content.reshape(-1)
        self._copy("load", self.gpu.address, self.pinned.address, content.nbytes)
        self.device.synchronize(self.device.record(self.stream))

    def _pinned_bytes(self) -> Any:
        return np.ctypeslib.as_array((ctypes.c_ubyte * self.pinned.nbytes).from_address(self.pinned.address))

    def _poison(self) -> None:
        """Give the slots the right bytes and the cache wrong ones."""
        slots = self.slots()
        for (_, address), content in zip(self.chunks, self.contents, strict=True):
            start = address - self.arena.address
            slots[start : start + content.nbytes] = content
        self._upload(self.inverse)

    @cached_property
    def inverse(self) -> Any:
        """Wrong content: no byte is right."""
        return ~self.content

    @cached_property
    def contents(self) -> list[Any]:
        """Return the bytes that each chunk must have."""
        return [np.moveaxis(self.content[:, :, group], 2, 0).reshape(-1) for group, _ in self.chunks]

    def stored_is_right(self) -> bool:
        slots = self.slots()
        starts = [address - self.arena.address for _, address in self.chunks]
        pairs = zip(starts, self.contents, strict=True)
        return all(np.array_equal(slots[start : start + content.nbytes], content) for start, content in pairs)

    def loaded_is_right(self) -> bool:
        """Whether the loaded blocks are right and the others are still wrong. Gives the cache its content again."""
        self._copy("store", self.gpu.address, self.pinned.address, self.content.nbytes)
        self.device.synchronize(self.device.record(self.stream))
        expected = self.inverse.copy()
        expected[:, :, self.moved] = self.content[:, :, self.moved]
        right = np.array_equal(self._pinned_bytes(), expected.reshape(-1))
        self._upload(self.content)
        return right

    def rates(self) -> dict[str, float]:
        """Return the median rate of each line, in bytes per second."""
        return {line: self.nbytes / statistics.median(times) for line, times in self.seconds.items()}

    def close(self) -> None:
        self.pinning.close()
        self.arena.close()


# -- overlap with computation -----------------------------------------------------------------------------------------


def overlap(bench: Bench, way: Way, flop: float, rounds: int) -> dict[str, float]:
    """Compute with and without a layer-wise store, in turn.

    Args:
        flop: Floating-point operations of the computation, over all layers.

    Returns:
        slowdown: Time of the computation with the store, divided by that without; the median of the pairs.
        stored_share: Time until the store has ended, divided by that of the computation.
    """
    import torch

    device, layers = bench.device, bench.shape.layers
    a, b, c = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    products = max(1, round(flop / layers / (2 * MATRIX**3)))
    stream = torch.cuda.Stream()
    copies = PagedCopies(device, bench.cache, bench.pinning, "store", way)

    def run(*, stores: bool) -> tuple[float, float]:
        torch.cuda.synchronize()
        transfer = copies.begin(bench.chunks)
        begin, end = device.record(stream.cuda_stream, timed=True), None
        for layer in range(layers):
            with torch.cuda.stream(stream):
                for _ in range(products):
                    torch.mm(a, b, out=c)
            if stores:
                after = device.record(stream.cuda_stream)
                end = transfer.queue(layer, 1, after=after, timed=True)
        computed = device.record(stream.cuda_stream, timed=True)
        device.synchronize(computed)
        transfer.wait()
        return device.elapsed_s(begin, computed), device.elapsed_s(begin, end) if end else 0.0

    run(stores=True)
    ratios, shares = [], []
    for _ in range(rounds):
        alone, _ = run(stores=False)
        both, stored = run(stores=True)
        ratios.append(both / alone)
        shares.append(stored / both)
    copies.close()
    return {"slowdown": statistics.median(ratios), "stored_share": statistics.median(shares), "products": products}


# -- the report -------------------------------------------------------------------------------------------------------


def table(rates: dict[str, float]) -> list[str]:
    """Format the lines: GB/s, share of the limit, and factor over a copy per page."""
    lines = [f"{'':<40} {'GB/s':>8} {'of limit':>9} {'x per page':>11}"]
    for line, rate in rates.items():
        direction = line.partition(":")[0]
        limit, single = rates[f"{direction}: plain copy, cudaHostAlloc"], rates[f"{direction}: a copy per page"]
        lines.append(f"{line:<40} {rate / 1e9:>8.2f} {rate / limit:>9.3f} {rate / single:>11.2f}")
    return lines


def bars(rates: dict[str, float], overlaps: dict[str, dict[str, float]], wrong: Sequence[str]) -> list[str]:
    """Return one line for each bar: met or missed."""
    found = []
    for direction in get_args(Direction):
        limit = rates[f"{direction}: plain copy, cudaHostAlloc"]
        line, rate = max(
            ((f"{way}, {name}", rates[f"{direction}: {way}, {name}"])
             for way in get_args(Way) for name in ("all layers", "by layer")),
            key=lambda each: each[1],
        )  # fmt: skip
        found.append(
            (f"{direction} by {line}: {rate / limit:.3f} of the limit (bar {MIN_SHARE})", rate / limit >= MIN_SHARE)
        )
    prefill = {name: each["slowdown"] for name, each in overlaps.items() if name.endswith("prefill")}
    if prefill:
        name, slowdown = min(prefill.items(), key=lambda each: each[1])
        found.append((f"{name}: {slowdown:.4f} times the time alone (bar {MAX_SLOWDOWN})", slowdown <= MAX_SLOWDOWN))
    found.append((f"wrong bytes: {', '.join(wrong) or 'none'}", not wrong))
    return [f"{'met' if met else 'MISSED':<7} {text}" for text, met in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", type=int, default=8, help="KV heads of this rank (8: the whole model, 1: one of 8 ranks)"
    )
    parser.add_argument(
        "--blocks", type=int, help="blocks of the cache, by default 2048 / heads; half of them are copied"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if lack := missing():
        sys.exit(f"benchmarks.gpu needs a GPU: {lack}")
    import cupy

    runtime, device = cupy.cuda.runtime, open_device()

    def copy(to: int, source: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, stream)

    name = runtime.getDeviceProperties(0)["name"].decode()
    bench = Bench(device, copy, Shape(heads=options.heads, blocks=options.blocks or 2048 // options.heads))
    print(f"{name}: {bench.nbytes >> 20} MiB in {len(bench.chunks)} chunks, runs of {bench.shape.run_nbytes} bytes")
    print(f"pinning: {bench.pin_rate / 1e9:.2f} GB/s", flush=True)
    bench.round()  # not counted: kernels are loaded, and staging memory is allocated
    bench.seconds.clear()
    for _ in range(options.rounds):
        bench.round()
    print(*table(bench.rates()), sep="\n", flush=True)
    ways = {each.direction: each.way for each in calibrated(device, bench.cache, AllPinned())}
    print(f"the calibration chooses {ways}", flush=True)
    tokens = len(bench.moved) * bench.shape.block_tokens
    overlaps = {}
    for way in get_args(Way):
        for load, flop in (("prefill", tokens * TOKEN_FLOP * options.heads / 8), ("busy link", 0.0)):
            overlaps[f"{way}, {load}"] = overlap(bench, way, flop, options.rounds)
            print(f"overlap, {way}, {load}: {overlaps[f'{way}, {load}']}", flush=True)
    found = bars(bench.rates(), overlaps, bench.wrong)
    print(*found, sep="\n")
    if options.json:
        results = {
            "machine": facts(), "gpu": name, "shape": asdict(bench.shape), "pin_rate": bench.pin_rate, "ways": ways,
            "seconds": bench.seconds, "rates": bench.rates(), "overlaps": overlaps, "bars": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(results, indent=1))
    bench.close()
    sys.exit(any(line.startswith("MISSED") for line in found))


if __name__ == "__main__":
    main()
