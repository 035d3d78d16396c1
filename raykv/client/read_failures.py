"""Failures of a client's own reads lately, for `Client.why`. Bounded. Logic only."""

import threading
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from raykv.transport.forking import drop_after_fork
from raykv.types import NodeId

MAX_FAILURES: Final = 1 << 14
"""Most keys; beyond that the oldest failures are dropped."""
FAILURE_S: Final = 600.0
"""A failure older than this no longer counts."""

Kind: TypeAlias = Literal["timed_out", "corrupt", "no_answer"]


class ReadFailure(NamedTuple):
    """Why the last read of a key failed.

    Attributes:
        kind: Not here by the deadline; or wrong bytes arrived; or the node did not answer.
        node: Which node, if that is known.
        when_s: By the host's monotonic clock.
    """

    kind: Kind
    node: NodeId | None
    when_s: float


class ReadFailures:
    """The last failure of each key. Thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, ReadFailure] = {}
        self._lock = threading.Lock()
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may hold the lock."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, keys: Iterable[bytes], kind: Kind, node: NodeId | None, *, now_s: float) -> None:
        """Reads of these keys, 16 bytes each, failed."""
        failure = ReadFailure(kind, node, now_s)
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)
                self._by_key[key] = failure
            while len(self._by_key) > MAX_FAILURES:
                del self._by_key[next(iter(self._by_key))]

    def remove(self, keys: Iterable[bytes]) -> None:
        """Reads of these keys succeeded."""
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)

    def last(self, key: bytes, *, now_s: float) -> ReadFailure | None:
        """The last failure of a key, if it is not older than FAILURE_S."""
        failure = self._by_key.get(key)
        return failure if failure is not None and now_s - failure.when_s < FAILURE_S else None
