"""Requests slots from this host's node in advance, hands the slots to puts, and gives unused slots back."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from raykv.client.local_connection import LocalConnection
from raykv.client.pipeline import Outcome, Pipeline, Posted, ignore
from raykv.client.slot_pool import POOL_IDLE_S, TRUST_S, LentBatch, QuotaGroup, Slot, SlotPool
from raykv.errors import LostError, PeerUnavailable, RayKVError, TransientError
from raykv.memory.slots import slot_nbytes
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array
from raykv.transport.forking import drop_after_fork
from raykv.transport.link import Link
from raykv.types import Batch

NO_ANSWER: Final = "the local node did not answer by the deadline"


class SlotSupply:
    """Pools of lent slots, by quota group and slot size. Thread-safe.

    Attributes:
        pipeline: The connection that owns the leases. Its lock guards the pools.
    """

    def __init__(self, local: LocalConnection, *, retry_s: float) -> None:
        """Connect at first use."""
        self._local = local
        self.pipeline = Pipeline(self._open_link, retry_s=retry_s)
        self._reader = local.reader  # the memory that contains the slots of this connection
        self._pools: dict[tuple[bytes, int], SlotPool] = {}
        self._requests: dict[SlotPool, Posted] = {}
        self._opened: set[bytes] = set()
        self._refused: dict[bytes, RayKVError] = {}
        self._idle_check_s = 0.0
        drop_after_fork(self)

    def after_fork(self) -> None:
        """Drop all slots: they belong to the parent."""
        self._pools, self._requests, self._opened = {}, {}, set()

    def _open_link(self, deadline_s: float) -> Link:
        link, self._reader = self._local.open_link(deadline_s)
        self._pools, self._requests, self._opened = {}, {}, set()
        return link

    def slots(self) -> list[Slot]:
        """Return all free slots."""
        return [slot for pool in self._pools.values() for slot in pool.slots]

    def knows(self, group: QuotaGroup) -> bool:
        """Return whether the quota group was opened on this connection."""
        return group.digest in self._opened

    def pop(self, lent: LentBatch, count: int, deadline_s: float) -> None:
        """Move up to `count` slots from their pool into `lent`. If there are fewer, `lent.reason` says why.

        Waits only if the pool has too few slots, or if the node's last answer is older than TRUST_S.

        Raises:
            PeerUnavailable: The node does not answer.
            RayKVError: The node refused to lend.
        """
        full = reopened = False
        while True:
            with self.pipeline.locked(deadline_s):
                pool = self._pool_locked(lent.group, lent.batch.nbytes, deadline_s)
                if self._move_locked(pool, lent, count, partly=full):
                    lent.reason = "full" if len(lent.slots) < count else ""
                    return
                needed = max(0, count - len(pool.slots))
                if needed:
                    pool.grow(count)
                pending = self._requests.get(pool)
            mine = pending is None or pending.outcome is not None
            if pending is None or mine:
                pending = self._request(lent.group, lent.batch, pool, needed, deadline_s)
            if not self.pipeline.wait(pending, deadline_s):
                with self.pipeline.locked(deadline_s):
                    self._move_locked(pool, lent, count, partly=True)
                lent.reason = NO_ANSWER if len(lent.slots) < count else ""
                return
            outcome = pending.outcome
            if isinstance(outcome, LostError) and not reopened:
                self._opened.discard(lent.group.digest)  # the namespace was dropped in the meantime
                reopened = True
            elif isinstance(outcome, RayKVError):
                raise self._refused.pop(lent.group.digest, outcome)
            full = mine and isinstance(outcome, messages.Lent) and len(outcome.rows) < 4 * needed

    def _pool_locked(self, group: QuotaGroup, nbytes: int, deadline_s: float) -> SlotPool:
        self.pipeline.collect_arrived_locked()
        self.pipeline.connect_locked(deadline_s)
        self._give_back_surplus_locked()
        where = group.digest, slot_nbytes(nbytes)
        return self._pools.setdefault(where, SlotPool(where[1], self._reader.arena.nbytes, life=self.pipeline.life))

    def _move_locked(self, pool: SlotPool, lent: LentBatch, count: int, *, partly: bool) -> bool:
        """Move slots to `lent`. False: the lease may have ended, or (unless `partly`) the pool has too few slots."""
        now_s = time.monotonic()
        if pool.life != self.pipeline.life or now_s >= self.pipeline.trusted_until_s:
            return False
        if len(pool.slots) < count and not partly:
            return False
        lent.slots, lent.pool, lent.life = pool.pop(count, now_s), pool, pool.life
        arena, nbytes = self._reader.arena.view, lent.batch.nbytes
        lent.views = [arena[start : start + nbytes] for _, start in lent.slots]
        return True

    def _request(self, group: QuotaGroup, batch: Batch, pool: SlotPool, needed: int, deadline_s: float) -> Posted:
        """Request `needed` slots, for which the node may evict chunks, and free slots to refill the pool."""
        pipeline = self.pipeline
        if group.digest not in self._opened:
            self._opened.add(group.digest)  # safe before the answer: the node handles requests in order
            opening = messages.OpenNamespace(group.text, group=group.digest)
            pipeline.post(opening, partial(self._group_opened, group.digest), deadline_s=deadline_s)
        with pipeline.locked(deadline_s):
            ahead = max(0, pool.wanted - len(pool.slots) - pool.coming)
            pool.coming += needed + ahead
        parent = b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent)
        keys = chunk_keys.to_bytes(batch.keys)
        request = messages.Lend(batch.nbytes, needed, ahead, keys, parent, until_s=deadline_s, group=group.digest)
        finish = partial(self._lent, pool, needed + ahead)
        try:
            posted = pipeline.post(request, finish, deadline_s=deadline_s, keys=len(batch.keys))
        except BaseException:
            pool.coming -= needed + ahead
            raise
        self._requests[pool] = posted
        return posted

    def _group_opened(self, digest: bytes, outcome: Outcome) -> None:
        if isinstance(outcome, RayKVError):
            self._opened.discard(digest)
            self._refused[digest] = outcome

    def _lent(self, pool: SlotPool, coming: int, outcome: Outcome) -> None:
        pool.coming -= coming
        if isinstance(outcome, messages.Lent):
            self.add_locked(pool, outcome.rows, outcome.offsets)

    def add_locked(self, pool: SlotPool, rows: bytes, offsets: bytes) -> None:
        """Add slots that the node has just lent to their pool. `rows` are i32, `offsets` u64."""
        if rows:
            starts = array(offsets, "<u8", len(rows) // 4).tolist()
            pool.slots += zip(np.frombuffer(rows, "<i4").tolist(), starts, strict=True)

    def put_back_locked(self, lent: LentBatch, slots: Sequence[Slot]) -> None:
        """Put unused slots back into their pool, if their lease is still valid."""
        if lent.pool is not None and lent.life == self.pipeline.life:
            lent.pool.slots += slots

    def lost_group(self, group: QuotaGroup) -> None:
        """Make the next lease open the quota group again. Call this if the node does not know the group."""
        self._opened.discard(group.digest)

    def prepare(self, group: QuotaGroup, nbytes: int, count: int, deadline_s: float) -> None:
        """Request slots for `count` chunks that will be stored soon. Does not wait for the slots.

        Raises:
            PeerUnavailable: The node does not answer.
        """
        with self.pipeline.locked(deadline_s):
            pool = self._pool_locked(group, nbytes, deadline_s)
            pool.wanted = max(pool.wanted, min(pool.most, count))
            pool.used_at_s = now_s = time.monotonic()
            enough = len(pool.slots) + pool.coming >= pool.wanted
            if enough and now_s < self.pipeline.trusted_until_s - TRUST_S / 2:
                return
        self._request(group, Batch(chunk_keys.empty(), nbytes), pool, 0, deadline_s)

    def lease_valid(self, lent: LentBatch, deadline_s: float) -> bool:
        """Return whether the caller may still write to the slots: see `Pipeline.trusted`."""
        probe = messages.Lend(lent.batch.nbytes, 0, group=lent.group.digest)
        return self.pipeline.trusted(lent.life, probe, deadline_s)

    def give_back(self, lent: LentBatch, deadline_s: float) -> None:
        """Return the slots of a batch to the node. If the node is unavailable, put them back into their pool."""
        if not lent.slots:
            return
        try:
            request = messages.GiveBack(rows_of(lent.slots))
            self.pipeline.wait(self.pipeline.post(request, ignore, deadline_s=deadline_s, life=lent.life), deadline_s)
        except PeerUnavailable:
            with self.pipeline.lock:
                self.put_back_locked(lent, lent.slots)

    def _give_back_surplus_locked(self) -> None:
        """Give unused slots back to the node, at most once per POOL_IDLE_S."""
        now_s = time.monotonic()
        if now_s < self._idle_check_s + POOL_IDLE_S or not self.pipeline.has_room_locked(0):
            return
        self._idle_check_s = now_s
        self.give_back_locked([slot for pool in self._pools.values() for slot in pool.pop_surplus(now_s - POOL_IDLE_S)])

    def give_back_locked(self, slots: Sequence[Slot]) -> None:
        """Return slots to the node without waiting. Ignores a broken connection, which ends the leases anyway."""
        try:
            if slots:
                self.pipeline.post_locked(messages.GiveBack(rows_of(slots)), ignore)
        except TransientError:
            pass

    def close(self, deadline_s: float) -> None:
        """Return all slots, and close the connection."""
        try:
            if self.pipeline.connected:
                with self.pipeline.locked(deadline_s):
                    slots = [slot for pool in self._pools.values() for slot in pool.pop(len(pool.slots), 0.0)]
                if slots:
                    request = messages.GiveBack(rows_of(slots))
                    self.pipeline.post(request, ignore, deadline_s=deadline_s)
                self.pipeline.wait_all(deadline_s)
        except PeerUnavailable:
            pass  # the node puts the slots into quarantine
        self.pipeline.close()


def rows_of(slots: Sequence[Slot]) -> bytes:
    """Encode the rows of slots as i32."""
    return np.array([row for row, _ in slots], np.int32).tobytes()
