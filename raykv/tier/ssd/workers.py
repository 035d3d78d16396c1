"""The threads of one drive: they choose the next task, and read and write chunks. See `raykv.tier.ssd.tier`."""

import errno
import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from raykv.tier.segments.format import BLOCK_NBYTES, blocks_of
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.io_threads import IoThreads
from raykv.tier.segments.log import Batch
from raykv.tier.segments.requests import Item, Run
from raykv.tier.segments.volume import IOV_MAX, encoded
from raykv.tier.ssd.recovery import Recovery
from raykv.tier.ssd.state import Content, Drive, Shared
from raykv.tier.ssd.upkeep import Upkeep
from raykv.types import Rows

log = logging.getLogger(__name__)

UPKEEP, FIRST_WRITER = 0, 1
"""Numbers of two threads. UPKEEP does only upkeep. FIRST_WRITER prefers writes, so that reads do not starve writes."""
EXTRA_THREADS: Final = 3
"""A drive has this many more threads than its queue depth: one for upkeep; two to verify checksums and encode records
while other threads do I/O."""
BAD_READS: Final = 3
"""This many media errors (EIO) in a row turn the drive off. Fewer errors only drop the chunks of the failed reads."""
BATCH_NBYTES: Final = 8 << 20
BATCH_CHUNKS: Final = IOV_MAX - 1
"""A batch has at most BATCH_NBYTES, or one larger chunk. It has at most BATCH_CHUNKS chunks, because the record and
each chunk take one buffer of the system call."""
BATCH_DELETED: Final = 1 << 14
"""At most this many deleted keys are in one record. Further keys go into the next records."""
FEW_SEGMENTS: Final = 3
"""A drive with at most this many segments reserves none of them for moved chunks and tombstones."""


class Writer:
    """Writes batches to one drive.

    A caller holds the tier's lock when it calls `next_task`, and runs the returned task without the lock.
    """

    def __init__(self, shared: Shared, drive: Drive) -> None:
        self._shared, self._drive = shared, drive

    def next_task(self) -> Callable[[], None] | None:
        shared, drive = self._shared, self._drive
        if drive.state != "on" or not (drive.deleted or drive.dropped or shared.queue):
            return None
        draft = self._draft()
        if draft is None:
            return None
        for key in draft.deleted:
            del drive.deleted[key]
        drive.dropped.clear()
        batch = drive.log.place(draft.items, draft, keys=draft.deleted, groups=draft.dropped)
        drive.in_flight.add(batch)
        if shared.queue:
            drive.wake.notify()
        drive.under_way += 1
        return lambda: self._write(batch)

    def _draft(self) -> Content | None:
        """Choose the content of the next batch, and open a segment if needed. None: nothing can be written."""
        shared, drive = self._shared, self._drive
        for _ in range(2):
            draft = Content(drive.epoch, list(drive.deleted)[:BATCH_DELETED], list(drive.dropped))
            item = self._fill(draft)
            if draft.items:
                return draft
            tombstones = bool(draft.deleted or draft.dropped)
            if tombstones and drive.log.fits(draft.counts(), blocks=0):
                return draft
            if item is None and not tombstones:
                return None
            # The last free segment is reserved for moved chunks and tombstones, unless there are very few segments.
            ordinary = item is not None and item.moved_from < 0 and not tombstones
            spare = 1 if ordinary and len(drive.log.segments) > FEW_SEGMENTS else 0
            if drive.log.open_next(spare=spare) is None:
                shared.fail_moves()
                return None
        return None

    def _fill(self, draft: Content) -> Item | None:
        """Move chunks from the write queue to `draft`. Returns the first chunk that does not fit, or None."""
        shared, drive = self._shared, self._drive
        # If one record cannot hold all tombstones, chunks wait for the batch with the last of them. Otherwise a
        # tombstone in a later batch would delete a chunk that was stored again after its deletion.
        if len(draft.deleted) < len(drive.deleted):
            return None
        free_rows = shared.free_rows()
        while (item := shared.next_item()) is not None:
            blocks = draft.blocks + blocks_of(item.chunk.nbytes)
            full = draft.items and (blocks * BLOCK_NBYTES > BATCH_NBYTES or len(draft.items) == BATCH_CHUNKS)
            if full or not drive.log.fits(draft.counts(item), blocks=blocks):
                return item
            if item.moved_from < 0 and len(draft.items) >= free_rows:
                return None
            shared.dequeue()
            draft.items.append(item)
            draft.blocks, draft.texts = blocks, draft.texts | {item.text}
        return None

    def _write(self, batch: Batch) -> None:
        shared, drive, content = self._shared, self._drive, batch.content
        problem, nbytes = None, 0
        buffers = [encoded(batch.record), *(item.view for item in content.items)]
        try:
            sync = bool(content.deleted or content.dropped)
            nbytes = drive.volume.write(batch.segment.number, batch.start * BLOCK_NBYTES, buffers, sync=sync)
        except OSError as error:
            problem = error
        with shared.lock:
            drive.finish_operation()
            shared.counts["disk_nbytes"] += nbytes
            if problem is not None:
                shared.fail(drive, problem)
            if content.epoch != drive.epoch:
                shared.void(drive, batch)
            else:
                for each in drive.log.finish(batch):
                    drive.in_flight.discard(each)
                    self._publish(each)
            drive.notify()

    def _publish(self, batch: Batch) -> None:
        """Enter the chunks of a batch into the index, once recovery can find the batch."""
        shared, drive, index = self._shared, self._drive, self._shared.index
        items, entries = batch.content.items, batch.record.entries
        moved_from = np.array([item.moved_from for item in items], np.int64)
        existing = index.find_all(np.ascontiguousarray(entries["key"]))
        moved = (existing >= 0) & (index.segment[existing] == moved_from)
        expired = (existing >= 0) & index.expired(existing, now_s=time.time())
        shared.remove(np.unique(existing[moved | expired]), tombstones=False)
        here = (existing >= 0) & ~moved & ~expired  # the recovery of another drive entered these
        chosen = np.where(moved_from < 0, ~here, moved) & ~np.array([item.cancelled for item in items], np.bool_)
        groups = np.array([item.chunk.group for item in items], np.uint16)
        count = shared.insert(drive, batch.segment, entries[chosen], groups[chosen])
        chosen[np.flatnonzero(chosen)[count:]] = False
        for item, is_here, is_chosen in zip(items, here.tolist(), chosen.tolist(), strict=True):
            source = item.moved_from // SEGMENTS
            if not is_chosen:
                shared.disown(drive, item.chunk.key)
            elif source not in (-1, drive.number):
                shared.disown(shared.drives[source], item.chunk.key)
            shared.finish(item, is_here or is_chosen)
        shared.enforce_quotas({item.chunk.group for item in items})


class Workers:
    def __init__(self, shared: Shared, drive: Drive) -> None:
        """Start the threads. They begin with recovery, unless the directory could not be opened."""
        self._shared, self._drive = shared, drive
        self._upkeep, self._writer = Upkeep(shared, drive), Writer(shared, drive)
        self._recovery = Recovery(shared, drive)
        with shared.lock:
            if drive.state == "starting":
                drive.tasks.append(self._recovery.list_segments)
        self.io = IoThreads(
            drive.config.depth + EXTRA_THREADS,
            f"raykv-ssd{drive.number}",
            self._wait_for_task,
            failed=lambda error: shared.fail_later(drive, error),
        )

    def _wait_for_task(self, thread: int) -> Callable[[], None] | None:
        shared, drive = self._shared, self._drive
        with shared.lock:
            while (task := self._next_task(thread)) is None:
                if shared.ended and not (drive.on and drive.has_pending_tombstones):
                    return None
                if thread == UPKEEP:
                    drive.wake_upkeep.wait()
                    continue
                if shared.queue:  # chunks are queued, but no segment has room for them: wake upkeep, which makes space
                    drive.wake_upkeep.notify()
                drive.wake.wait()
            return task

    def _next_task(self, thread: int) -> Callable[[], None] | None:
        drive = self._drive
        if drive.slow:
            return None
        if thread == UPKEEP:
            return self._upkeep.next_task()
        if drive.state == "starting":
            return self._next_read() or self._upkeep.next_task()
        if drive.under_way >= drive.config.depth:
            return None
        if thread == FIRST_WRITER and drive.config.depth > 1:
            return self._writer.next_task() or self._next_read()
        return self._next_read() or self._writer.next_task()

    def watch(self) -> None:
        """Update `drive.slow`, and retry a drive that is off. The caller holds the lock and calls this regularly."""
        shared, drive = self._shared, self._drive
        slow = self.io.longest_s() > drive.config.io_timeout_s
        if slow and not drive.slow:
            log.warning("SSD path %s is slow: nothing for %s s", drive.volume.path, drive.config.io_timeout_s)
            shared.counts["timeouts"] += 1
            shared.refuse_reads(drive)
        if slow != drive.slow:
            drive.slow = slow
            shared.refuse_writes_if_off()
        if drive.state == "off" and not drive.tasks and not self.io.busy():
            self._retry()
        drive.notify()

    def _retry(self) -> None:
        """Close the directory of a drive that is off, so that it can be unmounted.

        After `retry_at_s`, start the drive again.
        """
        drive = self._drive
        if not drive.closed:
            drive.closed = True
            drive.tasks.append(drive.volume.close)
        elif time.monotonic() >= drive.retry_at_s:
            drive.state = "starting"
            drive.tasks.append(self._recovery.open)

    def _next_read(self) -> Callable[[], None] | None:
        drive = self._drive
        if not drive.reads or drive.state == "off":
            return None
        run, epoch = drive.reads.popleft(), drive.epoch
        drive.under_way += 1
        return lambda: self._read(run, epoch)

    def _read(self, run: Run, epoch: int) -> None:
        shared, drive = self._shared, self._drive
        views, problem, got = run.views(shared.arena), None, 0
        try:
            got = drive.volume.read(run.segment % SEGMENTS, run.block * BLOCK_NBYTES, views)
        except OSError as error:
            problem = error
        with shared.lock:
            drive.finish_operation()
        right = run.verify(views, got)
        with shared.lock:
            wrong = run.enter(right, shared)
            shared.finish_read(drive, run, right.tolist(), epoch)
            drive.bad_reads = drive.bad_reads + 1 if problem is not None else 0
            if epoch == drive.epoch:
                self._handle_wrong(wrong, problem)
            drive.notify()

    def _handle_wrong(self, wrong: Rows, problem: OSError | None) -> None:
        """Drop chunks that were read with wrong bytes or a media error (EIO).

        Turn the drive off after BAD_READS media errors in a row, or after one other error.
        """
        shared, drive = self._shared, self._drive
        bad_spot = problem is not None and problem.errno == errno.EIO
        if problem is None or bad_spot:
            shared.counts["corrupt"] += 0 if bad_spot else len(wrong)
            shared.counts["errors"] += bad_spot
            shared.remove(wrong, tombstones=True)
        if problem is not None and (not bad_spot or drive.bad_reads >= BAD_READS):
            shared.fail(drive, problem)
