"""The command `raykv plan`: computes what a cache of a given size and policy would save on a trace."""

import argparse
from collections.abc import Sequence

from raykv.config import GIB, parse_nbytes
from raykv.errors import UsageError
from raykv.planner.records import DTYPE_NBYTES, ModelShape, Record, as_csv, as_json, as_table, plan
from raykv.planner.trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = ModelShape()
    parser.add_argument(
        "trace", metavar="TRACE", help="JSON lines, plain or .gz: Mooncake's, vLLM's KV events, raykv's"
    )
    parser.add_argument("--sizes", default="5%,10%,25%,50%", help="'10%%' of the trace's chunks, or '64 GiB'; comma")
    parser.add_argument("--policies", default="leaf_lru,belady", help="names, 'module:attribute', or all; comma")
    parser.add_argument("--ssd-sizes", default="0", help="of a second tier, as --sizes; 0 for none; comma")
    parser.add_argument("--ssd-per-day", metavar="SIZE", help="the most to write to it in a day, such as '2 TiB'")
    parser.add_argument(
        "--tokens-per-chunk", type=int, metavar="N", help="if the trace does not say; Mooncake's blocks have 512"
    )
    parser.add_argument("--json", action="store_true", help="records for programs")
    parser.add_argument("--csv", action="store_true", help="records for spreadsheets")
    parser.add_argument("--plot", metavar="FILE", help="write a chart too, such as plan.png or plan.svg")
    model = parser.add_argument_group("model (default: Llama 3.1 8B)")
    model.add_argument("--layers", type=int, default=shape.layers)
    model.add_argument("--kv-heads", type=int, default=shape.kv_heads)
    model.add_argument("--head-size", type=int, default=shape.head_size)
    model.add_argument("--dtype", choices=sorted(DTYPE_NBYTES), default=shape.dtype)
    model.add_argument("--hidden", type=int, default=shape.hidden, help="query heads times head size")
    model.add_argument("--parameters", type=float, default=shape.parameters, help="such as 8e9")


def plan_command(options: argparse.Namespace) -> str:
    """Run `raykv plan` and return its output.

    Raises:
        UsageError: An option or a line of the trace is wrong, or the trace cannot be read. The message says which.
    """
    model = ModelShape(
        options.layers, options.kv_heads, options.head_size, options.dtype, options.hidden, options.parameters
    )
    if min(model.layers, model.kv_heads, model.head_size, model.hidden, model.parameters) <= 0:
        raise UsageError("the model's numbers must be above 0")
    if options.tokens_per_chunk is not None and not 1 <= options.tokens_per_chunk <= 1 << 20:
        raise UsageError(f"--tokens-per-chunk {options.tokens_per_chunk} must be from 1 to {1 << 20}")
    records = plan(
        read_trace(options.trace, options.tokens_per_chunk),
        options.sizes.split(","),
        [name.strip() for name in options.policies.split(",")],
        model=model,
        ssd_sizes=options.ssd_sizes.split(","),
        ssd_nbytes_per_day=None if options.ssd_per_day is None else _nbytes(options.ssd_per_day),
    )
    if options.plot:
        _save_chart(records, options.plot)
    return as_json(records) if options.json else as_csv(records) if options.csv else as_table(records)


def _nbytes(text: str) -> float:
    try:
        return float(str(parse_nbytes(text)))
    except ValueError as error:
        raise UsageError(f"--ssd-per-day: {error}") from None


def _save_chart(records: Sequence[Record], path: str) -> None:
    """Save a chart of prefix hits over cache size, with one line for each pair of policy and SSD size."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("a chart needs matplotlib; pip install 'raykv[notebooks]'") from None
    chart = Figure(figsize=(8, 5), layout="constrained")
    axes = chart.add_subplot()
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for record in records:
        point = 100 * record.size_share, 100 * record.prefix_hit_ratio
        lines.setdefault((record.policy, record.ssd_nbytes), []).append(point)
    for (name, ssd_nbytes), points in lines.items():
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            markersize=3,
            linestyle="--" if name == "belady" else "-",
            label=f"{name}, {ssd_nbytes / GIB:.0f} GiB SSD" if ssd_nbytes else name,
        )
    axes.set_xlabel("cache, % of the trace's different chunks")
    axes.set_ylabel("hits, % of chunks read")
    axes.set_title(records[0].trace)
    axes.grid(alpha=0.3)
    axes.legend()
    chart.savefig(path)
