"""One path of an SSD tier: what its threads do next, and what becomes of it. See `raykv.tier.ssd`.

Everything here is under the tier's lock, but for the methods that say "on a thread": these wait for the disk.

What a start would find is in the index at all times, or is told to be gone by a record, or will be as soon as what is
in a queue has been written. For that a segment leaves in this order: what is to be moved on is written elsewhere, the
segment's first and last block are wiped, its chunks leave the index, it is free.
"""

import errno
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from raykv.config import SsdConfig
from raykv.errors import ConfigError
from raykv.memory.copying import checksum_of
from raykv.tier.common import Common, Item, Request, raw_keys
from raykv.tier.index import SEGMENTS, key_array
from raykv.tier.log import Batch, Log, Segment, second_chance
from raykv.tier.segment import (
    BLOCK_NBYTES,
    DROPPED,
    ENTRY,
    GONE,
    TAIL_BLOCKS,
    Record,
    blocks_needed,
    blocks_of,
    encode,
    living,
    read_segment,
)
from raykv.tier.volume import IOV_MAX, IoThreads, Volume, aligned
from raykv.types import Bits, Rows

log = logging.getLogger(__name__)

BATCH_NBYTES: Final = 8 << 20
BATCH_CHUNKS: Final = IOV_MAX - 1
"""Chunks of one batch at most; its record is one more piece of the same call."""
BATCH_GONE: Final = 1 << 14
"""Deleted keys that one record tells of."""
READ_NBYTES: Final = 4 << 20
"""Neighbours are read by one call up to this size."""
QUEUED_READS: Final = 1 << 14
"""Chunks that may wait to be read on one path."""
PENDING_GONE: Final = 1 << 20
"""Deleted keys that are kept for a path that is off. With more, all that lies there is forgotten when it comes back."""
FEWEST_SEGMENTS: Final = 2
ROWS_SPARE: Final = 2048
"""With fewer rows free in the index, or than an eighth of all, a segment is reclaimed."""
RETRY_S: Final = 30.0
"""A path that failed is tried again after so long, and one that was full may grow again."""
BAD_READS: Final = 3
"""So many reads in a row that the drive fails turn the path off. Before, only the chunks are given up."""
VERIFY_NBYTES: Final = 8 << 20
"""What an unsealed segment holds is compared with its checksums in pieces of this size."""


@dataclass(eq=False, slots=True)
class Load:
    """What a batch is made of: chunks, their rows (for those that are new), and what it tells."""

    items: list[Item]
    rows: Rows
    gone: list[bytes]
    dropped: list[bytes]
    epoch: int


@dataclass(eq=False, slots=True)
class Piece:
    """A chunk to be read: into the arena, for a request."""

    row: int
    segment: int
    block: int
    nbytes: int
    checksum: int
    offset: int
    request: Request
    place: int


class Drive:
    """One path.

    Attributes:
        state: "starting", "on" or "off".
        slow: An operation takes too long: it gets nothing new.
        reason: Why it is off, slow or does not grow; empty if nothing is wrong.
        gone, dropped: Keys and accounts that a record must tell of.
        epoch: Counts how often all that was under way became void.
    """

    def __init__(
        self, number: int, volume: Volume, config: SsdConfig, common: Common, clock: Callable[[], float]
    ) -> None:
        """Begin with `start`."""
        self.number, self.volume, self.common = number, volume, common
        self._config, self._clock = config, clock
        self.segment_blocks = config.segment_nbytes // BLOCK_NBYTES
        self._incarnation = secrets.randbits(64)
        self._rows_spare = min(ROWS_SPARE, common.index.rows // 8)
        self.state, self.slow, self.reason, self.epoch = "starting", False, "", 0
        self.gone: dict[bytes, None] = {}
        self.dropped: dict[bytes, None] = {}
        self.log = self._new_log()
        self.wake = threading.Condition(common.lock)
        self.retry_at_s = self._grow_at_s = 0.0
        self._tasks: deque[Callable[[], None]] = deque()
        self._reads: deque[list[Piece]] = deque()
        self.reads_queued = 0
        self._moves: deque[Item] = deque()
        self._moving = 0
        self._flying: set[Batch] = set()
        self._making = self._checking = self._forget_all = self._closed = False
        self._logged = ""
        self._bad_reads = self._unscanned = 0
        self._told_gone: dict[bytes, int] = {}
        self._told_dropped: dict[bytes, int] = {}
        self._buffers: list[memoryview] = []
        self.io: IoThreads | None = None

    def _new_log(self) -> Log:
        limit = min(SEGMENTS - 1, self._config.capacity_nbytes // self._config.segment_nbytes)
        return Log(limit=limit, segment_blocks=self.segment_blocks, incarnation=self._incarnation)

    def start(self) -> None:
        """Start the threads, and look for what is there; or be off, if the directory could not be opened."""
        with self.common.lock:
            if self.state == "starting":
                self._tasks.append(self._look)
        self.io = IoThreads(self._config.depth, f"raykv-ssd{self.number}", self._take, self._clock)

    @property
    def on(self) -> bool:
        """Whether it takes something new."""
        return self.state == "on" and not self.slow

    @property
    def readable(self) -> bool:
        return self.state != "off" and not self.slow

    def tells_pending(self) -> bool:
        """Whether something is to be told that no record on the drive tells yet."""
        return bool(self.gone or self.dropped) or any(
            batch.content.gone or batch.content.dropped or any(item.cancelled for item in batch.content.items)
            for batch in self._flying
        )

    # -- what is next -----------------------------------------------------------------------------------------------

    def _take(self, thread: int) -> Callable[[], None] | None:
        common = self.common
        with common.lock:
            while (task := self._next(thread)) is None:
                if common.ended and not (self.on and self.tells_pending()):
                    return None
                self.wake.wait()
            return task

    def _next(self, thread: int) -> Callable[[], None] | None:
        if self.common.finished:
            return self.common.finished.popleft().call
        if self.slow:
            return None
        if thread == 0 and self.state == "on" and self._config.depth > 1:
            return self._upkeep() or self._batch() or self._read()
        return self._read() or self._upkeep() or self._batch()

    def _upkeep(self) -> Callable[[], None] | None:
        """Something that keeps the log going."""
        if self._tasks:
            return self._tasks.popleft()
        if self.state != "on":
            return None
        to_seal = self.log.to_seal()
        if to_seal is not None:
            return lambda: self._seal(to_seal)
        if self.common.ended:
            return None
        if self.log.wants_space() and not self._making:
            number = self.log.absent() if self._clock() >= self._grow_at_s else None
            if number is not None:
                self._making = True
                return lambda: self._make(number)
        short = self.log.wants_space() or self.common.index.free_rows() < self._rows_spare
        if short and not self._making and (victim := self.log.victim()) is not None:
            return lambda: self._reclaim(victim)
        return None

    def notify(self) -> None:
        """There is something to do."""
        self.wake.notify_all()

    # -- writing ----------------------------------------------------------------------------------------------------

    def _batch(self) -> Callable[[], None] | None:
        """Give the next batch its place."""
        common, queue = self.common, self.common.queue
        if self.state != "on" or not (self.gone or self.dropped or self._moves or queue):
            return None
        gone = list(self.gone)[:BATCH_GONE]
        dropped = list(self.dropped)
        alone = len(gone) < len(self.gone)  # the rest must be told before anything is written anew
        items = self._pick(gone, dropped, alone)
        if not (items or gone or dropped):
            return None
        new = [item for item in items if item.row < 0]
        rows = common.index.take(len(new))
        if len(rows) < len(new):  # no more rows: what has none waits
            for item in reversed(new[len(rows) :]):
                item.placed = False
                common.put_back(item)
            new = new[: len(rows)]
            items = [item for item in items if item.row >= 0] + new
            if not (items or gone or dropped):
                return None
        for key in gone:
            del self.gone[key]
        self.dropped.clear()
        texts = list(dict.fromkeys([*(item.text for item in items), *dropped]))
        places = {text: place for place, text in enumerate(texts)}
        told = np.zeros(len(gone), GONE)
        told["key"] = key_array(gone)
        over = np.zeros(len(dropped), DROPPED)
        over["account"] = [places[text] for text in dropped]
        load = Load(items, rows, gone, dropped, self.epoch)
        batch = self.log.place(
            entries=entries_of(items, places), gone=told, dropped=over, texts=tuple(texts), content=load
        )
        self._flying.add(batch)
        if queue or self._moves:
            self.wake.notify()
        return lambda: self._write(batch)

    def _pick(self, gone: list[bytes], dropped: list[bytes], alone: bool) -> list[Item]:
        """Chunks for the next batch, with a segment open that it fits into. Empties `gone` and `dropped` if none is."""
        for _ in range(2):
            items, texts = list[Item](), set(dropped)
            blocks, wanted = 0, False
            while len(items) < BATCH_CHUNKS and blocks * BLOCK_NBYTES < BATCH_NBYTES:
                item = self._peek(alone)
                if item is None:
                    break
                wanted = True
                size = blocks_of(item.nbytes)
                fits = self.log.fits(
                    blocks=blocks + size,
                    entries=len(items) + 1,
                    gone=len(gone),
                    dropped=len(dropped),
                    texts=texts | {item.text},
                )
                if not fits or (items and (blocks + size) * BLOCK_NBYTES > BATCH_NBYTES):
                    break
                (self._moves if item.row >= 0 else self.common.queue).popleft()
                item.placed = True
                self.common.queued_nbytes -= item.nbytes if item.row < 0 else 0
                items.append(item)
                texts.add(item.text)
                blocks += size
            if items:
                return items
            told = bool(gone or dropped)
            fits = self.log.fits(blocks=0, entries=0, gone=len(gone), dropped=len(dropped), texts=set(dropped))
            if not (wanted or told) or (told and fits):
                return []
            # The last free segment is for what is moved on, or nothing could ever be reclaimed again.
            reserved = self.log.leaving is not None and not self._moves and not told
            if self.log.begin(keep=1 if reserved else 0) is None:
                while self._moves and not reserved:  # no room for them: they go with their segment
                    self._moved(self._moves.popleft())
                break
        gone.clear()
        dropped.clear()
        return []

    def _peek(self, alone: bool) -> Item | None:
        """The chunk to be written next."""
        while self._moves:
            if self._still_there(self._moves[0]):
                return self._moves[0]
            self._moved(self._moves.popleft())
        return None if alone else self.common.next_item()

    def _write(self, batch: Batch) -> None:
        """On a thread: write a batch."""
        load: Load = batch.content
        record = self._buffer(blocks_needed(batch.record) * BLOCK_NBYTES)
        nbytes = encode(batch.record, record) * BLOCK_NBYTES
        error = None
        try:
            number = batch.segment.number
            total = self.volume.write(
                number, batch.start * BLOCK_NBYTES, [record[:nbytes], *(item.view for item in load.items)]
            )
            if load.gone or load.dropped:
                self.volume.sync(number)
        except OSError as problem:
            error, total = problem, 0
        with self.common.lock:
            self._buffers.append(record)
            self.common.disk_nbytes += total
            if error is not None and load.epoch == self.epoch:
                self.fail(error)
            if load.epoch != self.epoch:
                self._void(batch)
            else:
                for each in self.log.finished(batch):
                    self._flying.discard(each)
                    self._publish(each)
            self.common.tell()
            self.notify()

    def _publish(self, batch: Batch) -> None:
        """A batch would be found by a start now: enter it."""
        load, segment, index = batch.content, batch.segment, self.common.index
        identity = self.number * SEGMENTS + segment.number
        new = [place for place, item in enumerate(load.items) if item.row < 0]
        entries = batch.record.entries
        if new:
            existing = index.look_all(np.ascontiguousarray(entries["key"][new]))
            over = existing[existing >= 0]
            if len(over):  # expired, or found on another path meanwhile
                stale = index.over(over, now_s=self.common.wall())
                self.common.forget(np.unique(over[stale]), tell=False)
                existing[np.isin(existing, over[stale])] = -1
            keep = np.array([not load.items[place].cancelled for place in new]) & (existing < 0)
            rows, chosen = load.rows[keep], np.array(new)[keep]
            index.give(load.rows[~keep])
            for place in np.array(new)[~keep].tolist():
                self.gone[load.items[place].key] = None
            if len(rows):
                accounts = np.array([load.items[place].account for place in chosen.tolist()], np.uint16)
                index.enter(rows, entries[chosen], accounts, identity)
                self.log.written_nbytes += self._add(segment, rows)
                self.common.note(entries["key"][chosen])
            for place, here in zip(new, existing >= 0, strict=True):
                self.common.settle(load.items[place], bool(here) or not load.items[place].cancelled)
            self.common.enforce({load.items[place].account for place in new})
        for place, item in enumerate(load.items):
            if item.row >= 0:
                self._land(item, segment, entries[place : place + 1])

    def _add(self, segment: Segment, rows: Rows) -> int:
        """Rows' chunks lie in this segment now. Returns what they take there, in bytes."""
        segment.rows.extend(rows.tolist())
        nbytes = self.common.index.columns.nbytes[rows].astype(np.int64)
        total = int((-(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES).sum())
        segment.live_nbytes += total
        return total

    def _void(self, batch: Batch) -> None:
        """What was under way when the path failed."""
        self._flying.discard(batch)
        self.common.index.give(batch.content.rows)
        for item in batch.content.items:
            if item.row < 0:
                self.common.settle(item, False)

    # -- reading ----------------------------------------------------------------------------------------------------

    def queue_reads(self, pieces: Sequence[Piece]) -> None:
        """Queue chunks to be read; neighbours together."""
        run: list[Piece] = []
        nbytes, end = 0, (-1, -1)
        for piece in sorted(pieces, key=lambda piece: (piece.segment, piece.block)):
            size = blocks_of(piece.nbytes) * BLOCK_NBYTES
            if run and ((piece.segment, piece.block) != end or nbytes + size > READ_NBYTES or len(run) == IOV_MAX):
                self._reads.append(run)
                run, nbytes = [], 0
            run.append(piece)
            nbytes, end = nbytes + size, (piece.segment, piece.block + size // BLOCK_NBYTES)
            self.log.segments[piece.segment].holds += 1
        if run:
            self._reads.append(run)
        self.reads_queued += len(pieces)
        self.notify()

    def refuse_reads(self) -> None:
        """What waits to be read does not come."""
        for run in self._reads:
            self._let_go(run, self.epoch)
            for piece in run:
                self.common.answer(piece.request, piece.place, False)
        self._reads.clear()
        self.reads_queued = 0

    def _read(self) -> Callable[[], None] | None:
        if not self._reads or self.state == "off":
            return None
        run = self._reads.popleft()
        self.reads_queued -= len(run)
        epoch = self.epoch
        return lambda: self._fetch(run, epoch)

    def _fetch(self, run: list[Piece], epoch: int) -> None:
        """On a thread: read neighbours, and compare their checksums."""
        arena, right, error = self.common.arena, [False] * len(run), None
        views = [arena[piece.offset : piece.offset + blocks_of(piece.nbytes) * BLOCK_NBYTES] for piece in run]
        got = 0
        try:
            got = self.volume.read(run[0].segment, run[0].block * BLOCK_NBYTES, views)
        except OSError as problem:
            error = problem
        end = 0
        for place, (piece, view) in enumerate(zip(run, views, strict=True)):
            whole = end + piece.nbytes <= got
            right[place] = whole and checksum_of([view[: piece.nbytes]]) == piece.checksum
            end += len(view)
        with self.common.lock:
            common = self.common
            common.read_nbytes += sum(piece.nbytes for piece, good in zip(run, right, strict=True) if good)
            self._bad_reads = self._bad_reads + 1 if error is not None else 0
            if epoch == self.epoch:
                self._let_go(run, epoch)
                same = [self._is(piece.row, piece.segment, piece.block, piece.checksum) for piece in run]
                rows = np.array([piece.row for piece in run], np.int32)
                good = np.array(right) & np.array(same)
                common.index.touch(np.unique(rows[good]), now_s=common.wall())
                wrong = np.unique(rows[~np.array(right) & np.array(same)])
                if error is None or error.errno == errno.EIO:
                    common.corrupt += len(wrong) if error is None else 0
                    common.errors += error is not None
                    common.forget(wrong, tell=True)
                if error is not None and (error.errno != errno.EIO or self._bad_reads >= BAD_READS):
                    self.fail(error)
            for piece, good_one in zip(run, right, strict=True):
                common.answer(piece.request, piece.place, good_one)
            self.notify()

    def _let_go(self, run: list[Piece], epoch: int) -> None:
        if epoch == self.epoch:
            for piece in run:
                self.log.segments[piece.segment].holds -= 1

    def _is(self, row: int, segment: int, block: int, checksum: int) -> bool:
        """Whether a row still is the chunk that lies there."""
        index = self.common.index
        columns = index.columns
        where = (int(index.segment[row]), int(columns.page[row]), int(columns.checksum[row]))
        return where == (self.number * SEGMENTS + segment, block, checksum)

    # -- segments ---------------------------------------------------------------------------------------------------

    def _make(self, number: int) -> None:
        """On a thread: one segment more; or find that there is no room for it."""
        with self.common.lock:
            epoch = self.epoch
        try:
            self.volume.make(number)
            self._wipe_blocks(number)
        except OSError as error:
            with self.common.lock:
                self._making = False
                if epoch != self.epoch:
                    return
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    self.fail(error)
                    return
                self._grow_at_s = self._clock() + RETRY_S
                self.reason = f"does not grow: {error.strerror}"
                if len(self.log.segments) < FEWEST_SEGMENTS:
                    self.fail(error)
                self.notify()
            return
        with self.common.lock:
            self._making = False
            if epoch == self.epoch:
                self.log.made(number)
                self.reason = ""
                self.notify()

    def _seal(self, segment: Segment) -> None:
        """On a thread: write a full segment's summary."""
        with self.common.lock:
            epoch = self.epoch
            record = self.log.summary(segment) if segment.records else None
        try:
            if record is not None:
                self._write_summary(segment.number, record)
        except OSError as error:
            self._fail_in(epoch, error)
            return
        with self.common.lock:
            if epoch == self.epoch:
                self.log.sealed(segment)
                self.notify()

    def _write_summary(self, number: int, record: Record) -> None:
        blocks = blocks_needed(record)
        buffer = self._buffer(blocks * BLOCK_NBYTES)
        encode(record, buffer)
        nbytes = blocks * BLOCK_NBYTES
        total = self.volume.write(number, (self.segment_blocks - blocks) * BLOCK_NBYTES, [buffer[:nbytes]])
        self.volume.sync(number)
        with self.common.lock:
            self._buffers.append(buffer)
            self.common.disk_nbytes += total

    def _wipe_blocks(self, number: int) -> None:
        """On a thread: see to it that nothing is found in a segment."""
        zeros = aligned(BLOCK_NBYTES)
        total = 0
        for block in (0, self.segment_blocks - 1):
            total += self.volume.write(number, block * BLOCK_NBYTES, [zeros])
        self.volume.sync(number)
        with self.common.lock:
            self.common.disk_nbytes += total

    def _reclaim(self, segment: Segment) -> None:
        """On a thread: read what a segment moves on, and queue it to be written."""
        with self.common.lock:
            epoch, index = self.epoch, self.common.index
            rows = self.rows_of(segment)
            rows = rows[~index.over(rows, now_s=self.common.wall())]
            sizes = -(-index.columns.nbytes[rows].astype(np.int64) // BLOCK_NBYTES) * BLOCK_NBYTES
            chosen = second_chance(index.reads_since(rows), sizes, most_nbytes=self.log.may_move_nbytes())
            pieces = [self._copy_of(row) for row in rows[chosen].tolist()]
        buffer = aligned(int(sizes[chosen].sum()))
        items, start = [], 0
        try:
            for item, block, checksum in pieces:
                view = buffer[start : start + blocks_of(item.nbytes) * BLOCK_NBYTES]
                start += len(view)
                got = self.volume.read(segment.number, block * BLOCK_NBYTES, [view])
                if got >= item.nbytes and checksum_of([view[: item.nbytes]]) == checksum:
                    item.view = view
                    items.append(item)
        except OSError as error:
            self._fail_in(epoch, error)
            return
        with self.common.lock:
            if epoch == self.epoch:
                self._moves.extend(items)
                self._moving = len(items)
                if not items:
                    self._tasks.append(lambda: self._wipe(segment))
                self.notify()

    def _copy_of(self, row: int) -> tuple[Item, int, int]:
        """A chunk to be moved on; its view is still missing. And its block and checksum."""
        index = self.common.index
        found = index.found(row)
        (key,) = raw_keys(index.keys(np.array([row], np.int32)))
        item = Item(
            key=key,
            view=memoryview(b""),
            nbytes=found.nbytes,
            checksum=found.checksum,
            account=found.account,
            text=self.common.texts[found.account],
            depth=found.depth,
            parent=found.parent,
            reads=found.reads,
            expires_s=found.expires_s,
            row=row,
        )
        item.came_from = int(index.segment[row]), int(index.columns.page[row])
        return item, item.came_from[1], found.checksum

    def _still_there(self, item: Item) -> bool:
        segment, block = item.came_from
        return self._is(item.row, segment - self.number * SEGMENTS, block, item.checksum)

    def _land(self, item: Item, segment: Segment, entry: Any) -> None:
        """A chunk was moved on."""
        index, common = self.common.index, self.common
        if self._still_there(item):
            row = np.array([item.row], np.int32)
            common.lighten(row)
            index.move(row, entry, self.number * SEGMENTS + segment.number)
            self.log.moved_nbytes += self._add(segment, row)
            common.moved_nbytes += item.nbytes
        else:
            self.gone[item.key] = None
        self._moved(item)

    def _moved(self, item: Item) -> None:
        """One less to be moved on before the segment may be wiped."""
        self._moving -= 1
        leaving = self.log.leaving
        if not self._moving and leaving is not None:
            self._tasks.append(lambda: self._wipe(leaving))

    def _wipe(self, segment: Segment) -> None:
        """On a thread: make a segment free."""
        with self.common.lock:
            epoch, number = self.epoch, segment.number
        try:
            self._wipe_blocks(number)
        except OSError as error:
            self._fail_in(epoch, error)
            return
        with self.common.lock:
            if epoch != self.epoch:
                return
            self.common.forget(self.rows_of(segment), tell=False)
            self.log.wiped(segment)
            too_many = len(self.log.segments) > self.log.limit and not segment.holds
            if too_many:
                self.log.gone(number)
            self.notify()
        if too_many:
            self.volume.remove(number)

    def rows_of(self, segment: Segment) -> Rows:
        """Rows of the chunks that live in a segment."""
        if not segment.rows:
            return np.empty(0, np.int32)
        rows = np.unique(np.frombuffer(segment.rows, np.int32))
        here: Rows = rows[self.common.index.segment[rows] == self.number * SEGMENTS + segment.number]
        return here

    def _buffer(self, nbytes: int) -> memoryview:
        """On a thread: memory that begins at a page, for a record."""
        with self.common.lock:
            while self._buffers:
                buffer = self._buffers.pop()
                if len(buffer) >= nbytes:
                    return buffer
        return aligned(nbytes)

    # -- health -----------------------------------------------------------------------------------------------------

    def _fail_in(self, epoch: int, error: OSError) -> None:
        with self.common.lock:
            if epoch == self.epoch:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Turn the path off; all that it had is not to be had until it is back."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if reason != self._logged:
            log.warning("SSD path %s is off: %s", self.volume.path, reason)
        self._logged = reason
        self.common.errors += 1
        self.state, self.reason = "off", reason
        self.retry_at_s = self._clock() + RETRY_S
        self.refuse_reads()
        self.epoch += 1
        self._tasks.clear()
        self._moves.clear()
        self._moving = 0
        self._making = self._checking = self._closed = False
        for batch in list(self._flying):
            self.gone.update(dict.fromkeys(batch.content.gone))
            self.dropped.update(dict.fromkeys(batch.content.dropped))
            self.gone.update(dict.fromkeys(item.key for item in batch.content.items if item.cancelled))
            if batch.finished:
                self._void(batch)
        index = self.common.index
        self.common.drop_rows(index.rows_where(index.segment[index.used()] // SEGMENTS == self.number))
        self.log = self._new_log()
        self.common.fail_queue_if_off()
        self.notify()

    def remember_gone(self, keys: Sequence[bytes]) -> None:
        """Keys were deleted while it was not known whether they lie here."""
        self.gone.update(dict.fromkeys(keys))
        if len(self.gone) > PENDING_GONE:
            self._forget_all = True
            self.gone.clear()

    def retry(self) -> None:
        """Try again what is off, if nothing is under way any more; first let go of its files, or it stays in use."""
        if self.state != "off" or self._tasks or self.io is None or self.io.busy():
            return
        if not self._closed:
            self._closed = True
            self._tasks.append(self.volume.close)
        elif self._clock() >= self.retry_at_s:
            self.state = "starting"
            self._tasks.append(self._open)
        self.notify()

    def _open(self) -> None:
        """On a thread: take the directory again."""
        try:
            self.volume.open()
        except (OSError, ConfigError) as error:
            with self.common.lock:
                self.fail(error)
            return
        self._look()

    def check(self) -> None:
        """See soon whether the directory is still there, if nothing else says so."""
        if self.on and not self._checking:
            self._checking = True
            self._tasks.append(self._check)
            self.notify()

    def _check(self) -> None:
        """On a thread: see whether the directory is still there."""
        with self.common.lock:
            epoch = self.epoch
        try:
            self.volume.check()
        except OSError as error:
            self._fail_in(epoch, error)
        with self.common.lock:
            self._checking = False

    # -- starting ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """On a thread: which segments are there."""
        try:
            numbers = self.volume.numbers()
        except OSError as error:
            with self.common.lock:
                self.fail(error)
            return
        with self.common.lock:
            self._unscanned = len(numbers)
            for number, nbytes in numbers.items():
                self._tasks.append(partial(self._scan, number, nbytes))
            if not numbers:
                self._started()
            self.notify()

    def _started(self) -> None:
        if self._logged:
            log.info("SSD path %s is on again", self.volume.path)
        self.state, self.reason, self._logged = "on", "", ""
        self._told_gone, self._told_dropped, self._forget_all = {}, {}, False
        self.common.tell()

    def _scan(self, number: int, file_nbytes: int) -> None:
        """On a thread: read one segment's records, and enter what they say."""
        with self.common.lock:
            epoch, forget = self.epoch, self._forget_all
        found, usable = None, True
        try:
            found = None if forget else self._records(number, file_nbytes)
            if forget:
                self._wipe_blocks(number)
            if file_nbytes != self._config.segment_nbytes:
                self.volume.make(number)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                self._fail_in(epoch, error)
                return
            usable = found is not None
        if not usable:
            self.volume.remove(number)  # it can neither be read nor written
        entries, accounts = np.zeros(0, ENTRY), list[int | None]()
        if found is not None:
            entries = living(found[0])
            accounts = [self.common.accounts.number(text) for text in found[0].texts]
        with self.common.lock:
            if epoch != self.epoch:
                return
            if found is not None:
                self._take_in(number, found[0], entries, accounts, sealed=found[1])
            elif usable:
                self.log.made(number)
            self._unscanned -= 1
            if not self._unscanned:
                self._started()
            self.notify()

    def _records(self, number: int, file_nbytes: int) -> tuple[Record, bool] | None:
        """On a thread: what a segment's records say; of an unsealed one, without its torn tail."""
        buffer = aligned(TAIL_BLOCKS * BLOCK_NBYTES)

        def read(offset: int, nbytes: int) -> memoryview:
            nonlocal buffer
            if len(buffer) < nbytes:
                buffer = aligned(nbytes)
            return buffer[: self.volume.read(number, offset, [buffer[:nbytes]])]

        found = read_segment(read, segment_blocks=self.segment_blocks, blocks_there=file_nbytes // BLOCK_NBYTES)
        if found is None or found[1]:
            return found
        record = found[0]
        return record._replace(entries=record.entries[self._whole(number, record.entries)]), False

    def _whole(self, number: int, entries: Any) -> Bits:
        """On a thread: which chunks of an unsealed segment are there as they were handed in. Cuts off a torn tail."""
        whole = np.zeros(len(entries), np.bool_)
        buffer = aligned(VERIFY_NBYTES)
        for place, (block, nbytes, checksum) in enumerate(
            zip(entries["block"].tolist(), entries["nbytes"].tolist(), entries["checksum"].tolist(), strict=True)
        ):
            size = blocks_of(nbytes) * BLOCK_NBYTES
            if size > self._config.segment_nbytes:
                continue
            if size > len(buffer):
                buffer = aligned(size)
            got = self.volume.read(number, block * BLOCK_NBYTES, [buffer[:size]])
            whole[place] = got >= nbytes and checksum_of([buffer[:nbytes]]) == checksum
        return whole

    def _take_in(
        self, number: int, record: Record, entries: Any, accounts: Sequence[int | None], *, sealed: bool
    ) -> None:
        """Enter what a segment has, unless another one knows better.

        Args:
            entries: Those of the record that live.
            accounts: Number of each of the record's texts.
        """
        index, common, sequence = self.common.index, self.common, record.sequence
        segment = self.log.found(number, sequence, sealed=sealed, record=record)
        common.texts.update(
            {account: text for account, text in zip(accounts, record.texts, strict=True) if account is not None}
        )
        self._apply_told(record)
        keep = (entries["expires_s"] == 0) | (entries["expires_s"] > common.wall())
        for place, (account, text) in enumerate(zip(accounts, record.texts, strict=True)):
            if account is None or text in self.dropped or self._told_dropped.get(text, 0) > sequence:
                keep &= entries["account"] != place
        if self._told_gone or self.gone:
            told = [key in self.gone or self._told_gone.get(key, 0) > sequence for key in raw_keys(entries["key"])]
            keep &= ~np.array(told, np.bool_)
        entries = entries[keep]
        existing = index.look_all(np.ascontiguousarray(entries["key"]))
        mine = (existing >= 0) & (index.segment[existing] // SEGMENTS == self.number)
        for place in np.flatnonzero((existing >= 0) & ~mine).tolist():
            self.gone[entries["key"][place].tobytes()] = None  # it is on another path, too
        older = mine & (self._sequences(existing) < sequence)
        common.forget(existing[older], tell=False)
        fresh = (existing < 0) | older
        entries = entries[fresh]
        rows = index.take(len(entries))
        entries = entries[: len(rows)]
        numbers = np.array([account or 0 for account in accounts], np.uint16)[entries["account"]]
        index.enter(rows, entries, numbers, self.number * SEGMENTS + segment.number)
        self._add(segment, rows)
        common.note(entries["key"])

    def _apply_told(self, record: Record) -> None:
        """What a record tells to be gone is, as far as it is older."""
        index, sequence = self.common.index, record.sequence
        if len(record.gone):
            for key in raw_keys(record.gone["key"]):
                self._told_gone[key] = max(sequence, self._told_gone.get(key, 0))
            rows = np.unique(index.look_all(np.ascontiguousarray(record.gone["key"])))
            rows = rows[(rows >= 0) & (index.segment[rows] // SEGMENTS == self.number)]
            self.common.forget(rows[self._sequences(rows) < sequence], tell=False)
        for account in np.unique(record.dropped["account"]).tolist():
            text = record.texts[account]
            self._told_dropped[text] = max(sequence, self._told_dropped.get(text, 0))
            for number, known in self.common.texts.items():
                if known == text:
                    here = index.used()
                    bits = index.columns.namespace[here] == number
                    rows = index.rows_where(bits & (index.segment[here] // SEGMENTS == self.number))
                    self.common.forget(rows[self._sequences(rows) < sequence], tell=False)

    def _sequences(self, rows: Rows) -> Any:
        """Sequence number of the segment that each row's chunk lies in; nothing sensible for rows elsewhere."""
        segments = self.log.segments
        numbers = (self.common.index.segment[rows] % SEGMENTS).tolist()
        return np.array([segments[number].sequence if number in segments else 0 for number in numbers], np.int64)

    def stats(self) -> dict[str, Any]:
        """What it is and holds, as plain values."""
        states = [segment.state for segment in self.log.segments.values()]
        return {
            "path": str(self.volume.path),
            "state": "slow" if self.slow else self.state,
            "reason": self.reason,
            "direct": self.volume.direct,
            "segments": len(states),
            "free_segments": states.count("free"),
            "queued_reads": self.reads_queued,
        }


def entries_of(items: Sequence[Item], places: dict[bytes, int]) -> Any:
    """Array of ENTRY of chunks to be written, but for where they lie."""
    entries = np.zeros(len(items), ENTRY)
    if items:
        entries["key"] = key_array([item.key for item in items])
        entries["parent"] = key_array([item.parent or bytes(16) for item in items])
        entries["chained"] = [bool(item.parent) for item in items]
        entries["account"] = [places[item.text] for item in items]
        for field in ("checksum", "expires_s", "nbytes", "depth", "reads"):
            entries[field] = [getattr(item, field) for item in items]
    return entries
