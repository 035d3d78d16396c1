"""Counters per quota group: misses by reason, and durations of calls. This module does no I/O."""

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from raykv.transport.forking import drop_after_fork

MAX_ABSENT: Final = 4096
"""One report looks up the reasons of at most this many misses. Further misses count as "unknown"."""
REPORT_S: Final = 10.0
"""A client collects misses for this long before it reports them."""
BUCKETS: Final = 40
MAX_REASONS: Final = 64
MAX_GROUPS: Final = 1024
"""A node counts for at most this many quota groups. The group without a report for the longest time is dropped."""


class Histogram:
    """Histogram of durations. Bucket 0: below 1 microsecond. Bucket n: from 2**(n-1) to below 2**n microseconds.

    Attributes:
        counts: Number of durations in each bucket. The last bucket also counts all longer durations.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS

    def add_time(self, seconds: float) -> None:
        """Count one duration. This takes no lock, so concurrent calls may lose a count."""
        bucket = int(seconds * 1e6).bit_length()
        self.counts[bucket if bucket < BUCKETS else BUCKETS - 1] += 1

    def add_counts(self, counts: Sequence[int]) -> None:
        """Add the counts of another histogram."""
        for bucket, count in enumerate(counts[:BUCKETS]):
            self.counts[bucket] += count

    def reset(self) -> list[int]:
        """Return the counts, and reset them to zero."""
        counts, self.counts = self.counts, [0] * BUCKETS
        return counts

    def summary(self) -> dict[str, float]:
        """Return the number of durations. If there are any, also return upper bounds of p50 and p99 in microseconds."""
        sums = list(accumulate(self.counts))
        found = {"count": float(sums[-1])}
        if sums[-1]:
            found |= {
                name: float(1 << bisect_left(sums, share * sums[-1]))
                for name, share in (("p50_us", 0.5), ("p99_us", 0.99))
            }
        return found


class ClientMetrics:
    """Misses and durations of one client in one quota group since its last report. Thread-safe.

    Attributes:
        gets, puts: Durations of get and put calls.
    """

    def __init__(self) -> None:
        self.gets, self.puts = Histogram(), Histogram()
        self._misses: Counter[str] = Counter()
        self._absent: list[bytes] = []
        self._lock = threading.Lock()
        self._report_at_s = math.inf
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock, because another thread of the parent may have held the lock at the fork."""
        self._lock = threading.Lock()

    def add_misses(self, reasons: Mapping[str, int], absent: Iterable[bytes], *, now_s: float) -> bool:
        """Count chunks that did not arrive.

        Args:
            reasons: Number of misses for each known reason.
            absent: 16-byte keys that were missed for an unknown reason. The next report looks up the reasons.

        Returns:
            True if the first unreported miss is at least REPORT_S seconds old. Then the caller must report now.
        """
        with self._lock:
            self._misses.update(reasons)
            for key in absent:
                if len(self._absent) < MAX_ABSENT:
                    self._absent.append(key)
                else:
                    self._misses["unknown"] += 1
            due = now_s >= self._report_at_s
            self._report_at_s = math.inf if due else min(self._report_at_s, now_s + REPORT_S)
            return due

    def reset(self) -> tuple[Counter[str], list[bytes], list[int], list[int]]:
        """Return all counts, and start again from zero.

        Returns:
            Misses by known reason; 16-byte keys that were missed for an unknown reason; counts of `gets`; counts of
            `puts`.
        """
        with self._lock:
            misses, self._misses = self._misses, Counter()
            absent, self._absent = self._absent, []
            return misses, absent, self.gets.reset(), self.puts.reset()


class NamespaceMetrics:
    """Sums of the clients' reports to a node, per quota group. Thread-safe."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[Counter[str], Histogram, Histogram]] = {}
        self._lock = threading.Lock()

    def add_report(self, digest: bytes, misses: Mapping[str, int], gets: Sequence[int], puts: Sequence[int]) -> None:
        """Add one client's report for the quota group with this digest. The caller checks that the group exists.

        Args:
            misses: Number of misses for each reason. A group has at most MAX_REASONS reasons; further ones are ignored.
            gets, puts: Counts of the client's histograms.
        """
        with self._lock:
            ours = self._by_digest.pop(digest, None) or (Counter(), Histogram(), Histogram())
            self._by_digest[digest] = ours
            if len(self._by_digest) > MAX_GROUPS:
                del self._by_digest[next(iter(self._by_digest))]
            for reason, count in misses.items():
                if reason in ours[0] or len(ours[0]) < MAX_REASONS:
                    ours[0][reason] += count
            ours[1].add_counts(gets)
            ours[2].add_counts(puts)

    def summary(self, digest: bytes) -> dict[str, Any]:
        """Return a quota group's misses by reason, and the counts of both histograms, as values for JSON."""
        with self._lock:
            misses, gets, puts = self._by_digest.get(digest, (Counter[str](), Histogram(), Histogram()))
            return {"misses": dict(misses), "get_counts": [*gets.counts], "put_counts": [*puts.counts]}
