"""What is wanted for rows beyond what the table says: who goes before others, and when chunks expire.

Kept by the node's process alone, but for the expiry: after a restart all rows are alike again.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import HIGHEST_PRIORITY, NamespaceConfig
from raykv.memory.rows import lazy_zeros
from raykv.memory.table import TICKS_PER_S, Table
from raykv.types import Bits, Rows

Ranks = npt.NDArray[np.int64]

ENDED: Final = -HIGHEST_PRIORITY - 1
"""Rank of a chunk whose session has ended."""
EXPIRED: Final = -HIGHEST_PRIORITY - 2


class RowHints:
    """Priorities and expiry of rows, and what quota groups say of them.

    Attributes:
        active: Whether any row may differ from the others; if not, nothing here costs anything.
        expiring: Whether any may expire.
    """

    def __init__(self, table: Table, *, expiring: bool) -> None:
        """Start with rows that are alike, but for those that expire, if there are any."""
        self._table = table
        self._priority = lazy_zeros(table.rows, np.int8)
        self._ended = lazy_zeros(table.rows, np.uint32)  # in ticks; 0: the session goes on
        self._ttl: dict[int, int] = {}  # ticks by quota group
        self._usual: dict[int, int] = {}  # priority by quota group
        self._tiers: dict[int, str] = {}  # by quota group, of those that say
        self.expiring = self.active = expiring

    def configure(self, group: int, config: NamespaceConfig) -> None:
        """What holds for chunks of this quota group that come from now on."""
        self._ttl.pop(group, None)
        self._usual.pop(group, None)
        self._tiers.pop(group, None)
        if config.tiers != "both":
            self._tiers[group] = config.tiers
        if config.ttl_s is not None:
            self._ttl[group] = ticks_of(config.ttl_s)
        if config.tiers == "ssd":
            self._usual[group] = -HIGHEST_PRIORITY  # memory is only on their way
        elif config.priority:
            self._usual[group] = config.priority
        self.expiring = self.expiring or bool(self._ttl)
        self.active = self.active or bool(self._ttl or self._usual)

    def came(self, rows: Rows, now: int, ttl_s: float = 0.0, priority: int = 0) -> None:
        """These rows hold new chunks of one quota group.

        Args:
            now: In ticks.
            ttl_s, priority: What their writer said; 0: nothing, so what the quota group says holds.
        """
        if not (self.active or ttl_s or priority) or not rows.size:
            return
        group = int(self._table.columns.namespace[rows[0]])
        ticks = ticks_of(ttl_s) if ttl_s else self._ttl.get(group, 0)
        if ticks:
            self.expiring = True
        self.active = True
        self._table.columns.expires[rows] = now + ticks if ticks else 0
        self._priority[rows] = priority or self._usual.get(group, 0)
        self._ended[rows] = 0

    def came_one(self, row: int, now: int, ttl_s: float = 0.0, priority: int = 0) -> None:
        """The same for one."""
        if self.active or ttl_s or priority:
            self.came(np.array([row], np.int32), now, ttl_s, priority)

    def hint(self, rows: Rows, now: int, ttl_s: float | None, priority: int | None, *, ended: bool | None) -> None:
        """Somebody knows more of these chunks.

        Args:
            ttl_s: They expire so long from now; 0 for never. None: as before.
            priority: None: as before.
            ended: Whether nobody is likely to read them soon; a read undoes that. None: as before.
        """
        self.active = True
        if ttl_s is not None:
            self.expiring = self.expiring or bool(ttl_s)
            self._table.columns.expires[rows] = now + ticks_of(ttl_s) if ttl_s else 0
        if priority is not None:
            self._priority[rows] = priority
        if ended is not None:
            self._ended[rows] = now if ended else 0

    def ranks(self, rows: Rows, now: int) -> Ranks:
        """One a row: whatever the policy says, the lower go first."""
        columns = self._table.columns
        ranks: Ranks = self._priority[rows].astype(np.int64)
        ended = self._ended[rows]
        ranks[(ended > 0) & (columns.accessed[rows] <= ended)] = ENDED
        expires = columns.expires[rows]
        ranks[(expires > 0) & (expires <= now)] = EXPIRED
        return ranks

    def below(self, rows: Rows, now: int) -> tuple[Bits, Ranks | None]:
        """Which rows may go below memory, and a hint for each, as `Admission.admit` takes it."""
        may = np.ones(len(rows), np.bool_)
        if not (self.active or self._tiers):
            return may, None
        hints = np.sign(ranks := self.ranks(rows, now))
        hints[ranks == ENDED] = 1
        groups = self._table.columns.namespace[rows]
        for group, tiers in self._tiers.items():
            mine = groups == group
            may[mine] = tiers != "dram"
            if tiers == "ssd":
                hints[mine & (ranks != EXPIRED)] = 1  # memory is only on their way
        return may, hints


def ticks_of(seconds: float) -> int:
    """A length of time in the table's units, at least one."""
    return max(1, round(seconds * TICKS_PER_S))
