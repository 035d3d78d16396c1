"""Hints for rows: eviction priority, ended session, expiry, retention, replica.

The table holds the expiry. The other hints are lost with the process: after a restart all rows have equal priority.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.config import HIGHEST_PRIORITY, NamespaceConfig
from raykv.memory.free_rows import lazy_zeros
from raykv.memory.layout import TICKS_PER_S
from raykv.memory.table import Table
from raykv.protocol.hints import require_hints
from raykv.types import Bits, Hints, KeyArray, Rows

ENDED: Final = -HIGHEST_PRIORITY - 1
"""Rank of a chunk whose session has ended."""
REPLICA: Final = -HIGHEST_PRIORITY - 2
"""Rank of a replica, which another node holds too (`raykv.node.replicas`)."""
EXPIRED: Final = -HIGHEST_PRIORITY - 3
"""Rank of a chunk that has expired."""
NO_CONFIG: Final = NamespaceConfig()


class RowHints:
    """Hints of rows. The configs of quota groups give the defaults for new rows.

    `active`: whether any row may have hints. If not, all rows have equal rank.
    """

    def __init__(self, table: Table, *, active: bool) -> None:
        self._table, self.active = table, active
        self._priority = lazy_zeros(table.rows, np.int8)
        self._ended = lazy_zeros(table.rows, np.uint32)  # tick at which the session ended; 0: not ended
        self._retained = lazy_zeros(table.rows, np.int8)  # minimum of the priority until `_retained_until`
        self._retained_until = lazy_zeros(table.rows, np.uint32)  # tick; 0: not retained
        self._replica = lazy_zeros(table.rows, np.int8)
        self._configs: dict[int, NamespaceConfig] = {}

    def configure(self, group: int, config: NamespaceConfig) -> None:
        """Set the defaults for chunks that this quota group stores from now on."""
        self._configs[group] = config
        self.active = self.active or config.ttl_s is not None or default_priority(config) != 0

    def config(self, group: int) -> NamespaceConfig:
        """Return the config of a quota group, or the default config."""
        return self._configs.get(group, NO_CONFIG)

    def set_new(self, rows: Rows, hints: Hints, group: int, now: int) -> None:
        """Set the hints of rows that get new chunks of one quota group."""
        if not (self.active or hints.ttl_s or hints.priority):
            return
        self.active, config = True, self.config(group)
        self._table.columns.expires[rows] = expiry(now, hints.ttl_s or config.ttl_s)
        self._priority[rows] = hints.priority or default_priority(config)
        self._ended[rows] = 0
        self._retained_until[rows] = 0
        self._replica[rows] = 0

    def set_replica(self, rows: Rows, *, replica: bool) -> None:
        """Mark chunks as replicas, or as ordinary chunks again. Replicas are evicted first, and not demoted."""
        self.active = True
        self._replica[rows] = replica

    def replicas(self, rows: Rows) -> Bits:
        """Return which of these rows are replicas."""
        found: Bits = self._replica[rows] != 0
        return found

    def update(self, rows: Rows, now: int, ttl_s: float | None, priority: int | None, *, ended: bool | None) -> None:
        """Change hints of rows. A hint of None stays as it is. A `ttl_s` of 0 means no expiry.

        `ended`: True means that the session of the rows has ended, until a row is read again. False means that the
        session goes on.
        """
        self.active = True
        if ttl_s is not None:
            self._table.columns.expires[rows] = expiry(now, ttl_s)
        if priority is not None:
            self._priority[rows] = priority
        if ended is not None:
            self._ended[rows] = now if ended else 0

    def priorities(self, rows: Rows) -> list[int]:
        """Return the priority of each row, without retentions."""
        found: list[int] = self._priority[rows].tolist()
        return found

    def retain(self, keys: KeyArray, ttl_s: float, priority: int, *, now_s: float) -> int:
        """Keep chunks for `ttl_s` seconds: until then they do not expire, and have at least this priority.

        An expiry never becomes earlier, and a priority never becomes lower. If a chunk is retained twice, the retention
        with the higher priority counts. When the retention ends, the chunk has the same priority as before. The
        session of the chunks counts as not ended.

        Returns:
            The number of these chunks that are stored.

        Raises:
            UsageError: A value is out of range.
        """
        require_hints(ttl_s, priority)
        now = self._table.ticks(now_s)
        rows, _ = self._table.find_ready(keys, now)
        rows = rows[rows >= 0]
        self.active, until = True, expiry(now, ttl_s)
        expires, ends = self._table.columns.expires, self._retained_until[rows]
        expires[rows] = np.where(expires[rows] > 0, np.maximum(expires[rows], until), 0)
        higher = (ends <= now) | (self._retained[rows] < priority)
        longer = ~higher & (self._retained[rows] == priority) & (ends < until)
        self._retained[rows[higher]] = priority
        self._retained_until[rows[higher | longer]] = until
        self._ended[rows] = 0
        return len(rows)

    def ranks(self, rows: Rows, now: int) -> npt.NDArray[np.int64]:
        """Return one rank per row. Rows of lower rank are evicted first, whatever their scores."""
        if not self.active:
            return np.zeros(len(rows), np.int64)
        columns = self._table.columns
        ranks: npt.NDArray[np.int64] = self._priority[rows].astype(np.int64)
        retained = self._retained_until[rows] > now
        ranks[retained] = np.maximum(ranks[retained], self._retained[rows[retained]])
        ended = self._ended[rows]
        ranks[(ended > 0) & (columns.accessed[rows] <= ended)] = ENDED
        ranks[self.replicas(rows)] = REPLICA
        expires = columns.expires[rows]
        ranks[(expires > 0) & (expires <= now)] = EXPIRED
        return ranks

    def below(self, rows: Rows, now: int) -> tuple[Bits, npt.NDArray[np.int64]]:
        """Return which rows may be copied to tiers below memory, and the priority of each row for `Admission.admit`."""
        ranks, may = self.ranks(rows, now), ~self.replicas(rows)
        priorities = np.where(ranks == ENDED, 1, np.sign(ranks))
        groups = self._table.columns.group[rows]
        for group, config in self._configs.items():
            if config.tiers != "both":
                mine = groups == group
                may[mine] &= config.tiers == "ssd"
                if config.tiers == "ssd":
                    priorities[mine & (ranks != EXPIRED)] = 1
        return may, priorities


def default_priority(config: NamespaceConfig) -> int:
    """Return the priority of new chunks: the lowest with `tiers` "ssd", because memory then only buffers the chunks."""
    return -HIGHEST_PRIORITY if config.tiers == "ssd" else config.priority


def expiry(now: int, ttl_s: float | None) -> int:
    """Return the tick of the expiry, at least one tick from now. If `ttl_s` is None or 0, return 0 (never)."""
    return now + max(1, round(ttl_s * TICKS_PER_S)) if ttl_s else 0
