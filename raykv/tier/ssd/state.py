"""The state of an SSD tier: a `Drive` for each path, and `Shared` with index and write queue. One lock guards it all.

Invariant: recovery would find exactly the chunks of the index. The only exception is a deleted chunk whose tombstone is
not written yet.
"""

import errno
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.config import SsdConfig
from raykv.tier.base import Environment
from raykv.tier.segments.format import BLOCK_NBYTES, Array, Counts, blocks_of, flat, key_array
from raykv.tier.segments.index import SEGMENTS, Changes, Index
from raykv.tier.segments.log import SPARE_SEGMENTS, Batch, Log, Segment
from raykv.tier.segments.requests import Item, Run, WriteQueue
from raykv.tier.segments.volume import Volume, aligned
from raykv.types import Rows

log = logging.getLogger(__name__)

PENDING_DELETED: Final = 1 << 20
"""A drive that is off remembers at most this many deleted keys. If there are more, the next start empties the drive."""
INDEX_ROW_NBYTES: Final = 64 << 10
"""The index has one row for each 64 KiB of capacity, unless the config has `max_chunks`. Each chunk takes a row."""
SPARE_ROWS: Final = 2048
"""If the index has fewer free rows than this (in a small index: than an eighth of its rows), a segment is reclaimed."""
RETRY_S: Final = 30.0
"""Time between a drive's failure and the next attempt to open it."""


@dataclass(eq=False, slots=True)
class Content:
    """The content of a batch: chunks and tombstones.

    Attributes:
        epoch: `Drive.epoch` when the batch was begun.
        deleted: Deleted keys, for tombstones.
        dropped: Dropped quota groups as JSON, for tombstones.
        items: Chunks of the batch.
        blocks: Length of all chunks together, in blocks.
        texts: Quota groups of the chunks as JSON.
    """

    epoch: int
    deleted: list[bytes]
    dropped: list[bytes]
    items: list[Item] = field(default_factory=list)
    blocks: int = 0
    texts: frozenset[bytes] = frozenset()

    def counts(self, item: Item | None = None) -> Counts:
        """Count what the record of the batch lists. With `item`: what it would list after adding this chunk."""
        texts = self.texts.union(self.dropped, [item.text] if item else [])
        return Counts(len(self.items) + (item is not None), len(self.deleted), len(self.dropped), texts)


class Drive:
    """The state of one directory of segments.

    Attributes:
        slow: Whether an operation takes too long. If so, the drive gets no new work.
        reason: Why the drive is off or does not grow; empty if nothing is wrong.
        epoch: Number of failures so far. Results of work that was begun in an earlier epoch are ignored.
        deleted: Keys of tombstones that are not in a batch yet.
        dropped: Quota groups (as JSON) of tombstones that are not in a batch yet.
        drop_everything: Whether there were too many tombstones to keep. If so, the next start empties the drive.
        tasks: Queued tasks of upkeep and recovery.
        reads: Queued reads, each of a run of adjacent chunks.
        under_way: Number of running reads and writes.
        in_flight: Batches that are in the log, but not in the index yet.
    """

    def __init__(self, number: int, volume: Volume, config: SsdConfig, lock: threading.Lock) -> None:
        self.number, self.volume, self.config = number, volume, config
        self.segment_blocks = config.segment_nbytes // BLOCK_NBYTES
        self._incarnation = secrets.randbits(64)
        self.state: Literal["starting", "on", "off"] = "starting"
        self.slow, self.reason, self.epoch = False, "", 0
        self.wake = threading.Condition(lock)  # for the threads that read and write chunks
        self.wake_upkeep = threading.Condition(lock)
        self.deleted: dict[bytes, None] = {}
        self.dropped: dict[bytes, None] = {}
        self.drop_everything = False
        self.retry_at_s = self.grow_at_s = 0.0
        self.under_way = self.bad_reads = 0
        self.reset()

    def reset(self) -> None:
        limit = min(SEGMENTS - 1, self.config.capacity_nbytes // self.config.segment_nbytes)
        self.log = Log(limit=limit, segment_blocks=self.segment_blocks, incarnation=self._incarnation)
        self.tasks: deque[Callable[[], None]] = deque()
        self.reads: deque[Run] = deque()
        self.making = self.closed = False
        self.in_flight: set[Batch] = set()

    @property
    def on(self) -> bool:
        return self.state == "on" and not self.slow

    @property
    def readable(self) -> bool:
        return self.state != "off" and not self.slow

    @property
    def has_pending_tombstones(self) -> bool:
        """Whether recovery could find a deleted chunk, because its tombstone is not written yet."""
        contents = [self, *(batch.content for batch in self.in_flight)]
        cancelled = (item.cancelled for content in contents[1:] for item in content.items)
        return any(content.deleted or content.dropped for content in contents) or any(cancelled)

    def identity(self, segment: Segment) -> int:
        """Return the number that stands for a segment of this drive in `Index.segment`."""
        return self.number * SEGMENTS + segment.number

    def notify(self) -> None:
        self.wake.notify_all()
        self.wake_upkeep.notify()

    def finish_operation(self) -> None:
        self.under_way -= 1
        self.wake.notify()

    def remember_deleted(self, keys: Sequence[bytes]) -> None:
        """Keep tombstones of keys that are deleted while the drive is not on, because the drive may have the chunks.

        If there are more than PENDING_DELETED keys, the next start empties the drive instead.
        """
        self.deleted.update(dict.fromkeys(keys))
        if len(self.deleted) > PENDING_DELETED:
            self.drop_everything = True
            self.deleted.clear()

    def spare_segments(self) -> int:
        """Return how many segments can be filled before one is reclaimed."""
        if not self.on:
            return 0
        absent = self.log.limit - len(self.log.segments) if time.monotonic() >= self.grow_at_s else 0
        return max(0, absent + len(self.log.free()) - SPARE_SEGMENTS)

    def stats(self) -> dict[str, Any]:
        states = [segment.state for segment in self.log.segments.values()]
        return {
            "path": str(self.volume.path),
            "state": "slow" if self.slow else self.state,
            "reason": self.reason,
            "direct": self.volume.direct,
            "segments": len(states),
            "free_segments": states.count("free"),
        }


class Shared(WriteQueue):
    """State that all drives share.

    Attributes:
        lock: Guards this object and all drives.
        spare_rows: If the index has fewer free rows than this, a segment is reclaimed.
        ended: Whether the tier is being closed.
    """

    def __init__(self, config: SsdConfig, environment: Environment) -> None:
        rows = config.max_chunks or max(1024, len(config.paths) * config.capacity_nbytes // INDEX_ROW_NBYTES)
        largest_nbytes = config.segment_nbytes - 4 * BLOCK_NBYTES  # 4 blocks are for the record and the summary
        index = Index(rows, now_s=time.time())
        super().__init__("raykv-ssd-callbacks", index, environment, largest_nbytes=largest_nbytes)
        self.lock = threading.Lock()
        self.drives: list[Drive] = []
        self.changes = Changes()
        self.spare_rows = min(SPARE_ROWS, rows // 8)
        self.ended = False

    @property
    def on(self) -> bool:
        return not self.ended and any(drive.on for drive in self.drives)

    def refuse_writes_if_off(self) -> None:
        if not self.on:
            self.refuse_writes()

    def fail_moves(self) -> None:
        """Report queued moves as failed, because no segment is free for them. After that, the old segment is freed."""
        while (item := self.next_item()) is not None and item.moved_from >= 0:
            self.finish(self.dequeue(), False)

    def free_rows(self) -> int:
        """Return the number of free index rows, without those that the batches being written will take."""
        in_flight = [len(batch.content.items) for drive in self.drives for batch in drive.in_flight]
        return self.index.free_rows() - sum(in_flight)

    def spare_chunks(self, group: int, nbytes: int) -> int:
        """See `Tier.spare_chunks`. Chunks in the queue take their room already."""
        blocks, drive = blocks_of(nbytes), self.drives[0]
        if nbytes > self.largest_nbytes:
            return 0
        # In the worst case each chunk is a batch of its own, with a block for its record. The rest is for the summary.
        each = max(1, (drive.segment_blocks - drive.segment_blocks // 16) // (blocks + 1))
        spare = each * sum(drive.spare_segments() for drive in self.drives)
        spare = min(spare, self.free_rows() - self.spare_rows) - len(self.queue)
        if (quota := self.quotas.get(group)) is not None:
            coming = sum(item.chunk.nbytes for item in self.coming.values() if item.chunk.group == group)
            spare = min(spare, (quota - int(self.index.nbytes[group]) - coming) // nbytes)
        return max(0, spare)

    def notify(self) -> None:
        for drive in self.drives:
            drive.notify()

    def rows_of(self, drive: Drive, segment: Segment) -> Rows:
        return self.index.rows_where(self.index.segment[self.index.used()] == drive.identity(segment))

    def insert(self, drive: Drive, segment: Segment, entries: Array, groups: Array) -> int:
        """Enter chunks of a segment into the index. Their keys must be new.

        Returns how many were entered. The last ones are left out if the index is full.
        """
        rows = self.index.allocate(len(entries))
        if len(rows):
            entries = entries[: len(rows)]
            self.index.insert(rows, entries, groups[: len(rows)], drive.identity(segment))
            self.changes.add(entries["key"])
            segment.live_nbytes += int(self.index.disk_nbytes(rows).sum())
        return len(rows)

    def _segments_of(self, rows: Rows) -> tuple[list[Segment], npt.NDArray[np.intp]]:
        """Return the segments of `rows`, each segment once, and for each row the position of its segment among them."""
        identities, positions = np.unique(self.index.segment[rows], return_inverse=True)
        segments = [self.drives[each // SEGMENTS].log.segments[each % SEGMENTS] for each in identities.tolist()]
        return segments, positions

    def remove(self, rows: Rows, *, tombstones: bool) -> None:
        """Remove rows from the index. No row may occur twice. `tombstones`: also queue tombstones for the keys."""
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
        self.remove(index.rows_where(index.expired(index.used(), now_s=time.time())), tombstones=False)

    def disown(self, drive: Drive, key: bytes) -> None:
        """Queue a tombstone for a copy that is on the drive but not in the index. Otherwise recovery would find it.

        Does nothing if the index has another copy on the same drive, because the tombstone would delete that one too.
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
        """Remove the oldest chunks of a quota group until the group is within its quota."""
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

    def finish_read(self, drive: Drive, run: Run, results: Iterable[bool], epoch: int) -> None:
        if epoch == drive.epoch:
            drive.log.segments[run.segment % SEGMENTS].readers -= 1
        run.finish([*results])

    def void(self, drive: Drive, batch: Batch) -> None:
        """Report the chunks of a batch as not written, because the drive failed before they were in the index."""
        drive.in_flight.discard(batch)
        for item in batch.content.items:
            self.finish(item, False)

    def read_bytes(self, drive: Drive, number: int, offset: int, nbytes: int) -> memoryview:
        """Read bytes of a segment into new memory. Returns fewer at the file's end, none after a media error (EIO)."""
        buffer = aligned(nbytes)[:nbytes]
        try:
            return buffer[: drive.volume.read(number, offset, [buffer])]
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.counts["errors"] += 1
            return buffer[:0]

    def read_chunk(self, drive: Drive, number: int, block: int, nbytes: int, checksum: int) -> memoryview | None:
        """Read a chunk and the padding of its last block into new memory. Returns None if its checksum is wrong."""
        view = self.read_bytes(drive, number, block * BLOCK_NBYTES, blocks_of(nbytes) * BLOCK_NBYTES)
        whole = len(view) >= nbytes and xxhash.xxh3_64_intdigest(view[:nbytes]) == checksum
        return view if whole else None

    def fail(self, drive: Drive, error: Exception) -> None:
        """Turn a drive off; `Workers.watch` retries it later. No effect if the drive is off already."""
        if drive.state == "off":
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if reason != drive.reason:
            log.warning("SSD path %s is off: %s", drive.volume.path, reason)
        drive.state, drive.reason = "off", reason
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
        self.refuse_writes_if_off()
        drive.notify()

    def fail_later(self, drive: Drive, error: Exception) -> None:
        with self.lock:
            self.fail(drive, error)
