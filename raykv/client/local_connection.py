"""A client's own node, on the same host: its memory mapped, and one connection on which the leases hang.

Reads need the mapping alone and go on while the node is dead. Writes need the connection; while it is away they are
refused with a reason, and every so often the next writer tries to connect again.

A put takes slots that were lent ahead of need (`raykv.client.slot_pool`), writes to them, and tells the node in one message, whose
answer brings the next slots. Whoever does not wait for that answer leaves it to the next call that uses the connection.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from raykv.client.leases import Pins, Reservation
from raykv.client.slot_pool import (
    MAX_POSTED_KEYS,
    POOL_IDLE_S,
    TRUST_S,
    LentSlots,
    Outcome,
    QuotaGroup,
    Slot,
    SlotPool,
)
from raykv.errors import LostError, PeerUnavailable, RayKVError, TransientError, UsageError
from raykv.memory.copying import CopyThreads
from raykv.memory.reader import ShmReader
from raykv.memory.slots import slot_nbytes
from raykv.memory.table import MAX_DEPTH
from raykv.protocol import messages
from raykv.protocol.chunk_keys import KEY_NBYTES, to_bytes
from raykv.transport.base import MAX_POSTED, Link, remaining
from raykv.transport.pool import Connect
from raykv.types import NO_HINTS, Hints, KeyArray, PutResult

LOOK_S: Final = 1.0
"""How often a writer that finds everything there makes sure that it looks at the node's memory of today."""
CLOSE_S: Final = 0.2
"""How long a client that goes waits to give its slots back in order. (Else they rest for a while.)"""
LATE_S: Final = 0.1
"""How long past its deadline a call may go on, to tell of slots that are written, or to take in an answer of which a
part has arrived: else the slots stay on loan for as long as the connection lasts, or the connection is lost."""
_COLLECT_EVERY: Final = 16
"""Posted stores after which answers that have arrived are taken in."""
_STORED: Final = PutResult(1, 0, 0)
_EXISTED: Final = PutResult(0, 1, 0)
_FULL: Final = PutResult(0, 0, 1, "full")
_POSTED: Final = PutResult(0, 0, 0, "", 1)
_SPINS: Final = 200
_NAP_S: Final = 0.0001


class LocalConnection:
    """The node of this host. Thread-safe.

    Attributes:
        attached: What the node said of itself last.
        reader: Its memory.
        epoch: The greatest epoch it told of.
        posted: Stores that were not answered yet.
    """

    def __init__(self, connect: Connect, address: str, *, deadline_s: float, retry_s: float) -> None:
        """Connect and map.

        Raises:
            TransientError: It does not answer.
            LostError: Its memory is gone.
        """
        self._connect, self._address, self._retry_s = connect, address, retry_s
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._retry_at_s = 0.0
        self._life = 0
        self.attached = messages.Attached("", "", 0, "", "")
        self.reader: ShmReader
        self._opened: set[bytes] = set()
        self._pools: dict[tuple[bytes, int], SlotPool] = {}
        self._trusted_until_s = self._look_at_s = 0.0
        self._posted: deque[LentSlots] = deque()
        self._posted_keys = 0
        self._outcome = Outcome()
        self._abandoned: list[tuple[int, bytes]] = []
        self.posted = 0
        self._idle_looked_at_s = 0.0
        self.epoch = 0
        self._reconnect(deadline_s)

    def _reconnect(self, deadline_s: float) -> Link:
        link = self._connect(self._address, b"", deadline_s=deadline_s)
        try:
            attached = link.call(messages.Attach(), deadline_s=deadline_s)
            assert isinstance(attached, messages.Attached)
            files = (attached.table, attached.arena)
            if self._life == 0 or files != (self.attached.table, self.attached.arena) or not self.reader.is_current():
                # The old one is not closed: somebody may be reading from it. It goes with its last user.
                self.reader = ShmReader(attached.table, attached.arena, writable=True)
        except BaseException:
            link.close()
            raise
        self.attached, self._link = attached, link
        self._opened, self._pools = set(), {}
        self._life += 1
        return link

    def call(self, request: messages.Message, *, deadline_s: float, life: int | None = None) -> messages.Answer:
        """Ask the node.

        Args:
            life: Only on the connection of that number (leases of another one are gone).

        Raises:
            PeerUnavailable: It is away.
            RayKVError: It refused.
        """
        if not self._lock.acquire(timeout=remaining(deadline_s)):
            raise PeerUnavailable("the local node is busy with others")
        try:
            return self._call(request, deadline_s, life)
        finally:
            self._lock.release()

    def holds(self, life: int, deadline_s: float) -> bool:
        """Whether the leases of the connection of that number are alive, or were TRUST_S ago.

        The node is asked if it has not answered since. False also if it does not answer by the deadline.
        """
        if time.monotonic() >= self._trusted_until_s:
            try:
                self.call(messages.GetView(), deadline_s=deadline_s, life=life)
            except RayKVError:
                return False
        trusted = (
            time.monotonic() < self._trusted_until_s
        )  # perhaps for another one, by now: which comes to light below
        return trusted and life == self._life and self._link is not None

    def abandon(self, rows: bytes, life: int, deadline_s: float) -> None:
        """Give up rows (i32) that were reserved on the connection of that number; later, if there is no time for it."""
        try:
            self.call(messages.Abort(rows), deadline_s=deadline_s, life=life)
        except TransientError:
            if life == self._life:
                self._abandoned.append((life, rows))  # the next call takes them along, if the connection still lives

    def _call(self, request: messages.Message, deadline_s: float, life: int | None = None) -> messages.Answer:
        remaining(deadline_s)  # a late caller must not cost the others their connection, and its leases
        had_link = self._link is not None
        if life is not None and (life != self._life or not had_link):
            raise PeerUnavailable("the connection that held the lease is gone")
        try:
            return self._call_once(request, deadline_s)
        except PeerUnavailable:
            # The node may just have been restarted; no request does harm when it is made twice, but leases are gone.
            if not had_link or life is not None:
                raise
            return self._call_once(request, deadline_s)

    def _call_once(self, request: messages.Message, deadline_s: float) -> messages.Answer:
        link = self._link or self._try_reconnect(deadline_s)
        try:
            while self._posted:
                self._collect(link, deadline_s)
            while self._abandoned:
                life, rows = self._abandoned.pop()
                if life == self._life:
                    link.call(messages.Abort(rows), deadline_s=deadline_s)
            asked_at_s = time.monotonic()
            answer = link.call(request, deadline_s=deadline_s)
        except BaseException as error:
            if isinstance(error, TransientError) or not isinstance(
                error, RayKVError
            ):  # else it has answered, and refused
                self._drop_link(str(error) or "the call was interrupted")
            raise
        self._heard(link, asked_at_s)
        return answer

    def _heard(self, link: Link, asked_at_s: float) -> None:
        """There is an answer to what was asked then, so our leases were alive then."""
        self._trusted_until_s = asked_at_s + TRUST_S
        if link.epoch > self.epoch:
            self.epoch = link.epoch

    def _drop_link(self, reason: str) -> None:
        """The connection is of no more use. What was posted on it may or may not have been stored."""
        if self._link is not None:
            self._link.close()
            self._link = None
        for each in self._posted:
            if each.published and each.reader.is_current():
                each.note(stored=len(each.slots))
            else:
                each.note(skipped=len(each.slots), reason=reason)
        self._posted.clear()
        self._posted_keys = self.posted = 0

    def _try_reconnect(self, deadline_s: float) -> Link:
        remaining(deadline_s)
        if time.monotonic() < self._retry_at_s:
            raise PeerUnavailable("the local node is away")
        try:
            return self._reconnect(deadline_s)
        except RayKVError as error:
            self._retry_at_s = time.monotonic() + self._retry_s
            raise PeerUnavailable(f"the local node is away: {error}") from error

    def _open(self, group: QuotaGroup, deadline_s: float) -> None:
        """Make the quota group known to the node, once in each of its lives."""
        if self._link is None or group.digest not in self._opened:
            self._call(messages.OpenNamespace(group.text), deadline_s)
            self._opened.add(group.digest)

    def _call_about(self, group: QuotaGroup, request: messages.Message, deadline_s: float) -> messages.Answer:
        """Ask something about an quota group that is open."""
        self._open(group, deadline_s)
        try:
            return self._call(request, deadline_s)
        except LostError:  # the node began anew in between, with empty hands
            self._opened.clear()
            self._open(group, deadline_s)
            return self._call(request, deadline_s)

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        group: QuotaGroup,
        keys: KeyArray,
        values: Sequence[Sequence[memoryview]],
        nbytes: int,
        *,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        wait: bool,
        deadline_s: float,
        threads: CopyThreads,
        hints: Hints = NO_HINTS,
    ) -> PutResult:
        """Store a run of chunks of one size.

        Args:
            values: For each key the views that together are its `nbytes` bytes.
            wait: Until every reader sees them. Otherwise see `flush`.
            threads: Copy them into their slots.

        Raises:
            TransientError: The node is away. Nothing was stored.
            UsageError: The size does not fit an extent.
        """
        self._require_size(nbytes)
        if not 0 <= depth < MAX_DEPTH:
            raise UsageError(f"depth {depth} is not in 0 .. {MAX_DEPTH - 1}")
        if len(keys) == 1:
            above = _raw(parent) if chained else b""
            return self._put_one(
                group, to_bytes(keys), values[0], nbytes, chained, above, depth, wait, deadline_s, hints
            )
        places = self._missing(keys)
        if not places:
            return PutResult(0, len(keys), 0)
        with self._lock:
            lent_slots = self._borrow(group, keys, len(places), nbytes, _raw(parent), deadline_s)
        written = places[: len(lent_slots.slots)]
        full = len(places) - len(written)
        existed = len(keys) - len(places)
        if not written:
            return PutResult(0, existed, full, "full")
        every = len(written) == len(keys)
        try:
            reader = lent_slots.reader
            arena = reader.arena.view
            rows, starts, generations = map(list, zip(*lent_slots.slots, strict=True))
            views = [arena[start : start + nbytes] for start in starts]
            checksums = threads.fill(views, [values[place] for place in written])
            raw = to_bytes(keys)
            request = messages.Store(
                group.digest,
                raw,
                nbytes,
                np.array(rows, np.int32).tobytes(),
                checksums.tobytes(),
                b"" if every else np.array(written, np.int32).tobytes(),
                chained,
                _raw(parent),
                depth,
                0,
                *hints,
            )
            named = raw if every else to_bytes(keys[written])
            lent_slots.keys = len(keys)
            lent_slots.published = reader.publish(rows, generations, named, request.checksums, nbytes)
            others = self._tell(request, lent_slots, wait=wait, deadline_s=deadline_s)
        except BaseException as error:
            self._return(lent_slots, whole=isinstance(error, Exception))
            raise
        reason = "full" if full else ""
        if not wait:
            return PutResult(0, existed, full, reason, len(written))
        return PutResult(len(written) - others, existed + others, full, reason)

    def put_one(
        self,
        group: QuotaGroup,
        key: bytes,
        pieces: Sequence[memoryview],
        *,
        wait: bool,
        deadline_s: float,
        hints: Hints = NO_HINTS,
    ) -> bool:
        """Store one chunk that is part of no chain; `key` as `keys.to_bytes` writes it.

        Returns:
            Whether it is there, or was posted. False: no room.

        Raises:
            As `put`.
        """
        nbytes = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        self._require_size(nbytes)
        return not self._put_one(group, key, pieces, nbytes, False, b"", 0, wait, deadline_s, hints).skipped

    def _put_one(
        self,
        group: QuotaGroup,
        key: bytes,
        pieces: Sequence[memoryview],
        nbytes: int,
        chained: bool,
        parent: bytes,
        depth: int,
        wait: bool,
        deadline_s: float,
        hints: Hints,
    ) -> PutResult:
        """A put of one chunk is all call and no work: no array is made for it."""
        if self.reader.known_one(key) and self._looks_at_today():
            return _EXISTED
        with self._lock:
            lent_slots = self._borrow(group, key, 1, nbytes, parent, deadline_s)
        if not lent_slots.slots:
            return _FULL
        try:
            row, start, generation = lent_slots.slots[0]
            lent_slots.keys = 1
            lent_slots.published, checksum = lent_slots.reader.store_one(row, generation, start, key, pieces, nbytes)
            rows = row.to_bytes(4, "little")
            request = messages.Store(group.digest, key, nbytes, rows, checksum, b"", chained, parent, depth, 0, *hints)
            others = self._tell(request, lent_slots, wait=wait, deadline_s=deadline_s)
        except BaseException as error:
            self._return(lent_slots, whole=isinstance(error, Exception))
            raise
        return _EXISTED if others else _STORED if wait else _POSTED

    def _require_size(self, nbytes: int) -> None:
        most = self.reader.table.extent_nbytes
        if not 0 < nbytes <= most:
            raise UsageError(
                f"a chunk of {nbytes:,} bytes does not fit: at least 1, and at most extent_nbytes ({most:,}); "
                "raise extent_nbytes or cut the value into chunks"
            )

    def _missing(self, keys: KeyArray) -> list[int]:
        """Places of the keys that are not here, and that nobody is writing either; each key once."""
        table = self.reader.table
        rows, _ = table.look(keys, None)
        # Plain lists from here on: numpy's sorts and lookups by number let go of the interpreter's lock for an instant,
        # and who waits for it wakes in vain, again and again.
        expires, now = table.cells.expires, table.ticks(time.monotonic())
        places = [place for place, row in enumerate(rows.tolist()) if row < 0 or 0 < expires[row] <= now]
        if not places:
            if self._looks_at_today():
                return []
            places = list(range(len(keys)))
        lows = keys[:, 1].tolist()
        if len({lows[place] for place in places}) < len(places):
            raw = to_bytes(keys)
            first: dict[bytes, int] = {}
            for place in places:
                first.setdefault(raw[KEY_NBYTES * place : KEY_NBYTES * (place + 1)], place)
            places = list(first.values())
        return places

    def _looks_at_today(self) -> bool:
        """Whether our mapping is the node's, as far as was to be seen of late. If not, the next call maps it anew."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            with self._lock:
                if not self.reader.is_current():
                    self._drop_link("the node's memory was made anew")
                    self._look_at_s = 0.0
                    return False
        return True

    def _borrow(
        self,
        group: QuotaGroup,
        keys: KeyArray | bytes,
        count: int,
        nbytes: int,
        parent: bytes,
        deadline_s: float,
    ) -> LentSlots:
        """Up to `count` slots to write now: from the pool, and what it lacks from the node. Fewer: it is full."""
        where, now_s = (group.digest, slot_nbytes(nbytes)), time.monotonic()
        if now_s >= self._idle_looked_at_s + POOL_IDLE_S:
            self._idle_looked_at_s = now_s
            if self._link is not None:
                self._give_back_idle(deadline_s)
        pool = self._pools.get(where)
        if pool is not None and len(pool.slots) < count:
            self._take_in_arrived(deadline_s)  # the answers bring slots
            pool = self._pools.get(where)  # (The pools go when the connection does.)
        if pool is None or self._link is None or len(pool.slots) < count or now_s >= self._trusted_until_s:
            pool = self._borrow_more(group, keys, count, nbytes, parent, deadline_s)
            now_s = time.monotonic()
        return LentSlots(pool, self._life, self.reader, pool.take(count, now_s))

    def _borrow_more(
        self,
        group: QuotaGroup,
        keys: KeyArray | bytes,
        count: int,
        nbytes: int,
        parent: bytes,
        deadline_s: float,
    ) -> SlotPool:
        """The pool, with `count` slots in it if the node has them, and the node's word that they are ours."""
        self._open(group, deadline_s)
        where = (group.digest, slot_nbytes(nbytes))
        raw = keys if isinstance(keys, bytes) else to_bytes(keys)
        while True:
            life = self._life
            pool = self._pools.setdefault(where, SlotPool(where[1], self.reader.arena.nbytes))
            needed = max(0, count - len(pool.slots))
            if needed:
                pool.ran_short(count)
            wanted = pool.wanted
            ahead = max(0, wanted - pool.coming) if needed else 0
            request = messages.Lend(group.digest, nbytes, needed, ahead=ahead, keys=raw, parent=parent)
            lent = messages.expect(messages.Lent, self._call_about(group, request, deadline_s))
            # Another one, and empty, if the connection was made anew: then what the old one had is not ours any more.
            pool = self._pools.setdefault(where, SlotPool(where[1], self.reader.arena.nbytes))
            pool.wanted = max(pool.wanted, wanted)
            self._add(pool, lent.rows, lent.offsets)
            if life == self._life:  # else what we had went with the connection, and is lacking
                return pool

    def _give_back_idle(self, deadline_s: float) -> None:
        """Give back slots of pools that were not used of late."""
        idle = time.monotonic() - POOL_IDLE_S
        self._take_in_arrived(deadline_s)
        for where, pool in [*self._pools.items()]:
            if pool.used_at_s < idle and not pool.coming and pool.slots and self._pools.get(where) is pool:
                pool.wanted = 0  # (It stays: what is being written now may bring it slots.)
                taken = pool.take(len(pool.slots), pool.used_at_s)
                try:
                    self._call(messages.Abort(_rows_of(taken)), max(deadline_s, time.monotonic() + LATE_S), self._life)
                except TransientError:
                    if self._link is not None:
                        pool.slots += taken  # there was no time to ask
                    return  # else they went with the connection; a new one is not worth the wait here

    def _tell(self, request: messages.Store, lent_slots: LentSlots, *, wait: bool, deadline_s: float) -> int:
        """Tell the node of slots that are written. Returns how many of their chunks others had stored.

        Who waits need not wait for the node's answer when all could be published: every reader sees them.
        """
        try:
            with self._lock:
                lent_slots.asked_at_s = now_s = time.monotonic()
                lent_slots.ahead = request.ahead = lent_slots.pool.lacking(now_s)
                # Also if writing took too long: what was published stays in place until the node has heard of it.
                deadline_s = max(deadline_s, now_s + LATE_S)
                if wait and not lent_slots.published:
                    answer = self._call(request, deadline_s, life=lent_slots.life)
                    return self._stored(answer, lent_slots)
                if not wait:
                    lent_slots.outcome = self._outcome
                self._post(request, lent_slots, deadline_s)
        except TransientError:
            # The node finds it by itself, or the next one in its place, as long as the memory is the same.
            if not lent_slots.published or not lent_slots.reader.is_current():
                raise
            if not wait:
                self._outcome.note(stored=len(lent_slots.slots))
        return 0

    def _post(self, request: messages.Store, lent_slots: LentSlots, deadline_s: float) -> None:
        remaining(deadline_s)  # see `_call`
        link, posted = self._link, self._posted
        if link is None or lent_slots.life != self._life:
            raise PeerUnavailable("the connection that held the lease is gone")
        while len(posted) >= MAX_POSTED or (posted and self._posted_keys + lent_slots.keys > MAX_POSTED_KEYS):
            self._collect_or_drop(link, deadline_s, raising=True)
        try:
            link.post(request, deadline_s=deadline_s)
        except BaseException as error:
            self._drop_link(str(error) or "the call was interrupted")
            raise
        posted.append(lent_slots)
        lent_slots.pool.coming += lent_slots.ahead
        self._posted_keys += lent_slots.keys
        self.posted = len(posted)
        if self.posted % _COLLECT_EVERY == 0:
            self._take_in_arrived(deadline_s)

    def _stored(self, answer: messages.Answer, lent_slots: LentSlots) -> int:
        """Put unused slots back, and those lent anew to them. Returns how many were not used."""
        stored = messages.expect(messages.Stored, answer)
        unused: list[int] = []
        if stored.unused:
            unused = np.frombuffer(stored.unused, "<i4").tolist()
            self._lent(lent_slots.pool, [lent_slots.slots[place] for place in unused])
        if stored.rows:
            self._add(lent_slots.pool, stored.rows, stored.offsets)
        return len(unused)

    def _add(self, pool: SlotPool, rows: bytes, offsets: bytes) -> None:
        starts = np.frombuffer(offsets, "<u8").tolist()
        self._lent(
            pool, [(row, start, 0) for row, start in zip(np.frombuffer(rows, "<i4").tolist(), starts, strict=True)]
        )

    def _lent(self, pool: SlotPool, slots: Sequence[Slot]) -> None:
        """These are lent to us (again), but for those that we have published."""
        generation = self.reader.table.cells.generation
        pool.slots += [(row, start, now) for row, start, _ in slots if (now := generation[row]) & 1]

    def _collect(self, link: Link, deadline_s: float) -> None:
        """Take in the answer to the oldest posted store.

        Raises:
            TransientError: The connection is of no more use.
        """
        oldest = self._posted[0]
        count, others, reason = len(oldest.slots), 0, ""
        try:
            others = self._stored(link.collect(deadline_s=deadline_s), oldest)
        except TransientError:
            raise
        except RayKVError as error:  # it was refused as a whole
            reason = str(error)
            self._lent(oldest.pool, oldest.slots)
        self._posted.popleft()
        oldest.pool.coming -= oldest.ahead
        self._posted_keys -= oldest.keys
        self.posted = len(self._posted)
        self._heard(link, oldest.asked_at_s)
        if reason:
            oldest.note(skipped=count, reason=reason)
        else:
            oldest.note(stored=count - others, existed=others)

    def _collect_or_drop(self, link: Link, deadline_s: float, *, raising: bool = False) -> None:
        try:
            self._collect(link, deadline_s)
        except BaseException as error:
            self._drop_link(str(error) or "the call was interrupted")
            if raising or not isinstance(error, TransientError):
                raise

    def _take_in_arrived(self, deadline_s: float) -> None:
        """Take in the answers that are there, or of which a part is."""
        while self._posted and self._link is not None and self._link.ready():
            self._collect_or_drop(self._link, max(deadline_s, time.monotonic() + LATE_S))

    def settle(self, deadline_s: float) -> bool:
        """Wait until nothing is posted any more, as far as that happens by the deadline.

        Returns:
            True if something was posted, and now is not: who looks again may see more.
        """
        if not self.posted:
            return False
        spins = 0
        while self.posted:
            with self._lock:
                self._take_in_arrived(deadline_s)
            if not self.posted:
                break
            if time.monotonic() >= deadline_s:
                return False
            spins += 1
            time.sleep(0.0 if spins < _SPINS else _NAP_S)
        return True

    def flush(self, deadline_s: float) -> PutResult:
        """Wait for all that was posted, and tell what became of it since the last time. Never raises.

        Returns:
            Chunks that were posted: stored, existed by then, or skipped; `posted` are those that are not answered yet.
        """
        self.settle(deadline_s)
        with self._lock:
            done = self._outcome.take()
            waiting = sum(len(each.slots) for each in self._posted if each.outcome is not None)
        return PutResult(done.stored, done.existed, done.skipped, done.reason, waiting)

    def _return(self, lent_slots: LentSlots, *, whole: bool) -> None:
        """Put slots back that were not used after all, if they are still ours.

        Args:
            whole: We know what became of them. Else (KeyboardInterrupt, say) the node may have been told of them, or
                another thread may still write to them: the connection ends, and the node lets them rest for a while.
        """
        with self._lock:
            if lent_slots.life == self._life and self._link is not None:
                if whole:
                    self._lent(lent_slots.pool, lent_slots.slots)
                else:
                    self._drop_link("a put was interrupted")

    def reserve(
        self,
        group: QuotaGroup,
        keys: KeyArray,
        nbytes: int,
        *,
        chained: bool,
        parent: KeyArray | None,
        depth: int,
        deadline_s: float,
    ) -> Reservation:
        """Room in the arena for those keys that the node does not hold.

        Raises:
            PeerUnavailable: The node is away.
            UsageError: The size does not fit an extent.
        """
        request = messages.Reserve(group.digest, to_bytes(keys), nbytes, chained, _raw(parent), depth)
        with self._lock:
            answer = self._call_about(group, request, deadline_s)
            life, reader = self._life, self.reader
        assert isinstance(answer, messages.Granted)
        return Reservation(self, life, reader, len(keys), nbytes, answer)

    def pin(self, keys: KeyArray, *, deadline_s: float) -> Pins:
        """Hold chunks that lie here, and view them in place."""
        with self._lock:
            answer = self._call(messages.Pin(to_bytes(keys)), deadline_s)
            life, reader = self._life, self.reader
        assert isinstance(answer, messages.Held)
        return Pins(self, life, reader, answer)

    def close(self) -> None:
        """Let go; leases end."""
        with self._lock:
            if self._link is not None and (self._posted or self._pools):
                self._give_back_all(time.monotonic() + CLOSE_S)
            self._drop_link("the client was closed")
            self._retry_at_s = float("inf")
        self.reader.close()

    def _give_back_all(self, deadline_s: float) -> None:
        slots = [slot for pool in self._pools.values() for slot in pool.take(len(pool.slots), 0.0)]
        try:
            if slots or self._posted:
                self._call(messages.Abort(_rows_of(slots)), deadline_s, self._life)
        except RayKVError:
            pass  # they rest for a while, then


def _rows_of(slots: Sequence[Slot]) -> bytes:
    return np.array([row for row, _, _ in slots], np.int32).tobytes()


def _raw(parent: KeyArray | None) -> bytes:
    return b"" if parent is None else to_bytes(parent)
