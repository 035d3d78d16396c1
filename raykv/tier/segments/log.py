"""Which segments of one volume are free, being filled, full; where the next batch goes; what is reclaimed. Pure.

    absent -> free -> open -> closed -> sealing -> sealed -> leaving -> free
           made    begin   no room   to_seal   sealed    victim     wiped

Segments are reclaimed in the order of their sequence, so what is told to be gone stays so: a record that says it lives
longer than all that it speaks against. Only a segment in which nothing lives and nothing is told may go before its
turn. Not thread-safe.

Source: log-structured file systems (Rosenblum and Ousterhout, 1992), without their choice of the emptiest segment:
a cache may drop what is cold in the oldest one instead of moving it.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from raykv.tier.segments.format import BATCH, BLOCK_NBYTES, Record, blocks_of, joined, record_blocks

State = Literal["free", "open", "closed", "sealing", "sealed", "leaving"]

MOVED_SHARE: Final = 4
"""At most one byte is moved on for so many that were handed in: each costs 1.25 bytes on the drive, and records."""
MOVED_AT_ONCE: Final = 0.5
"""And at most so much of a segment, or reclaiming it would hardly give room."""
SPARE_SEGMENTS: Final = 2
"""With fewer segments free, one is made or reclaimed: one to be filled next, and one that what is moved can go to."""


@dataclass(eq=False)
class Batch:
    """A batch that has its place, and is being written.

    Attributes:
        segment: Where it lies.
        start: First block.
        record: What its record says.
        content: What the owner needs to know when it is written.
        finished: Whether it is on the volume; batches are told of in order.
    """

    segment: "Segment"
    start: int
    record: Record
    content: Any
    finished: bool = False


@dataclass(eq=False)
class Segment:
    """A segment's state.

    Attributes:
        number: Of its file.
        sequence: Counts the segments of the volume as they are begun; 0 while it is free.
        live_nbytes: Bytes of chunks in it that the index names.
        rows: Of the index that were entered for it. Some may belong to another one by now.
        holds: Readers that are reading from it.
        tells: Whether a record in it tells of keys or quota groups that are gone.
        end: Block at which the next batch begins.
        records: Of the batches that are on the volume, until it is sealed.
    """

    number: int
    sequence: int = 0
    state: State = "free"
    live_nbytes: int = 0
    rows: "array[int]" = field(default_factory=lambda: array("i"))
    holds: int = 0
    tells: bool = False
    end: int = 0
    placed: int = 0
    records: list[Record] = field(default_factory=list)
    flying: deque[Batch] = field(default_factory=deque)
    entries: int = 0
    gone: int = 0
    dropped: int = 0
    texts: set[bytes] = field(default_factory=set)


class Log:
    """The segments of one volume.

    Attributes:
        limit: The most segments there may be.
        open: The segment that is being filled.
        leaving: The one that is being reclaimed.
        written_nbytes, moved_nbytes: Of chunks that were handed in, and that were moved on; in whole blocks.
    """

    def __init__(self, *, limit: int, segment_blocks: int, incarnation: int) -> None:
        self.limit, self.segment_blocks, self.incarnation = limit, segment_blocks, incarnation
        self.segments: dict[int, Segment] = {}
        self.open: Segment | None = None
        self.leaving: Segment | None = None
        self._sequence = self._first_absent = 0
        self._free: set[int] = set()
        self._closed: list[Segment] = []
        self._in_use: dict[int, Segment] = {}  # by sequence
        self._sorted = True
        self.written_nbytes = self.moved_nbytes = 0

    # -- which segments there are -----------------------------------------------------------------------------------

    def free(self) -> list[int]:
        """Numbers of segments that may be begun now: wiped, and nobody reads from them."""
        return [number for number in self._free if not self.segments[number].holds]

    def absent(self) -> int | None:
        """Number of a segment that may be made; None when there are as many as there may be."""
        if len(self.segments) >= self.limit:
            return None
        while self._first_absent in self.segments:
            self._first_absent += 1
        return self._first_absent

    def made(self, number: int) -> None:
        """There is a segment now, in which nothing is."""
        self.segments[number] = Segment(number)
        self._free.add(number)

    def gone(self, number: int) -> None:
        """The file of a free segment was removed."""
        del self.segments[number]
        self._free.discard(number)
        self._first_absent = min(self._first_absent, number)

    def found(self, number: int, sequence: int, *, sealed: bool, record: Record) -> Segment:
        """A segment was found at the start. If it is not sealed, it is to be sealed."""
        segment = Segment(number, sequence, "sealed" if sealed else "closed")
        segment.tells = bool(len(record.gone) or len(record.dropped))
        if not sealed:
            segment.records = [record]
            self._closed.append(segment)
        self.segments[number] = self._in_use[sequence] = segment
        self._sorted = False
        self._sequence = max(self._sequence, sequence)
        return segment

    def in_order(self) -> list[Segment]:
        """Segments with something in them, oldest first."""
        if not self._sorted:
            self._in_use, self._sorted = dict(sorted(self._in_use.items())), True
        return list(self._in_use.values())

    # -- filling ----------------------------------------------------------------------------------------------------

    def begin(self, *, keep: int = 0) -> Segment | None:
        """Open a free segment, if more than `keep` are free; the present one gets no more batches."""
        free = self.free()
        if len(free) <= keep:
            return None
        if self.open is not None:
            self.open.state = "closed"
            self._closed.append(self.open)
        self._sequence += 1
        self.open = Segment(min(free), self._sequence, "open")
        self._free.discard(self.open.number)
        self.segments[self.open.number] = self._in_use[self._sequence] = self.open
        return self.open

    def fits(self, *, blocks: int, entries: int, gone: int = 0, dropped: int = 0, texts: set[bytes]) -> bool:
        """Whether a batch with chunks of so many blocks fits into the open segment, and its summary with it."""
        segment = self.open
        if segment is None:
            return False
        own = record_blocks(
            entries=entries, gone=gone, dropped=dropped, texts=len(texts), texts_nbytes=sum(map(len, texts))
        )
        together = segment.texts | texts
        summary = record_blocks(
            entries=segment.entries + entries,
            gone=segment.gone + gone,
            dropped=segment.dropped + dropped,
            texts=len(together),
            texts_nbytes=sum(map(len, together)),
        )
        return segment.end + own + blocks + summary <= self.segment_blocks

    def place(
        self,
        *,
        entries: npt.NDArray[Any],
        gone: npt.NDArray[Any],
        dropped: npt.NDArray[Any],
        texts: tuple[bytes, ...],
        content: Any,
    ) -> Batch:
        """Give a batch its place in the open segment, which it must fit into; fills in `block` and `batch`.

        Args:
            entries: Array of ENTRY; the chunks lie one after another in this order.
            texts: All different.
        """
        segment = self.open
        assert segment is not None
        start, number = segment.end, segment.placed
        own = record_blocks(
            entries=len(entries),
            gone=len(gone),
            dropped=len(dropped),
            texts=len(texts),
            texts_nbytes=sum(map(len, texts)),
        )
        block = start + own
        for place, nbytes in enumerate(entries["nbytes"].tolist()):
            entries["block"][place] = block
            block += blocks_of(nbytes)
        for part in (entries, gone, dropped):
            part["batch"] = number
        record = Record(
            kind=BATCH,
            incarnation=self.incarnation,
            sequence=segment.sequence,
            number=number,
            next_block=block,
            segment_blocks=self.segment_blocks,
            texts=texts,
            entries=entries,
            gone=gone,
            dropped=dropped,
        )
        segment.end, segment.placed = block, number + 1
        segment.entries += len(entries)
        segment.gone += len(gone)
        segment.dropped += len(dropped)
        segment.texts.update(texts)
        segment.tells = segment.tells or bool(len(gone) or len(dropped))
        batch = Batch(segment, start, record, content)
        segment.flying.append(batch)
        return batch

    def finished(self, batch: Batch) -> list[Batch]:
        """A batch is on the volume.

        Returns:
            Batches that a start would find now, in order: those before which nothing is missing in their segment.
        """
        batch.finished, ready = True, []
        flying = batch.segment.flying
        while flying and flying[0].finished:
            ready.append(flying.popleft())
            batch.segment.records.append(ready[-1].record)
        return ready

    def to_seal(self) -> Segment | None:
        """Take a segment that gets no more batches, and all of whose batches are on the volume."""
        for segment in self._closed:
            if not segment.flying:
                self._closed.remove(segment)
                segment.state = "sealing"
                return segment
        return None

    def summary(self, segment: Segment) -> Record:
        """The summary to seal it with."""
        return joined(segment.records)

    def sealed(self, segment: Segment) -> None:
        """Its summary is on the volume."""
        segment.state, segment.records = "sealed", []

    # -- reclaiming -------------------------------------------------------------------------------------------------

    def wants_space(self) -> bool:
        """Whether a segment should be made or reclaimed, so that writers need not wait."""
        return self.leaving is None and len(self.free()) < SPARE_SEGMENTS

    def victim(self) -> Segment | None:
        """Take the segment to be reclaimed next; one at a time. None while none can be."""
        if self.leaving is not None:
            return None
        full = self.in_order()
        chosen = next(
            (each for each in full if each.state == "sealed" and not each.live_nbytes and not each.tells), None
        )
        if chosen is None and full and full[0].state == "sealed":
            chosen = full[0]
        if chosen is not None:
            chosen.state, self.leaving = "leaving", chosen
        return chosen

    def may_move_nbytes(self) -> int:
        """How much of a segment may be moved on now."""
        most = int(MOVED_AT_ONCE * self.segment_blocks) * BLOCK_NBYTES
        return max(0, min(most, self.written_nbytes // MOVED_SHARE - self.moved_nbytes))

    def wiped(self, segment: Segment) -> None:
        """Nothing of it would be found by a start any more. It may be begun as soon as nobody reads from it."""
        self.segments[segment.number] = Segment(segment.number, holds=segment.holds)
        self._free.add(segment.number)
        del self._in_use[segment.sequence]
        self.leaving = None


def second_chance(
    reads: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], *, most_nbytes: int
) -> npt.NDArray[np.int64]:
    """Which chunks of a segment that is reclaimed are moved on.

    Args:
        reads: Of each chunk since it was written to this segment.
        nbytes: Of each chunk, in whole blocks.

    Returns:
        Places of those that were read, the most often read first, as many as make up at most `most_nbytes`.
    """
    order = np.argsort(-reads, kind="stable")
    order = order[reads[order] > 0]
    kept: npt.NDArray[np.int64] = order[np.cumsum(nbytes[order]) <= most_nbytes]
    return kept
