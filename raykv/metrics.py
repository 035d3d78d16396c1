"""Counters of one quota group: what a client missed and why, and how long its calls took. Logic only."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

MAX_ABSENT: Final = 4096
"""Most missed keys that wait for their reasons; of further ones the reason stays unknown."""
REPORT_S: Final = 10.0
"""How often a client with misses reports to a node."""
BUCKETS: Final = 40
MAX_REASONS: Final = 64


class Histogram:
    """Times in powers of two of a microsecond: bucket n counts times below 2**n, and not below half of that.

    Attributes:
        counts: One entry a bucket.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS

    def add_time(self, seconds: float) -> None:
        """Count one time. Threads that race may lose a count."""
        bucket = int(seconds * 1e6).bit_length()
        self.counts[bucket if bucket < BUCKETS else BUCKETS - 1] += 1

    def add_counts(self, counts: Sequence[int]) -> None:
        """Add the counts of another histogram."""
        for bucket, count in enumerate(counts[:BUCKETS]):
            self.counts[bucket] += count

    def reset(self) -> list[int]:
        """Return the counts, and start again from zero."""
        counts, self.counts = self.counts, [0] * BUCKETS
        return counts

    def summary(self) -> dict[str, float]:
        """See `quantiles`."""
        return quantiles(self.counts)


def quantiles(counts: Sequence[int]) -> dict[str, float]:
    """For people: the count, and the times in microseconds that 50 and 99 of 100 stayed below."""
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
    """What one client saw of one quota group since its last report. Thread-safe.

    Attributes:
        gets, puts: Times of batches.
    """

    def __init__(self) -> None:
        self.gets, self.puts = Histogram(), Histogram()
        self._misses: Counter[str] = Counter()
        self._absent: list[bytes] = []
        self._lock = threading.Lock()
        self._reported_s = 0.0

    def after_fork(self) -> None:
        """Another thread of the parent may hold the lock."""
        self._lock = threading.Lock()

    def add_misses(self, reasons: Mapping[str, int], absent: Iterable[bytes]) -> None:
        """Count chunks that did not arrive.

        Args:
            reasons: Counts of those whose reason is known.
            absent: Keys, 16 bytes each, of those that no node seems to have.
        """
        with self._lock:
            self._misses.update(reasons)
            for key in absent:
                if len(self._absent) < MAX_ABSENT:
                    self._absent.append(key)
                else:
                    self._misses["unknown"] += 1

    def due(self, now_s: float) -> bool:
        """Whether to report now. True once in REPORT_S, if there were misses."""
        if not (self._absent or self._misses) or now_s < self._reported_s + REPORT_S:
            return False
        with self._lock:
            if now_s < self._reported_s + REPORT_S:
                return False
            first = self._reported_s == 0.0
            self._reported_s = now_s
            return not first  # the first misses wait for more

    def reset(self) -> tuple[Counter[str], list[bytes], list[int], list[int]]:
        """Return misses by reason, keys of other misses, and the times of gets and puts; start again from zero."""
        with self._lock:
            misses, self._misses = self._misses, Counter()
            absent, self._absent = self._absent, []
            return misses, absent, self.gets.reset(), self.puts.reset()


class NamespaceMetrics:
    """Sums of what clients reported to a node, by quota group. Thread-safe."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[Counter[str], Histogram, Histogram]] = {}
        self._lock = threading.Lock()

    def add_report(self, digest: bytes, misses: Mapping[str, int], gets: Sequence[int], puts: Sequence[int]) -> None:
        """Add one client's report about a quota group that exists."""
        with self._lock:
            ours = self._by_digest.setdefault(digest, (Counter(), Histogram(), Histogram()))
            for reason, count in misses.items():
                if reason in ours[0] or len(ours[0]) < MAX_REASONS:
                    ours[0][reason] += count
            ours[1].add_counts(gets)
            ours[2].add_counts(puts)

    def summary(self, digest: bytes) -> dict[str, Any]:
        """As plain values: misses by reason, and the counts of both histograms."""
        with self._lock:
            misses, gets, puts = self._by_digest.get(digest, (Counter[str](), Histogram(), Histogram()))
            return {"misses": dict(misses), "get_counts": [*gets.counts], "put_counts": [*puts.counts]}
