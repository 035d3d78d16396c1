"""The state that the drives of an SSD tier share: index and write queue. One lock guards all of it.

Invariant: the index holds the chunks that recovery would find, except chunks covered by a tombstone, written or queued.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.tier.base import GroupNames
from raykv.tier.segments.format import BLOCK_NBYTES, Array, blocks_of, flat, key_array
from raykv.tier.segments.index import SEGMENTS, Changes, Index
from raykv.tier.segments.log import Batch, Segment
from raykv.tier.segments.requests import Item, Run, WriteQueue
from raykv.tier.segments.volume import aligned
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
        quotas: Per number of a quota group on this node: its quota in bytes.
        ended: The tier is being closed.
    """

    def __init__(self, index: Index, arena: memoryview, groups: GroupNames, wall: Callable[[], float]) -> None:
        super().__init__("raykv-ssd-callbacks", arena, groups)
        self.lock = threading.Lock()
        self.tombstones_written = threading.Condition(self.lock)
        self.index, self.wall = index, wall
        self.drives: list[Drive] = []
        self.coming: dict[bytes, Item] = {}
        self.quotas: dict[int, int] = {}
        self.changes = Changes()
        self.ended = False

    def enqueue(self, item: Item) -> None:
        self.coming[item.chunk.key] = item
        super().enqueue(item)
        if item.moved_from >= 0:  # first, because its segment is free only after that
            self.queue.rotate(1)

    def next_item(self) -> Item | None:
        while self.queue and self.queue[0].cancelled:
            self.finish(self.dequeue(), False)
        return self.queue[0] if self.queue else None

    def finish(self, item: Item, result: bool) -> None:
        self.coming.pop(item.chunk.key, None)
        if result:
            self.counts["written_nbytes" if item.moved_from < 0 else "moved_nbytes"] += item.chunk.nbytes
        item.finish(result)

    def fail_queue_if_off(self) -> None:
        if self.ended or not any(drive.on for drive in self.drives):
            while self.queue:
                self.finish(self.dequeue(), False)

    def fail_moves(self) -> None:
        """Give up chunks that wait to be moved. Without space, they would wait for their own segment for ever."""
        while (item := self.next_item()) is not None and item.moved_from >= 0:
            self.finish(self.dequeue(), False)

    def free_rows(self) -> int:
        """Rows of the index that are left when all batches being written are published."""
        in_flight = [len(batch.content.items) for drive in self.drives for batch in drive.in_flight]
        return self.index.free_rows() - sum(in_flight)

    def notify(self) -> None:
        for drive in self.drives:
            drive.notify()

    def rows_of(self, drive: Drive, segment: Segment) -> Rows:
        return self.index.rows_where(self.index.segment[self.index.used()] == drive.identity(segment))

    def insert(self, drive: Drive, segment: Segment, entries: Array, groups: Array) -> int:
        """Enter chunks of a segment, whose keys must be new. Returns how many: fewer if the index is full."""
        rows = self.index.allocate(len(entries))
        if len(rows):
            entries = entries[: len(rows)]
            self.index.insert(rows, entries, groups[: len(rows)], drive.identity(segment))
            self.changes.add(entries["key"])
            segment.live_nbytes += int(self.index.disk_nbytes(rows).sum())
        return len(rows)

    def _segments_of(self, rows: Rows) -> tuple[list[Segment], npt.NDArray[np.intp]]:
        """The segments of some rows, each once, and the position of each row's segment in this list."""
        identities, positions = np.unique(self.index.segment[rows], return_inverse=True)
        segments = [self.drives[each // SEGMENTS].log.segments[each % SEGMENTS] for each in identities.tolist()]
        return segments, positions

    def remove(self, rows: Rows, *, tombstones: bool) -> None:
        """Remove rows, without duplicates, from the index. `tombstones`: also queue tombstones for the keys."""
        if not len(rows):
            return
        if tombstones:
            keys = flat(self.index.keys(rows)).tolist()
            for identity, key in zip(self.index.segment[rows].tolist(), keys, strict=True):
                self.drives[identity // SEGMENTS].deleted[key] = None
        segments, positions = self._segments_of(rows)
        totals = np.bincount(positions, self.index.disk_nbytes(rows)).tolist()
        for segment, total in zip(segments, totals, strict=True):
            segment.live_nbytes -= int(total)
        self._remove_rows(rows)

    def _remove_rows(self, rows: Rows) -> None:
        self.changes.add(self.index.keys(rows))
        self.index.remove(rows)

    def remove_expired(self) -> None:
        index = self.index
        self.remove(index.rows_where(index.expired(index.used(), now_s=self.wall())), tombstones=False)

    def disown(self, drive: Drive, key: bytes) -> None:
        """Queue a tombstone for a copy on the drive that is not in the index, so that recovery does not find it.

        If the index has another copy on this drive, there is no tombstone, because it would cover that copy too.
        """
        row = int(self.index.find_all(key_array([key]))[0])
        if row < 0 or int(self.index.segment[row]) // SEGMENTS != drive.number:
            drive.deleted[key] = None

    def enforce_quotas(self, groups: Iterable[int]) -> None:
        for group in groups:
            quota = self.quotas.get(group)
            if quota is not None and self.index.nbytes[group] > quota:
                self._trim(group, quota)

    def _trim(self, group: int, quota: int) -> None:
        """Remove the oldest chunks of a quota group until it is within its quota."""
        index = self.index
        rows = index.rows_of_group(group)
        segments, positions = self._segments_of(rows)
        sequences = np.array([segment.sequence for segment in segments])[positions]
        rows = rows[np.lexsort((index.columns.page[rows], sequences))]
        nbytes = index.columns.nbytes[rows].astype(np.int64)
        self.remove(rows[np.cumsum(nbytes) - nbytes < index.nbytes[group] - quota], tombstones=True)

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
        for item in batch.content.items:
            self.finish(item, False)

    def read_bytes(self, drive: Drive, number: int, offset: int, nbytes: int) -> memoryview:
        """Read bytes of a segment into new memory. Returns fewer at the file's end, and none at a media error (EIO)."""
        buffer = aligned(nbytes)[:nbytes]
        try:
            return buffer[: drive.volume.read(number, offset, [buffer])]
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.counts["errors"] += 1
            return buffer[:0]

    def read_chunk(self, drive: Drive, number: int, block: int, nbytes: int, checksum: int) -> memoryview | None:
        """Read a chunk and the padding of its last block into new memory. Returns None if the chunk is damaged."""
        view = self.read_bytes(drive, number, block * BLOCK_NBYTES, blocks_of(nbytes) * BLOCK_NBYTES)
        whole = len(view) >= nbytes and xxhash.xxh3_64_intdigest(view[:nbytes]) == checksum
        return view if whole else None

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
