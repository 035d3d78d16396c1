"""Measures how much is read from each chunk of a node, and finds the hottest prefixes.

A chunk counts as read when it is sent to another host. If the chunk is a replica, reads on this host count too: without
the replica, they would be reads from another host.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.eviction.base import live_parents
from raykv.memory.layout import Columns
from raykv.types import Rows

HALF_LIFE_S: Final = 4.0
"""After this time without reads, the rate of a chunk has fallen to a half."""
MAX_MEASURED: Final = 4096
"""The meter follows at most this many chunks: those with the highest load."""
LEAST_LOAD: Final = 1.0
"""A chunk with fewer bytes a second is not followed any more."""
MAX_WAITING: Final = 1 << 16
"""At most this many counted reads wait for the next `update`. Further reads are not counted."""

Floats = npt.NDArray[np.float64]


class Measured(NamedTuple):
    """The rate of each measured chunk: its row, the row's generation at that time, and reads a second."""

    rows: Rows
    generations: npt.NDArray[np.uint32]
    rates: Floats


class HeatMeter:
    """Rates of reads, decayed exponentially. `count` may be called by any thread, the other methods by one thread.

    Attributes:
        load: Bytes a second that are read, all chunks together.
    """

    def __init__(self) -> None:
        self._counted: list[tuple[Rows, npt.NDArray[np.uint32]]] = []
        self._waiting = 0
        self._measured = Measured(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0))
        self._frequencies: dict[int, int] = {}  # of the replicas' rows, at the last `update`
        self._updated_s = -math.inf
        self.load = 0.0

    def count(self, columns: Columns, rows: Rows) -> None:
        """Count one read for each row. Rows of -1 are ignored."""
        rows = rows[rows >= 0]
        if rows.size and self._waiting < MAX_WAITING:
            self._waiting += len(rows)
            self._counted.append((rows, columns.generation[rows]))

    def update(self, columns: Columns, replicas: Rows, *, now_s: float) -> None:
        """Compute the rates from the counted reads. `replicas`: rows of the replicas on this node."""
        passed_s, self._updated_s = now_s - self._updated_s, now_s
        nothing = np.empty(0, np.int32), np.empty(0, np.uint32)
        counted, self._counted, self._waiting = [nothing, *self._counted], [], 0
        local = self._reads_of(columns, replicas)
        if not 0 < passed_s < math.inf:
            return
        decay = 0.5 ** (passed_s / HALF_LIFE_S)
        gain = (1 - decay) / passed_s
        known = self._measured
        parts = [(known.rows, known.generations, decay * known.rates)]
        parts.append((replicas, columns.generation[replicas], gain * local))
        # The frequency of a replica counts the reads that were sent, too.
        sent, numbers = (np.concatenate(column) for column in zip(*counted, strict=True))
        parts.append((sent, numbers, np.where(np.isin(sent, replicas), 0.0, gain)))
        rows, generations, rates = (np.concatenate(column) for column in zip(*parts, strict=True))
        fresh = len(known.rows)
        self.load = decay * self.load + float((rates[fresh:] * columns.nbytes[rows[fresh:]]).sum())
        current = columns.generation[rows] == generations
        rows, where = np.unique(rows[current], return_inverse=True)
        rates = np.bincount(where, rates[current], len(rows)).astype(np.float64)
        loads = rates * columns.nbytes[rows]
        order = np.flatnonzero(loads >= LEAST_LOAD)
        order = order[np.argsort(-loads[order], kind="stable")][:MAX_MEASURED]
        self._measured = Measured(rows[order].astype(np.int32), columns.generation[rows[order]], rates[order])

    def _reads_of(self, columns: Columns, replicas: Rows) -> Floats:
        """Return the number of reads of each replica since the last call."""
        frequencies = columns.frequency[replicas].astype(np.int64).tolist()
        before = self._frequencies
        found = [max(0, now - before.get(row, now)) for row, now in zip(replicas.tolist(), frequencies, strict=True)]
        self._frequencies = dict(zip(replicas.tolist(), frequencies, strict=True))
        return np.array(found, np.float64)

    def loads(self, columns: Columns) -> tuple[Rows, Floats]:
        """Return the rows of the measured chunks that are still there, and the bytes a second read from each."""
        rows, generations, rates = self._measured
        here = columns.generation[rows] == generations
        return rows[here], rates[here] * columns.nbytes[rows[here]]


def prefixes_of(columns: Columns, rows: Rows, loads: Floats) -> list[list[int]]:
    """Divide measured chunks into prefixes: chains in which each chunk has at least half of its parent's load.

    Returns:
        For each prefix the indices of its chunks in `rows`, parents first. Prefixes with the highest load come first.
    """
    return group_prefixes(rows.tolist(), live_parents(columns, rows).tolist(), loads.tolist(), columns.depth[rows])


def group_prefixes(
    rows: Sequence[int], parents: Sequence[int], loads: Sequence[float], depths: Sequence[int] | npt.NDArray[np.uint32]
) -> list[list[int]]:
    """Divide chunks into prefixes; see `prefixes_of`. `parents`: the row of each chunk's parent; -1 if it has none."""
    place_of = {row: place for place, row in enumerate(rows)}
    prefix_of: dict[int, list[int]] = {}  # the last chunk of each prefix -> the prefix
    found: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: (int(depths[place]), -loads[place])):
        above = place_of.get(parents[place], -1)
        prefix = prefix_of.pop(above, None) if above >= 0 and 2 * loads[place] >= loads[above] else None
        if prefix is None:
            prefix = []
            found.append(prefix)
        prefix.append(place)
        prefix_of[place] = prefix
    found.sort(key=lambda prefix: -sum(loads[place] for place in prefix))
    return found
