"""A policy that its user wrote: a function from columns to scores."""

from collections.abc import Callable

import numpy as np

from raykv.errors import ConfigError
from raykv.eviction.base import Policy, Scores
from raykv.memory.table import COLUMNS, RECORD, Columns
from raykv.types import Rows

Score = Callable[[Columns, Rows, int], Scores]
"""Scores of rows from their columns and the time in ticks, lowest first."""


class UserPolicy(Policy):
    """Whatever the function scores lowest goes first, leaves first.

    Attributes:
        name: What to call it in reports.
    """

    leaf_first = True
    drifts = True

    def __init__(self, function: Score, name: str) -> None:
        """Try the function on a few rows.

        Raises:
            ConfigError: It fails, or gives something other than a number a row.
        """
        self._function, self.name = function, name
        kinds = {field: RECORD[field].str for field in RECORD.names or ()} | COLUMNS
        columns, rows = Columns({field: np.ones(4, kind) for field, kind in kinds.items()}), np.array([0, 2], np.int32)
        for some in (rows, rows[:0]):
            try:
                self.score(columns, some, 2)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"field 'policy': {name} failed on {len(some)} rows: {error!r}") from error

    def score(self, columns: Columns, rows: Rows, now: int) -> Scores:
        scores = np.asarray(self._function(columns, rows, now))
        if scores.shape != rows.shape or scores.dtype.kind not in "biuf":
            raise ConfigError(
                f"field 'policy': {self.name} gave {scores.dtype} of shape {scores.shape} for {len(rows)} rows; "
                "it must give one number a row"
            )
        return np.nan_to_num(scores, nan=-np.inf) if scores.dtype.kind == "f" else scores
