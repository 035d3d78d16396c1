"""What a start finds on one path of an SSD tier. See `raykv.tier.ssd.drive`.

One piece of each segment is read, its summary; an unsealed segment is walked, and its chunks are compared with their
checksums, which cuts off a torn tail. Segments come in no order: of two entries of one key the one with the newer
sequence stays, and what a record tells to be gone holds against all that is older, found before or after.

Everything is under the tier's lock, but for the methods that say "on a thread": these wait for the disk.
"""

import errno
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from raykv.memory.copying import checksum_of
from raykv.tier.segments.format import BLOCK_NBYTES, ENTRY, TAIL_BLOCKS, Record, blocks_of, living, read_segment
from raykv.tier.segments.index import SEGMENTS
from raykv.tier.segments.log import Segment
from raykv.tier.segments.requests import raw_keys
from raykv.tier.segments.volume import aligned
from raykv.types import Bits, Rows

if TYPE_CHECKING:
    from raykv.tier.ssd.drive import Drive

log = logging.getLogger(__name__)

LAST: Final = 1 << 63
"""Above the sequence of every segment."""
VERIFY_NBYTES: Final = 8 << 20
"""Chunks of an unsealed segment up to this size are compared in one buffer."""


class Scan:
    """See the module.

    Attributes:
        forget_all: Nothing that is there is to be believed.
    """

    def __init__(self, drive: "Drive") -> None:
        self._drive, self.common = drive, drive.common
        self._unscanned = 0
        self._told_gone: dict[bytes, int] = {}
        self._told_dropped: dict[bytes, int] = {}
        self._doubtful: list[tuple[Segment, Record, Any, Sequence[int | None]]] = []
        self.forget_all = False

    def look(self) -> None:
        """On a thread: which segments are there."""
        try:
            numbers = self._drive.volume.numbers()
        except OSError as error:
            with self.common.lock:
                self._drive.fail(error)
            return
        with self.common.lock:
            self._unscanned = len(numbers)
            self._doubtful = []
            for number, nbytes in numbers.items():
                self._drive.tasks.append(partial(self._scan, number, nbytes))
            if not numbers:
                self._started()
            self._drive.notify()

    def _started(self) -> None:
        if self._drive.logged:
            log.info("SSD path %s is on again", self._drive.volume.path)
        self._drive.state, self._drive.reason, self._drive.logged = "on", "", ""
        self.forget_all = False
        self.settle()
        self.common.tell()

    def _others_start(self) -> bool:
        return any(drive.state == "starting" for drive in self.common.drives if drive is not self._drive)

    def settle(self) -> None:
        """Once no path starts any more: decide on each about what was found on another one, too.

        Not before: until all of a path was read, what it tells to be gone is not known, and its copy may be stale.
        """
        if not any(drive.state == "starting" for drive in self.common.drives):
            for drive in self.common.drives:
                drive.scan.decide()

    def decide(self) -> None:
        """See `settle`."""
        doubtful, self._doubtful = self._doubtful, []
        segments = self._drive.log.segments
        for segment, record, entries, groups in doubtful if self._drive.state == "on" else ():
            if segments.get(segment.number) is segment and segment.sequence == record.sequence:
                self._enter(segment, record, entries, groups)
        self._told_gone, self._told_dropped = {}, {}

    def forget(self, keys: Iterable[bytes] = (), text: bytes = b"") -> bool:
        """These were deleted, or this quota group dropped, just now: what is not entered yet will not be.

        Returns:
            Whether there may be such on this path.
        """
        if self._drive.state == "off" or not (self._doubtful or self._drive.state == "starting"):
            return False
        self._told_gone.update(dict.fromkeys(keys, LAST))
        if text:
            self._told_dropped[text] = LAST
        return True

    def _scan(self, number: int, file_nbytes: int) -> None:
        """On a thread: read one segment's records, and enter what they say."""
        with self.common.lock:
            epoch, forget = self._drive.epoch, self.forget_all
        found, usable = None, True
        try:
            found = None if forget else self._records(number, file_nbytes)
            if forget:
                self._drive.upkeep.wipe_blocks(number)
            if file_nbytes != self._drive.config.segment_nbytes:
                self._drive.volume.make(number)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._drive.fail_in(epoch, error)
                return
            usable = found is not None
        if not usable:
            self._drive.volume.remove(number)  # nothing is in it, and there is no room for it
        entries, groups = np.zeros(0, ENTRY), list[int | None]()
        if found is not None:
            entries = living(found[0])
            groups = [self.common.groups.number(text) for text in found[0].texts]
        with self.common.lock:
            if epoch != self._drive.epoch:
                return
            if found is not None:
                self._take_in(number, found[0], entries, groups, sealed=found[1])
            elif usable:
                self._drive.log.made(number)
            self._unscanned -= 1
            if not self._unscanned:
                self._started()
            self._drive.notify()

    def _records(self, number: int, file_nbytes: int) -> tuple[Record, bool] | None:
        """On a thread: what a segment's records say; of an unsealed one, without its torn tail."""
        buffer = aligned(TAIL_BLOCKS * BLOCK_NBYTES)

        def read(offset: int, nbytes: int) -> memoryview:
            nonlocal buffer
            if len(buffer) < nbytes:
                buffer = aligned(nbytes)
            return buffer[: self._read(number, offset, buffer[:nbytes])]

        found = read_segment(read, segment_blocks=self._drive.segment_blocks, blocks_there=file_nbytes // BLOCK_NBYTES)
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
            if size > self._drive.config.segment_nbytes:
                continue
            if size > len(buffer):
                buffer = aligned(size)
            got = self._read(number, block * BLOCK_NBYTES, buffer[:size])
            whole[place] = got >= nbytes and checksum_of([buffer[:nbytes]]) == checksum
        return whole

    def _read(self, number: int, offset: int, target: memoryview) -> int:
        """On a thread: read, and pass over what the drive cannot read: it is not there, then."""
        try:
            return self._drive.volume.read(number, offset, [target])
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.common.errors += 1
            return 0

    def _take_in(
        self, number: int, record: Record, entries: Any, groups: Sequence[int | None], *, sealed: bool
    ) -> None:
        """Enter what a segment has, unless another one knows better.

        Args:
            entries: Those of the record that live.
            quota groups: Number of each of the record's texts.
        """
        common, sequence = self.common, record.sequence
        segment = self._drive.log.found(number, sequence, sealed=sealed, record=record)
        common.texts.update(
            {group: text for group, text in zip(groups, record.texts, strict=True) if group is not None}
        )
        self._apply_told(record)
        self._enter(segment, record, entries, groups)

    def _enter(self, segment: Segment, record: Record, entries: Any, groups: Sequence[int | None]) -> None:
        index, common, sequence = self.common.index, self.common, record.sequence
        keep = (entries["expires_s"] == 0) | (entries["expires_s"] > common.wall())
        for place, (group, text) in enumerate(zip(groups, record.texts, strict=True)):
            if group is None or text in self._drive.dropped or self._told_dropped.get(text, 0) > sequence:
                keep &= entries["group"] != place
        if self._told_gone or self._drive.gone:
            told = [
                key in self._drive.gone or self._told_gone.get(key, 0) > sequence for key in raw_keys(entries["key"])
            ]
            keep &= ~np.array(told, np.bool_)
        entries = entries[keep]
        existing = index.look_all(np.ascontiguousarray(entries["key"]))
        mine = (existing >= 0) & (index.segment[existing] // SEGMENTS == self._drive.number)
        elsewhere = (existing >= 0) & ~mine
        if elsewhere.any() and self._others_start():
            self._doubtful.append((segment, record, entries[elsewhere], groups))
        else:
            for place in np.flatnonzero(elsewhere).tolist():
                self._drive.gone[entries["key"][place].tobytes()] = None  # it is on another path, too
        older = mine & (self._sequences(existing) < sequence)
        common.forget(existing[older], tell=False)
        fresh = (existing < 0) | older
        entries = entries[fresh]
        rows = index.take(len(entries))
        entries = entries[: len(rows)]
        numbers = np.array([group or 0 for group in groups], np.uint16)[entries["group"]]
        index.enter(rows, entries, numbers, self._drive.number * SEGMENTS + segment.number)
        self._drive.add(segment, rows)
        common.note(entries["key"])

    def _apply_told(self, record: Record) -> None:
        """What a record tells to be gone is, as far as it is older."""
        index, sequence = self.common.index, record.sequence
        if len(record.gone):
            for key in raw_keys(record.gone["key"]):
                self._told_gone[key] = max(sequence, self._told_gone.get(key, 0))
            rows = np.unique(index.look_all(np.ascontiguousarray(record.gone["key"])))
            rows = rows[(rows >= 0) & (index.segment[rows] // SEGMENTS == self._drive.number)]
            self.common.forget(rows[self._sequences(rows) < sequence], tell=False)
        for group in np.unique(record.dropped["group"]).tolist():
            text = record.texts[group]
            self._told_dropped[text] = max(sequence, self._told_dropped.get(text, 0))
            for number, known in self.common.texts.items():
                if known == text:
                    here = index.used()
                    bits = index.columns.namespace[here] == number
                    rows = index.rows_where(bits & (index.segment[here] // SEGMENTS == self._drive.number))
                    self.common.forget(rows[self._sequences(rows) < sequence], tell=False)

    def _sequences(self, rows: Rows) -> Any:
        """Sequence number of the segment that each row's chunk lies in; nothing sensible for rows elsewhere."""
        segments = self._drive.log.segments
        numbers = (self.common.index.segment[rows] % SEGMENTS).tolist()
        return np.array([segments[number].sequence if number in segments else 0 for number in numbers], np.int64)
