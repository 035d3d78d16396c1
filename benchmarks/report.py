"""Formats the results of a run as text."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.bars import Bar, mixed_rates
from benchmarks.figures import Figures, Lookups
from benchmarks.lineup import DICT, LOCAL, MEMCPY, PEERS, REMOTE, SOCKETS, Phase, workloads
from benchmarks.workloads import Workload

TITLES = {
    ("get", False): "single get, p50 us",
    ("get", True): "get, batches of 32, GB/s",
    ("put", False): "single put, p50 us",
    ("put", True): "put, batches of 32, GB/s",
    ("exists", False): "single exists, p50 us",
    ("exists", True): "exists, batches of 1000, M keys/s",
}


def text(results: dict[str, Any], bars: Sequence[Bar]) -> str:
    """Format all tables, the bars, the missing peers, and the places where a store returned wrong bytes."""
    figures = Figures(results)
    parts = [_machine(results)]
    for phase in (LOCAL, REMOTE):
        parts += _phase(phase, figures, results)
    parts.append(_lookups(results))
    parts.append(_mixed(results))
    parts.append(bars_text(bars))
    missing = [f"PEER MISSING: {name}: {why}" for name, why in results["missing"].items()]
    wrong = [f"WRONG BYTES: {where}" for where in results["wrong"]]
    return "\n\n".join(filter(None, [*parts, "\n".join([*missing, *wrong])]))


def _machine(results: dict[str, Any]) -> str:
    facts = results["machine"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, kernel {facts['kernel']}, huge pages "
        f"{facts['transparent_hugepage']} (tmpfs {facts['transparent_hugepage_shmem']}), Python {facts['python']}",
        f"congestion control of every line's sockets: {facts.get('tcp_congestion_control', 'not recorded')}",
        f"medians of {results['rounds']} interleaved rounds; behind each figure its ratio to the limit",
    ]
    versions = {f"{name} {version}" for about in results["about"].values() for name, version in about.items()}
    left_out = [f"not asked: {', '.join(left)}"] if (left := sorted(set(PEERS) - set(results["peers"]))) else []
    return "\n".join([*lines, ", ".join(sorted(versions)), *left_out])


def _phase(phase: Phase, figures: Figures, results: dict[str, Any]) -> list[str]:
    tables = []
    groups: dict[tuple[str, bool], list[Workload]] = {}
    for workload in workloads(phase.name, quick=results["quick"]):
        groups.setdefault((workload.operation, workload.batch > 1), []).append(workload)
    for key, group in groups.items():
        limit = SOCKETS if phase.name == "remote" else (MEMCPY if key[1] and key[0] != "exists" else DICT)
        lines = []
        for row in phase.rows:
            cells = [_cell(phase.name, figures, row.label, limit, workload) for workload in group]
            if any(cells) or row.worker in results["missing"]:
                gone = "MISSING" if row.worker in results["missing"] else "-"
                lines.append([row.label, *(cell or gone for cell in cells)])
        heads = [workload.name.split(" ", 1)[1].rpartition(" x")[0] or "keys" for workload in group]
        tables.append(aligned([f"{phase.name}: {TITLES[key]}", *heads], lines))
    return tables


def _cell(phase: str, figures: Figures, row: str, limit: str, workload: Workload) -> str:
    value, ratio = figures.value(phase, row, workload), figures.ratio(phase, row, limit, workload)
    if value is None:
        return "FAILED" if figures.failed(phase, row, workload) else ""
    if workload.batch == 1:
        shown = f"{value * 1e6:.3g}" if value < 1e-3 else f"{value * 1e6:.0f}"
    else:
        shown = f"{value:.2f}" if workload.nbytes else f"{value / 1e6:.3g}"
    return f"{shown} {ratio:6.2f}x" if ratio is not None else f"{shown}        "


def _lookups(results: dict[str, Any]) -> str:
    lookups = Lookups(results)
    lines = []
    for row, rows in lookups.lines():
        rate, single = lookups.value(row, rows, "keys_per_s"), lookups.value(row, rows, "single_p50_s")
        lines.append([row, f"{rows:,}", f"{(rate or 0.0) / 1e6:.3g}", f"{(single or 0.0) * 1e6:.3g}"])
    lines += [[cell["row"], "FAILED"] for cell in results.get("lookups", ()) if "error" in cell]
    heads = ["local: exists among very many keys", "keys", "batches of 1000, M keys/s", "single, p50 us"]
    return aligned(heads, lines) if lines else ""


def _mixed(results: dict[str, Any]) -> str:
    lines = []
    labels = list(dict.fromkeys(cell["row"] for cell in results["mixed"]))
    for label in labels:
        for rate, what in mixed_rates(results).items():
            cells = [cell for cell in results["mixed"] if cell["row"] == label and cell.get("rate") == rate]
            if not cells:
                lines.append([f"{label}, {what}", "FAILED"])
                continue
            alone = [_us(cells, "alone", field) for field in ("p50_s", "p99_s", "p999_s")]
            quiet = [_us(cells, "quiet", field) for field in ("p50_s", "p99_s", "p999_s")]
            read = [_us(cells, "read", field) for field in ("p50_s", "p99_s", "p999_s")]
            calls = sum(cell["read"]["misses"] + cell["read"]["calls"] for cell in cells)
            misses = f"{sum(cell['read']['misses'] for cell in cells) / calls:.1%}"
            wrote = f"{statistics.median(cell['wrote']['gb_per_s'] for cell in cells):.2f}"
            lines.append([f"{label}, {what}", *("/".join(each) for each in (alone, quiet, read)), misses, wrote])
    heads = ["mixed run, 64 KiB, p50/p99/p99.9 us", "copies alone", "reads alone", "reads", "misses", "writes GB/s"]
    return aligned(heads, lines) if lines else ""


def _us(cells: Sequence[dict[str, Any]], part: str, field: str) -> str:
    values = [cell[part][field] for cell in cells if cell[part][field] is not None]
    return f"{statistics.median(values) * 1e6:.0f}" if values else "-"


def bars_text(bars: Sequence[Bar]) -> str:
    """Format the bars, and whether each is met."""
    lines = []
    for bar in bars:
        met = {True: "met", False: "missed by less than 5 %" if bar.near else "NOT MET", None: "not measured"}[bar.met]
        value = "-" if bar.value is None else f"{bar.value:.2f}{bar.unit}"
        if bar.value is None and "peer missing" in bar.note:
            met = "peer missing"
        sign = ">=" if bar.at_least else "<="
        lines.append([bar.name, value, f"{sign} {bar.bar:g}{bar.unit}", met, bar.note])
    return aligned(["bar", "figure", "asked", "", ""], lines)


def aligned(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table. The first column and columns without a head are left-aligned, the others right-aligned."""
    rows = [list(heads), *map(list, lines)]
    count = max(map(len, rows))
    rows = [row + [""] * (count - len(row)) for row in rows]
    widths = [max(len(row[place]) for row in rows) for place in range(count)]
    numbers = [place for place in range(1, count) if heads[place : place + 1] and heads[place]]
    made = []
    for row in rows:
        cells = [cell.rjust(widths[p]) if p in numbers else cell.ljust(widths[p]) for p, cell in enumerate(row)]
        made.append("  ".join(cells).rstrip())
    return "\n".join([made[0], "-" * max(map(len, made)), *made[1:]])
