"""Eviction policies by name, imported on first use."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from raykv.errors import ConfigError
from raykv.eviction.base import Policy, Scores, empty_columns
from raykv.memory.layout import Columns
from raykv.types import Rows

Score = Callable[[Columns, Rows, int], Scores]
"""A function of columns, rows and time in ticks. It returns one score per row. The row with the lowest score is evicted
first."""

POLICIES = {
    "leaf_lru": "raykv.eviction.by_columns:LeafLRU",
    "lru": "raykv.eviction.by_columns:LRU",
    "lfu": "raykv.eviction.by_columns:LFU",
    "fifo": "raykv.eviction.by_columns:FIFO",
    "ttl": "raykv.eviction.by_columns:TTL",
    "arc": "raykv.eviction.arc:ARC",
    "s3fifo": "raykv.eviction.s3fifo:S3FIFO",
    "density": "raykv.eviction.density:HitDensity",
}


def policy(name: str | Callable[..., Any]) -> Policy:
    """Make a policy.

    Args:
        name: A name in POLICIES, or a user's policy. A user's policy is a subclass of `Policy`, or a function of type
            `Score`. It is given as an object, or as text "module:attribute".

    Raises:
        ConfigError: There is no such policy, or the object is not a policy.
    """
    if not isinstance(name, str):
        return _made_of(name, getattr(name, "__qualname__", repr(name)))
    if name not in POLICIES and ":" not in name:
        raise ConfigError(
            f"field 'policy': unknown policy {name!r}; there are: {', '.join(sorted(POLICIES))}, or 'module:attribute'"
        )
    module, _, attribute = POLICIES.get(name, name).partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"field 'policy': {name!r} cannot be imported: {error}") from error
    return _made_of(found, name)


def _made_of(found: Any, name: str) -> Policy:
    if isinstance(found, type) and issubclass(found, Policy):
        made: Policy = found()
        made.name = made.name or name
        return made
    if isinstance(found, type) or not callable(found):
        raise ConfigError(f"field 'policy': {name} is neither a subclass of Policy nor a function")
    return UserPolicy(found, name)


class UserPolicy(Policy):
    """A user's score function as a policy. Evicts the row with the lowest score among those without children."""

    leaf_first = True
    drifts = True

    def __init__(self, function: Score, name: str) -> None:
        """Try the function on a few rows. Raises ConfigError if the function raises or does not return numbers."""
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
