"""Requests that store, change and delete chunks: Lend, Commit, GiveBack, Write, Delete, Hint."""

import math
import threading
import time
from collections.abc import Sequence

import numpy as np

from raykv.errors import CapacityError, RayKVError, UsageError
from raykv.memory.slots import slot_nbytes
from raykv.node.announcer import Announcer
from raykv.node.handlers.incoming import Incoming
from raykv.node.handlers.write_below import BelowWriter
from raykv.node.reclaimer import Reclaimer
from raykv.node.replicas import Replicas
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import codec, messages
from raykv.protocol.chunk_keys import KEY_NBYTES
from raykv.protocol.codec import keys_in, numbers_in, parent_in
from raykv.protocol.messages import MAX_KEYS
from raykv.storage.batches import Written, require_size
from raykv.storage.store import Store
from raykv.tier.mover import TierMover
from raykv.transport.base import Reply
from raykv.types import Batch, Hints, KeyArray, Rows


class WriteHandler:
    """Lends slots to writers, and commits the chunks that the writers have put into the slots.

    A slot is the place of one chunk in the arena. A lent slot belongs to one connection until its chunk is committed or
    the slot is given back.
    """

    def __init__(
        self,
        store: Store,
        lock: threading.Lock,
        mover: TierMover,
        announcer: Announcer,
        reclaimer: Reclaimer,
        replicas: Replicas,
        draining: threading.Event,
    ) -> None:
        """Take the node's parts. `draining`: once set, nothing is stored any more."""
        self._replicas, self._draining = replicas, draining
        self._store, self._lock, self._mover = store, lock, mover
        self._announcer, self._reclaimer = announcer, reclaimer
        self._below = BelowWriter(store, lock, mover)
        self.table: HandlerTable = {
            messages.Lend: self._lend,
            messages.Commit: self._commit,
            messages.GiveBack: self._give_back,
            messages.Write: self._write,
            messages.Delete: self._delete,
            messages.Hint: self._hint,
        }

    def _lend(self, request: messages.Lend, session: NodeSession) -> Reply:
        _require_count("count", request.count)
        _require_count("ahead", request.ahead)
        parent = parent_in(request.parent)
        protect = [keys_in(request.keys), *(() if parent is None else (parent,))]
        with self._lock:
            now_s, most = time.monotonic(), self._most_slots(session, request.nbytes)
            count = min(request.count, most) if now_s < request.until_s else 0
            self._wait_for_room(request.group, request.nbytes, count, protect, request.until_s)
            slots = self._store.lend(
                self._store.groups.number(request.group),
                request.nbytes,
                count,
                ahead=min(request.ahead, most - count),
                protect=protect,
                now_s=now_s,
            )
            session.add_lent(slots.rows, request.nbytes)
        self._reclaimer.wake_if_due()
        return Reply(messages.Lent(slots.rows.tobytes(), slots.offsets.tobytes()))

    def _wait_for_room(
        self, group: bytes, nbytes: int, count: int, protect: Sequence[KeyArray], until_s: float = math.inf
    ) -> None:
        """Wait until `count` slots can be lent, if writes to the tiers stand in the way. The caller holds the lock."""
        store = self._store
        require_size(nbytes, store.config.extent_nbytes)

        def room() -> bool:
            number, now = store.groups.number(group), store.table.ticks(time.monotonic())
            rows = np.concatenate([*map(store.table.find, protect)])
            return store.evictor.make_room(count, slot_nbytes(nbytes), number, rows, now) == count

        self._mover.demotion.wait_for_room(room, until_s)

    def _commit(self, request: messages.Commit, session: NodeSession) -> Reply:
        with self._lock:
            group = self._store.groups.number(request.group)
        committed = []
        for run in request.runs:
            try:
                committed.append(self._commit_run(group, run, session))
            except RayKVError as error:
                committed.append(messages.CommittedRun(problem=codec.failure(error).text))
        self._announcer.wake()
        self._reclaimer.wake_if_due()
        return Reply(messages.Committed(tuple(committed)))

    def _commit_run(self, group: int, run: messages.Run, session: NodeSession) -> messages.CommittedRun:
        _require_count("ahead", run.ahead)
        if self._draining.is_set():
            raise CapacityError("this node is being drained: it stores no more chunks")
        batch, rows = _batch_in(run), numbers_in(run.rows, "<i4")
        positions = numbers_in(run.positions, "<i4") if run.positions else np.arange(len(batch.keys), dtype=np.int32)
        written = Written(positions, rows, numbers_in(run.checksums, "<u8"))
        session.require_lent(rows)
        answer, now_s = messages.CommittedRun(), time.monotonic()
        with self._lock:
            used = self._store.commit(group, batch, written, now_s=now_s)
            session.end_lent(rows[used])
            if ahead := min(run.ahead, self._most_slots(session, run.nbytes)):
                slots = self._store.lend(group, run.nbytes, 0, ahead=ahead, now_s=now_s)
                session.add_lent(slots.rows, run.nbytes)
                answer.rows, answer.offsets = slots.rows.tobytes(), slots.offsets.tobytes()
        if not used.all():
            answer.unused = np.flatnonzero(~used).astype("<i4").tobytes()
        return answer

    def _most_slots(self, session: NodeSession, nbytes: int) -> int:
        """Return how many slots for chunks of `nbytes` bytes may be lent to a connection now."""
        return 0 if self._draining.is_set() else session.most_slots(nbytes)

    def _give_back(self, request: messages.GiveBack, session: NodeSession) -> Reply:
        rows = numbers_in(request.rows, "<i4")
        session.require_lent(rows)
        self._return_slots(rows, session)
        return Reply(messages.Done())

    def _write(self, request: messages.Write, session: NodeSession) -> Reply:
        """Lend slots, receive chunks into the slots, commit the intact chunks, and take the other slots back."""
        batch, now_s = _batch_in(request), time.monotonic()
        if len(request.replica) not in (0, KEY_NBYTES):
            raise UsageError(f"field 'replica': {len(request.replica)} bytes, where a key of {KEY_NBYTES} was due")
        pairs = session.require_queue_pairs() if request.rdma else None
        if request.below:
            return self._below.reply(request.group, batch, pairs, most=self._most_slots(session, request.nbytes))
        protect = [batch.keys, *(() if batch.parent is None else (batch.parent,))]
        with self._lock:
            if request.evict:
                absent = len(self._store.missing(batch.keys, now_s=now_s))
                count = min(absent, self._most_slots(session, request.nbytes))
                self._wait_for_room(request.group, request.nbytes, count, protect)
            group = self._store.groups.number(request.group)
            missing = self._store.missing(batch.keys, now_s=now_s)
            if not request.replica:
                self._replicas.make_ordinary(batch.keys)
            count = min(len(missing), self._most_slots(session, request.nbytes))
            count = count if request.evict else min(count, self._store.evictor.spare_slots(slot_nbytes(request.nbytes)))
            slots = self._store.lend(group, request.nbytes, count, protect=protect, now_s=now_s)
            session.add_lent(slots.rows, request.nbytes)
        positions = missing[: len(slots.rows)]
        incoming = Incoming(self._store.arena.view, batch.nbytes, slots, positions, pairs)

        def store(written: Written) -> int:
            count = self._commit_written(group, batch, written, session)
            if request.replica:
                self._add_replica(request.replica, batch, written)
            return count

        def release() -> None:
            self._return_slots(np.array([row for row in slots.rows.tolist() if row in session.lent]), session)

        return incoming.reply(len(missing) - len(positions), store, release)

    def _commit_written(self, group: int, batch: Batch, written: Written, session: NodeSession) -> int:
        """Commit chunks of a Write. Return the number of stored chunks."""
        with self._lock:
            used = self._store.commit(group, batch, written, now_s=time.monotonic())
            session.end_lent(written.rows[used])
        self._announcer.wake()
        self._reclaimer.wake_if_due()
        return int(used.sum())

    def _add_replica(self, head: bytes, batch: Batch, written: Written) -> None:
        """Record that another node has sent a part of a hot prefix. The chunks in `written` were missing here."""
        with self._lock:
            rows = self._store.table.find(batch.keys[written.positions])
            self._replicas.add(head, batch.keys, rows[rows == written.rows], now_s=time.monotonic())

    def _return_slots(self, rows: Rows, session: NodeSession) -> None:
        with self._lock:
            self._store.give_back(rows.astype(np.int32))
            session.end_lent(rows)

    def _delete(self, request: messages.Delete, session: NodeSession) -> Reply:
        keys = keys_in(request.keys)
        with self._mover.barring(keys):
            below = self._mover.delete(keys)
            with self._lock:
                count = self._store.delete(keys, now_s=time.monotonic())
                self._mover.give_up(keys)
        self._announcer.wake()
        return Reply(messages.Count(max(count, below)))

    def _hint(self, request: messages.Hint, session: NodeSession) -> Reply:
        keys = keys_in(request.keys)
        if request.retain is not None:
            with self._lock:
                count = self._store.row_hints.retain(keys, *request.retain, now_s=time.monotonic())
            return Reply(messages.Count(count))
        with self._lock:
            count = self._store.hint(
                keys,
                ttl_s=request.ttl_s,
                priority=request.priority,
                ended=request.ended,
                touch=request.touch,
                output_tokens=request.output_tokens,
                now_s=time.monotonic(),
            )
        if request.ttl_s is not None:
            self._mover.drop_outdated(keys)
        return Reply(messages.Count(count))


def _batch_in(request: messages.Run | messages.Write) -> Batch:
    return Batch(
        keys_in(request.keys),
        request.nbytes,
        parent=parent_in(request.parent),
        depth=request.depth,
        chained=request.chained,
        hints=Hints(request.ttl_s, request.priority),
    )


def _require_count(field: str, count: int) -> None:
    if not 0 <= count <= MAX_KEYS:
        raise UsageError(f"field '{field}': {count:,} slots in one request; at most {MAX_KEYS:,}")
