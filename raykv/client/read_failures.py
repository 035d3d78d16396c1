"""Recent failures of a client's own reads, for `Client.why`. This module does no I/O."""

import threading
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from raykv.transport.forking import drop_after_fork
from raykv.types import NodeId

MAX_FAILURES: Final = 1 << 14
"""Failures of at most this many keys are recorded. Beyond that, the oldest failures are dropped."""
FAILURE_S: Final = 600.0
"""Failures that are older than this are ignored."""

Kind: TypeAlias = Literal["timed_out", "corrupt", "no_answer"]


class ReadFailure(NamedTuple):
    """Why the last read of a key failed.

    Attributes:
        kind: "timed_out": no bytes by the deadline. "corrupt": wrong bytes. "no_answer": the node did not answer.
        node: The node that was asked, if known.
        when_s: Time of the failure, by the host's monotonic clock.
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
        """Replace the lock, because another thread of the parent may have held the lock at the fork."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, keys: Iterable[bytes], kind: Kind, node: NodeId | None, *, now_s: float) -> None:
        """Record that reads of these 16-byte keys failed."""
        failure = ReadFailure(kind, node, now_s)
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)
                self._by_key[key] = failure
            while len(self._by_key) > MAX_FAILURES:
                del self._by_key[next(iter(self._by_key))]

    def remove(self, keys: Iterable[bytes]) -> None:
        """Drop the failures of keys whose reads succeeded."""
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)

    def last(self, key: bytes, *, now_s: float) -> ReadFailure | None:
        """Return the last failure of a key. None: there was none within FAILURE_S."""
        failure = self._by_key.get(key)
        return failure if failure is not None and now_s - failure.when_s < FAILURE_S else None
