"""What an owner knows: who holds which key. Soft state; a wrong entry costs a miss, and is corrected by it."""

import threading
from collections.abc import Callable
from itertools import islice, repeat

import numpy as np

from raykv.protocol import chunk_keys
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.types import Bits, KeyArray, NodeId


class LocationIndex:
    """Locations of the keys that one node owns. Thread-safe."""

    def __init__(self, max_keys: int) -> None:
        """Keep at most `max_keys`; beyond that, those announced first are forgotten."""
        self._max_keys = max_keys
        self._holders: dict[bytes, tuple[NodeId, ...]] = {}
        self._cold: dict[bytes, frozenset[NodeId]] = {}  # of holders those that have it below memory only
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, node_id: NodeId, keys: KeyArray, cold: Bits | None = None) -> None:
        """`node_id` holds these; those in `cold` not in memory but in a tier below it."""
        alone = (node_id,)
        with self._lock:
            if self._cold or cold is not None:
                self._note_cold(node_id, keys, cold)
            for key in _split(keys):
                holders = self._holders.get(key)
                if holders is None:
                    self._holders[key] = alone
                elif node_id not in holders:
                    self._holders[key] = (*holders, node_id)
            excess = len(self._holders) - self._max_keys
            if excess > 0:  # some more at once: finding the first entry of a dict means passing all that were deleted
                for key in list(islice(self._holders, excess + self._max_keys // 16)):
                    del self._holders[key]
                    self._cold.pop(key, None)

    def _note_cold(self, node_id: NodeId, keys: KeyArray, cold: Bits | None) -> None:
        bits = [False] * len(keys) if cold is None else cold.tolist()
        for key, is_cold in zip(_split(keys), bits, strict=True):
            before = self._cold.get(key, frozenset())
            after = before | {node_id} if is_cold else before - {node_id}
            if after:
                self._cold[key] = after
            elif before:
                del self._cold[key]

    def remove(self, node_id: NodeId, keys: KeyArray) -> None:
        """`node_id` no longer holds these."""
        with self._lock:
            if self._cold:
                self._note_cold(node_id, keys, None)
            for key in _split(keys):
                holders = self._holders.get(key, ())
                if holders == (node_id,):
                    del self._holders[key]
                elif node_id in holders:
                    self._holders[key] = tuple(holder for holder in holders if holder != node_id)

    def locate(self, keys: KeyArray) -> list[tuple[NodeId, ...]]:
        """Holders of each key; none where nobody told."""
        return list(map(self._holders.get, _split(keys), repeat(())))

    def cold(self, keys: KeyArray) -> Bits | None:
        """Which keys no holder has in memory; None if there are none such."""
        if not self._cold:
            return None
        marked = list(map(self._cold.get, _split(keys)))
        if not any(marked):
            return None
        holders = self.locate(keys)
        bits = [some is not None and some >= set(them) for some, them in zip(marked, holders, strict=True)]
        return np.array(bits, np.bool_)

    def keep(self, *, nodes: frozenset[NodeId], owned: Callable[[KeyArray], Bits]) -> None:
        """After a change of view: forget holders that left, and keys that others own now."""
        with self._lock:
            if not self._holders:
                return
            raw = list(self._holders)
            stays = owned(chunk_keys.from_bytes(b"".join(raw)))
            kept = {}
            for place in np.flatnonzero(stays).tolist():
                holders = tuple(holder for holder in self._holders[raw[place]] if holder in nodes)
                if holders:
                    kept[raw[place]] = holders
            self._holders = kept
            self._cold = {key: left for key, some in self._cold.items() if key in kept and (left := some & nodes)}


def _split(keys: KeyArray) -> list[bytes]:
    keys_of: list[bytes] = np.frombuffer(chunk_keys.to_bytes(keys), f"V{KEY_NBYTES}").tolist()
    return keys_of
