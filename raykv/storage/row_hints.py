"""Hints for rows: eviction priority, ended session, expiry.

The expiry is in the table. The other hints end with the process: after a restart all rows have the same priority.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import HIGHEST_PRIORITY, NamespaceConfig
from raykv.memory.free_rows import lazy_zeros
from raykv.memory.layout import TICKS_PER_S
from raykv.memory.table import Table
from raykv.types import Bits, Hints, Rows

Ranks = npt.NDArray[np.int64]

ENDED: Final = -HIGHEST_PRIORITY - 1
"""Rank of a chunk whose session has ended."""
EXPIRED: Final = -HIGHEST_PRIORITY - 2
"""Rank of a chunk that has expired."""


class RowHints:
    """Hints of rows, and default hints of quota groups.

    Attributes:
        active: Whether any row may have hints. If not, the methods cost nothing.
        expiring: Whether any row may expire.
    """

    def __init__(self, table: Table, *, expiring: bool) -> None:
        self._table = table
        self._priority = lazy_zeros(table.rows, np.int8)
        self._ended = lazy_zeros(table.rows, np.uint32)  # tick at which the session ended; 0: not ended
        self._group_ttl: dict[int, int] = {}  # in ticks
        self._group_priority: dict[int, int] = {}
        self._group_tiers: dict[int, str] = {}
        self.expiring = self.active = expiring

    def configure(self, group: int, config: NamespaceConfig) -> None:
        """Set the defaults for chunks that this quota group stores from now on."""
        for defaults in (self._group_ttl, self._group_priority, self._group_tiers):
            defaults.pop(group, None)
        if config.tiers != "both":
            self._group_tiers[group] = config.tiers
        if config.ttl_s is not None:
            self._group_ttl[group] = ticks_of(config.ttl_s)
        if config.tiers == "ssd":
            self._group_priority[group] = -HIGHEST_PRIORITY  # these chunks are in memory only until the SSD has them
        elif config.priority:
            self._group_priority[group] = config.priority
        self.expiring = self.expiring or bool(self._group_ttl)
        self.active = self.active or bool(self._group_ttl or self._group_priority)

    def set_new(self, rows: Rows, hints: Hints, group: int, now: int) -> None:
        """Set the hints of rows that get new chunks of one quota group. The group's defaults fill missing hints."""
        if not (self.active or hints.ttl_s or hints.priority):
            return
        ticks = ticks_of(hints.ttl_s) if hints.ttl_s else self._group_ttl.get(group, 0)
        self.active, self.expiring = True, self.expiring or bool(ticks)
        self._table.columns.expires[rows] = now + ticks if ticks else 0
        self._priority[rows] = hints.priority or self._group_priority.get(group, 0)
        self._ended[rows] = 0

    def update(self, rows: Rows, now: int, ttl_s: float | None, priority: int | None, *, ended: bool | None) -> None:
        """Change the hints of rows. None: unchanged. `ttl_s` 0: never expires. A later read of a row undoes `ended`."""
        self.active = True
        if ttl_s is not None:
            self.expiring = self.expiring or bool(ttl_s)
            self._table.columns.expires[rows] = now + ticks_of(ttl_s) if ttl_s else 0
        if priority is not None:
            self._priority[rows] = priority
        if ended is not None:
            self._ended[rows] = now if ended else 0

    def ranks(self, rows: Rows, now: int) -> Ranks:
        """One rank per row. Rows of lower rank are evicted first, whatever scores the policy gives."""
        columns = self._table.columns
        ranks: Ranks = self._priority[rows].astype(np.int64)
        ended = self._ended[rows]
        ranks[(ended > 0) & (columns.accessed[rows] <= ended)] = ENDED
        expires = columns.expires[rows]
        ranks[(expires > 0) & (expires <= now)] = EXPIRED
        return ranks

    def below(self, rows: Rows, now: int) -> tuple[Bits, Ranks | None]:
        """Which rows may be copied to the tiers below memory, and the rows' priorities for `Admission.admit`.

        The priorities are None if no row has hints.
        """
        may = np.ones(len(rows), np.bool_)
        if not (self.active or self._group_tiers):
            return may, None
        ranks = self.ranks(rows, now)
        priorities = np.sign(ranks)
        priorities[ranks == ENDED] = 1
        groups = self._table.columns.group[rows]
        for group, tiers in self._group_tiers.items():
            mine = groups == group
            may[mine] = tiers != "dram"
            if tiers == "ssd":
                priorities[mine & (ranks != EXPIRED)] = 1
        return may, priorities


def ticks_of(seconds: float) -> int:
    return max(1, round(seconds * TICKS_PER_S))
