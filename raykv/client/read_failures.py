"""What went wrong with a client's own reads lately: bounded, and only for `Client.why`. Logic only."""

import threading
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, TypeAlias

from raykv.types import NodeId

MAX_TROUBLES: Final = 1 << 14
"""Keys that are remembered; beyond that the oldest are forgotten."""
TROUBLE_S: Final = 600.0
"""And how long."""

Kind: TypeAlias = Literal["timed_out", "corrupt", "no_answer"]


class Trouble(NamedTuple):
    """Why a read of a key came to nothing.

    Attributes:
        kind: Not there by the deadline; bytes that were not what was put; or the node could not be asked.
        node: Which one, if that is known.
        when_s: By the host's monotonic clock.
    """

    kind: Kind
    node: NodeId | None
    when_s: float


class ReadFailures:
    """The last trouble with each of a client's keys. Thread-safe."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Trouble] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def note(self, keys: Iterable[bytes], kind: Kind, node: NodeId | None, *, now_s: float) -> None:
        """These, 16 bytes each, did not come."""
        trouble = Trouble(kind, node, now_s)
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)
                self._by_key[key] = trouble
            while len(self._by_key) > MAX_TROUBLES:
                del self._by_key[next(iter(self._by_key))]

    def forget(self, keys: Iterable[bytes]) -> None:
        """These came after all."""
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)

    def of(self, key: bytes, *, now_s: float) -> Trouble | None:
        """The last one with this key, if it was not long ago."""
        trouble = self._by_key.get(key)
        return trouble if trouble is not None and now_s - trouble.when_s < TROUBLE_S else None
