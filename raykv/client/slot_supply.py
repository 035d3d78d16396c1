"""Requests slots from this host's node in advance, hands the slots to puts, and gives unused slots back."""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from raykv.client.local_connection import LocalConnection
from raykv.client.pipeline import NO_ANSWER, Outcome, Pipeline, Posted
from raykv.client.slot_pool import POOL_IDLE_S, TRUST_S, LentBatch, Slot, SlotPool
from raykv.errors import LostError, PeerUnavailable, ProtocolError, RayKVError, TransientError
from raykv.memory.slots import slot_nbytes
from raykv.protocol import chunk_keys, messages
from raykv.protocol.codec import array
from raykv.protocol.namespace import Namespace
from raykv.types import Batch


class SlotSupply:
    """Pools of lent slots, by quota group and slot size. Thread-safe.

    Attributes:
        pipeline: The connection that owns the leases. Its lock guards the pools.
        opened: Digests of the quota groups that an OpenNamespace has opened on the current connection.
    """

    def __init__(self, local: LocalConnection, *, retry_s: float) -> None:
        """Connect at first use."""
        self.pipeline = Pipeline(local.open_link, retry_s=retry_s)
        self._life = 0  # number of the connection on which the slots in `_pools` were lent
        self._pools: dict[tuple[bytes, int], SlotPool] = {}
        self._requests: dict[SlotPool, Posted] = {}
        self.opened: set[bytes] = set()
        self._idle_check_s = 0.0

    def pop(self, lent: LentBatch, count: int, deadline_s: float) -> None:
        """Move up to `count` slots from the pool for `lent.batch` to `lent`.

        If fewer than `count` slots are moved, `lent.reason` says why. This method waits only if the pool has too few
        slots, or if the last answered request was sent more than TRUST_S ago.

        Raises:
            PeerUnavailable: The node does not answer.
            RayKVError: The node refused to lend.
        """
        reopened = False
        while True:
            with self.pipeline.locked(deadline_s):
                pool = self._pool_locked(lent.group, lent.batch.nbytes, deadline_s)
                if self._move_locked(pool, lent, count):
                    return
                needed = max(0, count - len(pool.slots))
                if needed:
                    pool.grow(count)
                pending = self._requests.get(pool)
            mine = pending is None or pending.outcome is not None
            if pending is None or mine:
                pending = self._request(lent.group, lent.batch, pool, needed, deadline_s)
            if not self.pipeline.wait(pending, deadline_s):
                lent.reason = NO_ANSWER
                with self.pipeline.locked(deadline_s):
                    self._move_locked(pool, lent, count)
                return
            outcome = pending.outcome
            if isinstance(outcome, LostError) and not reopened:
                self.opened.discard(lent.group.digest)  # the namespace was dropped: open it again
                reopened = True
            elif isinstance(outcome, RayKVError):
                raise type(outcome)(str(outcome))
            if mine and isinstance(outcome, messages.Lent) and len(outcome.rows) < 4 * needed:
                # The node evicts nothing for a request that it reads after the deadline.
                lent.reason = "full" if time.monotonic() < deadline_s else NO_ANSWER
            else:
                lent.reason = ""

    def _pool_locked(self, group: Namespace, nbytes: int, deadline_s: float) -> SlotPool:
        """Connect, and return the pool for a quota group and a chunk size. A new connection begins without slots."""
        pipeline = self.pipeline
        pipeline.collect_arrived_locked()
        self._give_back_surplus_locked()  # before `connect_locked`, which reconnects if this send fails
        pipeline.connect_locked(deadline_s)
        if self._life != pipeline.life:
            self._life, self._pools, self._requests, self.opened = pipeline.life, {}, {}, set()
        where = group.digest, slot_nbytes(nbytes)
        pool = self._pools.get(where)
        if pool is None:
            pool = self._pools[where] = SlotPool(where[1], pipeline.reader.arena.nbytes, life=self._life)
        return pool

    def _move_locked(self, pool: SlotPool, lent: LentBatch, count: int) -> bool:
        """Move `count` slots to `lent`. If `lent.reason` already says why slots are lacking, move as many as there are.

        Returns:
            False: no slot was moved, and the caller must ask the node first.
        """
        now_s = time.monotonic()
        if pool.life != self.pipeline.life or now_s >= self.pipeline.trusted_until_s:
            return False
        if len(pool.slots) < count and not lent.reason:
            return False
        lent.slots, lent.pool = pool.pop(count, now_s), pool
        arena, nbytes = self.pipeline.reader.arena.view, lent.batch.nbytes
        lent.views = [arena[start : start + nbytes] for _, start in lent.slots]
        if len(lent.slots) == count:
            lent.reason = ""
        return True

    def _request(self, group: Namespace, batch: Batch, pool: SlotPool, needed: int, deadline_s: float) -> Posted:
        """Request `needed` slots, for which the node may evict chunks.

        Also request slots to fill up the pool. For these slots the node evicts no chunks.
        """
        pipeline = self.pipeline
        if group.digest not in self.opened:
            self._open(group, pool.life, deadline_s)
        with pipeline.locked(deadline_s):
            ahead = max(0, pool.wanted - len(pool.slots) - pool.coming)
            pool.coming += needed + ahead
        parent = b"" if batch.parent is None else chunk_keys.to_bytes(batch.parent)
        keys = chunk_keys.to_bytes(batch.keys)
        request = messages.Lend(batch.nbytes, needed, ahead, keys, parent, until_s=deadline_s, group=group.digest)
        finish = partial(self._lent, pool, needed + ahead)
        try:
            posted = pipeline.post(request, finish, deadline_s=deadline_s, life=pool.life, keys=len(batch.keys))
        except BaseException:  # the request was not sent, or an interrupt has dropped the connection and this pool
            pool.coming -= needed + ahead
            raise
        self._requests[pool] = posted
        return posted

    def _open(self, group: Namespace, life: int, deadline_s: float) -> None:
        """Open a quota group on this connection. Wait for the answer, because the node may refuse."""
        opening = messages.OpenNamespace(group.model_dump_json(exclude_defaults=True).encode(), group=group.digest)
        posted = self.pipeline.post(opening, deadline_s=deadline_s, life=life)
        if not self.pipeline.wait(posted, deadline_s):
            raise PeerUnavailable(NO_ANSWER)
        if isinstance(posted.outcome, RayKVError):
            raise type(posted.outcome)(str(posted.outcome))
        self.opened.add(group.digest)

    def _lent(self, pool: SlotPool, coming: int, outcome: Outcome) -> None:
        pool.coming -= coming
        if isinstance(outcome, messages.Lent):
            self.add_locked(pool, outcome.rows, outcome.offsets)

    def add_locked(self, pool: SlotPool, rows: bytes, offsets: bytes) -> None:
        """Add newly lent slots to `pool`. `rows`: their row numbers (i32). `offsets`: their offsets in bytes (u64).

        Raises ProtocolError if a slot does not lie in the node's memory.
        """
        if not rows:
            return
        count = len(rows) // 4
        numbers, starts = array(rows, "<i4", count).tolist(), array(offsets, "<u8", count).tolist()
        if max(starts, default=0) > self.pipeline.reader.arena.nbytes - pool.size:
            raise ProtocolError(f"a slot of {pool.size} bytes at {max(starts)}, outside the node's memory")
        pool.slots += zip(numbers, starts, strict=True)

    def put_back_locked(self, lent: LentBatch, slots: Sequence[Slot]) -> None:
        """Put unused slots back into their pool, unless their lease has ended.

        Also subtract `lent.ahead` from the pool's `coming`: the commit that requested these further slots is answered,
        or was never sent.
        """
        if lent.pool is not None and lent.life == self.pipeline.life:
            lent.pool.slots += slots
            lent.pool.coming -= lent.ahead
            lent.ahead = 0

    def prepare(self, group: Namespace, nbytes: int, count: int, deadline_s: float) -> None:
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
        """Return whether the caller may write to the slots for the next QUARANTINE_S - TRUST_S seconds.

        If the last answered request was sent more than TRUST_S ago, the node is asked again. Without an answer, the
        result is False.
        """
        pipeline, life = self.pipeline, lent.life
        probe = messages.Lend(lent.batch.nbytes, 0, group=lent.group.digest)
        try:
            while life == pipeline.life and time.monotonic() >= pipeline.trusted_until_s:
                if not pipeline.wait(pipeline.post(probe, deadline_s=deadline_s, life=life), deadline_s):
                    return False
        except PeerUnavailable:
            return False
        return life == pipeline.life

    def give_back(self, lent: LentBatch, deadline_s: float) -> None:
        """Give a batch's slots back to the node. If the request cannot be sent, put the slots back into their pool."""
        try:
            request = messages.GiveBack(rows_of(lent.slots))
            self.pipeline.wait(self.pipeline.post(request, deadline_s=deadline_s, life=lent.life), deadline_s)
        except PeerUnavailable:
            with self.pipeline.lock:
                self.put_back_locked(lent, lent.slots)

    def _give_back_surplus_locked(self) -> None:
        """Give the surplus slots of all pools back to the node, at most once per POOL_IDLE_S."""
        now_s = time.monotonic()
        if now_s < self._idle_check_s + POOL_IDLE_S or not self.pipeline.has_room_locked(0):
            return
        self._idle_check_s = now_s
        self.give_back_locked([slot for pool in self._pools.values() for slot in pool.pop_surplus(now_s - POOL_IDLE_S)])

    def give_back_locked(self, slots: Sequence[Slot]) -> None:
        """Give slots back to the node without waiting. On a broken connection, do nothing: the leases have ended."""
        try:
            if slots:
                self.pipeline.post_locked(messages.GiveBack(rows_of(slots)))
        except TransientError:
            pass

    def close(self, deadline_s: float) -> None:
        """Give all slots back to the node, and close the connection."""
        pipeline = self.pipeline
        pipeline.wait_all(deadline_s)  # an answer may bring more slots
        try:
            with pipeline.locked(deadline_s):
                if self._life == pipeline.life and pipeline.has_room_locked(0):
                    self.give_back_locked([slot for pool in self._pools.values() for slot in pool.slots])
                    self._pools = {}
        except PeerUnavailable:
            pass  # the node quarantines the slots when the connection ends
        pipeline.wait_all(deadline_s)
        pipeline.close()


def rows_of(slots: Sequence[Slot]) -> bytes:
    """Encode the row numbers of slots as i32."""
    return np.array([row for row, _ in slots], np.int32).tobytes()
