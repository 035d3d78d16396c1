"""A policy that a user supplies as a scoring function."""

from collections.abc import Callable

import numpy as np

from raykv.errors import ConfigError
from raykv.eviction.base import Policy, Scores, empty_columns
from raykv.memory.layout import Columns
from raykv.types import Rows

Score = Callable[[Columns, Rows, int], Scores]
"""Function of columns, rows and the time in ticks. Returns one score per row; the lowest score is evicted first."""


class UserPolicy(Policy):
    """Evicts the rows with the lowest scores, leaves first."""

    leaf_first = True
    drifts = True

    def __init__(self, function: Score, name: str) -> None:
        """Try the function on a few rows. Raises ConfigError: The function raises or returns no numbers."""
        self._function, self.name = function, name
        columns, rows = empty_columns(4), np.array([0, 2], np.int32)
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
                f"field 'policy': {self.name} returned {scores.dtype} of shape {scores.shape} for {len(rows)} rows; "
                "it must return one number per row"
            )
        return np.nan_to_num(scores, nan=-np.inf) if scores.dtype.kind == "f" else scores
