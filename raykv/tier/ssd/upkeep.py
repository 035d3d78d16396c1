"""Makes, seals, reclaims and wipes the segments of one drive. See `raykv.tier.ssd.tier`.

A segment is reclaimed in four steps: move its recently read chunks to another segment; wipe its first and last block;
remove its other chunks from the index; mark it free. Because of this order, recovery never finds a chunk that is not in
the index.
"""

import errno
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from raykv.tier.base import Chunk
from raykv.tier.segments.format import BLOCK_NBYTES, raw_keys
from raykv.tier.segments.log import Segment
from raykv.tier.segments.requests import Item, Request
from raykv.tier.segments.volume import aligned, encoded
from raykv.tier.ssd.state import Drive, Shared

MOVED_SHARE: Final = 4
"""At most one byte is moved for every four bytes that callers write. This bounds write amplification."""
MOVED_AT_ONCE: Final = 0.5
"""At most this share of a segment is moved, so that reclaiming the segment frees enough space."""
FEWEST_SEGMENTS: Final = 2
"""A drive without space for this number of segments is turned off."""
GROW_S: Final = 30.0
"""Time between a failure to make a segment and the next attempt."""


class Upkeep:
    """Keeps segments available.

    A caller holds the tier's lock when it calls `next_task`, and runs the returned task without the lock.
    """

    def __init__(self, shared: Shared, drive: Drive) -> None:
        self._shared, self._drive = shared, drive

    def next_task(self) -> Callable[[], None] | None:
        drive, log, epoch = self._drive, self._drive.log, self._drive.epoch
        if drive.tasks:
            return drive.tasks.popleft()
        if drive.state != "on":
            return None
        if (to_seal := log.next_to_seal()) is not None:
            return lambda: self._seal(to_seal, epoch)
        if self._shared.ended or drive.making:
            return None
        if log.wants_space() and time.monotonic() >= drive.grow_at_s and (number := log.absent()) is not None:
            drive.making, absent = True, number
            return lambda: self._make(absent, epoch)
        short = log.wants_space() or self._shared.index.free_rows() < self._shared.spare_rows
        if short and (victim := log.choose_victim()) is not None:
            return lambda: self._reclaim(victim, epoch)
        return None

    def _write(self, number: int, block: int, view: memoryview, *, sync: bool = False) -> None:
        nbytes = self._drive.volume.write(number, block * BLOCK_NBYTES, [view], sync=sync)
        with self._shared.lock:
            self._shared.counts["disk_nbytes"] += nbytes

    def _make(self, number: int, epoch: int) -> None:
        """Make one more segment.

        If this fails, turn the drive off. But a full drive stays on if it has at least FEWEST_SEGMENTS.
        """
        drive, problem = self._drive, None
        try:
            drive.volume.make(number)
        except OSError as error:
            problem = error
        with self._shared.lock:
            if epoch != drive.epoch:
                return
            drive.making, drive.reason = False, ""
            if problem is None:
                drive.log.add_free(number)
            else:
                drive.grow_at_s = time.monotonic() + GROW_S
                drive.reason = f"does not grow: {problem.strerror}"
                full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                if not full or len(drive.log.segments) < FEWEST_SEGMENTS:
                    self._shared.fail(drive, problem)
            drive.notify()

    def _seal(self, segment: Segment, epoch: int) -> None:
        drive = self._drive
        with self._shared.lock:
            record = drive.log.summary(segment) if segment.records else None
        if record is not None:
            self._write(segment.number, drive.segment_blocks - record.blocks(), encoded(record), sync=True)
        with self._shared.lock:
            if epoch == drive.epoch:
                drive.log.mark_sealed(segment)
                drive.notify()

    def _reclaim(self, segment: Segment, epoch: int) -> None:
        """Queue the recently read chunks of a segment to be written to another segment.

        `_free` frees the segment after these writes.
        """
        shared, drive, index = self._shared, self._drive, self._shared.index
        with shared.lock:
            rows = shared.rows_of(drive, segment)
            rows = rows[~index.expired(rows, now_s=time.time())]
            sizes = index.disk_nbytes(rows)
            rows = rows[second_chance(index.reads_since_write(rows), sizes, most_nbytes=self._may_move_nbytes())]
            keys, found = raw_keys(index.keys(rows)), [index.found(row) for row in rows.tolist()]
            blocks = index.columns.page[rows].tolist()
        places = zip(blocks, found, strict=True)
        views = [shared.read_chunk(drive, segment.number, block, *entry[:2]) for block, entry in places]
        request = Request(shared.callbacks, lambda _: self._end_moves(segment, epoch))
        with shared.lock:
            if epoch != drive.epoch:
                return
            here = np.isin(rows, shared.rows_of(drive, segment)).tolist()
            for key, entry, view, is_here in zip(keys, found, views, here, strict=True):
                if is_here and view is not None and key not in shared.coming:
                    chunk = Chunk(key=key, offset=0, **entry._asdict())
                    text = shared.groups.text(entry.group)
                    shared.enqueue(Item(chunk, view, text, request, request.add(), drive.identity(segment)))
            request.submit()
            shared.notify()

    def _may_move_nbytes(self) -> int:
        counts, most = self._shared.counts, int(MOVED_AT_ONCE * self._drive.config.segment_nbytes)
        return max(0, min(most, counts["written_nbytes"] // MOVED_SHARE - counts["moved_nbytes"]))

    def _end_moves(self, segment: Segment, epoch: int) -> None:
        drive = self._drive
        with self._shared.lock:
            if epoch == drive.epoch:
                drive.tasks.append(lambda: self._free(segment, epoch))
                drive.notify()

    def _free(self, segment: Segment, epoch: int) -> None:
        """Wipe a segment's first and last block, so that recovery does not find its chunks. Mark the segment as free.

        Both blocks are synced, because a later segment may have tombstones for these chunks. The later segment is wiped
        after this one. If a power cut undid only the wiping of this one, deleted chunks would return.
        """
        drive, number = self._drive, segment.number
        self._write(number, 0, aligned(BLOCK_NBYTES))
        self._write(number, drive.segment_blocks - 1, aligned(BLOCK_NBYTES), sync=True)
        with self._shared.lock:
            if epoch != drive.epoch:
                return
            self._shared.remove(self._shared.rows_of(drive, segment), tombstones=False)
            drive.log.mark_wiped(segment)
            surplus = len(drive.log.segments) > drive.log.limit and not segment.readers
            if surplus:
                drive.log.remove_free(number)
            drive.notify()
        if surplus:
            drive.volume.remove(number)


def second_chance(
    reads: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], *, most_nbytes: int
) -> npt.NDArray[np.int64]:
    """Return which chunks to move out of a segment: those with reads, the most read first, up to `most_nbytes`."""
    order = np.argsort(-reads, kind="stable")
    order = order[reads[order] > 0]
    return order[np.cumsum(nbytes[order]) <= most_nbytes]
