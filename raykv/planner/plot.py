"""Draws a plan as a chart. Needs matplotlib: `pip install 'raykv[notebooks]'`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raykv.config import GIB
from raykv.errors import UsageError
from raykv.planner.records import Record


def figure(records: Sequence[Record]) -> Any:
    """Draw prefix hits over the size of the cache, with one line per policy, as a matplotlib figure.

    Raises UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("a chart needs matplotlib; pip install 'raykv[notebooks]'") from None
    chart = Figure(figsize=(8, 5), layout="constrained")
    axes = chart.add_subplot()
    for name, ssd_nbytes in dict.fromkeys((record.policy, record.ssd_nbytes) for record in records):
        line = sorted(
            (record.size_share, record.prefix_hit_ratio)
            for record in records
            if (record.policy, record.ssd_nbytes) == (name, ssd_nbytes)
        )
        axes.plot(
            [100 * size for size, _ in line],
            [100 * hits for _, hits in line],
            marker="o",
            markersize=3,
            linestyle="--" if name == "belady" else "-",
            label=f"{name}, {ssd_nbytes / GIB:.0f} GiB SSD" if ssd_nbytes else name,
        )
    axes.set_xlabel("cache, % of the trace's different chunks")
    axes.set_ylabel("hits, % of chunks read")
    axes.set_title(records[0].trace if records else "")
    axes.grid(alpha=0.3)
    axes.legend()
    return chart


def save(records: Sequence[Record], path: Path | str) -> None:
    figure(records).savefig(path)
