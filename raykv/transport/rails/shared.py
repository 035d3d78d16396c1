"""Rails that several threads use at once: `Rails` with a lock and the clock."""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from raykv.transport.rails.striping import Rails, Share

UNKNOWN_RATE: Final = 1.25e9
"""Rate of a port that does not tell it, in bytes a second: 10 Gbit/s."""


class SharedRails:
    """The rails of concurrent reads. Thread-safe.

    Attributes:
        names: The name of each rail, for people.
    """

    def __init__(self, names: Sequence[str], rates: Sequence[float], *, pause_s: float) -> None:
        """Make rails that all work. `rates`, `pause_s`: see `Rails`."""
        self.names = tuple(names)
        self._rails, self._lock = Rails(rates, pause_s=pause_s, rng=random.Random()), threading.Lock()

    def assign(self, sizes: Sequence[int]) -> list[Share]:
        with self._lock:
            return self._rails.assign(sizes, time.monotonic())

    def done(self, share: Share, *, nbytes: int | None = None) -> None:
        with self._lock:
            self._rails.done(share, time.monotonic(), nbytes=nbytes)

    def fail(self, share: Share) -> None:
        with self._lock:
            self._rails.fail(share, time.monotonic())

    def fail_unless_last(self, share: Share) -> bool:
        """End a share that failed. Its rail is taken out if another one works. Returns whether it was taken out."""
        with self._lock:
            now_s = time.monotonic()
            others = any(self._rails.works(rail, now_s) for rail in range(len(self.names)) if rail != share.rail)
            (self._rails.fail if others else self._rails.cancel)(share, now_s)
            return others

    def cancel(self, share: Share) -> None:
        with self._lock:
            self._rails.cancel(share, time.monotonic())

    def take_out(self, rail: int) -> None:
        with self._lock:
            self._rails.take_out(rail, time.monotonic())

    def admits(self, rail: int) -> bool:
        with self._lock:
            return self._rails.admits(rail, time.monotonic())

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return for each rail its rate as measured lately, in bytes a second, and whether it is in use."""
        now_s = time.monotonic()
        with self._lock:
            return {
                name: {
                    "nbytes_per_s": round(self._rails.rate(rail, now_s)),
                    "in_use": self._rails.works(rail, now_s),
                }
                for rail, name in enumerate(self.names)
            }
