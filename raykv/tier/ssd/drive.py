"""One path of an SSD tier: what its threads do next, and what becomes of it. See `raykv.tier.ssd.tier`.

Everything here is under the tier's lock, but for the methods that say "on a thread": these wait for the disk.

What a start would find is in the index at all times, or is told to be gone by a record, or will be as soon as what is
in a queue has been written.
"""

import errno
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from raykv.config import SsdConfig
from raykv.errors import ConfigError
from raykv.memory.copying import checksum_of
from raykv.tier.segments.format import (
    BLOCK_NBYTES,
    DROPPED,
    ENTRY,
    GONE,
    blocks_needed,
    blocks_of,
    encode,
)
from raykv.tier.segments.index import SEGMENTS, key_array
from raykv.tier.segments.log import Batch, Log, Segment
from raykv.tier.segments.requests import Common, Item, Request
from raykv.tier.segments.volume import IOV_MAX, IoThreads, Volume, aligned
from raykv.tier.ssd.scan import Scan
from raykv.tier.ssd.upkeep import Upkeep
from raykv.types import Rows

log = logging.getLogger(__name__)

UPKEEP, FIRST_WRITER = 0, 1
"""Numbers of threads: the one that looks after the segments, and the one that writes first where others read first."""
THREADS_BESIDE: Final = 3
"""Threads of a path beyond its depth: the first of all, and those that compare checksums and make records meanwhile."""
BATCH_NBYTES: Final = 8 << 20
BATCH_CHUNKS: Final = IOV_MAX - 1
"""Chunks of one batch at most; its record is one more piece of the same call."""
FEW_SEGMENTS: Final = 3
BATCH_GONE: Final = 1 << 14
"""Deleted keys that one record tells of."""
READ_NBYTES: Final = 4 << 20
"""Neighbours are read by one call up to this size."""
QUEUED_READS: Final = 1 << 14
"""Chunks that may wait to be read on one path."""
PENDING_GONE: Final = 1 << 20
"""Deleted keys that are kept for a path that is off. With more, all that lies there is forgotten when it comes back."""
RETRY_S: Final = 30.0
"""A path that failed is tried again after so long."""
BAD_READS: Final = 3
"""So many reads in a row that the drive fails turn the path off. Before, only the chunks are given up."""


@dataclass(eq=False, slots=True)
class BulkRead:
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
        gone, dropped: Keys and quota groups that a record must tell of.
        epoch: Counts how often all that was under way became void.
    """

    def __init__(
        self, number: int, volume: Volume, config: SsdConfig, common: Common, clock: Callable[[], float]
    ) -> None:
        """Begin with `start`."""
        self.number, self.volume, self.common = number, volume, common
        self.config, self.clock = config, clock
        self.segment_blocks = config.segment_nbytes // BLOCK_NBYTES
        self._incarnation = secrets.randbits(64)
        self.state, self.slow, self.reason, self.epoch = "starting", False, "", 0
        self.gone: dict[bytes, None] = {}
        self.dropped: dict[bytes, None] = {}
        self.log = self._new_log()
        self._under_way = 0
        self.wake = threading.Condition(common.lock)  # of threads that move chunks
        self._wake_upkeep = threading.Condition(common.lock)
        self.retry_at_s = 0.0
        self.tasks: deque[Callable[[], None]] = deque()
        self._reads: deque[list[Piece]] = deque()
        self.reads_queued = 0
        self.moves: deque[Item] = deque()
        self._flying: set[Batch] = set()
        self._checking = self._closed = False
        self.logged = ""
        self._bad_reads = 0
        self.buffers: list[memoryview] = []
        self.upkeep, self.scan = Upkeep(self), Scan(self)
        self.io: IoThreads | None = None

    def _new_log(self) -> Log:
        limit = min(SEGMENTS - 1, self.config.capacity_nbytes // self.config.segment_nbytes)
        return Log(limit=limit, segment_blocks=self.segment_blocks, incarnation=self._incarnation)

    def start(self) -> None:
        """Start the threads, and look for what is there; or be off, if the directory could not be opened."""
        with self.common.lock:
            if self.state == "starting":
                self.tasks.append(self.scan.look)
        name, count = f"raykv-ssd{self.number}", self.config.depth + THREADS_BESIDE
        self.io = IoThreads(count, name, self._take, failed=self._broken, clock=self.clock)

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
                if thread == UPKEEP:
                    self._wake_upkeep.wait()
                    continue
                if common.queue:  # there is no room for it yet
                    self._wake_upkeep.notify()
                self.wake.wait()
            return task

    def _next(self, thread: int) -> Callable[[], None] | None:
        if self.common.finished:
            return self.common.finished.popleft().call
        if self.slow:
            return None
        if thread == UPKEEP:  # so that sealing and wiping keep nobody from moving chunks
            return self.upkeep.next()
        if self.state == "starting":
            return self._read() or self.upkeep.next()
        if self._under_way >= self.config.depth:
            return None
        if thread == FIRST_WRITER and self.config.depth > 1:
            return self._batch() or self._read()
        return self._read() or self._batch()

    def _leave(self) -> None:
        """The drive is done with a batch or a read; another thread may go on."""
        self._under_way -= 1
        self.wake.notify()

    def notify(self) -> None:
        """There is something to do."""
        self.wake.notify_all()
        self._wake_upkeep.notify()

    # -- writing ----------------------------------------------------------------------------------------------------

    def _batch(self) -> Callable[[], None] | None:
        """Give the next batch its place."""
        common, queue = self.common, self.common.queue
        if self.state != "on" or not (self.gone or self.dropped or self.moves or queue):
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
        over["group"] = [places[text] for text in dropped]
        load = BulkRead(items, rows, gone, dropped, self.epoch)
        batch = self.log.place(
            entries=entries_of(items, places), gone=told, dropped=over, texts=tuple(texts), content=load
        )
        self._flying.add(batch)
        if queue or self.moves:
            self.wake.notify()
        self._under_way += 1
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
                (self.moves if item.row >= 0 else self.common.queue).popleft()
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
            # The last free segment is for what is moved on; with very few there is none to spare for that.
            ordinary = not self.moves and not told
            if self.log.begin(keep=1 if ordinary and len(self.log.segments) > FEW_SEGMENTS else 0) is None:
                while self.moves:  # no room for them: they go with their segment
                    self.upkeep.moved(self.moves.popleft())
                break
        gone.clear()
        dropped.clear()
        return []

    def _peek(self, alone: bool) -> Item | None:
        """The chunk to be written next."""
        while self.moves:
            if self.upkeep.still_there(self.moves[0]):
                return self.moves[0]
            self.upkeep.moved(self.moves.popleft())
        return None if alone else self.common.next_item()

    def _write(self, batch: Batch) -> None:
        """On a thread: write a batch."""
        load: BulkRead = batch.content
        record = self.buffer(blocks_needed(batch.record) * BLOCK_NBYTES)
        nbytes = encode(batch.record, record) * BLOCK_NBYTES
        error = None
        try:
            number = batch.segment.number
            views = [record[:nbytes], *(item.view for item in load.items)]
            total = self.volume.write(number, batch.start * BLOCK_NBYTES, views)
            if load.gone or load.dropped:
                self.volume.sync(number)
        except OSError as problem:
            error, total = problem, 0
        with self.common.lock:
            self._leave()
            self.buffers.append(record)
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
                self.disown(load.items[place].key)
            if len(rows):
                groups = np.array([load.items[place].group for place in chosen.tolist()], np.uint16)
                index.enter(rows, entries[chosen], groups, identity)
                self.log.written_nbytes += self.add(segment, rows)
                self.common.note(entries["key"][chosen])
            for place, here in zip(new, existing >= 0, strict=True):
                self.common.settle(load.items[place], bool(here) or not load.items[place].cancelled)
            self.common.enforce({load.items[place].group for place in new})
        for place, item in enumerate(load.items):
            if item.row >= 0:
                self.upkeep.land(item, segment, entries[place : place + 1])

    def disown(self, key: bytes) -> None:
        """A copy of a chunk has landed that the index does not name: a record must say so, or a start would find it.

        Unless the chunk was stored here again meanwhile: a start takes that copy, which is newer, and such a record,
        which is newer still, would speak against it, too.
        """
        index = self.common.index
        row = int(index.look_all(key_array([key]))[0])
        if row >= 0 and int(index.segment[row]) // SEGMENTS == self.number:
            return
        coming = (item for batch in self._flying for item in batch.content.items)
        if not any(item.key == key and item.row < 0 and not item.cancelled for item in coming):
            self.gone[key] = None

    def add(self, segment: Segment, rows: Rows) -> int:
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
        self._under_way += 1
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
        with self.common.lock:
            self._leave()
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
                same = [self.is_at(piece.row, piece.segment, piece.block, piece.checksum) for piece in run]
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

    def is_at(self, row: int, segment: int, block: int, checksum: int) -> bool:
        """Whether a row still is the chunk that lies there."""
        index = self.common.index
        columns = index.columns
        where = (int(index.segment[row]), int(columns.page[row]), int(columns.checksum[row]))
        return where == (self.number * SEGMENTS + segment, block, checksum)

    def rows_of(self, segment: Segment) -> Rows:
        """Rows of the chunks that live in a segment."""
        if not segment.rows:
            return np.empty(0, np.int32)
        rows = np.unique(np.frombuffer(segment.rows, np.int32))
        here: Rows = rows[self.common.index.segment[rows] == self.number * SEGMENTS + segment.number]
        return here

    def buffer(self, nbytes: int) -> memoryview:
        """On a thread: memory that begins at a page, for a record."""
        with self.common.lock:
            while self.buffers:
                buffer = self.buffers.pop()
                if len(buffer) >= nbytes:
                    return buffer
        return aligned(nbytes)

    # -- health -----------------------------------------------------------------------------------------------------

    def fail_in(self, epoch: int, error: OSError) -> None:
        with self.common.lock:
            if epoch == self.epoch:
                self.fail(error)

    def _broken(self, error: Exception) -> None:
        with self.common.lock:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Turn the path off; all that it had is not to be had until it is back."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if reason != self.logged:
            log.warning("SSD path %s is off: %s", self.volume.path, reason)
        self.logged = reason
        self.common.errors += 1
        self.state, self.reason = "off", reason
        self.retry_at_s = self.clock() + RETRY_S
        self.refuse_reads()
        self.epoch += 1
        self.tasks.clear()
        self.moves.clear()
        self.upkeep.reset()
        self._checking = self._closed = False
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
        self.scan.settle()
        self.notify()

    def remember_gone(self, keys: Sequence[bytes]) -> None:
        """Keys were deleted while it was not known whether they lie here."""
        self.gone.update(dict.fromkeys(keys))
        if len(self.gone) > PENDING_GONE:
            self.scan.forget_all = True
            self.gone.clear()

    def retry(self) -> None:
        """Try again what is off, if nothing is under way any more; first let go of its files, or it stays in use."""
        if self.state != "off" or self.tasks or self.io is None or self.io.busy():
            return
        if not self._closed:
            self._closed = True
            self.tasks.append(self.volume.close)
        elif self.clock() >= self.retry_at_s:
            self.state = "starting"
            self.tasks.append(self._open)
        self.notify()

    def _open(self) -> None:
        """On a thread: take the directory again."""
        try:
            self.volume.open()
        except (OSError, ConfigError) as error:
            with self.common.lock:
                self.fail(error)
            return
        self.scan.look()

    def check(self) -> None:
        """See soon whether the directory is still there, if nothing else says so."""
        if self.on and not self._checking:
            self._checking = True
            self.tasks.append(self._check)
            self.notify()

    def _check(self) -> None:
        """On a thread: see whether the directory is still there."""
        with self.common.lock:
            epoch = self.epoch
        try:
            self.volume.check()
        except OSError as error:
            self.fail_in(epoch, error)
        with self.common.lock:
            self._checking = False

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
        entries["group"] = [places[item.text] for item in items]
        for field in ("checksum", "expires_s", "nbytes", "depth", "reads"):
            entries[field] = [getattr(item, field) for item in items]
    return entries
