"""A bounded log of departures: which chunks were removed, why and when. It has no clock and no lock."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from raykv.protocol.reasons import Place
from raykv.types import KeyArray

EVICTION_LOG_ENTRIES: Final = 1 << 18
"""A node's log holds this many departures, a power of two, at 43 bytes each. New departures replace the oldest."""
CHAIN_STEPS: Final = 64
"""A search checks at most this many departures of keys with the same hash. Only an attack can produce more."""

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


class Departures(NamedTuple):
    """The last departure of each key, one entry per key.

    Attributes:
        reasons: Why the chunk left: a `Reason`. NONE: the log has no departure of this key.
        tiers: The tier that the chunk left: a `Place`.
        when_s: Time of the departure, as given to `EvictionLog.add`.
        policies: Name of the policy that evicted the chunk. Empty if the chunk left for another reason.
    """

    reasons: npt.NDArray[np.uint8]
    tiers: npt.NDArray[np.uint8]
    when_s: npt.NDArray[np.float64]
    policies: list[str]


class EvictionLog:
    """A ring buffer of departures. Departures of keys with equal hash (a bucket) form a linked list, newest first."""

    def __init__(self, entries: int = EVICTION_LOG_ENTRIES) -> None:
        self._entries, self._shift = entries, np.uint64(65 - entries.bit_length())
        self._next = 1  # number of the next departure; number 0 means no departure
        self._keys = np.zeros((entries, 2), np.uint64)
        self._when_s = np.zeros(entries, np.float64)
        self._reason = np.zeros(entries, np.uint8)
        self._tier = np.zeros(entries, np.uint8)
        self._policy = np.zeros(entries, np.uint8)
        self._before = np.zeros(entries, np.int64)  # number of the next older departure in the same bucket
        self._newest = np.zeros(entries, np.int64)  # number of the newest departure, by bucket
        self._names = [""]

    @property
    def since_s(self) -> float | None:
        """Time of the oldest departure in the log; None if no departure has been replaced yet."""
        if self._next <= self._entries + 1:
            return None
        return float(self._when_s[self._next % self._entries])

    def add(
        self,
        keys: KeyArray,
        reasons: npt.ArrayLike,
        *,
        tier: Place = Place.DRAM,
        policies: str | Sequence[str] = "",
        now_s: float,
    ) -> None:
        """Log the departure of chunks. `reasons` and `policies`: one for all chunks, or one per chunk."""
        if len(keys) > self._entries:
            skipped = len(keys) - self._entries
            reasons = reasons if np.ndim(reasons) == 0 else np.asarray(reasons)[skipped:]
            keys, policies = keys[skipped:], policies if isinstance(policies, str) else policies[skipped:]
            self._next += skipped
        if not (count := len(keys)):
            return
        numbers = np.arange(self._next, self._next + count)
        at, buckets = numbers % self._entries, self._buckets(keys)
        self._keys[at], self._when_s[at], self._tier[at] = keys, now_s, tier
        self._reason[at] = reasons
        self._policy[at] = self._number(policies) if isinstance(policies, str) else list(map(self._number, policies))
        # A bucket points to its newest departure. Each departure points to the next older departure in its bucket.
        order = np.argsort(buckets, kind="stable")
        sorted_, chained = buckets[order], numbers[order]
        same = sorted_[1:] == sorted_[:-1]
        before = self._newest[sorted_]
        before[1:][same] = chained[:-1][same]
        self._before[at[order]] = before
        last = np.append(~same, True)
        self._newest[sorted_[last]] = chained[last]
        self._next += count

    def find(self, keys: KeyArray) -> Departures:
        number = self._newest[self._buckets(keys)]
        found = np.zeros(len(keys), np.int64)
        pending = np.arange(len(keys))
        for _ in range(CHAIN_STEPS):
            # A departure with a smaller number is no longer in the log, nor is any older departure of its bucket.
            pending = pending[number[pending] >= max(1, self._next - self._entries)]
            if not pending.size:
                break
            at = number[pending] % self._entries
            mine = (self._keys[at] == keys[pending]).all(axis=1)
            found[pending[mine]] = number[pending[mine]]
            pending, at = pending[~mine], at[~mine]
            number[pending] = self._before[at]
        at, known = found % self._entries, found > 0
        return Departures(
            np.where(known, self._reason[at], np.uint8(0)),
            np.where(known, self._tier[at], np.uint8(0)),
            np.where(known, self._when_s[at], 0.0),
            [self._names[number] for number in np.where(known, self._policy[at], 0).tolist()],
        )

    def _buckets(self, keys: KeyArray) -> npt.NDArray[np.int64]:
        return ((keys[:, 0] ^ keys[:, 1]) * _MIX >> self._shift).astype(np.int64)

    def _number(self, name: str) -> int:
        """Return the number of a policy's name. The log has numbers for 254 names; all others get 0 (no name)."""
        if name not in self._names:
            if len(self._names) == np.iinfo(np.uint8).max:
                return 0
            self._names.append(name)
        return self._names.index(name)
