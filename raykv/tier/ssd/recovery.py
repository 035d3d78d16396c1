"""Recovery: finds the chunks on a drive when the drive starts. See `raykv.tier.ssd.tier`.

First, several threads read all segments: the summary of a sealed segment, or the records of all batches of an unsealed
one. In an unsealed segment, chunks with a wrong checksum (a torn write) are left out. Then one thread enters the chunks
into the index, the newest segment first. A chunk is left out if its key has a newer chunk or a newer tombstone.

Each step is a task, which a thread of the drive runs. An error turns the drive off.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from raykv.errors import ConfigError
from raykv.tier.segments.format import BLOCK_NBYTES, Array, Record, living, raw_keys, read_segment
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.ssd.state import Drive, Shared

log = logging.getLogger(__name__)


class Recovery:
    def __init__(self, shared: Shared, drive: Drive) -> None:
        """Read nothing yet. Recovery begins with the task `list_segments`, or `open` if the directory is closed."""
        self._shared, self._drive = shared, drive
        self._unread = 0
        self._found: list[tuple[int, Record, bool]] = []
        self._deleted, self._dropped = set[bytes](), set[bytes]()  # tombstones of newer segments than the current one

    def open(self) -> None:
        self._drive.volume.open()
        self.list_segments()

    def list_segments(self) -> None:
        drive = self._drive
        numbers, emptied = drive.volume.numbers(), drive.drop_everything
        if emptied:
            for number in numbers:
                drive.volume.remove(number)
            numbers = {}
        with self._shared.lock:
            drive.drop_everything = drive.drop_everything and not emptied
            self._unread, self._found, epoch = len(numbers), [], drive.epoch
            drive.tasks.extend(partial(self._read, number, nbytes, epoch) for number, nbytes in numbers.items())
            if not numbers:
                drive.tasks.append(partial(self._enter_all, epoch))
            drive.notify()

    def _read(self, number: int, file_nbytes: int, epoch: int) -> None:
        """Read one segment's records. The task that reads the last segment calls `_enter_all`."""
        drive, found = self._drive, self._records(number, file_nbytes)
        whole = file_nbytes == drive.config.segment_nbytes
        if found is None and not whole:
            drive.volume.remove(number)
        elif not whole:
            with suppress(OSError):  # if the disk is full, the file stays short
                drive.volume.make(number)
        with self._shared.lock:
            if epoch != drive.epoch:
                return
            if found is not None:
                self._found.append((number, *found))
            elif whole:
                drive.log.add_free(number)
            self._unread -= 1
            last = not self._unread
        if last:
            self._enter_all(epoch)

    def _records(self, number: int, file_nbytes: int) -> tuple[Record, bool] | None:
        """Read a segment with `read_segment`. If it is not sealed, leave out its damaged chunks."""
        shared, drive = self._shared, self._drive
        read, blocks = partial(shared.read_bytes, drive, number), file_nbytes // BLOCK_NBYTES
        found = read_segment(read, segment_blocks=drive.segment_blocks, blocks_there=blocks)
        if found is None or found[1]:
            return found
        record = found[0]
        chunks = record.entries[["block", "nbytes", "checksum"]].tolist()
        whole = [shared.read_chunk(drive, number, *chunk) is not None for chunk in chunks]
        return record._replace(entries=record.entries[np.array(whole, np.bool_)]), False

    def _enter_all(self, epoch: int) -> None:
        shared, drive = self._shared, self._drive
        self._deleted, self._dropped = set(), set()
        numbers: dict[bytes, int | None] = {}
        found, self._found = sorted(self._found, key=lambda each: each[1].sequence, reverse=True), []
        for number, record, sealed in found:
            for text in record.texts:
                if text not in numbers:
                    numbers[text] = shared.groups.number(text)  # not under the tier's lock: acquires the node's
            entries = living(record)
            with shared.lock:
                if epoch != drive.epoch:
                    return
                self._enter(number, record, entries, [numbers[text] for text in record.texts], sealed=sealed)
            self._deleted.update(raw_keys(record.deleted["key"]))
            self._dropped.update(record.dropped_texts())
        with shared.lock:
            if epoch == drive.epoch:
                self._finish()

    def _enter(
        self, number: int, record: Record, entries: Array, groups: Sequence[int | None], *, sealed: bool
    ) -> None:
        """Enter a segment's chunks into the index. `groups`: the group number of each of `record.texts`, or None."""
        shared, drive, index = self._shared, self._drive, self._shared.index
        segment = drive.log.add_found(number, sealed=sealed, record=record)
        dropped = self._dropped | drive.dropped.keys()
        known = [group is not None and text not in dropped for group, text in zip(groups, record.texts, strict=True)]
        keep = np.array(known, np.bool_)[entries["group"]]
        keep &= (entries["expires_s"] == 0) | (entries["expires_s"] > time.time())
        for deleted in filter(None, (self._deleted, drive.deleted)):  # deleted by newer segments or by callers
            keep &= np.array([key not in deleted for key in raw_keys(entries["key"])], np.bool_)
        entries = entries[keep]
        existing = index.find_all(np.ascontiguousarray(entries["key"]))
        elsewhere = (existing >= 0) & (index.segment[existing] // SEGMENTS != drive.number)
        for key in raw_keys(entries["key"][elsewhere]):
            drive.deleted[key] = None  # the index has a copy on another drive: delete this copy
        entries = entries[existing < 0]
        numbers = np.array([group or 0 for group in groups], np.uint16)[entries["group"]]
        shared.insert(drive, segment, entries, numbers)

    def _finish(self) -> None:
        shared, drive = self._shared, self._drive
        if drive.drop_everything:
            shared.fail(drive, ConfigError("too many chunks were deleted during the start; it is emptied"))
            return
        if drive.reason:
            log.info("SSD path %s is on again", drive.volume.path)
        drive.state, drive.reason = "on", ""
        drive.notify()
