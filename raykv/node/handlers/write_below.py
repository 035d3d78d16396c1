"""Stores chunks of another node in a tier of this node, through lent slots. Memory keeps what it has."""

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from raykv.node.handlers.incoming import Incoming
from raykv.protocol import chunk_keys
from raykv.storage.batches import Written, require_batch, require_size
from raykv.storage.store import LentSlots, Store
from raykv.tier.base import Chunk
from raykv.tier.mover import TierMover
from raykv.transport.base import Reply
from raykv.types import Batch

if TYPE_CHECKING:
    from raykv.transport.rdma.exports import PeerPairs


class BelowWriter:
    """Serves a Write with `below`. Takes only what the tier can hold without removing other chunks."""

    def __init__(self, store: Store, lock: threading.Lock, mover: TierMover) -> None:
        self._store, self._lock, self._mover, self._transit = store, lock, mover, mover.transit

    def reply(self, group_digest: bytes, batch: Batch, pairs: "PeerPairs | None", *, most: int) -> Reply:
        """Receive at most `most` chunks that are neither in memory nor in a tier, and store them in a tier.

        `pairs`: as for `Incoming`.

        Raises:
            UsageError: A field of the batch is wrong.
            LostError: The quota group is not open.
        """
        require_size(batch.nbytes, self._store.config.extent_nbytes)
        with self._lock:
            group = self._store.groups.number(group_digest)
            missing = self._store.missing(batch.keys, now_s=time.monotonic())
        missing = missing[self._mover.find(batch.keys[missing])[1] == 0]
        tier, slots = self._transit.lend(group, batch.nbytes, min(len(missing), most))
        positions, handed = missing[: len(slots.rows)], list[int]()
        incoming = Incoming(self._store.arena.view, batch.nbytes, slots, positions, pairs)

        def store(written: Written) -> int:
            require_batch(batch, written)
            chunks = self._chunks(group, batch, written, slots)
            handed.extend(written.rows.tolist())
            return 0 if tier is None else self._transit.write(tier, chunks, written.rows)

        def release() -> None:
            self._transit.end(slots.rows[~np.isin(slots.rows, handed)])

        return incoming.reply(len(missing) - len(positions), store, release)

    def _chunks(self, group: int, batch: Batch, written: Written, slots: LentSlots) -> list[Chunk]:
        raw = chunk_keys.to_bytes(batch.keys)
        keys = [raw[at : at + chunk_keys.KEY_NBYTES] for at in range(0, len(raw), chunk_keys.KEY_NBYTES)]
        parents = [b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent), *keys]
        offsets = dict(zip(slots.rows.tolist(), slots.offsets.tolist(), strict=True))
        ttl_s = batch.hints.ttl_s or self._store.row_hints.config(group).ttl_s
        expires_s = time.time() + ttl_s if ttl_s else 0.0
        return [
            Chunk(
                keys[position],
                offsets[row],
                batch.nbytes,
                checksum,
                group,
                depth=batch.depth + position if batch.chained else 0,
                parent=parents[position] if batch.chained else b"",
                expires_s=expires_s,
            )
            for position, row, checksum in zip(*(column.tolist() for column in written), strict=True)
        ]
