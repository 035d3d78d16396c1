"""The policies of one node: one for all quota groups, and others for those that have their own."""

import logging
from collections.abc import Callable, Iterator

import numpy as np

from raykv.eviction.base import Policy, Ranks, upcoming, victims, victims_upward
from raykv.eviction.leaf_lru import LeafLRU
from raykv.eviction.user_policy import UserPolicy
from raykv.memory.table import Columns
from raykv.types import Rows

log = logging.getLogger(__name__)

MayGo = Callable[[int], bool]


class Policies:
    """Chooses victims by each quota group's policy, and tells each policy of the chunks that come and go.

    Where several policies meet, their scores mean nothing to each other: each gives as many victims as its quota groups
    have candidates.

    Attributes:
        default: The policy for all quota groups that have none of their own.
        ranks: Which rows go before others, whatever the policies say; None while all are alike.
        remember: Whether any of them remembers something of the chunks that came.
    """

    def __init__(self, default: Policy, columns: Columns) -> None:
        self.default, self._columns = default, columns
        self.ranks: Ranks | None = None
        self._own: dict[int, Policy] = {}
        self._note()

    def use(self, group: int | None, chosen: Policy | None, here: Rows, now: int) -> None:
        """Another policy from now on. It goes on with what is here; what the one before had learnt is lost.

        Args:
            quota group: None: for all quota groups that have no policy of their own.
            chosen: A new one. None: the quota group's own one ends, and the one for all takes over.
            here: All rows with a chunk, parents before children.
        """
        columns = self._columns
        groups = columns.namespace[here]
        mine = here[~np.isin(groups, list(self._own)) if group is None else groups == group]
        before = self.default if group is None else self._own.pop(group, self.default)
        before.went(columns, mine, now, evicted=False)
        if group is None:
            assert chosen is not None
            self.default = chosen
        elif chosen is not None:
            self._own[group] = chosen
        self._note()
        (chosen or self.default).came(columns, mine, now)

    def came(self, rows: Rows, now: int) -> None:
        """These rows hold new chunks that have their place in a chain, parents before children."""
        if self.remember:
            for policy, mine in self._split(rows):
                policy.came(self._columns, mine, now)

    def came_one(self, row: int, now: int) -> None:
        """The same for one."""
        if self.remember:
            self.came(np.array([row], np.int32), now)

    def told(self, rows: Rows, output_tokens: int, now: int) -> None:
        """The request that read or stored these rows is done, and made so many tokens."""
        if self.remember:
            for policy, mine in self._split(rows):
                policy.told(self._columns, mine, output_tokens, now)

    def went(self, rows: Rows, now: int, *, evicted: bool) -> None:
        """These rows' chunks are about to go."""
        if self.remember:
            for policy, mine in self._split(rows):
                policy.went(self._columns, mine, now, evicted=evicted)

    def names(self, rows: Rows) -> str | list[str]:
        """By which policy each of the rows would go; one name if it is the same for all."""
        if not self._own:
            return self.default.name
        return [self._own.get(group, self.default).name for group in self._columns.namespace[rows].tolist()]

    def own(self, group: int) -> str | None:
        """Name of an quota group's own policy, if it has one."""
        return self._own[group].name if group in self._own else None

    def name(self, group: int) -> str:
        """Of an quota group's policy."""
        return self._own.get(group, self.default).name

    def victims(self, candidates: Rows, count: int, now: int, may_go: MayGo | None = None) -> Rows:
        """Choose up to `count` rows to evict; fewer only when no more may go.

        Args:
            candidates: See `base.victims`.
            may_go: If the candidates are a mere sample: see `base.victims_upward`.
        """
        if not self._own:
            return self._choose(self.default, candidates, count, now, may_go)
        shares, chosen = list(self._split(candidates)), []
        left, among = max(0, count), len(candidates)
        for policy, mine in shares:
            chosen.append(self._choose(policy, mine, -(-left * len(mine) // among), now, may_go))
            left, among = left - len(chosen[-1]), among - len(mine)
        for place, (policy, mine) in enumerate(shares):
            if left > 0:  # some had fewer that may go than their share
                more = self._choose(policy, mine, len(chosen[place]) + left, now, may_go)
                left, chosen[place] = left - len(more) + len(chosen[place]), more
        return np.concatenate(chosen) if chosen else candidates[:0]

    def upcoming(self, candidates: Rows, count: int, now: int) -> Rows:
        """Who would go first as things are; see `base.upcoming`."""
        if not candidates.size:
            return candidates

        def first(mine: Rows) -> Callable[[Policy], Rows]:
            share = -(-count * len(mine) // len(candidates))
            return lambda policy: upcoming(policy, self._columns, mine, share, now, self.ranks)

        found = [self._ask(policy, first(mine)) for policy, mine in list(self._split(candidates))]
        return np.concatenate(found)[:count] if found else candidates[:0]

    def _choose(self, policy: Policy, candidates: Rows, count: int, now: int, may_go: MayGo | None) -> Rows:
        def choose(policy: Policy) -> Rows:
            if may_go is None or not policy.leaf_first:
                return victims(policy, self._columns, candidates, count, now, self.ranks)
            return victims_upward(policy, self._columns, candidates, count, now, may_go, self.ranks)

        return self._ask(policy, choose)

    def _ask(self, policy: Policy, question: Callable[[Policy], Rows]) -> Rows:
        """Ask a policy. One of a user's own that fails does no harm: it is told of once, and replaced."""
        try:
            return question(policy)
        except Exception:
            if not isinstance(policy, UserPolicy):
                raise
            log.exception("eviction policy %s failed; leaf_lru takes its place", policy.name)
            instead = LeafLRU()
            instead.name = "leaf_lru"
            self.default = instead if self.default is policy else self.default
            self._own = {group: instead if own is policy else own for group, own in self._own.items()}
            return question(instead)

    def _split(self, rows: Rows) -> Iterator[tuple[Policy, Rows]]:
        if not self._own:
            yield self.default, rows
            return
        groups = self._columns.namespace[rows]
        others = np.ones(len(rows), np.bool_)
        for group, policy in self._own.items():
            mine = groups == group
            others &= ~mine
            if mine.any():
                yield policy, rows[mine]
        if others.any():
            yield self.default, rows[others]

    def _note(self) -> None:
        everyone = [self.default, *self._own.values()]
        self.remember = any(type(policy).came is not Policy.came for policy in everyone)
