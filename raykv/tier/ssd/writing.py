"""Writes batches of chunks and tombstones to one drive. See `raykv.tier.ssd.tier`."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from raykv.tier.segments.format import BLOCK_NBYTES, blocks_of
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.log import Batch
from raykv.tier.segments.requests import Item
from raykv.tier.segments.volume import IOV_MAX, encoded
from raykv.tier.ssd.state import Content, Drive, Shared

BATCH_NBYTES: Final = 8 << 20
BATCH_CHUNKS: Final = IOV_MAX - 1
"""Most chunks of one batch. The record is one more buffer of the same call."""
BATCH_DELETED: Final = 1 << 14
"""Most deleted keys in one record."""
FEW_SEGMENTS: Final = 3


class Writer:
    """Callers hold the tier's lock, except for `_write`, which waits for the disk."""

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
        """Choose the next batch, and open a segment that it fits into. None: nothing to write, or no free segment."""
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
        """Add the chunks that fit. Returns the first chunk that does not fit into the segment, or None."""
        shared, drive = self._shared, self._drive
        # If one record cannot hold all tombstones, all are written before any chunk: a tombstone written after a newer
        # copy would cover that copy too.
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
        """Enter the chunks of a batch into the index. Recovery can find the batch from now on."""
        shared, drive, index = self._shared, self._drive, self._shared.index
        items, entries = batch.content.items, batch.record.entries
        moved_from = np.array([item.moved_from for item in items], np.int64)
        existing = index.find_all(np.ascontiguousarray(entries["key"]))
        moved = (existing >= 0) & (index.segment[existing] == moved_from)
        expired = (existing >= 0) & index.expired(existing, now_s=time.time())
        shared.remove(np.unique(existing[moved | expired]), tombstones=False)
        here = (existing >= 0) & ~moved & ~expired  # found on another drive since
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
