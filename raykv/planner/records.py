"""Computes a plan and formats it as text. A plan is a list of records, one for each policy and size of cache."""

import csv
import io
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any, Final

from raykv.config import GIB, MIB, parse_nbytes
from raykv.errors import UsageError
from raykv.eviction import POLICIES, policy
from raykv.planner.replay import Outcome, belady, replay
from raykv.planner.ssd import Ssd
from raykv.planner.trace import Trace
from raykv.tier.admission import DAY_S, Admission

BELADY: Final = "belady"
SEGMENT_NBYTES: Final = 64 * MIB
"""Size of a segment of the simulated SSD's log: the default of `SsdConfig.segment_nbytes`."""
DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder model. The defaults describe Llama 3.1 8B.

    Attributes:
        layers: Number of layers.
        kv_heads, head_size, dtype: Shape and type of keys and values.
        hidden: Number of query heads, times head_size.
        parameters: Number of parameters that are active for each token.
    """

    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    hidden: int = 4096
    parameters: float = 8.03e9

    @property
    def token_nbytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * DTYPE_NBYTES[self.dtype]

    def prefill_flops(self, tokens: int, attended: int) -> float:
        """Return the number of floating-point operations of a prefill.

        Args:
            tokens: Number of tokens to compute.
            attended: Number of earlier tokens in the prompt, summed over all tokens to compute.
        """
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.hidden * (attended + tokens)


@dataclass(frozen=True, slots=True)
class Record:
    """The result for one policy and one size of cache.

    A hit is a prefix hit if all earlier chunks of the request are hits. An engine can use only prefix hits. With
    "belady", every hit counts as a prefix hit.

    Attributes:
        trace, policy: Names of the trace and the policy.
        size_chunks, size_nbytes: Size of the cache in memory.
        size_share: `size_chunks` divided by the number of different chunks in the trace.
        requests: Number of requests in the trace.
        chunks, tokens: Number of chunks and tokens in the prompts of all requests.
        prefix_hits, prefix_hit_ratio: Number of chunks with a prefix hit; the same divided by `chunks`.
        tokens_hit, token_hit_ratio: Number of tokens in these chunks; the same divided by `tokens`.
        saved_flops, saved_gib: Floating-point operations, and GiB of keys and values, that prefix hits save.
        stored, evicted: Number of chunks stored in memory, and evicted from memory.
        ssd_chunks, ssd_nbytes: Size of the SSD tier. 0: no SSD.
        ssd_hits: Number of chunks with a prefix hit that were read from the SSD.
        ssd_written_nbytes: Bytes written to the SSD, when memory evicts chunks and when the SSD moves chunks.
        ssd_written_nbytes_per_day: The same, extrapolated from the duration of the trace to a day.
        ssd_write_amplification: Number of all chunks written to the SSD, divided by the number written from memory.
        took_s: Duration of the simulation.
    """

    trace: str
    policy: str
    size_chunks: int
    size_nbytes: int
    size_share: float
    requests: int
    chunks: int
    tokens: int
    prefix_hits: int
    prefix_hit_ratio: float
    tokens_hit: int
    token_hit_ratio: float
    saved_flops: float
    saved_gib: float
    stored: int
    evicted: int
    ssd_chunks: int
    ssd_nbytes: int
    ssd_hits: int
    ssd_written_nbytes: int
    ssd_written_nbytes_per_day: float
    ssd_write_amplification: float
    took_s: float


def plan(
    trace: Trace,
    sizes: Sequence[str | int],
    policies: Iterable[str | Callable[..., Any]] = ("leaf_lru",),
    *,
    model: ModelShape | None = None,
    ssd_sizes: Sequence[str | int] = (0,),
    ssd_nbytes_per_day: float | None = None,
) -> list[Record]:
    """Replay a trace with each combination of a policy, a size of memory, and a size of the SSD tier.

    Args:
        trace: The requests to replay.
        sizes: Sizes of memory. Each is a number of chunks, a number of bytes such as "64 GiB", or a share of the
            trace's different chunks such as "10%".
        policies: Each is an argument of `raykv.eviction.policy`, "belady" for the upper bound, or "all" for every
            policy and "belady".
        model: The model that determines the bytes of a chunk. None means Llama 3.1 8B.
        ssd_sizes: Sizes of the SSD tier below memory, in the form of `sizes`. 0 means no SSD.
        ssd_nbytes_per_day: Limit of the bytes written to the SSD in a day. None means no limit.

    Raises:
        UsageError: A size is not valid.
        ConfigError: A policy does not exist.
    """
    model = model or ModelShape()
    chunk_nbytes = trace.chunk_tokens * model.token_nbytes
    capacities = [_capacity(size, trace.chunks, chunk_nbytes) for size in sizes]
    below = [0 if str(size).strip(" %") == "0" else _capacity(size, trace.chunks, chunk_nbytes) for size in ssd_sizes]
    records = []
    chosen = [each for name in policies for each in ([*POLICIES, BELADY] if name == "all" else [name])]
    for name, capacity, ssd_chunks in product(dict.fromkeys(chosen), capacities, below):
        began_s, log = time.perf_counter(), None
        labels = {"policy": BELADY, "size_chunks": capacity, "ssd_chunks": ssd_chunks}
        if name == BELADY:
            outcome = belady(trace, capacity + ssd_chunks)
        else:
            if ssd_chunks:
                admission = Admission(ssd_nbytes_per_day, now_s=0.0)
                log = Ssd(ssd_chunks, SEGMENT_NBYTES // chunk_nbytes, admission, model.token_nbytes)
            made = policy(name)
            labels["policy"], outcome = made.name, replay(trace, made, capacity, ssd=log)
        records.append(_record(trace, model, outcome, log, took_s=time.perf_counter() - began_s, **labels))
    return records


def _record(trace: Trace, model: ModelShape, outcome: Outcome, ssd: Ssd | None, **labels: Any) -> Record:
    chunk_nbytes = trace.chunk_tokens * model.token_nbytes
    written_nbytes = ssd.tokens * model.token_nbytes if ssd else 0
    return Record(
        trace=trace.name,
        size_nbytes=labels["size_chunks"] * chunk_nbytes,
        size_share=labels["size_chunks"] / trace.chunks,
        requests=len(trace.requests),
        chunks=trace.accesses,
        tokens=trace.tokens,
        prefix_hits=outcome.prefix_hits,
        prefix_hit_ratio=outcome.prefix_hits / trace.accesses,
        tokens_hit=outcome.tokens_hit,
        token_hit_ratio=outcome.tokens_hit / max(1, trace.tokens),
        saved_flops=model.prefill_flops(outcome.tokens_hit, outcome.attended),
        saved_gib=outcome.tokens_hit * model.token_nbytes / GIB,
        stored=outcome.stored,
        evicted=outcome.evicted,
        ssd_nbytes=labels["ssd_chunks"] * chunk_nbytes,
        ssd_hits=outcome.ssd_hits,
        ssd_written_nbytes=written_nbytes,
        ssd_written_nbytes_per_day=written_nbytes * DAY_S / max(1.0, trace.seconds),
        ssd_write_amplification=1 + ssd.moved / max(1, ssd.written) if ssd else 1.0,
        **labels,
    )


def _capacity(size: str | int, chunks: int, chunk_nbytes: int) -> int:
    if isinstance(size, int):
        found = size
    elif share := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", size):
        found = max(round(float(share[1]) / 100 * chunks), float(share[1]) > 0)
    else:
        try:
            found = int(str(parse_nbytes(size))) // chunk_nbytes
        except ValueError as error:
            raise UsageError(f"size {size!r} is neither a share such as '10%' nor bytes: {error}") from None
    if found < 1:
        raise UsageError(f"size {size!r} is less than one chunk of {chunk_nbytes:,} bytes")
    return found


def as_table(records: Sequence[Record]) -> str:
    """Format records as a table for people."""
    if not records:
        return ""
    first = records[0]
    tiers = any(record.ssd_chunks for record in records)
    lines = [
        f"{first.trace}: {first.requests:,} requests, {first.chunks:,} chunks read, {first.tokens:,} tokens",
        "",
        f"{'policy':<12} {'size':>7} {'GiB':>9} {'hit %':>7} {'tokens %':>9} {'saved PFLOP':>12} "
        f"{'saved GiB':>10} {'s':>6}" + (f" {'SSD GiB':>9} {'from SSD %':>10} {'GiB/day':>9}" if tiers else ""),
    ]
    lines += [
        f"{record.policy:<12} {record.size_share:>7.1%} {record.size_nbytes / GIB:>9.1f} "
        f"{100 * record.prefix_hit_ratio:>7.2f} {100 * record.token_hit_ratio:>9.2f} "
        f"{record.saved_flops / 1e15:>12.1f} {record.saved_gib:>10.1f} {record.took_s:>6.1f}"
        + (_ssd_part(record) if tiers else "")
        for record in records
    ]
    return "\n".join(lines)


def _ssd_part(record: Record) -> str:
    from_ssd, per_day = record.ssd_hits / record.chunks, record.ssd_written_nbytes_per_day / GIB
    return f" {record.ssd_nbytes / GIB:>9.1f} {100 * from_ssd:>10.2f} {per_day:>9.0f}"


def as_json(records: Sequence[Record]) -> str:
    return json.dumps([asdict(record) for record in records], indent=2)


def as_csv(records: Sequence[Record]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Record)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(record) for record in records)
    return out.getvalue()
