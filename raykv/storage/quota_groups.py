"""The quota groups of one node: under which number each namespace's chunks count, and how much room they may take.

They lie in the table, so that they outlive the process.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from raykv.errors import CapacityError, LostError, UsageError
from raykv.memory.table import MAX_NAMESPACES, NAMESPACE_TEXT_NBYTES, Table
from raykv.protocol.namespace import Namespace


class QuotaGroups:
    """Numbers of the quota groups in a table's list.

    Attributes:
        let_go: Asked whether nothing counts under a number, so that another quota group may have it.
    """

    def __init__(self, table: Table) -> None:
        """Read the list.

        Raises:
            LostError: It is damaged.
        """
        self._table, self._namespaces = table, table.namespaces
        self._retired: set[int] = set()
        self.let_go: Callable[[int], bool] = lambda number: False
        try:
            self._numbers = {
                Namespace.model_validate_json(text).digest: number for number, text in table.texts().items()
            }
        except ValidationError as error:
            raise LostError(f"{table.memory.path} is damaged: a namespace that is none") from error

    def open(self, namespace: Namespace, capacity_nbytes: int | None = None) -> int:
        """Number of the quota group that this namespace's chunks count under, made if need be.

        Args:
            capacity_nbytes: The most that its slots may take here; 0 for no bound but the arena; None leaves it.

        Raises:
            CapacityError: All MAX_NAMESPACES numbers are taken.
            UsageError: The namespace's fields are too long to be kept, or the capacity is no size.
        """
        if capacity_nbytes is not None and not 0 <= capacity_nbytes < 1 << 64:
            raise UsageError(f"capacity_nbytes {capacity_nbytes} is no size; 0 means no bound but the arena")
        group = namespace.group
        number = self._numbers.get(group.digest)
        if number is None:
            text = group.model_dump_json(exclude_defaults=True).encode()
            if len(text) > NAMESPACE_TEXT_NBYTES:
                raise UsageError(f"namespace of {len(text)} bytes as JSON; at most {NAMESPACE_TEXT_NBYTES} can be kept")
            free = np.flatnonzero(~self._table.known_namespaces)
            if not free.size:
                free = self._reclaim()
            if not free.size:
                raise CapacityError(f"all {MAX_NAMESPACES} namespaces of this node are in use; drop one")
            number = int(free[0])
            self._namespaces["capacity"][number] = 0
            self._namespaces["text"][number] = text
            self._numbers[group.digest] = number
        if capacity_nbytes is not None:
            self._namespaces["capacity"][number] = capacity_nbytes
        return number

    def find(self, digest: bytes) -> int | None:
        """Number of an quota group, if it was opened."""
        return self._numbers.get(digest)

    def retire(self, number: int, *, retired: bool = True) -> None:
        """This quota group was dropped: its number may be another's when there are no others left and nothing uses it."""
        (self._retired.add if retired else self._retired.discard)(number)

    def _reclaim(self) -> npt.NDArray[np.int64]:
        """Free a number of an quota group that was dropped, if nothing counts under it any more."""
        for number in sorted(self._retired):
            if self.let_go(number):
                self._retired.discard(number)
                self._numbers = {digest: other for digest, other in self._numbers.items() if other != number}
                self._namespaces["text"][number] = b""
                return np.array([number])
        return np.empty(0, np.int64)

    def number(self, digest: bytes) -> int:
        """Number of an quota group that was opened.

        Raises:
            LostError: It was not, or this node began anew since. Open it (again).
        """
        number = self._numbers.get(digest)
        if number is None:
            raise LostError("this namespace is not open on this node")
        return number
