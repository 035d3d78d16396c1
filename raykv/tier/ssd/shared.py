"""The state that the drives of an SSD tier share: index and write queue. One lock guards all of it.

Invariant: the index holds the chunks that recovery would find, except chunks covered by a tombstone, written or queued.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from raykv.tier.base import GroupNames
from raykv.tier.segments.format import Array, flat, key_array
from raykv.tier.segments.index import SEGMENTS, Changes, Index
from raykv.tier.segments.log import Batch, Segment
from raykv.tier.segments.requests import Item, Run, WriteQueue
from raykv.tier.ssd.drive import Drive
from raykv.types import Rows

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""Time between a drive's failure and the next attempt."""


class Shared(WriteQueue):
    """Guarded by `lock`.

    Attributes:
        queue: Chunks to be written that are not in a batch yet.
        coming: Chunks queued or being written, by key.
        texts, quotas: Per number of a quota group on this node: its JSON, and its quota in bytes.
        ended: The tier is being closed.
    """

    def __init__(self, index: Index, arena: memoryview, groups: GroupNames, wall: Callable[[], float]) -> None:
        super().__init__("raykv-ssd-callbacks", arena, groups)
        self.lock = threading.Lock()
        self.tombstones_written = threading.Condition(self.lock)
        self.index, self.wall = index, wall
        self.drives: list[Drive] = []
        self.coming: dict[bytes, Item] = {}
        self.texts: dict[int, bytes] = {}
        self.quotas: dict[int, int] = {}
        self.changes = Changes()
        self.ended = False

    def enqueue(self, item: Item) -> None:
        self.coming[item.chunk.key] = item
        super().enqueue(item)

    def put_back(self, item: Item) -> None:
        self.queue.appendleft(item)
        self.queued_nbytes += item.chunk.nbytes
        item.placed = False

    def next_item(self) -> Item | None:
        while self.queue and self.queue[0].cancelled:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def finish(self, item: Item, result: bool) -> None:
        self.coming.pop(item.chunk.key, None)
        self.counts["written_nbytes"] += item.chunk.nbytes if result else 0
        item.finish(result)

    def cancel(self, item: Item) -> None:
        if item.cancelled:
            return
        item.cancelled = True
        if not item.placed:
            self.queued_nbytes -= item.chunk.nbytes
            self.finish(item, False)

    def fail_queue_if_off(self) -> None:
        if any(drive.on for drive in self.drives) and not self.ended:
            return
        while self.next_item() is not None:
            self.finish(self.dequeue(), False)

    def notify(self) -> None:
        for drive in self.drives:
            drive.notify()

    def rows_of(self, drive: Drive, segment: Segment) -> Rows:
        rows = np.unique(np.array(segment.rows, np.int32))
        here: Rows = rows[self.index.segment[rows] == drive.identity(segment)]
        return here

    def is_at(self, row: int, moved_from: tuple[int, int], checksum: int) -> bool:
        index, columns = self.index, self.index.columns
        place = int(index.segment[row]), int(columns.page[row])
        return place == moved_from and int(columns.checksum[row]) == checksum

    def insert(self, drive: Drive, segment: Segment, rows: Rows, entries: Array, groups: Array) -> int:
        """Enter chunks of a segment, whose keys must be new. Returns the bytes that they take on the drive."""
        if not len(rows):
            return 0
        self.index.insert(rows, entries, groups, drive.identity(segment))
        self.changes.add(entries["key"])
        return self._add_to(segment, rows)

    def _add_to(self, segment: Segment, rows: Rows) -> int:
        segment.rows.extend(rows.tolist())
        nbytes = int(self.index.disk_nbytes(rows).sum())
        segment.live_nbytes += nbytes
        return nbytes

    def _remove_from_segments(self, rows: Rows) -> None:
        identities, inverse = np.unique(self.index.segment[rows], return_inverse=True)
        totals = np.bincount(inverse, self.index.disk_nbytes(rows))
        for identity, total in zip(identities.tolist(), totals.tolist(), strict=True):
            segments = self.drives[identity // SEGMENTS].log.segments
            if identity % SEGMENTS in segments:
                segments[identity % SEGMENTS].live_nbytes -= int(total)

    def remove(self, rows: Rows, *, tombstones: bool) -> None:
        """Remove rows, without duplicates, from the index. `tombstones`: also queue tombstones for the keys."""
        if not len(rows):
            return
        if tombstones:
            keys = flat(self.index.keys(rows)).tolist()
            for identity, key in zip(self.index.segment[rows].tolist(), keys, strict=True):
                self.drives[identity // SEGMENTS].deleted[key] = None
        self._remove_from_segments(rows)
        self._remove_rows(rows)

    def _remove_rows(self, rows: Rows) -> None:
        self.changes.add(self.index.keys(rows))
        self.index.remove(rows)

    def remove_expired(self) -> None:
        index = self.index
        self.remove(index.rows_where(index.expired(index.used(), now_s=self.wall())), tombstones=False)

    def land(self, drive: Drive, item: Item, segment: Segment, entry: Array) -> None:
        if self.is_at(item.row, item.moved_from, item.chunk.checksum):
            row = np.array([item.row], np.int32)
            self._remove_from_segments(row)
            self.index.move(row, entry, drive.identity(segment))
            drive.log.moved_nbytes += self._add_to(segment, row)
            self.counts["moved_nbytes"] += item.chunk.nbytes
        else:
            self.disown(drive, item.chunk.key)

    def disown(self, drive: Drive, key: bytes) -> None:
        """Queue a tombstone for a copy on the drive that is not in the index, so that recovery does not find it.

        If the chunk was stored on this drive again, there is no tombstone: recovery takes the newer copy, and a
        tombstone written after that copy would cover it too.
        """
        row = int(self.index.find_all(key_array([key]))[0])
        if row >= 0 and int(self.index.segment[row]) // SEGMENTS == drive.number:
            return
        coming = (item for batch in drive.in_flight for item in batch.content.items)
        if not any(item.chunk.key == key and item.row < 0 and not item.cancelled for item in coming):
            drive.deleted[key] = None

    def enforce_quotas(self, groups: Iterable[int]) -> None:
        for group in groups:
            quota = self.quotas.get(group)
            if quota is not None and self.index.nbytes[group] > quota:
                self._trim(group, quota)

    def _trim(self, group: int, quota: int) -> None:
        columns = self.index.columns
        segments = [(segment.sequence, drive, segment) for drive in self.drives for segment in drive.log.in_order()]
        for _, drive, segment in sorted(segments, key=lambda each: each[0]):
            excess = int(self.index.nbytes[group]) - quota
            if excess <= 0:
                return
            rows = self.rows_of(drive, segment)
            rows = rows[columns.group[rows] == group]
            rows = rows[np.argsort(columns.page[rows], kind="stable")]
            before = np.cumsum(columns.nbytes[rows].astype(np.int64)) - columns.nbytes[rows]
            self.remove(rows[before < excess], tombstones=True)

    def refuse_reads(self, drive: Drive) -> None:
        for run in drive.reads:
            self.finish_read(drive, run, [False] * len(run.pieces), drive.epoch)
        drive.reads.clear()
        drive.reads_queued = 0

    def finish_read(self, drive: Drive, run: Run, results: Iterable[bool], epoch: int) -> None:
        if epoch == drive.epoch:
            drive.log.segments[run.segment % SEGMENTS].readers -= 1
        run.finish([*results])

    def void(self, drive: Drive, batch: Batch) -> None:
        """Undo a batch that was not published before its drive failed."""
        drive.in_flight.discard(batch)
        self.index.release(batch.content.rows)
        for item in batch.content.items:
            if item.row < 0:
                self.finish(item, False)

    def fail(self, drive: Drive, error: Exception, epoch: int | None = None) -> None:
        """Turn a drive off; `Workers.watch` retries it. No effect if the drive has failed since `epoch` (if given)."""
        if epoch is not None and epoch != drive.epoch:
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if reason != drive.logged_reason:
            log.warning("SSD path %s is off: %s", drive.volume.path, reason)
        drive.logged_reason = drive.reason = reason
        drive.state = "off"
        drive.retry_at_s = time.monotonic() + RETRY_S
        self.counts["errors"] += 1
        self.refuse_reads(drive)
        drive.epoch += 1
        in_flight = drive.in_flight
        for batch in list(in_flight):
            content = batch.content
            cancelled = [item.chunk.key for item in content.items if item.cancelled]
            drive.deleted.update(dict.fromkeys([*content.deleted, *cancelled]))
            drive.dropped.update(dict.fromkeys(content.dropped))
            if batch.finished:
                self.void(drive, batch)
        index = self.index
        rows = index.rows_where(index.segment[index.used()] // SEGMENTS == drive.number)
        self._remove_rows(rows)
        drive.reset()
        drive.in_flight = in_flight
        self.fail_queue_if_off()
        drive.notify()

    def fail_later(self, drive: Drive, error: Exception, epoch: int | None = None) -> None:
        with self.lock:
            self.fail(drive, error, epoch)
