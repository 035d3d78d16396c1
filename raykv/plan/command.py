"""`raykv plan`: how much a cache of a given size and policy would save on a trace."""

import argparse
import math

from raykv.errors import UsageError
from raykv.plan.model import DTYPE_NBYTES, ModelShape
from raykv.plan.records import as_csv, as_json, as_table, plan
from raykv.plan.trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `raykv plan` may be told."""
    shape = ModelShape()
    parser.add_argument(
        "trace", metavar="TRACE", help="JSON lines, plain or .gz: Mooncake's, vLLM's KV events, raykv's"
    )
    parser.add_argument("--sizes", default="5%,10%,25%,50%", help="'10%%' of the trace's chunks, or '64 GiB'; comma")
    parser.add_argument("--policies", default="leaf_lru,belady", help="names, 'module:attribute', or all; comma")
    parser.add_argument("--objects", action="store_true", help="each access by itself, without regard to chains")
    parser.add_argument("--ttl", type=float, default=math.inf, metavar="SECONDS", help="time from store to expiry")
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
    """Run `raykv plan`.

    Returns:
        What to print.

    Raises:
        UsageError: A file, a line of it, a size or a policy is wrong; says which.
    """
    model = ModelShape(
        options.layers, options.kv_heads, options.head_size, options.dtype, options.hidden, options.parameters
    )
    if min(model.layers, model.kv_heads, model.head_size, model.hidden, model.parameters, options.ttl) <= 0:
        raise UsageError("the model's numbers and --ttl must be above 0")
    records = plan(
        read_trace(options.trace),
        [size.strip() for size in options.sizes.split(",")],
        [name.strip() for name in options.policies.split(",")],
        model=model,
        mode="objects" if options.objects else "prefix",
        ttl_s=options.ttl,
    )
    if options.plot:
        from raykv.plan.plot import save

        save(records, options.plot)
    return as_json(records) if options.json else as_csv(records) if options.csv else as_table(records)
