"""Draws the chart: throughput of batches and latency of single calls, local and remote.

python -m benchmarks.chart RESULTS.json CHART.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import Figures
from benchmarks.lineup import LOCAL, REMOTE, Phase, Row, workloads
from benchmarks.workloads import Workload

COLOURS = {
    "limit": ("#555555", "#888888", "#aaaaaa", "#cccccc", "#e5e5e5"),
    "raykv": ("#c0392b", "#e67e22", "#f5b041", "#f1a9a0"),
    "peer": ("#1f4e79", "#2e86c1", "#27ae60", "#8e44ad", "#16a085", "#7d6608"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw all panels, and write them to a PNG file."""
    figures = Figures(results)
    kinds = (("get", True), ("put", True), ("get", False), ("put", False))
    panels = [
        (phase, group)
        for phase in (LOCAL, REMOTE)
        for operation, batch in kinds
        if (group := _group(phase, operation, batch, results, figures))
    ]
    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(20, 4.4 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (phase, group) in zip(axes.flat, panels, strict=False):
        _panel(axis, phase, group, figures)
    facts = results["machine"]
    figure.suptitle(
        f"{facts['cpu']}, {facts['cores']} cores: medians of {results['rounds']} interleaved rounds", fontsize=13
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _group(phase: Phase, operation: str, batch: bool, results: dict[str, Any], figures: Figures) -> list[Workload]:
    return [
        each
        for each in workloads(phase.name, quick=results["quick"])
        if each.operation == operation
        and (each.batch > 1) == batch
        and any(figures.value(phase.name, row.label, each) is not None for row in phase.rows)
    ]


def _panel(axis: Axes, phase: Phase, group: list[Workload], figures: Figures) -> None:
    shown = [row for row in phase.rows if any(figures.value(phase.name, row.label, each) for each in group)]
    width, batch = 0.86 / max(1, len(shown)), group[0].batch > 1
    for place, row in enumerate(shown):
        values = [figures.value(phase.name, row.label, each) or 0.0 for each in group]
        heights = values if batch else [value * 1e6 for value in values]
        left = [number - 0.43 + (place + 0.5) * width for number in range(len(group))]
        axis.bar(left, heights, width * 0.94, label=row.label, color=_colour(row, phase))
    axis.set_xticks(range(len(group)), [each.name.split(" ", 1)[1].rpartition(" x")[0] for each in group])
    what = (
        f"batches of {group[0].batch}, GB/s (higher is better)" if batch else "one object, p50 in us (lower is better)"
    )
    axis.set_title(f"{phase.name} {group[0].operation}: {what}", fontsize=11)
    if not batch:
        axis.set_yscale("log")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False)


def _colour(row: Row, phase: Phase) -> str:
    """Return the colour of a line. It is the same in all panels of a phase."""
    same = [each for each in phase.rows if each.kind == row.kind]
    colours = COLOURS[row.kind]
    return colours[same.index(row) % len(colours)]


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
