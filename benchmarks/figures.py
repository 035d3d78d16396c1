"""Medians and ratios of the measurements of a run."""

import statistics
from typing import Any

from benchmarks.lineup import LOOKUPS, RAYKV
from benchmarks.workloads import Workload


class Figures:
    """The measurements of a run, by phase, line and workload."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._rounds: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        self._errors: dict[tuple[str, str, str], str] = {}
        for cell in results["cells"]:
            key = (cell["phase"], cell["row"], cell["workload"])
            if "error" in cell:
                self._errors[key] = cell["error"]
            else:
                self._rounds.setdefault(key, {})[cell["round"]] = cell

    def rows(self, phase: str) -> set[str]:
        """Return the lines of a phase that have at least one figure."""
        return {row for known, row, _ in self._rounds if known == phase}

    def failed(self, phase: str, row: str, workload: Workload) -> bool:
        """Return whether a measurement of this line failed."""
        return (phase, row, workload.name) in self._errors

    def value(self, phase: str, row: str, workload: Workload, unit: str | None = None) -> float | None:
        """Return the median over the rounds; None if there is no figure. `unit` is `unit_of(workload)` by default."""
        rounds = self._rounds.get((phase, row, workload.name))
        unit = unit or unit_of(workload)
        return statistics.median(cell[unit] for cell in rounds.values()) if rounds else None

    def ratio(self, phase: str, row: str, to: str, workload: Workload) -> float | None:
        """Divide the figure of line `row` by that of line `to` in each round. Return the median of these ratios."""
        ours = self._rounds.get((phase, row, workload.name), {})
        theirs = self._rounds.get((phase, to, workload.name), {})
        unit = unit_of(workload)
        ratios = [ours[number][unit] / theirs[number][unit] for number in ours.keys() & theirs.keys()]
        return statistics.median(ratios) if ratios else None

    def best(self, phase: str, rows: list[str], workload: Workload) -> tuple[str, float] | None:
        """Return the line in `rows` with the best figure, and this figure; None if no line has a figure."""
        found = [(row, value) for row in rows if (value := self.value(phase, row, workload)) is not None]
        if not found:
            return None
        return (max if is_rate(workload) else min)(found, key=lambda each: each[1])


class Lookups:
    """Results of the lookups among very many keys: medians over the rounds, by line and number of keys."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for cell in results.get("lookups", ()):
            if "error" not in cell:
                self._cells.setdefault((cell.get("row", RAYKV), cell["rows"]), []).append(cell)

    def lines(self) -> list[tuple[str, int]]:
        """Return pairs of a line and the number of keys in its store, in the order of `LOOKUPS`."""
        order = [label for label, _ in LOOKUPS]
        return sorted(self._cells, key=lambda line: (order.index(line[0]), line[1]))

    def value(self, row: str, rows: int, field: str) -> float | None:
        """Return the median of a field; None if there is no figure.

        The fields are `keys_per_s` for all batches, `first_keys_per_s` for the first batches after a pause, and
        `single_p50_s` for single lookups.
        """
        found = [cell[field] for cell in self._cells.get((row, rows), ()) if field in cell]
        return statistics.median(found) if found else None

    def best_peer(self, rows: int) -> tuple[str, float] | None:
        """Return the fastest of the peers that hold this number of keys, and the peer's keys per second."""
        rates = [
            (row, rate)
            for row, held in self._cells
            if held == rows and row != RAYKV and (rate := self.value(row, rows, "keys_per_s")) is not None
        ]
        return max(rates, key=lambda each: each[1], default=None)


def is_rate(workload: Workload) -> bool:
    """Return whether the figure is a rate, so that higher is better. Otherwise it is a time."""
    return workload.batch > 1


def unit_of(workload: Workload) -> str:
    """Return the field of the figure: GB/s or lookups per second for batches, median seconds for single calls."""
    if workload.batch == 1:
        return "p50_s"
    return "gb_per_s" if workload.nbytes else "objects_per_s"
