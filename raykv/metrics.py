"""Counters of one namespace: what a client saw, and how long it took. Logic only."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

MAX_ABSENT: Final = 4096
"""Keys of misses that are kept until their reasons are asked for; the reasons of those beyond stay unknown."""
REPORT_S: Final = 10.0
"""How often a client that goes on missing tells a node what it missed, and why."""
BUCKETS: Final = 40
MAX_REASONS: Final = 64


class Histogram:
    """Times in powers of two of a microsecond: bucket n has those below 2**n and not below half of that.

    Attributes:
        counts: One entry a bucket.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS

    def note(self, seconds: float) -> None:
        """One more. Threads that race may lose a count."""
        bucket = int(seconds * 1e6).bit_length()
        self.counts[bucket if bucket < BUCKETS else BUCKETS - 1] += 1

    def add(self, counts: Sequence[int]) -> None:
        """Those of another one."""
        for bucket, count in enumerate(counts[:BUCKETS]):
            self.counts[bucket] += count

    def take(self) -> list[int]:
        """All so far, once."""
        counts, self.counts = self.counts, [0] * BUCKETS
        return counts

    def told(self) -> dict[str, float]:
        """For people: how many, and below how many microseconds so many of 100 stayed."""
        return quantiles(self.counts)


def quantiles(counts: Sequence[int]) -> dict[str, float]:
    """What `Histogram.told` says."""
    total, found = sum(counts), {"count": float(sum(counts))}
    for name, share in (("p50_us", 0.5), ("p99_us", 0.99)):
        below = 0
        for bucket, count in enumerate(counts):
            below += count
            if total and below >= share * total:
                found[name] = float(1 << bucket)
                break
    return found


class ClientMetrics:
    """What one client saw of one quota group, since it last told a node. Thread-safe.

    Attributes:
        gets, puts: Times of batches.
    """

    def __init__(self) -> None:
        self.gets, self.puts = Histogram(), Histogram()
        self._misses: Counter[str] = Counter()
        self._absent: list[bytes] = []
        self._lock = threading.Lock()
        self._told_at_s = 0.0

    def missed(self, reasons: Mapping[str, int], absent: Iterable[bytes]) -> None:
        """Chunks that did not come.

        Args:
            reasons: How many, by reason, as far as that is known.
            absent: Keys, 16 bytes each, of those that nobody seems to have.
        """
        with self._lock:
            self._misses.update(reasons)
            for key in absent:
                if len(self._absent) < MAX_ABSENT:
                    self._absent.append(key)
                else:
                    self._misses["unknown"] += 1

    def due(self, now_s: float) -> bool:
        """Whether to tell a node now. True once in REPORT_S, if there were misses."""
        if not (self._absent or self._misses) or now_s < self._told_at_s + REPORT_S:
            return False
        with self._lock:
            if now_s < self._told_at_s + REPORT_S:
                return False
            first = self._told_at_s == 0.0
            self._told_at_s = now_s
            return not first  # let some gather

    def take(self) -> tuple[Counter[str], list[bytes], list[int], list[int]]:
        """All so far, once: misses by reason, keys of others, and the times of gets and puts."""
        with self._lock:
            misses, self._misses = self._misses, Counter()
            absent, self._absent = self._absent, []
            return misses, absent, self.gets.take(), self.puts.take()


class NamespaceMetrics:
    """What clients told a node of its quota groups, summed up. Thread-safe."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[Counter[str], Histogram, Histogram]] = {}
        self._lock = threading.Lock()

    def note(self, digest: bytes, misses: Mapping[str, int], gets: Sequence[int], puts: Sequence[int]) -> None:
        """One client's report. Whoever calls sees to it that the quota group is one."""
        with self._lock:
            ours = self._by_digest.setdefault(digest, (Counter(), Histogram(), Histogram()))
            for reason, count in misses.items():
                if reason in ours[0] or len(ours[0]) < MAX_REASONS:
                    ours[0][reason] += count
            ours[1].add(gets)
            ours[2].add(puts)

    def told(self, digest: bytes) -> dict[str, Any]:
        """As plain values: misses by reason, and the counts of both histograms."""
        with self._lock:
            misses, gets, puts = self._by_digest.get(digest, (Counter[str](), Histogram(), Histogram()))
            return {"misses": dict(misses), "get_counts": [*gets.counts], "put_counts": [*puts.counts]}
