"""The quota groups of one node, and their numbers. A quota group is a namespace without salt and adapter.

Chunks of one group share a quota and a policy. The list of groups is in the chunk table, so it outlives the process.
"""

from collections.abc import Callable

import numpy as np

from raykv.errors import CapacityError, LostError, UsageError
from raykv.memory.layout import MAX_NAMESPACES, NAMESPACE_TEXT_NBYTES
from raykv.memory.table import Table
from raykv.protocol.namespace import Namespace


class QuotaGroups:
    """The groups that are open on one node.

    Attributes:
        has_tiers: Whether the node has tiers below memory. Their chunks have the group's number, too.
    """

    def __init__(self, table: Table, release: Callable[[int], bool] = lambda number: False) -> None:
        """Read the list of groups from the table. Raises LostError if the list is damaged.

        `release` is called before a group's number is given to another group. `release` returns False while rows of the
        old group remain.
        """
        self._table, self._namespaces, self._release = table, table.namespaces, release
        self._retired: set[int] = set()
        self._listed: set[int] = set()
        self.has_tiers = False
        try:
            self._numbers = {
                Namespace.model_validate_json(text).digest: number for number, text in table.texts().items()
            }
        except ValueError as error:
            raise LostError(f"{table.memory.path} is damaged: an entry of its list is not a namespace") from error

    def open(self, namespace: Namespace) -> int:
        """Return the number of this namespace's quota group. If the group is not in the list, add it.

        Raises:
            CapacityError: All numbers are taken by groups that have chunks or a config.
            UsageError: The namespace's fields are too long.
        """
        number = self._numbers.get(namespace.group.digest)
        return self._enter(namespace.group) if number is None else number

    def _enter(self, group: Namespace) -> int:
        text = group.model_dump_json(exclude_defaults=True).encode()
        if len(text) > NAMESPACE_TEXT_NBYTES:
            raise UsageError(
                f"namespace of {len(text)} bytes as JSON, at most {NAMESPACE_TEXT_NBYTES}: shorten a field"
            )
        free = np.flatnonzero(~self._table.known_namespaces)
        number = int(free[0]) if free.size else self._reclaim()
        if number < 0:
            raise CapacityError(f"all {MAX_NAMESPACES} namespaces of this node are in use; drop one")
        self._namespaces["capacity"][number] = self._table.spread[number] = 0
        self._namespaces["text"][number] = text
        self._numbers[group.digest] = number
        return number

    def find(self, digest: bytes) -> int | None:
        return self._numbers.get(digest)

    def number(self, digest: bytes) -> int:
        """Return the number of an open quota group. Raises LostError if the group is not in the list."""
        number = self._numbers.get(digest)
        if number is None:
            raise LostError("this namespace is not open on this node")
        return number

    def retire(self, number: int, *, retired: bool = True) -> None:
        """Record that a quota group was dropped, so that another group may get its number.

        With `retired` False, the group is in the cluster's list of namespaces, and keeps its number.
        """
        (self._retired.add if retired else self._retired.discard)(number)
        (self._listed.discard if retired else self._listed.add)(number)

    def _reclaim(self) -> int:
        """Free the number of a group that has no rows: a dropped group, or else a group that nobody configured.

        On a node with tiers, only dropped groups are tried, because tiers may have chunks of all others.
        """
        others = set() if self.has_tiers else set(self._numbers.values()) - self._retired - self._listed
        for number in (*sorted(self._retired), *sorted(others)):
            if self._release(number):
                self._retired.discard(number)
                self._numbers = {digest: other for digest, other in self._numbers.items() if other != number}
                self._namespaces["text"][number] = b""
                return number
        return -1
