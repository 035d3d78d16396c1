"""Computes the bars. A bar is a figure of raykv, such as the ratio to the best peer, and a bound for this figure.

The tables also show single objects of 16 KiB. They have no bar, because KV caches have no chunks of this size.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.figures import Figures, Lookups, is_rate
from benchmarks.lineup import (
    DICT,
    LOCAL,
    MAPPED,
    MAPPED_DICT,
    MEMCPY,
    RAYKV,
    RAYKV_2,
    RAYKV_GENERAL,
    RAYKV_MATCHED,
    REMOTE,
    SOCKETS,
    PhaseName,
)
from benchmarks.workloads import BATCH, KIB, LOOKUP_BATCH, MIB, Workload, get, put, size_text

BAR_SIZES = (64 * KIB, MIB, 4 * MIB)
SECOND_LIMITS = {DICT: MAPPED_DICT, MEMCPY: MAPPED}
"""Maps the limit of a bar to a second limit. The bar's note shows the ratio to the second limit."""
NEAR = 0.05
"""If raykv misses a bar by less than this share of the bound, the report says so."""
REMOTE_RAYKV = [RAYKV_MATCHED, RAYKV, RAYKV_GENERAL]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of raykv, and the bound that the figure must reach.

    Attributes:
        value: The figure; None if it could not be measured.
        bar: The bound.
        at_least: Whether `bar` is a lower bound. Otherwise it is an upper bound.
        unit: Text after the figures: "x" for ratios.
        note: Further text, such as the peer that raykv is compared with, and missing peers.
    """

    name: str
    value: float | None
    bar: float
    at_least: bool = True
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the figure reaches the bar; None if it could not be measured."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @property
    def near(self) -> bool:
        """Whether the bar is met, or missed by less than NEAR."""
        if self.value is None:
            return False
        return self.value >= self.bar * (1 - NEAR) if self.at_least else self.value <= self.bar * (1 + NEAR)


class Bars:
    """All bars of one run."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._results, self._figures = results, Figures(results)
        self.made: list[Bar] = []

    def _to_limit(
        self, name: str, phase: PhaseName, rows: list[str], limit: str, workload: Workload, bar: float
    ) -> None:
        """Add a bar: the ratio of the best raykv line in `rows` to the line `limit`."""
        best = self._figures.best(phase, rows, workload)
        value = self._figures.ratio(phase, best[0], limit, workload) if best else None
        notes = [best[0]] if best and best[0] != RAYKV else []
        second = SECOND_LIMITS.get(limit)
        if best and second and (other := self._figures.ratio(phase, best[0], second, workload)):
            notes.append(f"to {second}: {other:.2f}x")
        note = "; ".join(notes)
        self.made.append(Bar(name, value, bar, at_least=is_rate(workload), note=note))

    def _to_peers(
        self, name: str, phase: PhaseName, rows: list[str], workload: Workload, bar: float, *, crossing: bool = False
    ) -> None:
        """Add a bar: the ratio of the best raykv line in `rows` to the best peer.

        If `crossing` is set, a peer counts only if its puts involve another process.
        """
        ours = self._figures.best(phase, rows, workload)
        theirs = self._figures.best(phase, self._peers(phase, crossing=crossing), workload)
        value = ours[1] / theirs[1] if ours and theirs else None
        note = self._against(theirs) if ours else ""
        self.made.append(Bar(name, value, bar, at_least=is_rate(workload), note=note))

    def _peers(self, phase: PhaseName, *, crossing: bool = False) -> list[str]:
        rows = LOCAL.rows if phase == "local" else REMOTE.rows
        return [row.label for row in rows if row.kind == "peer" and (row.crosses or not crossing)]

    def _against(self, best: tuple[str, float] | None) -> str:
        """Return the text that names the best peer and the missing peers."""
        missing = "".join(f"; peer missing: {name}" for name in self._results["missing"])
        return (f"to {best[0]}" if best else "peer missing") + missing

    def local(self) -> None:
        for make, one, two in ((get, 0.95, 1.6), (put, 0.9, 1.5)):
            for nbytes in (MIB, 4 * MIB):
                workload = make(nbytes, BATCH)
                what = f"local batch {workload.operation}, {size_text(nbytes)}"
                self._to_limit(f"{what}: one copy thread / memcpy", "local", [RAYKV], MEMCPY, workload, one)
                self._to_limit(f"{what}: two copy threads / memcpy", "local", [RAYKV_2], MEMCPY, workload, two)
                self._to_peers(f"{what}: / best peer", "local", [RAYKV, RAYKV_2], workload, 1.0)
        for nbytes in (64 * KIB, MIB):
            what = f"local single get, {size_text(nbytes)}, p50"
            self._to_limit(f"{what}: / dict and memmove", "local", [RAYKV], DICT, get(nbytes), 1.25)
            self._to_peers(f"{what}: / best peer", "local", [RAYKV], get(nbytes), 1.0)
        for nbytes in BAR_SIZES:
            what = f"local single put, {size_text(nbytes)}, p50"
            self._to_peers(
                f"{what}: / best peer that crosses a process", "local", [RAYKV], put(nbytes), 1.0, crossing=True
            )

    def lookups(self) -> None:
        lookups = Lookups(self._results)
        rate, large = (lookups.value(RAYKV, rows, "keys_per_s") for rows in (1_000_000, 10_000_000))
        first, first_large = (lookups.value(RAYKV, rows, "first_keys_per_s") for rows in (1_000_000, 10_000_000))
        self.made.append(
            Bar(f"lookups, batches of {LOOKUP_BATCH}, 1 M rows", rate / 1e6 if rate else None, 5.0, unit=" M keys/s")
        )
        best = lookups.best_peer(1_000_000)
        against = self._against((f"{best[0]}, with 1,000,000 keys", best[1]) if best else None)
        fewer = [f"{row} has {held:,} only" for row, held in lookups.lines() if held < 1_000_000]
        self.made.append(
            Bar(
                "lookups, 1 M rows: / best peer that holds as many",
                rate / best[1] if rate and best else None,
                10.0,
                note="; ".join([against, *fewer]),
            )
        )
        self.made.append(
            Bar(
                "lookups, 10 M rows: time / 1 M rows",
                rate / large if rate and large else None,
                2.0,
                at_least=False,
                note=f"{first / first_large:.2f}x in the first batches after a pause" if first and first_large else "",
            )
        )
        single = lookups.value(RAYKV, 1_000_000, "single_p50_s")
        self.made.append(
            Bar("single exists, 1 M rows, p50", single * 1e6 if single else None, 2.0, at_least=False, unit=" us")
        )

    def remote(self) -> None:
        for nbytes in (MIB, 4 * MIB):
            what = f"remote batch get, {size_text(nbytes)}"
            workload = get(nbytes, BATCH)
            self._to_limit(f"{what}: / bare sockets", "remote", REMOTE_RAYKV, SOCKETS, workload, 0.85)
            self._to_peers(f"{what}: / best peer", "remote", REMOTE_RAYKV, workload, 1.3)
        what = "remote single get, 64 KiB, p50: / bare round trip"
        self._to_limit(what, "remote", REMOTE_RAYKV, SOCKETS, get(64 * KIB), 1.5)
        self._to_peers("remote batch get, 16 KiB: / best peer", "remote", REMOTE_RAYKV, get(16 * KIB, BATCH), 1.0)

    def mixed(self) -> None:
        for rate, what in mixed_rates(self._results).items():
            cells = [cell for cell in self._results["mixed"] if cell["row"] == RAYKV and cell.get("rate") == rate]
            ratios = [cell["read"]["p99_s"] / cell["alone"]["p99_s"] for cell in cells if cell["read"]["p99_s"]]
            name = f"mixed run, {what}: p99 of reads / of the same copies alone"
            self.made.append(Bar(name, statistics.median(ratios) if ratios else None, 2.0, at_least=False))
        frozen = self._results.get("frozen")
        hits = frozen["calls"] / (frozen["calls"] + frozen["misses"]) if frozen else None
        note = f"{frozen['calls']} reads, p99 {frozen['p99_s'] * 1e6:.0f} us" if frozen and frozen["calls"] else ""
        self.made.append(Bar("node stopped (SIGSTOP): share of reads that hit", hits, 1.0, unit="", note=note))

    def startup(self) -> None:
        times = self._results.get("startup", ())
        for field, what in (("first_line_s", "from its first line"), ("without_imports_s", "without imports")):
            value = statistics.median(each[field] for each in times) * 1e3 if times else None
            self.made.append(Bar(f"16 GiB node answers, {what}", value, 300.0, at_least=False, unit=" ms"))


def mixed_rates(results: dict[str, Any]) -> dict[int, str]:
    """Map the writer's rates, in objects per second, to their names in the tables. Rate 0 means full speed."""
    rates = sorted({cell["rate"] for cell in results["mixed"] if "rate" in cell})
    return {rate: f"{rate * 64 * KIB / 1e6:.0f} MB/s of writes" if rate else "writes at full speed" for rate in rates}


def median(runs: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return every bar with the median of its values in these runs."""
    made = []
    for bars in zip(*map(compute, runs), strict=True):
        values = [bar.value for bar in bars if bar.value is not None]
        spread = f"runs: {', '.join(f'{value:.2f}' for value in values)}" if len(values) > 1 else ""
        note = "; ".join(filter(None, [spread, bars[-1].note]))
        made.append(replace(bars[-1], value=statistics.median(values) if values else None, note=note))
    return made


def compute(results: dict[str, Any]) -> list[Bar]:
    """Compute all bars of one run."""
    bars = Bars(results)
    bars.local()
    bars.lookups()
    bars.remote()
    bars.mixed()
    bars.startup()
    return bars.made
