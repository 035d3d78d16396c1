"""The segments of one path of an SSD tier: made, sealed, reclaimed, wiped. See `raykv.tier.ssd.drive`.

A segment leaves in this order: what is to be moved on is written elsewhere, the first and the last block are wiped,
its chunks leave the index, it is free. So what a start would find is in the index at all times.

Everything is under the tier's lock, but for the methods that say "on a thread": these wait for the disk.
"""

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raykv.memory.copying import checksum_of
from raykv.tier.segments.format import BLOCK_NBYTES, Record, blocks_needed, blocks_of, encode
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.log import Segment, second_chance
from raykv.tier.segments.requests import Item, raw_keys
from raykv.tier.segments.volume import aligned

if TYPE_CHECKING:
    from raykv.tier.ssd.drive import Drive

FEWEST_SEGMENTS: Final = 2
"""With less room on the drive, the path is off."""
ROWS_SPARE: Final = 2048
"""With fewer rows free in the index, or than an eighth of all, a segment is reclaimed."""
GROW_S: Final = 30.0
"""A path that was full may grow again after so long."""


class Upkeep:
    """See the module."""

    def __init__(self, drive: "Drive") -> None:
        self._drive, self.common = drive, drive.common
        self._rows_spare = min(ROWS_SPARE, drive.common.index.rows // 8)
        self._grow_at_s = 0.0
        self._moving = 0
        self._making = False

    def reset(self) -> None:
        """All that was under way is void."""
        self._moving, self._making = 0, False

    def next(self) -> Callable[[], None] | None:
        """Something that keeps the log going."""
        if self._drive.tasks:
            return self._drive.tasks.popleft()
        if self._drive.state != "on":
            return None
        to_seal = self._drive.log.to_seal()
        if to_seal is not None:
            return lambda: self._seal(to_seal)
        if self.common.ended:
            return None
        if self._drive.log.wants_space() and not self._making:
            number = self._drive.log.absent() if self._drive.clock() >= self._grow_at_s else None
            if number is not None:
                self._making = True
                return lambda: self._make(number)
        short = self._drive.log.wants_space() or self.common.index.free_rows() < self._rows_spare
        if short and not self._making and (victim := self._drive.log.victim()) is not None:
            return lambda: self._reclaim(victim)
        return None

    def _make(self, number: int) -> None:
        """On a thread: one segment more; or find that there is no room for it."""
        with self.common.lock:
            epoch = self._drive.epoch
        try:
            self._drive.volume.make(number)
            self.wipe_blocks(number)
        except OSError as error:
            with self.common.lock:
                self._making = False
                if epoch != self._drive.epoch:
                    return
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    self._drive.fail(error)
                    return
                self._grow_at_s = self._drive.clock() + GROW_S
                self._drive.reason = f"does not grow: {error.strerror}"
                if len(self._drive.log.segments) < FEWEST_SEGMENTS:
                    self._drive.fail(error)
                self._drive.notify()
            return
        with self.common.lock:
            self._making = False
            if epoch == self._drive.epoch:
                self._drive.log.made(number)
                self._drive.reason = ""
                self._drive.notify()

    def _seal(self, segment: Segment) -> None:
        """On a thread: write a full segment's summary."""
        with self.common.lock:
            epoch = self._drive.epoch
            record = self._drive.log.summary(segment) if segment.records else None
        try:
            if record is not None:
                self._write_summary(segment.number, record)
        except OSError as error:
            self._drive.fail_in(epoch, error)
            return
        with self.common.lock:
            if epoch == self._drive.epoch:
                self._drive.log.sealed(segment)
                self._drive.notify()

    def _write_summary(self, number: int, record: Record) -> None:
        blocks = blocks_needed(record)
        buffer = self._drive.buffer(blocks * BLOCK_NBYTES)
        encode(record, buffer)
        nbytes = blocks * BLOCK_NBYTES
        total = self._drive.volume.write(
            number, (self._drive.segment_blocks - blocks) * BLOCK_NBYTES, [buffer[:nbytes]]
        )
        self._drive.volume.sync(number)
        with self.common.lock:
            self._drive.buffers.append(buffer)
            self.common.disk_nbytes += total

    def wipe_blocks(self, number: int) -> None:
        """On a thread: see to it that nothing is found in a segment.

        After a power cut that comes before the next `sync`, its old chunks may be found again; those that something
        else was written over are noticed when they are read.
        """
        zeros = aligned(BLOCK_NBYTES)
        total = 0
        for block in (0, self._drive.segment_blocks - 1):
            total += self._drive.volume.write(number, block * BLOCK_NBYTES, [zeros])
        with self.common.lock:
            self.common.disk_nbytes += total

    def _reclaim(self, segment: Segment) -> None:
        """On a thread: read what a segment moves on, and queue it to be written."""
        with self.common.lock:
            epoch, index = self._drive.epoch, self.common.index
            rows = self._drive.rows_of(segment)
            rows = rows[~index.over(rows, now_s=self.common.wall())]
            sizes = -(-index.columns.nbytes[rows].astype(np.int64) // BLOCK_NBYTES) * BLOCK_NBYTES
            chosen = second_chance(index.reads_since(rows), sizes, most_nbytes=self._drive.log.may_move_nbytes())
            pieces = [self._copy_of(row) for row in rows[chosen].tolist()]
        buffer = aligned(int(sizes[chosen].sum()))
        items, start = [], 0
        try:
            for item, block, checksum in pieces:
                view = buffer[start : start + blocks_of(item.nbytes) * BLOCK_NBYTES]
                start += len(view)
                got = self._drive.volume.read(segment.number, block * BLOCK_NBYTES, [view])
                if got >= item.nbytes and checksum_of([view[: item.nbytes]]) == checksum:
                    item.view = view
                    items.append(item)
        except OSError as error:
            self._drive.fail_in(epoch, error)
            return
        with self.common.lock:
            if epoch == self._drive.epoch:
                self._drive.moves.extend(items)
                self._moving = len(items)
                if not items:
                    self._drive.tasks.append(lambda: self._wipe(segment))
                self._drive.notify()

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
            group=found.group,
            text=self.common.texts[found.group],
            depth=found.depth,
            parent=found.parent,
            reads=found.reads,
            expires_s=found.expires_s,
            row=row,
        )
        item.came_from = int(index.segment[row]), int(index.columns.page[row])
        return item, item.came_from[1], found.checksum

    def still_there(self, item: Item) -> bool:
        segment, block = item.came_from
        return self._drive.is_at(item.row, segment - self._drive.number * SEGMENTS, block, item.checksum)

    def land(self, item: Item, segment: Segment, entry: Any) -> None:
        """A chunk was moved on."""
        index, common = self.common.index, self.common
        if self.still_there(item):
            row = np.array([item.row], np.int32)
            common.lighten(row)
            index.move(row, entry, self._drive.number * SEGMENTS + segment.number)
            self._drive.log.moved_nbytes += self._drive.add(segment, row)
            common.moved_nbytes += item.nbytes
        else:
            self._drive.disown(item.key)
        self.moved(item)

    def moved(self, item: Item) -> None:
        """One less to be moved on before the segment may be wiped."""
        self._moving -= 1
        leaving = self._drive.log.leaving
        if not self._moving and leaving is not None:
            self._drive.tasks.append(lambda: self._wipe(leaving))
            self._drive.notify()

    def _wipe(self, segment: Segment) -> None:
        """On a thread: make a segment free."""
        with self.common.lock:
            epoch, number = self._drive.epoch, segment.number
        try:
            if segment.tells:  # what it speaks against was wiped before it, and must not come back without it
                self._drive.volume.sync(number)
            self.wipe_blocks(number)
        except OSError as error:
            self._drive.fail_in(epoch, error)
            return
        with self.common.lock:
            if epoch != self._drive.epoch:
                return
            self.common.forget(self._drive.rows_of(segment), tell=False)
            self._drive.log.wiped(segment)
            too_many = len(self._drive.log.segments) > self._drive.log.limit and not segment.holds
            if too_many:
                self._drive.log.gone(number)
            self._drive.notify()
        if too_many:
            self._drive.volume.remove(number)
