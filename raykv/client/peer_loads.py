"""Chooses among the holders of a chunk by power of two choices.

Two holders are drawn at random, and the one with the lower expected time goes first. The expected time comes from the
bytes that this process is reading from a node now, and from the speed of its latest reads. A random pair spreads the
readers of a cluster over all replicas. If each reader took the best node that it knows, all would take the same.

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
"""

import threading
from collections.abc import Sequence
from random import Random
from typing import Final

from raykv.types import NodeId

GAIN: Final = 0.3
"""Weight of the latest read in the mean of a node's seconds per byte."""
BASE_NBYTES: Final = 1 << 20
"""Added to the bytes in flight, so that idle nodes are compared by their speed."""


class PeerLoads:
    """What this process knows of the load of other nodes. Thread-safe."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._lock = rng, threading.Lock()
        self._in_flight: dict[NodeId, int] = {}
        self._s_per_byte: dict[NodeId, float] = {}

    def begin(self, node_id: NodeId, nbytes: int) -> None:
        """Record that a read of `nbytes` bytes begins."""
        with self._lock:
            self._in_flight[node_id] = self._in_flight.get(node_id, 0) + nbytes

    def end(self, node_id: NodeId, nbytes: int, took_s: float) -> None:
        """Record that a read has ended, also if it failed. `nbytes`: the same as in `begin`."""
        with self._lock:
            left = self._in_flight.get(node_id, 0) - nbytes
            if left > 0:
                self._in_flight[node_id] = left
            else:
                self._in_flight.pop(node_id, None)
            latest = took_s / max(1, nbytes)
            self._s_per_byte[node_id] = latest + (1 - GAIN) * (self._s_per_byte.get(node_id, latest) - latest)

    def order(self, holders: Sequence[NodeId]) -> list[NodeId]:
        """Return the holders in the order in which to ask them."""
        if len(holders) < 2:
            return list(holders)
        shuffled = self._rng.sample(holders, len(holders))
        if self._time(shuffled[1]) < self._time(shuffled[0]):
            shuffled[:2] = shuffled[1::-1]
        return shuffled

    def retain(self, node_ids: frozenset[NodeId]) -> None:
        """Forget all other nodes."""
        with self._lock:
            self._s_per_byte = {name: each for name, each in self._s_per_byte.items() if name in node_ids}

    def _time(self, node_id: NodeId) -> float:
        """Return the expected time of a read. A node that was never read counts as fast, so that it is tried."""
        return (BASE_NBYTES + self._in_flight.get(node_id, 0)) * self._s_per_byte.get(node_id, 0.0)
