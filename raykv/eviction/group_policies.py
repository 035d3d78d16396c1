"""The policies of one node: a default policy, and the policies of quota groups that have their own."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np

from raykv.config import POLICY_NAMES
from raykv.eviction.base import MayGo, Policy, Ranks, upcoming, victims
from raykv.eviction.by_columns import LeafLRU
from raykv.memory.layout import Columns
from raykv.types import Rows

log = logging.getLogger(__name__)

T = TypeVar("T")


class GroupPolicies:
    """Chooses victims by the policy of each quota group. Reports inserts, removals and ended requests to the policies.

    Scores of different policies cannot be compared. So each policy chooses a number of victims in proportion to the
    number of its candidates. If a user's policy raises an exception, the node logs the exception, and `leaf_lru`
    replaces the policy.

    Attributes:
        default: The policy of all quota groups that have no policy of their own.
    """

    def __init__(self, default: Policy, columns: Columns, ranks: Ranks | None = None) -> None:
        """`ranks` gives a rank to each row. Rows of lower rank are evicted first, whatever their scores."""
        self.default, self._columns, self._ranks = default, columns, ranks
        self._own: dict[int, Policy] = {}

    def use(self, group: int | None, policy: Policy | None, rows_in_order: Rows, now: int) -> None:
        """Replace a policy. The new policy starts with the chunks that are stored now. The old policy's state is lost.

        Args:
            group: The quota group whose policy is replaced. None: replace the default policy.
            policy: The new policy. None: the group uses the default policy from now on.
            rows_in_order: All rows with a chunk, parents before children.
            now: Time in ticks.
        """
        columns = self._columns
        groups = columns.group[rows_in_order]
        mine = rows_in_order[~np.isin(groups, list(self._own)) if group is None else groups == group]
        before = self.default if group is None else self._own.pop(group, self.default)
        self._ask(before, lambda asked: asked.on_remove(columns, mine, now, evicted=False))
        if group is not None and policy is not None:
            self._own[group] = policy
        elif policy is not None:
            self.default = policy
        self._ask(policy or self.default, lambda asked: asked.on_insert(columns, mine, now))

    def on_insert(self, rows: Rows, now: int) -> None:
        self._report(rows, lambda policy, mine: policy.on_insert(self._columns, mine, now))

    def on_request_done(self, rows: Rows, output_tokens: int, now: int) -> None:
        self._report(rows, lambda policy, mine: policy.on_request_done(self._columns, mine, output_tokens, now))

    def on_remove(self, rows: Rows, now: int, *, evicted: bool) -> None:
        self._report(rows, lambda policy, mine: policy.on_remove(self._columns, mine, now, evicted=evicted))

    def names(self, rows: Rows) -> str | list[str]:
        if not self._own:
            return self.default.name
        return [self.name(group) for group in self._columns.group[rows].tolist()]

    def own(self, group: int) -> str | None:
        return self._own[group].name if group in self._own else None

    def name(self, group: int) -> str:
        return self._own.get(group, self.default).name

    def victims(self, rows: Rows, count: int, now: int, may_go: MayGo | None = None) -> Rows:
        """Choose up to `count` of these rows to evict; see `base.victims`."""
        return self._choose(victims, rows, count, now, self._ranks, may_go)

    def upcoming(self, rows: Rows, count: int, now: int, *, exact: bool) -> Rows:
        """Return up to `count` of these rows that would be evicted first; see `base.upcoming`."""
        return self._choose(partial(upcoming, exact=exact), rows, count, now, self._ranks)

    def _choose(self, rule: Callable[..., Rows], rows: Rows, count: int, *more: Any) -> Rows:
        chosen, left, among = [rows[:0]], max(0, count), len(rows)
        for policy, mine in self._by_policy(rows):
            share = -(-left * len(mine) // max(1, among))
            chosen.append(self._ask(policy, rule, self._columns, mine, share, *more))
            left, among = left - len(chosen[-1]), among - len(mine)
        return np.concatenate(chosen)

    def _report(self, rows: Rows, report: Callable[[Policy, Rows], None]) -> None:
        for policy, mine in self._by_policy(rows):
            self._ask(policy, report, mine)

    def _ask(self, policy: Policy, question: Callable[..., T], *arguments: Any) -> T:
        """Call a policy. If a user's policy raises, log the exception, and use `leaf_lru` instead from now on."""
        try:
            return question(policy, *arguments)
        except Exception:
            if policy.name in POLICY_NAMES:
                raise
            log.exception("eviction policy %s failed; leaf_lru takes its place", policy.name)
            instead = LeafLRU()
            instead.name = "leaf_lru"
            self.default = instead if self.default is policy else self.default
            self._own = {group: instead if own is policy else own for group, own in self._own.items()}
            return question(instead, *arguments)

    def _by_policy(self, rows: Rows) -> Iterator[tuple[Policy, Rows]]:
        if not self._own:
            yield self.default, rows
            return
        groups = self._columns.group[rows]
        others = np.ones(len(rows), np.bool_)
        for group, policy in self._own.items():
            mine = groups == group
            others &= ~mine
            if mine.any():
                yield policy, rows[mine]
        if others.any():
            yield self.default, rows[others]
